"""Exercises of notebook 01, floating-point formats."""

import math

import torch

from ..formats import FP16
from .exercise import Hint, exercise

__all__ = ["by_hand", "decode_fp16", "first_missing_integer", "spacing", "three_sums"]


def _numbers(answer, count):
    """The learner's answer as a list of floats."""
    try:
        numbers = [float(x) for x in answer]
    except (TypeError, ValueError):
        raise Hint(f"return {count} numbers, as in `return 1.0, 2.0, 3.0`.") from None
    if len(numbers) != count:
        raise Hint(f"return {count} numbers; you returned {len(numbers)}.")
    return numbers


def _number(answer, call):
    try:
        return float(answer)
    except (TypeError, ValueError):
        raise Hint(
            f"return a number; {call} gave something of type {type(answer).__name__}."
        ) from None


def _same(a, b):
    if math.isnan(b):
        return math.isnan(a)
    return a == b and math.copysign(1, a) == math.copysign(1, b)


# ---- decode three codes by hand ------------------------------------------------------------------

_CODES = (0b0_10000_1000000000, 0b1_01110_0100000000, 0b0_00000_0000000011)


@exercise
def by_hand(attempt):
    """Check `by_hand()`: the values of three FP16 codes, worked out with paper and pencil.

    The codes are 0 10000 1000000000, 1 01110 0100000000 and 0 00000 0000000011.
    """
    answers = _numbers(attempt(), 3)
    right = [FP16.decode(code) for code in _CODES]
    one_and = 1 + 3 / 1024
    hints = [
        {
            1.0: "first code: the mantissa is read as 1.1 in binary: the digit 1 before the point is "
            "not stored. You left it out.",
            1.5: "first code: 1.5 is the significand. Multiply it by 2 to the power 16 - 15.",
            98304.0: "first code: the exponent field is 16, from which the bias 15 is subtracted.",
            4.0: "first code: the first mantissa bit is worth 1/2, so the significand is 1.5, not 2.",
        },
        {
            0.625: "second code: the first bit is 1. What does it say?",
            -1.25: "second code: 1.25 is the significand. Multiply it by 2 to the power 14 - 15.",
            -0.125: "second code: a normal number has a 1 before the point: 1.01 in binary.",
            -2.5: "second code: the exponent is 14 - 15 = -1, so the last step is to halve.",
            -20480.0: "second code: subtract the bias 15 from the exponent field 14.",
            -0.75: "second code: 01 after the point is a quarter, not a half.",
        },
        {
            0.0: "third code: all exponent bits are 0, but the mantissa is not. It is a subnormal "
            "number: small, not zero.",
            one_and * 2**-15: (
                "third code: an exponent field of 0 means a subnormal number. It has a 0 before "
                "the point, and its power is -14."
            ),
            one_and * 2**-14: ("third code: a subnormal number has a 0 before the point, not a 1."),
            3 / 1024: "third code: 3/1024 is the significand, 0.M. Multiply it by 2^-14.",
            3 * 2**-14: (
                "third code: the mantissa field is 3, but its ten bits stand after the point: it "
                "is worth 3/1024."
            ),
            3 / 1024 * 2**-15: (
                "third code: almost. Subnormal numbers use the power of the smallest normal ones, "
                "2^-14, not 2^-15."
            ),
        },
    ]
    for place, answer, expected, known in zip(
        ("first", "second", "third"), answers, right, hints, strict=True
    ):
        if not math.isclose(answer, expected, rel_tol=0.01):  # "1.79e-7" will do
            hint = (h for wrong, h in known.items() if math.isclose(answer, wrong, rel_tol=0.01))
            raise Hint(
                next(hint, None)
                or f"the {place} code is not {answer:g}. Write down sign, exponent field and mantissa "
                "field, and then put them into the formula."
            )
    return "all three, the subnormal one as well."


# ---- decode any FP16 code ------------------------------------------------------------------------


@exercise
def decode_fp16(attempt):
    """Check `decode_fp16(code)`: the value of any FP16 code, an integer from 0 to 65535.

    It is compared with PyTorch's own reading of all 65,536 codes.
    """
    one = _number(attempt(0x3C00), "decode_fp16(0x3c00)")
    if one == -1:
        raise Hint(
            "the code 0x3c00 is 1.0; you returned -1. In Python -1**sign is -(1**sign), always -1. "
            "Write (-1)**sign."
        )
    if one == 0:
        raise Hint(
            "the code 0x3c00 is 1.0; you returned 0. Its sign bit is 0: that means plus, and must "
            "not be multiplied with. Use (-1)**sign."
        )
    for code, hint in (
        (0x3C00, "the code 0x3c00 is 1.0: exponent field 15, minus the bias 15."),
        (0x4000, "the code 0x4000 is 2.0: exponent field 16, minus the bias 15."),
        (0x3E00, "the code 0x3e00 is 1.5: the mantissa field 512 is worth 512/1024, on top of 1."),
        (0xC000, "the code 0xc000 is -2.0: the sign is the leftmost bit, code >> 15."),
        (0x0001, "the code 0x0001 is 2^-24, a subnormal number: 0 before the point, power -14."),
        (0x0200, "the code 0x0200 is 2^-15, a subnormal number: 0 before the point, power -14."),
        (0x0000, "the code 0x0000 is 0.0."),
        (
            0x8000,
            "the code 0x8000 is -0.0: zero has a sign, too. (Integers have no -0: a -1 that is "
            "multiplied by the integer 0 gives 0. Make the magnitude a float first.)",
        ),
        (0x7C00, "the code 0x7c00 is infinity: exponent field 31 and mantissa 0."),
        (0xFC00, "the code 0xfc00 is minus infinity."),
        (0x7E00, "the code 0x7e00 is NaN: exponent field 31 and a mantissa that is not 0."),
    ):
        answer = _number(attempt(code), f"decode_fp16({code:#06x})")
        if not _same(answer, FP16.decode(code)):
            raise Hint(f"{hint} You returned {answer:g}.")

    codes = torch.arange(1 << 16, dtype=torch.int32)
    expected = codes.to(torch.int16).view(torch.float16).tolist()
    for code, value in enumerate(expected):
        answer = _number(attempt(code), f"decode_fp16({code:#06x})")
        if not _same(answer, value):
            raise Hint(f"the code {code:#06x} is {value!r}; you returned {answer!r}.")
    return "all 65,536 codes, as PyTorch reads them."


# ---- the first integer that is missing -----------------------------------------------------------


def _first_missing(dtype):
    return next(n for n in range(1, 1 << 20) if torch.tensor(n).to(dtype).item() != n)


@exercise
def first_missing_integer(attempt):
    """Check `first_missing_integer(dtype)`: the smallest positive integer that `dtype` cannot hold.

    It is asked for torch.float16 and torch.bfloat16.
    """
    largest = {torch.float16: (65504, 65505, 65520)}
    answers = {dtype: attempt(dtype) for dtype in (torch.float16, torch.bfloat16)}
    if answers[torch.float16] is None or answers[torch.bfloat16] is None:
        raise Hint(
            "nothing was returned. If your code prints the integer, let it return it. If it finds "
            "none: does your comparison round both sides? torch.tensor(5001, "
            "dtype=torch.float16) == 5001 is True: the 5001 on the right is rounded as well. "
            "Use .item() to compare as Python numbers."
        )
    for dtype, answer in answers.items():
        name = str(dtype).removeprefix("torch.")
        answer = _number(answer, f"first_missing_integer({name})")
        right = _first_missing(dtype)
        if answer % 1 != 0:
            raise Hint(f"return an integer; you returned {answer:g} for {name}.")
        if answer == right:
            continue
        if answer == right - 1:
            raise Hint(f"{right - 1} is the last of the row that {name} holds: one further.")
        if dtype is torch.bfloat16 and answer == answers[torch.float16]:
            raise Hint("you gave the same integer for both dtypes; BF16 has fewer mantissa bits.")
        if answer == right // 2 + 1:
            raise Hint(
                f"{answer:g} is held by {name}: the 1 before the point is not stored, so there is "
                "one more bit of precision than there are mantissa bits."
            )
        if answer in largest.get(dtype, ()):
            raise Hint(
                f"{answer:g} is where the range of {name} ends. Integers go missing much earlier: "
                "where neighbors are 2 apart."
            )
        if torch.tensor(answer).to(dtype).item() == answer:
            raise Hint(f"{name} holds {answer:g} exactly.")
        raise Hint(
            f"{name} cannot hold {answer:g}, but there is a smaller one that it cannot hold."
        )
    return (
        "right for both dtypes: it is the first one beyond the place where neighbors are 2 apart."
    )


# ---- predict three sums --------------------------------------------------------------------------

_SUMS = (
    (torch.float16, 4096.0, 3.0),
    (torch.bfloat16, 256.0, 3.0),
    (torch.float16, 65504.0, 15.0),
)


@exercise
def three_sums(attempt):
    """Check `three_sums()`: 4096 + 3 in FP16, 256 + 3 in BF16, 65504 + 15 in FP16, predicted."""
    answers = _numbers(attempt(), 3)
    hints = (
        {
            4099.0: "4096 + 3 in FP16: 4099 is the exact sum. Which numbers does FP16 have around it? "
            "Between 4096 and 8192 they are 4 apart.",
            4096.0: "4096 + 3 in FP16: rounding goes to the nearest number, not down. 4099 lies "
            "between 4096 and 4100.",
            4098.0: "4096 + 3 in FP16: 4098 is not an FP16 number. From 4096 on they are 4 apart.",
        },
        {
            259.0: "256 + 3 in BF16: 259 is the exact sum. BF16 numbers from 256 to 512 are 2 apart.",
            258.0: "256 + 3 in BF16: a tie between 258 and 260. It goes to the one whose last mantissa "
            "bit is 0: 258 is 256 + one step, 260 is 256 + two steps.",
            256.0: "256 + 3 in BF16: the neighbors of 259 are 258 and 260. 256 + 1 would be lost, but "
            "3 is large enough to be felt.",
        },
        {
            math.inf: "65504 + 15 in FP16: overflow begins half a spacing beyond the largest number. "
            "The spacing there is 32.",
            65519.0: "65504 + 15 in FP16: 65519 is the exact sum, but no FP16 number.",
            65520.0: "65504 + 15 in FP16: 65520 is the tie from which on the result is infinity. You "
            "are just below it.",
        },
    )
    for (dtype, a, b), answer, known in zip(_SUMS, answers, hints, strict=True):
        right = (torch.tensor(a, dtype=dtype) + torch.tensor(b, dtype=dtype)).item()
        if answer != right:
            name = "FP16" if dtype is torch.float16 else "BF16"
            raise Hint(
                known.get(answer)
                or f"{a:g} + {b:g} in {name} is not {answer:g}. Find the spacing at {a:g} first: a sum "
                "is the exact result, rounded to the nearest number."
            )
    return "nearest number, ties to even, overflow only from half a spacing beyond the largest."


# ---- spacing -------------------------------------------------------------------------------------


@exercise
def spacing(attempt):
    """Check `spacing(x)`: the distance between neighboring FP16 numbers at `x`, a finite number."""

    def ask(x):
        try:
            return _number(attempt(x), f"spacing({x:g})")
        except (ValueError, OverflowError) as error:
            if x == 0:
                raise Hint(
                    f"spacing(0) raised {type(error).__name__}: zero has no logarithm. Zero is "
                    "among the subnormal numbers, which are 2^-24 apart."
                ) from None
            if x < 0:
                raise Hint(
                    f"spacing({x:g}) raised {type(error).__name__}: the spacing depends on the "
                    "magnitude; use abs(x)."
                ) from None
            raise

    if ask(1.0) == 2**-9 and ask(5.0) == 2**-7:
        raise Hint(
            "twice too much: at 1 = 2^0 the spacing is 2^-10. The second part of math.frexp(x) is "
            "p + 1: subtract 1."
        )
    if ask(1.0) == ask(1024.0) == 2**-10:
        raise Hint(
            "you always return 2^-10. That is the spacing from 1 to 2; from 2 to 4 it is twice that."
        )
    if ask(1.0) == 2**-10 and ask(1.5) == 1.5 * 2**-10:
        raise Hint(
            "your spacing grows within the interval from 1 to 2. It is constant from one power of "
            "two to the next: use the exponent, the logarithm rounded down."
        )
    if ask(1.0) == 2**-10 and ask(1.9) == 2**-9:
        raise Hint("spacing(1.9) is 2^-10, as for all of 1 to 2: round the logarithm down.")
    if ask(1.0) == 2**-10 and ask(3e-5) == 2**-26:
        raise Hint(
            "below 2^-14 the numbers are subnormal, and the spacing stays 2^-24: the exponent is "
            "never smaller than -14."
        )
    if ask(1.0) == 2**-10 and ask(0.1) == 2**-13:
        raise Hint(
            "twice too much at 0.1, whose logarithm is negative: int() cuts it towards zero. "
            "math.floor rounds it down."
        )
    if ask(-5.0) != ask(5.0) == 2**-8:
        raise Hint(
            f"at 5 your spacing is 2^-8, which is right, and at -5 it is {ask(-5.0):g}. The sign "
            "does not matter: use abs(x)."
        )
    if ask(3e-5) == 2**-24 and ask(0.0) == 2**-11:
        raise Hint(
            "at 0 you returned 2^-11: math.frexp(0.0) is (0.0, 0), as if 0 were about 1/2. Zero is "
            "among the subnormal numbers, which are 2^-24 apart."
        )
    for x in (
        1.0,
        2.0,
        1.5,
        1024.0,
        2049.0,
        0.1,
        0.75,
        60000.0,
        2**-14,
        3e-5,
        1e-7,
        -5.0,
        -3e-5,
        0.0,
    ):
        answer, right = ask(x), FP16.spacing(x)
        if answer != right:
            ratio = f"2^{int(math.log2(right))}"
            raise Hint(
                f"at {x:g} FP16 numbers are {ratio} = {right:g} apart; you returned {answer:g}."
            )
    return "normal and subnormal numbers, either sign, and zero."
