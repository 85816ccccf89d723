"""The exercises of notebook 05: right answers pass, each typical mistake has a hint of its own."""

import math

import pytest
import torch
from torch.amp import GradScaler

import amp_lab as lab


def stub(*_, **__):
    raise NotImplementedError


def gradients(optimizer):
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [p.grad for p in parameters if p.grad is not None]


# ---- right answers, each in two ways ---------------------------------------------------------


class Scaler:
    def __init__(self, device, init_scale=2.0**16, growth_interval=2000):
        self._scale, self._growth_interval = init_scale, growth_interval
        self._growth_tracker, self._found_inf = 0, False

    def scale(self, loss):
        return self._scale * loss

    def unscale_(self, optimizer):
        for g in gradients(optimizer):
            g.mul_(1 / self._scale)


class ByNewTensors(Scaler):
    def scale(self, loss):
        return loss * torch.tensor(self._scale)

    def unscale_(self, optimizer):
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad = p.grad / self._scale


def by_isfinite(self, optimizer):
    return not all(g.isfinite().all() for g in gradients(optimizer))


def by_subtraction(self, optimizer):
    bad = [(g - g != 0).any() for g in gradients(optimizer)]
    return torch.stack(bad).any() if bad else False


def step(self, optimizer):
    self.unscale_(optimizer)
    if self.found_inf(optimizer):
        self._found_inf = True
    else:
        optimizer.step()


def step_looks_first(self, optimizer):
    overflow = bool(self.found_inf(optimizer))
    self._found_inf = self._found_inf or overflow
    self.unscale_(optimizer)
    return None if overflow else optimizer.step()


def update(
    self, growth=2.0, backoff=0.5, reset=True, clear=True, forget=True, late=0, counts=False
):
    """Make the right or a faulty `update`."""
    if self._found_inf:
        self._scale *= backoff
        if reset:
            self._growth_tracker = 0
        if counts:
            self._growth_tracker += 1
    else:
        self._growth_tracker += 1
        if self._growth_tracker == self._growth_interval + late:
            self._scale *= growth
            if clear:
                self._growth_tracker = 0
    if forget:
        self._found_inf = False


def faulty(**faults):
    return lambda self: update(self, **faults)


def update_with_a_ceiling(self):
    update(self)
    self._scale = min(self._scale, 2048.0)


def update_counting_down(self):
    good, self._found_inf = not self._found_inf, False
    self._growth_tracker = self._growth_tracker + 1 if good else 0
    grown = self._growth_tracker >= self._growth_interval
    self._growth_tracker *= not grown
    self._scale *= 0.5 if not good else 2 if grown else 1


class Finished(Scaler):
    found_inf, step, update = by_isfinite, step, update


class Other(ByNewTensors):
    found_inf, step, update = by_subtraction, step_looks_first, update_counting_down


def lowest_that_loses_least(histogram, format):
    fitting = [
        2.0**n for n in range(-40, 60) if not histogram.fraction_overflow(format, 2.0 ** (n + 1))
    ]
    return min(fitting, key=lambda scale: histogram.fraction_lost(format, scale))


def highest_that_fits(histogram, format):
    top = int(histogram.exponents[-1])
    return 2.0 ** (math.floor(math.log2(format.max)) - top - 1)


@pytest.mark.parametrize(
    ("name", "attempt"),
    [
        ("scale_and_unscale", Scaler),
        ("scale_and_unscale", ByNewTensors),
        ("found_inf", by_isfinite),
        ("found_inf", by_subtraction),
        ("scaler_step", step),
        ("scaler_step", step_looks_first),
        ("scaler_update", update),
        ("scaler_update", update_counting_down),
        ("loss_scaler", Finished),
        ("loss_scaler", Other),
        ("loss_scaler", lab.LossScaler),
        ("predicted_scales", lambda: (2048, 512, 2048, 256)),
        ("predicted_scales", lambda: torch.tensor([2048.0, 512.0, 2048.0, 256.0])),
        ("static_scale", lowest_that_loses_least),
        ("static_scale", highest_that_fits),
        ("static_scale", lambda histogram, format: histogram.best_scale(format)),
    ],
)
def test_right_answers_pass(name, attempt, capsys):
    getattr(lab.checks, name)(attempt)
    out = capsys.readouterr().out
    assert out.startswith(f"PASSED   {name}: "), out


NAMES = [
    "scale_and_unscale",
    "found_inf",
    "scaler_step",
    "scaler_update",
    "loss_scaler",
    "predicted_scales",
    "static_scale",
]


class Stub:
    def __init__(self, device, init_scale=1.0, growth_interval=1):
        self._scale = init_scale

    def scale(self, loss):
        raise NotImplementedError


@pytest.mark.parametrize(
    ("name", "attempt"),
    [(name, stub) for name in NAMES] + [("scale_and_unscale", Stub), ("loss_scaler", Stub)],
)
def test_stub_is_to_do(name, attempt, capsys):
    getattr(lab.checks, name)(attempt)
    assert capsys.readouterr().out.startswith(f"TO DO    {name}: ")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("junk", [lambda *_, **__: None, lambda *_, **__: "one"])
def test_junk_gets_one_line(name, junk, capsys):
    getattr(lab.checks, name)(junk)
    out = capsys.readouterr().out
    assert out.startswith(f"NOT YET  {name}: ") and out.count("\n") == 1


def test_the_check_of_the_whole_meets_growth_backoff_and_split_steps(capsys):
    seen = set()

    class Spy(lab.LossScaler):
        def update(self):
            found = [s.found_inf for s in self._optimizers.values()]
            before = self.get_scale()
            super().update()
            seen.add((any(found), all(found), math.log2(self.get_scale() / before)))

    lab.checks.loss_scaler(Spy)
    assert capsys.readouterr().out.startswith("PASSED")
    assert {(False, False, 0), (False, False, 1), (True, False, -1), (True, True, -1)} <= seen


# ---- wrong answers ---------------------------------------------------------------------------


def scaler(scale=None, unscale_=None):
    methods = {"scale": scale, "unscale_": unscale_}
    return type("Faulty", (Scaler,), {k: v for k, v in methods.items() if v})


def unscale_with(change):
    def unscale_(self, optimizer):
        for g in gradients(optimizer):
            g.copy_(change(g, self._scale))

    return unscale_


def unscale_none_too(self, optimizer):
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad /= self._scale


def unscale_first_group(self, optimizer):
    for p in optimizer.param_groups[0]["params"]:
        if p.grad is not None:
            p.grad /= self._scale


def unscale_weights(self, optimizer):
    with torch.no_grad():
        for group in optimizer.param_groups:
            for p in group["params"]:
                p /= self._scale


def unscale_and_reset(self, optimizer):
    Scaler.unscale_(self, optimizer)
    self._scale = 1.0


def only_first(self, optimizer):
    return not gradients(optimizer)[0].isfinite().all()


def none_too(self, optimizer):
    return any(not p.grad.isfinite().all() for g in optimizer.param_groups for p in g["params"])


def stops_at_none(self, optimizer):
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is None:
                return False
            if not p.grad.isfinite().all():
                return True
    return False


def any_element(test):
    return lambda self, optimizer: any(test(g).any() for g in gradients(optimizer))


def step_always(self, optimizer):
    self.unscale_(optimizer)
    optimizer.step()


def step_never(self, optimizer):
    self.unscale_(optimizer)


def step_scaled(self, optimizer):
    if self.found_inf(optimizer):
        self._found_inf = True
    else:
        optimizer.step()


def step_twice(self, optimizer):
    step(self, optimizer)
    optimizer.step()


def step_unscales_twice(self, optimizer):
    self.unscale_(optimizer)
    step(self, optimizer)


def step_silent(self, optimizer):
    self.unscale_(optimizer)
    if not self.found_inf(optimizer):
        optimizer.step()


def step_overwrites(self, optimizer):
    self.unscale_(optimizer)
    self._found_inf = self.found_inf(optimizer)
    if not self._found_inf:
        optimizer.step()


def step_remembers(self, optimizer):
    self.unscale_(optimizer)
    self._found_inf = self._found_inf or self.found_inf(optimizer)
    if not self._found_inf:
        optimizer.step()


def step_backs_off(self, optimizer):
    step(self, optimizer)
    if self._found_inf:
        self._scale /= 2


class NeverSkips(Finished):
    step = step_always


class NeverGrows(Finished):
    update = faulty(growth=1.0)


class Unscaled(Finished):
    def unscale_(self, optimizer):
        for g in gradients(optimizer):
            g.div_(2 * self._scale)


WRONG = [
    ("scale_and_unscale", scaler(lambda self, loss: loss / self._scale), "scale(loss) divides"),
    ("scale_and_unscale", scaler(lambda self, loss: loss), "as it was"),
    ("scale_and_unscale", scaler(lambda self, loss: loss * 65536), "use self._scale"),
    ("scale_and_unscale", scaler(lambda self, loss: loss * 9), "expected 24"),
    ("scale_and_unscale", scaler(lambda self, loss: loss.item() * self._scale), "returned float"),
    (
        "scale_and_unscale",
        scaler(lambda self, loss: torch.tensor(loss.item() * self._scale)),
        "lost its graph",
    ),
    ("scale_and_unscale", scaler(unscale_=unscale_none_too), "its p.grad is None"),
    ("scale_and_unscale", scaler(unscale_=unscale_first_group), "second parameter group"),
    ("scale_and_unscale", scaler(unscale_=unscale_weights), "changed a parameter"),
    ("scale_and_unscale", scaler(unscale_=unscale_with(lambda g, s: g * s)), "unscale_ multiplies"),
    ("scale_and_unscale", scaler(unscale_=unscale_with(lambda g, s: g)), "as they were"),
    ("scale_and_unscale", scaler(unscale_=unscale_with(lambda g, s: g / 4)), "came back as 10"),
    ("scale_and_unscale", scaler(unscale_=unscale_and_reset), "the scale itself has changed"),
    ("found_inf", any_element(torch.isinf), "NaN is not inf"),
    ("found_inf", any_element(torch.isnan), "you did not see it"),
    ("found_inf", any_element(lambda g: torch.isposinf(g) | g.isnan()), "minus infinity"),
    ("found_inf", any_element(torch.isfinite), "they are not an overflow"),
    ("found_inf", any_element(lambda g: ~g.isfinite() | (g == 0)), "zero is finite"),
    ("found_inf", any_element(lambda g: ~g.sum().isfinite()), "only their sum is not"),
    ("found_inf", only_first, "look at every gradient"),
    ("found_inf", none_too, "leave such parameters out"),
    ("found_inf", stops_at_none, "do not stop at the None"),
    ("scaler_step", step_always, "stepped all the same"),
    ("scaler_step", step_never, "was not called"),
    ("scaler_step", step_scaled, "still scaled, 1024 times too large"),
    ("scaler_step", step_twice, "called 2 times"),
    ("scaler_step", step_unscales_twice, "is unscale_ called once?"),
    ("scaler_step", step_silent, "update() will not know"),
    ("scaler_step", step_overwrites, "Only ever set it to True"),
    ("scaler_step", step_remembers, "the other one must step"),
    ("scaler_step", step_backs_off, "Leave that to update()"),
    ("scaler_update", lambda self: None, "Count the good steps"),
    ("scaler_update", faulty(backoff=1.0), "halve it"),
    ("scaler_update", faulty(backoff=2.0), "Halve it"),
    ("scaler_update", faulty(backoff=0.25), "expected 512"),
    ("scaler_update", faulty(growth=4.0), "expected 2048"),
    ("scaler_update", faulty(late=1), "when the count equals the interval"),
    ("scaler_update", faulty(late=-2), "after a single good step"),
    ("scaler_update", faulty(clear=False), "not set back to 0"),
    ("scaler_update", faulty(reset=False), "only in a row"),
    ("scaler_update", faulty(counts=True), "as if the overflow were a good step"),
    ("scaler_update", faulty(forget=False), "still True after update()"),
    ("scaler_update", update_with_a_ceiling, "(g good, x overflow) the scale is 2048"),
    ("loss_scaler", NeverSkips, "your optimizers have stepped"),
    ("loss_scaler", NeverGrows, "your scale is now 32768, that of GradScaler 65536"),
    ("loss_scaler", Unscaled, "the weights differ"),
    ("predicted_scales", lambda: (4096, 512, 2048, 256), "gggg: it grows once"),
    ("predicted_scales", lambda: (2048, 1024, 2048, 256), "one too few"),
    ("predicted_scales", lambda: (2048, 512, 1024, 256), "gradients of zero are finite"),
    ("predicted_scales", lambda: (2048, 512, 2048, 512), "NaN counts as an overflow"),
    ("predicted_scales", lambda: (2048, 512, 2048, 7), "step by step"),
    ("predicted_scales", lambda: (2048, 512), "you returned 2"),
    ("static_scale", lambda h, f: math.log2(h.best_scale(f)), "is the exponent"),
    ("static_scale", lambda h, f: 2 * highest_that_fits(h, f), "fits by a hair"),
    ("static_scale", lambda h, f: 2.0**40, "makes the largest gradient overflow"),
    ("static_scale", lambda h, f: 1.0, "a larger one loses 0%"),
    ("static_scale", lambda h, f: 1000.0, "not a power of two"),
    ("static_scale", lambda h, f: -1.0, "not a power of two"),
]


@pytest.mark.parametrize(("name", "attempt", "hint"), WRONG)
def test_each_typical_mistake_has_its_hint(name, attempt, hint, capsys):
    getattr(lab.checks, name)(attempt)
    out = capsys.readouterr().out
    assert out.startswith(f"NOT YET  {name}: "), out
    assert hint in out
    assert out.count("\n") == 1


def test_the_prediction_agrees_with_grad_scaler(capsys):
    """The right answers, from `GradScaler` itself rather than from the check."""
    answers = []
    for pattern in ("gggg", "ggxgg", "gzg", "xxgggn"):
        weight = torch.zeros(1, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=1.0)
        scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        for letter in pattern:
            factor = {"g": 1.0, "x": math.inf, "z": 0.0, "n": math.nan}[letter]
            scaler.scale((weight * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        answers.append(scaler.get_scale())
    assert answers == [2048, 512, 2048, 256]
