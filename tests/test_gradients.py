"""The exponent histogram against what PyTorch's casts really do to scaled tensors."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from amp_lab.formats import BF16, E4M3, E5M2, FP16, FP32, TF32, FloatFormat
from amp_lab.gradients import ExponentHistogram

TORCH = {
    FP16: torch.float16,
    BF16: torch.bfloat16,
    E4M3: torch.float8_e4m3fn,
    E5M2: torch.float8_e5m2,
}


def name(value):
    return value.name if isinstance(value, FloatFormat) else None


def scaled(tensor, scale):
    """The elements that count, times the scale: exact in FP64."""
    x = tensor.double().flatten()
    return x[x.isfinite() & (x != 0)] * scale


def shares(rounded, x, format):
    """Count zeros, subnormals and overflows among rounded values."""
    magnitude = rounded.abs()
    overflow = ~magnitude.isfinite()
    if format is E4M3:  # PyTorch may saturate: beyond the tie between 448 and what would be 480
        overflow |= x.abs() > 464
    subnormal = (magnitude > 0) & (magnitude < torch.finfo(TORCH[format]).smallest_normal)
    counts = ((magnitude == 0).sum(), subnormal.sum(), overflow.sum())
    return tuple(c.item() / x.numel() if x.numel() else 0.0 for c in counts)


def by_torch(tensor, format, scale):
    """What the format's cast does, starting from FP32, in which the product must be exact."""
    x = scaled(tensor, scale)
    as_float = x.float()
    assert torch.equal(as_float.double(), x)
    return shares(as_float.to(TORCH[format]).float(), x, format)


def by_histogram(histogram, format, scale):
    return (
        histogram.fraction_lost(format, scale),
        histogram.fraction_subnormal(format, scale),
        histogram.fraction_overflow(format, scale),
    )


def boundary_values():
    """Numbers at, just below and just above every kind of boundary, at every exponent around it."""
    significands = [1.0, 1.5, 1.8125, 1.9375]
    significands += [2 - 2.0**-n for n in range(1, 24)]
    significands += [2 - 1.5 * 2.0**-n for n in range(1, 23)]
    base = torch.tensor(significands)
    near = torch.cat(
        [base, torch.nextafter(base, torch.tensor(4.0)), torch.nextafter(base, torch.tensor(0.0))]
    )
    return (near[:, None] * torch.exp2(torch.arange(-60.0, 50.0))).flatten()


# ---- counting --------------------------------------------------------------------------------


def test_counts_agree_with_numpy():
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(50_000) * 2.0 ** rng.uniform(-120, 120, 50_000)).astype(np.float32)
    histogram = ExponentHistogram.of(torch.from_numpy(x))
    exponents = np.frexp(x.astype(np.float64))[1] - 1
    expected = np.bincount(exponents - exponents.min())
    assert histogram.exponents[0] == exponents.min()
    np.testing.assert_array_equal(np.diff(histogram.exponents), 1)
    np.testing.assert_array_equal(histogram.counts, expected)
    assert histogram.nonzero == histogram.total == 50_000


def test_zeros_inf_and_nan_are_counted_apart():
    x = torch.tensor([0.0, -0.0, math.inf, -math.inf, -math.inf, math.nan, 1.0, -3.0, 2.0**-149])
    h = ExponentHistogram.of(x)
    assert (h.total, h.zeros, h.infs, h.nans, h.nonzero) == (9, 2, 3, 1, 3)
    assert h.fraction_zero == 2 / 9
    assert (h.exponents[0], h.exponents[-1]) == (-149, 1)
    assert dict(zip(h.exponents.tolist(), h.counts.tolist(), strict=True))[1] == 1
    assert h.counts.sum() == 3
    assert repr(h) == "ExponentHistogram(9 elements: 2^-149 to 2^1, 2 zeros, 3 inf, 1 NaN)"


def test_every_fp16_and_bf16_pattern_is_counted():
    for dtype in (torch.float16, torch.bfloat16):
        x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
        h = ExponentHistogram.of(x)
        exact = x.double()
        assert (h.zeros, h.infs) == (2, 2)
        assert h.nans == exact.isnan().sum()
        finite = exact[exact.isfinite() & (exact != 0)].abs()
        exponents, counts = torch.unique(finite.log2().floor(), return_counts=True)
        np.testing.assert_array_equal(h.exponents, exponents.numpy())
        np.testing.assert_array_equal(h.counts, counts.numpy())


def test_fp32_extremes_have_their_own_exponents():
    bits = torch.tensor([1, 2, 3, 0x7FFFFF, 0x800000, 0x7F7FFFFF], dtype=torch.int32)
    h = ExponentHistogram.of(bits.view(torch.float32))
    occupied = h.exponents[h.counts > 0]
    assert occupied.tolist() == [-149, -148, -127, -126, 127]
    assert h.counts[h.counts > 0].tolist() == [1, 2, 1, 1, 1]


def test_empty_histogram():
    for h in (ExponentHistogram(), ExponentHistogram.of([]), ExponentHistogram.of(torch.ones(0))):
        assert (h.total, h.nonzero, h.fraction_zero) == (0, 0, 0.0)
        assert h.exponents.size == h.counts.size == 0
        assert by_histogram(h, FP16, 8.0) == (0.0, 0.0, 0.0)
        assert h.best_scale(FP16) == 1.0
        assert "none finite and nonzero" in repr(h)


def test_adding_equals_counting_together():
    tensors = [
        torch.randn(1000),
        torch.zeros(3),
        torch.full((2, 2), math.inf),
        torch.randn(7).half(),
    ]
    merged = sum((ExponentHistogram.of(t) for t in tensors), ExponentHistogram())
    together = ExponentHistogram.of(tensors)
    generator = ExponentHistogram.of(t for t in tensors)
    for h in (merged, generator):
        assert repr(h) == repr(together)
        np.testing.assert_array_equal(h.counts, together.counts)
        assert by_histogram(h, FP16, 2.0**-12) == by_histogram(together, FP16, 2.0**-12)
    with pytest.raises(TypeError):
        merged + 1


def test_shape_and_layout_do_not_matter_and_the_input_stays():
    x = torch.randn(300, 400)
    before = x.clone()
    expected = ExponentHistogram.of(x.flatten()).counts
    np.testing.assert_array_equal(ExponentHistogram.of(x.T).counts, expected)
    np.testing.assert_array_equal(ExponentHistogram.of(x.to_sparse()).counts, expected)
    np.testing.assert_array_equal(ExponentHistogram.of(x.requires_grad_()).counts, expected)
    assert ExponentHistogram.of(x[0, 0]).total == 1
    assert torch.equal(x, before)


def test_from_gradients_of_a_model():
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Linear(4, 3))
    with pytest.raises(ValueError, match=r"call backward\(\) first"):
        ExponentHistogram.from_gradients(model)
    model[0].bias.requires_grad_(False)
    model(torch.randn(2, 5)).square().sum().backward()
    h = ExponentHistogram.from_gradients(model)
    gradients = [model[0].weight.grad, model[1].weight.grad, model[1].bias.grad]
    assert h.total == 20 + 12 + 3
    np.testing.assert_array_equal(h.counts, ExponentHistogram.of(gradients).counts)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu():
    x = boundary_values()
    on_gpu, on_cpu = ExponentHistogram.of(x.cuda()), ExponentHistogram.of(x)
    np.testing.assert_array_equal(on_gpu.counts, on_cpu.counts)
    for k in range(-30, 31):
        assert by_histogram(on_gpu, FP16, 2.0**k) == by_histogram(on_cpu, FP16, 2.0**k)


# ---- fractions -------------------------------------------------------------------------------


@pytest.mark.parametrize("format", TORCH, ids=name)
def test_fractions_equal_casting_at_every_boundary(format):
    x = boundary_values()
    histogram = ExponentHistogram.of(x)
    for k in range(-30, 31):
        assert by_histogram(histogram, format, 2.0**k) == by_torch(x, format, 2.0**k), k


@pytest.mark.parametrize("format", TORCH, ids=name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_fractions_equal_casting_random_tensors(format, dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20_000, generator=generator)
    x = (x * torch.exp2(torch.randint(-40, 10, x.shape, generator=generator))).to(dtype)
    histogram = ExponentHistogram.of(x)
    for k in range(-30, 31):
        assert by_histogram(histogram, format, 2.0**k) == by_torch(x, format, 2.0**k), k


@given(
    values=st.lists(
        st.floats(width=32, min_value=2.0**-90, max_value=2.0**90)
        | st.integers(-40, 30).map(lambda e: 2.0**e)
        | st.sampled_from([0.0, -0.0, 65519.996, 65520.0, 464.0, 2.0**-25, math.inf, math.nan]),
        max_size=20,
    ),
    power=st.integers(-30, 30),
)
@pytest.mark.parametrize("format", TORCH, ids=name)
def test_fractions_equal_casting(format, values, power):
    x = torch.tensor(values, dtype=torch.float32)
    expected = by_torch(x, format, 2.0**power)
    assert by_histogram(ExponentHistogram.of(x), format, 2.0**power) == expected
    assert by_histogram(ExponentHistogram.of(-x), format, 2.0**power) == expected


@pytest.mark.parametrize("format", [FP32, TF32, BF16], ids=name)
@pytest.mark.parametrize("power", [-126, -60, -24, -23, -1, 0, 1, 60, 127])
def test_wide_formats_equal_rounding_fp64(format, power):
    bits = np.random.default_rng(1).integers(0, 1 << 31, 20_000, dtype=np.uint32)
    x = torch.cat([torch.from_numpy(bits.view(np.float32)), boundary_values()])
    product = scaled(x, 2.0**power)
    magnitude = format.quantize(product).abs()
    counts = [
        (magnitude == 0).sum().item(),
        ((magnitude > 0) & (magnitude < 2.0**-126)).sum().item(),
        magnitude.isinf().sum().item(),
    ]
    expected = tuple(c / product.numel() for c in counts)
    assert by_histogram(ExponentHistogram.of(x), format, 2.0**power) == expected


def test_fp16_landmarks():
    tie = torch.tensor(2.0**-25)
    above = torch.nextafter(tie, torch.tensor(1.0))
    h = ExponentHistogram.of(torch.stack([tie, above]))
    assert h.counts.tolist() == [2]  # one bar, and still the two are told apart
    assert h.fraction_lost(FP16) == 0.5
    assert h.fraction_subnormal(FP16) == 0.5
    assert h.fraction_lost(FP16, 2.0) == 0.0
    assert h.fraction_lost(FP16, 0.5) == 1.0
    h = ExponentHistogram.of(torch.tensor([65504.0, 65519.99, 65520.0, 0.0, math.inf]))
    assert h.fraction_overflow(FP16) == 1 / 3
    assert h.fraction_overflow(FP16, 0.5) == 0.0
    assert h.fraction_overflow(FP16, 2) == 1.0


def test_a_format_of_our_own_is_exact_too():
    tiny = FloatFormat("E3M1", exponent_bits=3, mantissa_bits=1)
    x = boundary_values()
    h = ExponentHistogram.of(x)
    for k in range(-20, 21):
        product = scaled(x, 2.0**k)
        magnitude = tiny.quantize(product).abs()
        assert h.fraction_lost(tiny, 2.0**k) == (magnitude == 0).sum().item() / x.numel()
        assert h.fraction_overflow(tiny, 2.0**k) == magnitude.isinf().sum().item() / x.numel()


# ---- best_scale ------------------------------------------------------------------------------


def best_scale_by_casting(x, format, headroom):
    """Try all powers of two on the tensor itself."""
    best = None
    for k in range(-126, 128):
        product = scaled(x, 2.0**k)
        if not format.quantize(product * headroom).isfinite().all():
            continue
        magnitude = format.quantize(product).abs()
        lost = (magnitude == 0).sum().item()
        subnormal = (magnitude < format.smallest_normal).sum().item() - lost
        candidate = (lost, subnormal, abs(k), 2.0**k)
        best = candidate if best is None else min(best, candidate)
    return best[-1]


@settings(deadline=None, max_examples=25)
@given(
    values=st.lists(
        st.floats(width=32, allow_nan=False, allow_infinity=False)
        | st.floats(-1.0, 1.0, width=32)
        | st.integers(-60, 20).map(lambda e: 2.0**e),
        max_size=12,
    ),
    headroom=st.sampled_from([1.0, 2.0, 8.0]),
)
@pytest.mark.parametrize("format", [FP16, BF16, E4M3, E5M2], ids=name)
def test_best_scale_agrees_with_trying_all(format, values, headroom):
    x = torch.tensor(values, dtype=torch.float32)
    expected = best_scale_by_casting(x, format, headroom)
    assert ExponentHistogram.of(x).best_scale(format, headroom=headroom) == expected


@pytest.mark.parametrize(
    ("values", "format", "scale"),
    [
        ([1.0, 1e-3], FP16, 1.0),  # nothing to gain
        ([1e-8, 1e-6], BF16, 1.0),  # BF16 needs no scaling
        ([2.0**-30], FP16, 2.0**16),  # just normal: 2**-14
        ([2.0**-28, 2.0**10], FP16, 2.0**4),  # less loses one; 2**5 would overflow if doubled
        ([2.0**20], FP16, 2.0**-6),  # too large: scaled down
        ([0.0, math.inf, math.nan], FP16, 1.0),
    ],
)
def test_best_scale_by_hand(values, format, scale):
    assert ExponentHistogram.of(torch.tensor(values)).best_scale(format) == scale


def test_best_scale_leaves_the_documented_headroom():
    x = torch.tensor([2.0**-40, 40000.0])
    h = ExponentHistogram.of(x)
    assert h.best_scale(FP16, headroom=1.0) == 1.0
    assert h.best_scale(FP16) == 0.5
    assert h.best_scale(FP16, headroom=4.0) == 0.25
    with pytest.raises(ValueError, match="every scale overflows"):
        h.best_scale(FP16, headroom=2.0**200)


# ---- errors ----------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [3.0, 0.0, -2.0, 1000, math.inf, math.nan])
def test_a_scale_that_is_no_power_of_two_is_refused(scale):
    h = ExponentHistogram.of(torch.ones(3))
    for fraction in (h.fraction_lost, h.fraction_subnormal, h.fraction_overflow):
        with pytest.raises(ValueError, match="no power of two; only a power of two shifts"):
            fraction(FP16, scale)
    with pytest.raises(ValueError, match="no power of two"):
        h.best_scale(FP16, headroom=scale)


def test_other_bad_arguments_are_refused():
    h = ExponentHistogram.of(torch.ones(3))
    with pytest.raises(TypeError, match="scale must be a number, got str"):
        h.fraction_lost(FP16, "8")
    with pytest.raises(ValueError, match="at least 1"):
        h.best_scale(FP16, headroom=0.5)
    for dtype in (torch.int64, torch.float64, torch.bool):
        with pytest.raises(TypeError, match=r"call \.float\(\)"):
            ExponentHistogram.of(torch.ones(2, dtype=dtype))
    with pytest.raises(TypeError, match="expected tensors, got float"):
        ExponentHistogram.of([0.1])
