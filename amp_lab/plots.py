"""Static figures, one function a figure. Each returns a `Canvas`, which shows itself in a notebook."""

import math

import torch

from .canvas import BLACK, BLUE, ORANGE, RED, SKY, Canvas, look, new_figure
from .formats import FloatFormat


def gallery(images: torch.Tensor, labels: torch.Tensor, classes: tuple[str, ...]) -> Canvas:
    """One picture of each class: `images` of shape (n, 1, height, width), `labels` of shape (n,)."""
    figure, axes = new_figure(9, 1.4, ncols=len(classes))
    for c, (ax, name) in enumerate(zip(axes, classes, strict=True)):
        ax.imshow(images[labels == c][0, 0].cpu(), cmap="gray_r")
        ax.set_title(name, fontsize=10)
        ax.set_axis_off()
    return Canvas(figure, f"{len(classes)} gray pictures, one of each class: {', '.join(classes)}.")


def relative_step_time(milliseconds: dict[str, float]) -> Canvas:
    """Bars: milliseconds a step by recipe, divided by those of "fp32"."""
    if "fp32" not in milliseconds:
        raise ValueError(
            f"relative_step_time: no 'fp32' to compare with, only {', '.join(milliseconds)}"
        )
    figure, ax = new_figure(8, 0.8 + 0.6 * len(milliseconds))
    for row, (name, ms) in enumerate(milliseconds.items()):
        ratio = ms / milliseconds["fp32"]
        ax.barh(row, ratio, color=look(name)["color"], height=0.6)
        ax.text(ratio + 0.02, row, f"{ratio:.2f}x   ({ms:.1f} ms)", va="center", fontsize=12)
    ax.axvline(1.0, color=BLACK, linestyle=":", linewidth=1)
    ax.set_yticks(range(len(milliseconds)), milliseconds, fontsize=12)
    ax.invert_yaxis()
    ax.set_xlim(0, 1.35 * max(1.0, *(ms / milliseconds["fp32"] for ms in milliseconds.values())))
    ax.set_xlabel("time of one training step, FP32 = 1 (shorter is faster)")
    return Canvas(
        figure, f"Bars: time of one training step relative to FP32, for {', '.join(milliseconds)}."
    )


# ---- floating-point formats ----------------------------------------------------------------------

_FORMAT_LOOKS = {"FP16": "fp16 + GradScaler", "E4M3": "pure fp16", "E5M2": "fp16 (no scaling)"}


def _format_look(f: FloatFormat) -> dict:
    return look(_FORMAT_LOOKS.get(f.name, f.name.lower())) | {"marker": ""}


def bit_fields(formats: list[FloatFormat]) -> Canvas:
    """The bits of each format as boxes: s for sign, e for exponent, m for mantissa."""
    figure, ax = new_figure(9, 0.5 + 0.45 * len(formats))
    for row, f in enumerate(formats):
        letters = "s" + "e" * f.exponent_bits + "m" * f.mantissa_bits
        colors = {"s": ORANGE, "e": SKY, "m": "#D9D9D9"}
        ax.barh([row] * f.bits, 0.92, 0.72, range(f.bits), color=[colors[c] for c in letters])
        for place, letter in enumerate(letters):
            ax.text(place + 0.46, row, letter, ha="center", va="center", fontsize=11)
        parts = f"1 + {f.exponent_bits} + {f.mantissa_bits} = {f.bits}"
        ax.text(f.bits + 0.5, row, parts, va="center", fontsize=11)
    ax.set_yticks(range(len(formats)), [f.name for f in formats], fontsize=13)
    ax.set(xlim=(-0.1, max(f.bits for f in formats) + 6), ylim=(len(formats) - 0.5, -0.5))
    ax.xaxis.set_visible(False)
    ax.spines[:].set_visible(False)
    ax.tick_params(left=False)
    names = ", ".join(f.name for f in formats)
    return Canvas(figure, f"Rows of boxes: the sign, exponent and mantissa bits of {names}.")


def number_line(f: FloatFormat, end: float) -> Canvas:
    """A mark for every number of a small format from 0 to `end`: the subnormal ones are dotted."""
    numbers = [f.decode(code) for code in range(f.encode(end) + 1)]
    figure, ax = new_figure(9, 1.9)
    ax.axhline(0, color=BLACK, linewidth=1)
    for x in numbers:
        is_power = f.explain(x).mantissa == 0 and x > 0
        if x < f.smallest_normal:
            ax.plot(x, 0, "o", color=RED, markersize=5)
        else:
            height = 0.6 if is_power else 0.35
            ax.vlines(x, -height, height, color=BLUE, linewidth=2.2 if is_power else 1.4)
    ax.text(0, -1.0, "zero and the subnormal numbers (dots)", color=RED, fontsize=11, va="top")
    middle = (f.smallest_normal + end) / 2
    ax.text(
        middle,
        -1.0,
        "normal numbers (bars; tall: powers of two)",
        color=BLUE,
        fontsize=11,
        va="top",
    )
    ax.set(ylim=(-1.7, 0.8), xlim=(-0.02 * end, 1.02 * end), yticks=[])
    ax.spines["left"].set_visible(False)
    return Canvas(
        figure, f"A number line from 0 to {end:g} with a mark at every number of {f.name}."
    )


def format_ranges(formats: list[FloatFormat]) -> Canvas:
    """Bars on a logarithmic axis: where each format has normal numbers, and where subnormal ones."""
    figure, ax = new_figure(9, 1.1 + 0.62 * len(formats))
    for row, f in enumerate(formats):
        least, normal, most = map(math.log10, (f.smallest_subnormal, f.smallest_normal, f.max))
        ax.barh(row, most - normal, 0.5, normal, color=BLUE, label="normal" if not row else None)
        ax.barh(
            row,
            normal - least,
            0.5,
            least,
            facecolor="white",
            edgecolor=RED,
            hatch="////",
            label="subnormal: fewer digits" if not row else None,
        )
        ax.text(
            least - 0.6, row, f"{f.smallest_subnormal:.1e}", ha="right", va="center", fontsize=11
        )
        ax.text(most + 0.6, row, f"{f.max:.5g}", va="center", fontsize=11)
    ax.set_yticks(range(len(formats)), [f.name for f in formats], fontsize=13)
    ax.set(xlim=(-56, 52), ylim=(len(formats) - 0.4, -0.6), xlabel="magnitude of a number")
    powers = range(-40, 41, 10)
    ax.set_xticks(powers, [f"$10^{{{p}}}$" for p in powers])
    ax.axvline(0, color=BLACK, linestyle=":", linewidth=1)
    ax.legend(loc="lower right", frameon=False, fontsize=12)
    names = ", ".join(f.name for f in formats)
    return Canvas(figure, f"Bars: the range of normal and of subnormal numbers in {names}.")


def format_spacing(formats: list[FloatFormat], lowest: int = -30, highest: int = 18) -> Canvas:
    """Lines: the distance between neighboring numbers against magnitude, both logarithmic."""
    figure, ax = new_figure(9, 5)
    for f in formats:
        powers = [p for p in range(lowest, highest + 1) if 2.0**p <= f.max]
        gaps = [f.spacing(2.0**p) for p in powers]
        ax.step([2.0**p for p in powers], gaps, where="post", linewidth=2.5, **_format_look(f))
        ax.text(2.0**lowest * 1.3, gaps[0] * 6, f.name, fontsize=12)
        if f.max < 2.0**highest:
            ax.plot(f.max, gaps[-1], "X", color=_format_look(f)["color"], markersize=10)
    ax.set(
        xscale="log",
        yscale="log",
        xlim=(2.0**lowest, 2.0**highest),
        xlabel="magnitude of a number",
        ylabel="distance to its neighbor",
    )
    ax.grid(alpha=0.3)
    names = ", ".join(f.name for f in formats)
    return Canvas(figure, f"Lines: distance between neighboring numbers by magnitude, for {names}.")


def weights(history: dict[str, list[float]]) -> Canvas:
    """Lines: one weight after each step, for each precision."""
    figure, ax = new_figure(9, 3.6)
    for index, (name, values) in enumerate(history.items()):
        style = look(name, index) | {"marker": ""}
        ax.plot(values, linewidth=2.5, label=name, **style)
    ax.legend(frameon=False, fontsize=12, handlelength=4)
    ax.set(xlabel="step", ylabel="weight")
    ax.grid(alpha=0.3)
    return Canvas(figure, f"Lines: the weight after each step in {', '.join(history)}.")
