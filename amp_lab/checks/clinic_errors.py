"""Exercises of notebook 09, ward A: loops that raise an error."""

import torch
import torch.nn.functional as F
from torch import nn

from ..dryrun import dry_run
from .clinic_bench import (
    HALF,
    Patient,
    distance,
    fp32_update,
    must_be_differentiable,
    samples,
    treat,
)
from .exercise import Hint, exercise

__all__ = [
    "heal_accumulation",
    "heal_bce",
    "heal_finetuning",
    "heal_half",
    "heal_mask",
    "heal_mismatch",
    "heal_routing",
]


@exercise
def heal_mismatch(attempt):
    """Check `train_step(model, optimizer, scaler, images, labels)`: no tensor leaves too early."""
    (x, y), *_ = batches = samples(1)
    patient = Patient(init_scale=2.0**16)
    try:
        treat(attempt, patient.model, patient.optimizer, patient.scaler, x, y)
    except RuntimeError as error:
        if "same dtype" in str(error):
            raise Hint(
                "two dtypes still meet in one matrix product: the features are 16 bits wide, the "
                "weights of the last layer 32. Either both enter autocast, or the features leave it "
                "as FP32."
            ) from None
        raise
    except ValueError as error:
        if "FP16 gradients" in str(error):
            raise Hint(
                "the last layer was halved, and so are its gradients, which the scaler refuses. Keep "
                "FP32 weights."
            ) from None
        raise
    patient.must_be_mixed()
    if not patient.update.any() and patient.scaler.get_scale() < 2.0**16:
        raise Hint(
            "it runs, but the first step was skipped. The loss was computed from 16-bit logits outside "
            "autocast, in 16 bits: its gradient is the scale itself, and 65536 is inf in FP16. Take "
            "the loss into the block, too."
        )
    body = slice(0, 12 * 16 + 16)
    if patient.update.any() and not patient.update[body].any():
        raise Hint("only the last layer learns: the features have lost their graph on the way.")
    patient.must_match(fp32_update(batches), {})
    return "model and loss agree on their dtypes, and the step is that of FP32."


@exercise
def heal_half(attempt):
    """Check `train(model, optimizer, scaler, batches)`: FP32 weights, 16-bit products, a scaler."""
    batches = samples(3)
    patient = Patient()
    try:
        treat(attempt, patient.model, patient.optimizer, patient.scaler, batches)
    except ValueError as error:
        if "FP16 gradients" in str(error):
            raise Hint(
                "there are still FP16 gradients. A gradient has the dtype of its parameter: who made "
                "the parameters FP16?"
            ) from None
        raise
    except RuntimeError as error:
        if "same dtype" in str(error):
            raise Hint(
                "the weights and the images have different dtypes: is autocast on?"
            ) from None
        raise
    patient.must_be_mixed()
    if torch.float16 in patient.outputs and not patient.scaler.steps:
        raise Hint(
            "FP32 weights and FP16 products, but the scaler is not used: small gradients flush to 0, "
            "and an overflow is not skipped."
        )
    patient.must_match(fp32_update(batches), {})
    return "FP32 weights, 16-bit products, and the steps of FP32."


@exercise
def heal_accumulation(attempt):
    """Check `train(model, optimizer, scaler, micro_batches, accumulate=4)`: one update in four."""
    batches = samples(8)
    patient = Patient()
    try:
        treat(attempt, patient.model, patient.optimizer, patient.scaler, batches)
    except RuntimeError as error:
        if "unscale_" in str(error):
            raise Hint(
                "unscale_ still runs more than once between two updates. It belongs where the sum of "
                "the micro-batches is complete, with clip, step and update."
            ) from None
        if "step()" in str(error):
            raise Hint("step runs again before update(): call update() after each step.") from None
        raise
    except AssertionError as error:
        if "inf checks" in str(error):
            raise Hint(
                "update() runs in micro-batches without a step. It belongs where the sum is complete, "
                "after step."
            ) from None
        raise
    patient.must_be_mixed()
    if patient.scaler.updates == len(batches) and patient.scaler.steps == 2:
        raise Hint(
            "update() in every micro-batch keeps the scaler quiet, but the sum is wrong: unscaled "
            "gradients of one micro-batch, and 1024 times larger ones of the next."
        )
    right = {"accumulate": 4, "max_norm": 0.1}
    mistakes = {
        "there was one step for each micro-batch, eight in all: four of them should share one.": (
            fp32_update(batches, max_norm=0.1)
        ),
        "the gradients were not clipped to a norm of 0.1.": fp32_update(batches, accumulate=4),
        "the gradients were clipped while they were still scaled, 1024 times too large: unscale_, "
        "then clip.": fp32_update(batches, **right | {"max_norm": 0.1 / 1024}),
    }
    patient.must_match(fp32_update(batches, **right), mistakes)
    unscaled = Patient(init_scale=1.0)  # old gradients are not drowned by the scale
    treat(attempt, unscaled.model, unscaled.optimizer, unscaled.scaler, batches)
    hint = "gradients of one update are still there in the next: zero_grad() belongs between them."
    if distance(unscaled.update, fp32_update(batches, **right)) > 0.03:
        raise Hint(hint)
    return "unscale, clip, step, update: once in four micro-batches."


@exercise
def heal_finetuning(attempt):
    """Check `prepare(model)`: it returns an optimizer of the new head, and of nothing else."""
    patient = Patient()
    old_head = patient.model[-1]
    body = patient.model[0].weight.detach().clone()
    optimizer = treat(attempt, patient.model)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise Hint(f"prepare returned {type(optimizer).__name__}, expected the optimizer.")
    head = patient.model[-1]
    if head is old_head:
        raise Hint("the model still has its old head: the last layer must be a new nn.Linear.")
    before = head.weight.detach().clone()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for x, y in samples(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(treat(patient.model, x), y)
        if not loss.requires_grad:
            raise Hint("now the new head is frozen, too: nothing is left that could learn.")
        scaler.scale(loss).backward()
        try:
            scaler.step(optimizer)
        except AssertionError:
            raise Hint(
                "none of the optimizer's parameters has a gradient: it still holds the old head, which "
                "is no longer part of the model. Make the optimizer after the new head."
            ) from None
        scaler.update()
    if torch.equal(head.weight, before):
        raise Hint(
            "the new head did not move: the optimizer does not hold its parameters. Make the optimizer "
            "after the new head."
        )
    if not torch.equal(patient.model[0].weight, body):
        raise Hint("the body moved: what it has learned, it shall keep. Freeze it.")
    return "the new head learns, the body stays."


# --- attention with a mask -----------------------------------------------------------------------

PRECISIONS = (torch.float32, torch.float16, torch.bfloat16)


def attention_inputs(dtype: torch.dtype, size: int = 8):
    """q, k, v of shape (3, 5, size), and which keys are hidden; the second sample's scores are low."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(3, 5, size, generator=generator) for _ in range(3))
    q[1, :, 0], k[1, :, 0] = 30.0, -30.0  # scores of about -300
    hidden = torch.zeros(3, 1, 5, dtype=torch.bool)
    hidden[0, 0, 3:] = hidden[1, 0, 0] = True
    return *(t.to(dtype).requires_grad_() for t in (q, k, v)), hidden


def exact_weights(q, k, hidden=None) -> torch.Tensor:
    """The attention weights in FP64."""
    scores = q.detach().double() @ k.detach().double().transpose(-1, -2) / q.shape[-1] ** 0.5
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(-1)


def under_autocast(dtype: torch.dtype):
    return torch.autocast(
        "cpu",
        torch.bfloat16 if dtype is torch.float32 else dtype,
        enabled=dtype is not torch.float32,
    )


@exercise
def heal_mask(attempt):
    """Check `attention(q, k, v, hidden)`: hidden keys have no influence, in three precisions."""
    for dtype in PRECISIONS:
        q, k, v, hidden = attention_inputs(dtype)
        try:
            with under_autocast(dtype):
                out = treat(attempt, q, k, v, hidden)
                other = treat(attempt, q, k, v + 50 * hidden.transpose(-1, -2), hidden)
        except RuntimeError as error:
            if "without overflow" in str(error):
                raise Hint(
                    "the fill value is still beyond FP16, which ends at 65504. Ask the dtype of the "
                    "scores for its own minimum: torch.finfo."
                ) from None
            raise
        if not isinstance(out, torch.Tensor) or out.shape != v.shape:
            raise Hint(f"return a tensor of v's shape, {tuple(v.shape)}.")
        moved = (other - out).detach().float().abs().amax((1, 2)) > 0.01
        out_0, v_0 = out[0].detach().double(), v[0].detach().double()
        plain, right = exact_weights(q, k)[0], exact_weights(q, k, hidden)[0]
        limit = 0.1 if dtype is torch.bfloat16 else 0.02
        for hint, weights in {
            "hidden keys are seen as before: the mask is not used.": plain,
            "the mask is the wrong way round: hidden is True where a key must NOT be seen.": (
                exact_weights(q, k, ~hidden)[0]
            ),
            "hidden keys were removed after the softmax, so the other weights no longer add up to 1. "
            "Mask the scores, before it.": plain.masked_fill(hidden[0], 0),
        }.items():
            if (out_0 - weights @ v_0).abs().max() < limit:
                raise Hint(hint)
        if not out.isfinite().all():
            raise Hint(f"there is inf or NaN in the output for {short(dtype)} inputs.")
        if moved[0]:
            raise Hint(
                "hidden keys still have some influence. A hidden key's score must be lower than any "
                "other, and 0 is not low."
            )
        if moved[1]:
            raise Hint(
                "hidden keys win where the real scores are very low, about -300 in this test: your "
                "fill value is larger than those. It must be lower than any score."
            )
        if (out_0 - right @ v_0).abs().max() > limit:
            raise Hint(f"for {short(dtype)} inputs the visible keys have the wrong weights.")
        must_be_differentiable(
            out, (q, k, v), f"{short(dtype)}: gradients are missing, inf or NaN."
        )
    return "hidden keys have no influence, in FP32, FP16 and BF16."


def short(dtype: torch.dtype) -> str:
    return {torch.float32: "FP32", torch.float16: "FP16", torch.bfloat16: "BF16"}[dtype]


# --- a mixture of experts ------------------------------------------------------------------------


@exercise
def heal_routing(attempt):
    """Check `mix(experts, images, choice)`: answers sorted back, in three precisions."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        experts = nn.ModuleList([nn.Linear(12, 10), nn.Linear(12, 10)])
    seen = set()
    for expert in experts:
        expert.register_forward_hook(lambda module, inputs, output: seen.add(output.dtype))
    x = samples(1, size=8)[0][0]
    for dtype in PRECISIONS:
        for choice in (torch.tensor([0, 1, 1, 0, 1, 0, 0, 1]), torch.zeros(8, dtype=torch.long)):
            seen.clear()
            try:
                with under_autocast(dtype):
                    out = treat(attempt, experts, x, choice)
            except RuntimeError as error:
                if "dtypes match" in str(error):
                    raise Hint(
                        f"under {short(dtype)} the buffer and the expert's answer still have different "
                        "dtypes. Convert one into the other's, whichever it is."
                    ) from None
                raise
            if dtype not in seen:
                raise Hint(f"the experts do not run in {short(dtype)} any more.")
            if not isinstance(out, torch.Tensor) or out.shape != (8, 10):
                raise Hint("return a tensor with one row of ten for each image.")
            right = torch.stack([experts[c](row) for row, c in zip(x, choice, strict=True)])
            limit = 0.05 if dtype in HALF else 1e-4
            if not (out.float() - right).abs().max() < limit:
                order = choice.argsort(stable=True)
                if (out.float() - right[order]).abs().max() < limit:
                    raise Hint(
                        "the answers are right and in the wrong order: first all of expert 0, then all "
                        "of expert 1. Row i belongs to image i."
                    )
                raise Hint(f"the rows are not the experts' answers under {short(dtype)}.")
            if not out.requires_grad:
                raise Hint("the experts do not learn: the result has no graph (no_grad? detach?).")
    return "each answer in its place, in FP32, FP16 and BF16."


# --- binary cross-entropy ------------------------------------------------------------------------


@exercise
def heal_bce(attempt):
    """Check `loss_fn(model, images, is_shoe)`: allowed on CUDA, and right for confident answers."""

    def make_model():
        with torch.random.fork_rng(devices=[]):
            model = nn.Linear(1, 1)
        nn.init.ones_(model.weight)
        nn.init.zeros_(model.bias)
        return model

    logits = torch.tensor([12.0, -12.0, 12.0, 1.0, -2.0, 0.0])
    target = torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0, 1.0])
    with dry_run() as cuda:
        fakes = [cuda.to_device(x) for x in (make_model(), logits.unsqueeze(1), target)]
        try:
            attempt(*fakes)
        except RuntimeError as error:
            if "unsafe to autocast" in str(error):
                raise Hint(
                    "CUDA's autocast still refuses binary_cross_entropy. Use the version that takes "
                    "logits, or an FP32 island: autocast(images.device.type, enabled=False)."
                ) from None
            if "dtype" in str(error):
                raise Hint(f"on CUDA two dtypes meet: {str(error).splitlines()[0]}") from None
            raise

    x = logits.unsqueeze(1).requires_grad_()
    with under_autocast(torch.float16):
        loss = treat(attempt, make_model(), x, target)
    if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
        raise Hint("return the loss, a tensor with one number.")
    if not loss.isfinite():
        raise Hint(
            "for a logit of 12 and the answer 'no shoe' the loss is inf or NaN: sigmoid(12) is 1 in "
            "FP16, and log(1 - 1) is -inf. Never form 1 - p in 16 bits."
        )
    loss.backward()
    gradient, right = x.grad.flatten(), (logits.sigmoid() - target) / len(logits)
    if (gradient - right).abs().max() < 0.02 * right.abs().max():
        return "CUDA allows it, and confident mistakes are corrected."
    if distance(gradient, len(logits) * right) < 0.02:
        raise Hint("this is the sum over the batch: the patient's loss was the mean.")
    p = logits.sigmoid()
    if distance(gradient, (p.sigmoid() - target) * p * (1 - p) / len(logits)) < 0.02:
        raise Hint(
            "the sigmoid is taken twice: the version with logits has its own, so hand it what the "
            "model returns."
        )
    if not gradient[2].abs() > 0.1 * right[2]:
        raise Hint(
            "for a logit of 12 and the answer 'no shoe' the gradient is 0 or NaN, so this mistake is "
            "never corrected: the probability was rounded to 1, or clamped, before the logarithm."
        )
    raise Hint("the gradient is not that of binary cross-entropy, which is (p - target) / n.")
