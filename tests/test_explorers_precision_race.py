import asyncio
import io
import math
import signal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

import amp_lab as lab
from amp_lab.explorers import precision_race
from amp_lab.explorers.precision_race import ENTRANTS, deep_classifier

GENERATOR = torch.Generator().manual_seed(4)
BATCHES = [
    (torch.randn(8, 6, generator=GENERATOR), torch.randint(3, (8,), generator=GENERATOR))
    for _ in range(30)
]


def tiny():
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


@pytest.fixture
def race():
    return lab.PrecisionRace(make_model=tiny, make_batches=lambda: BATCHES)


def losses(race):
    return {name: [step.loss for step in steps] for name, steps in race.history.items()}


def pixels(png):
    return np.asarray(Image.open(io.BytesIO(png)))


def wait_for(condition):
    async def poll():
        while not condition():
            await asyncio.sleep(0)

    return asyncio.wait_for(poll(), 60)


def test_only_unscaled_fp16_stays_on_the_plateau():
    race = lab.PrecisionRace()
    race.run(steps=60)
    assert list(race.history) == list(ENTRANTS)
    assert {len(steps) for steps in race.history.values()} == {60}
    last = {name: sum(values[-5:]) / 5 for name, values in losses(race).items()}
    stuck = last.pop("fp16 (no scaling)")
    assert stuck > 2.25 and all(loss < 2.0 for loss in last.values())
    assert race.history["fp16 (no scaling)"][-1].zero_share > 0.8
    assert race.history["fp16 + GradScaler"][-1].zero_share < 0.6


def test_the_default_model_is_what_its_docstring_says():
    model = deep_classifier()
    assert model(torch.zeros(2, 1, 28, 28)).shape == (2, 10)
    assert sum(isinstance(layer, nn.ReLU) for layer in model) == 16


@pytest.mark.parametrize("name", ENTRANTS)
def test_each_entrant_trains_as_it_would_alone(race, name):
    race.run(steps=12)
    torch.manual_seed(0)
    model = tiny()
    recipe = lab.RECIPES[name]
    scaler = torch.amp.GradScaler("cpu", growth_interval=50) if recipe.scaling else None
    alone = list(lab.train(model, BATCHES[:12], recipe, scaler=scaler))
    assert losses(race)[name] == [step.loss for step in alone]
    for raced, weight in zip(race.models[name].parameters(), model.parameters(), strict=True):
        assert torch.equal(raced, weight)


def test_the_random_state_is_left_alone():
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    lab.PrecisionRace(make_model=tiny, make_batches=lambda: BATCHES).run(steps=2)
    assert torch.equal(torch.rand(2), expected)


def test_play_trains_beside_other_work_until_paused(race):
    async def notebook():
        race.play.click()
        assert race.play.disabled and not race.pause.disabled and not race.history["fp32"]
        await wait_for(lambda: len(race.history["fp32"]) >= 3)
        race.pause.click()
        reached = losses(race)
        for _ in range(20):
            await asyncio.sleep(0)
        assert losses(race) == reached and race.pause.disabled
        assert "paused" in race.readout.value
        race.play.click()
        await wait_for(lambda: len(race.history["fp32"]) >= 5)
        race.pause.click()

    empty = race.picture.value
    asyncio.run(notebook())
    assert not np.array_equal(pixels(empty), pixels(race.picture.value))
    raced = losses(race)
    race.reset.click()
    race.run(steps=5)
    assert all(raced[name][:5] == losses(race)[name][: len(raced[name])] for name in ENTRANTS)


def test_other_work_has_its_turn_after_every_single_step(race):
    async def notebook():
        seen = []
        race.play.click()
        while not race.finished:
            seen.append(sum(map(len, race.history.values())))
            await asyncio.sleep(0)
        assert all(after - before <= 1 for before, after in zip(seen, seen[1:], strict=False))

    asyncio.run(notebook())


def test_play_twice_is_play_once(race):
    async def notebook():
        race.play.click()
        first = race._task
        race.play.click()
        assert race._task is first
        race.pause.click()

    asyncio.run(notebook())


def test_play_outside_of_a_notebook_says_what_to_do(race):
    race.play.click()
    assert "elsewhere use run(steps=40)" in race.readout.value and not race.play.disabled
    race.run(steps=1)


def test_step_and_reset(race):
    race.step.click()
    race.step.click()
    assert {len(steps) for steps in race.history.values()} == {2}
    assert "<b>Step 2</b>" in race.readout.value
    before = losses(race)
    race.reset.click()
    assert not any(race.history.values()) and "<b>Step 0</b>" in race.readout.value
    race.run(steps=2)
    assert losses(race) == before


def test_the_learning_rate_takes_effect_at_once(race):
    race.run(steps=3)
    before = [p.detach().clone() for p in race.models["bf16"].parameters()]
    race.learning_rate.value = 1e-6
    race.step.click()
    after = race.models["bf16"].parameters()
    moved = max((p - b).abs().max() for p, b in zip(after, before, strict=True))
    assert 0 < moved < 5e-6
    race.reset.click()
    assert {g["lr"] for o in race._optimizers.values() for g in o.param_groups} == {1e-6}


def test_the_loss_scale_takes_effect_at_once(race):
    race.loss_scale.value = 2.0**10
    race.run(steps=2)
    race.loss_scale.value = 2.0**40
    race.run(steps=2)
    scales = [step.scale for step in race.history["fp16 + GradScaler"]]
    skipped = [step.skipped for step in race.history["fp16 + GradScaler"]]
    assert scales == [2.0**10, 2.0**10, 2.0**40, 2.0**39]
    assert skipped == [False, False, True, True]
    assert {step.scale for step in race.history["fp32"]} == {1.0}
    race.reset.click()
    race.step.click()
    assert race.history["fp16 + GradScaler"][0].scale == 2.0**40


def broken_after(calls, error):
    def loss_fn(logits, targets):
        loss_fn.calls += 1
        if loss_fn.calls > calls:
            raise error
        return F.cross_entropy(logits, targets)

    loss_fn.calls = 0
    return loss_fn


def test_an_error_stops_the_race_and_is_shown():
    loss_fn = broken_after(6, ValueError("a <bad> batch"))
    race = lab.PrecisionRace(make_model=tiny, make_batches=lambda: BATCHES, loss_fn=loss_fn)

    async def notebook():
        race.play.click()
        await wait_for(lambda: race.error is not None)
        await wait_for(lambda: not race.play.disabled)
        loss_fn.calls = -100  # the cause is gone, but the race stays stopped until it is reset
        race.play.click()
        await wait_for(lambda: not race.play.disabled)

    asyncio.run(notebook())
    assert sum(map(len, race.history.values())) == 6
    assert "stopped by an error: ValueError: a &lt;bad&gt; batch" in race.readout.value
    with pytest.raises(ValueError, match="a <bad> batch"):
        race.run(steps=1)
    race.reset.click()
    race.run(steps=2)
    assert race.error is None and "error" not in race.readout.value


@pytest.mark.parametrize("playing", [True, False])
def test_the_stop_button_pauses_and_the_race_can_go_on(race, playing):
    race.run(steps=8)
    expected = losses(race)
    race.reset.click()
    hook = race.models["fp16 + GradScaler"][0].register_forward_hook(
        lambda *_: signal.raise_signal(signal.SIGINT)
    )
    if playing:

        async def notebook():
            race.play.click()
            await wait_for(lambda: not race.play.disabled)

        asyncio.run(notebook())
    else:
        with pytest.raises(KeyboardInterrupt):
            race.run(steps=8)
    hook.remove()
    assert [len(steps) for steps in race.history.values()] == [1, 1, 1, 0]
    assert race.error is None and "paused" in race.readout.value
    race.run(steps=8)
    assert {name: values[:8] for name, values in losses(race).items()} == {
        name: values[: len(losses(race)[name])] for name, values in expected.items()
    }


def test_it_ends_with_the_batches(race):
    race.run(steps=40)
    assert {len(steps) for steps in race.history.values()} == {len(BATCHES)}
    assert "finished" in race.readout.value
    race.run(steps=1)
    assert {len(steps) for steps in race.history.values()} == {len(BATCHES)}


def test_drawing_takes_at_most_a_twentieth_of_the_time(race, monkeypatch):
    class Clock:
        now = 0.0

        def perf_counter(self):
            return self.now

    clock, frames = Clock(), []

    def show(sentence):
        frames.append(sentence)
        clock.now += 1.0

    def add(name, step):
        clock.now += 2.5

    monkeypatch.setattr(precision_race, "time", clock)
    monkeypatch.setattr(race, "show", show)
    monkeypatch.setattr(race.canvas, "add", add)
    race.run(steps=30)  # 30 rounds of four steps take 300 seconds, and the last frame is extra
    assert 10 <= len(frames) <= 300 / 20 + 1


def test_values_that_leave_the_chart_do_not_break_it():
    def loss_fn(logits, targets):
        loss_fn.calls += 1
        factor = {3: 1e30, 4: math.nan, 5: math.inf}.get(loss_fn.calls // 4, 1.0)
        return factor * F.cross_entropy(logits, targets)

    loss_fn.calls = 0
    race = lab.PrecisionRace(make_model=tiny, make_batches=lambda: BATCHES, loss_fn=loss_fn)
    race.run(steps=8)
    assert race.error is None


def test_a_blitted_frame_equals_a_full_redraw(race):
    race.run(steps=20)
    blitted = pixels(race.canvas.png())
    race.canvas.invalidate()
    assert np.array_equal(blitted, pixels(race.canvas.png()))


def test_the_axis_grows_with_the_race(race):
    race.canvas.add("fp32", race_step(loss=2.0))
    for _ in range(150):
        race.canvas.add("fp32", race_step(loss=1.0))
    assert race.canvas.losses.get_xlim()[1] > 151
    assert race.canvas.losses.get_ylim() == pytest.approx((0, 2.6))


def race_step(loss):
    return lab.Step(0, loss, 1.0, False, 0.0, 0.01)


def test_the_text_alternative_does_not_depend_on_the_data(race):
    before = repr(race)
    race.run(steps=2)
    assert repr(race) == before and all(name in before for name in ENTRANTS)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"learning_rate": 0.0}, "learning_rate is 0.0, expected 1e-6 to 10"),
        ({"loss_scale": 0.5}, r"loss_scale is 0.5, expected a power of two from 1 to 2\*\*40"),
        ({"loss_scale": 1000}, "loss_scale is 1000, expected a power of two"),
    ],
)
def test_bad_numbers_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        lab.PrecisionRace(make_model=tiny, make_batches=lambda: BATCHES, **options)


def test_run_needs_a_step(race):
    with pytest.raises(ValueError, match="steps is 0, expected 1 or more"):
        race.run(steps=0)
