"""Exercises of notebook 03, autocast's op classification."""

from contextlib import contextmanager, nullcontext
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..dryrun import dry_run
from ..policy import Policy, classify
from ..tables import short
from .exercise import Hint, exercise

__all__ = ["count_casts", "product_function", "router", "segment_sum", "ten_ops"]

_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "linear", "matmul"}
_16_BITS = (torch.float16, torch.bfloat16)
_WEIGHTS = (
    "the weights are no longer FP32. Autocast leaves them alone: cast activations, not modules."
)


class _Below(TorchDispatchMode):
    """Notes, below autocast, the dtypes of matrix products and the number of casts to 16 bits."""

    def __init__(self):
        super().__init__()
        self.products, self.casts = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in _PRODUCTS:
            self.products += [t.dtype for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        if func is torch.ops.aten._to_copy.default:
            self.casts += args[0].dtype is torch.float32 and result.dtype in _16_BITS
        return result


def _run(dtype, call):
    """`call()` under CPU autocast to `dtype`, or without autocast; the result and what ran below."""
    autocast = nullcontext() if dtype is None else torch.autocast("cpu", dtype)
    with _autocast_kept(), autocast, _Below() as below:
        result = call()
    return result, below


@contextmanager
def _autocast_kept():
    """Leave autocast as it was, whatever an attempt did to it."""
    devices = ("cpu", "cuda")
    before = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices]
    cache_was_enabled = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        for device, enabled, dtype in before:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(cache_was_enabled)
        torch.clear_autocast_cache()


def _randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ---- ten operations ------------------------------------------------------------------------------


@cache
def _ten_ops():
    """The ten operations: name to the class on CUDA, and that on the CPU; asked, not known."""

    def t(*shape):
        return torch.empty(shape, device="meta")

    m, image = t(8, 8), t(2, 4, 8, 8)
    calls = {
        "conv_transpose2d": (F.conv_transpose2d, image, t(4, 4, 3, 3)),
        "gelu": (F.gelu, m),
        "log_softmax": (F.log_softmax, m, -1),
        "bmm": (torch.bmm, t(8, 8, 8), t(8, 8, 8)),
        "max_pool2d": (F.max_pool2d, image, 2),
        "group_norm": (F.group_norm, image, 2, t(4), t(4)),
        "mul": (torch.mul, m, m),
        "cumsum": (torch.cumsum, m, 0),
        "bilinear": (F.bilinear, m, m, t(8, 8, 8)),
        "mse_loss": (F.mse_loss, m, m),
    }
    return {
        name: tuple(classify(*call, device_type=device) for device in ("cuda", "cpu"))
        for name, call in calls.items()
    }


_WHY = {
    Policy.LOWER_PRECISION: "it is a product of matrices inside, which is what 16-bit hardware is for",
    Policy.FP32: "it exponentiates, or adds up many numbers, or squares: 16 bits could overflow or "
    "round the result away",
    Policy.WIDEST: "mixed inputs make it raise by itself, so autocast has to bring them to one dtype",
    Policy.AS_INPUT: "it is on no list: 16 bits do it no harm, and a cast would cost time. Where its "
    "inputs are mixed, ordinary type promotion deals with them",
    Policy.BANNED: "autocast refuses it",
}


@exercise
def ten_ops(attempt):
    """Check `ten_ops()`: a dictionary from ten names to their `Policy` under CUDA autocast.

    A policy's label, such as "FP32", will do as well. The right answers are probed.
    """
    right = _ten_ops()
    answers = attempt()
    if not isinstance(answers, dict):
        raise Hint("return a dictionary from names to policies: {'gelu': lab.Policy.FP32, ...}.")
    missing = [name for name in right if name not in answers]
    if missing:
        raise Hint(f"the dictionary lacks {', '.join(missing)}.")
    answers = dict(answers)
    for name in right:
        try:
            answers[name] = Policy(answers[name])
        except ValueError:
            names = ", ".join(p.name for p in Policy)
            raise Hint(
                f"{name}: {answers[name]!r} is no policy. Choose lab.Policy and one of {names}."
            ) from None
    wrong = [name for name in right if answers[name] is not right[name][0]]
    if not wrong:
        return "all ten, as CUDA autocast answers (dry run)."
    name = wrong[0]
    cuda, cpu = right[name]
    start = f"{len(right) - len(wrong)} of 10 are right. {name}:"
    if answers[name] is cpu:
        raise Hint(f"{start} that is what CPU autocast does. CUDA's list is longer: {_WHY[cuda]}.")
    raise Hint(f"{start} not {answers[name]!r}. Think again: {_WHY[cuda]}.")


# ---- how many casts ------------------------------------------------------------------------------


def _counted(trainable, blocks, calls, half_input=False):
    linear = nn.Linear(4, 4).requires_grad_(trainable)
    x = torch.ones(2, 4, dtype=torch.bfloat16 if half_input else torch.float32)

    def count():
        with torch.autocast("cpu", torch.bfloat16):
            for _ in range(calls):
                linear(x)

    return sum(_run(None, count)[1].casts for _ in range(blocks))


@exercise
def count_casts(attempt):
    """Check `count_casts()`: the casts to 16 bits in four situations, counted for comparison.

    All with a Linear that has a bias: (1) four calls in one autocast block, FP32 input; (2) the same
    with frozen parameters; (3) four blocks of one call each, trainable; (4) as (1) with BF16 input.
    """
    right = [
        _counted(True, 1, 4),
        _counted(False, 1, 4),
        _counted(True, 4, 1),
        _counted(True, 1, 4, half_input=True),
    ]
    answers = attempt()
    try:
        answers = list(answers)
        whole = [int(answer) for answer in answers]
    except (TypeError, ValueError):
        whole = None
    if whole is None or whole != answers:
        raise Hint("return four whole numbers, as in `return 1, 2, 3, 4`.")
    if len(answers) != 4:
        raise Hint(f"return four numbers; you returned {len(answers)}.")
    known = [
        {
            5: "situation 1: weight once, input four times; and the bias is a parameter, too.",
            12: "situation 1: the cache keeps the casts of weight and bias until the block ends.",
            3: "situation 1: the input is no parameter. It is cast each time, although it is the same.",
        },
        {
            6: "situation 2: the cache keeps only tensors that require gradients. These do not.",
            8: "situation 2: three tensors go into each call: input, weight and bias.",
        },
        {
            6: "situation 3: the cache is emptied whenever the outermost autocast block ends.",
        },
        {
            6: "situation 4: the input has 16 bits already. What is left to be cast?",
            0: "situation 4: the input has 16 bits already, but weight and bias are FP32.",
        },
    ]
    for number, (answer, expected, hints) in enumerate(zip(answers, right, known, strict=True), 1):
        if answer != expected:
            general = (
                f"situation {number}: not {answer}. Count for each call which of input, weight and "
                "bias is FP32, and which of them autocast has in its cache."
            )
            raise Hint(hints.get(answer, general))
    return "all four, as counted below autocast."


# ---- repair a mixed-dtype model ------------------------------------------------------------------


@exercise
def segment_sum(attempt):
    """Check `segment_sum(linear, x, segment, count)`: features added up by segment, in FP32.

    `linear` is an nn.Linear, `x` of shape (n, features), `segment` of shape (n,) holds integers below
    `count`. It is run without autocast, and under CPU autocast in BF16 and FP16.
    """
    linear, rows = nn.Linear(6, 5), 600
    segment = torch.arange(rows) % 3

    for dtype in (torch.bfloat16, torch.float16, None):
        where = "without autocast" if dtype is None else f"under CPU autocast in {short(dtype)}"
        # Under autocast, whole numbers and quarters: 16 bits hold all that goes into the sums, so that
        # any deviation comes from the sums. Without it, numbers that 16 bits would round.
        x, weight, bias = _randn(rows, 6), _randn(5, 6, seed=1), _randn(5, seed=2)
        if dtype is not None:
            x, weight, bias = x.round(), (4 * weight).round() / 4, (4 * bias).round() / 4
        with torch.no_grad():
            linear.weight.copy_(weight)
            linear.bias.copy_(bias)
        expected = F.one_hot(segment, 3).float().T @ F.relu(linear(x)).detach()
        linear.zero_grad()
        try:
            out, below = _run(dtype, partial(attempt, linear, x, segment, 3))
        except RuntimeError as error:
            if linear.weight.dtype is not torch.float32:
                raise Hint(_WEIGHTS) from None
            if "scalar type" in str(error) or "same dtype" in str(error):
                raise Hint(
                    f"{where} two tensors of different dtypes meet: {str(error).splitlines()[0]}. "
                    "Autocast does not cast for this operation: bring them to one dtype yourself."
                ) from None
            raise
        if not isinstance(out, torch.Tensor) or out.shape != expected.shape:
            raise Hint("return the sums: a tensor of shape (count, features of the output).")
        if linear.weight.dtype is not torch.float32:
            raise Hint(_WEIGHTS)
        narrow = [d for d in [*below.products, out.dtype] if d in _16_BITS]
        if dtype is None and narrow:
            raise Hint(
                f"without autocast something is cast to {short(narrow[0])} all the same. A repaired "
                "model must also be the FP32 model it was: cast up to FP32, not down to a dtype that "
                "you spell out."
            )
        if dtype is not None and dtype not in below.products:
            raise Hint(
                f"{where} the Linear layer did not run in 16 bits. It is the expensive part: leave it "
                "to autocast, and repair only the sum."
            )
        if out.dtype is not torch.float32:
            raise Hint(
                f"{where} the sums are {short(out.dtype)}. It runs, but long sums need FP32's digits: "
                "cast the features up, instead of the total down."
            )
        if dtype and not torch.equal(out, expected) and torch.allclose(out, expected, rtol=0.03):
            raise Hint(
                f"{where} the sums are FP32 by name, but were rounded to 16 bits on the way. Cast the "
                "features before they are added up, not the sums afterwards."
            )
        if not torch.allclose(out, expected, rtol=0, atol=1e-2):
            raise Hint(
                f"{where} the sums are wrong: is the relu still there, is each row added once, and "
                "is nothing rounded to 16 bits by hand?"
            )
        if out.grad_fn is None:
            raise Hint("no gradient can flow back: something detached the features.")
        out.sum().backward()
        if linear.weight.grad is None:
            raise Hint("no gradient reaches the weights: something detached the features.")
    return "16-bit Linear, FP32 sums, and still an FP32 model without autocast."


# ---- an FP32 island ------------------------------------------------------------------------------


@exercise
def router(attempt):
    """Check `router(linear, x)`: softmax probabilities computed in FP32, whatever surrounds it.

    `linear` is an nn.Linear, `x` of shape (n, features) in FP32 or 16 bits. It is run without
    autocast, under CPU autocast, and under CUDA autocast (dry run).
    """
    linear = nn.Linear(6, 4)
    with torch.no_grad():
        linear.weight.copy_(_randn(4, 6, seed=1))
        linear.bias.copy_(_randn(4, seed=2))

    for dtype, x_dtype in (
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (None, torch.float32),
    ):
        x = _randn(5, 6).to(x_dtype).requires_grad_()
        where = "without autocast" if dtype is None else f"under CPU autocast in {short(dtype)}"

        def call(dtype=dtype, x=x, where=where):
            out = _answer(attempt, linear, x, where)
            if torch.is_autocast_enabled("cpu") is not (dtype is not None):
                raise Hint(
                    "after your function autocast is no longer as it was. Use torch.autocast(...) in a "
                    "with statement: it switches back by itself."
                )
            return out

        out, below = _run(dtype, call)
        _judge(out, below, linear, where)
        expected = torch.softmax(F.linear(x.detach().float(), linear.weight, linear.bias), -1)
        if out.shape != expected.shape or not torch.allclose(out, expected, atol=1e-5):
            raise Hint(
                "these are not the probabilities softmax(linear(x)) along the last dimension."
            )
        if not out.requires_grad:
            raise Hint("no gradient can flow back: an island needs neither detach() nor no_grad().")

    with _autocast_kept(), dry_run("cuda") as dry, _Below() as below:
        where = "under CUDA autocast (dry run)"
        fake = dry.to_device(linear)
        out = _answer(attempt, fake, dry.to_device(x, torch.float16), where)
    if any(d in _16_BITS for d in below.products):
        raise Hint(
            "on the CPU it is an island, under CUDA autocast (dry run) it is not: the device type is "
            "spelled out. x.device.type is always right."
        )
    _judge(out, below, fake, where)
    return "FP32 from end to end, on CPU and CUDA (dry run), inside autocast and outside."


def _answer(attempt, linear, x, where):
    try:
        return attempt(linear, x)
    except RuntimeError as error:
        if linear.weight.dtype is not torch.float32:
            raise Hint(_WEIGHTS) from None
        if "same dtype" in str(error) or "scalar type" in str(error):
            raise Hint(
                f"{where}, with {short(x.dtype)} input: {str(error).splitlines()[0]}. On an island "
                "nobody casts for you: the input has to become FP32 before the layer."
            ) from None
        raise


def _judge(out, below, linear, where):
    if linear.weight.dtype is not torch.float32:
        raise Hint(_WEIGHTS)
    if not isinstance(out, torch.Tensor):
        raise Hint("return the probabilities, a tensor.")
    if any(d in _16_BITS for d in below.products):
        raise Hint(
            f"{where} the matrix product still ran in {short(below.products[0])}. A .float() on its "
            "input does not help, autocast casts it down again; one on its output comes too late. "
            "Switch autocast off around it: torch.autocast(x.device.type, enabled=False)."
        )
    if out.dtype is not torch.float32:
        raise Hint(f"{where} the probabilities came out as {short(out.dtype)}, not FP32.")


# ---- a custom autograd.Function ------------------------------------------------------------------


@exercise
def product_function(attempt):
    """Check `product_function()`: returns an `autograd.Function` for a @ b that works under autocast.

    The class itself will do, too. It is run on the CPU, without autocast and under it in BF16 and FP16.
    """
    is_class = isinstance(attempt, type) and issubclass(attempt, torch.autograd.Function)
    function = attempt if is_class else attempt()
    if not (isinstance(function, type) and issubclass(function, torch.autograd.Function)):
        raise Hint(
            "return the class itself, a subclass of torch.autograd.Function: `return Product`, without "
            "calling it."
        )
    expected = None
    for dtype in (None, torch.bfloat16, torch.float16):
        where = "without autocast" if dtype is None else f"under CPU autocast in {short(dtype)}"
        a, b = _randn(6, 5).requires_grad_(), _randn(5, 4, seed=1).requires_grad_()
        upstream = _randn(6, 4, seed=2)
        if expected is None:
            ((a @ b) * upstream).sum().backward()
            expected = a.grad.clone(), b.grad.clone()
            a.grad = b.grad = None
        try:
            out, _ = _run(dtype, partial(function.apply, a, b))
        except AttributeError as error:
            if "_fwd_used_autocast" not in str(error):
                raise
            raise Hint(
                "custom_bwd stands on forward. It belongs on backward, and custom_fwd on forward."
            ) from None
        if not isinstance(out, torch.Tensor) or out.grad_fn is None:
            raise Hint("forward must return the product a @ b, a tensor.")
        if dtype and out.dtype is torch.float32:
            raise Hint(
                f"{where} the product came out as FP32: forward is an FP32 island. That is right for "
                "delicate functions, but a product is what 16 bits are for. Leave out cast_inputs, and "
                "leave autocast on."
            )
        if out.dtype is not (dtype or torch.float32):
            raise Hint(
                f"{where} the product came out as {short(out.dtype)}: a dtype is spelled out. Autocast "
                "knows the dtype; let it cast a @ b."
            )
        _backward(out, upstream, where)
        for name, leaf, right in (("a", a, expected[0]), ("b", b, expected[1])):
            tolerance = 0.1 if dtype else 1e-4
            if leaf.grad is None or not torch.allclose(leaf.grad, right, atol=tolerance, rtol=0):
                raise Hint(
                    f"{where} the gradient of {name} is wrong: it should be "
                    f"{'g @ b.T' if name == 'a' else 'a.T @ g'} for the incoming gradient g."
                )
    return "the product in the autocast dtype, and gradients that fit."


def _backward(out, upstream, where):
    """Run backward; an error gets the hint that fits the decorators found on the function."""
    autocast_in_forward = getattr(out.grad_fn, "_fwd_used_autocast", None)
    try:
        out.backward(upstream.to(out.dtype))
    except AttributeError as error:
        if "_fwd_used_autocast" not in str(error):
            raise
        raise Hint(
            "backward asks what forward did, and forward did not note it: custom_bwd works only "
            "together with custom_fwd, on forward."
        ) from None
    except RuntimeError as error:
        if "dtype" not in str(error):
            raise
        start = f"{where} backward failed: {str(error).splitlines()[0]}."
        if autocast_in_forward is None:
            raise Hint(
                f"{start} The saved tensors are FP32, the gradient has 16 bits, and autocast is off. "
                "Decorate forward with custom_fwd and backward with custom_bwd."
            ) from None
        if autocast_in_forward is False:
            raise Hint(
                f"{start} custom_fwd looked at another device type's autocast. These tensors are on "
                'the CPU: device_type="cpu".'
            ) from None
        raise Hint(
            f"{start} forward is decorated; backward needs custom_bwd, with the same device_type."
        ) from None
