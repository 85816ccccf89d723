"""Static figures, one function a figure. Each returns a `Canvas`, which shows itself in a notebook."""

import math

import numpy as np
import torch
from matplotlib.patches import FancyBboxPatch, Rectangle

from .canvas import BLACK, BLUE, GREEN, ORANGE, RED, SKY, Canvas, look, new_figure
from .formats import FloatFormat
from .gradients import ExponentHistogram
from .policy import OpTable, Policy
from .zones import count_in_powers_of_two, draw_zones, percent, zones


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
        words = f"{ratio:.2f}x   ({ms:.1f} ms)"
        box = {"facecolor": "white", "edgecolor": "none", "pad": 2}  # hides the dotted line
        ax.text(ratio + 0.02, row, words, va="center", fontsize=12, bbox=box)
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
        above = 1.6 * f.spacing(2.0 ** (lowest + 3))  # the line has risen at the end of the word
        ax.text(2.0**lowest * 1.3, above, f.name, fontsize=12)
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


def exponent_histograms(
    histograms: dict[str, ExponentHistogram],
    f: FloatFormat,
    what: str,
    lowest: int = -50,
    highest: int = 20,
) -> Canvas:
    """One histogram of exponents a row, by name, above the zones of a format.

    `what` says what was counted: "gradients", say. Each row is scaled to its own highest bar, and even
    the smallest bar can be seen; at its right stands the share that the format flushes to zero. The
    x-axis runs from 2**lowest to 2**highest.
    """
    figure, ax = new_figure(10, 1.3 + 0.42 * len(histograms))
    ax.set_xlim(lowest, highest)
    draw_zones(ax, f)
    for row, histogram in enumerate(histograms.values()):
        if histogram.nonzero:
            edges = np.append(histogram.exponents, histogram.exponents[-1] + 1)
            heights = np.maximum(0.85 * histogram.counts / histogram.counts.max(), 0.08)
            heights[histogram.counts == 0] = 0
            ax.stairs(row - heights, edges, baseline=row, fill=True, color=BLUE, zorder=2)
        ax.axhline(row, color="#808080", linewidth=0.6, zorder=1)
        lost = percent(histogram.fraction_lost(f))
        ax.text(highest + 1, row, f"{lost} lost", fontsize=12, va="bottom", clip_on=False)
    ax.set_ylim(len(histograms) - 0.8, -1.2)
    ax.set_yticks(range(len(histograms)), histograms, fontsize=11)
    ax.tick_params(axis="y", length=0)
    count_in_powers_of_two(ax)
    ax.set_xlabel(f"magnitude of the {what}, on the number line of {f.name}")
    return Canvas(
        figure,
        f"Histograms of the {what} by power of two, above the zones of {f.name}, for "
        f"{', '.join(histograms)}.",
    )


def format_windows(histogram: ExponentHistogram, formats: list[FloatFormat], what: str) -> Canvas:
    """One histogram of exponents above the ranges of formats, subnormal numbers drawn thinner."""
    figure, (ax, ranges) = new_figure(
        10, 3.0 + 0.4 * len(formats), nrows=2, sharex=True, height_ratios=[2, len(formats)]
    )
    edges = np.append(histogram.exponents, histogram.exponents[-1] + 1)
    ax.stairs(histogram.counts, edges, fill=True, color=BLUE)
    ax.set(ylabel=f"{what}", xlim=(-150, 130), yticks=[])
    for row, f in enumerate(formats):
        _, subnormal, normal, _ = zones(f)
        color = _format_look(f)["color"]
        for low, high, width in ((subnormal.low, normal.low, 4), (normal.low, normal.high, 14)):
            ranges.plot(
                [low, high], [row, row], color=color, linewidth=width, solid_capstyle="butt"
            )
    ranges.set_ylim(len(formats) - 0.4, -0.6)
    ranges.set_yticks(range(len(formats)), [f.name for f in formats], fontsize=12)
    ranges.tick_params(axis="y", length=0)
    ranges.set_xlabel("magnitude (thick: normal numbers, thin: subnormal numbers)")
    ranges.grid(axis="x", alpha=0.3)
    count_in_powers_of_two(ranges, 20)
    names = ", ".join(f.name for f in formats)
    return Canvas(figure, f"A histogram of the {what}, above the ranges of {names}.")


def lost_by_divisor(
    histograms: dict[str, ExponentHistogram], f: FloatFormat, most: int = 10
) -> Canvas:
    """Lines: share of gradients that are flushed to zero when the loss is divided by 1 to 2**most."""
    figure, ax = new_figure(9, 3.8)
    divisors = [2**n for n in range(most + 1)]
    for index, (name, histogram) in enumerate(histograms.items()):
        shares = [100 * histogram.fraction_lost(f, 1 / d) for d in divisors]
        ax.plot(divisors, shares, label=name, linewidth=2.5, markersize=8, **look(name, index))
    ax.set_xscale("log", base=2)
    ax.set_xticks(divisors, divisors)
    ax.set(
        xlabel="the loss is divided by",
        ylabel=f"flushed to zero in {f.name} (%)",
        ylim=(-4, 104),
    )
    ax.grid(alpha=0.3)
    ax.legend(frameon=False, fontsize=12, handlelength=4)
    return Canvas(
        figure,
        f"Lines: share of gradients that {f.name} flushes to zero by the divisor of the loss, for "
        f"{', '.join(histograms)}.",
    )


def scale_history(scales: list[float], skipped: list[bool]) -> Canvas:
    """A staircase of the loss scale at each step, with the skipped steps marked by crosses."""
    figure, ax = new_figure(9, 3.6)
    steps = range(len(scales))
    powers = [math.log2(scale) for scale in scales]
    ax.step(steps, powers, where="mid", color=BLUE, linewidth=2.5, label="scale that was used")
    crosses = [i for i in steps if skipped[i]]
    ax.plot(
        crosses, [powers[i] for i in crosses], "X", color=RED, markersize=11,
        label="overflow: step skipped, scale halved",
    )  # fmt: skip
    low, high = math.floor(min(powers)), math.ceil(max(powers))
    ax.set_yticks(range(low, high + 1, max(1, (high - low) // 6)))
    ax.yaxis.set_major_formatter(lambda power, _: f"$2^{{{power:.0f}}}$")
    ax.set(xlabel="step", ylabel="loss scale")
    ax.margins(y=0.15)
    ax.grid(alpha=0.3)
    figure.legend(loc="outside upper center", ncols=2, frameon=False, fontsize=12)
    return Canvas(
        figure, "A staircase: the loss scale at each step, skipped steps marked by crosses."
    )


def _box(ax, x, y, text, width, height, color):
    ax.add_patch(
        FancyBboxPatch(
            (x - width / 2, y - height / 2), width, height, boxstyle="round,pad=0.05",
            facecolor=color, edgecolor=BLACK, linewidth=1.5,
        )
    )  # fmt: skip
    ax.text(x, y, text, ha="center", va="center", fontsize=12)


def _arrow(ax, start, end, text="", at=None, curve=0.0, **style):
    ax.annotate(
        "", end, start,
        arrowprops={"arrowstyle": "-|>", "linewidth": 1.8, "color": BLACK, "mutation_scale": 18,
                    "shrinkA": 0, "shrinkB": 0, "connectionstyle": f"arc3,rad={curve}"} | style,
    )  # fmt: skip
    if text:
        ax.text(*at, text, fontsize=12, ha="center", va="center", backgroundcolor="white")


def _diagram(width: float, height: float):
    figure, ax = new_figure(width, height)
    ax.set(xlim=(0, width), ylim=(0, height))
    ax.set_axis_off()
    return figure, ax


def scale_state_diagram() -> Canvas:
    """The decision that dynamic loss scaling takes after each backward pass."""
    figure, ax = _diagram(10, 4.4)
    blue, red, gray = "#D6E8F4", "#F9DDCB", "#EEEEEE"
    _box(ax, 1.35, 2.2, "loss x scale\nbackward", 2.1, 0.9, gray)
    _box(ax, 4.2, 2.2, "every gradient\nfinite?", 2.1, 0.9, gray)
    _box(ax, 7.9, 3.5, "divide by scale, step\ncount + 1", 3.0, 0.9, blue)
    _box(ax, 7.9, 2.2, "if count = interval:\nscale x 2, count = 0", 3.0, 0.9, blue)
    _box(ax, 7.9, 0.7, "skip the step\nscale x 1/2, count = 0", 3.0, 0.9, red)
    _arrow(ax, (2.45, 2.2), (3.05, 2.2))
    _arrow(ax, (4.6, 2.7), (6.3, 3.5), "yes", (5.2, 3.3))
    _arrow(ax, (4.6, 1.7), (6.3, 0.7), "no: inf or NaN", (5.2, 0.95))
    _arrow(ax, (7.9, 3.0), (7.9, 2.7))
    ax.plot([9.45, 9.8, 9.8, 9.45], [2.2, 2.2, 0.7, 0.7], color=BLACK, linewidth=1.8)
    ax.plot([9.8, 9.8, 1.35], [0.7, 0.1, 0.1], color=BLACK, linewidth=1.8)
    _arrow(ax, (1.35, 0.1), (1.35, 1.7), "next batch", (1.35, 0.9))
    return Canvas(
        figure,
        "Diagram: after a backward pass with finite gradients divide, step and count, and grow the "
        "scale when the count is full; otherwise skip the step and halve the scale.",
    )


def optimizer_stage_diagram() -> Canvas:
    """What a scaler remembers about each optimizer between two calls of `update`."""
    figure, ax = _diagram(10, 3.0)
    fill = "#D6E8F4"
    _box(ax, 1.4, 1.7, "READY", 1.9, 0.8, fill)
    _box(ax, 5.0, 1.7, "UNSCALED", 1.9, 0.8, fill)
    _box(ax, 8.6, 1.7, "STEPPED", 1.9, 0.8, fill)
    _arrow(ax, (2.4, 1.7), (4.0, 1.7), "unscale_", (3.2, 1.95))
    _arrow(ax, (6.0, 1.7), (7.6, 1.7), "step", (6.8, 1.95))
    _arrow(ax, (1.4, 2.15), (8.6, 2.15), "step (unscales by itself)", (5.0, 2.78), curve=-0.16)
    _arrow(ax, (8.6, 1.25), (1.4, 1.25), "update", (5.0, 0.62), curve=-0.16)
    ax.text(5.0, 0.1, "unscale_ or step again, before update: an error", ha="center", fontsize=12)
    return Canvas(
        figure,
        "Diagram: an optimizer goes from ready to unscaled to stepped, and back to ready at update; "
        "step goes from ready to stepped in one move.",
    )


# ---- Tensor Cores --------------------------------------------------------------------------------

_PRECISION_LOOKS = {"fp16": "fp16 + GradScaler"}


def _precision_look(name: str) -> dict:
    return look(_PRECISION_LOOKS.get(name, name))


def running_sums(sums: dict[str, list[float]], exact: list[float]) -> Canvas:
    """Lines: a running sum by the number of terms, for each way to accumulate, and the exact one."""
    figure, ax = new_figure(9, 4.2)
    ax.plot(exact, color="#BBBBBB", linewidth=8, label="exact", solid_capstyle="butt")
    for name, values in sums.items():
        style = look(name) | {"marker": ""}
        ax.plot(values, linewidth=2.5, label=name, **style)
    ax.set(xlabel="numbers added", ylabel="running sum")
    ax.legend(frameon=False, fontsize=12, handlelength=4)
    ax.grid(alpha=0.3)
    return Canvas(figure, f"Lines: a running sum, exact and accumulated by {', '.join(sums)}.")


def dot_product_error(lengths: list[int], errors: dict[str, list[float]]) -> Canvas:
    """Lines: mean relative error of dot products by their length, for each way to accumulate."""
    figure, ax = new_figure(9, 4.6)
    for name, values in errors.items():
        ax.plot(lengths, values, linewidth=2.5, markersize=7, label=name, **look(name))
    ax.set(
        xscale="log",
        yscale="log",
        xlabel="length of the dot product",
        ylabel="relative error (mean)",
    )
    ax.set_xscale("log", base=2)
    ax.grid(alpha=0.3)
    ax.legend(frameon=False, fontsize=12, handlelength=4)
    return Canvas(figure, f"Lines: error of dot products by length, for {', '.join(errors)}.")


def throughput(rows: list[dict], title: str = "") -> Canvas:
    """Lines: measured TFLOP/s by matrix size, for each dtype.

    `rows` are dictionaries with "n", "dtype" ("fp32", "tf32", "fp16", "bf16") and "tflops".
    """
    figure, ax = new_figure(9, 4.4)
    for name in ("fp32", "tf32", "fp16", "bf16"):
        points = sorted((row["n"], row["tflops"]) for row in rows if row["dtype"] == name)
        if points:
            style = _precision_look(name)
            ax.plot(*zip(*points, strict=True), linewidth=2.5, label=name.upper(), **style)
    ax.set(yscale="log", xlabel="matrix size n", ylabel="TFLOP/s", title=title)
    ax.set_xscale("log", base=2)
    ax.grid(alpha=0.3, which="both", axis="y")
    ax.legend(frameon=False, fontsize=12, handlelength=4)
    return Canvas(figure, "Lines: measured throughput of n x n matrix products by size and dtype.")


def gpu_peaks(gpus: list) -> Canvas:
    """Bars on a logarithmic axis: peak TFLOP/s of each GPU in FP32, TF32 and FP16."""
    figure, ax = new_figure(9, 4.4)
    kinds = {"FP32": "fp32", "TF32": "tf32", "FP16": "fp16"}
    hatches = {"FP32": "", "TF32": "...", "FP16": "//"}
    for place, (label, kind) in enumerate(kinds.items()):
        positions = [i + 0.27 * (place - 1) for i, gpu in enumerate(gpus) if getattr(gpu, kind)]
        peaks = [getattr(gpu, kind) / 1e12 for gpu in gpus if getattr(gpu, kind)]
        color = _precision_look(kind)["color"] if kind != "fp32" else "#999999"
        ax.bar(
            positions,
            peaks,
            0.25,
            color=color,
            hatch=hatches[label],
            edgecolor="white",
            label=label,
        )
        for x, peak in zip(positions, peaks, strict=True):
            text = f"{peak:,.0f}" if peak >= 100 else f"{peak:.3g}"
            ax.text(x, peak * 1.08, text, ha="center", fontsize=9)
    ax.set_xticks(range(len(gpus)), [gpu.name for gpu in gpus], fontsize=12)
    ax.set(yscale="log", ylabel="peak TFLOP/s, dense")
    ax.legend(frameon=False, fontsize=12, loc="upper left")
    names = ", ".join(gpu.name for gpu in gpus)
    return Canvas(figure, f"Bars: peak rates in FP32, TF32 and FP16 of {names}.")


def roofline(gpu, operations: dict[str, float]) -> Canvas:
    """The roofs of one GPU in FP32 and FP16, and where operations lie under the FP16 roof.

    `operations` maps names to arithmetic intensities, in FLOP per byte.

    Source: Williams, Waterman, Patterson, "Roofline", Communications of the ACM 52(4), 2009.
    """
    figure, ax = new_figure(9, 4.8)
    lowest, highest = 0.05, 4000.0
    for label, kind, peak in (("FP32", "fp32", gpu.fp32), ("FP16, Tensor Cores", "fp16", gpu.fp16)):
        ridge = peak / gpu.bandwidth
        xs = [lowest, ridge, highest]
        ys = [min(peak, x * gpu.bandwidth) / 1e12 for x in xs]
        style = _precision_look(kind) | {"marker": ""}
        ax.plot(xs, ys, linewidth=3, label=f"{label}: {peak / 1e12:.0f} TFLOP/s", **style)
        ax.plot(ridge, peak / 1e12, "o", color=style["color"], markersize=8)
    for number, intensity in enumerate(operations.values(), start=1):
        reach = min(gpu.fp16, intensity * gpu.bandwidth) / 1e12
        ax.plot([intensity] * 2, [1e-3, reach], color="#999999", linestyle=":", linewidth=1.5)
        ax.plot(intensity, reach, "D", color=RED, markersize=9)
        ax.text(intensity * 0.82, reach * 1.15, str(number), fontsize=12, ha="right")
    key = "\n".join(f"{i}  {name}" for i, name in enumerate(operations, start=1))
    ax.text(0.985, 0.06, key, transform=ax.transAxes, ha="right", fontsize=11, linespacing=1.5,
            bbox={"facecolor": "white", "edgecolor": "#CCCCCC"})  # fmt: skip
    ax.set(
        xscale="log",
        yscale="log",
        xlim=(lowest, highest),
        ylim=(0.05, 3 * gpu.fp16 / 1e12),
        xlabel="arithmetic intensity, FLOP per byte of memory traffic",
        ylabel="attainable TFLOP/s",
        title=f"{gpu.name}: {gpu.bandwidth / 1e12:.3g} TB/s",
    )
    ax.grid(alpha=0.3)
    ax.legend(frameon=False, fontsize=12, loc="upper left", handlelength=4)
    names = ", ".join(operations)
    return Canvas(figure, f"Roofline of {gpu.name} in FP32 and FP16 with {names} under it.")


def tile_efficiency(tile: int, sizes: list[int]) -> Canvas:
    """Line: share of useful work when an n x n result is computed in whole tile x tile tiles."""
    figure, ax = new_figure(9, 3.6)
    shares = [100 * (n / (tile * math.ceil(n / tile))) ** 2 for n in sizes]
    ax.plot(sizes, shares, color=BLUE, linewidth=2)
    ax.set(xlabel="matrix size n", ylabel="useful work, %", ylim=(0, 105))
    ax.grid(alpha=0.3)
    return Canvas(figure, f"A sawtooth: the share of useful work in {tile} x {tile} tiles by size.")


# ---- speed and memory ----------------------------------------------------------------------------


def memory_bars(parts: dict[str, dict[str, int]], title: str = "") -> Canvas:
    """Stacked bars, one a precision: bytes of weights, gradients, optimizer state, activations."""
    figure, ax = new_figure(9, 1.4 + 0.75 * len(parts))
    looks = [(BLUE, ""), (SKY, "//"), (ORANGE, ".."), (RED, "xx"), ("#999999", "--")]
    kinds = list(next(iter(parts.values())))
    longest = max(sum(sizes.values()) for sizes in parts.values())
    for row, sizes in enumerate(parts.values()):
        left = 0.0
        for (color, hatch), kind in zip(looks, kinds, strict=False):
            size = sizes[kind] / 2**20
            label = kind if row == 0 else None
            ax.barh(row, size, 0.6, left, color=color, hatch=hatch, edgecolor="white", label=label)
            left += size
        ax.text(left + 0.01 * longest / 2**20, row, f"{left:.1f} MiB", va="center", fontsize=12)
    ax.set_yticks(range(len(parts)), parts, fontsize=12)
    ax.set(xlabel="MiB", xlim=(0, 1.15 * longest / 2**20), title=title)
    ax.invert_yaxis()
    ax.legend(frameon=False, fontsize=11, ncols=len(kinds), loc="upper center",
              bbox_to_anchor=(0.45, -0.32))  # fmt: skip
    names = ", ".join(parts)
    return Canvas(figure, f"Stacked bars: {', '.join(kinds)} in MiB, for {names}.")


def speedup_grid(
    ratios: dict[tuple[int, int], float], what: str = "FP32 time / AMP time"
) -> Canvas:
    """A table in colors: a ratio for each (width, batch); above 1 AMP wins."""
    widths = sorted({width for width, _ in ratios})
    batches = sorted({batch for _, batch in ratios})
    figure, ax = new_figure(8, 1.3 + 0.62 * len(widths))
    values = np.array([[ratios[w, b] for b in batches] for w in widths])
    ax.imshow(np.log2(values), cmap="PuOr", vmin=-2, vmax=2, aspect="auto")
    for row, column in np.ndindex(values.shape):
        ratio = values[row, column]
        verdict = "wins" if ratio > 1.05 else "loses" if ratio < 0.95 else "even"
        color = "white" if abs(math.log2(ratio)) > 1.3 else BLACK
        ax.text(
            column,
            row,
            f"{ratio:.2f}x {verdict}",
            ha="center",
            va="center",
            fontsize=12,
            color=color,
        )
    ax.set_xticks(range(len(batches)), batches)
    ax.set_yticks(range(len(widths)), widths)
    ax.set(xlabel="batch", ylabel="width", title=what)
    ax.spines[:].set_visible(False)
    return Canvas(figure, f"A table by width and batch: {what}, above 1 where AMP wins.")


def where_time_goes(milliseconds: dict[str, dict[str, float]]) -> Canvas:
    """Stacked bars, one a precision: milliseconds of a step by kind of operation."""
    figure, ax = new_figure(9, 1.3 + 0.75 * len(milliseconds))
    looks = [(BLUE, ""), (RED, "xx"), (ORANGE, ".."), ("#999999", "//"), (SKY, "--")]
    kinds = list(next(iter(milliseconds.values())))
    for row, times in enumerate(milliseconds.values()):
        left = 0.0
        for (color, hatch), kind in zip(looks, kinds, strict=False):
            label = kind if row == 0 else None
            ax.barh(
                row,
                times[kind],
                0.6,
                left,
                color=color,
                hatch=hatch,
                edgecolor="white",
                label=label,
            )
            left += times[kind]
    ax.set_yticks(range(len(milliseconds)), milliseconds, fontsize=12)
    ax.set_xlabel("milliseconds in operations, one step")
    ax.invert_yaxis()
    ax.legend(frameon=False, fontsize=11, ncols=len(kinds), loc="upper center",
              bbox_to_anchor=(0.45, -0.32))  # fmt: skip
    return Canvas(
        figure, f"Stacked bars: time of a step by kind of operation, for {', '.join(milliseconds)}."
    )


def speedups(rows: dict[str, float], highlight: str = "here") -> Canvas:
    """Bars: speed-ups by AMP, others' and one's own; the names that hold `highlight` are one's own."""
    figure, ax = new_figure(9, 0.9 + 0.45 * len(rows))
    for row, (name, ratio) in enumerate(rows.items()):
        own = highlight in name
        ax.barh(
            row,
            ratio,
            0.6,
            color=GREEN if own else SKY,
            hatch="//" if own else "",
            edgecolor="white",
        )
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        ax.text(ratio + 0.03, row, f"{ratio:.2f}x", va="center", fontsize=12, bbox=box, zorder=3)
    ax.axvline(1, color=BLACK, linestyle=":", linewidth=1.5)
    ax.set_yticks(range(len(rows)), rows, fontsize=11)
    ax.invert_yaxis()
    ax.set(xlabel="speed-up by AMP (below 1: slower)", xlim=(0, 1.15 * max(1, *rows.values())))
    return Canvas(figure, "Bars: speed-ups by AMP, published ones and those measured here.")


def rank_history(ranks: list[list[dict]]) -> Canvas:
    """Boxes: what each rank of `distributed.overflow` did in each step; skipped ones are hatched."""
    steps = len(ranks[0])
    figure, ax = new_figure(9, 0.9 + 1.0 * len(ranks))
    for row, history in enumerate(ranks):
        for column, step in enumerate(history):
            skipped = step["skipped"]
            ax.barh(
                row,
                0.94,
                0.82,
                column - 0.47,
                facecolor="white" if skipped else SKY,
                edgecolor=RED if skipped else SKY,
                hatch="//" if skipped else "",
                linewidth=2,
            )
            sent = "finite" if step["sent finite gradients"] else "INF"
            got = "finite" if step["got finite gradients"] else "INF"
            done = "skipped" if skipped else "updated"
            text = f"sent {sent}, got {got}\nscale {step['scale']:.0f}\n{done}"
            text += f"\nweights {step['weights'][:4]}"
            box = {"facecolor": "white", "edgecolor": "none", "pad": 2} if skipped else None
            ax.text(column, row, text, ha="center", va="center", fontsize=10, bbox=box)
    ax.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in range(len(ranks))], fontsize=12)
    ax.set_xticks(range(steps), [f"step {step}" for step in range(steps)], fontsize=12)
    ax.set(xlim=(-0.55, steps - 0.45), ylim=(len(ranks) - 0.5, -0.5))
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    return Canvas(figure, "Boxes: what each rank sent and did in each step, and its weights then.")


def rank_losses(losses: dict[str, list[float]]) -> Canvas:
    """Losses by step, a panel for each precision; keys are "how, precision" as in `same_loss`."""
    precisions = list(dict.fromkeys(name.split(", ")[1] for name in losses))
    marks = {
        "one process": {"color": BLACK, "linewidth": 1.5},
        "DDP": {
            "color": BLUE,
            "marker": "o",
            "fillstyle": "none",
            "markersize": 9,
            "linestyle": "",
        },
        "FSDP2": {"color": RED, "marker": "x", "markersize": 6, "linestyle": ""},
    }
    figure, axes = new_figure(9, 3.4, ncols=len(precisions), sharey=True)
    for ax, precision in zip(axes, precisions, strict=True):
        for how, style in marks.items():
            if f"{how}, {precision}" in losses:
                ax.plot(losses[f"{how}, {precision}"], label=how, **style)
        ax.set(title=precision, xlabel="step")
        ax.grid(alpha=0.3)
        ax.legend(frameon=False, fontsize=11)
    axes[0].set_ylabel("training loss")
    return Canvas(
        figure, f"Panels: loss by step of one process and of two, {', '.join(precisions)}."
    )


def error_by_magnitude(x: torch.Tensor, rounded: dict[str, torch.Tensor]) -> Canvas:
    """Lines: median relative error of the elements of `x` by their power of two, for each rounding.

    Gray bars in a panel below count the elements. `rounded` holds tensors of the shape of `x`.
    """
    x = x.detach().flatten().double().cpu()
    _, exponents = torch.frexp(x[x != 0])
    exponents -= 1
    lowest, highest = int(exponents.double().quantile(0.001)), int(exponents.max())
    powers = range(lowest, highest + 1)
    figure, (ax, below) = new_figure(9, 5, nrows=2, sharex=True, height_ratios=(3, 1))
    for index, (name, tensor) in enumerate(rounded.items()):
        y = tensor.detach().flatten().double().cpu()
        error = ((y - x).abs() / x.abs())[x != 0]
        medians = [float(error[exponents == p].median()) for p in powers]
        ax.plot(powers, medians, linewidth=2, label=name, **look(name, index))
    ax.set(yscale="log", ylim=(0.0008, 1.6), ylabel="median relative error")
    ax.set_yticks([0.001, 0.01, 0.1, 1.0], ["0.1 %", "1 %", "10 %", "100 %"])
    ax.legend(frameon=False, fontsize=11, loc="upper right")
    ax.grid(alpha=0.3)
    below.bar(powers, [int((exponents == p).sum()) for p in powers], color="#999999")
    below.set(xlabel="magnitude of the element", ylabel="elements")
    shown = [p for p in powers if p % 4 == 0]
    below.set_xticks(shown, [f"$2^{{{p}}}$" for p in shown])
    return Canvas(
        figure, f"Lines: relative error by magnitude of an element, for {', '.join(rounded)}."
    )


# ---- autocast's op classification ----------------------------------------------------------------


def autocast_path() -> Canvas:
    """The way of a call through PyTorch's dispatcher: autocast, autograd, kernel."""
    figure, ax = _diagram(10, 2.9)
    gray, blue = "#EEEEEE", "#D6E8F4"
    _box(ax, 1.3, 1.7, "your call\nF.linear(x, w)", 1.9, 0.9, gray)
    _box(ax, 4.1, 1.7, "autocast\nlinear? cast down", 2.0, 0.9, blue)
    _box(ax, 6.75, 1.7, "autograd\nrecords casts\nand product", 1.7, 1.1, gray)
    _box(ax, 9.0, 1.7, "kernel\nmm", 1.2, 0.9, gray)
    for start, end, dtype in ((2.3, 3.0, "FP32"), (5.2, 5.8, "FP16"), (7.7, 8.3, "FP16")):
        _arrow(ax, (start, 1.7), (end, 1.7))
        ax.text((start + end) / 2, 2.02, dtype, ha="center", fontsize=11, weight="bold")
    ax.plot([9.0, 9.0, 1.3], [1.2, 0.5, 0.5], color=BLACK, linewidth=1.8)
    _arrow(ax, (1.3, 0.5), (1.3, 1.2), "FP16", (5.2, 0.5))
    return Canvas(
        figure,
        "Diagram: a call of linear with FP32 tensors passes autocast, which casts them to FP16, then "
        "autograd, then the kernel; an FP16 result comes back.",
    )


_POLICY_LOOKS = {
    Policy.LOWER_PRECISION: ("16", BLUE, "white"),
    Policy.FP32: ("32", "#BBBBBB", BLACK),
    Policy.WIDEST: ("W", ORANGE, BLACK),
    Policy.AS_INPUT: ("=", "white", BLACK),
    Policy.BANNED: ("X", RED, "white"),
}


def op_map(cuda: OpTable, cpu: OpTable) -> Canvas:
    """A tile for each operation by group, CUDA above CPU; the letters name the policies.

    A thick frame marks an operation of one policy on CUDA and another on the CPU.
    """
    groups = list(dict.fromkeys(op.group for op in cuda))
    figure, ax = _diagram(10, 0.7 + 0.62 * len(groups))
    top = 0.62 * len(groups) + 0.1
    for row, group in enumerate(groups):
        y = top - 0.62 * row - 0.62
        ax.text(2.9, y + 0.28, group, ha="right", va="center", fontsize=11)
        for height, label in ((0.28, "CUDA"), (0.0, "CPU")):
            ax.text(3.45, y + height + 0.13, label, ha="right", va="center", fontsize=8)
        names = [op.name for op in cuda if op.group == group]
        for column, name in enumerate(names):
            x = 3.55 + 0.35 * column
            _tile(ax, x, y + 0.28, cuda[name].policy)
            _tile(ax, x, y, cpu[name].policy)
            if cuda[name].policy is not cpu[name].policy:
                ax.add_patch(Rectangle((x, y), 0.34, 0.54, fill=False, linewidth=2.2, zorder=3))
    x = 0.35
    for policy in _POLICY_LOOKS:
        _tile(ax, x, top + 0.2, policy)
        ax.text(x + 0.45, top + 0.33, str(policy), va="center", fontsize=11)
        x += 0.95 + 0.105 * len(str(policy))
    ax.add_patch(Rectangle((x, top + 0.2), 0.34, 0.26, fill=False, linewidth=2.2))
    ax.text(x + 0.45, top + 0.33, "CUDA and CPU differ", va="center", fontsize=11)
    return Canvas(
        figure,
        "A map of operations by group, one tile each: the policy of CUDA autocast (dry run) above that "
        "of CPU autocast, a thick frame where they differ.",
    )


def _tile(ax, x, y, policy):
    letters, color, ink = _POLICY_LOOKS.get(policy, ("?", "white", BLACK))
    ax.add_patch(Rectangle((x, y), 0.34, 0.26, facecolor=color, edgecolor="#888888", linewidth=0.6))
    ax.text(x + 0.17, y + 0.125, letters, ha="center", va="center", fontsize=9, color=ink)


# ---- training with AMP ---------------------------------------------------------------------------


def amp_step_timeline() -> Canvas:
    """The calls of one training step in order, and in which state the gradients are meanwhile."""
    blue, red, gray = "#D6E8F4", "#F9DDCB", "#EEEEEE"
    calls = {
        "autocast:\nforward, loss": gray,
        "scale(loss)\n.backward()": red,
        "unscale_": gray,
        "clip, log,\ninspect": blue,
        "scaler.step": gray,
        "update": gray,
        "scheduler\nif not skipped": gray,
    }
    figure, ax = _diagram(11.4, 2.9)
    for place, (call, color) in enumerate(calls.items()):
        _box(ax, 0.85 + 1.61 * place, 2.2, call, 1.3, 0.8, color)
        if place:
            _arrow(ax, (1.61 * place - 0.09, 2.2), (1.61 * place + 0.15, 2.2))
    for left, right, color, text in (
        (0.15, 1.69, gray, "no gradients"),
        (1.77, 3.37, red, "scaled: hands off"),
        (3.45, 11.25, blue, "true gradients: clip, log, compare"),
    ):
        ax.add_patch(Rectangle((left, 0.75), right - left, 0.6, color=color))
        ax.text((left + right) / 2, 1.05, text, ha="center", va="center", fontsize=12)
    ax.text(
        *(0.15, 0.3),
        "On a skipped step, scaler.step leaves the weights alone and update() lowers the scale.",
        fontsize=12,
    )
    return Canvas(
        figure,
        "Diagram: the calls of one AMP training step in order. Gradients are scaled from backward "
        "until unscale_, and true from there on.",
    )


# ---- audit ---------------------------------------------------------------------------------------


def kept_for_backward(reports: dict) -> Canvas:
    """Bars, one an audit: bytes kept for backward with autocast, as a multiple of those without it.

    `reports` maps names to `Audit`s. The hatched part is 16-bit copies of weights.
    """
    figure, ax = new_figure(9, 1.2 + 0.55 * len(reports))
    longest = 1.0
    for row, report in enumerate(reports.values()):
        without, with_autocast = report.saved_bytes
        ratio, copies = with_autocast / without, report.weight_copy_bytes / without
        label = ("activations", "16-bit copies of weights") if row == 0 else (None, None)
        ax.barh(row, ratio - copies, 0.6, color=BLUE, edgecolor="white", label=label[0])
        ax.barh(
            row, copies, 0.6, ratio - copies, color=ORANGE, hatch="//", edgecolor="white",
            label=label[1],
        )  # fmt: skip
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        ax.text(ratio + 0.04, row, f"{ratio:.2f}x", va="center", fontsize=12, bbox=box, zorder=3)
        longest = max(longest, ratio)
    for x, style in ((0.5, ":"), (1.0, "-")):
        ax.axvline(x, color=BLACK, linestyle=style, linewidth=1.2)
    ax.set_yticks(range(len(reports)), reports, fontsize=12)
    ax.set_ylim(len(reports) - 0.5, -0.5)
    ax.set_xlim(0, 1.12 * longest)
    ax.set_xlabel("kept for backward with autocast, FP32 = 1 (dotted: one half)")
    ax.legend(frameon=False, fontsize=11, loc="upper right")
    return Canvas(
        figure,
        "Bars: bytes kept for backward with CUDA autocast (dry run) relative to FP32, activations and "
        f"16-bit weight copies, for {', '.join(reports)}.",
    )


def kept_by_batch(ratios: dict[str, dict[int, float]]) -> Canvas:
    """Lines: bytes kept for backward with autocast over those without, against the batch."""
    figure, ax = new_figure(9, 4.2)
    for index, (name, points) in enumerate(ratios.items()):
        ax.plot(list(points), list(points.values()), linewidth=2.2, label=name, **look(name, index))
    batches = sorted({batch for points in ratios.values() for batch in points})
    ax.axhline(1, color=BLACK, linewidth=1.2)
    ax.axhline(0.5, color=BLACK, linestyle=":", linewidth=1.2)
    ax.text(batches[-1], 1.03, "as much as FP32", ha="right", va="bottom", fontsize=11)
    ax.text(batches[-1], 0.49, "one half", ha="right", va="top", fontsize=11)
    ax.set(xscale="log", yscale="log", xlabel="batch", ylabel="kept with autocast, FP32 = 1")
    ax.set_ylim(0.4, 1.2 * max(max(points.values()) for points in ratios.values()))
    ax.set_xticks(batches, batches)
    ticks = [t for t in (0.5, 1, 2, 4, 8, 16) if t <= ax.get_ylim()[1]]
    ax.set_yticks(ticks, [f"{t:g}x" for t in ticks])
    ax.minorticks_off()
    ax.legend(frameon=False, fontsize=12, loc="upper right")
    return Canvas(
        figure,
        "Lines: bytes kept for backward with CUDA autocast (dry run) relative to FP32 by batch, for "
        f"{', '.join(ratios)}.",
    )
