"""A chart that follows a running loop."""

import math
import time

from IPython.display import display

from .canvas import Canvas, look, new_figure


class LiveChart:
    """A line chart that grows while a loop runs, and takes at most `budget` of the loop's time.

        with lab.LiveChart("training loss") as chart:
            for step in lab.train(model, batches, recipe):
                chart.add("fp32", step.index, step.loss)

    `total` fixes the right end of the x-axis, if it is known. `smooth` between 0 and 1 draws an
    exponential moving average: the share of the previous value that stays. Values that are not finite
    leave a gap. A frame is drawn only when all frames together, the first not counted, have taken less
    than `budget` of the time since the chart was shown; leaving the `with` block draws the last frame.
    """

    def __init__(
        self,
        ylabel: str,
        xlabel: str = "step",
        total: float | None = None,
        smooth: float = 0.0,
        budget: float = 0.02,
        title: str = "",
    ):
        if not 0 <= smooth < 1:
            raise ValueError(f"LiveChart: smooth is {smooth}, expected 0 (none) up to, not with, 1")
        if not 0 < budget <= 1:
            raise ValueError(f"LiveChart: budget is {budget}, expected a share above 0 and up to 1")
        figure, self.axes = new_figure(8, 3.8)
        self.axes.set(xlabel=xlabel, ylabel=ylabel, title=title, xlim=(0, total or 10), ylim=(0, 1))
        self.axes.grid(alpha=0.3)
        self.canvas = Canvas(figure, f"Live chart: {ylabel} by {xlabel}.")
        self.smooth = smooth
        self.budget = budget
        self.seconds = 0.0
        self._total = total
        self._lines = {}
        self._handle = None

    def add(self, series: str, x: float, y: float) -> None:
        """Append the point (x, y) to the line named `series`, and redraw if it is time."""
        xs, ys = self._points(series)
        y = float(y) if math.isfinite(y) else math.nan
        if self.smooth and ys and math.isfinite(ys[-1]):
            y = self.smooth * ys[-1] + (1 - self.smooth) * y
        xs.append(float(x))
        ys.append(y)
        self._make_room(xs[-1], y)
        if self._handle is not None:
            elapsed = time.perf_counter() - self._shown
            if self.seconds < self.budget * elapsed:
                self.redraw()

    def show(self) -> "LiveChart":
        """Put the chart below the running cell."""
        self._handle = display(self.canvas, display_id=True)
        self._shown = time.perf_counter()
        return self

    def redraw(self) -> None:
        """Draw a frame now."""
        start = time.perf_counter()
        for line, xs, ys in self._lines.values():
            line.set_data(xs, ys)
        if self._handle is not None:
            self._handle.update(self.canvas)
        self.seconds += time.perf_counter() - start

    def __enter__(self):
        return self.show()

    def __exit__(self, *exception):
        self.redraw()

    def _points(self, series):
        if series not in self._lines:
            style = look(series, len(self._lines)) | {"marker": ""}
            (line,) = self.axes.plot([], [], label=series, linewidth=2, **style)
            self._lines[series] = line, [], []
            self.axes.legend(fontsize=11, loc="upper right", frameon=False)
            self.canvas.add_moving(line)
        _, xs, ys = self._lines[series]
        return xs, ys

    def _make_room(self, x, y):
        left, right = self.axes.get_xlim()
        if x > right:
            self.axes.set_xlim(left, 1.5 * x)
            self.canvas.invalidate()
        if math.isnan(y):
            return
        low, high = self.axes.get_ylim()
        if not low <= y <= high:
            self.axes.set_ylim(min(low, 1.1 * y), max(high, 1.1 * y))
            self.canvas.invalidate()
