"""Exercises of notebook 09, ward B: loops that train in silence, and badly."""

import io

import torch
import torch.nn.functional as F
from torch import nn

from ..gradients import ExponentHistogram
from .clinic_bench import (
    HALF,
    CountingScaler,
    Patient,
    classifier,
    distance,
    fp32_update,
    parameters_of,
    samples,
    treat,
)
from .exercise import Hint, exercise

__all__ = [
    "heal_clipping",
    "heal_first_scale",
    "heal_resume",
    "heal_schedule",
    "heal_stuck",
    "heal_twins",
    "heal_vanishing",
]


def half():
    return torch.autocast("cpu", dtype=torch.float16)


@exercise
def heal_first_scale(attempt):
    """Check `make_scaler()`: for gradients up to 200, no step is wasted and nothing is lost."""
    scaler = attempt()
    if not isinstance(scaler, torch.amp.GradScaler):
        raise Hint(
            f"make_scaler returned {type(scaler).__name__}, expected a torch.amp.GradScaler."
        )
    if not scaler.is_enabled():
        raise Hint(
            "a scaler that is switched off skips nothing, and rescues nothing: small gradients flush "
            'to 0. Keep it on, and start lower. (Without "cpu" it waits for a GPU.)'
        )
    # Gradients from 200 downwards, each half of the one before, through an FP16 backward pass.
    magnitudes = 200 * 2.0 ** -torch.arange(40.0)
    weight = torch.zeros_like(magnitudes, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    skips, lost = 0, 0.0
    for _ in range(20):
        optimizer.zero_grad()
        scaled = scaler.scale((weight.half() * magnitudes).sum())
        scaled.backward()
        scale = scaler.get_scale()
        lost = max(lost, ((weight.grad == 0).sum() / len(weight)).item())
        scaler.step(optimizer)
        scaler.update()
        skips += scaler.get_scale() < scale
    if skips and scaler.get_growth_interval() < 20:
        raise Hint("the scale grows every few steps, and overflows again: leave growth_interval.")
    if skips:
        raise Hint(
            f"{skips} of 20 steps were skipped. A gradient of 200 must stay below 65504 when it is "
            "multiplied by init_scale."
        )
    if lost > 0.1:
        raise Hint(
            "no step is skipped, but small gradients flush to 0: init_scale is needlessly low. Start "
            "as high as 200 times the scale allows, with some room."
        )
    return "no step wasted, and small gradients are kept."


@exercise
def heal_clipping(attempt):
    """Check `train_step(model, optimizer, scaler, images, labels)`: clip to 0.5, in true units."""
    batches = samples(1)
    patient = Patient()
    norms = []

    def look(optimizer, *_):
        grads = [p.grad for p in patient.model.parameters()]
        norms.append(torch.cat([g.flatten() for g in grads]).norm().item())

    patient.optimizer.register_step_pre_hook(look)
    try:
        treat(attempt, patient.model, patient.optimizer, patient.scaler, *batches[0])
    except RuntimeError as error:
        if "unscale_" in str(error):
            raise Hint(
                "unscale_ was called twice, or after step. Once is enough: before the clipping."
            ) from None
        raise
    patient.must_be_mixed()
    if not norms:
        raise Hint("the optimizer made no step.")
    once, twice = "the gradients were clipped", "divided by the scale"
    mistakes = {
        f"{once} while they were still multiplied by the scale of 1024: the threshold was 1024 times "
        "too small. Call scaler.unscale_(optimizer) before the clipping.": fp32_update(
            batches, max_norm=0.5 / 1024
        ),
        "the gradients were not clipped at all: their norm was above 0.5.": fp32_update(batches),
        f"the gradients were {twice} twice: scaler.step divides, unless unscale_ has done so.": (
            fp32_update(batches) / 1024
        ),
        "the step is right in direction and far too large: the gradients were still scaled.": (
            1024 * fp32_update(batches)
        ),
    }
    patient.must_match(fp32_update(batches, max_norm=0.5), mistakes)
    if patient.scaler.updates != 1:
        raise Hint("keep scaler.update() at the end of the step.")

    # A batch that overflows must still be skipped.
    before = parameters_of(patient.model)
    x, y = batches[0]
    treat(attempt, patient.model, patient.optimizer, patient.scaler, x * 1e4, y)
    if not torch.equal(parameters_of(patient.model), before):
        raise Hint(
            "after an overflow the step was not skipped: step through scaler.step(optimizer)."
        )
    return "unscaled, clipped to 0.5, stepped; an overflow is still skipped."


@exercise
def heal_schedule(attempt):
    """Check `train(model, optimizer, scaler, scheduler, batches)`: one tick for each real step."""
    x, y = samples(1)[0]
    good, bad = (x, y), (x * 4e3, y)  # `bad` has a finite loss and gradients beyond FP16
    pattern = [good, good, bad, good, good, good, good, bad, bad, good]
    for kind in ("SGD", "fused AdamW"):
        patient = Patient(init_scale=64.0, growth_interval=3)
        model = patient.model
        optimizer = (
            torch.optim.SGD(model.parameters(), lr=1e-4)
            if kind == "SGD"
            else torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        )
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        moves, ticks = [], []
        for batch in pattern:
            before, scale = parameters_of(model), patient.scaler.get_scale()
            epoch = scheduler.last_epoch
            treat(attempt, model, optimizer, patient.scaler, scheduler, [batch])
            moves.append(not torch.equal(parameters_of(model), before))
            ticks.append(scheduler.last_epoch - epoch)
            grew = patient.scaler.get_scale() > scale
            if (
                moves[-1]
                and not ticks[-1]
                and grew
                and any(t and m for t, m in zip(ticks, moves, strict=True))
            ):
                raise Hint(
                    "in a real step after which the scale grew, the schedule stood still. Only a scale "
                    "that drops tells of a skip: compare with >=, not with ==."
                )
        if not any(moves):
            raise Hint("the weights never moved: is scaler.step(optimizer) there?")
        if all(moves):
            raise Hint(
                "an overflow was not skipped: keep scaler.step(optimizer), update and autocast."
            )
        if moves.count(True) != patient.scaler.steps - 3:
            raise Hint(
                "another number of steps was skipped than expected: is each batch used once?"
            )
        patient.must_be_mixed()
        if not any(ticks):
            raise Hint("the schedule never moved.")
        if max(ticks) > 1:
            raise Hint("the schedule moved more than once in a step.")
        if all(ticks):
            raise Hint(
                f"the schedule moved in every iteration, also in the three that were skipped ({kind})."
                + (
                    " The fused optimizer's step() is called, and skips inside: ask the scale."
                    if kind == "fused AdamW"
                    else " Was the loss inf? No: only the gradients were. Ask the scale."
                )
            )
        if [bool(t) for t in ticks] != moves:
            raise Hint(
                "the schedule stands still in some real steps, or moves in some skipped ones. Compare "
                "scaler.get_scale() before and after update()."
            )
    return "the schedule moves with the weights, and only with them; fused optimizers included."


@exercise
def heal_twins(attempt):
    """Check `train_step(body, head, body_optimizer, head_optimizer, scaler, images, labels)`."""
    x, y = samples(1)[0]
    for factor, growth_interval in ((1.0, 1), (0.0, 2000), (2e3, 2000)):
        patient = Patient(growth_interval=growth_interval)
        body, head = patient.model[:-1], patient.model[-1]
        optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (body, head)]
        batch = (x * (factor or 1.0), y)
        if factor == 0.0:  # only the body's gradients overflow
            body[0].weight.register_hook(lambda grad: grad * torch.inf)
        try:
            treat(attempt, body, head, *optimizers, patient.scaler, *batch)
        except RuntimeError as error:
            if "unscale_" in str(error) or "step()" in str(error):
                raise Hint(f"the scaler says: {error}") from None
            raise
        except AssertionError as error:
            if "inf checks" in str(error):
                raise Hint("update() was called twice for one step, or before it.") from None
            raise
        patient.must_be_mixed()
        split = 12 * 16 + 16
        update, right = patient.update, fp32_update([batch])
        scale = patient.scaler.get_scale()
        if factor == 1.0:
            for name, part in (("body", slice(0, split)), ("head", slice(split, None))):
                if not update[part].any():
                    raise Hint(f"the {name} did not move.")
                ratio = (update[part].norm() / right[part].norm()).item()
                if abs(ratio - 0.5) < 0.02:
                    raise Hint(
                        f"the {name}'s step is half of what it should be: its gradients were "
                        "multiplied by 1024 and divided by 2048. All steps first, then update()."
                    )
                if distance(update[part], right[part]) > 0.03:
                    raise Hint(f"the {name}'s step is {ratio:.2g} times what it should be.")
            if scale == 1024.0:
                raise Hint("the scale should have grown: scaler.update() is missing.")
            if scale != 2048.0:
                raise Hint(
                    f"with growth_interval=1 the scale went from 1024 to {scale:g} in one iteration, "
                    "expected 2048: update() once an iteration."
                )
        elif factor == 0.0:
            if not update.isfinite().all() or update[:split].any():
                raise Hint("the body's gradients were inf, and its step was not skipped.")
            if update[split:].any() and distance(update[split:], right[split:]) > 0.03:
                raise Hint("the body overflowed, and the head made a step of the wrong size.")
        if factor != 1.0 and scale != 512.0:
            raise Hint(f"after one overflow the scale went from 1024 to {scale:g}, expected 512.")
    return "all steps, then one update: both optimizers see the same scale."


@exercise
def heal_vanishing(attempt):
    """Check `train(model, optimizer, micro_batches, accumulate=64)`: no gradient flushes to zero."""

    class Temperature(nn.Module):
        """Makes the gradients below it as small as those of a large vocabulary."""

        def forward(self, logits):
            return logits / 2048

    def make_model():
        return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 16), Temperature())

    batches = samples(64)
    patient, seen = Patient(make_model), {}

    def look(optimizer, *_):
        seen.setdefault("zeros", ExponentHistogram.of(patient.model[2].weight.grad).fraction_zero)
        seen["steps"] = seen.get("steps", 0) + 1

    patient.optimizer.register_step_pre_hook(look)
    treat(attempt, patient.model, patient.optimizer, batches)
    patient.must_be_mixed()
    if not seen:
        raise Hint(
            "64 micro-batches, and the optimizer made no step: was it skipped, or never called?"
        )
    if seen["steps"] > 1:
        raise Hint(f"the optimizer made {seen['steps']} steps, expected one for 64 micro-batches.")
    right = fp32_update(batches, make_model, accumulate=64)
    times = (patient.update.norm() / right.norm()).item()
    if times > 100:
        raise Hint(
            "the step is more than a hundred times too large: the gradients were multiplied, and never "
            "divided again."
        )
    if seen["zeros"] > 0.1:
        raise Hint(
            "more than a tenth of the last layer's gradients are exactly 0. They must be lifted "
            "before FP16 rounds them, by scaling the loss; or be held in BF16. (A GradScaler without "
            '"cpu" is off where there is no GPU.)'
        )
    patient.must_match(right, {}, tolerance=0.05)

    # A model with large gradients: a scaler must be able to come down, and keep what it has learned.
    steep = Patient()
    steep_batches = [(x * 300, y) for x, y in samples(16)]
    steep.optimizer.param_groups[0]["lr"] = 1e-6
    treat(lambda *args: attempt(*args, accumulate=1), steep.model, steep.optimizer, steep_batches)
    if not steep.update.isfinite().all():
        raise Hint(
            "with large gradients the weights become inf or NaN: an overflow must be skipped."
        )
    if not steep.update.any():
        raise Hint(
            "with large gradients no step at all was made in 16 iterations: is a new scaler made in "
            "each of them? Each starts at 65536 and forgets what the last one learned."
        )
    return "small gradients arrive, large ones are survived."


@exercise
def heal_stuck(attempt):
    """Check `train(model, optimizer, batches)`: BF16 products, weights that move as in FP32."""
    batches = samples(40) * 3
    lr = 2e-3
    patient = Patient(lr=lr)
    treat(attempt, patient.model, patient.optimizer, batches)
    if patient.optimizer.param_groups[0]["lr"] != lr:
        raise Hint(
            "the learning rate was changed. That moves the weights today, and not when the rate "
            "decays; the small updates are still lost."
        )
    if not patient.outputs:
        raise Hint("the model was not called.")
    if not patient.outputs & HALF:
        raise Hint("no layer runs in 16 bits any more: that is FP32 training. Use BF16 autocast.")
    if torch.float16 in patient.outputs:
        raise Hint("this runs in FP16, which needs a scaler. The patient wanted BF16.")
    reference = Patient(lr=lr)
    before = reference.loss
    treat(_fp32_loop, reference.model, reference.optimizer, batches)
    fall = (before - patient.loss) / (before - reference.loss)
    if fall < 0.9:
        raise Hint(
            f"the loss fell {max(fall, 0.0):.0%} as far as in FP32: weights still stand still. Their "
            "updates are rounded away, because the weights that the optimizer holds are 16 bits wide."
        )
    if fall > 1.1:
        raise Hint("the loss fell further than in FP32: the steps are larger than they were.")
    return "products in BF16, and every small update counts."


def _fp32_loop(model, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


@exercise
def heal_resume(attempt):
    """Check `train(model, optimizer, scaler, batches, checkpoint=None)`: no trace of a restart."""
    batches = samples(24)

    def newborn():
        model = Patient(lambda: nn.Sequential(nn.Flatten(), *classifier())).model
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return model, optimizer, CountingScaler("cpu", init_scale=1024.0, growth_interval=8)

    straight, first, second, third = (newborn() for _ in range(4))
    treat(attempt, *straight, batches)
    if straight[2].steps != len(batches):
        raise Hint(f"there were {straight[2].steps} steps for {len(batches)} batches.")

    checkpoint = treat(attempt, *first, batches[:13])
    if not isinstance(checkpoint, dict):
        raise Hint(f"train returned {type(checkpoint).__name__}, expected the checkpoint, a dict.")
    on_disk = io.BytesIO()
    torch.save(checkpoint, on_disk)
    on_disk.seek(0)
    try:
        checkpoint = torch.load(on_disk, weights_only=True)
    except Exception:
        raise Hint(
            "the checkpoint holds objects, not only tensors, numbers, dicts and strings: torch.load "
            "refuses them. Save state_dict(), not the scaler itself."
        ) from None

    treat(attempt, *third, [], checkpoint)
    if third[2].get_scale() != first[2].get_scale():
        raise Hint(
            f"the loss scale was {first[2].get_scale():g} before the restart, and is "
            f"{third[2].get_scale():g} after it. The scaler has a state_dict(), too: save it at the "
            "end, load it before the first batch."
        )
    if third[2].state_dict() != first[2].state_dict():
        raise Hint(
            "the scale is right, but the scaler's count of good steps is not, so it will grow later "
            "than it should. Save all of its state_dict(), not only the scale."
        )
    treat(attempt, *second, batches[13:], checkpoint)
    if not torch.equal(parameters_of(second[0]), parameters_of(straight[0])):
        raise Hint(
            "the scaler is right, but the weights at the end are not bit-equal to those of a run that "
            "was not interrupted. Are model and optimizer both restored, before the first batch?"
        )
    return "interrupted or not: bit-equal."
