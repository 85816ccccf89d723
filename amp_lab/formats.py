"""Floating-point formats: what a number becomes when it is stored in 32, 19, 16 or 8 bits.

A format is one sign bit, some exponent bits and some mantissa bits. Everything else follows from
those numbers: the range, the spacing between neighbors, the code of each value, the rounding.
"""

import math
import numbers
import operator
from dataclasses import dataclass

import torch

# Working on pieces that stay in the CPU's cache is several times faster than on a whole tensor.
_CACHE_ELEMENTS = 32768

# FP64, in which `quantize` works: 52 mantissa bits, exponents stored with this bias.
_FP64_MANTISSA_BITS = 52
_FP64_BIAS = 1023
_FP64_EXPONENT_MASK = 0x7FF << _FP64_MANTISSA_BITS


@dataclass(frozen=True)
class FloatFormat:
    """A binary floating-point format, and the arithmetic of rounding to it.

    A code is read from the left: 1 sign bit, `exponent_bits`, `mantissa_bits`. With the stored
    exponent E and mantissa M (both as integers) its value is

    - `(1 + M / 2**mantissa_bits) * 2**(E - bias)` where E > 0: a normal number,
    - `M / 2**mantissa_bits * 2**(1 - bias)` where E = 0: a subnormal number, or zero.

    With `infinity=True` the largest E is set aside as in IEEE 754: M = 0 is infinity and any other
    M is NaN. With `infinity=False` (E4M3) the largest E holds numbers too, and only the code with
    all bits set, one for each sign, is NaN.

    Rounding is to nearest, ties to the even code. A result beyond `max` becomes infinity, or NaN in
    a format that has no infinity. `saturate=True` gives the largest finite number instead.

    Raises `ValueError` unless `exponent_bits` is 2 to 8 (to 7 without infinity) and `mantissa_bits`
    1 to 23: the formats whose every value FP32 can hold.

    Source: IEEE 754-2019, sections 3.4 and 4.3.1; for E4M3 and E5M2, Open Compute Project, *OCP
    8-bit Floating Point Specification (OFP8)*, revision 1.0, 2023.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    infinity: bool = True

    def __post_init__(self):
        most = 8 if self.infinity else 7
        if not (2 <= self.exponent_bits <= most and 1 <= self.mantissa_bits <= 23):
            raise ValueError(
                f"{self.name}: {self.exponent_bits} exponent bits and {self.mantissa_bits} mantissa"
                f" bits; give 2 to {most} exponent bits and 1 to 23 mantissa bits"
            )

    # ---- what follows from the number of bits --------------------------------------------------

    @property
    def bits(self) -> int:
        """Number of bits in a code: sign, exponent and mantissa."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def bias(self) -> int:
        """What is subtracted from the stored exponent to get the power of two."""
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def min_exponent(self) -> int:
        """Power of two of the smallest normal number, and of all subnormal numbers."""
        return 1 - self.bias

    @property
    def max_exponent(self) -> int:
        """Power of two of the largest finite number."""
        return self.bias if self.infinity else self.bias + 1

    @property
    def max(self) -> float:
        """Largest finite number."""
        return self.decode(self._max_code)

    @property
    def smallest_normal(self) -> float:
        """Smallest positive number with full precision."""
        return math.ldexp(1.0, self.min_exponent)

    @property
    def smallest_subnormal(self) -> float:
        """Smallest positive number, and the spacing of all subnormal numbers."""
        return math.ldexp(1.0, self.min_exponent - self.mantissa_bits)

    @property
    def epsilon(self) -> float:
        """Distance from 1.0 to the next larger number."""
        return math.ldexp(1.0, -self.mantissa_bits)

    @property
    def _sign_bit(self) -> int:
        return 1 << (self.bits - 1)

    @property
    def _max_code(self) -> int:
        return (self._infinity_code if self.infinity else self._nan_code) - 1

    @property
    def _infinity_code(self) -> int:
        return ((1 << self.exponent_bits) - 1) << self.mantissa_bits

    @property
    def _nan_code(self) -> int:
        if self.infinity:
            return self._infinity_code | 1 << (self.mantissa_bits - 1)
        return self._sign_bit - 1

    # ---- one number ----------------------------------------------------------------------------

    def encode(self, x: float, saturate: bool = False) -> int:
        """Round `x` to the format and return its code, an integer from 0 to `2**bits - 1`.

        `x` is a Python number, a NumPy scalar or a tensor with one element, read as FP64; anything
        else raises `TypeError`. NaN gets one code for each sign: in a format with infinity, the one
        with only the first mantissa bit set.
        """
        x = _number(x)
        sign = self._sign_bit if math.copysign(1.0, x) < 0 else 0
        if math.isnan(x):
            return sign | self._nan_code
        if math.isinf(x):
            return sign | self._overflow_code(saturate)
        # The number of mantissa steps in x. `ldexp` is exact, `round` takes ties to even.
        exponent = max(_floor_log2(x), self.min_exponent)
        steps = round(math.ldexp(abs(x), self.mantissa_bits - exponent))
        # Codes count upwards with the values, so a mantissa that rounds up to the next power of two
        # carries into the exponent by itself.
        code = ((exponent - self.min_exponent) << self.mantissa_bits) + steps
        return sign | (code if code <= self._max_code else self._overflow_code(saturate))

    def decode(self, bits: int) -> float:
        """Return the value of a code, exactly.

        Raises `TypeError` if `bits` is not an integer and `ValueError` if it is not in the range
        from 0 to `2**bits - 1`.
        """
        sign, exponent, mantissa = self._fields(bits)
        magnitude = bits & ~self._sign_bit
        if magnitude > self._max_code:
            is_infinity = self.infinity and magnitude == self._infinity_code
            value = math.inf if is_infinity else math.nan
        else:
            if exponent > 0:
                mantissa += 1 << self.mantissa_bits
            power = max(exponent, 1) - self.bias
            value = math.ldexp(mantissa, power - self.mantissa_bits)
        return math.copysign(value, -1.0 if sign else 1.0)

    def spacing(self, x: float) -> float:
        """Distance between the two neighboring numbers of the format around `x`.

        For a number of the format this is the distance to the next one away from zero; rounding
        changes `x` by at most half of it. It is NaN where `x` is NaN or overflows. Raises
        `TypeError` if `x` is not a number.
        """
        x = _number(x)
        if not math.isfinite(self.decode(self.encode(x))):
            return math.nan
        exponent = max(_floor_log2(x), self.min_exponent)
        return math.ldexp(1.0, exponent - self.mantissa_bits)

    def explain(self, x: float | None = None, *, bits: int | None = None) -> "Explanation":
        """Take apart the number that `x` becomes in this format, or a code: `explain(bits=0x3c00)`.

        Returns an `Explanation`, which prints as three lines. Raises `TypeError` unless exactly one
        of the two is given, and the errors of `encode` and `decode`.
        """
        if (x is None) == (bits is None):
            raise TypeError("explain needs either a number, explain(0.1), or explain(bits=0x3c00)")
        if bits is None:
            x = _number(x)
            bits = self.encode(x)
        value = self.decode(bits)
        sign, exponent, mantissa = self._fields(bits)
        if math.isnan(value):
            kind = "NaN"
        elif math.isinf(value):
            kind = "infinity"
        elif exponent > 0:
            kind = "normal"
        else:
            kind = "subnormal" if mantissa else "zero"
        return Explanation(
            format=self,
            x=value if x is None else x,
            bits=operator.index(bits),
            sign=sign,
            exponent=exponent,
            mantissa=mantissa,
            kind=kind,
            value=value,
            spacing=self.spacing(value),
        )

    def _fields(self, bits: int) -> tuple[int, int, int]:
        """Split a code into sign, stored exponent and stored mantissa."""
        try:
            code = operator.index(bits)
        except TypeError:
            raise TypeError(
                f"a {self.name} code is an integer, got {type(bits).__name__}; use encode(x) for"
                " the code of a number"
            ) from None
        if not 0 <= code < 1 << self.bits:
            raise ValueError(
                f"{code} is no {self.name} code: {self.bits} bits hold 0 to"
                f" {(1 << self.bits) - 1:#x}; use encode(x) for the code of a number"
            )
        mantissa = code & ((1 << self.mantissa_bits) - 1)
        exponent = (code >> self.mantissa_bits) & ((1 << self.exponent_bits) - 1)
        return code >> (self.bits - 1), exponent, mantissa

    def _overflow_code(self, saturate: bool) -> int:
        if saturate:
            return self._max_code
        return self._infinity_code if self.infinity else self._nan_code

    # ---- a whole tensor ------------------------------------------------------------------------

    def quantize(self, tensor: torch.Tensor, saturate: bool = False) -> torch.Tensor:
        """Round every element to the format; return a new tensor of the same dtype and shape.

        `tensor` is float32 or float64, on any device with float64. It is rounded once, straight
        from its own dtype. The result carries no gradient. Raises `TypeError` for anything else.

        With a tensor `x` of float32, `FP16.quantize(x)` equals `x.half().float()`, and so on for
        BF16 and E5M2. For E4M3 the answer on overflow, infinity included, depends on the library.
        `ml_dtypes` gives NaN, as this method does. `x.to(torch.float8_e4m3fn)` gives 448 in PyTorch
        2.13, as this method does with `saturate=True`; it gave NaN before pull request 178817 of
        April 2026. Both libraries can round float64 input twice, the first time to float32.

        Source of the method, adding and subtracting a large constant: D. Goldberg, *What Every
        Computer Scientist Should Know About Floating-Point Arithmetic*, ACM Computing Surveys 23
        (1), 1991.
        """
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"quantize needs a tensor, got {type(tensor).__name__}; give torch.tensor(x)"
            )
        if tensor.dtype not in (torch.float32, torch.float64):
            raise TypeError(
                f"quantize needs float32 or float64, got {tensor.dtype}; call .float() on it first"
            )
        flat = tensor.detach().reshape(-1)
        out = torch.empty_like(flat)
        size = _CACHE_ELEMENTS if flat.device.type == "cpu" else max(flat.numel(), 1)
        for piece, rounded in zip(flat.split(size), out.split(size), strict=True):
            rounded.copy_(self._round(piece, saturate))
        return out.view(tensor.shape)

    def _round(self, x: torch.Tensor, saturate: bool) -> torch.Tensor:
        """Round a flat tensor; the result is float64.

        The spacing of FP64 numbers just above `2**52 * s` is s. So adding `2**52 * s` to a
        magnitude makes the processor itself round it to a multiple of s, ties to even, and
        subtracting the constant again is exact. With s the format's own spacing at x, that is all
        of the rounding.
        """
        magnitude = x.abs().double()
        power_of_two = magnitude.view(torch.int64) & _FP64_EXPONENT_MASK
        power_of_two.clamp_(_fp64_exponent(self.min_exponent), _fp64_exponent(self.max_exponent))
        # Raising an FP64 number's exponent by n multiplies it by 2**n: from 2**e to 2**52 spacings.
        raised = power_of_two.add_(
            (_FP64_MANTISSA_BITS - self.mantissa_bits) << _FP64_MANTISSA_BITS
        )
        constant = raised.view(torch.float64)
        magnitude.add_(constant).sub_(constant)
        overflow = self.max if saturate else math.inf if self.infinity else math.nan
        magnitude.masked_fill_(magnitude > self.max, overflow)
        return magnitude.copysign_(x)


@dataclass(frozen=True, repr=False)
class Explanation:
    """A number of a format, taken apart by `FloatFormat.explain`. Prints as three lines.

    `bits` is the code; `sign`, `exponent` and `mantissa` are its fields as stored, integers; `kind`
    is "zero", "subnormal", "normal", "infinity" or "NaN"; `x` is the number that was asked for and
    `value` the number that the format holds instead.
    """

    format: FloatFormat
    x: float
    bits: int
    sign: int
    exponent: int
    mantissa: int
    kind: str
    value: float
    spacing: float

    @property
    def error(self) -> float:
        """`value - x`: what rounding added. Zero where the two are the same infinity."""
        return 0.0 if self.value == self.x else self.value - self.x

    @property
    def power(self) -> int:
        """The power of two that multiplies the significand. It has no meaning for inf and NaN."""
        return max(self.exponent, 1) - self.format.bias

    @property
    def significand(self) -> float:
        """The mantissa with its leading digit: 1.M for a normal number, 0.M for a subnormal one."""
        fraction = math.ldexp(self.mantissa, -self.format.mantissa_bits)
        return fraction + (1 if self.exponent > 0 else 0)

    @property
    def pattern(self) -> str:
        """The bits as text: sign, exponent, mantissa."""
        exponent = f"{self.exponent:0{self.format.exponent_bits}b}"
        return f"{self.sign} {exponent} {self.mantissa:0{self.format.mantissa_bits}b}"

    def __repr__(self) -> str:
        digits = -(-self.format.bits // 4)
        lines = [f"{self.x!r} in {self.format.name}: {self.pattern} (0x{self.bits:0{digits}x})"]
        if self.kind in ("normal", "subnormal"):
            sign = "-" if self.sign else "+"
            lines.append(
                f"{self.kind}: {sign}{self.significand!r} x 2^{self.power} = {self.value!r}"
            )
        else:
            lines.append(f"{self.kind}: {self.value!r}")
        lines.append(f"error {self.error:.6g}, spacing {self.spacing:.6g}")
        return "\n".join(lines)


def _number(x) -> float:
    """Convert a scalar of any kind to a Python float, or say why not."""
    if isinstance(x, torch.Tensor) and x.numel() == 1:
        x = x.item()
    if isinstance(x, bool) or not isinstance(x, numbers.Real):
        shape = f" of shape {tuple(x.shape)}" if isinstance(x, torch.Tensor) else ""
        raise TypeError(
            f"expected one number, got {type(x).__name__}{shape}: {x!r}; give a float or an int,"
            " and use quantize for a tensor"
        )
    try:
        return float(x)
    except OverflowError:  # an int or a fraction beyond FP64
        return math.inf if x > 0 else -math.inf


def _floor_log2(x: float) -> int:
    """floor(log2|x|), exactly; for zero, less than that of any other number."""
    return math.frexp(x)[1] - 1 if x else -1075


def _fp64_exponent(power: int) -> int:
    """The bits of `2.0**power` in FP64, as an integer."""
    return (power + _FP64_BIAS) << _FP64_MANTISSA_BITS


FP32 = FloatFormat("FP32", exponent_bits=8, mantissa_bits=23)
"""IEEE 754 single precision, `torch.float32`."""

TF32 = FloatFormat("TF32", exponent_bits=8, mantissa_bits=10)
"""What Tensor Cores read of an FP32 number: its upper 19 bits, after rounding. It has no dtype: it
stays in a 32-bit word, so a TF32 code shifted left by 13 is an FP32 code.
Source: NVIDIA A100 Tensor Core GPU Architecture (white paper), 2020."""

BF16 = FloatFormat("BF16", exponent_bits=8, mantissa_bits=7)
"""`torch.bfloat16`: the upper half of FP32."""

FP16 = FloatFormat("FP16", exponent_bits=5, mantissa_bits=10)
"""IEEE 754 half precision, `torch.float16`."""

E4M3 = FloatFormat("E4M3", exponent_bits=4, mantissa_bits=3, infinity=False)
"""OCP FP8 for weights and activations, `torch.float8_e4m3fn`: no infinity, max 448."""

E5M2 = FloatFormat("E5M2", exponent_bits=5, mantissa_bits=2)
"""OCP FP8 for gradients, `torch.float8_e5m2`: like IEEE 754, the upper half of FP16."""
