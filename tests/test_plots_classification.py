"""The figures of notebook 03 show what the tables say."""

from collections import Counter

import pytest
from matplotlib.colors import to_hex

import amp_lab as lab
from amp_lab.plots import _POLICY_LOOKS


@pytest.fixture(scope="module")
def tables():
    return lab.op_table("cuda"), lab.op_table("cpu")


def test_op_map_has_a_tile_for_each_operation_and_device(tables):
    cuda, cpu = tables
    (ax,) = lab.plots.op_map(cuda, cpu).figure.axes
    tiles = Counter(to_hex(patch.get_facecolor()) for patch in ax.patches if patch.get_fill())
    letters = Counter(text.get_text() for text in ax.texts)
    expected = Counter(op.policy for table in tables for op in table)
    for policy, (letter, color, _) in _POLICY_LOOKS.items():
        assert letters[letter] == expected[policy] + 1  # and one in the legend
        assert tiles[to_hex(color)] == expected[policy] + 1


def test_op_map_frames_the_differences(tables):
    cuda, cpu = tables
    differ = [op.name for op in cuda if op.policy is not cpu[op.name].policy]
    for left, right, count in ((cuda, cpu, len(differ)), (cuda, cuda, 0)):
        (ax,) = lab.plots.op_map(left, right).figure.axes
        assert len([p for p in ax.patches if not p.get_fill()]) == count + 1
    assert len(differ) > 30


def test_op_map_puts_cuda_above_cpu(tables):
    cuda, cpu = tables
    (ax,) = lab.plots.op_map(cuda, cpu).figure.axes
    places = {
        t.get_text(): t.get_position()[1] for t in ax.texts if t.get_text() in ("CUDA", "CPU")
    }
    assert places["CUDA"] > places["CPU"]
    banned = [t.get_position() for t in ax.texts if t.get_text() == "X"]
    group = next(t for t in ax.texts if t.get_text() == "losses").get_position()[1]
    assert sum(0 < y - group < 0.3 for _, y in banned) == 1  # in the upper row of its group


def test_every_policy_has_its_own_letter_and_color():
    assert set(_POLICY_LOOKS) == set(lab.Policy)
    assert len({look[0] for look in _POLICY_LOOKS.values()}) == len(lab.Policy)
    assert len({look[1] for look in _POLICY_LOOKS.values()}) == len(lab.Policy)


def test_both_have_a_text_and_a_picture(tables):
    for canvas in (lab.plots.op_map(*tables), lab.plots.autocast_path()):
        assert canvas.png().startswith(b"\x89PNG")
        assert repr(canvas).endswith(".")
