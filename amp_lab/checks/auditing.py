"""Exercises of notebook 08, audit your model."""

import warnings
from functools import cache

import torch
import torch.nn.functional as F
from torch import nn

from ..audit import AuditError, audit
from ..models import SmallCNN, WordLM
from ..recorder import HALF
from .exercise import Hint, exercise

__all__ = ["project", "rating_loss", "search", "to_blame"]


class _WithAttempt(nn.Module):
    """The learner's function as the forward of a model, so that it can be audited."""

    def __init__(self, model, attempt):
        super().__init__()
        self.model = model
        self.attempt = attempt

    def forward(self, *inputs):
        return self.attempt(self.model, *inputs)


def _meta(*shape):
    return torch.empty(shape, device="meta")


def _run(attempt, make_model, *shapes):
    """Run the attempt and the model itself on the CPU, in FP32 and without autocast.

    Returns the attempt's result, the model and its inputs.
    """
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(action="ignore"):
        torch.manual_seed(0)
        model = make_model()
        inputs = [torch.randn(shape) for shape in shapes]
        try:
            got = attempt(model, *inputs)
        except RuntimeError as error:
            if "dtype" not in str(error):
                raise
            raise Hint(
                "without autocast, in plain FP32, it fails: two dtypes meet. Code for autocast must "
                "run without it as well: write no dtype down, and cast only where autocast is on."
            ) from error
    if any(p.dtype is not torch.float32 for p in model.parameters()):
        raise Hint("the weights are no longer FP32. Cast activations, never modules.")
    return got, model, inputs


def _audit(attempt, model, *inputs, dtype=torch.float16):
    """Audit the attempt for CUDA; the model's inputs are on the meta device."""
    try:
        return audit(_WithAttempt(model, attempt), *inputs, dtype=dtype)
    except AuditError as error:
        if "same dtype" not in str(error):
            raise
        raise Hint(
            "FP16 meets FP32 in one matrix product, and with autocast off nobody brings them to one "
            "dtype. Keep matrix products out of that block."
        ) from error


def _no_islands(report, question=""):
    if report.islands:
        share = f"{1 - report.share_16_bit:.0%} of the FLOPs still run in FP32"
        if report.islands[0].cause.startswith("autocast is off"):
            raise Hint(
                f"{share}: autocast is off around a matrix product. Take the product out of that "
                f"block.{question}"
            )
        raise Hint(f"{share}: {report.islands[0].cause}.")


def _runs_in_16_bits(report, op):
    return any(op in row.op and row.in_16_bits for row in report.rows)


# ---- the island ------------------------------------------------------------------------------------


class _Search(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.query, self.document, self.rerank = (nn.Linear(width, width) for _ in range(3))

    def forward(self, queries, documents):
        q, d = self.query(queries), self.document(documents)
        with torch.autocast("cuda", enabled=False):
            scores = q.float() @ d.float().T / q.shape[-1] ** 0.5
            found = scores.softmax(dim=-1) @ documents
        return self.rerank(found)


@exercise
def search(attempt):
    """Check `search(model, queries, documents)`: `Search.forward` without its FP32 island.

    It is run on a small model on the CPU, then audited on a large one for CUDA.
    """
    got, model, inputs = _run(attempt, lambda: _Search(16), (4, 16), (12, 16))
    right = model(*inputs)
    if not isinstance(got, torch.Tensor):
        raise Hint(f"return what Search.forward returns, a tensor, not {type(got).__name__}.")
    if got.dtype is not torch.float32:
        raise Hint("without autocast the result is no longer FP32: it holds a cast of your own.")
    if got.shape != right.shape or not torch.allclose(got, right, atol=1e-4):
        raise Hint("without autocast the result differs from that of Search. Change dtypes only.")
    report = _audit(attempt, _Search(256).to("meta"), _meta(1024, 256), _meta(4096, 256))
    _no_islands(report, " Which operation in it is the delicate one?")
    if _runs_in_16_bits(report, "softmax"):
        raise Hint(
            "no island any more, but the softmax runs in 16 bits now: in a block with autocast off "
            "nobody casts its input up."
        )
    return "all of the FLOPs in 16 bits, the softmax still in FP32."


# ---- the banned operation --------------------------------------------------------------------------


class _Rater(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.score = nn.Linear(width, 1)

    def forward(self, x):
        return self.score(x).squeeze(-1).sigmoid()


@exercise
def rating_loss(attempt):
    """Check `rating_loss(model, x, liked)`: the binary cross-entropy of `Rater`, made legal."""
    liked = (torch.arange(8) % 3 == 0).float()

    def with_targets(model, x):
        return attempt(model, x, liked)

    got, model, (x,) = _run(with_targets, lambda: _Rater(16), (8, 16))
    p = model(x)
    if not isinstance(got, torch.Tensor) or got.dim() != 0:
        raise Hint("return the loss, a tensor with one number: the mean over the batch.")

    def is_(value):
        return torch.allclose(got.float(), value, rtol=1e-3)

    if is_(F.binary_cross_entropy_with_logits(p, liked)):
        raise Hint(
            "binary_cross_entropy_with_logits applies a sigmoid of its own. Give it the logits, "
            "model.score(x): model(x) has been through a sigmoid already."
        )
    if is_(F.binary_cross_entropy(p, liked, reduction="sum")):
        raise Hint("that is the sum over the batch. F.binary_cross_entropy returns the mean.")
    if not is_(F.binary_cross_entropy(p, liked)):
        raise Hint("the loss differs from F.binary_cross_entropy(model(x), liked) in FP32.")
    if not got.requires_grad:
        raise Hint("the right number, but no gradient can flow back from it.")
    if got.dtype is not torch.float32:
        raise Hint("without autocast the loss is no longer FP32: it holds a cast of your own.")
    report = _audit(attempt, _Rater(256).to("meta"), _meta(1024, 256), _meta(1024))
    if report.banned:
        raise Hint(
            f"{report.banned[0].op} still raises on CUDA. Is there a loss that takes logits? Or "
            "switch autocast off around it, for x.device.type, and give it FP32."
        )
    _no_islands(report)
    if _runs_in_16_bits(report, "sigmoid") or _runs_in_16_bits(report, "binary_cross_entropy"):
        raise Hint(
            "legal, but the sigmoid runs in FP16, where every logit above 8.4 gives exactly 1 and "
            "the loss takes the logarithm of 1 - 1. Cast the logits up, not the probability; or let "
            "the loss take logits."
        )
    return "nothing is banned, and sigmoid and logarithm run in FP32."


# ---- the repeated cast -----------------------------------------------------------------------------


class _Projections(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        x = self.norm(x)
        return self.q(x), self.k(x), self.v(x)


@cache
def _projection_flops():
    return audit(_Projections(256).to("meta"), _meta(4, 64, 256)).flops


@exercise
def project(attempt):
    """Check `project(model, x)`: the three results of `Projections`, with no cast repeated."""
    got, model, (x,) = _run(attempt, lambda: _Projections(16), (2, 6, 16))
    right = model(x)
    got = list(got) if isinstance(got, tuple | list) else [got]
    if len(got) != 3 or not all(isinstance(t, torch.Tensor) for t in got):
        raise Hint("return three tensors: q, k and v.")
    if any(t.dtype is not torch.float32 for t in got):
        raise Hint(
            "without autocast the results are no longer FP32. Cast only if autocast is on: "
            "torch.is_autocast_enabled(x.device.type) knows."
        )
    for t, r in zip(got, right, strict=True):
        if t.shape != r.shape or not torch.allclose(t, r, atol=1e-4):
            raise Hint("without autocast the three results differ from those of Projections.")
    for dtype in HALF:
        report = _audit(attempt, _Projections(256).to("meta"), _meta(4, 64, 256), dtype=dtype)
        _no_islands(report)
        repeated = [row for row in report.repeated_casts if row.origin is torch.float32]
        if any(row.target is torch.float16 for row in report.casts if dtype is torch.bfloat16):
            raise Hint(
                "right for FP16, but under BF16 autocast you cast to FP16, and autocast casts that "
                "to BF16. Ask which dtype: torch.get_autocast_dtype(x.device.type)."
            )
        early = any(row.origin in HALF and row.target is torch.float32 for row in report.casts)
        if repeated and early:
            raise Hint(
                "you cast before the norm. Autocast keeps layer_norm in FP32, so its result is FP32 "
                "again, and is cast three times as before. Cast after the norm."
            )
        if repeated:
            what = repeated[0]
            raise Hint(
                f"{what.source} is still cast {what.casts} times. Who reads it? Let them read what "
                "has been cast already."
            )
        if sum(row.calls for row in report.rows if "layer_norm" in row.op) > 1:
            raise Hint("no cast is repeated, but the norm is: compute and cast it once.")
        if report.flops > _projection_flops():
            raise Hint(
                "no cast is repeated, but there are more matrix products than q, k and v need."
            )
    return "each tensor is cast once, under FP16 and BF16 autocast, and FP32 works without."


# ---- what stands in the way of one half ------------------------------------------------------------


class _Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.LayerNorm(256), nn.Linear(256, 64)

    def forward(self, x):
        return self.head(F.gelu(self.norm(x).mean(1)))


@cache
def _reports():
    """Five audits, in each of which another wrong rule gives a wrong answer."""
    with torch.device("meta"):
        tower = nn.Sequential(
            nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 64)
        )
        tower.append(nn.LayerNorm(64))
        wide = nn.Sequential(nn.LayerNorm(1024), nn.Linear(1024, 1024), nn.ReLU())
        words, next_words = (torch.zeros(shape, dtype=torch.int64) for shape in ((512, 2), (512,)))
        return (
            audit(tower, _meta(4096, 64)),
            audit(_Pooled(), _meta(4, 2048, 256).requires_grad_()),
            audit(WordLM(2048), words, loss=F.cross_entropy, targets=next_words),
            audit(SmallCNN(), _meta(256, 1, 28, 28)),
            audit(wide, _meta(64, 1024).requires_grad_()),
        )


def _most(key):
    return lambda report: max(report.saved, key=key).op


_RULES = {
    "right": _most(lambda row: row.with_autocast - row.without / 2),
    "it keeps the most, but it did halve. You look for what should have halved and did not: compare "
    "with half of what it kept without autocast.": _most(lambda row: row.with_autocast),
    "it kept the most before, but it did halve. Compare what it keeps with half of that.": _most(
        lambda row: row.without
    ),
    "it grew the most, but what merely stays as it was is in the way, too: half of it should be "
    "gone. Compare with half of what it kept without autocast.": _most(
        lambda row: row.with_autocast - row.without
    ),
    "it has the largest ratio, but of a few bytes. Subtract, do not divide.": _most(
        lambda row: row.with_autocast / row.without if row.without else 0
    ),
    "it has the most weight copies. They are one thing in the way; activations that stay FP32 "
    "are another.": _most(lambda row: row.weight_copies),
    "you left the weight copies out. They are kept as well, and are in the way.": _most(
        lambda row: row.with_autocast - row.weight_copies - row.without / 2
    ),
    "it *saved* the most. You look for the opposite.": _most(
        lambda row: row.without - row.with_autocast
    ),
    "it has the smallest excess over one half. Which has the largest?": _most(
        lambda row: row.without / 2 - row.with_autocast
    ),
}


@exercise
def to_blame(attempt):
    """Check `to_blame(report)`: the operation that keeps the most bytes beyond one half of before."""
    answers = [attempt(report) for report in _reports()]
    if any(hasattr(answer, "op") for answer in answers):
        raise Hint("that is the whole row. Return its name, row.op.")
    if not all(isinstance(answer, str) for answer in answers):
        raise Hint(
            f"return an operation's name, such as 'softmax', not {type(answers[0]).__name__}."
        )
    right = [_RULES["right"](report) for report in _reports()]
    if answers == right:
        return f"{', '.join(right)}: right for five models."
    wrong = next(i for i, answer in enumerate(answers) if answer != right[i])
    for hint, rule in _RULES.items():
        if answers == [rule(report) for report in _reports()]:
            raise Hint(f"{answers[wrong]} in {_reports()[wrong].model}: {hint}")
    raise Hint(
        f"in an audit of {_reports()[wrong].model} it should be {right[wrong]}, you returned "
        f"{answers[wrong]}."
    )
