"""A loss scale moves a backward pass through a format's window."""

import html
import math

import ipywidgets as widgets
import numpy as np

from ..canvas import BLACK, BLUE, GREEN, ORANGE, RED, Canvas, new_figure
from ..formats import BF16, E4M3, E5M2, FP16
from ..gradients import ExponentHistogram
from ..zones import count_in_powers_of_two, draw_zones, percent
from .panel import Panel

FORMATS = {f.name: f for f in (FP16, BF16, E5M2, E4M3)}
POWERS = range(-16, 49)
LOWEST, HIGHEST = -60, 32  # powers of two that the upper picture shows
STYLES = {
    "flushed to 0": (RED, ":"),
    "subnormal": (ORANGE, "--"),
    "normal": (GREEN, "-"),
    "overflow": (BLACK, "-."),
}


class ScaleExplorer(Panel):
    """Moves a histogram of gradients by a loss scale through the zones of a format.

    `histogram` is an `ExponentHistogram` of a backward pass without scaling. `scale` is a slider for
    the power of two by which the loss is multiplied, `format` the name of the format. A cell can work
    both: `panel.scale.value = 10`, `panel.format.value = "BF16"`. `readout` and the upper picture
    state the shares of the nonzero gradients that are flushed to zero, subnormal, normal, and
    overflow; the lower picture shows them for every scale, with `best_scale` marked.

    Multiplying by a power of two changes nothing but exponents, so the histogram is shifted, not
    counted anew, and the shares are exact.

    Raises `TypeError` if `histogram` is not an `ExponentHistogram`, `ValueError` if it is empty or the
    format or the power to begin with is not on offer.
    """

    def __init__(self, histogram: ExponentHistogram, format: str = "FP16", power: int = 0):
        if not isinstance(histogram, ExponentHistogram):
            raise TypeError(
                f"ScaleExplorer: histogram is a {type(histogram).__name__}, expected an "
                "ExponentHistogram such as ExponentHistogram.from_gradients(model)"
            )
        if not histogram.nonzero:
            raise ValueError(
                "ScaleExplorer: the histogram holds no finite and nonzero element to move; look at the "
                "gradients after backward() and before zero_grad()"
            )
        if format not in FORMATS:
            raise ValueError(
                f"ScaleExplorer: format is {format!r}, expected one of {', '.join(FORMATS)}"
            )
        if power not in POWERS:
            raise ValueError(
                f"ScaleExplorer: power is {power!r}, expected an integer from {POWERS[0]} to "
                f"{POWERS[-1]}"
            )
        self.histogram = histogram
        self.scale = widgets.IntSlider(
            value=power,
            min=POWERS[0],
            max=POWERS[-1],
            description="scale: 2 to the power of",
            style={"description_width": "initial"},
            layout=widgets.Layout(width="620px"),
        )
        self.format = widgets.Dropdown(
            options=list(FORMATS), value=format, description="format", layout={"width": "200px"}
        )
        super().__init__(self._draw(), [widgets.HBox([self.scale, self.format])])
        self._move()
        self.scale.observe(lambda _: self._move(), "value")
        self.format.observe(lambda _: self._change_format(), "value")

    def _change_format(self):
        self.canvas = self._draw()
        self._move()

    def _draw(self) -> Canvas:
        """A new picture for the chosen format: everything but what the slider moves."""
        self._format = FORMATS[self.format.value]
        self._best_power = round(math.log2(self.histogram.best_scale(self._format)))
        figure, (upper, lower) = new_figure(9, 5, nrows=2, height_ratios=[3, 2])
        return Canvas(
            figure,
            "A histogram of gradients by power of two, moved by a loss scale through the zones of a "
            "format: flushed to zero, subnormal, normal, overflow; below, the shares at every scale.",
            moving=[*self._draw_zones(upper), *self._draw_shares(lower)],
        )

    def _draw_zones(self, ax):
        f = self._format
        counts = self.histogram.counts
        ax.set(xlim=(LOWEST, HIGHEST), yscale="log", ylim=(0.8, 2 * counts.max()))
        ax.set_ylabel("gradients (log scale)")
        ax.set_xlabel(f"magnitude of gradient x scale, on the number line of {f.name}")
        count_in_powers_of_two(ax)
        self._numbers = {}
        for name, text in draw_zones(ax, f).items():
            x, y = text.get_position()
            self._numbers[name] = ax.text(
                x, y, "", transform=text.get_transform(), ha=text.get_ha(), fontsize=12
            )
            text.set_y(y + 0.09)
        self._bars = ax.stairs(counts, self._edges(0), baseline=0.8, fill=True, color=BLUE)
        return [self._bars, *self._numbers.values()]

    def _draw_shares(self, ax):
        every = [self._shares(power) for power in POWERS]
        for name, (color, style) in STYLES.items():
            shares = [100 * shares[name] for shares in every]
            ax.plot(POWERS, shares, color=color, linestyle=style, linewidth=2.5, label=name)
        best = self._best_power
        nearest = min(max(best, POWERS[0]), POWERS[-1])
        label = f"best_scale, $2^{{{best}}}$"
        if best == nearest:
            ax.axvline(best, color=BLACK, linestyle=":", linewidth=1.5)
            ax.plot(best, 112, "v", color=BLACK, markersize=10, clip_on=False)
        else:
            label += ", off this picture"
        inward, align = (1, "left") if nearest < 24 else (-1, "right")
        ax.text(nearest + inward, 108, label, ha=align, fontsize=12)
        ax.set(
            xlim=(POWERS[0], POWERS[-1]), ylim=(-4, 104), ylabel="share (%)", xlabel="loss scale"
        )
        count_in_powers_of_two(ax, 8)
        ax.legend(frameon=False, fontsize=11, loc="center left", bbox_to_anchor=(1.01, 0.5))
        (self._cursor,) = ax.plot([0, 0], [-4, 104], color=BLACK, linewidth=3)
        return [self._cursor]

    # ---- what the slider does --------------------------------------------------------------------

    def _move(self):
        power = self.scale.value
        number = f"{2**power:,}" if power >= 0 else f"1/{2**-power:,}"
        shares = self._shares(power)
        self._bars.set_data(edges=self._edges(power))
        for name, text in self._numbers.items():
            text.set_text(percent(shares[name]))
        self._cursor.set_xdata([power, power])
        self.show(
            f"Scale 2<sup>{power}</sup> = {number} in {self.format.value}: "
            + ", ".join(
                f"<b>{html.escape(percent(share))}</b> {name}" for name, share in shares.items()
            )
            + f". Best: 2<sup>{self._best_power}</sup>."
        )

    def _edges(self, power: int) -> np.ndarray:
        exponents = self.histogram.exponents
        return np.append(exponents, exponents[-1] + 1) + power

    def _shares(self, power: int) -> dict[str, float]:
        f, scale = self._format, 2.0**power
        lost = self.histogram.fraction_lost(f, scale)
        subnormal = self.histogram.fraction_subnormal(f, scale)
        overflow = self.histogram.fraction_overflow(f, scale)
        return {
            "flushed to 0": lost,
            "subnormal": subnormal,
            "normal": max(0.0, 1.0 - lost - subnormal - overflow),
            "overflow": overflow,
        }
