"""Exercises of notebook 02, Tensor Cores."""

import math

import torch

from ..roofline import gpus
from .exercise import Hint, exercise

__all__ = ["is_memory_bound", "linear_intensity", "peak_tflops", "stuck_sums", "tensor_core_tile"]


def _tile_inputs(seed: int, scale: float, k: int = 16):
    """Multiples of 1/32, and C of 1/512: the sums are exact in FP32, in any order."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.randint(-96, 97, (16, k), generator=generator).mul(scale / 32).half()
    b = torch.randint(-96, 97, (k, 16), generator=generator).div(32).half()
    c = torch.randint(-20480, 20481, (16, 16), generator=generator).mul(scale / 512)
    return a, b, c


def _half_sums(a, b, start, round_products: bool):
    """The sum over k of a product, rounded to FP16 after each step."""
    total = start
    for k in range(a.shape[1]):
        product = a[:, k : k + 1].float() * b[k : k + 1].float()
        total = (total.float() + (product.half().float() if round_products else product)).half()
    return total


@exercise
def tensor_core_tile(attempt):
    """Check `tensor_core_tile(a, b, c)`: one tile D = A x B + C by a Tensor Core's recipe.

    `a` and `b` are FP16 of shape (16, 16), `c` is FP32 of shape (16, 16); the result is FP16.
    """
    a, b, c = _tile_inputs(0, 1.0)
    exact = a.double() @ b.double() + c.double()
    right = exact.half()

    d = attempt(a.clone(), b.clone(), c.clone())

    if not isinstance(d, torch.Tensor) or d.shape != right.shape:
        raise Hint("return D, a tensor of shape (16, 16).")
    if d.dtype is torch.float32 and torch.equal(d.double(), exact):
        raise Hint("the numbers are right, in FP32. Round the result to FP16, once, at the end.")
    if d.dtype is not torch.float16:
        raise Hint(f"the result is {d.dtype}, a Tensor Core writes FP16 here: torch.float16.")
    if torch.equal(d, right):
        a, b, c = _tile_inputs(1, 8.0)
        if not torch.equal(attempt(a, b, c), (a.double() @ b.double() + c.double()).half()):
            raise Hint("right for one tile, wrong for another with larger numbers.")
        return "products exact, sum in FP32, rounded to FP16 once, bit for bit."
    without_c = (a.double() @ b.double()).half()
    if torch.equal(d, without_c):
        raise Hint("C was not added.")
    if torch.equal(d, (without_c.float() + c.half().float()).half()):
        raise Hint(
            "the product was rounded to FP16 before C was added: two roundings. C belongs into the "
            "FP32 sum."
        )
    if torch.equal(d, (without_c.float() + c).half()):
        raise Hint("A x B was rounded to FP16 before C was added. Add C in FP32, then round once.")
    if torch.equal(d, (exact - c.double() + c.half().double()).half()):
        raise Hint("C was rounded to FP16 first. It enters the sum in FP32.")
    if torch.equal(d, (a.double() @ b.double().T + c.double()).half()) or torch.equal(
        d, (a.double().T @ b.double() + c.double()).half()
    ):
        raise Hint("a matrix is transposed: D[i, j] is the sum over k of A[i, k] times B[k, j].")
    zero = torch.zeros_like(right)
    rounded = [
        _half_sums(a, b, start, products)
        for start in (c.half(), zero)
        for products in (True, False)
    ]
    rounded += [(total.float() + c).half() for total in rounded[2:]]
    if any(torch.equal(d, wrong) for wrong in rounded):
        raise Hint("the running sum was rounded to FP16 at each step. Keep it in FP32.")
    if torch.allclose(d.double(), exact, rtol=2e-2, atol=2e-1):
        raise Hint(
            "close, but not bit for bit: something was rounded to FP16 on the way. Widen A and B "
            "with .float() first, and round only D."
        )
    raise Hint("these are not the numbers of A x B + C.")


@exercise
def linear_intensity(attempt):
    """Check `linear_intensity(batch, inputs, outputs)`: FLOP per byte of a Linear layer in FP16.

    The layer multiplies (batch, inputs) by (inputs, outputs), without bias. Each of the three
    matrices is read or written once, two bytes a number.
    """
    for batch, inputs, outputs in ((1, 4096, 4096), (128, 1024, 4096), (4096, 512, 32)):
        flops = 2 * batch * inputs * outputs
        x, w, y = batch * inputs, inputs * outputs, batch * outputs
        got = attempt(batch, inputs, outputs)
        if isinstance(got, bool) or not isinstance(got, int | float):
            raise Hint(f"return a number, FLOP divided by bytes, not {type(got).__name__}.")

        def is_(value, got=got):
            return math.isclose(got, value, rel_tol=1e-6)

        if is_(flops / (2 * (x + w + y))):
            continue
        if is_(flops / 2 / (2 * (x + w + y))):
            raise Hint(
                "half of the right value. Each multiplication comes with an addition, 2 operations; "
                "and a number in FP16 takes 2 bytes, not 4."
            )
        if is_(flops / (x + w + y)):
            raise Hint("that is FLOP per number. A number in FP16 takes 2 bytes.")
        if is_(flops / (2 * (x + y))):
            raise Hint("the weights are read from memory, too: inputs x outputs numbers.")
        if is_(flops / (2 * (x + w))):
            raise Hint("the result is written to memory, too: batch x outputs numbers.")
        if is_(flops / (2 * w)):
            raise Hint("the input is read and the result written, too, not only the weights.")
        if is_(2 * (x + w + y) / flops):
            raise Hint("upside down: FLOP divided by bytes.")
        raise Hint(
            f"for batch {batch}, {inputs} inputs and {outputs} outputs it should be "
            f"{flops / (2 * (x + w + y)):.4g}."
        )
    return "2 x batch x inputs x outputs operations over 2 bytes for each number of x, W and y."


@exercise
def is_memory_bound(attempt):
    """Check `is_memory_bound(batch, inputs, outputs, gpu)` for a Linear layer in FP16.

    `gpu` has `fp16` in FLOP/s and `bandwidth` in bytes/s. The answer is True if reading and writing
    the three matrices takes longer than the arithmetic, at the GPU's peak rates.
    """
    answers = {}
    cases = [
        (batch, width, width, gpu)
        for gpu in gpus().values()
        if gpu.fp16
        for batch in (1, 16, 128, 512, 8192)
        for width in (1024, 8192)
    ]
    wrong = []
    for batch, inputs, outputs, gpu in cases:
        got = attempt(batch, inputs, outputs, gpu)
        if not isinstance(got, bool):
            raise Hint(f"return True or False, not {got!r}.")
        answers[got] = True
        flops = 2 * batch * inputs * outputs
        size = 2 * (batch * inputs + inputs * outputs + batch * outputs)
        if got != (size / gpu.bandwidth > flops / gpu.fp16):
            wrong.append((batch, inputs, outputs, gpu))
    if not wrong:
        return f"right for {len(cases)} layers and GPUs. One row at a time is always memory-bound."
    if len(wrong) == len(cases):
        raise Hint(
            "every answer is the opposite of the right one: memory-bound means too few FLOP."
        )
    if len(answers) == 1:
        raise Hint(
            f"it says {next(iter(answers))} for every layer. Compare the intensity with the ridge, "
            "gpu.fp16 / gpu.bandwidth."
        )
    if all(
        attempt(*case) == (2 * math.prod(case[:3]) / _numbers(case) / 4 < _ridge(case))
        for case in cases
    ):
        raise Hint(
            "half of the right intensity. In FP16 a number takes 2 bytes, not 4, and each "
            "multiplication comes with an addition."
        )
    if all(
        attempt(*case) == (2 * math.prod(case[:3]) / _numbers(case) < _ridge(case))
        for case in cases
    ):
        raise Hint("that is FLOP per number. A number in FP16 takes 2 bytes.")
    if all(
        attempt(*case)
        == (2 * math.prod(case[:3]) / _numbers(case) / 2 < case[3].fp32 / case[3].bandwidth)
        for case in cases
    ):
        raise Hint("you compared with gpu.fp32. The layer runs in FP16: gpu.fp16.")
    batch, inputs, outputs, gpu = wrong[0]
    raise Hint(
        f"wrong for batch {batch}, {inputs} x {outputs} on {gpu.name}: compare its intensity with the "
        f"ridge, gpu.fp16 / gpu.bandwidth = {gpu.fp16 / gpu.bandwidth:.0f} FLOP per byte."
    )


def _numbers(case) -> int:
    batch, inputs, outputs, _ = case
    return batch * inputs + inputs * outputs + batch * outputs


def _ridge(case) -> float:
    return case[3].fp16 / case[3].bandwidth


@exercise
def stuck_sums(attempt):
    """Check `stuck_sums()`: where do three running sums stop growing?

    It returns three numbers: the sum at which adding 1.0 in FP16, 1.0 in BF16 and 0.25 in FP16 stops.
    """
    right = []
    for step, dtype in ((1.0, torch.float16), (1.0, torch.bfloat16), (0.25, torch.float16)):
        total, term = torch.zeros((), dtype=dtype), torch.tensor(step, dtype=dtype)
        while total + term != total:
            total = total + term
        right.append(total.item())

    got = attempt()

    if not isinstance(got, tuple | list) or len(got) != 3:
        raise Hint("return three numbers: (1.0 in FP16, 1.0 in BF16, 0.25 in FP16).")
    got = [float(x) for x in got]
    if got == right:
        return "a sum stops where its spacing is twice the step: the tie goes to the even neighbor."
    if got[0] in (65504.0, 65536.0):
        raise Hint("65504 is where FP16 overflows. The sum stops long before, without any error.")
    if got[0] == right[0] and got[2] == got[0]:
        raise Hint("a smaller step stops earlier: 0.25 needs finer spacing than 1.0.")
    if got == [x / 2 for x in right]:
        raise Hint(
            "half of it: you forgot the bit in front of the point. FP16 has 11 significant bits, "
            "BF16 has 8."
        )
    if got == [x * 2 for x in right]:
        raise Hint(
            "twice too far. At 2048 the spacing is 2, so 2048 + 1 lies half way, and ties go to the "
            "even neighbor: back to 2048."
        )
    if got[1] == got[0]:
        raise Hint("BF16 has fewer significant bits than FP16, 8 against 11: it stops earlier.")
    if got[0] == right[2] * 16 or got[2] == right[0] * 4:
        raise Hint("a smaller step stops earlier, not later.")
    names = ("1.0 in FP16", "1.0 in BF16", "0.25 in FP16")
    bad = [name for name, x, y in zip(names, got, right, strict=True) if x != y]
    raise Hint(f"not right for {' and '.join(bad)}. At which sum is the spacing twice the step?")


@exercise
def peak_tflops(attempt):
    """Check `peak_tflops(cores, fma_per_clock, gigahertz)`: the peak rate of all Tensor Cores.

    `fma_per_clock` is the number of fused multiply-adds that one Tensor Core starts in a clock.
    """
    for cores, fma, gigahertz in ((640, 64, 1.53), (432, 256, 1.41), (100, 1, 1.0)):
        right = 2 * cores * fma * gigahertz * 1e9 / 1e12
        got = attempt(cores, fma, gigahertz)
        if isinstance(got, bool) or not isinstance(got, int | float):
            raise Hint(f"return a number, in TFLOP/s, not {type(got).__name__}.")
        if math.isclose(got, right, rel_tol=1e-6):
            continue
        if math.isclose(got, right / 2, rel_tol=1e-6):
            raise Hint("a fused multiply-add counts as two operations.")
        for power, unit in ((1e3, "GFLOP/s"), (1e12, "FLOP/s"), (1e-9, "the clock in Hz, not GHz")):
            if math.isclose(got, right * power, rel_tol=1e-6):
                raise Hint(
                    f"right but for the unit: check {unit}. 1 GHz is 1e9 a second, tera is 1e12."
                )
            if math.isclose(got, right / 2 * power, rel_tol=1e-6):
                raise Hint(f"a fused multiply-add counts as two operations. And check {unit}.")
        raise Hint(f"for {cores} cores, {fma} FMA a clock and {gigahertz} GHz it is {right:.4g}.")
    return (
        "cores x FMA a clock x 2 x clock: V100 125 and A100 312 TFLOP/s, as in their data sheets."
    )
