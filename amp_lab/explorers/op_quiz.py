"""Guess what autocast does with an operation, then see it asked."""

import random
from collections.abc import Sequence
from functools import cache

import ipywidgets as widgets
import torch
from matplotlib.patches import FancyBboxPatch

from ..canvas import BLUE, GREEN, RED, Canvas, new_figure
from ..policy import Op, OpTable, Policy, op_table
from ..tables import short
from .panel import Panel

DEVICES = {"cuda": "CUDA autocast (dry run)", "cpu": "CPU autocast"}


class OpQuiz(Panel):
    """Shows an operation; the learner says which policy autocast has for it, and learns why.

    `buttons` holds one button a `Policy`, `next` goes to the next operation, and `device` is "cuda",
    asked without a GPU, or "cpu". All of them work from the keyboard, and from a cell:
    `quiz.answer(lab.Policy.FP32)`, `quiz.next.click()`, `quiz.device.value = "cpu"`. Each device
    type is asked in its own default dtype: FP16 under CUDA autocast, BF16 under CPU autocast.

    `op` is the operation in question, a row of `op_table`, and `explanation` says what was seen.
    `score` counts right answers out of `asked`: the first answer to an operation counts, others are
    explained as well.

    `ops` are names from `op_table` in the order to ask them; without it the whole table is asked in
    an order that `seed` shuffles. After the last operation comes the first again. Raises `ValueError`
    for a name that the table lacks, or another device type.
    """

    def __init__(self, ops: Sequence[str] | None = None, device_type: str = "cuda", seed: int = 0):
        if device_type not in DEVICES:
            raise ValueError(f"OpQuiz: device_type is {device_type!r}, expected 'cuda' or 'cpu'")
        self._order = _order(_table(device_type), ops, seed)
        self._place, self._answered = 0, False
        self.score = self.asked = 0

        self.device = widgets.ToggleButtons(
            options=[(label, device) for device, label in DEVICES.items()],
            value=device_type,
            style={"button_width": "200px"},
        )
        self.buttons = {
            policy: widgets.Button(description=str(policy), tooltip=policy.sentence)
            for policy in Policy
        }
        self.next = widgets.Button(description="next operation ▶", button_style="info")
        self.question = widgets.HTML()
        answers = widgets.HBox(
            [*self.buttons.values(), self.next], layout=widgets.Layout(flex_flow="row wrap")
        )
        super().__init__(_ThreeProbes(), [self.device, self.question, answers])
        self.picture.layout = widgets.Layout(width="900px", max_width="100%", object_fit="contain")
        self._ask()

        self.device.observe(lambda change: self._ask(), "value")
        self.next.on_click(lambda button: self._go_on())
        for policy, button in self.buttons.items():
            button.on_click(lambda button, policy=policy: self.answer(policy))

    @property
    def op(self) -> Op:
        """The operation in question: its row in the table of the chosen device type."""
        return _table(self.device.value)[self._order[self._place]]

    def answer(self, policy: Policy) -> None:
        """Answer the question, as the button of `policy` does.

        Raises `TypeError` if `policy` is not a `Policy`.
        """
        if not isinstance(policy, Policy):
            names = ", ".join(f"lab.{p!r}" for p in Policy)
            raise TypeError(f"OpQuiz.answer was given {policy!r}, expected one of {names}")
        if not self._answered:
            self._answered = True
            self.asked += 1
            self.score += policy is self.op.policy
        self._show(policy)

    def _ask(self):
        self._answered = False
        self._show(None)

    def _go_on(self):
        self._place = (self._place + 1) % len(self._order)
        self._ask()

    def _show(self, answer):
        op, device = self.op, DEVICES[self.device.value]
        half = short(_table(self.device.value).dtype)
        self.question.value = (
            f"<b style='font-size:120%'>{op.name}</b> ({op.group}). What does {device} do with it?"
        )
        self.canvas.draw(op, device, half, answer, f"{self.score} of {self.asked} right")
        verdict, facts = _explain(op, device, half, answer)
        self.explanation = f"{verdict} {facts}"
        self.show(f"<b>{verdict}</b> {facts}")


def _table(device_type) -> OpTable:
    return _probed(device_type, torch.get_autocast_dtype(device_type))


_probed = cache(op_table)  # takes seconds, and the answers do not change


def _order(table, ops, seed):
    """The names to ask, in order."""
    if ops is not None:
        known = {op.name for op in table}
        unknown = [name for name in ops if name not in known]
        if unknown or not ops:
            raise ValueError(
                f"OpQuiz: ops holds {', '.join(map(repr, unknown)) or 'nothing'}, expected names of "
                "operations as in lab.op_table()"
            )
        return list(ops)
    names = [op.name for op in table if op.fp32 != "?" and not op.group.startswith("variants")]
    random.Random(seed).shuffle(names)
    return names


def _explain(op, device, half, answer):
    """Whether the answer is right, and what was seen."""
    if answer is None:
        return "Choose an answer.", "The picture shows the three questions that decide it."
    seen = [f"FP32 in, {_out(op.fp32)}", f"{half} in, {_out(op.half)}"]
    if op.mixed not in ("", "?"):
        seen.append(f"mixed in, {_out(op.mixed)}")
    facts = f"{op.policy.sentence} Seen under {device}: {'; '.join(seen)}."
    if op.note and op.policy is not Policy.BANNED:
        facts += f" ({op.note[0].upper()}{op.note[1:]}.)"
    if answer is op.policy:
        return f"✓ Right: {op.policy}.", facts
    expected = {
        Policy.LOWER_PRECISION: f"FP32 in would have given {half}",
        Policy.FP32: f"{half} in would have given FP32",
        Policy.WIDEST: "autocast would have cast mixed inputs up, and nothing else",
        Policy.AS_INPUT: "autocast would have inserted no cast",
        Policy.BANNED: "it would have raised an error",
    }[answer]
    return f"✗ Not {answer}, but {op.policy}.", f"{facts} For “{answer}”, {expected}."


def _out(dtype):
    return "an error" if dtype == "raises" else f"{dtype} out"


ROWS = (1.7, 1.08, 0.45)


class _ThreeProbes(Canvas):
    """What goes in, the operation, what comes out: hidden until there is an answer."""

    def __init__(self):
        figure, ax = new_figure(9, 2.7)
        figure.set_layout_engine("none")
        ax.set(position=(0, 0, 1, 1), xlim=(0, 9), ylim=(0, 2.7))
        ax.set_axis_off()
        ax.text(1.4, 2.1, "goes in", ha="center", fontsize=12, color="0.35")
        ax.text(7.6, 2.1, "comes out", ha="center", fontsize=12, color="0.35")
        arrow = {"arrowstyle": "-|>", "linewidth": 1.8, "color": "0.35", "mutation_scale": 16}
        for y in ROWS:
            ax.annotate("", (3.05, y), (2.35, y), arrowprops=arrow)
            ax.annotate("", (6.65, y), (5.95, y), arrowprops=arrow)
        box = {"boxstyle": "round,pad=0.05", "facecolor": "#EEEEEE", "edgecolor": "0.35"}
        ax.add_patch(FancyBboxPatch((3.15, 0.2), 2.7, 1.75, linewidth=1.5, **box))

        def text(x, y, size, **style):
            return ax.text(x, y, "", fontsize=size, va="center", **style)

        self._title = text(0.15, 2.5, 13, ha="left")
        self._score = text(8.85, 2.5, 12, ha="right")
        self._name = text(4.5, 1.35, 13, ha="center", weight="bold")
        self._verdict = text(4.5, 0.7, 12, ha="center", linespacing=1.5)
        self._inputs = [text(1.4, y, 13, ha="center") for y in ROWS]
        self._outputs = [text(7.6, y, 13, ha="center", weight="bold") for y in ROWS]
        super().__init__(
            figure,
            "An operation, the dtypes that go in and, once answered, those that come out.",
            # The title and two inputs change only with the device type: they are drawn to stay.
            [self._score, self._name, self._verdict, self._inputs[2], *self._outputs],
        )

    def draw(self, op: Op, device: str, half: str, answer: Policy | None, score: str) -> None:
        """Show `op`, and what comes out if there is an `answer`."""
        title = f"{device}, {half}"
        if title != self._title.get_text():
            self._title.set_text(title)
            self.invalidate()
        self._score.set_text(score)
        self._name.set_text(op.name)
        self._name.set_fontsize(min(13, 260 / len(op.name)))
        right = answer is op.policy
        said = "✓ as you said" if right else f"✗ you said: {answer}"
        self._verdict.set_text("?" if answer is None else f"{op.policy}\n{said}")
        self._verdict.set_color("black" if answer is None else GREEN if right else RED)
        goes_in = ["FP32", half, f"FP32 and {half}" if op.mixed else "(one float input)"]
        comes_out = [op.fp32, op.half, op.mixed or "—"]
        for label, words in zip(self._inputs, goes_in, strict=True):
            label.set_text(words)
        for label, words in zip(self._outputs, comes_out, strict=True):
            known = answer is not None and words != "?"
            label.set_text(words if known else "?")
            label.set_color({half: BLUE, "raises": RED}.get(words, "black") if known else "0.35")
