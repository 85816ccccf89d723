"""ScaleExplorer: its numbers against PyTorch's casts, its picture against its state."""

import html
import math

import numpy as np
import pytest
import torch
from torch import nn

import amp_lab as lab
from amp_lab.explorers.scale_explorer import FORMATS, POWERS
from amp_lab.zones import zones

DTYPES = {
    "FP16": torch.float16,
    "BF16": torch.bfloat16,
    "E5M2": torch.float8_e5m2,
    "E4M3": torch.float8_e4m3fn,
}


@pytest.fixture(scope="module")
def gradients():
    """All gradients of a real backward pass, as one tensor."""
    torch.manual_seed(0)
    model = lab.WordLM(500, embedding=8, hidden=16)
    words, targets = torch.randint(500, (64, 2)), torch.randint(500, (64,))
    logits = model(words)
    logits.retain_grad()
    nn.functional.cross_entropy(logits, targets).backward()
    tensors = [logits.grad, *(p.grad for p in model.parameters())]
    return torch.cat([t.flatten() for t in tensors])


@pytest.fixture(scope="module")
def explorer(gradients):
    return lab.ScaleExplorer(lab.ExponentHistogram.of(gradients))


@pytest.fixture
def panel(explorer):
    explorer.format.value, explorer.scale.value = "FP16", 0
    return explorer


def by_torch(gradients, name, power):
    """Shares of the nonzero elements, counted after the cast."""
    exact = gradients[gradients != 0].double() * 2.0**power
    f, dtype = FORMATS[name], DTYPES[name]
    x = exact.float()
    rounded = x.to(dtype).float().abs()
    overflow = ~rounded.isfinite() | (x.abs() > f.max + f.spacing(f.max) / 2)
    subnormal = (rounded > 0) & (rounded < torch.finfo(dtype).smallest_normal)
    normal = ~overflow & (rounded >= torch.finfo(dtype).smallest_normal)
    parts = {"flushed to 0": rounded == 0, "subnormal": subnormal, "normal": normal}
    return {
        name: part.double().mean().item() for name, part in (parts | {"overflow": overflow}).items()
    }


def as_text(share):
    if 0 < share < 0.001:
        return "<0.1 %"
    if 0.999 < share < 1:
        return ">99.9 %"
    return f"{100 * share:.3g} %"


@pytest.mark.parametrize("name", list(DTYPES))
@pytest.mark.parametrize("power", [-16, 0, 7, 16, 30, 48])
def test_readout_agrees_with_torch(panel, gradients, name, power):
    panel.format.value = name
    panel.scale.value = power
    expected = by_torch(gradients, name, power)
    said = panel.readout.value
    for zone, share in expected.items():
        assert f"<b>{html.escape(as_text(share))}</b> {zone}" in said, (zone, share, said)
    assert f"2<sup>{power}</sup>" in said and f" in {name}:" in said


def test_readout_writes_scales_as_whole_numbers(panel):
    panel.scale.value = 16
    assert "= 65,536 in FP16" in panel.readout.value
    panel.scale.value = -10
    assert "= 1/1,024 in FP16" in panel.readout.value


@pytest.mark.parametrize("name", list(DTYPES))
def test_best_is_that_of_trying_all_powers(panel, gradients, name):
    panel.format.value = name
    fitting = [p for p in POWERS if by_torch(gradients, name, p + 1)["overflow"] == 0]

    def badness(power):
        shares = by_torch(gradients, name, power)
        return shares["flushed to 0"], shares["subnormal"], abs(power)

    best = min(fitting, key=badness)
    assert panel.readout.value.endswith(f"Best: 2<sup>{best}</sup>.")
    texts = [text.get_text() for text in panel.canvas.figure.axes[1].texts]
    assert texts == [f"best_scale, $2^{{{best}}}$"]


def test_moving_shifts_the_bars_by_exactly_the_power(panel):
    before = np.array(panel._bars.get_data().edges)
    counts = np.array(panel._bars.get_data().values)
    panel.scale.value = 12
    after = panel._bars.get_data()
    np.testing.assert_array_equal(after.edges, before + 12)
    np.testing.assert_array_equal(after.values, counts)
    assert before[0] == panel.histogram.exponents[0]
    assert panel._cursor.get_xdata() == [12, 12]


def test_every_move_makes_a_new_picture_without_drawing_the_rest(panel, monkeypatch):
    seen = {panel.picture.value}

    def forbidden():
        raise AssertionError("the whole figure was drawn anew")

    monkeypatch.setattr(panel.canvas._agg, "draw", forbidden)
    for power in (1, 2, 20, -3):
        panel.scale.value = power
        assert panel.picture.value not in seen
        seen.add(panel.picture.value)
    panel.scale.value = 0
    assert panel.picture.value in seen


def test_a_new_format_gets_its_zones_and_a_new_picture(panel):
    before = panel.picture.value
    panel.scale.value = 5
    panel.format.value = "E4M3"
    assert panel.picture.value != before
    names = [text.get_text() for text in panel.canvas.figure.axes[0].texts]
    assert [n for n in names if "%" not in n] == ["flushed to 0", "subnormal", "normal", "overflow"]
    assert panel._cursor.get_xdata() == [5, 5]
    panel.format.value = "BF16"
    names = [text.get_text() for text in panel.canvas.figure.axes[0].texts]
    assert [n for n in names if "%" not in n] == ["normal"]


def test_zones_meet_where_the_cast_changes_sides():
    for name, dtype in DTYPES.items():
        flushed, subnormal, normal, overflow = zones(FORMATS[name])
        assert (flushed.low, overflow.high) == (-math.inf, math.inf)
        assert flushed.high == subnormal.low and subnormal.high == normal.low
        assert normal.high == overflow.low
        border = torch.tensor([2.0**flushed.high * (1 - 1e-3), 2.0**flushed.high * (1 + 1e-3)])
        assert (border.to(dtype).float() > 0).tolist() == [False, True]
        assert 2.0**normal.low == torch.finfo(dtype).smallest_normal
        below, above = 2.0**overflow.low * (1 - 1e-6), 2.0**overflow.low * (1 + 1e-6)
        f = FORMATS[name]
        assert math.isfinite(f.decode(f.encode(below)))
        assert not math.isfinite(f.decode(f.encode(above)))
    assert 2 ** zones(lab.FP16)[3].low == pytest.approx(65520)


def test_static_picture_and_text(panel):
    data, metadata = panel._repr_mimebundle_()
    assert data["image/png"] == panel.canvas.png()
    assert repr(panel) == data["text/plain"] == panel.canvas.alt
    alt = panel.canvas.alt
    panel.scale.value, panel.format.value = 9, "E5M2"
    assert panel.canvas.alt == alt


def test_errors(gradients):
    histogram = lab.ExponentHistogram.of(gradients)
    with pytest.raises(TypeError, match="expected an ExponentHistogram"):
        lab.ScaleExplorer(gradients)
    with pytest.raises(ValueError, match="no finite and nonzero element"):
        lab.ScaleExplorer(lab.ExponentHistogram.of(torch.zeros(3)))
    with pytest.raises(ValueError, match="expected one of FP16, BF16"):
        lab.ScaleExplorer(histogram, format="FP8")
    with pytest.raises(ValueError, match="expected an integer from -16 to 48"):
        lab.ScaleExplorer(histogram, power=99)


@pytest.mark.parametrize(
    ("size", "best"), [(2.0**-149, 125), (2.0**127, -113), (2.0**-30, 16), (2.0**-60, 46)]
)
def test_a_best_scale_off_the_picture_is_named_and_not_drawn(size, best, recwarn):
    panel = lab.ScaleExplorer(lab.ExponentHistogram.of(torch.tensor([size])))
    assert panel._best_power == best
    lower = panel.canvas.figure.axes[1]
    (label,) = (t for t in lower.texts if "best_scale" in t.get_text())
    assert f"{{{best}}}" in label.get_text()
    outside = best not in POWERS
    assert ("off this picture" in label.get_text()) == outside
    assert POWERS[0] <= label.get_position()[0] <= POWERS[-1]
    assert (len(lower.lines) == len(FORMATS) + 1) == outside  # shares and cursor, no marker
    assert not [w for w in recwarn if "constrained_layout" in str(w.message)]
