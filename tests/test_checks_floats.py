"""The exercises of notebook 01: right answers pass, and each typical mistake has a hint of its own."""

import math

import numpy as np
import pytest
import torch

import amp_lab as lab

FP16, BF16 = torch.float16, torch.bfloat16


def answer(*values):
    """An attempt that returns `values`, whatever it is asked."""
    return lambda *_: values[0] if len(values) == 1 else values


def stub(*_):
    raise NotImplementedError


# ---- right answers ---------------------------------------------------------------------------


def decode_by_arithmetic(code):
    sign = -1.0 if code >> 15 else 1.0
    exponent, mantissa = code >> 10 & 31, code & 1023
    if exponent == 31:
        return sign * math.inf if mantissa == 0 else math.nan
    if exponent == 0:
        return sign * mantissa * 2**-24
    return sign * (1 + mantissa / 1024) * 2.0 ** (exponent - 15)


def decode_by_numpy(code):
    return np.uint16(code).view(np.float16)


def missing_by_trying(dtype):
    for n in range(1, 100_000):
        if torch.tensor(n, dtype=dtype).item() != n:
            return n


def missing_by_epsilon(dtype):
    return torch.tensor(2 / torch.finfo(dtype).eps + 1)


def spacing_by_frexp(x):
    exponent = max(math.frexp(x)[1] - 1, -14) if x else -14
    return 2.0 ** (exponent - 10)


def spacing_by_nextafter(x):
    x = torch.tensor(abs(x), dtype=FP16)
    return torch.nextafter(x, torch.tensor(math.inf, dtype=FP16)) - x


@pytest.mark.parametrize(
    ("check", "attempt"),
    [
        ("by_hand", answer(3.0, -0.625, 3 * 2**-24)),
        ("by_hand", answer(3, -5 / 8, 1.79e-7)),
        ("decode_fp16", decode_by_arithmetic),
        ("decode_fp16", decode_by_numpy),
        ("decode_fp16", lab.FP16.decode),
        ("first_missing_integer", missing_by_trying),
        ("first_missing_integer", missing_by_epsilon),
        ("three_sums", answer(4100, 260, 65504)),
        ("three_sums", lambda: torch.tensor([4100.0, 260.0, 65504.0])),
        ("spacing", spacing_by_frexp),
        ("spacing", spacing_by_nextafter),
        ("spacing", lambda x: np.spacing(np.float16(x))),
        ("spacing", lab.FP16.spacing),
    ],
)
def test_right_answers_pass(check, attempt, capsys):
    getattr(lab.checks, check)(attempt)
    printed = capsys.readouterr().out
    assert printed.startswith(f"PASSED   {check}: ")
    assert printed.count("\n") == 1


@pytest.mark.parametrize(
    "check", ["by_hand", "decode_fp16", "first_missing_integer", "three_sums", "spacing"]
)
def test_a_stub_is_not_attempted(check, capsys):
    getattr(lab.checks, check)(stub)
    assert capsys.readouterr().out.startswith(f"TO DO    {check}: not attempted")


# ---- wrong answers ---------------------------------------------------------------------------


def without(part):
    """Decode like `decode_by_arithmetic`, with one part forgotten."""

    def decode(code):
        sign = -1.0 if code >> 15 and part != "sign" else 1.0
        if part == "brackets":
            sign = -1.0
        if part == "power of -1":
            sign = code >> 15
        exponent, mantissa = code >> 10 & 31, code & 1023
        if part == "floats" and code & 0x7FFF == 0:
            return int(sign) * mantissa / 1024
        bias = 0 if part == "bias" else 15
        if exponent == 31 and part != "infinity":
            is_infinity = mantissa == 0 or part == "NaN"
            return sign * math.inf if is_infinity else math.nan
        if exponent == 0 and part != "subnormals":
            power = -15 if part == "power" else -14
            value = 0.0 if part == "flushed" else mantissa / 1024 * 2.0**power
            return value if part == "zero's sign" and value == 0 else sign * value
        leading = 0 if part == "leading one" else 1
        scale = 1023 if part == "1024" else 1024
        return sign * (leading + mantissa / scale) * 2.0 ** (exponent - bias)

    return decode


def rounds_both_sides(dtype):
    for n in range(1, 3000):
        if torch.tensor(n, dtype=dtype) != n:
            return n


def last_held(dtype):
    return missing_by_trying(dtype) - 1


@pytest.mark.parametrize(
    ("check", "attempt", "hint"),
    [
        ("by_hand", answer(1.0, -0.625, 3 * 2**-24), "the digit 1 before the point is not stored"),
        ("by_hand", answer(1.5, -0.625, 3 * 2**-24), "by 2 to the power 16 - 15"),
        ("by_hand", answer(3, -1.25, 3 * 2**-24), "by 2 to the power 14 - 15"),
        ("by_hand", answer(3, -0.625, 3 / 1024), "3/1024 is the significand"),
        ("by_hand", answer(3, -0.625, 3 * 2**-14), "it is worth 3/1024"),
        ("by_hand", answer(98304, -0.625, 3 * 2**-24), "the exponent field is 16"),
        ("by_hand", answer(4, -0.625, 3 * 2**-24), "significand is 1.5, not 2"),
        ("by_hand", answer(3, 0.625, 3 * 2**-24), "What does it say?"),
        ("by_hand", answer(3, -0.125, 3 * 2**-24), "1.01 in binary"),
        ("by_hand", answer(3, -2.5, 3 * 2**-24), "the last step is to halve"),
        ("by_hand", answer(3, -20480, 3 * 2**-24), "bias 15 from the exponent field 14"),
        ("by_hand", answer(3, -0.75, 3 * 2**-24), "a quarter, not a half"),
        ("by_hand", answer(3, -0.625, 0), "small, not zero"),
        ("by_hand", answer(3, -0.625, 1.0029296875 * 2**-15), "means a subnormal number"),
        ("by_hand", answer(3, -0.625, 1.0029296875 * 2**-14), "has a 0 before the point, not a 1"),
        ("by_hand", answer(3, -0.625, 3 * 2**-25), "2^-14, not 2^-15"),
        ("by_hand", answer(3, -0.625, 17), "the third code is not 17"),
        ("by_hand", answer(math.nan, -0.625, 17), "the first code is not nan"),
        ("by_hand", answer(3, -0.625), "you returned 2"),
        ("by_hand", answer(None), "return 3 numbers, as in"),
        ("decode_fp16", without("bias"), "0x3c00 is 1.0: exponent field 15, minus the bias 15"),
        ("decode_fp16", without("leading one"), "0x3c00 is 1.0"),
        ("decode_fp16", without("1024"), "512 is worth 512/1024"),
        ("decode_fp16", without("brackets"), "Write (-1)**sign"),
        ("decode_fp16", without("power of -1"), "must not be multiplied with"),
        ("decode_fp16", without("floats"), "Make the magnitude a float first"),
        ("decode_fp16", without("sign"), "the sign is the leftmost bit"),
        ("decode_fp16", without("subnormals"), "0x0001 is 2^-24, a subnormal"),
        ("decode_fp16", without("power"), "0x0001 is 2^-24, a subnormal"),
        ("decode_fp16", without("flushed"), "0x0001 is 2^-24, a subnormal"),
        ("decode_fp16", without("zero's sign"), "zero has a sign, too"),
        ("decode_fp16", without("infinity"), "0x7c00 is infinity"),
        ("decode_fp16", without("NaN"), "0x7e00 is NaN"),
        (
            "decode_fp16",
            lambda code: 0.0 if code == 12345 else lab.FP16.decode(code),
            "the code 0x3039",
        ),
        ("decode_fp16", lambda code: None, "gave something of type NoneType"),
        ("first_missing_integer", rounds_both_sides, "Use .item()"),
        ("first_missing_integer", answer(None), "If your code prints the integer"),
        ("first_missing_integer", last_held, "2048 is the last of the row"),
        ("first_missing_integer", answer(2049), "the same integer for both dtypes"),
        ("first_missing_integer", lambda d: 1 / torch.finfo(d).eps + 1, "1025 is held by float16"),
        ("first_missing_integer", answer(65505), "where the range of float16 ends"),
        ("first_missing_integer", answer(1000), "float16 holds 1000 exactly"),
        ("first_missing_integer", answer(4097), "there is a smaller one"),
        ("first_missing_integer", answer(2048.5), "return an integer"),
        ("first_missing_integer", answer("2049th"), "return a number"),
        ("three_sums", answer(4099, 259, 65519), "4099 is the exact sum"),
        ("three_sums", answer(4096, 260, 65504), "not down"),
        ("three_sums", answer(4098, 260, 65504), "4098 is not an FP16 number"),
        ("three_sums", answer(4100, 259, 65504), "259 is the exact sum"),
        ("three_sums", answer(4100, 258, 65504), "whose last mantissa bit is 0"),
        ("three_sums", answer(4100, 256, 65504), "large enough to be felt"),
        ("three_sums", answer(4100, 260, math.inf), "half a spacing beyond"),
        ("three_sums", answer(4100, 260, 65519), "but no FP16 number"),
        ("three_sums", answer(4100, 260, 65520), "just below it"),
        ("three_sums", answer(7, 260, 65504), "is not 7. Find the spacing"),
        ("three_sums", answer(4100, 260), "you returned 2"),
        ("spacing", answer(2**-10), "you always return 2^-10"),
        ("spacing", lambda x: abs(x) * 2**-10, "use the exponent, the logarithm rounded down"),
        ("spacing", lambda x: 2.0 ** (round(math.log2(abs(x))) - 10), "round the logarithm down"),
        (
            "spacing",
            lambda x: 2.0 ** (math.floor(math.log2(abs(x))) - 10),
            "the spacing stays 2^-24",
        ),
        (
            "spacing",
            lambda x: 2.0 ** (max(math.floor(math.log2(abs(x))), -14) - 10),
            "zero has no logarithm",
        ),
        (
            "spacing",
            lambda x: 2.0 ** (max(math.floor(math.log2(x)), -14) - 10) if x else 2**-24,
            "use abs(x)",
        ),
        ("spacing", lambda x: 2.0 ** (max(math.frexp(x)[1], -14) - 10), "is p + 1: subtract 1"),
        ("spacing", lambda x: 2.0 ** (int(math.log2(abs(x))) - 10), "math.floor rounds it down"),
        ("spacing", lambda x: 2**-24 if x < 2**-14 else spacing_by_frexp(x), "use abs(x)"),
        (
            "spacing",
            lambda x: 2.0 ** (max(math.frexp(x)[1] - 1, -14) - 10),
            "math.frexp(0.0) is (0.0, 0)",
        ),
        ("spacing", lambda x: spacing_by_frexp(x) / 2, "FP16 numbers are 2^-10"),
        ("spacing", lambda x: max(spacing_by_frexp(x), 2**-23), "at 6.10352e-05 FP16 numbers are"),
        ("spacing", lambda x: math.copysign(spacing_by_frexp(x), x), "at -5 it is -0.00390625"),
        ("spacing", answer(None), "gave something of type NoneType"),
        ("spacing", lambda x: 1 / 0, "your code raised ZeroDivisionError"),
    ],
)
def test_typical_mistakes_have_their_own_hint(check, attempt, hint, capsys):
    getattr(lab.checks, check)(attempt)
    printed = capsys.readouterr().out
    assert printed.startswith(f"NOT YET  {check}: ")
    assert hint in printed
    assert printed.count("\n") == 1


def test_by_hand_asks_for_the_codes_that_its_docstring_shows():
    shown = lab.checks.by_hand.__doc__
    for value in (3.0, -0.625, 3 * 2**-24):
        assert lab.FP16.explain(value).pattern in shown
