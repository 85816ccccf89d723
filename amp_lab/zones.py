"""What a format does to a number, by its size: four zones on an axis of powers of two.

From small to large a number is flushed to zero, subnormal (it keeps fewer digits), normal, or it
overflows. Each zone has a color and a hatch pattern, the same in every figure.
"""

import math
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter

from .formats import FloatFormat


class Zone(NamedTuple):
    """A range of sizes, `low` to `high` as powers of two, and how it is drawn."""

    name: str
    low: float
    high: float
    color: str
    hatch: str


def zones(f: FloatFormat) -> list[Zone]:
    """The four zones of a format, from small to large. They meet where rounding changes sides."""
    flushed = math.log2(f.smallest_subnormal / 2)
    normal = math.log2(f.smallest_normal)
    overflow = math.log2(f.max + f.spacing(f.max) / 2)
    return [
        Zone("flushed to 0", -math.inf, flushed, "#F6C9B0", "//"),
        Zone("subnormal", flushed, normal, "#FBF3BE", ".."),
        Zone("normal", normal, overflow, "#FFFFFF", ""),
        Zone("overflow", overflow, math.inf, "#D9D9D9", "xx"),
    ]


def draw_zones(ax: Axes, f: FloatFormat) -> dict[str, Text]:
    """Shade the zones over the height of `ax`, whose x-axis counts powers of two, and name them.

    Returns the texts above the axes by the zones' names, for those in the limits of the axes.
    """
    left, right = ax.get_xlim()
    above = ax.get_xaxis_transform()  # x in powers of two, y from 0 to 1 over the axes
    texts = {}
    for zone in zones(f):
        low, high = max(zone.low, left), min(zone.high, right)
        if low >= high:
            continue
        style = {"facecolor": zone.color, "edgecolor": "#B0B0B0", "hatch": zone.hatch}
        ax.axvspan(low, high, linewidth=0, zorder=0, **style)
        if zone.low > left:
            ax.axvline(zone.low, color="#606060", linewidth=1, zorder=1)
        wide = high - low > 0.1 * (right - left)
        x, align = ((low + high) / 2, "center") if wide else (high, "right")
        texts[zone.name] = ax.text(x, 1.02, zone.name, transform=above, ha=align, fontsize=12)
    return texts


def count_in_powers_of_two(ax: Axes, step: int = 10) -> None:
    """Label the x-axis at every `step`: 2^-20, 2^-10, 1, 2^10."""
    left, right = ax.get_xlim()
    ax.set_xticks(range(math.ceil(left / step) * step, math.floor(right) + 1, step))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda e, _: f"$2^{{{e:.0f}}}$" if e else "1"))


def percent(share: float) -> str:
    """A share as text that never shows "0 %" for something, or "100 %" for not quite everything."""
    if 0 < share < 0.001:
        return "<0.1 %"
    if 0.999 < share < 1:
        return ">99.9 %"
    return f"{100 * share:.3g} %"
