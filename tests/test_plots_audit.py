"""The figures of notebook 08 show the numbers that they are given."""

import pytest
import torch
from torch import nn

import amp_lab as lab


def test_kept_for_backward_shows_each_audits_ratio_and_weight_copies():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    reports = {f"batch {n}": lab.audit(model, torch.randn(n, 64)) for n in (2, 4096)}
    canvas = lab.plots.kept_for_backward(reports)
    (ax,) = canvas.figure.axes
    bars = {(round(bar.get_y() + 0.3), bool(bar.get_hatch())): bar for bar in ax.patches}
    for row, report in enumerate(reports.values()):
        without, with_autocast = report.saved_bytes
        activations, copies = bars[row, False].get_width(), bars[row, True].get_width()
        assert activations + copies == pytest.approx(with_autocast / without)
        assert copies == pytest.approx(report.weight_copy_bytes / without)
        assert bars[row, True].get_x() == pytest.approx(activations)
    # Kept: the input, the ReLU's result, and with autocast the 16-bit copy of one weight.
    without, with_autocast = 2 * 64 * 4, 2 * 64 * 2
    ratio = [(n * with_autocast + 64 * 64 * 2) / (n * without) for n in (2, 4096)]
    assert [text.get_text() for text in ax.texts] == [f"{r:.2f}x" for r in ratio]
    assert max(bar.get_x() + bar.get_width() for bar in ax.patches) < ax.get_xlim()[1]
    assert "dry run" in canvas.alt and "batch 4096" in canvas.alt


def test_kept_by_batch_shows_each_ratio():
    ratios = {"one": {1: 2.5, 8: 0.75}, "two": {1: 6.0, 8: 0.5}}
    canvas = lab.plots.kept_by_batch(ratios)
    (ax,) = canvas.figure.axes
    shown = {line.get_label(): line for line in ax.lines}
    for name, points in ratios.items():
        assert dict(zip(*shown[name].get_data(), strict=True)) == points
    assert ax.get_ylim()[1] > 6 and 4 in ax.get_yticks()
    assert "dry run" in canvas.alt
