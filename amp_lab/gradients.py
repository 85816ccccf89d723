"""Where gradients lie on the number line: how many fall into each power of two.

Multiplying by a power of two changes the exponent of a number and nothing else. So one histogram
of exponents, taken once, tells what any loss scale would do in any format: slide it sideways.
"""

import math
import numbers
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np
import torch

from .formats import FloatFormat

# A histogram by exponent alone cannot say which side of a rounding boundary a number is on. But all
# boundaries of all formats are of three kinds: a power of two, or below the next power of two by
# 2**-n or by 1.5 * 2**-n of its own exponent's power. So every power of two is divided into bins by
# the distance d that its numbers, scaled to lie in [1, 2), have to 2. For each n there are four:
# d = 2**-n, d between that and 1.5 * 2**-n, d = 1.5 * 2**-n, and d between that and 2 * 2**-n.
# A boundary is alone in its bin, so counting whole bins is exact.
_SMALLEST_DISTANCE = -24  # exponent of the distance of an FP32 overflow boundary
_BINS = 4 * -_SMALLEST_DISTANCE + 1  # per power of two

# FP32 reaches from 2**-149 to just below 2**128. One more exponent on each side holds the zeros and
# the infinities, and the last one NaN.
_ZERO_EXPONENT = -150
_INF_EXPONENT = 128
_NAN_EXPONENT = 129
_EXPONENTS = _NAN_EXPONENT - _ZERO_EXPONENT + 1
_FIRST_NONZERO = _BINS
_FIRST_INF = (_INF_EXPONENT - _ZERO_EXPONENT) * _BINS
_FIRST_NAN = _FIRST_INF + _BINS

# `best_scale` tries the powers of two that are normal numbers in FP32, nearest to 1 first.
_SCALE_POWERS = sorted(range(-126, 128), key=abs)

_CHUNK = {"cpu": 2**15, "other": 2**22}  # elements: stay in the CPU's cache, or bound the memory


def _empty_bins() -> np.ndarray:
    return np.zeros(_EXPONENTS * _BINS, dtype=np.int64)


@dataclass(frozen=True, eq=False, repr=False)
class ExponentHistogram:
    """Counts of tensor elements by binary exponent, floor(log2|g|), plus zeros, inf and NaN.

    Build one from tensors with `of` or from a model's gradients with `from_gradients`; add two to
    merge them (`sum(histograms, ExponentHistogram())` for many). A histogram does not change.

    The three fractions tell what becomes of the elements when each is multiplied by `scale`,
    without rounding, and then rounded to `format`. They are exact, not estimates: counting the
    rounded elements gives the same. They are shares of the elements that are finite and not zero;
    where there are none they are 0. Exact zeros have a share of their own, `fraction_zero`.

    `scale` must be a power of two. Any other factor rounds, and moves numbers across a boundary
    depending on bits that no histogram keeps: `ValueError`.
    """

    _bins: np.ndarray = field(default_factory=_empty_bins)

    @classmethod
    def of(cls, tensors: torch.Tensor | Iterable[torch.Tensor]) -> "ExponentHistogram":
        """Count the elements of a tensor, or of all tensors together.

        Tensors may have any shape and device and be float32, bfloat16 or float16; `TypeError`
        otherwise. The counts are on the CPU.
        """
        bins = _empty_bins()
        for tensor in [tensors] if isinstance(tensors, torch.Tensor) else tensors:
            bins += _count(tensor)
        return cls(bins)

    @classmethod
    def from_gradients(cls, model: torch.nn.Module) -> "ExponentHistogram":
        """Count the elements of the gradients (`.grad`) of all parameters of `model`.

        Parameters without a gradient are left out; `ValueError` if none has one.
        """
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        if not gradients:
            raise ValueError(
                f"no parameter of this {type(model).__name__} has a gradient; call backward()"
                " first, and look before zero_grad()"
            )
        return cls.of(gradients)

    def __add__(self, other: "ExponentHistogram") -> "ExponentHistogram":
        if not isinstance(other, ExponentHistogram):
            return NotImplemented
        return ExponentHistogram(self._bins + other._bins)

    def __repr__(self) -> str:
        if self.nonzero:
            span = f"2^{self.exponents[0]} to 2^{self.exponents[-1]}"
        else:
            span = "none finite and nonzero"
        return (
            f"ExponentHistogram({self.total} elements: {span},"
            f" {self.zeros} zeros, {self.infs} inf, {self.nans} NaN)"
        )

    # ---- counts --------------------------------------------------------------------------------

    @property
    def total(self) -> int:
        """Number of all elements."""
        return int(self._bins.sum())

    @property
    def zeros(self) -> int:
        """Number of elements that are exactly zero."""
        return int(self._bins[:_FIRST_NONZERO].sum())

    @property
    def infs(self) -> int:
        """Number of infinite elements, of either sign."""
        return int(self._bins[_FIRST_INF:_FIRST_NAN].sum())

    @property
    def nans(self) -> int:
        """Number of elements that are NaN."""
        return int(self._bins[_FIRST_NAN:].sum())

    @property
    def nonzero(self) -> int:
        """Number of elements that are finite and not zero."""
        return int(self._bins[_FIRST_NONZERO:_FIRST_INF].sum())

    @property
    def fraction_zero(self) -> float:
        """Share of exact zeros among all elements, from 0 to 1; 0 where there are no elements."""
        return self.zeros / self.total if self.total else 0.0

    @cached_property
    def exponents(self) -> np.ndarray:
        """Every exponent from the smallest to the largest that occurs: integers, for a bar chart.

        Empty where no element is finite and nonzero.
        """
        occupied = np.flatnonzero(self._counts_by_exponent)
        if not occupied.size:
            return occupied
        return np.arange(occupied[0], occupied[-1] + 1) + _ZERO_EXPONENT + 1

    @cached_property
    def counts(self) -> np.ndarray:
        """Number of elements with each of `exponents`; integers, same length."""
        return self._counts_by_exponent[self.exponents - _ZERO_EXPONENT - 1]

    @cached_property
    def _counts_by_exponent(self) -> np.ndarray:
        return self._bins[_FIRST_NONZERO:_FIRST_INF].reshape(-1, _BINS).sum(axis=1)

    # ---- what a format and a scale do to them --------------------------------------------------

    def fraction_lost(self, format: FloatFormat, scale: float = 1.0) -> float:
        """Share of elements that become zero: not more than half the smallest subnormal number."""
        return self._share(self._lost(format, _log2(scale, "scale")))

    def fraction_subnormal(self, format: FloatFormat, scale: float = 1.0) -> float:
        """Share of elements that become subnormal numbers, which keep fewer digits."""
        return self._share(self._subnormal(format, _log2(scale, "scale")))

    def fraction_overflow(self, format: FloatFormat, scale: float = 1.0) -> float:
        """Share of elements that become infinite, or NaN in a format without infinity."""
        return self._share(self._overflow(format, _log2(scale, "scale")))

    def best_scale(self, format: FloatFormat, headroom: float = 2.0) -> float:
        """The power of two by which to multiply these elements before they are rounded to `format`.

        Of all powers of two from 2**-126 to 2**127 take those at which nothing would overflow even
        if every element were `headroom` times as large (a power of two, at least 1). Among them
        take the one that loses the fewest elements; of those that lose equally few, the one with
        the fewest subnormal numbers; if still equal, the one nearest to 1. So the answer is 1.0
        where scaling cannot help. Elements that are inf or NaN already are left out.

        Raises `ValueError` if `headroom` is not such a power or leaves no scale to choose.
        """
        room = _log2(headroom, "headroom")
        if room < 0:
            raise ValueError(f"headroom is {headroom}; give a power of two that is at least 1")
        fitting = [k for k in _SCALE_POWERS if self._overflow(format, k + room) == 0]
        if not fitting:
            raise ValueError(
                f"with a headroom of {headroom} every scale overflows {format.name}; give a smaller"
                " headroom"
            )
        # `min` returns the first of equals, and the powers are sorted by their distance from 1.
        best = min(fitting, key=lambda k: (self._lost(format, k), self._subnormal(format, k)))
        return math.ldexp(1.0, best)

    def _lost(self, format: FloatFormat, power: int) -> int:
        return self._below(_boundaries(format)[0], power)

    def _subnormal(self, format: FloatFormat, power: int) -> int:
        first_kept, first_normal, _ = _boundaries(format)
        return self._below(first_normal, power) - self._below(first_kept, power)

    def _overflow(self, format: FloatFormat, power: int) -> int:
        return self.nonzero - self._below(_boundaries(format)[2], power)

    def _share(self, count: int) -> float:
        return count / self.nonzero if self.nonzero else 0.0

    def _below(self, position: int, power: int) -> int:
        """Number of nonzero elements that, times 2**power, lie in the bins before `position`."""
        shifted = position - power * _BINS
        return int(self._cumulative[min(max(shifted, _FIRST_NONZERO), _FIRST_INF)])

    @cached_property
    def _cumulative(self) -> np.ndarray:
        """At each position, the number of finite nonzero elements in the bins before it."""
        cumulative = np.zeros(_FIRST_INF + 1, dtype=np.int64)
        np.cumsum(self._bins[_FIRST_NONZERO:_FIRST_INF], out=cumulative[_FIRST_NONZERO + 1 :])
        return cumulative


@lru_cache
def _boundaries(format: FloatFormat) -> tuple[int, int, int]:
    """The first bins that rounding to `format` keeps nonzero, makes normal, makes overflow.

    On a tie the even code wins: zero below, the smallest normal number in the middle, and above
    either infinity or, in a format without it, `max`.
    """
    half = format.smallest_subnormal / 2
    flush, normal, overflow = _positions(
        torch.tensor(
            [half, format.smallest_normal - half, format.max + format.spacing(format.max) / 2],
            dtype=torch.float64,
        )
    ).tolist()
    return flush + 1, normal, overflow if format.infinity else overflow + 1


def _count(tensor: torch.Tensor) -> np.ndarray:
    """Count the elements of one tensor by bin."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"expected tensors, got {type(tensor).__name__}")
    if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(
            f"expected float32, bfloat16 or float16, got {tensor.dtype}; call .float() on it first"
        )
    flat = (tensor.to_dense() if tensor.is_sparse else tensor).detach().reshape(-1)
    positions = torch.empty_like(flat, dtype=torch.int32)
    chunk = _CHUNK["cpu" if flat.device.type == "cpu" else "other"]
    for piece, out in zip(flat.split(chunk), positions.split(chunk), strict=True):
        out.copy_(_positions(piece))
    return torch.bincount(positions, minlength=_EXPONENTS * _BINS).cpu().numpy()


def _positions(x: torch.Tensor) -> torch.Tensor:
    """The bin of every element: int32, growing with |x|; NaN comes last.

    In FP64 every FP32 number is normal, so its exponent and its significand can be read from its
    bits: 52 bits of significand, and above them the exponent with a bias of 1023.
    """
    magnitude = x.abs().double().clamp_(2.0**_ZERO_EXPONENT, 2.0**_INF_EXPONENT)
    bits = magnitude.view(torch.int64)
    exponent = (bits >> 52).int().clamp_(max=_NAN_EXPONENT + 1023)
    significand = (bits & (2**52 - 1)).bitwise_or_(1023 << 52).view(torch.float64)  # in [1, 2)
    # The distance to 2 fits in FP32: 23 bits of significand, an exponent with a bias of 127. Take
    # that exponent and the first fraction bit, then one bit that tells whether more bits follow.
    distance = (2.0 - significand).float().view(torch.int32)
    more = (distance & (2**22 - 1)).clamp_(max=1)
    quarter = (distance >> 22).mul_(2).add_(more)
    nearest_one = 4 * 127  # `quarter` of distance 1, which is that of a power of two itself
    return exponent.sub_(_ZERO_EXPONENT + 1023).mul_(_BINS).add_(nearest_one).sub_(quarter)


def _log2(factor: float, name: str) -> int:
    """The exponent of a power of two, or an error."""
    if isinstance(factor, bool) or not isinstance(factor, numbers.Real):
        raise TypeError(f"{name} must be a number, got {type(factor).__name__}")
    mantissa, exponent = math.frexp(factor)
    if mantissa != 0.5:
        raise ValueError(
            f"{name} is {factor}, which is no power of two; only a power of two shifts every"
            " exponent by the same whole number and leaves the mantissas alone; give 2.0**n"
        )
    return exponent - 1
