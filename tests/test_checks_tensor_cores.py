"""Each check of notebook 02 passes right answers and names the particular mistake in wrong ones."""

import pytest
import torch
from answers import verdict

# ---- right answers -------------------------------------------------------------------------------


def tile(a, b, c):
    return (a.float() @ b.float() + c).half()


def tile_by_definition(a, b, c):
    d = torch.empty_like(c)
    for i in range(16):
        for j in range(16):
            total = c[i, j]
            for k in range(16):
                total = total + a[i, k].float() * b[k, j].float()
            d[i, j] = total
    return d.to(torch.float16)


def intensity(batch, inputs, outputs, size=2):
    numbers = batch * inputs + inputs * outputs + batch * outputs
    return 2 * batch * inputs * outputs / (size * numbers)


def intensity_otherwise(batch, inputs, outputs):
    return 1 / (1 / batch + 1 / inputs + 1 / outputs)


def bound(batch, inputs, outputs, gpu):
    return intensity(batch, inputs, outputs) < gpu.fp16 / gpu.bandwidth


def bound_by_time(batch, inputs, outputs, gpu):
    seconds = 2 * batch * inputs * outputs / gpu.fp16
    return 2 * (batch * inputs + inputs * outputs + batch * outputs) / gpu.bandwidth > seconds


RIGHT = [
    ("tensor_core_tile", tile),
    ("tensor_core_tile", tile_by_definition),
    ("linear_intensity", intensity),
    ("linear_intensity", intensity_otherwise),
    ("is_memory_bound", bound),
    ("is_memory_bound", bound_by_time),
    ("stuck_sums", lambda: (2048, 256, 512)),
    ("stuck_sums", lambda: [2.0**11, 2.0**8, 2.0**9]),
    ("peak_tflops", lambda n, fma, ghz: n * fma * 2 * ghz / 1000),
    ("peak_tflops", lambda n, fma, ghz: 2 * n * fma * (ghz * 1e9) / 1e12),
]


@pytest.mark.parametrize("check, attempt", RIGHT)
def test_right_answers_pass(check, attempt, capsys):
    assert verdict(check, attempt, capsys).startswith(f"PASSED   {check}")


@pytest.mark.parametrize("check", sorted({check for check, _ in RIGHT}))
def test_stubs_are_not_attempted(check, capsys):
    def stub(*arguments):
        raise NotImplementedError

    assert verdict(check, stub, capsys).startswith(f"TO DO    {check}")


# ---- wrong answers -------------------------------------------------------------------------------


def half_accumulator(a, b, c):
    total = c.half()
    for k in range(16):
        total = total + a[:, k : k + 1] * b[k : k + 1]
    return total


def half_accumulator_c_last(a, b, c):
    total = torch.zeros(16, 16, dtype=torch.float16)
    for k in range(16):
        total = (total.float() + a[:, k : k + 1].float() * b[k : k + 1].float()).half()
    return (total.float() + c).half()


def rounded_products(a, b, c):
    products = (a[:, :, None] * b[None]).float()  # FP16 products, FP32 sum
    return (products.sum(1) + c).half()


WRONG = [
    ("tensor_core_tile", lambda a, b, c: None, "return D"),
    (
        "tensor_core_tile",
        lambda a, b, c: a.float() @ b.float() + c,
        "Round the result to FP16, once",
    ),
    ("tensor_core_tile", lambda a, b, c: tile(a, b, c).bfloat16(), "writes FP16 here"),
    ("tensor_core_tile", lambda a, b, c: (a.float() @ b.float()).half(), "C was not added"),
    (
        "tensor_core_tile",
        lambda a, b, c: (a.float() @ b.float()).half() + c.half(),
        "two roundings",
    ),
    (
        "tensor_core_tile",
        lambda a, b, c: ((a.float() @ b.float()).half() + c).half(),
        "Add C in FP32, then round once",
    ),
    (
        "tensor_core_tile",
        lambda a, b, c: (a.float() @ b.float() + c.half().float()).half(),
        "C was rounded to FP16 first",
    ),
    ("tensor_core_tile", lambda a, b, c: tile(a, b.T, c), "transposed"),
    ("tensor_core_tile", half_accumulator, "rounded to FP16 at each step"),
    ("tensor_core_tile", half_accumulator_c_last, "rounded to FP16 at each step"),
    ("tensor_core_tile", rounded_products, "close, but not bit for bit"),
    ("tensor_core_tile", lambda a, b, c: tile(a, b, -c), "not the numbers of A x B + C"),
    ("linear_intensity", lambda n, i, o: None, "return a number"),
    ("linear_intensity", lambda n, i, o: intensity(n, i, o) / 2, "2 operations; and"),
    ("linear_intensity", lambda n, i, o: intensity(n, i, o, 1), "FLOP per number"),
    ("linear_intensity", lambda n, i, o: intensity(n, i, o, 4), "2 bytes, not 4"),
    ("linear_intensity", lambda n, i, o: n * i * o / (n * i + n * o), "the weights are read"),
    ("linear_intensity", lambda n, i, o: n * i * o / (n * i + i * o), "the result is written"),
    ("linear_intensity", lambda n, i, o: float(n), "not only the weights"),
    ("linear_intensity", lambda n, i, o: 1 / intensity(n, i, o), "upside down"),
    ("linear_intensity", lambda n, i, o: 7.0, "it should be"),
    ("is_memory_bound", lambda n, i, o, gpu: 1, "return True or False"),
    ("is_memory_bound", lambda n, i, o, gpu: not bound(n, i, o, gpu), "the opposite"),
    ("is_memory_bound", lambda n, i, o, gpu: True, "it says True for every layer"),
    (
        "is_memory_bound",
        lambda n, i, o, gpu: 2 * n * i * o / (n * i + i * o + n * o) < gpu.fp16 / gpu.bandwidth,
        "that is FLOP per number",
    ),
    ("peak_tflops", lambda n, fma, ghz: n * fma * ghz, "two operations. And check GFLOP/s"),
    (
        "is_memory_bound",
        lambda n, i, o, gpu: intensity(n, i, o, 4) < gpu.fp16 / gpu.bandwidth,
        "half of the right intensity",
    ),
    (
        "is_memory_bound",
        lambda n, i, o, gpu: intensity(n, i, o) < gpu.fp32 / gpu.bandwidth,
        "you compared with gpu.fp32",
    ),
    ("is_memory_bound", lambda n, i, o, gpu: n < 64, "compare its intensity with the ridge"),
    ("stuck_sums", lambda: 2048, "return three numbers"),
    ("stuck_sums", lambda: (65504, 256, 512), "where FP16 overflows"),
    ("stuck_sums", lambda: (1024, 128, 256), "the bit in front of the point"),
    ("stuck_sums", lambda: (4096, 512, 1024), "twice too far"),
    ("stuck_sums", lambda: (2048, 256, 2048), "a smaller step stops earlier"),
    ("stuck_sums", lambda: (2048, 256, 8192), "stops earlier, not later"),
    ("stuck_sums", lambda: (2048, 2048, 512), "BF16 has fewer significant bits"),
    ("stuck_sums", lambda: (2048, 300, 512), "not right for 1.0 in BF16"),
    ("peak_tflops", lambda n, fma, ghz: None, "return a number"),
    ("peak_tflops", lambda n, fma, ghz: n * fma * ghz / 1000, "counts as two operations"),
    ("peak_tflops", lambda n, fma, ghz: 2 * n * fma * ghz, "the unit: check GFLOP/s"),
    ("peak_tflops", lambda n, fma, ghz: 2 * n * fma * ghz * 1e9, "the unit: check FLOP/s"),
    ("peak_tflops", lambda n, fma, ghz: 2 * n * fma * ghz / 1e12, "the unit: check the clock"),
    ("peak_tflops", lambda n, fma, ghz: 2 * n * ghz / 1000, "it is 125.3"),
]


@pytest.mark.parametrize("check, attempt, hint", WRONG, ids=[f"{c}: {h}" for c, _, h in WRONG])
def test_each_mistake_has_its_own_hint(check, attempt, hint, capsys):
    line = verdict(check, attempt, capsys)
    assert line.startswith(f"NOT YET  {check}") and hint in line


def test_code_that_raises_is_named(capsys):
    line = verdict("tensor_core_tile", lambda a, b, c: a @ b + undefined, capsys)  # noqa: F821
    assert "your code raised NameError" in line
