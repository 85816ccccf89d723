"""Exercises of notebook 06, training with AMP.

All run on the CPU, with FP32 models of a few weights: where the scaler stands in the loop does not
depend on what computed the gradients.
"""

import copy
import math
import warnings
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from .exercise import Hint, exercise

__all__ = [
    "accumulated_step",
    "clipped_step",
    "resume",
    "scheduled_step",
    "two_optimizer_step",
]

SCALE = 1024.0


def _model(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def _batch(size: int, seed: int = 1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 4, generator=generator)
    return x, torch.randint(3, (size,), generator=generator)


def _weights(model) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def _scaler(growth_interval: int = 2000, scale: float = SCALE) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=growth_interval)


def _close(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-3) -> bool:
    return bool(torch.norm(a - b) <= tolerance * torch.norm(b))


def _run(attempt, *arguments):
    """Call the learner's function; say in our words what the scaler's own protests mean."""
    try:
        return attempt(*arguments)
    except RuntimeError as error:
        if "unscale_() has already been called" in str(error):
            raise Hint(
                "unscale_ was called twice before update(). Unscale each optimizer once per step, when "
                "its gradients are complete."
            ) from None
        if "step() has already been called" in str(error):
            raise Hint("scaler.step was called twice for one optimizer before update().") from None
        if "unscale_() is being called after step()" in str(error):
            raise Hint(
                "unscale_ came after scaler.step, which has unscaled and used the gradients already. "
                "Unscale first."
            ) from None
        raise
    except AssertionError as error:
        if "No inf checks were recorded" in str(error):
            raise Hint(
                "the scaler found no gradients to check. Either there are none when scaler.step is "
                "called, or update() is called without a scaler.step before it."
            ) from None
        if "_scale is None" in str(error):
            raise Hint(
                "the scaler was asked to unscale or step before it had scaled a loss: "
                "scaler.scale(loss).backward() comes first."
            ) from None
        raise


# ---- clipping ----------------------------------------------------------------------------------

MAX_NORM = 0.5


@exercise
def clipped_step(attempt):
    """Check `clipped_step(model, optimizer, scaler, loss, max_norm)`.

    It goes backward from `loss`, clips the gradients to `max_norm`, updates, and returns the norm that
    the gradients had before. Gradients are `None` when it is called.
    """

    def ingredients(factor=1.0, scale=SCALE):
        model = _model()
        x, y = _batch(16)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        return model, optimizer, _scaler(scale=scale), factor * F.cross_entropy(model(x), y)

    model, optimizer, scaler, loss = ingredients(4.0)
    before = _weights(model)
    gradients = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    true = torch.cat([g.flatten() for g in gradients])
    norm = true.norm().item()

    answer = _run(attempt, model, optimizer, scaler, loss, MAX_NORM)

    moved = before - _weights(model)
    if not moved.any():
        raise Hint(
            "the weights did not move: is scaler.step(optimizer) there, after the backward pass?"
        )
    size = moved.norm().item()
    if size > 10 * norm:
        raise Hint(
            f"the weights moved {size / norm:.0f} times too far: scaled gradients reached "
            "the optimizer. scaler.step(optimizer) unscales them, optimizer.step() does not."
        )
    if size < MAX_NORM / 100:
        raise Hint(
            f"the update is {MAX_NORM / size:.0f} times too small. The gradients were still scaled "
            "when they were clipped: almost nothing was left of them after unscaling. First "
            "scaler.unscale_(optimizer), then clip. (And if you clip correctly: is the loss scaled?)"
        )
    if _close(moved, true):
        raise Hint(f"nothing was clipped: the norm is {norm:.2f}, more than {MAX_NORM}.")
    if not _close(moved, true * (MAX_NORM / norm), 0.01):
        raise Hint(
            f"the update should be the gradient, shortened to length {MAX_NORM}: use "
            "torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm). Yours has another length or "
            "direction."
        )
    if answer is None:
        raise Hint("return the norm: clip_grad_norm_ returns it.")
    answer = float(answer)
    if math.isclose(answer, norm * SCALE, rel_tol=0.01):
        raise Hint(
            f"the norm that you return is {SCALE:.0f} times too large: it was taken before unscale_."
        )
    if not math.isclose(answer, norm, rel_tol=0.01):
        raise Hint(
            f"the norm before clipping is {norm:.3f}, you return {answer:.3f}. clip_grad_norm_ "
            "returns the right one."
        )
    _require_update(scaler)

    model, optimizer, scaler, loss = ingredients(math.inf)
    before = _weights(model)
    _run(attempt, model, optimizer, scaler, loss, MAX_NORM)
    if not torch.equal(_weights(model), before):
        raise Hint("gradients with inf moved the weights: let scaler.step(optimizer) decide.")
    if scaler.get_scale() != SCALE / 2:
        raise Hint("after an overflow the scale must halve: is scaler.update() called every time?")
    return "unscaled, then clipped; the norm is the true one; an overflow is skipped."


def _require_update(scaler):
    if scaler.state_dict()["_growth_tracker"] != 1:
        raise Hint(
            "the scaler did not count this step: call scaler.update() once, at the end of the step."
        )


# ---- the scheduler -----------------------------------------------------------------------------


@exercise
def scheduled_step(attempt):
    """Check `scheduled_step(optimizer, scaler, scheduler)`.

    The gradients are there, scaled. It updates weights and scale, moves the scheduler if and only if
    the weights were updated, and returns whether they were.
    """
    for kind in ("AdamW", "AdamW with fused=True"):
        _try_schedule(attempt, kind, overflow=False, growth_interval=2000)
        _try_schedule(attempt, kind, overflow=True, growth_interval=2000)
        _try_schedule(attempt, kind, overflow=False, growth_interval=1)
    return "the scheduler waits when a step is skipped, also with a fused optimizer."


def _try_schedule(attempt, kind, overflow, growth_interval):
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused="fused" in kind)
    scaler = _scaler(growth_interval)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    x, y = _batch(16)
    scaler.scale(F.cross_entropy(model(x), y) * (math.inf if overflow else 1.0)).backward()
    before = _weights(model)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's own remark on the order; the hint says more
        answer = _run(attempt, optimizer, scaler, scheduler)

    moved = not torch.equal(_weights(model), before)
    rate, scale = optimizer.param_groups[0]["lr"], scaler.get_scale()
    if overflow and moved:
        raise Hint("gradients with inf moved the weights: use scaler.step(optimizer).")
    if not overflow and not moved:
        raise Hint("the weights did not move: is scaler.step(optimizer) there?")
    if overflow:
        if scale == SCALE:
            raise Hint("after an overflow the scale must halve: is scaler.update() there?")
        if rate != 0.1:
            raise Hint(
                f"{kind}: the step was skipped, but the scheduler moved on. Compare scaler.get_scale() "
                "before and after update(): it falls exactly when a step was skipped."
            )
    else:
        if growth_interval == 1 and scale == SCALE:
            raise Hint("the scale should have grown: is scaler.update() there?")
        if rate == 0.1 and growth_interval == 1:
            raise Hint(
                f"{kind}: the weights moved, but the scheduler waited. The scale *grew* in this step. "
                "A skipped step is one after which the scale is smaller, not just different."
            )
        if rate == 0.1:
            raise Hint(
                f"{kind}: the weights moved, but the scheduler did not. Is scheduler.step() there? "
                "(scaler.step returns None in either case here, so it cannot tell you. And after most "
                "good steps the scale is what it was: equal is good.)"
            )
    if rate not in (0.1, 0.05):
        raise Hint(f"the scheduler moved {round(math.log2(0.1 / rate))} times in one step.")
    if answer is None:
        raise Hint("return True if the weights were updated, else False.")
    if bool(answer) == overflow:
        raise Hint(
            f"{kind}: you return {answer!r} after a step that was {'skipped' if overflow else 'made'}."
        )


# ---- accumulation ------------------------------------------------------------------------------


@exercise
def accumulated_step(attempt):
    """Check `accumulated_step(model, optimizer, scaler, micro_batches, max_norm)`.

    It makes one optimizer step on the mean loss of all micro-batches, a list of (x, y) of equal sizes,
    with gradients clipped to `max_norm`. Gradients of earlier steps may be around when it is called.
    """
    x, y = _batch(32)
    micro_batches = list(zip(x.split(8), y.split(8), strict=True))

    def ingredients(growth_interval=2000):
        model = _model()
        return model, torch.optim.SGD(model.parameters(), lr=1.0), _scaler(growth_interval)

    model = _model()
    gradients = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
    true = torch.cat([g.flatten() for g in gradients])
    norm = true.norm().item()

    def update(max_norm, growth_interval=2000, batches=micro_batches, stale=False):
        model, optimizer, scaler = ingredients(growth_interval)
        calls = []
        optimizer.register_step_post_hook(lambda *_: calls.append(1))
        before = _weights(model)
        if stale:
            for p in model.parameters():
                p.grad = torch.full_like(p, 1e4)
        _run(attempt, model, optimizer, scaler, list(batches), max_norm)
        return before - _weights(model), len(calls), scaler

    moved, steps, scaler = update(max_norm=1e6)
    if steps > 1:
        raise Hint(
            f"the optimizer made {steps} steps for {len(micro_batches)} micro-batches. Step once, "
            "after the loop over the micro-batches: on the boundary."
        )
    if not moved.any():
        raise Hint("the weights did not move: is scaler.step(optimizer) there, after the loop?")
    ratio = (moved.norm() / norm).item()
    if ratio > 100:
        raise Hint(
            "scaled gradients reached the optimizer: use scaler.step(optimizer), not optimizer.step(). "
            "(And if you do: unscale_ after the last backward pass, or what comes later stays scaled.)"
        )
    if ratio < 0.01:
        raise Hint(
            "almost nothing is left of the gradients. Was the loss scaled in every micro-batch, and "
            "were the gradients unscaled only once?"
        )
    if _close(moved, true * len(micro_batches), 0.05):
        raise Hint(
            f"the update is {len(micro_batches)} times too large: divide each loss by the number of "
            "micro-batches, so that their sum is the mean."
        )
    if any(_close(moved, g, 0.05) for g in _last_only(micro_batches)):
        raise Hint(
            "only the last micro-batch counted: zero_grad() belongs before the loop, not into it."
        )
    if not _close(moved, true, 0.05):
        raise Hint("the update is not the gradient of the mean loss over all micro-batches.")
    if scaler.state_dict()["_growth_tracker"] != 1:
        raise Hint(
            f"the scaler counted {scaler.state_dict()['_growth_tracker']} steps instead of one: call "
            "scaler.update() once, after scaler.step(optimizer)."
        )

    moved, *_ = update(max_norm=norm / 10)
    if _close(moved, true, 0.05):
        raise Hint("nothing was clipped: unscale_, then clip_grad_norm_, after the loop.")
    if moved.norm() < norm / 1000:
        raise Hint("clipped before unscale_: first scaler.unscale_(optimizer), then clip.")
    if not _close(moved, true / 10, 0.05):
        raise Hint(
            "the clipped update is wrong. Clip once, after the loop: clipping in each micro-batch "
            "shortens a sum that is not complete."
        )
    moved, *_ = update(max_norm=1e6, stale=True)
    if not _close(moved, true, 0.05):
        raise Hint(
            "gradients of the step before were still there: call zero_grad() before the loop."
        )

    poisoned = [(x * math.inf, y) if i == 1 else (x, y) for i, (x, y) in enumerate(micro_batches)]
    moved, _, scaler = update(max_norm=1e6, batches=poisoned)
    if moved.any() or scaler.get_scale() != SCALE / 2:
        raise Hint(
            "an overflow in one micro-batch must skip the whole step and halve the scale once."
        )
    return "one step, one unscale_, one clip and one update for all micro-batches."


def _last_only(micro_batches):
    """The gradients that remain if each micro-batch begins with zero_grad()."""
    x, y = micro_batches[-1]
    for divisor in (1, len(micro_batches)):
        model = _model()
        loss = F.cross_entropy(model(x), y) / divisor
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        yield torch.cat([g.flatten() for g in gradients])


# ---- resume ------------------------------------------------------------------------------------


def _training(seed: int) -> SimpleNamespace:
    model = _model(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return SimpleNamespace(
        model=model,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.5),
        scaler=_scaler(growth_interval=4, scale=2.0**120),
    )


def _train(training: SimpleNamespace, steps: range) -> list[bool]:
    """Returns, for each step, whether it was skipped."""
    skipped = []
    for index in steps:
        x, y = _batch(16, seed=100 + index)
        training.optimizer.zero_grad()
        loss = F.cross_entropy(training.model(x), y) * 1e6
        training.scaler.scale(loss).backward()
        scale = training.scaler.get_scale()
        training.scaler.step(training.optimizer)
        training.scaler.update()
        skipped.append(training.scaler.get_scale() < scale)
        if not skipped[-1]:
            training.scheduler.step()
    return skipped


@exercise
def resume(attempt):
    """Check `resume(checkpoint, model, optimizer, scheduler, scaler)`.

    `checkpoint` is a dictionary of four state_dicts, named "model", "optimizer", "scheduler" and
    "scaler". The other four arguments are newly built. Afterwards they must go on as the old ones.
    """
    old = _training(seed=0)
    _train(old, range(22))
    names = ("model", "optimizer", "scheduler", "scaler")
    checkpoint = {name: copy.deepcopy(getattr(old, name).state_dict()) for name in names}
    new = _training(seed=9)

    _run(attempt, copy.deepcopy(checkpoint), new.model, new.optimizer, new.scheduler, new.scaler)

    if not torch.equal(_weights(new.model), _weights(old.model)):
        raise Hint(
            "the model still has its new, random weights: load_state_dict the model's state."
        )
    if not new.optimizer.state_dict()["state"]:
        raise Hint(
            "the weights are right, but AdamW begins with empty averages, and its first steps are as "
            "large as at the very start: that is a bump. Load the optimizer's state, too."
        )
    if new.scheduler.state_dict() != checkpoint["scheduler"]:
        raise Hint(
            "the scheduler counts from 0 again, and will change the learning rate at the wrong steps. "
            "Load its state, too."
        )
    if new.scaler.state_dict() != checkpoint["scaler"]:
        wasted = sum(_train(new, range(22, 42)))
        needed = sum(_train(old, range(22, 42)))
        raise Hint(
            f"the scaler starts again at its initial scale: in the next 20 steps {wasted} are skipped, "
            f"undisturbed it is {needed}. Call scaler.load_state_dict(...) on the scaler that was "
            "passed in: a new one, made inside your function, is forgotten."
        )
    if _train(new, range(22, 42)) != _train(old, range(22, 42)):
        raise Hint("the resumed run skips other steps than the undisturbed one.")
    if not torch.equal(_weights(new.model), _weights(old.model)):
        raise Hint("after 20 more steps the resumed weights differ from the undisturbed ones.")
    return "after 20 more steps the weights equal those of the undisturbed run, bit for bit."


# ---- two optimizers ----------------------------------------------------------------------------


@exercise
def two_optimizer_step(attempt):
    """Check `two_optimizer_step(losses, optimizers, scaler)`.

    `losses` and `optimizers` are lists of two. It goes backward from both losses and makes one step
    with each optimizer, with one scaler. Gradients are `None` when it is called.
    """

    def run(factors=(1.0, 1.0), growth_interval=2000):
        models = [_model(0), _model(1)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
        x, y = _batch(16)
        losses = [f * F.cross_entropy(m(x), y) for f, m in zip(factors, models, strict=True)]
        before = [_weights(model) for model in models]
        gradients = [
            torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
            for loss, model in zip(losses, models, strict=True)
        ]
        true = [torch.cat([g.flatten() for g in each]) for each in gradients]
        scaler = _scaler(growth_interval)
        _run(attempt, losses, optimizers, scaler)
        moved = [b - _weights(model) for b, model in zip(before, models, strict=True)]
        return true, moved, scaler

    true, moved, scaler = run()
    for which, t, m in zip(("first", "second"), true, moved, strict=True):
        if not m.any():
            raise Hint(
                f"the {which} optimizer did not move its weights: both losses go backward, both "
                "optimizers step."
            )
        ratio = (m.norm() / t.norm()).item()
        if ratio > 10:
            raise Hint(
                f"scaled gradients reached the {which} optimizer: use scaler.step, not optimizer.step."
            )
        if ratio < 0.1:
            raise Hint(
                f"the {which} optimizer's gradients were divided by the scale, but its loss was not "
                "multiplied by it: scaler.scale(loss) for each loss."
            )
    tracker = scaler.state_dict()["_growth_tracker"]
    if tracker == 0:
        raise Hint("the scaler did not count this step: call scaler.update() at the end.")
    true, moved, grown = run(growth_interval=1)
    if tracker != 1 or grown.get_scale() > 2 * SCALE:
        raise Hint(
            "update() was called more than once. It closes the step for all optimizers: once, after "
            "the last scaler.step. Otherwise the scale changes while the second one is still waiting."
        )
    if not all(_close(m, t, 0.01) for m, t in zip(moved, true, strict=True)):
        raise Hint(
            "if the scale grows in this step, one optimizer is unscaled by another scale than its loss "
            "was scaled with: call update() after the last scaler.step."
        )

    for broken, whole in ((0, 1), (1, 0)):
        factors = [1.0, 1.0]
        factors[broken] = math.inf
        true, moved, scaler = run(factors)
        if moved[broken].any():
            raise Hint("gradients with inf moved the weights: let scaler.step decide.")
        if not moved[whole].any():
            raise Hint(
                "one optimizer overflowed and both were skipped. The scaler keeps book for each "
                "optimizer: give each its own gradients and its own scaler.step."
            )
        if scaler.get_scale() != SCALE / 2:
            raise Hint("an overflow in either optimizer must halve the scale, once per step.")
    return "one scaler, one step for each optimizer, one update at the end."
