"""Which dtype does autocast choose for an operation? Ask it.

Autocast sorts operations into a few classes. The lists differ between devices and change between
releases, so nothing here knows them: `classify` runs an operation on FP32, 16-bit and mixed
inputs, with and without autocast, and compares.
"""

import html
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from .dryrun import CAST_BY_AUTOCAST, DryRun, dry_run
from .tables import as_text, short


class Policy(Enum):
    """What autocast does to an operation's inputs. `sentence` says it in words."""

    LOWER_PRECISION = "lower precision", "Autocast casts FP32 inputs down: it runs in 16 bits."
    FP32 = "FP32", "Autocast has it computed in FP32: 16-bit inputs give an FP32 result."
    WIDEST = "widest", "Autocast casts mixed inputs up to the widest dtype among them."
    AS_INPUT = "as input", "Autocast leaves it alone: it runs in whatever dtype its inputs have."
    BANNED = "banned", "Autocast refuses it with an error, because 16 bits would be unsafe."

    def __new__(cls, label: str, sentence: str):
        member = object.__new__(cls)
        member._value_ = label
        member.sentence = sentence
        return member

    def __str__(self) -> str:
        return self.value

    def __repr__(self) -> str:
        return f"{type(self).__name__}.{self.name}"


def classify(
    fn: Callable[..., Any],
    *args: Any,
    device_type: str = "cuda",
    dtype: torch.dtype = torch.float16,
    **kwargs: Any,
) -> Policy:
    """Find out what autocast does with `fn(*args, **kwargs)`.

    `fn` is a function or a module; its arguments are ordinary tensors (on any device) and plain
    values. Their shapes count, their values and floating dtypes do not: `fn` is run on fake copies
    in FP32, in `dtype`, and mixed, each with autocast on and off, as `dry_run` does it. A module's
    parameters take part like one more input. FP64 and integer tensors are kept, as autocast does.

    The rules, in this order; "gives" is the dtype of the first tensor that comes out:

    - BANNED: raises under autocast whatever the dtypes, and runs without it.
    - LOWER_PRECISION: FP32 inputs give 16 bits, and only under autocast.
    - FP32: 16-bit inputs give FP32, and only under autocast.
    - Where that does not tell (a result of booleans, a cast at the end of `fn`) the kernels below
      autocast do: LOWER_PRECISION if it made some of them give 16 bits from FP32 inputs, FP32 if it
      made some of them give FP32 from 16-bit inputs.
    - WIDEST: on mixed inputs autocast inserts casts to FP32. `add` does not count: it promotes
      mixed inputs by ordinary type promotion, with autocast or without.
    - AS_INPUT: autocast makes no difference.

    A function of several operations gets the class that its result shows.

    Raises `TypeError` if `fn` cannot be called, `ValueError` if it cannot be asked: it fails, or it
    needs values (`.item()`), which fake tensors lack.
    """
    if not callable(fn):
        raise TypeError(f"fn is {fn!r}; classify needs a function or a module to call")
    with warnings.catch_warnings(action="ignore"), dry_run(device_type, dtype) as dry:
        return _probe(
            dry, dtype, fn, args, kwargs, getattr(fn, "__name__", type(fn).__name__), ""
        ).policy


def op_table(device_type: str = "cuda", dtype: torch.dtype = torch.float16) -> "OpTable":
    """Classify about a hundred operations of PyTorch for one device type, by asking autocast.

    Every row holds what `classify` finds and what comes out for FP32, 16-bit and mixed inputs. An
    operation that cannot be asked has no policy and says why in its note. The table prints, shows
    as HTML, gives a row by name (`table["softmax"]`), and `table.compare(other)` tells two apart.

    Raises as `dry_run` does.
    """
    catalogue = [*_catalogue()]
    rows = []
    with warnings.catch_warnings(action="ignore"), dry_run(device_type, dtype) as dry:
        for name, group, fn, args in catalogue:
            try:
                rows.append(_probe(dry, dtype, fn, args, {}, name, group))
            except ValueError as error:
                rows.append(Op(name, group, None, "?", "?", "?", (), str(error)))
    for i, (_, _, fn, args) in enumerate(catalogue):
        if rows[i].policy is Policy.AS_INPUT and rows[i].mixed:
            rows[i] = _confirm_mixed(rows[i], dtype, device_type, fn, args)
    return OpTable(device_type, dtype, rows)


@dataclass(frozen=True)
class Op:
    """One row of `op_table`.

    `fp32`, `half` and `mixed` are what comes out under autocast for FP32, 16-bit and mixed inputs;
    `kernels` are the ATen kernels that ran below autocast on FP32 inputs, casts and views left out.
    """

    name: str
    group: str
    policy: Policy | None
    fp32: str
    half: str
    mixed: str
    kernels: tuple[str, ...]
    note: str


class OpTable:
    """The answer of `op_table`: a sequence of `Op` rows, also found by name."""

    def __init__(self, device_type: str, dtype: torch.dtype, rows: Sequence[Op]):
        self.device_type = device_type
        self.dtype = dtype
        self.rows = tuple(rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Op]:
        return iter(self.rows)

    def __getitem__(self, name: str) -> Op:
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(f"no operation named {name!r}; see [op.name for op in table]")

    def compare(self, other: "OpTable") -> "OpDifferences":
        """The operations that the two tables treat differently, and why, in words."""
        theirs = {row.name: row for row in other}
        pairs = [(row, theirs[row.name]) for row in self if row.name in theirs]
        return OpDifferences(
            self.device_type,
            other.device_type,
            [
                OpDifference(a.name, a.policy, b.policy, _reason(a, b, self, other))
                for a, b in pairs
                if _differ(a, b)
            ],
        )

    def _cells(self) -> tuple[list[str], list[list[str]]]:
        half = short(self.dtype)
        header = ["operation", "group", "policy", "FP32 in", f"{half} in", "mixed in", "note"]
        return header, [
            [r.name, r.group, _label(r.policy), r.fp32, r.half, r.mixed, r.note] for r in self.rows
        ]

    def __repr__(self) -> str:
        title = f"{len(self)} operations under autocast({self.device_type!r}, {self.dtype})"
        return title + "\n" + as_text(*self._cells())

    def _repr_html_(self) -> str:
        return _as_html(*self._cells())


@dataclass(frozen=True)
class OpDifference:
    """One operation that two device types treat differently."""

    name: str
    left: Policy | None
    right: Policy | None
    reason: str


class OpDifferences:
    """The answer of `OpTable.compare`: a sequence of `OpDifference` rows."""

    def __init__(self, left: str, right: str, rows: Sequence[OpDifference]):
        self.left, self.right = left, right
        self.rows = tuple(rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[OpDifference]:
        return iter(self.rows)

    def _cells(self) -> tuple[list[str], list[list[str]]]:
        return ["operation", self.left, self.right, "why"], [
            [row.name, _label(row.left), _label(row.right), row.reason] for row in self.rows
        ]

    def __repr__(self) -> str:
        return as_text(*self._cells())

    def _repr_html_(self) -> str:
        return _as_html(*self._cells())


# --- probing -----------------------------------------------------------------------------------

_NO_FAKE_ANSWER = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
_CAST = torch.ops.aten._to_copy.default


class _Kernels(TorchDispatchMode):
    """Writes down the kernels that run below autocast, and the dtypes that they give."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []
        self.given: Counter[torch.dtype] = Counter()
        self.unanswered: Exception | None = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is not _CAST and func.namespace == "aten" and not func.is_view:
            self.names.append(func._overloadpacket.__name__)
        try:
            result = func(*args, **(kwargs or {}))
        except _NO_FAKE_ANSWER as error:
            self.unanswered = error
            raise
        self.given.update(t.dtype for t in tree_leaves(result) if isinstance(t, torch.Tensor))
        return result


@dataclass
class _Run:
    """One call of `fn`: the dtype that came out, or the error, and the kernels."""

    kernels: _Kernels
    returned: torch.dtype | None = None
    error: Exception | None = None

    def __str__(self) -> str:
        if self.error is not None:
            return "raises"
        if self.returned is not None:
            return short(self.returned)
        return "no tensor" if self.kernels.unanswered is None else "?"


def _run(
    dry: DryRun, dtype: torch.dtype, fn: Callable, args: tuple, kwargs: dict, autocast: bool
) -> _Run:
    run = _Run(_Kernels())
    try:
        with torch.autocast(dry.device_type, dtype, autocast), run.kernels:
            result = fn(*args, **kwargs)
    except Exception as error:
        # One built-in operation is one decision of autocast: it was made before the kernel gave up.
        if not (run.kernels.unanswered and isinstance(fn, _BUILTIN)):
            run.error = error
    else:
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        run.returned = tensors[0].dtype if tensors else None
    return run


_BUILTIN = (BuiltinFunctionType, MethodDescriptorType)


def _probe(
    dry: DryRun,
    dtype: torch.dtype,
    fn: Callable,
    args: tuple,
    kwargs: dict,
    name: str,
    group: str,
) -> Op:
    leaves, spec = tree_flatten((args, kwargs))
    floats = [i for i, x in enumerate(leaves) if _is_castable(x)]
    has_weights = isinstance(fn, nn.Module) and any(map(_is_castable, fn.parameters()))

    def runs(first: torch.dtype, rest: torch.dtype) -> tuple[_Run, _Run]:
        """With and without autocast: the first floating input in one dtype, the rest in another."""

        def run(autocast: bool) -> _Run:
            fakes = [
                dry.to_device(x, first if i in floats[:1] else rest) for i, x in enumerate(leaves)
            ]
            called = dry.to_device(fn, rest) if isinstance(fn, nn.Module) else fn
            return _run(dry, dtype, called, *tree_unflatten(fakes, spec), autocast)

        return run(True), run(False)

    fp32, plain_fp32 = runs(torch.float32, torch.float32)
    half, plain_half = runs(dtype, dtype)
    mixed = []
    if len(floats) + has_weights > 1:
        mixed = [runs(torch.float32, dtype), runs(dtype, torch.float32)]

    if fp32.error is None:
        policy = _decide(dtype, (fp32, plain_fp32), (half, plain_half), mixed)
    elif half.error and not plain_fp32.error and not fp32.kernels.unanswered:
        policy = Policy.BANNED
    else:
        raise ValueError(
            f"{name} cannot be asked: {_why(fp32)}. It must run on the arguments given here, with "
            "every tensor that it needs among them, and without reading values."
        ) from fp32.error
    return Op(
        name,
        group,
        policy,
        str(fp32),
        str(half),
        " or ".join(dict.fromkeys(str(run) for run, _ in mixed)),
        tuple(fp32.kernels.names),
        _note(policy, dtype, fp32, half, mixed),
    )


def _decide(
    dtype: torch.dtype,
    fp32: tuple[_Run, _Run],
    half: tuple[_Run, _Run],
    mixed: list[tuple[_Run, _Run]],
) -> Policy:
    """The rules of `classify`; each pair is one call with autocast and the same without."""

    def returns(pair: tuple[_Run, _Run], wanted: torch.dtype) -> bool:
        run, plain = pair
        return run.returned == wanted and plain.returned != wanted

    def computes(pair: tuple[_Run, _Run], wanted: torch.dtype) -> bool:
        run, plain = pair
        return run.error is None and run.kernels.given[wanted] > plain.kernels.given[wanted]

    if returns(fp32, dtype):
        return Policy.LOWER_PRECISION
    if returns(half, torch.float32):
        return Policy.FP32
    if computes(fp32, dtype):
        return Policy.LOWER_PRECISION
    if computes(half, torch.float32):
        return Policy.FP32
    if any(computes(pair, torch.float32) for pair in mixed):
        return Policy.WIDEST
    return Policy.AS_INPUT


def _note(policy: Policy, dtype: torch.dtype, fp32: _Run, half: _Run, mixed: list) -> str:
    """What the dtypes in a row do not say by themselves."""
    if policy is Policy.BANNED:
        return _why(fp32)
    if fp32.kernels.unanswered:
        return "judged by the casts before its kernel, which cannot run on fake tensors"
    if policy is Policy.LOWER_PRECISION and fp32.returned != dtype:
        return f"16 bits inside, {fp32} comes out"
    if policy is Policy.FP32 and half.returned != torch.float32:
        return f"FP32 inside, {half} comes out"
    if policy is Policy.WIDEST and all(plain.error for _, plain in mixed):
        return "mixed inputs raise without autocast"
    return ""


def _confirm_mixed(op: Op, dtype: torch.dtype, device_type: str, fn: Callable, args: tuple) -> Op:
    """Check an AS_INPUT row's answer for mixed inputs with real kernels.

    Nobody casts them, so the kernel has the last word, and fake kernels accept mixed dtypes that
    some real ones refuse. The CPU's kernels can be run here.
    """
    leaves, spec = tree_flatten(args)
    first = [i for i, x in enumerate(leaves) if _is_castable(x)][0]

    def real(i: int, x: Any, wide_first: bool) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        narrow = _is_castable(x) and (i == first) != wide_first
        return torch.zeros(x.shape, dtype=dtype if narrow else x.dtype, device="cpu")

    came_out = []
    with unset_fake_temporarily(), torch.autocast("cpu", enabled=False):
        for wide_first in (True, False):
            zeros = [real(i, x, wide_first) for i, x in enumerate(leaves)]
            try:
                result = fn(*tree_unflatten(zeros, spec))
                came_out.append(short(result.dtype) if isinstance(result, torch.Tensor) else "?")
            except RuntimeError:
                came_out.append("raises")
    on_cpu = " or ".join(dict.fromkeys(came_out))
    if device_type != "cpu" and on_cpu != op.mixed:
        note = f"mixed inputs are up to the kernel; the CPU's: {on_cpu}"
        return replace(op, mixed="?", note=note)
    if on_cpu == "FP32":
        note = "ordinary type promotion"
    elif on_cpu == "raises":
        note = "mixed inputs raise"
    elif came_out == ["FP32", short(dtype)]:
        note = "its first input decides"
    else:
        note = op.note
    return replace(op, mixed=on_cpu, note=note)


def _differ(a: Op, b: Op) -> bool:
    return (a.policy, a.fp32, a.half) != (b.policy, b.fp32, b.half) or (
        a.policy is not Policy.AS_INPUT and a.mixed != b.mixed
    )


def _reason(a: Op, b: Op, left: OpTable, right: OpTable) -> str:
    """Why two rows differ: one word for the kind, then what happens on each side."""

    def in_parts(op: Op, table: OpTable) -> bool:
        """Autocast met the operation's parts, not the operation itself."""
        as_one = {short(table.dtype), "?", ""}
        return op.policy is Policy.LOWER_PRECISION and not {op.fp32, op.mixed} <= as_one

    def side(op: Op, table: OpTable) -> str:
        half = short(table.dtype)
        if in_parts(op, table):
            mixed = "mixed inputs raise" if op.mixed == "raises" else f"{op.fp32} comes out"
            return f"a composition, whose matrix products run in {half}; {mixed}"
        return {
            None: op.note,
            Policy.BANNED: "raises an error",
            Policy.FP32: "computed in FP32",
            Policy.LOWER_PRECISION: f"cast to {half}",
            Policy.WIDEST: "autocast casts mixed inputs to the widest",
            Policy.AS_INPUT: f"follows its inputs ({op.note})" if op.note else "follows its inputs",
        }[op.policy]

    policies = (a.policy, b.policy)
    if None in policies:
        kind = "not asked"
    elif Policy.BANNED in policies:
        kind = "banned"
    elif Policy.WIDEST in policies:
        kind = "promoted"
    elif in_parts(a, left) != in_parts(b, right):
        kind = "fused"
    elif Policy.FP32 in policies:
        kind = "kept in FP32"
    else:
        kind = "cast down"
    return f"{kind}. {left.device_type}: {side(a, left)}. {right.device_type}: {side(b, right)}."


def _is_castable(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.dtype in CAST_BY_AUTOCAST


def _why(run: _Run) -> str:
    unanswered = run.kernels.unanswered
    if isinstance(unanswered, UnsupportedOperatorException):
        return f"{unanswered.func} cannot run on fake tensors"
    if unanswered is not None:
        return f"{unanswered.func} needs values, which fake tensors lack"
    return (str(run.error).strip().splitlines() or [type(run.error).__name__])[0].rstrip(".")


def _label(policy: Policy | None) -> str:
    return "not asked" if policy is None else str(policy)


def _as_html(header: list[str], rows: list[list[str]]) -> str:
    def line(cells: list[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

    body = "".join(line(row, "td") for row in rows)
    return f"<table><thead>{line(header, 'th')}</thead><tbody>{body}</tbody></table>"


# --- the catalogue -----------------------------------------------------------------------------


def _catalogue() -> Iterator[tuple[str, str, Callable, tuple]]:
    """Name, group, function and arguments: shapes to ask with, no answers."""

    def t(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def index(*shape: int) -> torch.Tensor:
        return t(*shape, dtype=torch.int64)

    n = 8
    v, m, b3, image, volume = t(n), t(n, n), t(n, n, n), t(2, 4, n, n), t(2, 4, n, n, n)
    labels, flags = index(n), t(n, n, dtype=torch.bool)
    heads = t(2, 4, n, 16)

    def cell(gates: int) -> tuple:
        return (t(gates * n, n), t(gates * n, n), t(gates * n), t(gates * n))

    catalogue = {
        "matrix products": [
            ("matmul", torch.matmul, m, m),
            ("mm", torch.mm, m, m),
            ("bmm", torch.bmm, b3, b3),
            ("mv", torch.mv, m, v),
            ("addmm", torch.addmm, m, m, m),
            ("addmv", torch.addmv, v, m, v),
            ("addr", torch.addr, m, v, v),
            ("addbmm", torch.addbmm, m, b3, b3),
            ("baddbmm", torch.baddbmm, b3, b3, b3),
            ("linear", F.linear, m, m, v),
            ("einsum", partial(torch.einsum, "ij,jk->ik"), m, m),
            ("linalg.multi_dot", torch.linalg.multi_dot, [m, m, m]),
            ("linalg.vecdot", torch.linalg.vecdot, m, m),
            ("dot", torch.dot, v, v),
            ("vdot", torch.vdot, v, v),
            ("tensordot", torch.tensordot, m, m, 1),
            ("bilinear", F.bilinear, m, m, b3),
            ("outer", torch.outer, v, v),
        ],
        "convolutions": [
            ("conv1d", F.conv1d, b3, t(n, n, 3)),
            ("conv2d", F.conv2d, image, t(4, 4, 3, 3)),
            ("conv3d", F.conv3d, volume, t(4, 4, 3, 3, 3)),
            ("conv_transpose1d", F.conv_transpose1d, b3, t(n, n, 3)),
            ("conv_transpose2d", F.conv_transpose2d, image, t(4, 4, 3, 3)),
            ("conv_transpose3d", F.conv_transpose3d, volume, t(4, 4, 3, 3, 3)),
            ("conv_tbc", torch.conv_tbc, b3, b3, v),
        ],
        "recurrent cells and attention": [
            ("lstm_cell", torch.lstm_cell, m, (m, m), *cell(4)),
            ("gru_cell", torch.gru_cell, m, m, *cell(3)),
            ("rnn_tanh_cell", torch.rnn_tanh_cell, m, m, *cell(1)),
            ("rnn_relu_cell", torch.rnn_relu_cell, m, m, *cell(1)),
            ("scaled_dot_product_attention", F.scaled_dot_product_attention, heads, heads, heads),
            ("embedding", F.embedding, labels, m),
        ],
        "activations": [
            ("relu", F.relu, m),
            ("leaky_relu", F.leaky_relu, m),
            ("elu", F.elu, m),
            ("gelu", F.gelu, m),
            ("silu", F.silu, m),
            ("sigmoid", torch.sigmoid, m),
            ("tanh", torch.tanh, m),
            ("hardswish", F.hardswish, m),
            ("softplus", F.softplus, m),
            ("prelu", F.prelu, m, t(1)),
            ("softmax", F.softmax, m, -1),
            ("log_softmax", F.log_softmax, m, -1),
            ("dropout", F.dropout, m),
        ],
        "normalization": [
            ("batch_norm", F.batch_norm, image, t(4), t(4), t(4), t(4), True),
            ("instance_norm", F.instance_norm, image),
            ("layer_norm", F.layer_norm, m, (n,), v, v),
            ("group_norm", F.group_norm, image, 2, t(4), t(4)),
            ("rms_norm", F.rms_norm, m, (n,), v),
            ("normalize", F.normalize, m),
            ("norm", torch.norm, m),
            ("linalg.vector_norm", torch.linalg.vector_norm, m),
        ],
        "losses": [
            ("cross_entropy", F.cross_entropy, m, labels),
            ("nll_loss", F.nll_loss, m, labels),
            ("mse_loss", F.mse_loss, m, m),
            ("l1_loss", F.l1_loss, m, m),
            ("smooth_l1_loss", F.smooth_l1_loss, m, m),
            ("huber_loss", F.huber_loss, m, m),
            ("binary_cross_entropy", F.binary_cross_entropy, m, m),
            (
                "binary_cross_entropy_with_logits",
                F.binary_cross_entropy_with_logits,
                m,
                m,
            ),
            ("kl_div", partial(F.kl_div, reduction="batchmean"), m, m),
            ("poisson_nll_loss", F.poisson_nll_loss, m, m),
            ("cosine_embedding_loss", F.cosine_embedding_loss, m, m, v),
            ("margin_ranking_loss", F.margin_ranking_loss, v, v, v),
            ("triplet_margin_loss", F.triplet_margin_loss, m, m, m),
            ("hinge_embedding_loss", F.hinge_embedding_loss, m, m),
        ],
        "exponentials, powers, angles": [
            ("exp", torch.exp, m),
            ("expm1", torch.expm1, m),
            ("log", torch.log, m),
            ("log1p", torch.log1p, m),
            ("log2", torch.log2, m),
            ("log10", torch.log10, m),
            ("pow", torch.pow, m, 2),
            ("sqrt", torch.sqrt, m),
            ("rsqrt", torch.rsqrt, m),
            ("reciprocal", torch.reciprocal, m),
            ("sin", torch.sin, m),
            ("tan", torch.tan, m),
            ("acos", torch.acos, m),
            ("sinh", torch.sinh, m),
            ("erf", torch.erf, m),
            ("erfinv", torch.erfinv, m),
            ("atan2", torch.atan2, m, m),
        ],
        "reductions": [
            ("sum", torch.sum, m),
            ("mean", torch.mean, m),
            ("prod", torch.prod, m),
            ("cumsum", torch.cumsum, m, 0),
            ("cumprod", torch.cumprod, m, 0),
            ("std", torch.std, m),
            ("var", torch.var, m),
            ("amax", torch.amax, m),
            ("argmax", torch.argmax, m),
            ("logsumexp", torch.logsumexp, m, 0),
            ("dist", torch.dist, m, m),
            ("cdist", torch.cdist, m, m),
            ("cosine_similarity", F.cosine_similarity, m, m),
        ],
        "element by element": [
            ("add", torch.add, m, m),
            ("mul", torch.mul, m, m),
            ("div", torch.div, m, m),
            ("maximum", torch.maximum, m, m),
            ("lerp", torch.lerp, m, m, 0.5),
            ("where", torch.where, flags, m, m),
            ("clamp", torch.clamp, m, 0, 1),
            ("addcmul", torch.addcmul, m, m, m),
            ("addcdiv", torch.addcdiv, m, m, m),
            ("cross", torch.cross, t(n, 3), t(n, 3), 1),
            ("eq", torch.eq, m, m),
            ("lt", torch.lt, m, m),
            ("equal", torch.equal, m, m),
        ],
        "joining and indexing": [
            ("cat", torch.cat, [m, m]),
            ("stack", torch.stack, [m, m]),
            ("gather", torch.gather, m, 0, index(n, n)),
            ("index_select", torch.index_select, m, 0, labels),
            ("index_add", torch.index_add, m, 0, labels, m),
            ("index_put", torch.index_put, v, (labels,), v),
            ("scatter_add", torch.scatter_add, m, 0, index(n, n), m),
            ("masked_fill", torch.masked_fill, m, flags, 0.0),
            ("sort", torch.sort, m),
        ],
        "pooling and resampling": [
            ("max_pool2d", F.max_pool2d, image, 2),
            ("avg_pool2d", F.avg_pool2d, image, 2),
            ("avg_pool3d", F.avg_pool3d, volume, 2),
            ("adaptive_avg_pool2d", F.adaptive_avg_pool2d, image, 1),
            ("interpolate (nearest)", F.interpolate, image, 16),
            ("interpolate (bilinear)", partial(F.interpolate, mode="bilinear"), image, 16),
            ("grid_sample", partial(F.grid_sample, align_corners=False), image, t(2, n, n, 2)),
            ("pad (reflect)", partial(F.pad, mode="reflect"), t(2, 4, n), (1, 1)),
        ],
        "variants that autocast does not see": [
            ("mm(out=)", lambda a, b, c: torch.mm(a, b, out=c), m, m, m),
            ("addmm_", torch.Tensor.addmm_, m, m, m),
            ("exp_", torch.Tensor.exp_, m),
            ("sum(dtype=float16)", partial(torch.sum, dtype=torch.float16), m),
            ("softmax(dtype=float16)", partial(F.softmax, dim=-1, dtype=torch.float16), m),
        ],
    }
    for group, ops in catalogue.items():
        for name, fn, *args in ops:
            yield name, group, fn, tuple(args)
