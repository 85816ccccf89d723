"""Exercises of notebook 05, loss scaling: a scaler in four steps, each against `GradScaler`."""

import math
import random

import torch
from torch.amp import GradScaler

from ..formats import E5M2, FP16
from ..gradients import ExponentHistogram
from .exercise import Hint, exercise

__all__ = [
    "found_inf",
    "loss_scaler",
    "predicted_scales",
    "scale_and_unscale",
    "scaler_step",
    "scaler_update",
    "static_scale",
]

INF, NAN = math.inf, math.nan


class _Scaler:
    """Steps 1 to 3, done. A check puts the learner's method in place of one of these, or adds it."""

    def __init__(self, device="cpu", init_scale=2.0**16, growth_interval=2000):
        self._scale = init_scale
        self._growth_interval = growth_interval
        self._growth_tracker = 0
        self._found_inf = False

    def get_scale(self):
        return self._scale

    def scale(self, loss):
        return loss * self._scale

    def unscale_(self, optimizer):
        for p in _parameters(optimizer):
            if p.grad is not None:
                p.grad /= self._scale

    def found_inf(self, optimizer):
        gradients = [p.grad for p in _parameters(optimizer) if p.grad is not None]
        return not all(g.isfinite().all() for g in gradients)

    def step(self, optimizer):
        self.unscale_(optimizer)
        if self.found_inf(optimizer):
            self._found_inf = True
        else:
            optimizer.step()


def _parameters(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


class _Side:
    """A scaler with parameters of its own: one optimizer for each, SGD with learning rate 1."""

    def __init__(self, scaler, optimizers=1):
        self.scaler = scaler
        self.weights = [torch.zeros(2, requires_grad=True) for _ in range(optimizers)]
        self.optimizers = [torch.optim.SGD([w], lr=1.0) for w in self.weights]
        self.steps = [0] * optimizers
        for i, optimizer in enumerate(self.optimizers):
            optimizer.register_step_post_hook(lambda *_, i=i: self._count(i))

    def _count(self, i):
        self.steps[i] += 1

    def backward(self, coefficients):
        """Without scaling, each weight's gradient would be its coefficient, and 1."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        pairs = zip(self.weights, coefficients, strict=True)
        loss = sum((w * torch.tensor([c, 0.0 if c == 0 else 1.0])).sum() for w, c in pairs)
        self.scaler.scale(loss).backward()

    def iteration(self, coefficients):
        self.backward(coefficients)
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()


# ---- step 1: multiply the loss, divide the gradients ---------------------------------------------


@exercise
def scale_and_unscale(attempt):
    """Check the class of step 1: `scale(loss)` and `unscale_(optimizer)`, with `_scale` given."""
    ours, theirs = attempt("cpu", init_scale=8.0), GradScaler("cpu", init_scale=8.0)
    loss = torch.tensor(3.0, requires_grad=True)
    scaled, right = ours.scale(loss), theirs.scale(loss).item()
    if not isinstance(scaled, torch.Tensor):
        raise Hint(
            f"scale(loss) returned {type(scaled).__name__}; return the scaled loss, a tensor."
        )
    if scaled.item() == 3 / 8:
        raise Hint("scale(loss) divides. Small gradients shall become larger: multiply the loss.")
    if scaled.item() == 3:
        raise Hint("scale(loss) returned the loss as it was: multiply it by self._scale.")
    if scaled.item() == 3 * 2.0**16:
        raise Hint("scale(loss) multiplied by 65536 though init_scale was 8: use self._scale.")
    if scaled.item() != right:
        raise Hint(f"with a scale of 8, a loss of 3 becomes {scaled.item():g}, expected {right:g}.")
    if not scaled.requires_grad:
        raise Hint(
            "the scaled loss has lost its graph, so backward() cannot start from it. Multiply the "
            "tensor itself: no .item(), no torch.tensor(...), no no_grad."
        )

    a, b, frozen = (torch.ones(2, requires_grad=True) for _ in range(3))
    optimizer = torch.optim.SGD([{"params": [a, frozen]}, {"params": [b]}], lr=0.1)
    ours.scale((a * 5).sum() + (b * 7).sum()).backward()
    try:
        ours.unscale_(optimizer)
    except (AttributeError, TypeError) as error:
        if "None" in str(error):
            raise Hint(
                "one parameter had no gradient: its p.grad is None. Leave such parameters out."
            ) from None
        raise
    gradients = [p.grad[0].item() for p in (a, b)]
    if a[0].item() != 1:
        raise Hint("unscale_ changed a parameter. Divide p.grad, not p.")
    if gradients == [40.0, 56.0]:
        raise Hint("unscale_ left the gradients as they were: divide them in place, p.grad /= ...")
    if gradients == [320.0, 448.0]:
        raise Hint("unscale_ multiplies. The gradients are 8 times too large: divide.")
    if gradients == [5.0, 56.0]:
        raise Hint(
            "the second parameter group is still scaled: go through all of optimizer.param_groups."
        )
    if gradients != [5.0, 7.0]:
        raise Hint(f"gradients of 5 and 7 came back as {gradients[0]:g} and {gradients[1]:g}.")
    if ours._scale != 8.0:
        raise Hint("the scale itself has changed: only update() may do that.")
    return "times the scale on the way in, divided by it on the way out."


# ---- step 2: find inf and NaN --------------------------------------------------------------------


@exercise
def found_inf(attempt):
    """Check `found_inf(self, optimizer)`: is any gradient element inf or NaN?"""
    one, huge = [1.0, -1.0], 3e38
    cases = [
        ("finite gradients", [one, one], False, "they are not an overflow."),
        ("inf in the first gradient", [[1.0, INF], one], True, "you did not see it."),
        ("-inf", [[1.0, -INF], one], True, "minus infinity is an overflow, too."),
        ("NaN", [[NAN, 1.0], one], True, "NaN is not inf, but as bad. torch.isfinite knows both."),
        ("inf in the second gradient", [one, [INF, 1.0]], True, "look at every gradient."),
        ("gradients of zero", [[0.0, 0.0], one], False, "zero is finite: nothing overflowed."),
        (
            "two finite gradients of 3e38",
            [[huge, huge], one],
            False,
            "each is finite, only their sum is not. Ask each element.",
        ),
        ("no gradient (None)", [None, one], False, "leave such parameters out."),
        ("no gradient (None), then inf", [None, [INF, 1.0]], True, "do not stop at the None."),
    ]
    for name, rows, right, hint in cases:
        weights = [torch.ones(2, requires_grad=True) for _ in rows]
        groups = [{"params": [w]} for w in weights]
        for w, row in zip(weights, rows, strict=True):
            w.grad = None if row is None else torch.tensor(row)
        optimizer = torch.optim.SGD(groups, lr=0.1)
        try:
            answer = attempt(_Scaler(), optimizer)
        except (AttributeError, TypeError) as error:
            if None in rows and "None" in str(error):
                raise Hint(f"{name}: {hint}") from None
            raise
        if answer is None or (isinstance(answer, torch.Tensor) and answer.numel() != 1):
            raise Hint(f"{name}: return True or False; you returned {type(answer).__name__}.")
        if bool(answer) is not right:
            raise Hint(f"{name}: expected {right}; {hint}")
    return "inf, -inf and NaN, in any gradient of any group."


# ---- step 3: a step that skips -------------------------------------------------------------------


def _with(**methods):
    """The reference scaler with some methods replaced, made ready for FP32 gradients on the CPU."""
    return type("Scaler", (_Scaler,), methods)("cpu", init_scale=1024.0, growth_interval=3)


@exercise
def scaler_step(attempt):
    """Check `step(self, optimizer)`: unscale, then step, or note the overflow and skip."""
    theirs = _Side(GradScaler("cpu", init_scale=1024.0, growth_interval=3))
    ours = _Side(_with(step=attempt))
    for side in (theirs, ours):
        side.backward([0.5])
        side.scaler.step(side.optimizers[0])
    if ours.steps == [0]:
        raise Hint("the gradients were finite, but optimizer.step() was not called.")
    if ours.steps[0] > 1:
        raise Hint(f"optimizer.step() was called {ours.steps[0]} times for one step.")
    if not torch.equal(ours.weights[0], theirs.weights[0]):
        ratio = (ours.weights[0][0] / theirs.weights[0][0]).item()
        raise Hint(
            "the optimizer stepped with gradients that were still scaled, 1024 times too large: call "
            "self.unscale_(optimizer) first."
            if ratio == 1024
            else f"the step is {ratio:g} times that of GradScaler: is unscale_ called once?"
        )
    if ours.scaler._found_inf:
        raise Hint("self._found_inf is True though all gradients were finite.")

    for bad in (INF, NAN):
        ours = _Side(_with(step=attempt))
        ours.backward([bad])
        ours.scaler.step(ours.optimizers[0])
        if ours.steps[0]:
            raise Hint(
                f"a gradient was {bad}, and the optimizer stepped all the same: the weight is now "
                f"{ours.weights[0][0].item()}. Ask self.found_inf(optimizer) first."
            )
        if not ours.scaler._found_inf:
            raise Hint(
                "the step was skipped, but update() will not know: set self._found_inf to True."
            )
        if ours.scaler._scale != 1024:
            raise Hint("step changed the scale. Leave that to update().")

    ours = _Side(_with(step=attempt), optimizers=2)
    ours.backward([INF, 0.5])
    for optimizer in ours.optimizers:
        ours.scaler.step(optimizer)
    if ours.steps == [0, 0]:
        raise Hint(
            "two optimizers, and only one has an overflow: the other one must step. Decide by "
            "self.found_inf(optimizer), not by what an earlier optimizer left in self._found_inf."
        )
    if not ours.scaler._found_inf:
        raise Hint(
            "two optimizers: the first one overflowed, the second did not, and self._found_inf is "
            "False again. Only ever set it to True; update() resets it."
        )
    return "finite: unscaled and stepped. inf or NaN: skipped and noted, for each optimizer apart."


# ---- step 4: growth and backoff ------------------------------------------------------------------


@exercise
def scaler_update(attempt):
    """Check `update(self)`: back off after an overflow, else count, and grow when the count is full."""

    def after(pattern):
        """Scale, count and flag of the learner's scaler, and of GradScaler, after a pattern."""
        ours = _Side(_with(update=attempt))
        theirs = _Side(GradScaler("cpu", init_scale=1024.0, growth_interval=3))
        for letter in pattern:
            for side in (ours, theirs):
                side.iteration([INF if letter == "x" else 0.5])
        state = theirs.scaler.state_dict()
        mine = ours.scaler
        return mine._scale, state["scale"], mine._growth_tracker, state["_growth_tracker"], mine

    scale, right, count, right_count, mine = after("g")
    if scale == 2048:
        raise Hint("the scale grew after a single good step: count to self._growth_interval first.")
    if scale != right:
        raise Hint(f"one good step: the scale is {scale:g}, expected {right:g}, as before.")
    if count != right_count:
        raise Hint(
            f"one good step: self._growth_tracker is {count}, expected 1. Count the good steps."
        )

    scale, right, count, right_count, mine = after("x")
    if scale == 1024:
        raise Hint("an overflow, and the scale is as before: halve it if self._found_inf is True.")
    if scale == 2048:
        raise Hint("an overflow, and the scale doubled: it was too large already. Halve it.")
    if scale != right:
        raise Hint(f"one overflow: the scale is {scale:g}, expected {right:g}.")
    if mine._found_inf:
        raise Hint(
            "self._found_inf is still True after update(), so the next step would back off, too."
        )

    scale, right, count, right_count, mine = after("ggg")
    if scale == 1024:
        raise Hint(
            "three good steps, growth_interval 3, and the scale is still 1024: it grows with the third "
            "one, when the count equals the interval."
        )
    if scale != right:
        raise Hint(f"three good steps: the scale is {scale:g}, expected {right:g}.")
    if count == 3:
        raise Hint("the scale grew, but the count was not set back to 0.")

    scale, right, count, right_count, mine = after("ggxg")
    if scale == 1024:
        raise Hint(
            "two good steps, an overflow, a good step: the scale grew. An overflow must set the count "
            "back to 0: good steps count only in a row."
        )
    if count == 2:
        raise Hint(
            "after an overflow the count goes on from 1, as if the overflow were a good step."
        )

    generator = random.Random(0)
    for _ in range(20):
        pattern = "".join(generator.choices("gggx", k=15))
        scale, right, count, right_count, mine = after(pattern)
        if (scale, count) != (right, right_count):
            raise Hint(
                f"after {pattern} (g good, x overflow) the scale is {scale:g} and the count {count}; "
                f"GradScaler has {right:g} and {right_count}."
            )
    return "20 random patterns of overflows, scale and count as in GradScaler."


# ---- all four together ---------------------------------------------------------------------------


@exercise
def loss_scaler(attempt):
    """Check a whole scaler class against `GradScaler`, with two optimizers, state by state."""
    names = {0.5: "finite", 0.0: "zero", INF: "inf", NAN: "NaN"}
    generator = random.Random(1)
    theirs = _Side(GradScaler("cpu", init_scale=2.0**16, growth_interval=3), optimizers=2)
    ours = _Side(attempt("cpu", init_scale=2.0**16, growth_interval=3), optimizers=2)
    seen = []
    for index in range(60):
        coefficients = generator.choices(list(names), weights=[8, 2, 1, 1], k=2)
        seen.append(" and ".join(names[c] for c in coefficients))
        before = theirs.scaler.get_scale()
        for side in (theirs, ours):
            side.iteration(coefficients)
        where = f"step {index}, gradients {seen[-1]}, scale {before:g}"
        if ours.steps != theirs.steps:
            raise Hint(
                f"{where}: your optimizers have stepped {ours.steps} times so far, those of GradScaler "
                f"{theirs.steps}."
            )
        if ours.scaler._scale != theirs.scaler.get_scale():
            raise Hint(
                f"{where}: your scale is now {ours.scaler._scale:g}, that of GradScaler "
                f"{theirs.scaler.get_scale():g}."
            )
        if not all(map(torch.equal, ours.weights, theirs.weights)):
            raise Hint(f"{where}: the weights differ from those of GradScaler.")
    return "60 steps, two optimizers, inf, NaN and zeros: equal to GradScaler. You built it."


# ---- predict the scale ---------------------------------------------------------------------------

_PATTERNS = ("gggg", "ggxgg", "gzg", "xxgggn")


@exercise
def predicted_scales(attempt):
    """Check `predicted_scales()`: the scale after each of four patterns, starting from 1024."""
    coefficients = {"g": 0.5, "z": 0.0, "x": INF, "n": NAN}
    hints = (
        {
            1024.0: "three good steps in a row: growth_interval is 3.",
            4096.0: "it grows once, and then the count starts again from 0.",
            16384.0: "it does not double at every step, but after three good ones.",
        },
        {
            1024.0: "two good steps after the overflow are one too few to grow again.",
            2048.0: "the overflow halves the scale and sets the count back.",
        },
        {
            1024.0: "gradients of zero are finite. For the scaler that is a good step.",
            512.0: "gradients of zero are finite: no overflow, no backoff.",
        },
        {
            512.0: "NaN counts as an overflow, just as inf does.",
            1024.0: "count again: two overflows, three good steps, then NaN.",
            128.0: "three good steps in a row are in there, too.",
        },
    )
    answers = attempt()
    try:
        answers = [float(x) for x in answers]
    except (TypeError, ValueError):
        raise Hint("return four numbers, as in `return 1024, 1024, 1024, 1024`.") from None
    if len(answers) != len(_PATTERNS):
        raise Hint(f"return four numbers; you returned {len(answers)}.")
    for pattern, answer, known in zip(_PATTERNS, answers, hints, strict=True):
        side = _Side(GradScaler("cpu", init_scale=1024.0, growth_interval=3))
        for letter in pattern:
            side.iteration([coefficients[letter]])
        if answer != side.scaler.get_scale():
            raise Hint(
                f"{pattern}: {known.get(answer, 'go through it step by step: scale and count.')}"
            )
    return "as GradScaler has it, too."


# ---- a static scale ------------------------------------------------------------------------------


def _histogram(low, high):
    """One element at every power of two from 2**low to 2**high."""
    return ExponentHistogram.of(torch.exp2(torch.arange(low, high + 1).double()).float())


@exercise
def static_scale(attempt):
    """Check `static_scale(histogram, format)`: a power of two that loses least, with headroom 2."""
    cases = [
        ("gradients from 2^-30 to 2^-12, FP16", _histogram(-30, -12), FP16),
        ("gradients from 2^-60 to 2^-5, FP16", _histogram(-60, -5), FP16),
        ("gradients from 2^-20 to 2^20, FP16", _histogram(-20, 20), FP16),
        ("gradients from 2^-30 to 2^-12, E5M2", _histogram(-30, -12), E5M2),
    ]
    for name, histogram, f in cases:
        answer = attempt(histogram, f)
        try:
            scale = float(answer)
        except (TypeError, ValueError):
            raise Hint(
                f"{name}: return a number, not something of type {type(answer).__name__}."
            ) from None
        best = histogram.best_scale(f)
        if scale == math.log2(best) and best != 1:
            raise Hint(f"{name}: {scale:g} is the exponent; return the scale, 2.0**{scale:g}.")
        if not (scale > 0 and math.isfinite(scale) and math.frexp(scale)[0] == 0.5):
            raise Hint(f"{name}: {scale:g} is not a power of two, and would round every gradient.")
        if histogram.fraction_overflow(f, scale):
            raise Hint(
                f"{name}: a scale of {scale:g} makes the largest gradient overflow. One inf, and the "
                "step is lost."
            )
        if histogram.fraction_overflow(f, 2 * scale):
            raise Hint(
                f"{name}: a scale of {scale:g} fits by a hair. Gradients twice as large must fit, too."
            )
        lost, least = histogram.fraction_lost(f, scale), histogram.fraction_lost(f, best)
        if lost > least:
            raise Hint(
                f"{name}: a scale of {scale:g} loses {lost:.0%} of the gradients, a larger one "
                f"loses {least:.0%}."
            )
    return (
        "nothing overflows with a factor of two to spare, and nothing is lost that could be kept."
    )
