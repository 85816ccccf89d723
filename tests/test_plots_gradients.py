"""The figures of notebooks 04 and 05 show the numbers that they were given."""

import numpy as np
import pytest
import torch

import amp_lab as lab
from amp_lab.zones import percent


def histogram(*values):
    return lab.ExponentHistogram.of(torch.tensor(values))


@pytest.fixture
def two():
    """Half of the first are lost in FP16, nothing of the second."""
    return {"first": histogram(1e-9, 1e-8, 0.5, 1.0), "second": histogram(1.0, 2.0, 3.0)}


def bars(ax):
    return [patch for patch in ax.patches if hasattr(patch, "get_data")]


def test_exponent_histograms(two):
    canvas = lab.plots.exponent_histograms(two, lab.FP16, "gradients")
    (ax,) = canvas.figure.axes
    texts = [text.get_text() for text in ax.texts]
    assert texts == ["flushed to 0", "subnormal", "normal", "overflow", "50 % lost", "0 % lost"]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["first", "second"]
    first, second = bars(ax)
    np.testing.assert_array_equal(second.get_data().edges, [0, 1, 2])
    heights = second.get_data().baseline - second.get_data().values
    assert heights.argmax() == 1 and heights[0] == pytest.approx(heights[1] / 2)
    assert (first.get_data().edges[0], first.get_data().edges[-1]) == (-30, 1)
    empty = {"none": histogram(0.0)}
    assert lab.plots.exponent_histograms(empty, lab.FP16, "gradients").png()


def test_format_windows(two):
    canvas = lab.plots.format_windows(two["first"], [lab.BF16, lab.FP16], "gradients")
    _, ax = canvas.figure.axes
    spans = [line.get_xdata() for line in ax.lines]
    bf16, fp16 = spans[:2], spans[2:]
    assert list(bf16[1])[0] == -126 and bf16[1][1] == pytest.approx(128, abs=0.01)
    assert list(fp16[0]) == [-25, -14]
    assert fp16[1][1] == pytest.approx(np.log2(65520))
    assert {line.get_solid_capstyle() for line in ax.lines} == {"butt"}  # ends where the range ends


def test_lost_by_divisor(two):
    (ax,) = lab.plots.lost_by_divisor(two, lab.FP16, most=30).figure.axes
    first, second = ax.lines
    for d, share in zip(first.get_xdata(), first.get_ydata(), strict=True):
        exact = torch.tensor([1e-9, 1e-8, 0.5, 1.0]).double() / d
        assert share == 100 * (exact.half() == 0).double().mean().item()
    assert second.get_ydata()[0] == 0 and second.get_ydata()[-1] == 100


def test_scale_history():
    scales = [2.0**16, 2.0**15, 2.0**15, 2.0**16]
    (ax,) = lab.plots.scale_history(scales, [True, False, False, True]).figure.axes
    stairs, crosses = ax.lines
    assert list(stairs.get_ydata()) == [16, 15, 15, 16]
    assert list(zip(crosses.get_xdata(), crosses.get_ydata(), strict=True)) == [(0, 16), (3, 16)]


def test_diagrams_name_every_state():
    def words(canvas):
        return "\n".join(text.get_text() for text in canvas.figure.axes[0].texts)

    steps = words(lab.plots.scale_state_diagram())
    assert all(
        word in steps for word in ("finite", "skip", "scale x 2", "scale x 1/2", "count + 1")
    )
    stages = words(lab.plots.optimizer_stage_diagram())
    assert all(word in stages for word in ("READY", "UNSCALED", "STEPPED", "update", "unscale_"))


@pytest.mark.parametrize(
    ("share", "text"),
    [(0, "0 %"), (1, "100 %"), (0.5, "50 %"), (0.00001, "<0.1 %"), (0.99999, ">99.9 %")]
    + [(0.0532, "5.32 %"), (0.999, "99.9 %"), (0.001, "0.1 %")],
)
def test_percent_rounds_nothing_away(share, text):
    assert percent(share) == text
