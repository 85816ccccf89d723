"""classify and op_table against PyTorch's own lists of what autocast does."""

import itertools
import warnings
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing._internal.autocast_test_lists import AutocastCPUTestLists, AutocastTestLists

from amp_lab.dryrun import dry_run
from amp_lab.policy import Op, OpTable, Policy, _catalogue, classify, op_table

# The attributes of PyTorch's two lists, and the class that each stands for.
LISTS = {
    "torch_fp16": Policy.LOWER_PRECISION,
    "nn_fp16": Policy.LOWER_PRECISION,
    "linalg_fp16": Policy.LOWER_PRECISION,
    "methods_fp16": Policy.LOWER_PRECISION,
    "torch_16": Policy.LOWER_PRECISION,
    "nn_16": Policy.LOWER_PRECISION,
    "torch_fp32": Policy.FP32,
    "nn_fp32": Policy.FP32,
    "methods_fp32": Policy.FP32,
    "torch_need_autocast_promote": Policy.WIDEST,
    "torch_expect_builtin_promote": Policy.AS_INPUT,
    "methods_expect_builtin_promote": Policy.AS_INPUT,
    "banned": Policy.BANNED,
}

# Entries that cannot be asked as they stand, and why.
CANNOT_BE_ASKED = {
    ("cuda", "torch_fp16", "einsum"): "lists its equation where the arguments belong, and "
    "matrices that do not fit it: PyTorch's own test skips it",
}


def entries():
    """One test parameter for each entry of PyTorch's lists: device, list, function, arguments."""
    for device, lists in [("cuda", AutocastTestLists("cpu")), ("cpu", AutocastCPUTestLists("cpu"))]:
        for attribute in vars(lists):
            for number, entry in enumerate(getattr(lists, attribute)):
                name, args, *rest = entry
                kwargs = rest[0] if rest and isinstance(rest[0], dict) else {}
                yield pytest.param(
                    device,
                    attribute,
                    name,
                    args,
                    kwargs,
                    id=f"{device}-{attribute}-{number}-{name}",
                )


ENTRIES = list(entries())


def functions(attribute, name):
    """Where an entry's operation is found: `torch.exp`, `Tensor.exp`, `torch._C._nn.linear`."""
    if attribute.startswith(("nn_", "banned")):
        homes = [torch._C._nn, torch]
    elif attribute.startswith("linalg_"):
        homes, name = [torch.linalg], name.removeprefix("linalg_")
    else:
        homes = [torch] if attribute.startswith("torch_") else []
    found = [getattr(home, name) for home in homes if hasattr(home, name)][:1]
    if hasattr(torch.Tensor, name):
        found.append(getattr(torch.Tensor, name))
    return found


def test_the_lists_are_the_ones_we_know():
    assert {e.values[1] for e in ENTRIES} == set(LISTS)
    count = {d: sum(e.values[0] == d for e in ENTRIES) for d in ("cuda", "cpu")}
    assert count["cuda"] >= 112 and count["cpu"] >= 50
    assert len([k for k in CANNOT_BE_ASKED if k[0] == "cuda"]) <= 4


@pytest.mark.parametrize("device, attribute, name, args, kwargs", ENTRIES)
def test_pytorchs_own_lists(device, attribute, name, args, kwargs):
    found = functions(attribute, name)
    assert found
    for fn in found:
        if (device, attribute, name) in CANNOT_BE_ASKED:
            with pytest.raises((ValueError, TypeError)):
                classify(fn, *args, device_type=device, **kwargs)
        else:
            assert classify(fn, *args, device_type=device, **kwargs) is LISTS[attribute]


def test_einsum_asked_properly():
    x = torch.empty(2, 3, 4, 5)
    assert classify(torch.einsum, "bkhd,bqhd->bqkh", x, x) is Policy.LOWER_PRECISION


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_16_bit_dtype_does_not_change_the_class(dtype):
    x = torch.empty(4, 4)
    assert classify(torch.mm, x, x, dtype=dtype) is Policy.LOWER_PRECISION
    assert classify(torch.exp, x, dtype=dtype) is Policy.FP32
    assert classify(torch.dot, x[0], x[0], dtype=dtype) is Policy.WIDEST


# --- what classify says of things that are no single operation ------------------------------------

x = torch.empty(4, 8)
square = torch.empty(8, 8)
image = torch.empty(2, 4, 8, 8)
sequence = torch.empty(3, 4, 8)


class DotWithWeight(nn.Module):
    """Mixed only by its weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return torch.dot(x, self.weight)


@pytest.mark.parametrize(
    "module, args, on_cuda, on_cpu",
    [
        (nn.Linear(8, 8), (x,), Policy.LOWER_PRECISION, Policy.LOWER_PRECISION),
        (nn.LayerNorm(8), (x,), Policy.FP32, Policy.AS_INPUT),
        (nn.BatchNorm2d(4), (image,), Policy.AS_INPUT, Policy.AS_INPUT),
        (nn.Bilinear(8, 8, 4), (x, x), Policy.WIDEST, Policy.AS_INPUT),
        (nn.LSTM(8, 8), (sequence,), Policy.LOWER_PRECISION, Policy.LOWER_PRECISION),
        (nn.GRU(8, 8), (sequence,), Policy.LOWER_PRECISION, Policy.LOWER_PRECISION),
        (nn.MultiheadAttention(8, 2), (sequence,) * 3, *[Policy.LOWER_PRECISION] * 2),
        (nn.Embedding(8, 8), (torch.zeros(3, dtype=torch.long),), *[Policy.AS_INPUT] * 2),
        (DotWithWeight(), (x[0],), Policy.WIDEST, Policy.AS_INPUT),
        (nn.BCELoss(), (x, x), Policy.BANNED, Policy.FP32),
        (nn.Linear(8, 8).double(), (x.double(),), Policy.AS_INPUT, Policy.AS_INPUT),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_modules(module, args, on_cuda, on_cpu):
    before = {name: t.clone() for name, t in module.state_dict().items()}
    assert classify(module, *args) is on_cuda
    assert classify(module, *args, device_type="cpu") is on_cpu
    assert all(torch.equal(t, before[name]) for name, t in module.state_dict().items())


def own_mixed_precision(x):
    """Without autocast it casts by itself, as some of PyTorch's own functions do for FP32."""
    if torch.is_autocast_enabled("cuda"):
        return F.linear(x, x)
    return F.linear(x.half(), x.half()).float()


@pytest.mark.parametrize(
    "fn, args, expected",
    [
        # What comes out counts before the kernels do.
        (own_mixed_precision, (x,), Policy.LOWER_PRECISION),
        # The result tells nothing; the kernels do.
        (lambda x: F.linear(x, x).float(), (x,), Policy.LOWER_PRECISION),
        (lambda x: x.softmax(-1).argmax(-1), (x,), Policy.FP32),
        (lambda x: x.softmax(-1).half(), (x,), Policy.FP32),
        (torch.argmax, (x,), Policy.AS_INPUT),
        # The function's own casts are not autocast's.
        (lambda x: x.half(), (x,), Policy.AS_INPUT),
        (lambda x: x.float(), (x,), Policy.AS_INPUT),
        (partial(torch.sum, dtype=torch.float32), (x,), Policy.AS_INPUT),
        # Type promotion is not autocast's, either; casts before addcmul are.
        (torch.add, (x, x), Policy.AS_INPUT),
        (torch.addcmul, (x, x, x), Policy.WIDEST),
        # In-place and out= variants pass autocast by.
        (torch.Tensor.addmm_, (square,) * 3, Policy.AS_INPUT),
        (torch.Tensor.exp_, (x,), Policy.AS_INPUT),
        # No float, no cast.
        (torch.bitwise_and, (torch.ones(2, dtype=torch.int64),) * 2, Policy.AS_INPUT),
        (torch.exp, (x.double(),), Policy.AS_INPUT),
        (lambda d: d["a"] @ d["b"], ({"a": x, "b": x.T},), Policy.LOWER_PRECISION),
    ],
)
def test_functions(fn, args, expected):
    assert classify(fn, *args) is expected


def test_keyword_tensors_are_inputs_too():
    assert classify(F.linear, x, weight=square) is Policy.LOWER_PRECISION
    assert classify(torch.mm, square, square, out=torch.empty(8, 8)) is Policy.AS_INPUT


def test_the_dtype_that_is_given_does_not_matter():
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert classify(torch.exp, x.to(dtype)) is Policy.FP32
        assert classify(torch.mm, square.to(dtype), square) is Policy.LOWER_PRECISION


@pytest.mark.parametrize(
    "fn, args, error, message",
    [
        ("softmax", (x,), TypeError, "'softmax'.*function or a module"),
        (torch.mm, (x, x), ValueError, "mm cannot be asked: .*reduction dim"),
        (torch.sum, (), ValueError, "sum cannot be asked"),
        (lambda x: x.sum().item(), (x,), ValueError, "_local_scalar_dense.*needs values"),
        (lambda x: F.linear(x, x) if x.sum() > 0 else x, (x,), ValueError, "needs values"),
        (lambda y: y @ square, (x,), ValueError, "every tensor that it needs"),
    ],
)
def test_what_cannot_be_asked(fn, args, error, message):
    with pytest.raises(error, match=message):
        classify(fn, *args)


def test_bad_keywords():
    with pytest.raises(ValueError, match="'tpu'"):
        classify(torch.exp, x, device_type="tpu")
    with pytest.raises(ValueError, match="float32"):
        classify(torch.exp, x, dtype=torch.float32)


def test_arguments_and_random_state_are_left_alone():
    real, generator = torch.ones(4, 4), torch.get_rng_state()
    classify(torch.Tensor.exp_, real)
    op_table("cuda")
    assert torch.equal(real, torch.ones(4, 4))
    assert torch.equal(torch.get_rng_state(), generator)
    assert not torch.is_autocast_enabled("cuda") and not torch.is_autocast_enabled("cpu")


# --- the table ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cuda():
    return op_table("cuda")


@pytest.fixture(scope="module")
def cpu():
    return op_table("cpu")


def test_all_hundred_are_asked(cuda, cpu):
    for table in (cuda, cpu):
        assert len(table) >= 100
        assert len({op.name for op in table}) == len(table)
        assert [op.name for op in table if op.policy is None] == []
    assert {op.policy for op in cuda} == set(Policy)


def test_the_table_agrees_with_pytorchs_lists(cuda, cpu):
    """Same operation, other arguments: whatever is in both must have one answer."""
    tables = {"cuda": cuda, "cpu": cpu}
    known = {}
    for device, attribute, name, _, _ in (e.values for e in ENTRIES):
        known[device, name.removeprefix("linalg_")] = LISTS[attribute]
    compared = 0
    for (device, name), policy in known.items():
        rows = [op for op in tables[device] if op.name.removeprefix("linalg.") == name]
        for row in rows:
            assert (device, name, row.policy) == (device, name, policy)
            compared += 1
    assert compared >= 90


def real_call(fn, args, dtype, device_type="cpu"):
    """The dtype that a real kernel on this CPU returns under the real CPU autocast."""

    def tensor(value):
        if isinstance(value, (list, tuple)):
            return type(value)(tensor(v) for v in value)
        if not isinstance(value, torch.Tensor):
            return value
        return torch.zeros(value.shape, dtype=dtype if value.is_floating_point() else value.dtype)

    with torch.autocast(device_type, torch.bfloat16), warnings.catch_warnings(action="ignore"):
        out = fn(*map(tensor, args))
    while isinstance(out, (tuple, list)):
        out = out[0]
    return out.dtype if isinstance(out, torch.Tensor) else None


def test_the_cpu_table_agrees_with_real_kernels():
    """What no GPU is needed for is checked by running it, on real tensors."""
    names = {torch.float32: "FP32", torch.float16: "FP16", torch.bfloat16: "BF16", None: "?"}
    table = op_table("cpu", torch.bfloat16)
    for name, _, fn, args in _catalogue():
        for dtype, said in [(torch.float32, table[name].fp32), (torch.bfloat16, table[name].half)]:
            real = real_call(fn, args, dtype)
            assert (name, said) == (name, names.get(real, str(real).removeprefix("torch.")))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU to compare with")
def test_the_cuda_table_agrees_with_a_real_gpu(cuda):
    for name, _, fn, args in _catalogue():
        if cuda[name].policy in (Policy.LOWER_PRECISION, Policy.FP32, Policy.WIDEST):
            on_gpu = torch.utils._pytree.tree_map_only(
                torch.Tensor, lambda t: torch.zeros(t.shape, dtype=t.dtype, device="cuda"), args
            )
            with torch.autocast("cuda", torch.float16):
                out = fn(*on_gpu)
            out = out[0] if isinstance(out, tuple) else out
            short = {torch.float32: "FP32", torch.float16: "FP16"}[out.dtype]
            assert (name, short) == (name, cuda[name].fp32)


def test_cuda_and_cpu_compared(cuda, cpu):
    found = {row.name: row for row in cuda.compare(cpu)}
    banned = found["binary_cross_entropy"]
    assert (banned.left, banned.right) == (Policy.BANNED, Policy.FP32)
    assert banned.reason == "banned. cuda: raises an error. cpu: computed in FP32."
    assert found["cat"].reason.startswith("promoted. cuda: follows its inputs (ordinary type")
    assert found["scatter_add"].reason.endswith("cpu: follows its inputs (mixed inputs raise).")
    assert found["lstm_cell"].reason == (
        "fused. cuda: cast to FP16. "
        "cpu: a composition, whose matrix products run in FP16; FP32 comes out."
    )
    assert found["softmax"].reason.startswith("kept in FP32")
    assert found["mv"].reason.startswith("cast down")
    assert not {"matmul", "add", "batch_norm", "mse_loss", "mean"} & set(found)


def test_a_table_does_not_differ_from_itself(cuda):
    assert len(cuda.compare(cuda)) == 0


@pytest.mark.parametrize(
    "surroundings", [dry_run, partial(torch.autocast, "cpu"), partial(torch.device, "meta")]
)
def test_surroundings_do_not_change_the_answers(cuda, cpu, surroundings):
    with surroundings():
        assert op_table("cuda").rows == cuda.rows
        assert op_table("cpu").rows == cpu.rows


def test_mixed_inputs(cuda, cpu):
    assert cuda["add"].mixed == cpu["add"].mixed == "FP32"
    assert cuda["add"].note == "ordinary type promotion"
    assert cuda["dot"].note == "mixed inputs raise without autocast"
    # A fake kernel takes what the real one refuses: the table must not believe it.
    assert cpu["mv"].mixed == "raises"
    with pytest.raises(RuntimeError):
        torch.mv(torch.zeros(2, 2), torch.zeros(2).half())
    assert cuda["index_add"].mixed == "?" and "the CPU's: raises" in cuda["index_add"].note
    assert cuda["exp"].mixed == ""
    one, half = torch.ones(2), torch.ones(2).half()
    real = [F.rms_norm(x, (2,), w).dtype for x, w in [(one, half), (half, one)]]
    if real == [torch.float32, torch.float16]:  # differs between releases
        assert cpu["rms_norm"].mixed == "FP32 or FP16"
        assert cpu["rms_norm"].note == "its first input decides"
    else:
        assert cpu["rms_norm"].note == "ordinary type promotion"


def test_kernels(cuda, cpu):
    assert cuda["exp"].kernels == ("exp",)
    assert cuda["mm"].kernels == ("mm",)  # and not the casts before it
    assert "_thnn_fused_lstm_cell" in cuda["lstm_cell"].kernels
    assert "_thnn_fused_lstm_cell" not in cpu["lstm_cell"].kernels


def test_an_operation_that_cannot_be_asked_says_why(monkeypatch):
    def catalogue():
        yield "exp", "group", torch.exp, (torch.empty(2),)
        yield "choose", "group", lambda x: x if x.sum() > 0 else -x, (torch.empty(2),)

    monkeypatch.setattr("amp_lab.policy._catalogue", catalogue)
    table = op_table("cuda")
    assert table["exp"].policy is Policy.FP32
    assert table["choose"].policy is None
    assert "needs values" in table["choose"].note
    assert "not asked" in repr(table)
    asked = replace(table["choose"], policy=Policy.FP32)
    other = OpTable("cpu", torch.float16, [table["exp"], asked])
    assert [row.reason.split(".")[0] for row in table.compare(other)] == ["not asked"]


def test_lookup_print_and_html(cuda, cpu):
    assert cuda["softmax"].policy is Policy.FP32
    with pytest.raises(KeyError, match="no operation named 'sofmax'"):
        cuda["sofmax"]
    lines = repr(cuda).splitlines()
    assert lines[0] == f"{len(cuda)} operations under autocast('cuda', torch.float16)"
    assert len(lines) == len(cuda) + 3
    assert cuda._repr_html_().count("<tr>") == len(cuda) + 1
    row = Op("a<b", "group", Policy.FP32, "FP32", "FP32", "", (), "")
    assert "<td>a&lt;b</td>" in OpTable("cuda", torch.float16, [row])._repr_html_()
    differences = cuda.compare(cpu)
    assert len(repr(differences).splitlines()) == len(differences) + 2
    assert differences._repr_html_().count("<tr>") == len(differences) + 1


def test_policy_words():
    assert repr(Policy.FP32) == "Policy.FP32"
    assert str(Policy.LOWER_PRECISION) == "lower precision"
    assert Policy("widest") is Policy.WIDEST
    for a, b in itertools.combinations(Policy, 2):
        assert a.sentence != b.sentence
    assert all(p.sentence.startswith("Autocast ") and p.sentence.endswith(".") for p in Policy)
