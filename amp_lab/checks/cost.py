"""Exercises of notebook 07, speed and memory."""

import math

from .exercise import Hint, exercise

__all__ = ["amp_memory", "break_even_batch", "largest_batch", "overall_speedup"]


def _number(got, unit: str) -> float:
    if isinstance(got, bool) or not isinstance(got, int | float):
        raise Hint(f"return a number, {unit}, not {type(got).__name__}.")
    return got


@exercise
def amp_memory(attempt):
    """Check `amp_memory(parameters, activations, copied_weights)`: bytes of a training step.

    `parameters` is the number of weights, trained with Adam; `activations` the number of values kept
    for backward, all in 16 bits; `copied_weights` the number of weights whose 16-bit copy is kept.
    """
    p, a, c = 1_000_003, 5_000_011, 900_007
    right = 16 * p + 2 * a + 2 * c
    got = _number(attempt(p, a, c), "in bytes")
    mistakes = {
        4 * p + 4 * p + 8 * p + 4 * a + 2 * c: "the activations are kept in 16 bits: 2 bytes each.",
        16 * p + 2 * a: "the 16-bit copies of weights are kept for backward, too: 2 bytes each.",
        16 * p + 2 * a + 4 * c: "a 16-bit copy takes 2 bytes.",
        16 * p + 4 * a + 4 * c: "activations and copies are kept in 16 bits: 2 bytes each.",
        16 * p
        + 4 * a: "that is FP32. Under AMP the activations take 2 bytes, and copies come on top.",
        18 * p + 2 * a: "only some weights keep a copy: copied_weights of them, not all.",
        14 * p
        + 2 * a
        + 2 * c: "one of weights and gradients was halved. Both stay FP32: a gradient "
        "has the dtype of its parameter.",
        12 * p
        + 2 * a
        + 2 * c: "Adam keeps *two* numbers for each weight, both in FP32; and weights and "
        "gradients stay FP32.",
        8 * p + 2 * a: "you halved weights, gradients and Adam's state: all of them stay FP32. And "
        "the copies are missing.",
        4 * p
        + 2 * a
        + 2 * c: "the gradients (4 bytes a weight) and Adam's two moments (8) are missing.",
        8 * p
        + 2 * a
        + 2 * c: "you left out Adam's two moments, or halved everything. Under autocast it "
        "is as in FP32: weights 4, gradients 4, Adam 8 bytes a weight.",
        p + a + c: "that counts numbers, not bytes.",
    }
    if got == right:
        for arguments in ((10, 0, 0), (7, 100, 3)):
            p, a, c = arguments
            if attempt(*arguments) != 16 * p + 2 * a + 2 * c:
                raise Hint(f"right for one model, wrong for {arguments}.")
        return "16 bytes a weight, as in FP32; 2 bytes for each activation and each copied weight."
    if got in mistakes:
        raise Hint(mistakes[got])
    if any(math.isclose(got * unit, right) for unit in (2**10, 1e3, 2**20, 1e6, 2**30, 1e9)):
        raise Hint("right, but not in bytes.")
    raise Hint(
        f"for {p:,} weights, {a:,} activations and {c:,} copied weights it is {right:,} bytes."
    )


@exercise
def largest_batch(attempt):
    """Check `largest_batch(budget, fixed, per_example)`: how many examples fit into the memory.

    `budget` is the memory in bytes, `fixed` what is needed whatever the batch, `per_example` what
    each example adds.
    """
    cases = ((1004, 100, 9), (2**30, 2**24 + 5, 123_457), (1009, 100, 9), (50, 100, 9))
    for budget, fixed, per_example in cases:
        right = max(0, (budget - fixed) // per_example)
        got = attempt(budget, fixed, per_example)
        if got == right and not isinstance(got, bool | float):
            continue
        if isinstance(got, float) and got == right:
            raise Hint("right, but a batch is a whole number: int, not float.")
        if isinstance(got, float) and math.isclose(got, (budget - fixed) / per_example):
            raise Hint("a batch is a whole number. Half an example does not fit: round down.")
        if got == budget // per_example:
            raise Hint("the fixed part takes its share of the budget first.")
        if fixed > budget:
            raise Hint("if not even the fixed part fits, the largest batch is 0.")
        if got == right + 1:
            raise Hint("one too many: rounded up, it does not fit any more.")
        if got == (budget + fixed) // per_example:
            raise Hint("subtract the fixed part from the budget, do not add it.")
        raise Hint(
            f"with {budget} bytes, {fixed} of them fixed and {per_example} an example, {right} fit."
        )
    return "(budget - fixed) // per_example, and 0 if nothing fits."


@exercise
def break_even_batch(attempt):
    """Check `break_even_batch(batches, fp32_ms, amp_ms)`: from which batch on AMP is faster.

    The lists hold, for growing batches, milliseconds a step. The answer is the first batch from
    which AMP is faster at this and every larger measured batch, or None.
    """
    batches = [1, 4, 16, 64, 256]
    fp32 = [1.0, 1.2, 2.0, 6.0, 20.0]
    cases = [
        ([1.5, 1.6, 1.9, 4.0, 9.0], 16, "plain"),
        ([0.9, 1.6, 2.5, 4.0, 9.0], 64, "blip"),  # AMP happens to be faster at batch 1
        ([1.5, 1.6, 2.5, 7.0, 30.0], None, "never"),
        ([0.5, 0.6, 1.0, 3.0, 9.0], 1, "always"),
        ([1.5, 1.0, 1.0, 3.0, 21.0], None, "loses at the end"),
        ([1.5, 1.2, 1.9, 4.0, 9.0], 16, "a tie"),
    ]
    for amp, right, case in cases:
        got = attempt(list(batches), list(fp32), list(amp))
        if got == right and not isinstance(got, bool):
            continue
        winners = [b for b, x, y in zip(batches, fp32, amp, strict=True) if y < x]
        if got in range(len(batches)) and right is not None and batches[got] == right:
            raise Hint("that is the place in the list. Return the batch itself.")
        if right is None and got in (0, -1, math.inf, batches[-1]) and not winners:
            raise Hint("AMP never wins there: return None.")
        if winners and got == winners[0]:
            raise Hint(
                f"AMP is faster at batch {got}, but not at every larger batch: one lucky measurement. "
                "Begin at the end of the list."
            )
        if case == "a tie" and got == 4:
            raise Hint("at batch 4 both take the same time. That is not faster.")
        losers = [b for b, x, y in zip(batches, fp32, amp, strict=True) if y >= x]
        if losers and got == losers[-1]:
            raise Hint("that is the last batch at which AMP loses; return the one after it.")
        raise Hint(f"for FP32 {fp32} and AMP {amp} ms it should be {right}, you returned {got}.")
    return "and it sees through one lucky measurement, a tie, and a model for which AMP never pays."


@exercise
def overall_speedup(attempt):
    """Check `overall_speedup(profile, fast, factor)`: the speed-up of a whole step.

    `profile` maps operations to milliseconds in FP32; those in the set `fast` become `factor` times
    as fast, all others stay. Source: Amdahl's law, AFIPS 1967.
    """
    cases = [
        ({"conv": 60.0, "mm": 20.0, "batch_norm": 15.0, "optimizer": 5.0}, {"conv", "mm"}, 8.0),
        ({"mm": 10.0, "softmax": 30.0}, {"mm"}, 16.0),
        ({"mm": 10.0, "relu": 1.0}, set(), 4.0),
        ({"mm": 10.0}, {"mm"}, 4.0),
    ]
    for profile, fast, factor in cases:
        total = sum(profile.values())
        gained = sum(profile[op] for op in fast)
        after = total - gained + gained / factor
        right = total / after
        got = _number(attempt(dict(profile), set(fast), factor), "time before / time after")

        def is_(value, got=got):
            return math.isclose(got, value, rel_tol=1e-6)

        if is_(right):
            continue
        if is_(factor):
            raise Hint("only a part of the step gets that much faster. What about the rest?")
        if is_(1 / right):
            raise Hint("upside down: time before divided by time after.")
        if is_(after):
            raise Hint("that is the time after, in milliseconds. Divide the time before by it.")
        if gained and is_(total / (gained / factor)):
            raise Hint("you forgot the time of the operations that do not get faster.")
        if is_(1 + gained / total * (factor - 1)):
            raise Hint(
                "that weighs the speed-up by its share. Times can be added, speed-ups cannot: add up "
                "the times after, then divide."
            )
        if is_(total / (total - gained)):
            raise Hint("the fast operations still take some time: their old time / factor.")
        raise Hint(f"for {profile}, {sorted(fast)} {factor:g} times as fast, it is {right:.4g}.")
    return "time before / time after. In the first profile: 8 times as fast in 80 % gives 3.3."
