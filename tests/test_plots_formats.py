"""The figures of notebook 01 show what is true of the formats."""

import math

import ml_dtypes
import numpy as np
import pytest

import amp_lab as lab

FORMATS = [lab.FP32, lab.TF32, lab.BF16, lab.FP16, lab.E4M3, lab.E5M2]


def axes(canvas):
    (ax,) = canvas.figure.axes
    return ax


def texts(canvas):
    return [text.get_text() for text in axes(canvas).texts]


def test_bit_fields_draws_a_box_for_each_bit():
    canvas = lab.plots.bit_fields(FORMATS)
    assert len(axes(canvas).patches) == 32 + 19 + 16 + 16 + 8 + 8
    letters = [text for text in texts(canvas) if len(text) == 1]
    assert "".join(letters[:32]) == "s" + "e" * 8 + "m" * 23
    assert letters.count("s") == 6
    assert "1 + 5 + 10 = 16" in texts(canvas)


def test_number_line_marks_every_number():
    canvas = lab.plots.number_line(lab.E5M2, 2)
    values = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e5m2).astype(float)
    values = values[(values > 0) & (values <= 2)]
    smallest = float(ml_dtypes.finfo(ml_dtypes.float8_e5m2).smallest_normal)
    bars = [bar.get_segments()[0][0][0] for bar in axes(canvas).collections]
    dots = [line.get_xdata()[0] for line in axes(canvas).lines[1:]]
    assert bars == values[values >= smallest].tolist()
    assert dots == [0.0, *values[values < smallest]]
    tall = [
        bar.get_segments()[0][0][0] for bar in axes(canvas).collections if bar.get_linewidth() > 2
    ]
    assert all(math.log2(x).is_integer() for x in tall)
    assert {0.25, 0.5, 1.0, 2.0} <= set(tall)


def test_format_ranges_begin_and_end_where_the_formats_do():
    canvas = lab.plots.format_ranges(FORMATS)
    normal, subnormal = axes(canvas).patches[::2], axes(canvas).patches[1::2]
    dtypes = [np.float32, None, ml_dtypes.bfloat16, np.float16]
    dtypes += [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]
    for dtype, bar, hatched in zip(dtypes, normal, subnormal, strict=True):
        if dtype is None:
            continue
        info = ml_dtypes.finfo(dtype)
        assert 10 ** bar.get_x() == pytest.approx(float(info.smallest_normal))
        assert bar.get_x() + bar.get_width() == pytest.approx(math.log10(float(info.max)))
        assert hatched.get_x() == pytest.approx(math.log10(float(info.smallest_subnormal)))
        assert hatched.get_x() + hatched.get_width() == pytest.approx(bar.get_x())
        assert hatched.get_hatch() and not bar.get_hatch()
    assert {"65504", "448", "6.0e-08", "1.4e-45"} <= set(texts(canvas))


def test_format_spacing_agrees_with_numpy():
    canvas = lab.plots.format_spacing([lab.FP32, lab.FP16])
    fp32, fp16, cross = axes(canvas).lines
    for line, dtype in ((fp32, np.float32), (fp16, np.float16)):
        x = np.asarray(line.get_xdata())
        expected = np.spacing(x.astype(dtype)).astype(float)
        held = x.astype(dtype) == x  # below 2^-24 FP16 holds no power of two but 0
        assert (np.asarray(line.get_ydata())[held] == expected[held]).all()
        assert held.sum() > 35
    assert cross.get_xdata()[0] == 65504
    assert fp32.get_linestyle() != fp16.get_linestyle()
    assert max(fp16.get_xdata()) == 2**15


def test_weights_draws_each_history():
    canvas = lab.plots.weights({"fp32": [1.0, 0.5], "pure bf16": [1.0, 1.0]})
    assert [list(line.get_ydata()) for line in axes(canvas).lines] == [[1.0, 0.5], [1.0, 1.0]]
    legend = [text.get_text() for text in axes(canvas).get_legend().get_texts()]
    assert legend == ["fp32", "pure bf16"]


def test_all_have_a_text_and_a_picture():
    for canvas in (
        lab.plots.bit_fields(FORMATS),
        lab.plots.number_line(lab.E4M3, 1),
        lab.plots.format_ranges(FORMATS),
        lab.plots.format_spacing(FORMATS),
        lab.plots.weights({"fp32": [1.0, 0.5]}),
    ):
        assert canvas.png().startswith(b"\x89PNG")
        assert repr(canvas).endswith(".") and "0x" not in repr(canvas)
