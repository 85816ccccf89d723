"""FormatExplorer: what a learner can do to it, and what it then shows."""

import html
import math
import re

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import amp_lab as lab
from amp_lab.explorers.format_explorer import FORMATS, read_number

DTYPES = {
    "FP32": np.float32,
    "BF16": ml_dtypes.bfloat16,
    "FP16": np.float16,
    "E4M3": ml_dtypes.float8_e4m3fn,
    "E5M2": ml_dtypes.float8_e5m2,
}


@pytest.fixture
def panel():
    return lab.FormatExplorer()


def bits(panel):
    """The bits as the buttons show them: by their state, and by their text."""
    by_state = "".join(str(int(button.value)) for button in panel.bits)
    assert by_state == "".join(button.description for button in panel.bits)
    return by_state


def state(panel):
    """All that a learner sees, but for the message and the text of the number's box."""
    shown = [panel.readout.value, panel.table.value, panel.picture.value, panel.format.value]
    return shown + [bits(panel), str(panel.explanations)]


def cells(panel):
    """The table as rows of words."""
    rows = re.findall(r"<tr.*?>(.*?)</tr>", panel.table.value)
    return [re.findall(r"<t[hd].*?>(.*?)</t[hd]>", row) for row in rows]


def test_begins_with_one_tenth_in_fp16(panel):
    assert (panel.number.value, panel.format.value) == ("0.1", "FP16")
    assert bits(panel) == f"{np.float16(0.1).view(np.uint16):016b}"
    assert repr(float(np.float16(0.1))) in panel.readout.value
    assert "-2.44e-05" in panel.readout.value and "6.1e-05" in panel.readout.value


@pytest.mark.parametrize(
    "text",
    ["0.1", "1e-8", "inf", "-inf", "nan", "-0", "65519.99", "65520", "448", "1e300", "-3e-5"],
)
def test_a_number_is_shown_in_every_format(panel, text):
    panel.number.value = text
    x = float(text)
    assert panel.number.value == text
    rows = {row[0].removeprefix("▶ "): row[1:] for row in cells(panel)[1:]}
    assert list(rows) == list(FORMATS) == ["FP32", "TF32", "BF16", "FP16", "E4M3", "E5M2"]
    for name, dtype in DTYPES.items():
        with np.errstate(all="ignore"):
            expected = float(np.array(x).astype(dtype))
        kind, value, error, _, spacing, code = rows[name]
        assert value == repr(expected)
        assert kind == panel.explanations[name].kind or "flow)" in kind
        assert error == f"{0.0 if expected == x else expected - x:.3g}"
        assert spacing == f"{FORMATS[name].spacing(expected):.3g}"
        assert FORMATS[name].decode(int(code, 16)) == expected or math.isnan(expected)
    assert (
        float(rows["TF32"][1]) == FORMATS["TF32"].decode(int(rows["TF32"][5], 16)) or text == "nan"
    )


@pytest.mark.parametrize(
    ("text", "name", "kind"),
    [
        ("1e-8", "FP16", "zero (underflow)"),
        ("1e-8", "BF16", "normal"),
        ("1e-7", "FP16", "subnormal"),
        ("-0", "FP16", "zero"),
        ("70000", "FP16", "infinity (overflow)"),
        ("inf", "FP16", "infinity"),
        ("1000", "E4M3", "NaN (overflow)"),
        ("nan", "E4M3", "NaN"),
    ],
)
def test_kinds_say_what_happened(panel, text, name, kind):
    panel.number.value = text
    assert [row[1] for row in cells(panel) if row[0].endswith(name)] == [kind]


def test_every_bit_can_be_flipped_in_every_format(panel):
    for name, f in FORMATS.items():
        panel.format.value = name
        panel.number.value = "0.1"
        start = f.encode(0.1)
        assert len(panel.bits) == f.bits
        for place in range(f.bits):
            button = panel.bits[place]
            button.value = not button.value
            code = start ^ (1 << (f.bits - 1 - place))
            assert bits(panel) == f"{code:0{f.bits}b}"
            assert panel.explanations[name].bits == code
            value = f.decode(code)
            assert panel.number.value == repr(value)
            assert panel.explanations["FP32"].x == value or math.isnan(value)
            button.value = not button.value
            assert panel.explanations[name].bits == start


def test_buttons_are_grouped_into_sign_exponent_and_mantissa(panel):
    fields = panel.children[2].children
    for name, f in FORMATS.items():
        panel.format.value = name
        labels, rows = zip(*(field.children for field in fields), strict=True)
        assert [label.value.split()[0] for label in labels] == ["sign", "exponent", "mantissa"]
        assert [len(row.children) for row in rows] == [1, f.exponent_bits, f.mantissa_bits]
        assert [b for row in rows for b in row.children] == panel.bits
    assert panel.bits[1].tooltip == "exponent bit worth 16"
    assert panel.bits[-1].tooltip == "mantissa bit worth 1/4"


@pytest.mark.parametrize(
    ("text", "x", "code"),
    [
        ("0x3c00", 1.0, 0x3C00),
        ("0X3C01", 1.0009765625, 0x3C01),
        ("0b1011110000000000", -1.0, 0xBC00),
        ("0x0001", 2.0**-24, 1),
        ("0x8000", -0.0, 0x8000),
        ("0x7e01", math.nan, 0x7E01),
    ],
)
def test_bits_can_be_typed(panel, text, x, code):
    panel.number.value = text
    assert panel.message.value == ""
    assert panel.explanations["FP16"].bits == code == int(bits(panel), 2)
    assert panel.number.value == repr(x)


@pytest.mark.parametrize(
    ("text", "x"),
    [
        ("2**-24", 2.0**-24),
        (" 1/3 ", 1 / 3),
        ("-2**2", -4.0),
        ("(1 + 2) * 0.5 - 1e-3", 1.499),
        ("\N{MINUS SIGN}1.5", -1.5),
        ("1_000", 1000.0),
        ("1e400", math.inf),
        ("+5", 5.0),
    ],
)
def test_calculations_can_be_typed(text, x):
    assert read_number(text, lab.FP16)[0] == x


NONSENSE = [
    ("banana", '"banana" is no number that I can read'),
    ("", "Type a number"),
    ("   ", "Type a number"),
    ("0,1", "is no number that I can read"),
    ("1 2", "is no number that I can read"),
    ("0x", "is no bit pattern"),
    ("0b12", "is no bit pattern"),
    ("0x3c00 + 1", "is no bit pattern"),
    ("0x" + "g" * 500, "is no bit pattern"),
    ("0x10000", "more bits than the 16 of FP16"),
    ("1/0", "divides by zero"),
    ("9**9**9", "too large even for FP64"),
    ("(-1)**0.5", "is no number that I can read"),
    ("1j", "is no number that I can read"),
    ("True", "is no number that I can read"),
    ("__import__('os')", "is no number that I can read"),
    ("panel", "is no number that I can read"),
    ("7 // 2", "is no number that I can read"),
    ("~1", "is no number that I can read"),
    ("[1]", "is no number that I can read"),
    ("(" * 500, "is no number that I can read"),
    ("1+" * 40_000 + "1", "is no number that I can read"),
    ("+".join("1" * 30) + "+" + "1" * 5, "a calculation has at most 60 characters"),
    ("\0", "is no number that I can read"),
    ("<script>alert(1)</script>", "is no number that I can read"),
]


@pytest.mark.parametrize(("text", "words"), NONSENSE, ids=[repr(t[:20]) for t, _ in NONSENSE])
def test_nonsense_changes_nothing_and_says_so(panel, text, words):
    before = state(panel)
    panel.number.value = text
    message = html.unescape(panel.message.value)
    assert words in message
    assert message.endswith("Nothing changed: this is still 0.1.")
    assert len(message) < 250
    assert "<" not in panel.message.value
    assert state(panel) == before
    panel.number.value = "0.25"
    assert panel.message.value == ""
    assert panel.explanations["FP16"].x == 0.25


def test_a_message_repeats_no_more_of_the_number_than_fits(panel):
    panel.number.value = "0." + "3" * 5000
    panel.number.value = "banana"
    assert "this is still 0.3333" in panel.message.value
    assert len(panel.message.value) < 250


def test_after_nonsense_a_flip_writes_the_number_again(panel):
    panel.number.value = "banana"
    panel.bits[0].value = True
    assert panel.number.value == repr(-float(np.float16(0.1)))
    assert panel.message.value == ""
    panel.number.value = "banana"
    panel.format.value = "BF16"
    assert panel.number.value == repr(-float(np.float16(0.1)))


def test_changing_the_format_keeps_the_number_that_was_asked_for(panel):
    for name in ("E5M2", "FP32", "E4M3", "FP16"):
        panel.format.value = name
        assert panel.number.value == "0.1"
        assert bits(panel) == f"{FORMATS[name].encode(0.1):0{FORMATS[name].bits}b}"


def test_the_buttons_go_through_the_format_one_number_at_a_time(panel):
    expected = torch.tensor(0.1).half()
    for _ in range(3):
        panel.higher.click()
        expected = torch.nextafter(expected, torch.tensor(torch.inf).half())
        assert panel.explanations["FP16"].value == expected.item()
    for _ in range(5):
        panel.lower.click()
        expected = torch.nextafter(expected, torch.tensor(-torch.inf).half())
        assert panel.explanations["FP16"].value == expected.item()


@pytest.mark.parametrize(
    ("format", "start", "button", "values"),
    [
        ("FP16", "6e-8", "lower", [0.0, -(2.0**-24), -(2.0**-23)]),
        ("FP16", "-6e-8", "higher", [0.0, 2.0**-24]),
        ("FP16", "65504", "higher", [math.inf, math.inf]),
        ("FP16", "-inf", "lower", [-math.inf]),
        ("FP16", "-inf", "higher", [-65504.0]),
        ("E4M3", "448", "higher", [448.0]),
        ("E4M3", "-448", "lower", [-448.0]),
        ("FP32", "1", "lower", [1 - 2.0**-24]),
    ],
)
def test_the_buttons_at_zero_and_at_the_ends(panel, format, start, button, values):
    panel.format.value = format
    panel.number.value = start
    for value in values:
        getattr(panel, button).click()
        assert panel.explanations[format].value == value


def test_a_nan_has_no_neighbors(panel):
    panel.number.value = "0x7e01"
    before = state(panel)
    panel.higher.click()
    panel.lower.click()
    assert state(panel) == before


def test_one_change_draws_one_picture(panel, monkeypatch):
    drawn = []
    png = panel.canvas.png
    monkeypatch.setattr(panel.canvas, "png", lambda: drawn.append(1) or png())
    for change in (
        lambda: setattr(panel.number, "value", "-inf"),
        lambda: setattr(panel.number, "value", "0x0000"),
        lambda: setattr(panel.bits[3], "value", True),
        lambda: setattr(panel.format, "value", "FP32"),
        panel.higher.click,
    ):
        drawn.clear()
        change()
        assert len(drawn) == 1


def texts(panel):
    return [artist.text for artist in panel.canvas.moving if getattr(artist, "text", "")]


def test_the_picture_names_bits_and_neighbors(panel):
    panel.number.value = "2049"
    assert "2049.0 in FP16:  +1.0 x 2^11 = 2048.0" in texts(panel)
    assert {"0", "11010", "0000000000", "exponent 26 - 15 = 11", "mantissa 0 / 1024"} <= set(
        texts(panel)
    )
    assert {"2047", "2048", "2050", "2049", "← 2 →"} <= set(texts(panel))
    panel.number.value = "65504"
    assert {"65472", "65504", "infinity"} <= set(texts(panel))
    panel.number.value = "nan"
    assert "NaN has no place on the number line" in texts(panel)
    panel.number.value = "2**-24"
    assert {"exponent 0 means -14", "0", "1.1920929e-07"} <= set(texts(panel))
    panel.format.value, panel.number.value = "E4M3", "-460"
    assert {"-448", "-416", "-460", "← 32 →", "too large: NaN"} <= set(texts(panel))
    assert "infinity" not in texts(panel)


def test_the_picture_puts_ticks_where_the_numbers_are(panel):
    panel.number.value = "-2048"  # below it in magnitude the spacing is half
    ticks = [segment[0][0] for segment in panel.canvas._ticks.get_segments()]
    assert ticks == [-4, -3, -2, -1, 0, 0.5, 1, 1.5, 2]
    assert panel.canvas._ties.get_xdata()[:5] == [-3.5, -2.5, -1.5, -0.5, 0.25]
    panel.number.value = "2048.5"
    assert panel.canvas._asked.get_xdata()[0] == 0.25
    panel.number.value = "70000"
    assert len(panel.canvas._stored.get_xdata()) == 0
    assert panel.canvas._beyond.get_x() == 0.5
    panel.number.value = "-70000"
    assert panel.canvas._beyond.get_x() + panel.canvas._beyond.get_width() == -0.5


@given(pattern=st.integers(0, 2**32 - 1), name=st.sampled_from(list(FORMATS)))
def test_any_pattern_of_any_format_can_be_shown(pattern, name):
    panel = test_any_pattern_of_any_format_can_be_shown.panel
    panel.format.value = name
    code = pattern >> (32 - FORMATS[name].bits)
    panel.number.value = hex(code)
    assert panel.message.value == ""
    assert int(bits(panel), 2) == code == panel.explanations[name].bits


test_any_pattern_of_any_format_can_be_shown.panel = lab.FormatExplorer()


def test_static_picture(panel):
    static, metadata = panel._repr_mimebundle_()
    assert static["image/png"].startswith(b"\x89PNG")
    assert static["text/plain"] == repr(panel) == metadata["image/png"]["alt"]
    panel.number.value = "7"
    assert panel._repr_mimebundle_()[0]["text/plain"] == static["text/plain"]
    assert panel._repr_mimebundle_()[0]["image/png"] != static["image/png"]


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="format is 'FP15', expected one of FP32, TF32"):
        lab.FormatExplorer(format="FP15")
    with pytest.raises(ValueError, match="no number that I can read"):
        lab.FormatExplorer("banana")
    assert lab.FormatExplorer(2.5, "BF16").explanations["BF16"].value == 2.5
