"""Each check of notebook 07 passes right answers and names the particular mistake in wrong ones."""

import pytest
from answers import verdict


def break_even(batches, fp32, amp):
    answer = None
    for batch, x, y in reversed(list(zip(batches, fp32, amp, strict=True))):
        if y >= x:
            break
        answer = batch
    return answer


def break_even_otherwise(batches, fp32, amp):
    for i, batch in enumerate(batches):
        if all(y < x for x, y in zip(fp32[i:], amp[i:], strict=True)):
            return batch
    return None


def first_win(batches, fp32, amp):
    return next((b for b, x, y in zip(batches, fp32, amp, strict=True) if y < x), None)


def speedup(profile, fast, factor):
    after = sum(ms / factor if op in fast else ms for op, ms in profile.items())
    return sum(profile.values()) / after


def amdahl(profile, fast, factor):
    share = sum(profile[op] for op in fast) / sum(profile.values())
    return 1 / (1 - share + share / factor)


RIGHT = [
    ("amp_memory", lambda p, a, c: 16 * p + 2 * (a + c)),
    ("amp_memory", lambda p, a, c: 4 * p + 4 * p + 2 * 4 * p + 2 * a + 2 * c),
    ("largest_batch", lambda m, f, e: max(0, (m - f) // e)),
    ("largest_batch", lambda m, f, e: 0 if f > m else int((m - f) / e)),
    ("break_even_batch", break_even),
    ("break_even_batch", break_even_otherwise),
    ("overall_speedup", speedup),
    ("overall_speedup", amdahl),
]


@pytest.mark.parametrize("check, attempt", RIGHT)
def test_right_answers_pass(check, attempt, capsys):
    assert verdict(check, attempt, capsys).startswith(f"PASSED   {check}")


@pytest.mark.parametrize("check", sorted({check for check, _ in RIGHT}))
def test_stubs_are_not_attempted(check, capsys):
    def stub(*arguments):
        raise NotImplementedError

    assert verdict(check, stub, capsys).startswith(f"TO DO    {check}")


WRONG = [
    ("amp_memory", lambda p, a, c: None, "return a number"),
    ("amp_memory", lambda p, a, c: 16 * p + 4 * a + 2 * c, "kept in 16 bits"),
    ("amp_memory", lambda p, a, c: 16 * p + 2 * a, "copies of weights are kept"),
    ("amp_memory", lambda p, a, c: 16 * p + 2 * a + 4 * c, "a 16-bit copy takes 2 bytes"),
    ("amp_memory", lambda p, a, c: 8 * p + 2 * a + 2 * c, "Adam"),
    ("amp_memory", lambda p, a, c: 14 * p + 2 * a + 2 * c, "Both stay FP32"),
    ("amp_memory", lambda p, a, c: 12 * p + 2 * a + 2 * c, "*two* numbers for each weight"),
    ("amp_memory", lambda p, a, c: 4 * p + 2 * a + 2 * c, "two moments (8) are missing"),
    ("amp_memory", lambda p, a, c: p + a + c, "counts numbers, not bytes"),
    ("amp_memory", lambda p, a, c: (16 * p + 2 * a + 2 * c) / 2**20, "not in bytes"),
    ("amp_memory", lambda p, a, c: (16 * p + 2 * a + 2 * c) / 2**30, "not in bytes"),
    ("amp_memory", lambda p, a, c: 16 * p + 4 * a + 4 * c, "activations and copies"),
    ("amp_memory", lambda p, a, c: 16 * p + 4 * a, "that is FP32"),
    ("amp_memory", lambda p, a, c: 18 * p + 2 * a, "only some weights keep a copy"),
    ("amp_memory", lambda p, a, c: 16 * 1_000_003 + 2 * a + 2 * c, "right for one model"),
    ("amp_memory", lambda p, a, c: 5, "it is 27,800,084 bytes"),
    ("largest_batch", lambda m, f, e: (m - f) / e, "round down"),
    ("largest_batch", lambda m, f, e: m // e, "takes its share of the budget first"),
    ("largest_batch", lambda m, f, e: (m - f) // e, "the largest batch is 0"),
    ("largest_batch", lambda m, f, e: -(-(m - f) // e), "rounded up"),
    ("largest_batch", lambda m, f, e: (m + f) // e, "do not add it"),
    ("largest_batch", lambda m, f, e: float((m - f) // e), "whole number: int"),
    ("largest_batch", lambda m, f, e: None, "100 fit"),
    ("break_even_batch", first_win, "one lucky measurement"),
    ("break_even_batch", lambda b, x, y: b.index(break_even(b, x, y)), "place in the list"),
    ("break_even_batch", lambda b, x, y: break_even(b, x, y) or -1, "return None"),
    (
        "break_even_batch",
        lambda b, x, y: break_even(b, x, [ms - 1e-9 for ms in y]),
        "That is not faster",
    ),
    (
        "break_even_batch",
        lambda b, x, y: next(
            (k for k, p, q in zip(b[::-1], x[::-1], y[::-1], strict=True) if q >= p)
        ),
        "last batch at which AMP loses",
    ),
    ("break_even_batch", lambda b, x, y: 256, "it should be 16, you returned 256"),
    ("overall_speedup", lambda p, f, k: None, "return a number"),
    ("overall_speedup", lambda p, f, k: k, "What about the rest"),
    ("overall_speedup", lambda p, f, k: 1 / speedup(p, f, k), "upside down"),
    ("overall_speedup", lambda p, f, k: sum(p.values()) / speedup(p, f, k), "the time after"),
    (
        "overall_speedup",
        lambda p, f, k: sum(p.values()) / (sum(p[op] for op in f) / k),
        "you forgot the time of the operations that do not get faster",
    ),
    (
        "overall_speedup",
        lambda p, f, k: 1 + sum(p[op] for op in f) / sum(p.values()) * (k - 1),
        "speed-ups cannot",
    ),
    (
        "overall_speedup",
        lambda p, f, k: sum(p.values()) / (sum(p.values()) - sum(p[op] for op in f)),
        "still take some time",
    ),
    ("overall_speedup", lambda p, f, k: 77.0, "it is 3.333"),
]


@pytest.mark.parametrize("check, attempt, hint", WRONG, ids=[f"{c}: {h}" for c, _, h in WRONG])
def test_each_mistake_has_its_own_hint(check, attempt, hint, capsys):
    line = verdict(check, attempt, capsys)
    assert line.startswith(f"NOT YET  {check}") and hint in line
