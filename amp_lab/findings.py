"""What the traces of a training loop mean: every finding of `watch`, and how it is concluded.

`seen` is the `Listener` that heard the loop. Findings about the order of calls are noted while the
loop runs; the others are concluded here from the whole record, when the block is left.
"""

import math
import re
from dataclasses import dataclass

import torch

from .nonfinite import LOWER_PRECISION, nonfinite_shares, some

CERTAIN, LIKELY, POSSIBLE = "certain", "likely", "possible"

# Every finding there is, causes before their consequences, and what to try.
ADVICE = {
    # the order of scaler calls
    "optimizer-without-scaler": "Call scaler.step(optimizer) in place of optimizer.step().",
    "step-outside-scaler": "Call scaler.step(optimizer): it skips the step after an overflow.",
    "loss-not-scaled": "Call scaler.scale(loss).backward() in every iteration.",
    "scaler-recreated": "Make one scaler before the loop, and keep it for the whole run.",
    "update-missing": "Call scaler.update() once at the end of every iteration, also when you "
    "leave it early by `continue`.",
    "update-without-step": "Call scaler.update() once an iteration, after every scaler.step().",
    "update-between-steps": "One scaler, one update(): after the last scaler.step() of the iteration. "
    "With gradient accumulation, only at its end.",
    "unscale-twice": "Unscale, clip, step and update only where the accumulated gradients are "
    "complete; and call update() in every iteration that called unscale_().",
    "gradients-kept": "Call optimizer.zero_grad() after each step; with accumulation, call unscale_ "
    "only after the last backward.",
    "clip-before-unscale": "Call scaler.unscale_(optimizer) first, then clip.",
    "changed-before-unscale": "Multiplying all gradients by one number is harmless. Anything else "
    "(clipping, noise, a threshold) belongs after scaler.unscale_(optimizer).",
    "norm-before-unscale": "Call scaler.unscale_(optimizer) first, then take the norm; or divide what "
    "you read by scaler.get_scale().",
    "scaler-not-restored": "Save scaler.state_dict() in the checkpoint, after update(), and load it "
    "when you resume.",
    # which precision runs where
    "fp16-without-scaler": "Use torch.amp.GradScaler, or BF16 autocast, which needs none.",
    "autocast-wrong-device": "Write torch.autocast(device_type=inputs.device.type, ...).",
    "scaler-without-autocast": "Run the forward pass under torch.autocast, or leave the scaler out.",
    "scaler-with-bf16": "BF16 has the range of FP32 and needs no scaling: "
    "GradScaler(enabled=dtype is torch.float16).",
    "backward-in-autocast": "Close the autocast block after the loss, and call backward() outside: "
    "PyTorch advises against backward under autocast.",
    "parameters-16-bit": "Keep the parameters in FP32 (no .half() or .bfloat16()) and let autocast "
    "cast copies of them.",
    "updates-lost": "Keep FP32 weights: an update below half the spacing of a 16-bit weight is "
    "rounded away.",
    # gradients that do not arrive
    "no-gradients": "Build the optimizer from the parameters that backward() reaches, and call "
    "zero_grad() before backward or after the step, never between them.",
    "parameters-without-gradient": "If they should learn, see that the loss depends on them; if not, "
    "set requires_grad=False and keep them out of the optimizer.",
    "all-gradients-zero": "Look for a detached loss or a dead activation; in FP16, scale the loss.",
    # numbers
    "activation-overflow": "Use BF16 autocast, or run that module in FP32: autocast(enabled=False) "
    "around it, with inputs.float().",
    "loss-nonfinite": "No loss scale repairs a forward pass. Look at that place for values beyond "
    "65504, log or division of a zero, and softmax over a row that is masked completely.",
    "gradients-nonfinite": "Without a scaler nothing skips such a step: clip, lower the learning rate, "
    "or stop at the first NaN. In FP16 use GradScaler.",
    "buffers-nonfinite": "Skipping a step does not undo the forward pass. Run the layer before it in "
    "FP32 or BF16, or restore the buffers on a skip; evaluation stays NaN until they are reset.",
    "weights-nonfinite": "These weights are lost: load the last good checkpoint and repair the cause.",
    # the scale
    "scale-collapse": "Lower scales do not help, so the cause is not the scale: look for NaN in the "
    "forward pass, or use BF16.",
    "no-real-step": "If the loss is finite, go on, or lower init_scale; if it is not, see there.",
    "many-skips": "A skip every few hundred steps is normal, so many are not: find the layer that "
    "overflows (`log.steps`), or use BF16. A very short growth_interval does this too.",
    "init-scale-too-high": "Expected once, and harmless. Use the mean of the loss, not the sum, or "
    "pass a lower init_scale.",
    "scheduler-on-skip": "Compare scaler.get_scale() before and after update(), and move the scheduler "
    "only if the scale did not drop.",
    "optimizers-out-of-step": "Each optimizer is skipped for its own gradients. If they must move "
    "together, skip both by hand, or use BF16.",
    # exceptions
    "bce-unsafe": "Return logits and use binary_cross_entropy_with_logits (BCEWithLogitsLoss).",
    "value-beyond-fp16": "FP16 ends at 65504: use torch.finfo(x.dtype).min as fill value, or "
    "scaled_dot_product_attention with a boolean mask.",
    "dtype-mismatch": "Keep model and loss in one autocast block, or call .float() on what leaves it. "
    "In a custom autograd.Function use torch.amp.custom_fwd and custom_bwd.",
    "buffer-dtype": "Allocate the buffer with the dtype of the result that is written into it.",
    "no-16-bit-kernel": "Call .float() on the inputs of that operation, inside "
    "autocast(enabled=False).",
    "numpy-bfloat16": "NumPy has no BF16: call .float() before .numpy().",
    "no-steps": "Give watch the optimizer that the loop steps.",
}

# PyTorch's error messages, and what they mean.
MESSAGES = (
    (r"unscale_\(\) (has already been|was already) called", "unscale-twice"),
    (r"unscale_\(\) (is being called )?after step\(\)", "update-missing"),
    (r"step\(\) (has already been|was already) called", "update-missing"),
    (r"No inf checks.* (prior to|since the last) update", "update-without-step"),
    (r"_scale is None|before scale\(\)", "loss-not-scaled"),
    (r"_amp_foreach_non_finite_check_and_unscale\w*\" not implemented for 'BF", "scaler-with-bf16"),
    (r"unsafe to autocast", "bce-unsafe"),
    (r"cannot be converted to type .* without overflow", "value-beyond-fp16"),
    (
        r"Index put requires .* dtypes|(scatter|index)\w*\(\).*type|masked_scatter.*dtypes",
        "buffer-dtype",
    ),
    (r"must have the same dtype|to have the same dtype|should be the same", "dtype-mismatch"),
    (r"expected scalar type \w+ but found", "dtype-mismatch"),
    (r"not implemented for '(Half|BFloat16)'", "no-16-bit-kernel"),
    (r"unsupported ScalarType BFloat16", "numpy-bfloat16"),
)

# The scaler's own protests: what they say is what happened.
SCALER_ERRORS = {code for _, code in MESSAGES[:5]}


@dataclass(frozen=True)
class Finding:
    """One thing that does not fit.

    `code` is its name, a key of `ADVICE`. `sentence` says what was seen. `certainty` is "certain"
    (seen directly, and wrong), "likely" (what was seen has usually this cause) or "possible" (it may
    be intended). `advice` says what to try. `step` is the optimizer step in which it was first seen,
    counted from 0, or None where it belongs to no step.
    """

    code: str
    sentence: str
    certainty: str
    advice: str
    step: int | None = None


def explain(seen, error: Exception) -> None:
    """Note what an exception that ended the loop says about it."""
    message = str(error)
    step = min(known.index for known in seen.optimizers.values())
    if "No inf checks" in message and seen.failed is not None:
        note_no_gradients(seen, seen.failed)
        return
    code = next((code for pattern, code in MESSAGES if re.search(pattern, message)), None)
    if code is None:
        return
    if code == "update-without-step" and "optimizer-without-scaler" in seen.notes:
        return
    sentence = f"{type(error).__name__}: {message.splitlines()[0]}"
    if code == "unscale-twice":
        passes = max(known.backwards for known in seen.optimizers.values())
        sentence += (
            f" There were {passes} backward passes since the last step: unscale_ ran before "
            "the accumulation was complete."
            if passes > 1
            else " The iteration before it ended without update()."
        )
    seen.note(code, CERTAIN if code in SCALER_ERRORS else LIKELY, sentence, step)


def note_no_gradients(seen, known) -> None:
    """Note why an optimizer had nothing to step with."""
    parameters = known.parameters
    mine = {id(p) for p in seen.root.parameters()}
    if not any(p.requires_grad for p in parameters):
        why = "all of them are frozen (requires_grad=False)"
    elif not any(id(p) in mine for p in parameters):
        why = "they do not belong to the model: the optimizer was made for another one"
    elif known.erased:
        why = "backward() made gradients, and zero_grad() removed them before the step"
    else:
        why = "no backward() reached them"
    seen.note(
        "no-gradients",
        CERTAIN,
        f"None of the {len(parameters)} parameters of the optimizer had a gradient: {why}.",
        known.index,
    )


def judge(seen, failed: bool) -> None:
    """Note everything that only the whole record can tell; `failed` says that it was cut short."""
    trainable = [(name, p) for name, p in seen.root.named_parameters() if p.requires_grad]
    narrow = {name: p.dtype for name, p in trainable if p.dtype in LOWER_PRECISION}
    if seen.backwards and not seen.steps and not failed:
        seen.note("no-steps", LIKELY, "backward() ran, but no watched optimizer made a step.")

    scaled = any(known.scalers for known in seen.optimizers.values())
    _judge_precision(seen, scaled, narrow)
    _judge_numbers(seen, nonfinite_shares(trainable))
    for known in seen.optimizers.values():
        _judge_gradients(seen, known)
        _judge_scale(seen, known)
        _judge_schedule(seen, known)
    _judge_pairs(seen)


def _judge_precision(seen, scaled: bool, narrow: dict[str, torch.dtype]) -> None:
    half, brain, none = (seen.forwards[d] for d in (torch.float16, torch.bfloat16, None))
    parameter = next(seen.root.parameters(), None)
    device = "cpu" if parameter is None else parameter.device.type
    elsewhere = seen.autocast_devices - {device}
    if none and not half and not brain:
        if elsewhere:
            seen.note(
                "autocast-wrong-device",
                CERTAIN,
                f"The loop used autocast for {elsewhere.pop()!r}, but the model is on {device!r}: "
                "its forward pass ran without autocast.",
            )
        elif scaled and not narrow:
            seen.note(
                "scaler-without-autocast",
                CERTAIN,
                "The loss is scaled, but the model's forward pass never ran under autocast: this "
                "is FP32 training.",
            )
    if brain and not half and scaled and not narrow:
        seen.note("scaler-with-bf16", CERTAIN, "The loss is scaled, but autocast used BF16.")
    unscaled = [k for k in seen.optimizers.values() if k.without_scaling]
    if half and unscaled:
        _judge_flushing(seen, unscaled)
    if narrow:
        kinds = {LOWER_PRECISION[d] for d in narrow.values()}
        sure = CERTAIN if "FP16" in kinds else POSSIBLE
        seen.note(
            "parameters-16-bit",
            sure,
            f"{len(narrow)} trainable parameters are {' and '.join(sorted(kinds))}: "
            f"{some(narrow)}. So are their gradients and updates.",
        )


def _judge_flushing(seen, unscaled: list) -> None:
    sentence = "The forward pass ran under FP16 autocast, and the loss was not scaled."
    given = seen.given_scaler
    if given is not None:
        state = "was not used" if given.is_enabled() else "is switched off (enabled=False)"
        sentence += f" The scaler given to watch {state}."
    tiny = {n: t for k in unscaled for n, t in k.tiny.items() if t[0] > 0.0}
    worst = max(
        tiny, key=lambda name: (tiny[name][0] + tiny[name][1]) * tiny[name][2], default=None
    )
    sure = POSSIBLE
    if worst is not None:
        lossy, zero, _ = tiny[worst]
        if lossy >= 0.1 * (1.0 - zero):  # of those that are not 0
            sure = CERTAIN if lossy + zero >= 0.5 else LIKELY
        sentence += (
            f" In {worst} {lossy:.0%} of the gradients are below 6.1e-5, where FP16 loses bits, "
            f"and {zero:.0%} are exactly 0."
        )
    seen.note("fp16-without-scaler", sure, sentence)


def _judge_gradients(seen, known) -> None:
    trainable = [p for p in known.parameters if p.requires_grad]
    missing = [seen.name(p) for p in trainable if id(p) not in known.with_gradient]
    if known.with_gradient and missing:
        seen.note(
            "parameters-without-gradient",
            POSSIBLE,
            f"{len(missing)} trainable parameters never had a gradient: {some(missing)}.",
        )
    steps = [s for s in seen.steps if s.optimizer == known.position]
    shares = [s.zero_share for s in steps if s.zero_share]
    if shares and all(zero == 1.0 for share in shares for zero in share.values()):
        seen.note(
            "all-gradients-zero",
            CERTAIN,
            "Every gradient was exactly 0 in every step that was sampled.",
            steps[0].index,
        )
    if known.unmoved and sum(known.unmoved) / len(known.unmoved) >= 0.5:
        share = sum(known.unmoved) / len(known.unmoved)
        seen.note(
            "updates-lost",
            CERTAIN,
            f"{share:.0%} of the 16-bit weights that had a gradient did not change in a step.",
        )


def _judge_numbers(seen, bad_weights: dict[str, float]) -> None:
    bad = [s for s in seen.steps if s.loss is not None and not math.isfinite(s.loss)]
    if bad:
        code = "activation-overflow" if seen.origin and seen.origin.overflow else "loss-nonfinite"
        found = ""
        if seen.origin:
            found = f" {seen.origin.sentence}"
        elif seen.probed:
            found = (
                " The output of the model was finite in the steps that followed, so look at the loss "
                "function and at single batches."
            )
        seen.note(
            code,
            CERTAIN,
            f"The loss was inf or NaN in {len(bad)} of {len(seen.steps)} steps.{found}",
            bad[0].index,
        )
    passed = [s for s in seen.steps if s.nonfinite_share and not s.skipped]
    if passed:
        names = passed[0].nonfinite_share
        seen.note(
            "gradients-nonfinite",
            CERTAIN,
            f"The optimizer used gradients that are inf or NaN: {some(names)}.",
            passed[0].index,
        )
    if seen.bad_buffers:
        seen.note(
            "buffers-nonfinite",
            CERTAIN,
            f"Buffers hold inf or NaN: {some(seen.bad_buffers)}. They are used in eval().",
            min(seen.bad_buffers.values()),
        )
    if bad_weights:
        seen.note(
            "weights-nonfinite",
            CERTAIN,
            f"Weights hold inf or NaN: {some(bad_weights)}.",
        )


def _judge_scale(seen, known) -> None:
    if len(known.scalers) > 1:
        seen.note(
            "scaler-recreated",
            CERTAIN,
            f"{len(known.scalers)} different scalers stepped the same optimizer in "
            f"{known.index} steps: each starts at its initial scale and forgets what the last learned.",
        )
        return
    if not known.scalers:
        return
    scaler = next(iter(known.scalers.values()))
    if scaler.fresh and known.had_state:
        skipped = any(known.attempts[:10])
        seen.note(
            "scaler-not-restored",
            LIKELY if skipped else POSSIBLE,
            "The optimizer brought state from earlier steps, but the scaler was new and started at "
            "65536" + (", and skipped steps to come down again." if skipped else "."),
            0,
        )
    first = known.attempts.index(False) if False in known.attempts else known.index
    later = known.attempts[first:]
    steps = [s for s in seen.steps if s.optimizer == known.position]
    where = some(dict.fromkeys(n for s in steps if s.skipped for n in s.nonfinite_share))
    low = min([scaler.scale, *(s.scale for s in steps)])
    if low < 1.0:
        seen.note(
            "scale-collapse",
            CERTAIN,
            f"The loss scale fell to {low:g}; {sum(known.attempts)} of {known.index} steps were "
            f"skipped. inf or NaN in the gradients of {where}.",
            next((s.index for s in steps if s.scale < 1.0), known.index - 1),
        )
    elif not later and first > 5:
        seen.note(
            "no-real-step",
            CERTAIN,
            f"All {first} steps were skipped. inf or NaN in the gradients of {where}.",
            0,
        )
    elif _longest_run(later) >= 5 or (sum(later) >= 5 and sum(later) >= 0.2 * len(later)):
        seen.note(
            "many-skips",
            LIKELY,
            f"{sum(later)} of {len(later)} steps were skipped after the first real one; the scale "
            f"is {scaler.scale:g}. inf or NaN in the gradients of {where}.",
            first + later.index(True),
        )
    elif first > 5:
        seen.note(
            "init-scale-too-high",
            CERTAIN,
            f"The first {first} steps were skipped, until the scale had come down to "
            f"{steps[first].scale:g}.",
            0,
        )


def _judge_schedule(seen, known) -> None:
    every_step = known.scheduler_calls >= 0.75 * known.index
    if known.scheduler_on_skip and every_step:
        seen.note(
            "scheduler-on-skip",
            CERTAIN,
            f"The learning rate scheduler moved on in {len(known.scheduler_on_skip)} steps that the "
            "scaler skipped.",
            known.scheduler_on_skip[0],
        )


def _judge_pairs(seen) -> None:
    """Optimizers of one scaler that part company after each has made a real step."""
    known = [k for k in seen.optimizers.values() if len(k.scalers) == 1]
    if len(known) < 2 or len({next(iter(k.scalers)) for k in known}) > 1:
        return
    if not all(False in k.attempts for k in known):
        return
    start = max(k.at_update[k.attempts.index(False)] for k in known)
    rows = [dict(zip(k.at_update, k.attempts, strict=True)) for k in known]
    together = set(rows[0]).intersection(*rows[1:])  # stepped before the same update()
    apart = sorted(u for u in together if u > start and len({row[u] for row in rows}) > 1)
    if len(apart) >= 2:
        seen.note(
            "optimizers-out-of-step",
            POSSIBLE,
            f"In {len(apart)} steps one optimizer was skipped and another was not.",
            apart[0],
        )


def _longest_run(flags: list[bool]) -> int:
    longest = current = 0
    for flag in flags:
        current = current + 1 if flag else 0
        longest = max(longest, current)
    return longest
