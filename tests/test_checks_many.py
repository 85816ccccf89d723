"""The checks of notebook 10 pass right answers and know the typical mistakes."""

import contextlib
import math

import pytest
import torch
import torch.nn.functional as F
from answers import verdict
from torch.distributed.fsdp import MixedPrecisionPolicy

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32


def stub(*args):
    raise NotImplementedError


# ---- which_ranks_skip -------------------------------------------------------------------------------


def skip_by_cases(setup, overflowing, ranks):
    if not overflowing:
        return set()
    return overflowing if setup == "plain shards" else set(range(ranks))


def skip_as_list(setup, overflowing, ranks):
    together = setup != "plain shards"
    return [r for r in range(ranks) if r in overflowing or (together and overflowing)]


def skip_alone(setup, overflowing, ranks):
    return overflowing


def skip_all(setup, overflowing, ranks):
    return set(range(ranks))


def skip_together(setup, overflowing, ranks):
    return set(range(ranks)) if overflowing else set()


def skip_ddp_only(setup, overflowing, ranks):
    return skip_together(setup, overflowing, ranks) if setup == "DDP" else overflowing


def skip_without_sharded(setup, overflowing, ranks):
    return overflowing if "plain" in setup else skip_together(setup, overflowing, ranks)


def skip_from_one(setup, overflowing, ranks):
    return set(range(1, ranks + 1)) if overflowing else set()


def skip_number(setup, overflowing, ranks):
    return len(overflowing)


# ---- all_reduces ------------------------------------------------------------------------------------


def count(updates, micro_batches, buckets, no_sync):
    return updates * buckets * (1 if no_sync else micro_batches)


def count_in_a_loop(updates, micro_batches, buckets, no_sync):
    talks = [not no_sync or i == micro_batches - 1 for i in range(micro_batches)]
    return sum(buckets for _ in range(updates) for talk in talks if talk)


# ---- accumulate -------------------------------------------------------------------------------------


def make(
    silent=lambda i, last: not last,
    forward_silent=True,
    divide=4,
    zero=True,
    autocast=fp16,
    scale=True,
    step="end",
    update="end",
):
    def accumulate(model, optimizer, scaler, micro_batches):
        if zero:
            optimizer.zero_grad()
        for i, (x, y) in enumerate(micro_batches):
            quiet = silent(i, i == len(micro_batches) - 1)
            with model.no_sync() if quiet and forward_silent else contextlib.nullcontext():
                with torch.autocast(x.device.type, autocast or fp16, enabled=autocast is not None):
                    loss = F.cross_entropy(model(x), y) / divide
            with model.no_sync() if quiet else contextlib.nullcontext():
                (scaler.scale(loss) if scale else loss).backward()
            if step == "each":
                scaler.step(optimizer)
                scaler.update()
        if step == "end":
            scaler.step(optimizer)
            if update == "end":
                scaler.update()

    return accumulate


def accumulate_otherwise(model, optimizer, scaler, micro_batches):
    """Another right answer: the last micro-batch written out, the losses divided inside the scale."""

    def backward(x, y):
        with torch.autocast(x.device.type, torch.float16):
            loss = F.cross_entropy(model(x), y)
        (scaler.scale(loss) / len(micro_batches)).backward()

    with model.no_sync():
        for x, y in micro_batches[:-1]:
            backward(x, y)
    backward(*micro_batches[-1])
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def zero_each(model, optimizer, scaler, micro_batches):
    for i, (x, y) in enumerate(micro_batches):
        optimizer.zero_grad()
        with model.no_sync() if i < 3 else contextlib.nullcontext():
            with torch.autocast(x.device.type, torch.float16):
                loss = F.cross_entropy(model(x), y) / 4
            scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


def step_of_the_optimizer(model, optimizer, scaler, micro_batches):
    make(step="never")(model, optimizer, scaler, micro_batches)
    optimizer.step()
    scaler.update()


def forget_backward(model, optimizer, scaler, micro_batches):
    for x, y in micro_batches:
        with torch.autocast(x.device.type, torch.float16):
            scaler.scale(F.cross_entropy(model(x), y) / 4)
    scaler.step(optimizer)
    scaler.update()


def glue(model, optimizer, scaler, micro_batches):
    x, y = (torch.cat(parts) for parts in zip(*micro_batches, strict=True))
    make(divide=1)(model, optimizer, scaler, [(x, y)])


# ---- choose_policy ----------------------------------------------------------------------------------


def policy(*args, **kwargs):
    return lambda: MixedPrecisionPolicy(*args, **kwargs)


# ---- block_scale ------------------------------------------------------------------------------------


def scale_by_log(block):
    largest = block.abs().max().item()
    return 2.0 ** math.ceil(math.log2(largest / 448)) if largest else 1.0


def scale_by_search(block):
    scale = torch.tensor(2.0**-60)
    while block.abs().max() / scale > 448:
        scale = 2 * scale
    return scale


def scale_without_zero(block):
    return 2.0 ** math.ceil(math.log2(block.abs().max().item() / 448))


def scale_without_range(block):
    return 2.0 ** math.floor(math.log2(block.abs().max().item()))


def scale_by_the_specification(block):
    return scale_without_range(block) / 2**8


RIGHT = [
    ("which_ranks_skip", skip_by_cases),
    ("which_ranks_skip", skip_as_list),
    ("all_reduces", count),
    ("all_reduces", count_in_a_loop),
    ("accumulate", make()),
    ("accumulate", accumulate_otherwise),
    ("choose_policy", policy(param_dtype=bf16, reduce_dtype=fp32, output_dtype=fp32)),
    ("choose_policy", policy(bf16, fp32, fp32, cast_forward_inputs=True)),
    ("block_scale", scale_by_log),
    ("block_scale", scale_by_search),
]

WRONG = [
    ("which_ranks_skip", skip_alone, "the average of inf and 3"),
    ("which_ranks_skip", skip_all, "nobody skips: return set()"),
    ("which_ranks_skip", skip_together, "only the ranks whose piece overflows"),
    ("which_ranks_skip", skip_ddp_only, "FSDP2's gradients are DTensors"),
    ("which_ranks_skip", skip_without_sharded, "ShardedGradScaler sums found_inf"),
    ("which_ranks_skip", skip_from_one, "numbered from 0"),
    ("which_ranks_skip", skip_number, "Return a set of rank numbers"),
    ("all_reduces", lambda u, m, b, n: u * m * b, "silent, except the last one"),
    ("all_reduces", lambda u, m, b, n: u * b * (m if n else 1), "the number *with* no_sync"),
    ("all_reduces", lambda u, m, b, n: 0 if n else u * m * b, "does not abolish"),
    (
        "all_reduces",
        lambda u, m, b, n: u * (m - 1) * b if n else u * m * b,
        "Count those that talk",
    ),
    ("all_reduces", lambda u, m, b, n: u * (1 if n else m), "for each bucket"),
    ("all_reduces", lambda u, m, b, n: b * (1 if n else m), "number for one update"),
    ("all_reduces", lambda u, m, b, n: None, "not None"),
    ("accumulate", lambda *args: None, "the model was not called"),
    ("accumulate", make(autocast=None), "did not run in FP16"),
    ("accumulate", make(autocast=bf16), "did not run in FP16"),
    ("accumulate", make(scale=False), "the loss was not scaled"),
    ("accumulate", make(step="never"), "scaler.step(optimizer) is missing"),
    ("accumulate", step_of_the_optimizer, "would take the scaled gradients"),
    ("accumulate", forget_backward, "call .backward() on it"),
    ("accumulate", glue, "glued the micro-batches together"),
    ("accumulate", make(silent=lambda i, last: i != 0), "must be the *last*"),
    ("accumulate", make(step="each"), "come once, after the loop"),
    ("accumulate", make(update="never"), "scaler.update() is missing"),
    ("accumulate", make(silent=lambda i, last: True), "the last micro-batch must run outside"),
    ("accumulate", make(silent=lambda i, last: False), "all four backward passes"),
    ("accumulate", make(forward_silent=False), "DDP decides in the forward pass"),
    ("accumulate", make(silent=lambda i, last: i < 2), "2 micro-batches exchanged"),
    ("accumulate", make(divide=1), "four times too large"),
    ("accumulate", make(divide=16), "divide by the number of micro-batches once only"),
    ("accumulate", make(zero=False), "Start with optimizer.zero_grad()"),
    ("accumulate", zero_each, "zero_grad once, before the loop"),
    ("choose_policy", lambda: (bf16, fp32, fp32), "not tuple"),
    ("choose_policy", policy(), "would compute in FP32"),
    ("choose_policy", policy(fp16, fp32, fp32), "this loop has none"),
    ("choose_policy", policy(torch.float8_e4m3fn, fp32, fp32), "to compute in torch.bfloat16"),
    ("choose_policy", policy(bf16), "reduce_dtype left out means param_dtype"),
    ("choose_policy", policy(bf16, bf16, fp32), "loses small terms"),
    ("choose_policy", policy(bf16, "float32", fp32), "'float32': torch.float32 has room"),
    ("choose_policy", policy(bf16, fp32), "output_dtype left out"),
    ("choose_policy", policy(bf16, fp32, bf16), "the logits leave in torch.bfloat16"),
    ("choose_policy", policy(bf16, fp32, fp32, False), "cast_forward_inputs=False"),
    ("block_scale", lambda b: 1 / scale_by_log(b), "upside down"),
    ("block_scale", scale_without_range, "use its whole range"),
    ("block_scale", lambda b: b.abs().max() / 448, "no power of two"),
    ("block_scale", scale_by_the_specification, "500 / 1 = 500 saturates"),
    ("block_scale", lambda b: 2.0 ** math.floor(math.log2(b.abs().max() / 448)), "rounded up?"),
    ("block_scale", lambda b: scale_by_log(b.clamp(min=0)), "largest *magnitude*"),
    (
        "block_scale",
        lambda b: 2.0 ** (math.ceil(math.log2(b.abs().max())) - 8),
        "448, and still fits",
    ),
    ("block_scale", lambda b: 16 * scale_by_log(b), "too large by a factor of 16"),
    ("block_scale", lambda b: scale_by_log(b) / 16, "E4M3 ends at 448"),
    ("block_scale", lambda b: math.log2(scale_by_log(b)), "not its exponent"),
    ("block_scale", lambda b: 0.0, "cannot divide"),
    ("block_scale", lambda b: b, "return one number"),
    ("block_scale", scale_without_zero, "a block of zeros has no logarithm"),
]


@pytest.mark.parametrize("check, attempt", RIGHT)
def test_right_answers_pass(check, attempt, capsys):
    assert verdict(check, attempt, capsys).startswith(f"PASSED   {check}: ")


@pytest.mark.parametrize("check, attempt, hint", WRONG)
def test_each_mistake_has_its_own_hint(check, attempt, hint, capsys):
    line = verdict(check, attempt, capsys)
    assert line.startswith(f"NOT YET  {check}") and hint in line


@pytest.mark.parametrize("check", sorted({check for check, _ in RIGHT}))
def test_stubs_are_not_attempted(check, capsys):
    assert verdict(check, stub, capsys).startswith(f"TO DO    {check}: not attempted yet")
