import pytest
import torch
import torch.nn.functional as F
from answers import verdict
from torch.nn.utils import clip_grad_norm_


def stub(*arguments):
    raise NotImplementedError


def does_nothing(*arguments):
    pass


def breaks(*arguments):
    return undefined_name  # noqa: F821


# ---- clipping ----------------------------------------------------------------------------------


def clipped(model, optimizer, scaler, loss, max_norm):
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
    return norm


def clipped_by_hand(model, optimizer, scaler, loss, max_norm):
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()
    for p in model.parameters():
        p.grad.mul_(min(1.0, max_norm / norm))
    scaler.step(optimizer)
    scaler.update()
    return norm


def clip_then_unscale(model, optimizer, scaler, loss, max_norm):
    scaler.scale(loss).backward()
    norm = clip_grad_norm_(model.parameters(), max_norm)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return norm


def clip_without_unscale(model, optimizer, scaler, loss, max_norm):
    scaler.scale(loss).backward()
    norm = clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
    return norm


def no_clip(model, optimizer, scaler, loss, max_norm):
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


def clip_values(model, optimizer, scaler, loss, max_norm):
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
    scaler.step(optimizer)
    scaler.update()


def no_norm(*arguments):
    clipped(*arguments)


def scaled_norm(model, optimizer, scaler, loss, max_norm):
    scaler.scale(loss).backward()
    norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
    return norm


def norm_after(model, optimizer, scaler, loss, max_norm):
    clipped(model, optimizer, scaler, loss, max_norm)
    return torch.cat([p.grad.flatten() for p in model.parameters()]).norm()


def clipped_no_update(model, optimizer, scaler, loss, max_norm):
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    return norm


def plain_step(model, optimizer, scaler, loss, max_norm):
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    scaler.update()
    return norm


def scaled_plain_step(model, optimizer, scaler, loss, max_norm):
    scaler.scale(loss).backward()
    optimizer.step()


def twice(model, optimizer, scaler, loss, max_norm):
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)


def not_scaled(model, optimizer, scaler, loss, max_norm):
    loss.backward()
    scaler.unscale_(optimizer)


def unscale_last(model, optimizer, scaler, loss, max_norm):
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.unscale_(optimizer)


# ---- the scheduler -----------------------------------------------------------------------------


def scheduled(optimizer, scaler, scheduler):
    scale = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    if scaler.get_scale() >= scale:
        scheduler.step()
        return True
    return False


def scheduled_by_looking(optimizer, scaler, scheduler):
    scaler.unscale_(optimizer)
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
    finite = all(g.isfinite().all() for g in gradients)
    scaler.step(optimizer)
    scaler.update()
    if finite:
        scheduler.step()
    return finite


def always_scheduled(optimizer, scaler, scheduler):
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
    return True


def scheduled_if_equal(optimizer, scaler, scheduler):
    scale = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    if scaler.get_scale() == scale:
        scheduler.step()
        return True
    return False


def scheduled_if_optimizer_ran(optimizer, scaler, scheduler):
    """Works with AdamW; the fused one always runs."""
    ran = []
    hook = optimizer.register_step_post_hook(lambda *_: ran.append(True))
    scaler.step(optimizer)
    scaler.update()
    hook.remove()
    if ran:
        scheduler.step()
    return bool(ran)


def scheduled_if_not_none(optimizer, scaler, scheduler):
    result = scaler.step(optimizer)
    scaler.update()
    if result is not None:
        scheduler.step()
    return result is not None


def scheduled_if_grown(optimizer, scaler, scheduler):
    scale = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    grown = scaler.get_scale() > scale
    if grown:
        scheduler.step()
    return grown


def compared_too_early(optimizer, scaler, scheduler):
    scale = scaler.get_scale()
    scaler.step(optimizer)
    made = scaler.get_scale() >= scale
    scaler.update()
    if made:
        scheduler.step()
    return made


def scheduled_no_update(optimizer, scaler, scheduler):
    scaler.step(optimizer)
    scheduler.step()
    return True


def scheduled_no_step(optimizer, scaler, scheduler):
    scaler.unscale_(optimizer)
    scaler.update()


def scheduled_plain_step(optimizer, scaler, scheduler):
    scaler.unscale_(optimizer)
    optimizer.step()
    scaler.update()
    scheduler.step()
    return True


def scheduled_no_return(*arguments):
    scheduled(*arguments)


def scheduled_inverted(*arguments):
    return not scheduled(*arguments)


def scheduled_twice(optimizer, scaler, scheduler):
    made = scheduled(optimizer, scaler, scheduler)
    if made:
        scheduler.step()
    return made


# ---- accumulation ------------------------------------------------------------------------------


def accumulated(model, optimizer, scaler, micro_batches, max_norm):
    optimizer.zero_grad()
    for x, y in micro_batches:
        loss = F.cross_entropy(model(x), y) / len(micro_batches)
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()


def accumulated_under_autocast(model, optimizer, scaler, micro_batches, max_norm):
    for x, y in micro_batches:
        if x is micro_batches[0][0]:
            model.zero_grad()
        with torch.autocast(x.device.type, dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        (scaler.scale(loss) / len(micro_batches)).backward()
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()


def accumulated_divided_later(model, optimizer, scaler, micro_batches, max_norm):
    optimizer.zero_grad()
    for x, y in micro_batches:
        scaler.scale(F.cross_entropy(model(x), y)).backward()
    scaler.unscale_(optimizer)
    for p in model.parameters():
        p.grad /= len(micro_batches)
    clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()


def accumulation(
    divide=True,
    zero_inside=False,
    zero_first=True,
    step_inside=False,
    update_inside=False,
    unscale_inside=False,
    clip="after",
    step="scaler",
    update=True,
):
    """A wrong answer, made from what is done where."""

    def attempt(model, optimizer, scaler, micro_batches, max_norm):
        if zero_first:
            optimizer.zero_grad()
        for x, y in micro_batches:
            if zero_inside:
                optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            scaler.scale(loss / len(micro_batches) if divide else loss).backward()
            if unscale_inside:
                scaler.unscale_(optimizer)
            if clip == "inside":
                clip_grad_norm_(model.parameters(), max_norm * scaler.get_scale())
            if step_inside:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            if update_inside:
                scaler.update(scaler.get_scale())
        if step_inside:
            return
        if clip == "before":
            clip_grad_norm_(model.parameters(), max_norm)
        if not unscale_inside and step != "unscaled":
            scaler.unscale_(optimizer)
        if clip == "after":
            clip_grad_norm_(model.parameters(), max_norm)
        if step == "scaler":
            scaler.step(optimizer)
        elif step != "none":
            optimizer.step()
        if update:
            scaler.update()

    return attempt


def unscaled_after_the_first(model, optimizer, scaler, micro_batches, max_norm):
    """PyTorch lets this pass: the later gradients are added scaled."""
    optimizer.zero_grad()
    for index, (x, y) in enumerate(micro_batches):
        scaler.scale(F.cross_entropy(model(x), y) / len(micro_batches)).backward()
        if index == 0:
            scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()


# ---- resume ------------------------------------------------------------------------------------

NAMES = ("model", "optimizer", "scheduler", "scaler")


def resumed(checkpoint, model, optimizer, scheduler, scaler):
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    scheduler.load_state_dict(checkpoint["scheduler"])
    scaler.load_state_dict(checkpoint["scaler"])


def resumed_in_a_loop(checkpoint, *parts):
    for name, part in zip(NAMES, parts, strict=True):
        part.load_state_dict(checkpoint[name])


def resumed_without(missing):
    def attempt(checkpoint, *parts):
        for name, part in zip(NAMES, parts, strict=True):
            if name != missing:
                part.load_state_dict(checkpoint[name])

    return attempt


def resumed_with_another_scaler(checkpoint, model, optimizer, scheduler, scaler):
    resumed_without("scaler")(checkpoint, model, optimizer, scheduler, scaler)
    scaler = torch.amp.GradScaler("cpu")
    scaler.load_state_dict(checkpoint["scaler"])


# ---- two optimizers ----------------------------------------------------------------------------


def both(losses, optimizers, scaler):
    for loss in losses:
        scaler.scale(loss).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()


def both_unscaled(losses, optimizers, scaler):
    for loss, optimizer in zip(losses, optimizers, strict=True):
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
    scaler.update()


def update_for_each(losses, optimizers, scaler):
    for loss, optimizer in zip(losses, optimizers, strict=True):
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def update_in_between(losses, optimizers, scaler):
    for loss in losses:
        scaler.scale(loss).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
        scaler.update()


def update_after_the_first(losses, optimizers, scaler):
    for loss in losses:
        scaler.scale(loss).backward()
    scaler.step(optimizers[0])
    scaler.update()
    scaler.step(optimizers[1])


def only_the_first(losses, optimizers, scaler):
    scaler.scale(losses[0]).backward()
    scaler.step(optimizers[0])
    scaler.update()


def second_not_scaled(losses, optimizers, scaler):
    scaler.scale(losses[0]).backward()
    losses[1].backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()


def plain_steps(losses, optimizers, scaler):
    for loss, optimizer in zip(losses, optimizers, strict=True):
        scaler.scale(loss).backward()
        optimizer.step()


def both_no_update(losses, optimizers, scaler):
    for loss, optimizer in zip(losses, optimizers, strict=True):
        scaler.scale(loss).backward()
        scaler.step(optimizer)


def all_or_nothing(losses, optimizers, scaler):
    for loss in losses:
        scaler.scale(loss).backward()
    gradients = [p.grad for o in optimizers for g in o.param_groups for p in g["params"]]
    if not all(g.isfinite().all() for g in gradients):
        scaler.update(scaler.get_scale() / 2)
        return
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()


# ---- the tests ---------------------------------------------------------------------------------

RIGHT = {
    "clipped_step": [clipped, clipped_by_hand],
    "scheduled_step": [scheduled, scheduled_by_looking],
    "accumulated_step": [accumulated, accumulated_under_autocast, accumulated_divided_later],
    "resume": [resumed, resumed_in_a_loop],
    "two_optimizer_step": [both, both_unscaled],
}
WRONG = [
    ("clipped_step", clip_then_unscale, "First scaler.unscale_(optimizer), then clip"),
    ("clipped_step", clip_without_unscale, "First scaler.unscale_(optimizer), then clip"),
    ("clipped_step", no_clip, "nothing was clipped"),
    ("clipped_step", clip_values, "another length or direction"),
    ("clipped_step", no_norm, "return the norm"),
    ("clipped_step", scaled_norm, "it was taken before unscale_"),
    ("clipped_step", norm_after, "the norm before clipping is"),
    ("clipped_step", clipped_no_update, "did not count this step"),
    ("clipped_step", plain_step, "let scaler.step(optimizer) decide"),
    ("clipped_step", scaled_plain_step, "times too far"),
    ("clipped_step", twice, "unscale_ was called twice"),
    ("clipped_step", not_scaled, "before it had scaled a loss"),
    ("clipped_step", unscale_last, "unscale_ came after scaler.step"),
    ("clipped_step", does_nothing, "the weights did not move"),
    ("scheduled_step", always_scheduled, "AdamW: the step was skipped, but the scheduler moved"),
    ("scheduled_step", compared_too_early, "AdamW: the step was skipped, but the scheduler moved"),
    ("scheduled_step", scheduled_if_equal, "The scale *grew* in this step"),
    ("scheduled_step", scheduled_if_optimizer_ran, "fused=True: the step was skipped, but"),
    ("scheduled_step", scheduled_if_not_none, "scaler.step returns None in either case"),
    ("scheduled_step", scheduled_if_grown, "equal is good"),
    ("scheduled_step", scheduled_no_update, "is scaler.update() there"),
    ("scheduled_step", scheduled_no_step, "is scaler.step(optimizer) there"),
    ("scheduled_step", scheduled_plain_step, "use scaler.step(optimizer)"),
    ("scheduled_step", scheduled_no_return, "return True if the weights were updated"),
    ("scheduled_step", scheduled_inverted, "you return False after a step that was made"),
    ("scheduled_step", scheduled_twice, "the scheduler moved 2 times"),
    ("scheduled_step", does_nothing, "is scaler.step(optimizer) there"),
    ("accumulated_step", accumulation(divide=False), "4 times too large"),
    ("accumulated_step", accumulation(zero_inside=True), "zero_grad() belongs before the loop"),
    ("accumulated_step", accumulation(zero_first=False), "call zero_grad() before the loop"),
    ("accumulated_step", accumulation(step_inside=True), "made 4 steps for 4 micro-batches"),
    ("accumulated_step", accumulation(unscale_inside=True), "unscale_ was called twice"),
    ("accumulated_step", unscaled_after_the_first, "unscale_ after the last backward pass"),
    ("accumulated_step", accumulation(clip="no"), "nothing was clipped"),
    ("accumulated_step", accumulation(clip="before"), "clipped before unscale_"),
    ("accumulated_step", accumulation(clip="inside"), "Clip once, after the loop"),
    ("accumulated_step", accumulation(step="plain"), "must skip the whole step"),
    (
        "accumulated_step",
        accumulation(step="unscaled", update=False),
        "scaled gradients reached the optimizer",
    ),
    ("accumulated_step", accumulation(step="none"), "the weights did not move"),
    ("accumulated_step", accumulation(update=False), "counted 0 steps instead of one"),
    ("accumulated_step", does_nothing, "the weights did not move"),
    ("resume", resumed_without("model"), "still has its new, random weights"),
    ("resume", resumed_without("optimizer"), "AdamW begins with empty averages"),
    ("resume", resumed_without("scheduler"), "the scheduler counts from 0 again"),
    ("resume", resumed_without("scaler"), "the scaler starts again at its initial scale"),
    ("resume", resumed_with_another_scaler, "made inside your function, is forgotten"),
    ("resume", does_nothing, "still has its new, random weights"),
    ("two_optimizer_step", update_for_each, "update() was called more than once"),
    ("two_optimizer_step", update_in_between, "update() was called more than once"),
    ("two_optimizer_step", update_after_the_first, "another scale than its loss was scaled with"),
    ("two_optimizer_step", only_the_first, "the second optimizer did not move its weights"),
    ("two_optimizer_step", second_not_scaled, "its loss was not multiplied by it"),
    ("two_optimizer_step", plain_steps, "scaled gradients reached the first optimizer"),
    ("two_optimizer_step", both_no_update, "call scaler.update() at the end"),
    ("two_optimizer_step", all_or_nothing, "one optimizer overflowed and both were skipped"),
    ("two_optimizer_step", does_nothing, "the first optimizer did not move its weights"),
]


@pytest.mark.parametrize(
    "check, attempt", [(check, attempt) for check, answers in RIGHT.items() for attempt in answers]
)
def test_right_answers_pass(check, attempt, capsys):
    assert verdict(check, attempt, capsys).startswith(f"PASSED   {check}")


@pytest.mark.parametrize("check", RIGHT)
def test_the_stub_is_not_attempted(check, capsys):
    assert verdict(check, stub, capsys).startswith(f"TO DO    {check}: not attempted yet")


@pytest.mark.parametrize("check", RIGHT)
def test_broken_code_is_named(check, capsys):
    line = verdict(check, breaks, capsys)
    assert "your code raised NameError: name 'undefined_name' is not defined" in line


@pytest.mark.parametrize("check, attempt, hint", WRONG)
def test_each_mistake_has_its_own_hint(check, attempt, hint, capsys):
    line = verdict(check, attempt, capsys)
    assert line.startswith(f"NOT YET  {check}: ") and hint in line


@pytest.mark.parametrize("check", RIGHT)
def test_the_same_line_every_time_and_the_random_state_is_left_alone(check, capsys):
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    first = verdict(check, RIGHT[check][0], capsys)
    assert torch.equal(torch.rand(2), expected)
    assert verdict(check, RIGHT[check][0], capsys) == first
