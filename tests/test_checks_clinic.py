"""Checks of notebook 09: the patients themselves, right cures, and plausible wrong ones."""

import contextlib
from pathlib import Path

import nbformat
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_lab as lab

NOTEBOOK = Path(__file__).parent.parent / "notebooks" / "09_debugging_clinic.ipynb"
CELLS = {cell.id: cell for cell in nbformat.read(NOTEBOOK, as_version=4).cells}

# Patient, its function, what the check says about it as it came in, and what `lab.watch` says.
PATIENTS = {
    "mismatch": ("train_step", "two dtypes still meet", "dtype-mismatch"),
    "half": ("train", "who made the parameters FP16", "parameters-16-bit"),
    "accumulation": ("train", "unscale_ still runs more than once", "unscale-twice"),
    "finetuning": ("prepare", "it still holds the old head", "no-gradients"),
    "mask": ("attention", "still beyond FP16", "value-beyond-fp16"),
    "routing": ("mix", "under FP16 the buffer", "buffer-dtype"),
    "bce": ("loss_fn", "CUDA's autocast still refuses", None),
    "first-scale": ("make_scaler", "steps were skipped", "init-scale-too-high"),
    "clipping": ("train_step", "1024 times too small", "clip-before-unscale"),
    "schedule": ("train", "moved in every iteration", "scheduler-on-skip"),
    "twins": ("train_step", "multiplied by 1024 and divided by 2048", "update-between-steps"),
    "vanishing": ("train", "gradients are exactly 0", "fp16-without-scaler"),
    "stuck": ("train", "weights still stand still", "parameters-16-bit, updates-lost"),
    "resume": ("train", "The scaler has a state_dict()", "scaler-not-restored"),
    "scores": ("attention", "still NaN where q.k", "activation-overflow"),
    "blank": ("attention", "softmax over -inf alone", "loss-nonfinite"),
    "standardize": ("standardize", "0 divided by 0", "loss-nonfinite"),
    "exam": ("train_step", "batch norm's running statistics", "loss-nonfinite, buffers-nonfinite"),
    "function": ("Product", "two dtypes still meet", "dtype-mismatch"),
}

# By patient: the cures that must pass, and the wrong ones with a piece of their hint.
RIGHT = {patient: [] for patient in PATIENTS}
WRONG = {patient: [] for patient in PATIENTS}


def right(patient):
    def register(cure):
        RIGHT[patient].append(cure)
        return cure

    return register


def wrong(patient, hint):
    def register(cure):
        WRONG[patient].append((cure, hint))
        return cure

    return register


def fp16():
    return torch.autocast("cpu", dtype=torch.float16)


def bf16():
    return torch.autocast("cpu", dtype=torch.bfloat16)


def healthy_step(model, optimizer, scaler, images, labels):
    optimizer.zero_grad()
    with fp16():
        loss = F.cross_entropy(model(images), labels)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss.item()


def step_with(forward):
    """A healthy step with `loss = forward(model, images, labels)`."""

    def train_step(model, optimizer, scaler, images, labels):
        optimizer.zero_grad()
        loss = forward(model, images, labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return train_step


def verdict(patient, attempt, capsys):
    getattr(lab.checks, "heal_" + patient.replace("-", "_"))(attempt)
    captured = capsys.readouterr()
    assert captured.err == ""
    (line,) = captured.out.splitlines()
    return line


# --- 1: mismatch ---------------------------------------------------------------------------------

RIGHT["mismatch"] += [healthy_step]


@right("mismatch")
@step_with
def float_at_the_exit(model, images, labels):
    with fp16():
        features = model[:-1](images)
    return F.cross_entropy(model[-1](features.float()), labels)


@right("mismatch")
@step_with
def second_block(model, images, labels):
    with fp16():
        features = model[:-1](images)
    with bf16():
        logits = model[-1](features)
    return F.cross_entropy(logits.float(), labels)


@wrong("mismatch", "no layer runs in 16 bits any more")
@step_with
def no_autocast(model, images, labels):
    return F.cross_entropy(model(images), labels)


@wrong("mismatch", "the last layer was halved")
@step_with
def last_layer_halved(model, images, labels):
    with fp16():
        features = model[:-1](images)
    return F.cross_entropy(model[-1].half()(features).float(), labels)


@wrong("mismatch", "the first step was skipped")
@step_with
def loss_in_16_bits(model, images, labels):
    with fp16():
        logits = model(images)
    return F.cross_entropy(logits, labels)


@wrong("mismatch", "only the last layer learns")
@step_with
def detached(model, images, labels):
    with fp16():
        features = model[:-1](images).detach()
        return F.cross_entropy(model[-1](features), labels)


# --- 2: half -------------------------------------------------------------------------------------


def loop_of(step, before=lambda model: None, after=lambda model: None):
    def train(model, optimizer, scaler, batches):
        before(model)
        for images, labels in batches:
            step(model, optimizer, scaler, images, labels)
        after(model)

    return train


RIGHT["half"] += [
    loop_of(healthy_step),
    loop_of(healthy_step, nn.Module.float),
    loop_of(float_at_the_exit),
]


def without_scaler(model, optimizer, scaler, images, labels):
    optimizer.zero_grad()
    with fp16():
        loss = F.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()


WRONG["half"] += [
    (loop_of(without_scaler, nn.Module.half), "the weights are FP16"),
    (loop_of(without_scaler), "the scaler is not used"),
    (loop_of(healthy_step, nn.Module.bfloat16), "a scaler on CUDA refuses BF16"),
    (loop_of(no_autocast), "no layer runs in 16 bits any more"),
    (loop_of(no_autocast, nn.Module.half), "is autocast on?"),
    (loop_of(without_scaler, nn.Module.half, nn.Module.float), "the weights are FP16"),
    (loop_of(lambda *args: None), "the model was not called"),
]


# --- 3: accumulation -----------------------------------------------------------------------------


def accumulating(unscale="end", clip=True, step="end", update="end", zero=True):
    """The loop of patient 3, with each call "end" (of the accumulation), "each" time, or never."""

    def train(model, optimizer, scaler, micro_batches, accumulate=4):
        for i, (images, labels) in enumerate(micro_batches, start=1):
            with fp16():
                loss = F.cross_entropy(model(images), labels) / accumulate
            scaler.scale(loss).backward()
            now = ("end", "each") if i % accumulate == 0 else ("each",)
            if unscale in now:
                scaler.unscale_(optimizer)
                if clip:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            elif unscale is None and clip and "end" in now:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            if step in now:
                scaler.step(optimizer)
            if update in now:
                scaler.update()
            if step in now and zero:
                optimizer.zero_grad()

    return train


RIGHT["accumulation"] += [accumulating()]


@right("accumulation")
def in_groups(model, optimizer, scaler, micro_batches, accumulate=4):
    for first in range(0, len(micro_batches), accumulate):
        optimizer.zero_grad()
        for images, labels in micro_batches[first : first + accumulate]:
            with bf16():
                loss = F.cross_entropy(model(images), labels)
            scaler.scale(loss / accumulate).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1 * scaler.get_scale())
        assert norm > 0
        scaler.step(optimizer)
        scaler.update()


WRONG["accumulation"] += [
    (accumulating(unscale="each", update="each"), "update() in every micro-batch keeps"),
    (accumulating(unscale="each", update="each", step="each"), "one step for each micro-batch"),
    (accumulating(unscale=None, clip=False), "not clipped to a norm of 0.1"),
    (accumulating(unscale=None), "clipped while they were still scaled"),
    (accumulating(zero=False), "still there in the next"),
    (accumulating(update="each"), "update() runs in micro-batches without a step"),
    (accumulating(update=None), "unscale_ still runs more than once"),
]


# --- 4: finetuning -------------------------------------------------------------------------------


def new_head(model):
    model[-1] = nn.Linear(model[-1].in_features, 10)


@right("finetuning")
def head_only(model):
    model.requires_grad_(False)
    new_head(model)
    return torch.optim.AdamW(model[-1].parameters(), lr=1e-2)


@right("finetuning")
def whatever_can_learn(model):
    new_head(model)
    model[:-1].requires_grad_(False)
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


@right("finetuning")
def group_added_later(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model.requires_grad_(False)
    new_head(model)
    optimizer.add_param_group({"params": list(model[-1].parameters())})
    return optimizer


@wrong("finetuning", "the new head did not move")
def not_frozen(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    new_head(model)
    return optimizer


@wrong("finetuning", "the body moved")
def everything_learns(model):
    new_head(model)
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


@wrong("finetuning", "now the new head is frozen")
def frozen_last(model):
    new_head(model)
    model.requires_grad_(False)
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


@wrong("finetuning", "still has its old head")
def old_head(model):
    model[:-1].requires_grad_(False)
    return torch.optim.AdamW(model[-1].parameters(), lr=1e-2)


@wrong("finetuning", "expected the optimizer")
def no_return(model):
    head_only(model)


# --- 5: mask -------------------------------------------------------------------------------------


def masked(scores_of):
    def attention(q, k, v, hidden):
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        return scores_of(scores, hidden).softmax(-1) @ v

    return attention


def fused(q, k, v, hidden):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=~hidden)


def in_fp32(q, k, v, hidden):
    with torch.autocast("cpu", enabled=False):
        scores = q.float() @ k.float().transpose(-1, -2) / q.shape[-1] ** 0.5
        return scores.masked_fill(hidden, -1e9).softmax(-1) @ v.float()


def masked_after(q, k, v, hidden):
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    return scores.softmax(-1).masked_fill(hidden, 0) @ v


RIGHT["mask"] += [
    masked(lambda s, hidden: s.masked_fill(hidden, torch.finfo(s.dtype).min)),
    masked(lambda s, hidden: s.masked_fill(hidden, float("-inf"))),
    masked(lambda s, hidden: torch.where(hidden, -1e4, s)),
    masked(lambda s, hidden: s.float().masked_fill(hidden, -1e9)),
    fused,
    in_fp32,
]
WRONG["mask"] += [
    (masked(lambda s, hidden: s * ~hidden), "0 is not low"),
    (masked(lambda s, hidden: s), "the mask is not used"),
    (masked(lambda s, hidden: s.masked_fill(~hidden, torch.finfo(s.dtype).min)), "wrong way round"),
    (masked(lambda s, hidden: s.masked_fill(~hidden, float("-inf"))), "wrong way round"),
    (masked(lambda s, hidden: s.masked_fill(hidden, -100.0)), "larger than those"),
    (masked_after, "no longer add up to 1"),
    (masked(lambda s, hidden: 2 * s.masked_fill(hidden, -1e4)), "wrong weights"),
    (masked(lambda s, hidden: s.masked_fill(hidden, float("nan"))), "there is inf or NaN"),
    (masked(lambda s, hidden: s.masked_fill(hidden, -1e5)), "still beyond FP16"),
    (lambda q, k, v, hidden: fused(q, k, v, hidden).detach(), "the result has no graph"),
]


# --- 6: routing ----------------------------------------------------------------------------------


@right("routing")
def answers_converted(experts, images, choice):
    out = torch.zeros(len(images), 10)
    for number, expert in enumerate(experts):
        out[choice == number] = expert(images[choice == number]).float()
    return out


@right("routing")
def buffer_of_the_answers_dtype(experts, images, choice):
    answers = [expert(images[choice == number]) for number, expert in enumerate(experts)]
    out = torch.zeros(len(images), 10, dtype=answers[0].dtype)
    for number, answer in enumerate(answers):
        out[choice == number] = answer
    return out


@right("routing")
def everybody_answers(experts, images, choice):
    return torch.where(choice.unsqueeze(1) == 0, experts[0](images), experts[1](images))


@wrong("routing", "under FP32 the buffer")
def always_fp16(experts, images, choice):
    out = torch.zeros(len(images), 10, dtype=torch.float16)
    for number, expert in enumerate(experts):
        out[choice == number] = expert(images[choice == number])
    return out


@wrong("routing", "in the wrong order")
def one_after_the_other(experts, images, choice):
    return torch.cat([expert(images[choice == number]) for number, expert in enumerate(experts)])


@wrong("routing", "do not run in FP16")
def island(experts, images, choice):
    with torch.autocast("cpu", enabled=False):
        return answers_converted(experts, images, choice)


@wrong("routing", "do not learn")
def no_graph(experts, images, choice):
    with torch.no_grad():
        return answers_converted(experts, images, choice)


@wrong("routing", "not the experts' answers")
def first_expert_only(experts, images, choice):
    return experts[0](images)


# --- 7: bce --------------------------------------------------------------------------------------


@right("bce")
def with_logits(model, images, is_shoe):
    return F.binary_cross_entropy_with_logits(model(images).squeeze(1), is_shoe)


@right("bce")
def by_logsigmoid(model, images, is_shoe):
    logits = model(images).squeeze(1).float()
    return -(is_shoe * F.logsigmoid(logits) + (1 - is_shoe) * F.logsigmoid(-logits)).mean()


@right("bce")
def fp32_island(model, images, is_shoe):
    logits = model(images).squeeze(1)
    with torch.autocast(images.device.type, enabled=False):
        return F.binary_cross_entropy(logits.float().sigmoid(), is_shoe)


@wrong("bce", "the loss is inf or NaN")
def by_hand(model, images, is_shoe):
    p = torch.sigmoid(model(images)).squeeze(1)
    return -(is_shoe * torch.log(p) + (1 - is_shoe) * torch.log(1 - p)).mean()


@wrong("bce", "the loss is inf or NaN")
def by_hand_with_eps(model, images, is_shoe):
    p = torch.sigmoid(model(images)).squeeze(1)
    return -(is_shoe * torch.log(p + 1e-8) + (1 - is_shoe) * torch.log(1 - p + 1e-8)).mean()


@wrong("bce", "never corrected")
def island_too_late(model, images, is_shoe):
    p = torch.sigmoid(model(images)).squeeze(1)
    with torch.autocast(images.device.type, enabled=False):
        return F.binary_cross_entropy(p.float(), is_shoe)


@wrong("bce", "never corrected")
def clamped(model, images, is_shoe):
    p = torch.sigmoid(model(images)).squeeze(1).clamp(1e-3, 1 - 1e-3)
    return -(is_shoe * torch.log(p) + (1 - is_shoe) * torch.log(1 - p)).mean()


@wrong("bce", "CUDA's autocast still refuses")
def island_for_the_wrong_device(model, images, is_shoe):
    with torch.autocast("cpu", enabled=False):
        return F.binary_cross_entropy(model(images).float().sigmoid().squeeze(1), is_shoe)


@wrong("bce", "the sigmoid is taken twice")
def sigmoid_twice(model, images, is_shoe):
    return F.binary_cross_entropy_with_logits(torch.sigmoid(model(images)).squeeze(1), is_shoe)


@wrong("bce", "the sum over the batch")
def summed(model, images, is_shoe):
    logits = model(images).squeeze(1)
    return F.binary_cross_entropy_with_logits(logits, is_shoe, reduction="sum")


@wrong("bce", "not that of binary cross-entropy")
def doubled(model, images, is_shoe):
    return 2 * with_logits(model, images, is_shoe)


# --- 8: first-scale ------------------------------------------------------------------------------


def scaler_with(**options):
    return lambda: torch.amp.GradScaler("cpu", **options)


RIGHT["first-scale"] += [
    scaler_with(init_scale=256),
    scaler_with(init_scale=64.0),
    scaler_with(init_scale=200.0, growth_interval=500),
]
WRONG["first-scale"] += [
    (scaler_with(enabled=False), "switched off"),
    (scaler_with(init_scale=1.0), "needlessly low"),
    (scaler_with(init_scale=1024.0), "steps were skipped"),
    (scaler_with(init_scale=256.0, growth_interval=2), "leave growth_interval"),
    (lambda: 64.0, "expected a torch.amp.GradScaler"),
]


# --- 9: clipping ---------------------------------------------------------------------------------


def clipping(*calls):
    def train_step(model, optimizer, scaler, images, labels):
        optimizer.zero_grad()
        with fp16():
            loss = F.cross_entropy(model(images), labels)
        scaler.scale(loss).backward()
        for call in calls:
            call(model, optimizer, scaler)
        scaler.update()

    return train_step


def unscale(model, optimizer, scaler):
    scaler.unscale_(optimizer)


def clip(model, optimizer, scaler):
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def clip_scaled(model, optimizer, scaler):
    nn.utils.clip_grad_norm_(model.parameters(), 0.5 * scaler.get_scale())


def step(model, optimizer, scaler):
    scaler.step(optimizer)


def plain_step(model, optimizer, scaler):
    optimizer.step()


def divide(model, optimizer, scaler):
    for p in model.parameters():
        p.grad /= scaler.get_scale()


RIGHT["clipping"] += [clipping(unscale, clip, step), clipping(clip_scaled, step)]
WRONG["clipping"] += [
    (clipping(step), "not clipped at all"),
    (clipping(clip, unscale, step), "1024 times too small"),
    (clipping(divide, step), "twice"),
    (clipping(unscale, unscale, clip, step), "unscale_ was called twice"),
    (clipping(step, unscale, clip), "unscale_ was called twice, or after step"),
    (clipping(unscale, clip, plain_step), "the step was not skipped"),
    (clipping(unscale, clip), "the optimizer made no step"),
]


# --- 10: schedule --------------------------------------------------------------------------------


def scheduling(tick, precision=fp16):
    """`tick(scheduler, loss, before, after, optimizer)` is called after update()."""

    def train(model, optimizer, scaler, scheduler, batches):
        for images, labels in batches:
            optimizer.zero_grad()
            with precision():
                loss = F.cross_entropy(model(images), labels, reduction="sum")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            before = scaler.get_scale()
            scaler.update()
            tick(scheduler, loss, before, scaler.get_scale(), optimizer)

    return train


def tick_if(condition):
    def tick(scheduler, *seen):
        if condition(*seen):
            scheduler.step()

    return tick


@right("schedule")
def asks_found_inf(model, optimizer, scaler, scheduler, batches):
    for images, labels in batches:
        optimizer.zero_grad()
        with fp16():
            loss = F.cross_entropy(model(images), labels, reduction="sum")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        finite = all(p.grad.isfinite().all() for p in model.parameters())
        scaler.step(optimizer)
        scaler.update()
        if finite:
            scheduler.step()


def counts_calls(model, optimizer, scaler, scheduler, batches):
    """Right for SGD; a fused optimizer is called, and skips by itself."""
    calls = []
    hook = optimizer.register_step_post_hook(lambda *_: calls.append(1))
    for batch in batches:
        calls.clear()
        scheduling(lambda *_: None)(model, optimizer, scaler, scheduler, [batch])
        if calls:
            scheduler.step()
    hook.remove()


RIGHT["schedule"] += [scheduling(tick_if(lambda loss, before, after, optimizer: after >= before))]
WRONG["schedule"] += [
    (scheduling(tick_if(lambda loss, *_: loss.isfinite())), "Was the loss inf? No"),
    (scheduling(tick_if(lambda loss, before, after, *_: after == before)), "compare with >="),
    (counts_calls, "fused AdamW"),
    (scheduling(tick_if(lambda *_: False)), "the schedule never moved"),
    (
        scheduling(tick_if(lambda loss, before, after, *_: after < before)),
        "stands still in some real steps",
    ),
    (
        scheduling(tick_if(lambda _, before, after, *o: after >= before), contextlib.nullcontext),
        "not skipped: keep",
    ),
]


# --- 11: twins -----------------------------------------------------------------------------------


def two(*calls):
    def train_step(body, head, body_optimizer, head_optimizer, scaler, images, labels):
        optimizers = {"body": body_optimizer, "head": head_optimizer}
        for optimizer in optimizers.values():
            optimizer.zero_grad()
        with fp16():
            loss = F.cross_entropy(head(body(images)), labels)
        scaler.scale(loss).backward()
        for call in calls:
            name, *optimizer = call.split()
            getattr(scaler, name)(*(optimizers[o] for o in optimizer))

    return train_step


@right("twins")
def both_or_none(body, head, body_optimizer, head_optimizer, scaler, images, labels):
    body_optimizer.zero_grad()
    head_optimizer.zero_grad()
    with fp16():
        loss = F.cross_entropy(head(body(images)), labels)
    scaler.scale(loss).backward()
    scaler.unscale_(body_optimizer)
    scaler.unscale_(head_optimizer)
    parameters = [*body.parameters(), *head.parameters()]
    if all(p.grad.isfinite().all() for p in parameters):
        scaler.step(body_optimizer)
        scaler.step(head_optimizer)
    scaler.update()


RIGHT["twins"] += [
    two("step body", "step head", "update"),
    two("unscale_ head", "step head", "unscale_ body", "step body", "update"),
]
WRONG["twins"] += [
    (two("step head", "update", "step body", "update"), "the body's step is half"),
    (two("step body", "step head"), "scaler.update() is missing"),
    (two("step body", "update"), "the head did not move"),
    (two("step body", "step head", "update", "update"), "called twice for one step"),
    (two("update", "step body", "step head"), "or before it"),
    (two("step body", "step body", "step head", "update"), "the scaler says"),
]


@wrong("twins", "the head's step is 1e+03 times")
def head_without_scaler(body, head, body_optimizer, head_optimizer, scaler, images, labels):
    body_optimizer.zero_grad()
    head_optimizer.zero_grad()
    with fp16():
        loss = F.cross_entropy(head(body(images)), labels)
    scaler.scale(loss).backward()
    scaler.step(body_optimizer)
    head_optimizer.step()
    scaler.update()


# --- 12: vanishing -------------------------------------------------------------------------------


def accumulate_with(new_scaler, precision=fp16, again=False):
    def train(model, optimizer, micro_batches, accumulate=64):
        scaler = new_scaler()
        for i, (words, target) in enumerate(micro_batches, start=1):
            if again:
                scaler = new_scaler()
            with precision():
                loss = F.cross_entropy(model(words), target) / accumulate
            scaler.scale(loss).backward()
            if i % accumulate == 0:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()

    return train


def multiplied(factor, divide):
    def train(model, optimizer, micro_batches, accumulate=64):
        for i, (words, target) in enumerate(micro_batches, start=1):
            with fp16():
                loss = F.cross_entropy(model(words), target) / accumulate
            (factor * loss).backward()
            if i % accumulate == 0:
                grads = [p.grad for p in model.parameters()]
                if divide:
                    torch._foreach_div_(grads, factor)
                if all(g.isfinite().all() for g in grads):
                    optimizer.step()
                optimizer.zero_grad()

    return train


def cpu_scaler():
    return torch.amp.GradScaler("cpu")


def no_scaler():
    return torch.amp.GradScaler("cpu", enabled=False)


RIGHT["vanishing"] += [
    accumulate_with(cpu_scaler),
    accumulate_with(no_scaler, bf16),
    multiplied(256.0, divide=True),
]
WRONG["vanishing"] += [
    (accumulate_with(no_scaler), "gradients are exactly 0"),
    (accumulate_with(no_scaler, contextlib.nullcontext), "no layer runs in 16 bits"),
    (accumulate_with(cpu_scaler, again=True), "is a new scaler made"),
    (multiplied(2.0**16, divide=False), "more than a hundred times too large"),
    (multiplied(2.0**16, divide=True), "no step at all"),
    (multiplied(64.0, divide=False), "64 times as far"),
]


# --- 13: stuck -----------------------------------------------------------------------------------


def bf16_loop(before=lambda model, optimizer: None, precision=bf16, cast=False):
    def train(model, optimizer, batches):
        before(model, optimizer)
        for images, labels in batches:
            optimizer.zero_grad()
            with precision():
                logits = model(images.bfloat16() if cast else images)
                loss = F.cross_entropy(logits.float(), labels)
            loss.backward()
            optimizer.step()

    return train


@right("stuck")
def master_weights(model, optimizer, batches):
    """FP32 weights in the optimizer, and BF16 copies of them that compute."""
    masters = [p.detach().clone() for p in model.parameters()]
    working = [m.bfloat16().requires_grad_() for m in masters]
    names = [name for name, _ in model.named_parameters()]
    for images, labels in batches:
        copies = dict(zip(names, working, strict=True))
        logits = torch.func.functional_call(model, copies, images.bfloat16())
        gradients = torch.autograd.grad(F.cross_entropy(logits.float(), labels), working)
        for p, gradient in zip(model.parameters(), gradients, strict=True):
            p.grad = gradient.float()
        optimizer.step()
        working = [p.detach().bfloat16().requires_grad_() for p in model.parameters()]


def to_bf16(model, optimizer):
    model.bfloat16()


def raise_lr(model, optimizer):
    model.bfloat16()
    optimizer.param_groups[0]["lr"] *= 30


RIGHT["stuck"] += [bf16_loop()]
WRONG["stuck"] += [
    (bf16_loop(raise_lr, cast=True), "the learning rate was changed"),
    (bf16_loop(to_bf16), "weights still stand still"),
    (bf16_loop(precision=contextlib.nullcontext), "no layer runs in 16 bits"),
    (bf16_loop(precision=fp16), "needs a scaler"),
]


@wrong("stuck", "the steps are larger")
def many_steps(model, optimizer, batches):
    bf16_loop()(model, optimizer, batches * 3)


# --- 14: resume ----------------------------------------------------------------------------------


def resuming(save, load):
    def train(model, optimizer, scaler, batches, checkpoint=None):
        if checkpoint:
            load(checkpoint, model, optimizer, scaler)
        for images, labels in batches:
            healthy_step(model, optimizer, scaler, images, labels)
        return save(model, optimizer, scaler)

    return train


def save_all(*things):
    return {str(i): thing.state_dict() for i, thing in enumerate(things)}


def load_all(checkpoint, *things):
    for i, thing in enumerate(things):
        thing.load_state_dict(checkpoint[str(i)])


def save_scale(model, optimizer, scaler):
    return save_all(model, optimizer) | {"scale": scaler.get_scale()}


def load_scale(checkpoint, model, optimizer, scaler):
    load_all(checkpoint, model, optimizer)
    scaler.load_state_dict(scaler.state_dict() | {"scale": checkpoint["scale"]})


def save_scaler_itself(model, optimizer, scaler):
    return save_all(model, optimizer) | {"scaler": scaler}


def load_two(checkpoint, model, optimizer, scaler):
    load_all(checkpoint, model, optimizer)


def load_without_optimizer(checkpoint, model, optimizer, scaler):
    model.load_state_dict(checkpoint["0"])
    scaler.load_state_dict(checkpoint["2"])


@right("resume")
def counts_and_scale(model, optimizer, scaler, batches, checkpoint=None):
    if checkpoint is not None:
        load_two(checkpoint, model, optimizer, scaler)
        scaler.load_state_dict(
            scaler.state_dict() | {"scale": checkpoint["s"], "_growth_tracker": checkpoint["g"]}
        )
    for batch in batches:
        healthy_step(model, optimizer, scaler, *batch)
    state = scaler.state_dict()
    return save_all(model, optimizer) | {"s": state["scale"], "g": state["_growth_tracker"]}


RIGHT["resume"] += [resuming(save_all, load_all)]
WRONG["resume"] += [
    (resuming(save_all, load_two), "The scaler has a state_dict(), too"),
    (resuming(save_scale, load_scale), "count of good steps"),
    (resuming(save_scaler_itself, load_two), "the checkpoint holds objects"),
    (resuming(save_all, load_without_optimizer), "not bit-equal"),
    (resuming(lambda *things: None, load_all), "expected the checkpoint"),
]


@wrong("resume", "The scaler has a state_dict(), too")
def saved_before_the_loop(model, optimizer, scaler, batches, checkpoint=None):
    if checkpoint:
        load_all(checkpoint, model, optimizer, scaler)
    early = scaler.state_dict()
    for batch in batches:
        healthy_step(model, optimizer, scaler, *batch)
    return save_all(model, optimizer) | {"2": early}


# --- 15: scores ----------------------------------------------------------------------------------


def scored(scores_of):
    return lambda q, k, v: scores_of(q, k).softmax(-1).to(v.dtype) @ v


def island_scores(q, k):
    with torch.autocast("cpu", enabled=False):
        return q.float() @ k.float().mT / 8


RIGHT["scores"] += [
    scored(lambda q, k: (q / 8) @ k.mT),
    scored(lambda q, k: (q * 64**-0.25) @ (k * 64**-0.25).mT),
    scored(island_scores),
    lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
]
WRONG["scores"] += [
    (scored(lambda q, k: (q @ k.mT).float() / 8), "comes too late"),
    (scored(lambda q, k: q.float() @ k.float().mT / 8), "undone by autocast"),
    (scored(lambda q, k: (q @ k.mT).clamp(max=65504) / 8), "the wrong answer"),
    (scored(lambda q, k: (q @ k.mT / 8).nan_to_num()), "the wrong answer"),
    (scored(lambda q, k: (q / 64) @ k.mT), "ordinary ones are not"),
    (lambda q, k, v: v.mean(1), "return a tensor of v's shape"),
]


# --- 16: blank -----------------------------------------------------------------------------------


def lowest(q, k, v, hidden):
    return masked(lambda s, h: s.masked_fill(h, torch.finfo(s.dtype).min))(q, k, v, hidden)


def weights_masked_twice(q, k, v, hidden):
    scores = q @ k.mT / q.shape[-1] ** 0.5
    weights = scores.masked_fill(hidden, torch.finfo(scores.dtype).min).softmax(-1)
    return weights.masked_fill(hidden, 0) @ v


def zero_where_blank(q, k, v, hidden):
    blank = hidden.all(-1, keepdim=True)
    out = masked(lambda s, h: s.masked_fill(h & ~blank, float("-inf")))(q, k, v, hidden)
    return out.masked_fill(blank, 0)


def nan_to_num_weights(q, k, v, hidden):
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(hidden, float("-inf"))
    return scores.softmax(-1).nan_to_num(0.0) @ v


def nan_to_num_and_a_mask_to_add(q, k, v, hidden):
    mask = torch.zeros_like(hidden, dtype=q.dtype).masked_fill(hidden, float("-inf"))
    return (q @ k.mT / q.shape[-1] ** 0.5 + mask).softmax(-1).nan_to_num(0.0) @ v


def nan_to_num_output(q, k, v, hidden):
    return masked(lambda s, h: s.masked_fill(h, float("-inf")))(q, k, v, hidden).nan_to_num(0.0)


RIGHT["blank"] += [weights_masked_twice, zero_where_blank, fused, nan_to_num_weights]
WRONG["blank"] += [
    (lowest, "the average of all that is hidden"),
    (nan_to_num_and_a_mask_to_add, "there are NaN gradients"),
    (nan_to_num_output, "there are NaN gradients"),
    (lambda q, k, v, hidden: 0 * fused(q, k, v, hidden), "the other lines are no longer right"),
]


# --- 17: standardize -----------------------------------------------------------------------------


def standardized(eps, convert=lambda x: x):
    def standardize(x):
        x = convert(x)
        return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + eps)

    return standardize


def eps_in_the_root(x):
    x = x.float()
    centered = x - x.mean(-1, keepdim=True)
    return centered / (centered.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def squares_in_16_bits(x):
    centered = x - x.mean(-1, keepdim=True)
    return centered / (centered.square().sum(-1, keepdim=True) / x.shape[-1] + 1e-4).sqrt()


RIGHT["standardize"] += [
    lambda x: F.layer_norm(x.float(), x.shape[-1:]),
    standardized(1e-3, torch.Tensor.float),
    eps_in_the_root,
]
WRONG["standardize"] += [
    (standardized(1e-8, torch.Tensor.float), "backward multiplies by 1/eps"),
    (standardized(0.1), "the eps is too large"),
    (lambda x: standardized(1e-8)(x).nan_to_num(0.0).detach(), "no graph"),
    (standardized(1e-8, torch.Tensor.bfloat16), "backward multiplies by 1/eps"),
    (lambda x: x - x.mean(-1, keepdim=True), "off by more than 5 %"),
    (squares_in_16_bits, "off by more than 5 %"),
]


# --- 18: exam ------------------------------------------------------------------------------------


def bf16_step(model, optimizer, scaler, images, labels):
    optimizer.zero_grad()
    with bf16():
        loss = F.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()


def restore_on_skip(model, optimizer, scaler, images, labels):
    before = [buffer.clone() for buffer in model.buffers()]
    scale = scaler.get_scale()
    loss = healthy_step(model, optimizer, scaler, images, labels)
    if scaler.get_scale() < scale:
        for buffer, old in zip(model.buffers(), before, strict=True):
            buffer.copy_(old)
    return loss


def refuse_damaged(model, optimizer, scaler, images, labels):
    if images.abs().max() < 1e3:
        return healthy_step(model, optimizer, scaler, images, labels)
    return None


@step_with
def fp32_into_batch_norm(model, images, labels):
    x = images
    for module in model:
        following = isinstance(module, nn.Linear) and module.in_features == 12
        with torch.autocast("cpu", dtype=torch.float16, enabled=not following):
            x = module(x)
    return F.cross_entropy(x.float(), labels)


def look_at_the_loss(model, optimizer, scaler, images, labels):
    optimizer.zero_grad()
    with fp16():
        loss = F.cross_entropy(model(images), labels)
    if not loss.isfinite():
        return
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


@step_with
def loss_without_nan(model, images, labels):
    with fp16():
        return F.cross_entropy(model(images), labels).nan_to_num(0.0)


def in_eval_mode(model, optimizer, scaler, images, labels):
    model.eval()
    return healthy_step(model, optimizer, scaler, images, labels)


def reset_each_time(model, optimizer, scaler, images, labels):
    loss = healthy_step(model, optimizer, scaler, images, labels)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.reset_running_stats()
    return loss


RIGHT["exam"] += [restore_on_skip, bf16_step, refuse_damaged, fp32_into_batch_norm]
WRONG["exam"] += [
    (look_at_the_loss, "looking at the loss, or skipping the step, comes after"),
    (loss_without_nan, "looking at the loss, or skipping the step, comes after"),
    (in_eval_mode, "running statistics never moved"),
    (reset_each_time, "running statistics never moved"),
    (no_autocast, "no layer runs in 16 bits"),
]


# --- 19: function --------------------------------------------------------------------------------


def product(forward_by=lambda f: f, backward_by=lambda f: f, cast=lambda t, grad: t, keep=None):
    class Product(torch.autograd.Function):
        @staticmethod
        @forward_by
        def forward(ctx, x, weight):
            if keep is not None:
                x, weight = x.to(keep), weight.to(keep)
            ctx.save_for_backward(x, weight)
            return x @ weight.T

        @staticmethod
        @backward_by
        def backward(ctx, grad):
            x, weight = (cast(t, grad) for t in ctx.saved_tensors)
            return grad @ weight, grad.T @ x

    return Product


def custom_fwd(**options):
    return torch.amp.custom_fwd(device_type="cpu", **options)


custom_bwd = torch.amp.custom_bwd(device_type="cpu")


class Transposed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return (grad @ weight.to(grad.dtype)) * 2, grad.T @ x.to(grad.dtype)


RIGHT["function"] += [
    product(custom_fwd(), custom_bwd),
    product(cast=lambda t, grad: t.to(grad.dtype)),
]
WRONG["function"] += [
    (product(custom_fwd()), "two dtypes still meet"),
    (product(backward_by=custom_bwd), "custom_bwd needs custom_fwd"),
    (product(custom_fwd(cast_inputs=torch.float32), custom_bwd), "now runs in FP32"),
    (product(custom_fwd(cast_inputs=torch.float16), custom_bwd), "do not hard-code"),
    (product(cast=lambda t, grad: t.half()), "two dtypes still meet"),
    (Transposed, "the gradient of x is wrong"),
]


# --- the tests -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def clinic():
    """The notebook's own patients, by name: its code cells, run up to each of them."""
    patients, names = {}, {"lab": lab}
    for cell_id in ("ward", "healthy", "reader"):
        exec(CELLS[cell_id].source, names)
    for patient, (function, _, _) in PATIENTS.items():
        exec(CELLS[f"patient-{patient}"].source, names)
        patients[patient] = names[function]
    return patients


def cases(table):
    return [
        pytest.param(patient, *(cure if isinstance(cure, tuple) else (cure,)), id=f"{patient}-{i}")
        for patient, cures in table.items()
        for i, cure in enumerate(cures)
    ]


def test_enough_cases():
    assert len(PATIENTS) >= 14
    for patient in PATIENTS:
        assert len(RIGHT[patient]) >= 2, patient
        assert len({hint for _, hint in WRONG[patient]}) >= 2, patient
        assert len(WRONG[patient]) >= 3, patient


@pytest.mark.parametrize("patient", PATIENTS)
def test_the_patient_as_it_came_in_is_refused(patient, clinic, capsys):
    line = verdict(patient, clinic[patient], capsys)
    assert line.startswith("NOT YET") and PATIENTS[patient][1] in line, line


@pytest.mark.parametrize("patient, cure", cases(RIGHT))
def test_every_right_cure_passes(patient, cure, capsys):
    assert verdict(patient, cure, capsys).startswith("PASSED")


@pytest.mark.parametrize("patient, cure, hint", cases(WRONG))
def test_each_wrong_cure_has_its_hint(patient, cure, hint, capsys):
    line = verdict(patient, cure, capsys)
    assert line.startswith("NOT YET") and hint in line, line


@pytest.mark.parametrize("patient", PATIENTS)
def test_a_stub_is_to_do(patient, capsys):
    def stub(*args, **kwargs):
        raise NotImplementedError

    assert verdict(patient, stub, capsys).startswith("TO DO")


@pytest.mark.parametrize("patient", PATIENTS)
def test_junk_does_not_crash_the_check(patient, capsys):
    assert verdict(patient, lambda *args, **kwargs: None, capsys).startswith("NOT YET")


@pytest.mark.parametrize("patient", PATIENTS)
def test_watch_names_the_cause(patient):
    """As stored in the notebook, which nbval runs again: the second opinion before the stub."""
    cells = list(CELLS.values())
    following = cells[cells.index(CELLS[f"patient-{patient}"]) :]
    found = None
    for cell in following:
        if cell.source.strip() == "second_opinion()":
            (output,) = cell.outputs
            found = output.text.strip().removeprefix("watch: ")
        if "raise NotImplementedError" in cell.source:
            break
    assert found == PATIENTS[patient][2]


def test_the_random_state_is_left_alone(clinic, capsys):
    torch.manual_seed(5)
    expected = torch.rand(2)
    for patient in PATIENTS:
        torch.manual_seed(5)
        verdict(patient, RIGHT[patient][0], capsys)
        assert torch.equal(torch.rand(2), expected), patient
