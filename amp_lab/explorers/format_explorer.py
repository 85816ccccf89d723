"""One number in every format: type it, or flip its bits."""

import ast
import html
import math
import operator

import ipywidgets as widgets
import numpy as np
from matplotlib.artist import Artist
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgb
from matplotlib.font_manager import findfont
from matplotlib.patches import Rectangle
from PIL import Image, ImageDraw, ImageFont

from ..canvas import BLACK, BLUE, GREEN, RED, Canvas, new_figure
from ..formats import BF16, E4M3, E5M2, FP16, FP32, TF32, Explanation, FloatFormat
from .panel import Panel

FORMATS = {f.name: f for f in (FP32, TF32, BF16, FP16, E4M3, E5M2)}
FIELDS = {"sign": RED, "exponent": BLUE, "mantissa": GREEN}


class FormatExplorer(Panel):
    """Shows what a number becomes in FP32, TF32, BF16, FP16, E4M3 and E5M2.

    `number` takes a number, a small calculation such as `2**-24`, or the bits of the chosen
    `format`, as `0x3c00` or `0b11110000000000`. `bits` are that format's bits, the sign first:
    buttons that a mouse click flips, or the space bar. `lower` and `higher` go to the neighboring
    numbers of the format. A cell can do all that, too: `panel.number.value = "0.1"`,
    `panel.bits[0].value = True`, `panel.format.value = "BF16"`, `panel.higher.click()`.

    `explanations` holds an `Explanation` for each format, by name. Text that is no number changes
    none of this; `message` then says what to type. Raises `ValueError` if the number or the format
    to begin with is not one.
    """

    def __init__(self, number: str | float = "0.1", format: str = "FP16"):
        if format not in FORMATS:
            raise ValueError(
                f"FormatExplorer: format is {format!r}, expected one of {', '.join(FORMATS)}"
            )
        self._build_controls(format)
        self._writing = False
        self._read(str(number))
        wrapping = widgets.Layout(flex_flow="row wrap")
        entry = widgets.HBox([self.number, self.format, self.lower, self.higher], layout=wrapping)
        fields = [
            widgets.VBox([label, row], layout=widgets.Layout(margin="0 14px 6px 0"))
            for label, row in zip(self._labels, self._rows, strict=True)
        ]
        super().__init__(
            _NumberLine(), [entry, self.message, widgets.HBox(fields, layout=wrapping)]
        )
        self.children = [*self.children, self.table]
        self._lay_out_bits()
        self._update()

        self.number.observe(self._on_number, "value")
        self.format.observe(self._on_format, "value")
        self.lower.on_click(lambda _: self._step(-1))
        self.higher.on_click(lambda _: self._step(+1))
        for button in self._buttons:
            button.observe(self._on_bit, "value")

    def _build_controls(self, format):
        self.number = widgets.Text(description="number", continuous_update=False)
        self.format = widgets.Dropdown(options=list(FORMATS), value=format, description="bits in")
        self.format.layout.width = "180px"
        self.lower = widgets.Button(description="◀ next lower")
        self.higher = widgets.Button(description="next higher ▶")
        for button in (self.lower, self.higher):
            button.layout.width = "120px"
        self.message = widgets.HTML()
        self.table = widgets.HTML()
        self._buttons = [widgets.ToggleButton(description="0") for _ in range(FP32.bits)]
        self._labels = [widgets.HTML() for _ in FIELDS]
        self._rows = [widgets.HBox() for _ in FIELDS]
        self._layouts = [
            widgets.Layout(width="22px", margin="1px", padding="0", border=f"1px solid {color}")
            for color in FIELDS.values()
        ]

    @property
    def bits(self) -> list[widgets.ToggleButton]:
        """The buttons of the chosen format's bits, from left (the sign) to right."""
        return self._buttons[: self._format.bits]

    @property
    def _format(self) -> FloatFormat:
        return FORMATS[self.format.value]

    # ---- what the learner does -----------------------------------------------------------------

    def _on_number(self, change):
        if self._writing:
            return
        try:
            self._read(change["new"])
        except ValueError as error:
            words = f"{error} Nothing changed: this is still {_short(self._text)}."
            self.message.value = html.escape(words, quote=False)
        else:
            self._update()

    def _read(self, text):
        self._x, self._code = read_number(text, self._format)
        is_pattern = text.strip().lower().startswith(("0x", "0b"))
        self._text = repr(self._x) if is_pattern else text.strip()

    def _on_format(self, change):
        self._code = self._format.encode(self._x)
        self._lay_out_bits()
        self._update()

    def _on_bit(self, change):
        if not self._writing:
            self._show_code(int("".join(str(int(button.value)) for button in self.bits), 2))

    def _step(self, direction):
        rank = _rank(self._code, self._format)
        if math.isfinite(rank) and abs(rank + direction) <= _highest_rank(self._format):
            self._show_code(_code(rank + direction, self._format))

    def _show_code(self, code):
        self._x, self._code = self._format.decode(code), code
        self._text = repr(self._x)
        self._update()

    # ---- what the learner sees -----------------------------------------------------------------

    def _lay_out_bits(self):
        """Distribute the buttons over sign, exponent and mantissa."""
        f = self._format
        fields = [0] + [1] * f.exponent_bits + [2] * f.mantissa_bits
        weights = [""]
        weights += [f"worth {2**i}" for i in reversed(range(f.exponent_bits))]
        weights += [f"worth 1/{2**i}" for i in range(1, f.mantissa_bits + 1)]
        for button, field, weight in zip(self.bits, fields, weights, strict=True):
            button.layout = self._layouts[field]
            button.tooltip = f"{list(FIELDS)[field]} bit {weight}".strip()
        for field, row in enumerate(self._rows):
            row.children = [b for b, k in zip(self.bits, fields, strict=True) if k == field]

    def _update(self):
        self.explanations = {name: f.explain(self._x) for name, f in FORMATS.items()}
        if math.isnan(self._x):  # a NaN has many codes, and the bits shall stay as they were set
            self.explanations[self.format.value] = self._format.explain(bits=self._code)
        chosen = self.explanations[self.format.value]
        self._write_controls(chosen)
        self.message.value = ""
        self.table.value = _table(self.explanations, chosen)
        self.canvas.draw(chosen)
        self.show(_sentence(chosen))

    def _write_controls(self, e):
        self._writing = True
        try:
            self.number.value = self._text
            for button, bit in zip(self.bits, e.pattern.replace(" ", ""), strict=True):
                button.value, button.description = bit == "1", bit
        finally:
            self._writing = False
        stored = ["", f" {e.exponent}", f" {e.mantissa}"]
        for label, name, number in zip(self._labels, FIELDS, stored, strict=True):
            label.value = f"{name}{number}"


# ---- reading what was typed --------------------------------------------------------------------

_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: math.pow,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


LONGEST = 60  # characters: of a calculation, and of what a message repeats


def _short(text):
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def read_number(text: str, format: FloatFormat) -> tuple[float, int]:
    """Read a number, a calculation or a bit pattern; return the number and its code in `format`.

    Raises `ValueError`, with a sentence for the learner, if `text` is none of these.
    """
    text = text.strip().replace("\N{MINUS SIGN}", "-")
    if not text:
        raise ValueError("Type a number, such as 0.1 or 1e-8.")
    if text.lower().startswith(("0x", "0b")):
        try:
            code = int(text, 0)
        except ValueError:
            raise ValueError(f'"{_short(text)}" is no bit pattern; 0x3c00 would be one.') from None
        if code >> format.bits:
            raise ValueError(
                f"{_short(text)} has more bits than the {format.bits} of {format.name}."
            )
        return format.decode(code), code
    x = _calculate(text)
    return x, format.encode(x)


def _calculate(text):
    try:
        return float(text)
    except ValueError:
        pass
    if len(text) > LONGEST:
        raise ValueError(
            f'"{_short(text)}" is no number that I can read: a calculation has at most {LONGEST}'
            " characters."
        )
    try:
        return _value(ast.parse(text, mode="eval").body)
    except ZeroDivisionError:
        raise ValueError(f'"{_short(text)}" divides by zero.') from None
    except OverflowError:
        raise ValueError(f'"{_short(text)}" is too large even for FP64.') from None
    except (SyntaxError, ValueError, TypeError, KeyError, RecursionError, MemoryError):
        raise ValueError(
            f'"{_short(text)}" is no number that I can read. Try 0.1, 1e-8, 2**-24, inf or nan, or bits'
            " such as 0x3c00."
        ) from None


def _value(node):
    """The value of a calculation, in FP64: numbers, + - * / **, and nothing else."""
    match node:
        case ast.Constant(value) if type(value) in (int, float):
            return float(value)
        case ast.BinOp():
            return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
        case ast.UnaryOp():
            return _OPERATORS[type(node.op)](_value(node.operand))
    raise ValueError(node)


# ---- neighbors ---------------------------------------------------------------------------------


def _rank(code, format):
    """The place of a code among all numbers of its format: 0 for zero, 1 for the next; or NaN."""
    value = format.decode(code)
    if math.isnan(value):
        return math.nan
    return int(math.copysign(format.encode(abs(value)), value))


def _code(rank, format):
    return abs(rank) | (1 << (format.bits - 1) if rank < 0 else 0)


def _highest_rank(format):
    return format.encode(math.inf if format.infinity else format.max)


# ---- words -------------------------------------------------------------------------------------


def _kind(e: Explanation) -> str:
    """The kind of number, and what happened to it where it got lost."""
    if math.isfinite(e.x) and not math.isfinite(e.value):
        return f"{e.kind} (overflow)"
    if e.x != 0 and e.value == 0:
        return "zero (underflow)"
    return e.kind


def _equation(e: Explanation) -> str:
    sign = "-" if e.sign else "+"
    if e.kind in ("normal", "subnormal"):
        return f"{sign}{e.significand!r} x 2^{e.power} = {e.value!r}"
    return f"{e.value!r}"


def _sentence(e: Explanation) -> str:
    name = e.format.name
    words = f"{name} stores {e.x!r} as <b>{e.value!r}</b>: {_kind(e)}"
    if math.isnan(e.x):
        return f"{name} stores NaN: not a number."
    if not math.isfinite(e.value):
        limit = "" if math.isinf(e.x) else f"; the largest number of {name} is {e.format.max!r}"
        return f"{words}{limit}."
    error = f"an error of {e.error:.3g}" if e.error else "exact"
    return f"{words}, {error}. The neighbors here are {e.spacing:.3g} apart."


def _table(explanations, chosen) -> str:
    heads = ["format", "kind", "holds", "error", "relative error", "spacing", "bits"]
    rows = []
    for name, e in explanations.items():
        relative = e.error / abs(e.x) if e.x and math.isfinite(e.error) else e.error
        mark, weight = ("▶ ", "bold") if e is chosen else ("", "normal")
        cells = [
            _kind(e),
            repr(e.value),
            f"{e.error:.3g}",
            f"{relative:.2g}",
            f"{e.spacing:.3g}",
            f"0x{e.bits:0{-(-e.format.bits // 4)}x}",
        ]
        cells = "".join(f"<td style='padding:1px 10px'>{cell}</td>" for cell in cells)
        rows.append(
            f"<tr style='font-weight:{weight}'>"
            f"<th scope='row' style='text-align:right'>{mark}{name}</th>{cells}</tr>"
        )
    heads = "".join(f"<th scope='col' style='padding:1px 10px'>{head}</th>" for head in heads)
    return (
        "<table style='text-align:right;font-variant-numeric:tabular-nums'>"
        f"<tr>{heads}</tr>{''.join(rows)}</table>"
    )


# ---- picture -----------------------------------------------------------------------------------

REACH = 1.75  # what the number line shows to each side, in spacings
BIT_SIZE = 17  # points
BIT_WIDTH = 0.602 * BIT_SIZE / 72  # inches: the advance of a character of DejaVu Sans Mono


class _Label(Artist):
    """A line of text, drawn by Pillow: several times faster than matplotlib's own.

    `anchor` says where (x, y) lies in the text, as in Pillow: "la" is left and top, "ma" middle and
    top, "lm" left and middle.
    """

    def __init__(self, axes, y, size=11, color=BLACK, anchor="ma", font="DejaVu Sans"):
        super().__init__()
        self.set_figure(axes.figure)
        self._to_pixels = axes.transData
        self._font = ImageFont.truetype(findfont(font), round(size * axes.figure.dpi / 72))
        self._rgb = np.array(to_rgb(color)) * 255
        self._anchor = anchor
        self._place = (0, y)
        self.text = ""

    def write(self, x: float, text: str) -> None:
        self._place = (x, self._place[1])
        self.text = text

    def draw(self, renderer):
        if not self.text:
            return
        left, top, right, bottom = self._font.getbbox(self.text, anchor=self._anchor)
        ink = Image.new("L", (math.ceil(right - left), math.ceil(bottom - top)))
        origin = (-left, -top)
        ImageDraw.Draw(ink).text(origin, self.text, 255, self._font, self._anchor)
        pixels = np.empty((ink.height, ink.width, 4), np.uint8)
        pixels[..., :3] = self._rgb
        pixels[..., 3] = ink
        x, y = self._to_pixels.transform(self._place)
        # Agg counts rows from the bottom, Pillow from the top.
        renderer.draw_image(renderer.new_gc(), round(x + left), round(y - bottom), pixels[::-1])


class _NumberLine(Canvas):
    """The bits of a number, above the piece of the number line that lies around it."""

    def __init__(self):
        figure, (top, line) = new_figure(9, 3.2, nrows=2)
        figure.set_layout_engine("none")
        top.set(position=(0, 0.55, 1, 0.45), xlim=(0, 9 / BIT_WIDTH), ylim=(0, 1))
        line.set(position=(0, 0, 1, 0.55), xlim=(-REACH, REACH), ylim=(-1.3, 0.8))
        for ax in (top, line):
            ax.set_axis_off()
        line.axhline(0, color=BLACK, linewidth=1)
        line.text(
            *(0, -1.25),
            "|  a number of this format      ●  stored      ▼  asked for      "
            "x  half-way, where rounding turns",
            **{"ha": "center", "va": "bottom", "fontsize": 11, "color": "0.3"},
        )

        self._title = _Label(top, 0.95, 13, anchor="la")
        mono = {"size": BIT_SIZE, "anchor": "lm", "font": "DejaVu Sans Mono"}
        self._digits = [_Label(top, 0.5, color=color, **mono) for color in FIELDS.values()]
        self._names = [_Label(top, 0.27, anchor="la") for _ in FIELDS]
        self._brackets = LineCollection([], colors=list(FIELDS.values()), linewidths=2)
        top.add_collection(self._brackets)

        self._beyond = Rectangle((0, -0.25), 2 * REACH, 0.5, hatch="///", alpha=0.5, fill=False)
        line.add_patch(self._beyond)
        self._ticks = LineCollection([], colors=BLACK, linewidths=2)
        line.add_collection(self._ticks)
        (self._ties,) = line.plot([], [], linestyle="", marker="x", color="0.4", markersize=6)
        (self._stored,) = line.plot([], [], linestyle="", marker="o", color=BLUE, markersize=12)
        (self._asked,) = line.plot([], [], linestyle="", marker="v", color=RED, markersize=11)
        self._neighbors = [_Label(line, -0.3) for _ in range(2)]
        self._gap = _Label(line, -0.3, color="0.3")
        self._center = _Label(line, -0.62, color=BLUE, font="DejaVu Sans:bold")
        self._above = _Label(line, 0.66, color=RED)
        self._zone = _Label(line, 0.5)
        self._on_the_line = [self._beyond, self._ticks, self._ties, self._asked, self._stored]
        self._around = [*self._neighbors, self._gap, self._center, self._above, self._zone]
        super().__init__(
            figure,
            "The bits of a number, its sign, exponent and mantissa; and its neighbors on the number"
            " line.",
            [self._title, *self._digits, *self._names, self._brackets]
            + [*self._on_the_line, *self._around],
        )

    def draw(self, e: Explanation) -> None:
        """Move everything to the number that `e` explains."""
        self._title.write(1, f"{e.x!r} in {e.format.name}:  {_equation(e)}")
        self._draw_bits(e)
        is_number = not math.isnan(e.x)
        for artist in self._on_the_line:
            artist.set_visible(is_number)
        for label in self._around:
            label.write(0, "")
        if is_number:
            self._draw_line(e)
        else:
            self._zone.write(0, "NaN has no place on the number line")

    def _draw_bits(self, e):
        names = ["sign", f"exponent {e.exponent}", f"mantissa {e.mantissa}"]
        if e.kind in ("normal", "subnormal"):
            names[1] += f" - {e.format.bias} = {e.power}" if e.exponent else f" means {e.power}"
            names[2] += f" / {2**e.format.mantissa_bits}"
        left, brackets = 1, []
        for digits, bits, label, name in zip(
            self._digits, e.pattern.split(), self._names, names, strict=True
        ):
            digits.write(left, bits)
            label.write(left, name)
            brackets.append([(left, 0.33), (left + len(bits), 0.33)])
            left += max(len(bits), 0.65 * len(name)) + 2
        self._brackets.set_segments(brackets)

    def _draw_line(self, e):
        f, sign = e.format, -1 if e.sign else 1
        overflow = not math.isfinite(e.value)
        value = sign * f.max if overflow else e.value
        center, last = _rank(f.encode(value), f), f.encode(f.max)
        unit = f.spacing(value)
        values = {
            rank: f.decode(_code(rank, f))
            for rank in range(center - 4, center + 5)
            if abs(rank) <= last
        }
        places = [(v - value) / unit for v in values.values()]
        ties = [(a + b) / 2 for a, b in zip(places, places[1:], strict=False)]
        self._ticks.set_segments([[(u, -0.2), (u, 0.2)] for u in places])
        self._ties.set_data(ties, [0] * len(ties))
        self._stored.set_data([], []) if overflow else self._stored.set_data([0], [0])
        self._center.write(0, f"{value:.9g}")
        for label, rank in zip(self._neighbors, (center - 1, center + 1), strict=True):
            if rank in values:
                label.write((values[rank] - value) / unit, f"{values[rank]:.9g}")
        outwards = sign if center + sign in values else -sign
        self._gap.write(outwards / 2, f"← {unit:.2g} →")

        asked = max(-0.94 * REACH, min((e.x - value) / unit, 0.94 * REACH))
        self._asked.set_data([asked], [0.28])
        self._above.write(max(-0.87 * REACH, min(asked, 0.87 * REACH)), f"{e.x:.9g}")

        # Half a spacing beyond the largest number, overflow begins.
        edge = (f.max + f.spacing(f.max) / 2 - abs(value)) / unit
        self._beyond.set_visible(edge < REACH)
        if edge < REACH:
            self._beyond.set_x(edge if sign > 0 else -edge - 2 * REACH)
            self._zone.write(sign * 0.5 * REACH, "infinity" if f.infinity else "too large: NaN")
