"""The figures of notebooks 02 and 07 show the numbers that they are given."""

import math

import pytest

import amp_lab as lab
from amp_lab.roofline import gpus

plots = lab.plots


def axes(canvas):
    (ax,) = canvas.figure.axes
    assert canvas.png().startswith(b"\x89PNG") and canvas.alt.endswith(".")
    return ax


def lines(ax):
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in ax.lines}


def texts(ax):
    return [text.get_text() for text in ax.texts]


def bars(ax):
    return [bar.get_width() for bar in ax.patches]


def test_running_sums():
    drawn = lines(axes(plots.running_sums({"fp32": [1.0, 2.0], "pure fp16": [1.0, 1.0]}, [1, 2])))
    assert drawn["exact"][1] == [1, 2] and drawn["pure fp16"][1] == [1.0, 1.0]


def test_dot_product_error():
    ax = axes(plots.dot_product_error([16, 32], {"fp32": [1e-7, 2e-7]}))
    assert lines(ax) == {"fp32": ([16, 32], [1e-7, 2e-7])} and ax.get_yscale() == "log"


def test_throughput_draws_one_line_a_dtype_in_order_of_size():
    rows = [
        {"n": 512, "dtype": "fp32", "tflops": 2.0},
        {"n": 256, "dtype": "fp32", "tflops": 1.0},
        {"n": 256, "dtype": "bf16", "tflops": 3.0},
    ]
    expected = {"FP32": ([256, 512], [1.0, 2.0]), "BF16": ([256], [3.0])}
    assert lines(axes(plots.throughput(rows))) == expected


def test_gpu_peaks_leaves_out_what_a_gpu_has_not():
    table = gpus()
    ax = axes(plots.gpu_peaks([table["V100"], table["A100"]]))
    heights = sorted(bar.get_height() for bar in ax.patches)
    assert heights == pytest.approx([15.7, 19.5, 125, 156, 312])
    assert sorted(texts(ax)) == sorted(["15.7", "19.5", "125", "156", "312"])


def test_roofline_puts_operations_under_the_roof():
    gpu = gpus()["A100"]
    operations = {"low": 1.0, "high": 1000.0}
    ax = axes(plots.roofline(gpu, operations))
    diamonds = [line for line in ax.lines if line.get_marker() == "D"]
    assert [line.get_xdata()[0] for line in diamonds] == [1.0, 1000.0]
    assert [line.get_ydata()[0] for line in diamonds] == pytest.approx([2.039, 312])
    ridges = [line.get_xdata()[0] for line in ax.lines if line.get_marker() == "o"]
    assert ridges == pytest.approx([19.5 / 2.039, 312 / 2.039])


def test_tile_efficiency():
    (line,) = axes(plots.tile_efficiency(128, [128, 129, 256])).lines
    assert list(line.get_ydata()) == pytest.approx([100, 100 * (129 / 256) ** 2, 100])


def test_memory_bars_add_up():
    parts = {"FP32": {"weights": 2**20, "rest": 2**21}, "AMP": {"weights": 2**20, "rest": 2**20}}
    ax = axes(plots.memory_bars(parts))
    assert bars(ax) == [1, 2, 1, 1] and texts(ax) == ["3.0 MiB", "2.0 MiB"]
    assert [bar.get_x() for bar in ax.patches] == [0, 1, 0, 1]


def test_speedup_grid_says_who_wins_in_words():
    ax = axes(plots.speedup_grid({(32, 4): 0.5, (32, 8): 1.0, (64, 4): 1.04, (64, 8): 2.0}))
    assert texts(ax) == ["0.50x loses", "1.00x even", "1.04x even", "2.00x wins"]
    assert ax.images[0].get_array()[1, 1] == math.log2(2.0)


def test_where_time_goes_stacks():
    ax = axes(plots.where_time_goes({"FP32": {"a": 3.0, "b": 1.0}, "AMP": {"a": 1.0, "b": 1.5}}))
    assert bars(ax) == [3, 1, 1, 1.5]


def test_speedups_marks_ones_own():
    ax = axes(plots.speedups({"theirs": 3.0, "mine, here": 0.5}))
    assert bars(ax) == [3.0, 0.5] and texts(ax) == ["3.00x", "0.50x"]
    assert [bar.get_hatch() for bar in ax.patches] == ["", "//"]
