"""A matplotlib figure that redraws cheaply and says in words what it shows.

A full redraw of a figure costs tens of milliseconds, most of it for axes, ticks and text that did not
change. A `Canvas` draws those once, keeps the pixels, and afterwards draws only the moving artists on
top of them ("blitting").

Source: matplotlib.org, "Faster rendering by using blitting".
"""

import struct
import zlib
from collections.abc import Iterable

import numpy as np
from matplotlib.artist import Artist
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

# The colors of Okabe and Ito, which people with any kind of color vision can tell apart.
BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, RED, PINK = (
    "#000000",
    "#E69F00",
    "#56B4E9",
    "#009E73",
    "#F0E442",
    "#0072B2",
    "#D55E00",
    "#CC79A7",
)

# Color, line style and marker for each precision: the same in every figure of the course.
LOOKS = {
    "fp32": (BLACK, "-", "o"),
    "tf32": (PINK, (0, (1, 1)), "v"),
    "fp16 (no scaling)": (RED, ":", "x"),
    "fp16 + GradScaler": (BLUE, "--", "s"),
    "bf16": (GREEN, "-.", "D"),
    "pure fp16": (ORANGE, (0, (1, 2)), "P"),
    "pure bf16": (SKY, (0, (5, 1, 1, 1, 1, 1)), "^"),
}
SPARE_LOOKS = [(BLUE, "-", "o"), (RED, "--", "s"), (GREEN, "-.", "D"), (ORANGE, ":", "^")]


def look(name: str, index: int = 0) -> dict:
    """Line properties for a series: its precision's own look, else the spare one at `index`."""
    color, style, marker = LOOKS.get(name, SPARE_LOOKS[index % len(SPARE_LOOKS)])
    return {"color": color, "linestyle": style, "marker": marker}


def new_figure(width: float = 8.0, height: float = 4.0, **subplots):
    """A figure of `width` x `height` inches in the course's style, and its axes.

    Keyword arguments go to `Figure.subplots`.
    """
    figure = Figure(figsize=(width, height), dpi=100, layout="constrained", facecolor="white")
    axes = figure.subplots(**subplots)
    for ax in axes.flat if hasattr(axes, "flat") else [axes]:
        ax.tick_params(labelsize=11)
        ax.xaxis.label.set_size(12)
        ax.yaxis.label.set_size(12)
        ax.title.set_size(13)
        ax.spines[["top", "right"]].set_visible(False)
    return figure, axes


class Canvas:
    """A figure shown as a PNG, with `alt` as its text alternative.

    `alt` must be the same whatever the data: it is what a stored notebook is compared by. Artists in
    `moving` are redrawn each time; all else only after `invalidate()`, which a change of limits, ticks
    or text calls for.
    """

    def __init__(self, figure: Figure, alt: str, moving: Iterable[Artist] = ()):
        self.figure = figure
        self.alt = alt
        self.moving = []
        self._agg = FigureCanvasAgg(figure)
        self._background = None
        for artist in moving:
            self.add_moving(artist)

    def add_moving(self, artist: Artist) -> None:
        """Redraw `artist` each time from now on."""
        artist.set_animated(True)
        self.moving.append(artist)
        self.invalidate()

    def invalidate(self) -> None:
        """Draw everything anew next time."""
        self._background = None

    def png(self) -> bytes:
        """Draw the figure as it is now."""
        if self._background is None:
            self._agg.draw()
            self._background = self._agg.copy_from_bbox(self.figure.bbox)
        else:
            self._agg.restore_region(self._background)
        for artist in self.moving:
            self.figure.draw_artist(artist)
        return encode_png(np.asarray(self._agg.buffer_rgba())[..., :3])

    def __repr__(self):
        return self.alt

    def _repr_mimebundle_(self, include=None, exclude=None):
        return {"text/plain": self.alt, "image/png": self.png()}, {"image/png": {"alt": self.alt}}


def encode_png(pixels: np.ndarray) -> bytes:
    """Encode `pixels`, uint8 of shape (height, width, 3), as a PNG without row filters.

    Image libraries try five filters on each row to make the file smaller. A figure of flat colors
    does not get smaller by them, and leaving them out halves the time of a redraw.

    Source: Portable Network Graphics (PNG) Specification, W3C, second edition, 2003.
    """
    height, width, _ = pixels.shape
    rows = np.zeros((height, 1 + 3 * width), np.uint8)  # each row begins with its filter: 0, none
    rows[:, 1:] = pixels.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits a channel, RGB

    def chunk(kind: bytes, data: bytes) -> bytes:
        checksum = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", checksum)

    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(rows.tobytes(), 1))
        + chunk(b"IEND", b"")
    )
