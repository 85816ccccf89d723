import base64
import io
import re
import time

import numpy as np
import pytest
from nbconvert import HTMLExporter
from nbformat.v4 import new_code_cell, new_notebook, new_output
from PIL import Image

import amp_lab as lab
from amp_lab import live
from amp_lab.canvas import LOOKS, Canvas, encode_png, look, new_figure


def pixels(png: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(png)))


@pytest.fixture
def screen(monkeypatch):
    """Stands in for the notebook: records what is displayed, as (alt, png)."""
    frames = []

    class Handle:
        def update(self, canvas):
            frames.append((repr(canvas), canvas.png()))

    def display(canvas, display_id):
        frames.append((repr(canvas), canvas.png()))
        return Handle()

    monkeypatch.setattr(live, "display", display)
    return frames


def test_a_blitted_frame_equals_a_full_redraw():
    def canvas():
        figure, ax = new_figure(4, 3)
        (line,) = ax.plot([0, 1], [0, 1], animated=True)
        return Canvas(figure, "a line", [line]), line

    blitted, line = canvas()
    first = pixels(blitted.png())
    line.set_ydata([1, 0])
    second = pixels(blitted.png())
    fresh, line = canvas()
    line.set_ydata([1, 0])
    assert not np.array_equal(first, second)
    assert np.array_equal(second, pixels(fresh.png()))


@pytest.mark.parametrize("shape", [(1, 1, 3), (3, 5, 3), (40, 7, 3)])
def test_pngs_hold_the_pixels(shape):
    expected = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)
    image = Image.open(io.BytesIO(encode_png(expected)))
    image.verify()
    assert np.array_equal(pixels(encode_png(expected)), expected)


def test_what_does_not_move_is_redrawn_after_invalidate():
    figure, ax = new_figure(4, 3)
    canvas = Canvas(figure, "axes")
    first = canvas.png()
    ax.set_title("new")
    assert canvas.png() == first
    canvas.invalidate()
    assert canvas.png() != first


def test_a_canvas_shows_itself_as_a_picture_with_words():
    figure, _ = new_figure(4, 3)
    data, metadata = Canvas(figure, "Empty axes.")._repr_mimebundle_()
    assert data["text/plain"] == "Empty axes." == metadata["image/png"]["alt"]
    assert data["image/png"].startswith(b"\x89PNG")


def test_the_text_becomes_the_alternative_text_of_an_exported_page():
    figure, _ = new_figure(4, 3)
    data, metadata = Canvas(figure, "Empty axes.")._repr_mimebundle_()
    data["image/png"] = base64.b64encode(data["image/png"]).decode()
    output = new_output("display_data", data, metadata=metadata)
    page, _ = HTMLExporter(template_name="classic").from_notebook_node(
        new_notebook(cells=[new_code_cell("canvas", outputs=[output])])
    )
    assert re.search(r'<img[^>]*alt="Empty axes\."', page)


def test_precisions_look_different_in_more_than_color():
    assert len({style for _, style, _ in LOOKS.values()}) == len(LOOKS)
    assert look("bf16")["color"] == LOOKS["bf16"][0]
    assert look("mine", 0) != look("mine", 1)


def test_the_text_is_the_same_in_every_frame(screen):
    with lab.LiveChart("loss", budget=1.0) as chart:
        for x in range(5):
            chart.add("fp32", x, 5.0 - x)
    assert {alt for alt, _ in screen} == {"Live chart: loss by step."}
    assert len(screen) >= 3
    assert len({png for _, png in screen}) >= 3, "the picture follows the data"


def test_the_last_frame_shows_all_points(screen):
    with lab.LiveChart("loss", total=10, budget=1e-9) as chart:
        for x in range(11):
            chart.add("fp32", x, x / 20)
    assert len(screen) == 3, "the empty chart, the first point, the last frame"
    dark = np.argwhere(pixels(screen[-1][1])[60:300, 80:].sum(axis=2) < 60)
    assert np.ptp(dark[:, 1]) > 550, "the line reaches from the left to the right"


def test_a_chart_keeps_to_its_budget(screen):
    start = time.perf_counter()
    with lab.LiveChart("loss", total=100, budget=0.1) as chart:
        for x in range(100):
            time.sleep(0.01)
            chart.add("fp32", x, 1 / (1 + x))
    elapsed = time.perf_counter() - start
    frame = chart.seconds / (len(screen) - 1)
    assert chart.seconds <= 0.1 * elapsed + 3 * frame
    assert len(screen) > 3


def test_axes_make_room(screen):
    chart = lab.LiveChart("loss")
    chart.add("fp32", 1000, -7.0)
    chart.add("fp32", 1001, 3.0)
    (left, right), (low, high) = chart.axes.get_xlim(), chart.axes.get_ylim()
    assert left <= 1000 <= 1001 <= right and low <= -7.0 and high >= 3.0


def test_smoothing_is_an_exponential_moving_average(screen):
    chart = lab.LiveChart("loss", smooth=0.75)
    for x, y in enumerate([4.0, 0.0, 8.0]):
        chart.add("a", x, y)
    assert chart._points("a")[1] == [4.0, 3.0, 0.75 * 3.0 + 0.25 * 8.0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_leave_a_gap(screen, bad):
    with lab.LiveChart("loss", smooth=0.5) as chart:
        for y in (1.0, bad, 2.0):
            chart.add("a", 0, y)
    values = chart._points("a")[1]
    assert values[0] == 1.0 and np.isnan(values[1]) and values[2] == 2.0


@pytest.mark.parametrize(
    "options", [{"smooth": 1.0}, {"smooth": -0.1}, {"budget": 0}, {"budget": 2}]
)
def test_nonsense_is_refused(options):
    with pytest.raises(ValueError, match="expected"):
        lab.LiveChart("loss", **options)
