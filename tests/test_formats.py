"""The formats against ml_dtypes, NumPy, PyTorch's own casts and exact fractions."""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from amp_lab.formats import BF16, E4M3, E5M2, FP16, FP32, TF32, FloatFormat

FORMATS = [FP32, TF32, BF16, FP16, E4M3, E5M2]
SMALL = [BF16, FP16, E4M3, E5M2]
NUMPY = {
    FP32: np.float32,
    BF16: ml_dtypes.bfloat16,
    FP16: np.float16,
    E4M3: ml_dtypes.float8_e4m3fn,
    E5M2: ml_dtypes.float8_e5m2,
}
TORCH = {
    FP32: torch.float32,
    BF16: torch.bfloat16,
    FP16: torch.float16,
    E4M3: torch.float8_e4m3fn,
    E5M2: torch.float8_e5m2,
}
# Whether an E4M3 overflow saturates depends on the release of PyTorch.
TORCH_SATURATES = {
    f: f is E4M3 and bool(torch.tensor([1e9]).to(torch.float8_e4m3fn).float().isfinite())
    for f in SMALL
}


def name(format):
    return format.name


def all_codes(format):
    return np.arange(1 << format.bits, dtype=np.uint8 if format.bits == 8 else np.uint16)


def numpy_cast(array, format):
    with np.errstate(over="ignore", invalid="ignore"):
        return array.astype(NUMPY[format])


def assert_same(actual, expected):
    """Equal values, equal signs (of zeros too), NaN in the same places."""
    with np.errstate(invalid="ignore"):  # signaling NaNs
        actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    np.testing.assert_array_equal(actual, expected)
    numbers = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(actual[numbers]), np.signbit(expected[numbers]))


def midpoints(format):
    """Every value of a format, every tie between two, and the FP32 numbers beside both."""
    values = all_codes(format).view(NUMPY[format])
    values = np.unique(values[np.isfinite(values)].astype(np.float64))
    beyond = format.max + format.spacing(format.max) / 2
    edges = np.concatenate([values, (values[:-1] + values[1:]) / 2, [beyond, -beyond]])
    edges = edges.astype(np.float32)
    up, down = np.nextafter(edges, np.float32(np.inf)), np.nextafter(edges, np.float32(-np.inf))
    special = np.float32([0.0, -0.0, np.inf, -np.inf, np.nan])
    return np.concatenate([edges, up, down, special])


def random_fp32_patterns(count=300_000, seed=0):
    """All kinds of FP32 numbers: subnormals, inf and NaN among them."""
    patterns = np.random.default_rng(seed).integers(0, 1 << 32, count, dtype=np.uint32)
    return patterns.view(np.float32)


def round_exactly(x, format):
    """Round a finite number with integer arithmetic alone: the slow, obvious way."""
    exact = abs(Fraction(x))
    step = Fraction(2) ** (1 - (2 ** (format.exponent_bits - 1) - 1) - format.mantissa_bits)
    while exact >= step * 2 ** (format.mantissa_bits + 1):
        step *= 2
    rounded = round(exact / step) * step  # Python rounds fractions half to even
    if rounded > Fraction(format.max):
        rounded = math.inf if format.infinity else math.nan
    return math.copysign(float(rounded), x)


# ---- the constants ---------------------------------------------------------------------------


@pytest.mark.parametrize("format", NUMPY, ids=name)
def test_limits_agree_with_ml_dtypes(format):
    info = ml_dtypes.finfo(NUMPY[format])
    assert format.bits == info.bits
    assert format.exponent_bits == info.nexp
    assert format.mantissa_bits == info.nmant
    assert format.max == float(info.max)
    assert format.smallest_normal == float(info.smallest_normal)
    assert format.smallest_subnormal == float(info.smallest_subnormal)
    assert format.epsilon == float(info.eps)
    assert format.max_exponent == info.maxexp - 1 or format is E4M3
    assert format.min_exponent == info.minexp


@pytest.mark.parametrize("format", TORCH, ids=name)
def test_limits_agree_with_torch(format):
    info = torch.finfo(TORCH[format])
    assert (format.bits, format.max, format.epsilon) == (info.bits, info.max, info.eps)
    assert format.smallest_normal == info.smallest_normal


def test_tf32_is_fp32_with_fewer_mantissa_bits():
    assert TF32.bits == 19
    assert TF32.bias == FP32.bias == 127
    assert TF32.smallest_normal == FP32.smallest_normal
    assert TF32.epsilon == FP16.epsilon
    word = np.array([TF32.encode(0.1) << 13], dtype=np.uint32)
    assert word.view(np.float32)[0] == TF32.decode(TF32.encode(0.1))


def test_e4m3_exponent_reaches_one_further_than_its_bias():
    assert (E4M3.bias, E4M3.max_exponent, E4M3.max) == (7, 8, 448.0)
    assert (E5M2.bias, E5M2.max_exponent) == (15, 15)


def test_four_bit_format_of_our_own():
    tiny = FloatFormat("E2M1", exponent_bits=2, mantissa_bits=1)
    assert [tiny.decode(c) for c in range(6)] == [0.0, 0.5, 1.0, 1.5, 2.0, 3.0]
    assert tiny.decode(6) == math.inf and math.isnan(tiny.decode(7))
    assert tiny.quantize(torch.tensor([0.25, 0.75, 1.2, 2.5])).tolist() == [0.0, 1.0, 1.0, 2.0]


@pytest.mark.parametrize("sizes", [(1, 3), (9, 3), (5, 0), (5, 24)])
def test_sizes_that_do_not_fit_in_fp32_are_refused(sizes):
    with pytest.raises(ValueError, match="give 2 to 8 exponent bits and 1 to 23 mantissa"):
        FloatFormat("odd", *sizes)
    with pytest.raises(ValueError, match="give 2 to 7 exponent bits"):
        FloatFormat("odd", 8, 3, infinity=False)


# ---- every code ------------------------------------------------------------------------------


@pytest.mark.parametrize("format", SMALL, ids=name)
def test_decode_every_code(format):
    codes = all_codes(format)
    decoded = [format.decode(int(c)) for c in codes]
    assert_same(decoded, codes.view(NUMPY[format]))
    signed = torch.from_numpy(codes.view(np.int8 if format.bits == 8 else np.int16))
    assert_same(decoded, signed.view(TORCH[format]).double().numpy())


@pytest.mark.parametrize("format", SMALL, ids=name)
def test_encode_every_code(format):
    for code in all_codes(format).tolist():
        value = format.decode(code)
        if math.isnan(value):
            again = format.encode(value)
            assert math.isnan(format.decode(again))
            assert again >> (format.bits - 1) == code >> (format.bits - 1)
        else:
            assert format.encode(value) == code


@pytest.mark.parametrize("format", SMALL, ids=name)
def test_quantize_leaves_every_code_alone(format):
    values = all_codes(format).view(NUMPY[format]).astype(np.float32)
    assert_same(format.quantize(torch.from_numpy(values)), values)
    assert_same(format.quantize(torch.from_numpy(values).double()), values)


@pytest.mark.parametrize("format", [E4M3, E5M2, FP16], ids=name)
def test_encode_agrees_with_ml_dtypes_on_every_tie(format):
    edges = midpoints(format)[:: 7 if format is FP16 else 1]
    edges = edges[~np.isnan(edges)]
    codes = numpy_cast(edges, format).view(np.uint8 if format.bits == 8 else np.uint16)
    mine = [format.encode(float(x)) for x in edges]
    assert mine == codes.tolist()


# ---- quantize against both libraries ---------------------------------------------------------


@pytest.mark.parametrize("format", SMALL, ids=name)
@pytest.mark.parametrize(
    "source", [midpoints, lambda _: random_fp32_patterns()], ids=["ties", "random"]
)
def test_quantize_agrees_with_ml_dtypes_and_torch(format, source):
    x = source(format)
    expected = numpy_cast(x, format).astype(np.float32)
    tensor = torch.from_numpy(x)
    quantized = format.quantize(tensor)
    assert quantized.dtype == torch.float32
    assert_same(quantized, expected)
    by_torch = tensor.to(TORCH[format]).float()
    assert_same(format.quantize(tensor, saturate=TORCH_SATURATES[format]), by_torch)


@pytest.mark.parametrize("format", SMALL, ids=name)
def test_random_values_near_the_formats_own_range(format):
    rng = np.random.default_rng(1)
    lowest = math.log2(format.smallest_subnormal) - 3
    x = rng.standard_normal(200_000) * 2.0 ** rng.uniform(lowest, format.max_exponent - 3, 200_000)
    x = x.astype(np.float32)
    assert_same(format.quantize(torch.from_numpy(x)), numpy_cast(x, format).astype(np.float32))


def test_fp16_landmarks():
    x = torch.tensor([65519.99, 65520.0, 2.0**-24, 2.0**-25, -(2.0**-25)], dtype=torch.float64)
    assert_same(FP16.quantize(x), [65504.0, math.inf, 2.0**-24, 0.0, -0.0])
    assert FP16.quantize(torch.tensor(65519.99)).item() == 65504.0
    just_above = torch.nextafter(torch.tensor(2.0**-25), torch.tensor(1.0))
    assert FP16.quantize(just_above).item() == 2.0**-24
    assert FP16.quantize(torch.tensor(2049.0)).item() == 2048.0
    assert FP16.quantize(torch.tensor(2051.0)).item() == 2052.0


def test_e4m3_overflow_is_nan_or_saturates():
    x = torch.tensor([464.0, 464.1, 1e9, math.inf, -math.inf, math.nan])
    assert_same(E4M3.quantize(x), [448.0, math.nan, math.nan, math.nan, math.nan, math.nan])
    assert_same(E4M3.quantize(x, saturate=True), [448.0, 448.0, 448.0, 448.0, -448.0, math.nan])
    assert [E4M3.encode(v) for v in (464.1, -1e9, math.inf)] == [0x7F, 0xFF, 0x7F]
    assert [E4M3.encode(v, saturate=True) for v in (464.1, -1e9)] == [0x7E, 0xFE]


@pytest.mark.parametrize("format", [FP16, E5M2, BF16], ids=name)
def test_saturate_gives_max_instead_of_infinity(format):
    x = torch.tensor([math.inf, -math.inf, format.max, math.nan])
    assert_same(format.quantize(x, saturate=True), [format.max, -format.max, format.max, math.nan])
    assert format.decode(format.encode(math.inf, saturate=True)) == format.max


def test_tf32_agrees_with_rounding_fp32_bit_patterns():
    x = random_fp32_patterns()
    ties = (np.arange(1 << 19, dtype=np.uint32) << 13) | 0x1000
    x = np.concatenate([x, ties.view(np.float32), (ties - 1).view(np.float32)])
    bits = x.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0xFFF + (bits >> np.uint64(13) & np.uint64(1))) & np.uint64(0xFFFFE000)
    expected = np.where(np.isnan(x), np.nan, rounded.astype(np.uint32).view(np.float32))
    assert_same(TF32.quantize(torch.from_numpy(x)), expected)


def test_fp32_keeps_every_float32_and_rounds_float64():
    x = random_fp32_patterns()
    assert_same(FP32.quantize(torch.from_numpy(x)), x)
    rng = np.random.default_rng(2)
    wide = rng.standard_normal(100_000) * 2.0 ** rng.uniform(-155, 130, 100_000)
    assert_same(FP32.quantize(torch.from_numpy(wide)), numpy_cast(wide, FP32))


@pytest.mark.parametrize("format", FORMATS, ids=name)
def test_float64_is_rounded_once(format):
    tie = 1 + format.epsilon / 2
    above, below = tie + 2.0**-45, tie - 2.0**-45
    x = torch.tensor([below, tie, above], dtype=torch.float64)
    assert format.quantize(x).tolist() == [1.0, 1.0, 1.0 + format.epsilon]
    assert format.quantize(x).dtype == torch.float64
    least = format.smallest_subnormal
    halves = torch.tensor([least / 2, least / 2 * (1 + 2.0**-50)], dtype=torch.float64)
    assert format.quantize(halves).tolist() == [0.0, least]
    huge = torch.tensor([1e300, 1e-300, 5e-324], dtype=torch.float64)
    assert_same(format.quantize(huge), [math.inf if format.infinity else math.nan, 0.0, 0.0])


def test_float64_agrees_with_numpy_half():
    rng = np.random.default_rng(3)
    x = rng.standard_normal(100_000) * 2.0 ** rng.uniform(-28, 17, 100_000)
    assert_same(FP16.quantize(torch.from_numpy(x)), numpy_cast(x, FP16))


@given(x=st.floats(allow_nan=False, allow_infinity=False), near=st.floats(-1e5, 1e5))
@pytest.mark.parametrize("format", FORMATS, ids=name)
def test_encode_and_quantize_agree_with_exact_fractions(format, x, near):
    for value in (x, near):
        expected = round_exactly(value, format)
        assert_same(format.decode(format.encode(value)), expected)
        assert_same(format.quantize(torch.tensor([value], dtype=torch.float64))[0], expected)


@given(bits=st.integers(0, 2**32 - 1))
@pytest.mark.parametrize("format", FORMATS, ids=name)
def test_encode_and_quantize_agree_on_fp32_patterns(format, bits):
    x = np.array([bits], dtype=np.uint32).view(np.float32)
    rounded = format.quantize(torch.from_numpy(x))[0].item()
    assert_same(format.decode(format.encode(float(x[0]))), rounded)


def test_quantize_keeps_the_shape_and_the_input():
    x = torch.randn(70_001, 3)
    before = x.clone()
    for tensor in (x, x.T, x[::2], x[0, 0], x[:0]):
        quantized = FP16.quantize(tensor)
        assert quantized.shape == tensor.shape
        assert torch.equal(quantized, tensor.half().float())
    assert torch.equal(x, before)
    wide = before.double()
    FP16.quantize(wide)
    assert torch.equal(wide, before.double())
    assert not FP16.quantize(x.requires_grad_()).requires_grad


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("format", FORMATS, ids=name)
def test_quantize_on_a_gpu(format):
    x = torch.from_numpy(random_fp32_patterns())
    assert_same(format.quantize(x.cuda()).cpu(), format.quantize(x))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float16, torch.complex64])
def test_quantize_refuses_other_dtypes(dtype):
    with pytest.raises(TypeError, match=r"call \.float\(\)"):
        FP16.quantize(torch.ones(2, dtype=dtype))


def test_quantize_refuses_what_is_no_tensor():
    with pytest.raises(TypeError, match="needs a tensor, got float"):
        FP16.quantize(0.1)


# ---- spacing, explain, errors ----------------------------------------------------------------


@pytest.mark.parametrize("format", [FP32, FP16, BF16], ids=name)
def test_spacing_is_the_distance_to_the_next_number(format):
    dtype = NUMPY[format]
    x = np.abs(np.random.default_rng(4).standard_normal(500).astype(np.float32))
    x = np.concatenate([x, np.float32([0, 1, 2, 3.99, 1e-4, format.smallest_normal])])
    x = np.concatenate([x, x * np.float32(format.smallest_normal)]).astype(dtype)
    following = np.nextafter(x, dtype(np.inf)).astype(np.float64)
    gaps = following - x.astype(np.float64)
    assert [format.spacing(v) for v in x.astype(np.float64)] == gaps.tolist()
    assert [format.spacing(-v) for v in x.astype(np.float64)] == gaps.tolist()


def test_spacing_between_and_beyond_the_numbers():
    assert FP16.spacing(0.0) == 2.0**-24
    assert FP16.spacing(1.0) == FP16.epsilon
    assert FP16.spacing(0.9999999) == FP16.epsilon / 2
    assert FP16.spacing(65504) == FP16.spacing(65519) == 32
    assert math.isnan(FP16.spacing(65520))
    assert math.isnan(FP16.spacing(math.nan))


def test_explain_normal():
    parts = FP16.explain(0.1)
    assert (parts.sign, parts.exponent, parts.mantissa) == (0, 0b01011, 0b1001100110)
    assert (parts.kind, parts.bits, parts.x) == ("normal", 0x2E66, 0.1)
    assert parts.value == float(np.float16(0.1))
    assert parts.error == float(np.float16(0.1)) - 0.1
    assert parts.value == parts.significand * 2.0**parts.power
    assert parts.pattern == "0 01011 1001100110"
    assert str(parts).splitlines() == [
        "0.1 in FP16: 0 01011 1001100110 (0x2e66)",
        "normal: +1.599609375 x 2^-4 = 0.0999755859375",
        "error -2.44141e-05, spacing 6.10352e-05",
    ]


@pytest.mark.parametrize(
    ("format", "x", "kind", "bits"),
    [
        (FP16, 0, "zero", 0x0000),
        (FP16, -0.0, "zero", 0x8000),
        (FP16, -1e-8, "zero", 0x8000),
        (FP16, 1e-7, "subnormal", 0x0002),
        (FP16, 2.0**-14, "normal", 0x0400),
        (FP16, 70000, "infinity", 0x7C00),
        (FP16, -math.inf, "infinity", 0xFC00),
        (FP16, math.nan, "NaN", 0x7E00),
        (E4M3, 448, "normal", 0x7E),
        (E4M3, -math.inf, "NaN", 0xFF),
        (E5M2, math.inf, "infinity", 0x7C),
        (BF16, 1.0, "normal", 0x3F80),
    ],
)
def test_explain_kinds(format, x, kind, bits):
    parts = format.explain(x)
    assert (parts.kind, parts.bits) == (kind, bits)
    assert f"0x{bits:0{format.bits // 4}x}" in repr(parts)
    assert kind in repr(parts)


@pytest.mark.parametrize("format", [E4M3, E5M2], ids=name)
def test_explain_puts_every_code_together_again(format):
    for code in range(256):
        parts = format.explain(bits=code)
        assert int(parts.pattern.replace(" ", ""), 2) == parts.bits == code
        if parts.kind in ("normal", "subnormal", "zero"):
            sign = -1 if parts.sign else 1
            assert sign * parts.significand * 2.0**parts.power == parts.value == format.decode(code)
            assert parts.error == 0


def test_explain_keeps_the_payload_of_a_nan_code():
    parts = FP16.explain(bits=0x7E01)
    assert (parts.kind, parts.bits, parts.mantissa) == ("NaN", 0x7E01, 0x201)


def test_error_of_an_infinity_is_zero_and_of_an_overflow_infinite():
    assert FP16.explain(math.inf).error == 0.0
    assert FP16.explain(1e6).error == math.inf


@pytest.mark.parametrize("method", [FP16.encode, FP16.spacing, FP16.explain])
@pytest.mark.parametrize("x", ["0.1", None, 1j, True, [1.0], torch.ones(2), torch.tensor(True)])
def test_what_is_no_number_is_refused(method, x):
    with pytest.raises(TypeError):
        method(x)


def test_scalars_of_any_kind_are_numbers():
    kinds = (1, 1.0, np.float16(1), np.int8(1), torch.tensor(1), torch.tensor([1.0]), Fraction(1))
    assert {FP16.encode(x) for x in kinds} == {0x3C00}
    assert FP16.encode(10**400) == 0x7C00
    assert FP16.encode(-(10**400)) == 0xFC00


@pytest.mark.parametrize("format", FORMATS, ids=name)
def test_codes_out_of_range_are_refused(format):
    for code in (-1, 1 << format.bits):
        with pytest.raises(ValueError, match=f"no {format.name} code"):
            format.decode(code)
    for code in (1.0, "0x3c00", None):
        with pytest.raises(TypeError, match="code is an integer"):
            format.decode(code)


def test_explain_needs_exactly_one_of_number_and_code():
    with pytest.raises(TypeError, match="explain needs either"):
        FP16.explain()
    with pytest.raises(TypeError, match="explain needs either"):
        FP16.explain(1.0, bits=0x3C00)
