"""The exercises of notebook 04: right answers pass, each typical mistake has a hint of its own."""

import math

import pytest
import torch
import torch.nn.functional as F

import amp_lab as lab

FP16 = torch.float16


def stub(*_):
    raise NotImplementedError


# ---- right answers ---------------------------------------------------------------------------


def gradient_by_autograd(vocabulary, tokens, micro_batches):
    logits = torch.zeros(tokens, vocabulary, dtype=torch.float64, requires_grad=True)
    targets = torch.zeros(tokens, dtype=torch.int64)
    (F.cross_entropy(logits, targets) / micro_batches).backward()
    return logits.grad[0, 1]


def lost_by_cast(gradient):
    nonzero = gradient[gradient != 0]
    return (nonzero.half() == 0).float().mean()


def lost_by_border(gradient):
    nonzero = gradient != 0
    return ((gradient.abs() <= 2.0**-25) & nonzero).sum().item() / nonzero.sum().item()


def vanishing_by_trying(vocabulary):
    tokens = 1
    while torch.tensor(1 / (vocabulary * tokens), dtype=torch.float64).to(FP16) != 0:
        tokens += 1
    return tokens


def accumulate(model, micro_batches, divide_loss=False, divide_gradients=True, k=None):
    k = k or len(micro_batches)
    for words, targets in micro_batches:
        loss = F.cross_entropy(model(words), targets)
        (loss / k if divide_loss else loss).backward()
    if divide_gradients:
        for p in model.parameters():
            p.grad /= k


def accumulate_under_autocast(model, micro_batches):
    for words, targets in micro_batches:
        with torch.autocast("cpu", FP16):
            loss = F.cross_entropy(model(words), targets)
        loss.backward()
    for p in model.parameters():
        p.grad.mul_(1 / len(micro_batches))


@pytest.mark.parametrize(
    ("name", "attempt"),
    [
        ("wrong_word_gradient", lambda v, n, k: 1 / (v * n * k)),
        ("wrong_word_gradient", gradient_by_autograd),
        ("share_lost", lost_by_cast),
        ("share_lost", lost_by_border),
        ("vanishing_tokens", lambda v: math.ceil(2**25 / v)),
        ("vanishing_tokens", vanishing_by_trying),
        ("accumulated_gradients", accumulate),
        ("accumulated_gradients", accumulate_under_autocast),
    ],
)
def test_right_answers_pass(name, attempt, capsys):
    getattr(lab.checks, name)(attempt)
    assert capsys.readouterr().out.startswith(f"PASSED   {name}: ")


NAMES = ["wrong_word_gradient", "share_lost", "vanishing_tokens", "accumulated_gradients"]


@pytest.mark.parametrize("name", NAMES)
def test_stub_is_to_do(name, capsys):
    getattr(lab.checks, name)(stub)
    assert capsys.readouterr().out.startswith(f"TO DO    {name}: ")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("junk", [lambda *_: None, lambda *_: "one", lambda *_: torch.ones(3)])
def test_junk_gets_one_line(name, junk, capsys):
    getattr(lab.checks, name)(junk)
    out = capsys.readouterr().out
    assert out.startswith(f"NOT YET  {name}: ") and out.count("\n") == 1


# ---- wrong answers ---------------------------------------------------------------------------


def lost(nonzero=True, absolute=True, border=2.0**-25, factor=1, strict=False, count=False):
    """Make a faulty `share_lost`."""

    def attempt(gradient):
        g = gradient[gradient != 0] if nonzero else gradient
        size = g.abs() if absolute else g
        small = size < border if strict else size <= border
        share = small.sum().item() if count else small.float().mean().item()
        return factor * share

    return attempt


def lost_over_all(gradient):
    return ((gradient.half() == 0) & (gradient != 0)).float().mean()


def lost_in_place(gradient):
    gradient.copy_(gradient.half().float())
    return 0.5


def accumulate_with_zero_grad(model, micro_batches):
    for words, targets in micro_batches:
        model.zero_grad()
        F.cross_entropy(model(words), targets).backward()


def accumulate_and_divide_each_time(model, micro_batches):
    for words, targets in micro_batches:
        F.cross_entropy(model(words), targets).backward()
        for p in model.parameters():
            p.grad /= len(micro_batches)


def accumulate_once(model, micro_batches):
    losses = [F.cross_entropy(model(words), targets) for words, targets in micro_batches]
    torch.stack(losses[:3]).sum().backward()


def accumulate_nothing(model, micro_batches):
    for words, targets in micro_batches:
        F.cross_entropy(model(words), targets)


@pytest.mark.parametrize(
    ("name", "attempt", "hint"),
    [
        ("wrong_word_gradient", lambda v, n, k: -1 / (v * n * k), "the sign is not"),
        ("wrong_word_gradient", lambda v, n, k: (1 / v - 1) / (n * k), "the right word's gradient"),
        ("wrong_word_gradient", lambda v, n, k: 1 / v, "a mean over the tokens"),
        ("wrong_word_gradient", lambda v, n, k: 1 / n, "how likely is one word"),
        ("wrong_word_gradient", lambda v, n, k: 1 / (v * n), "divided by 5"),
        ("wrong_word_gradient", lambda v, n, k: k / (v * n), "smaller, not larger"),
        ("wrong_word_gradient", lambda v, n, k: v * n * k, "one over"),
        ("wrong_word_gradient", lambda v, n, k: math.log(v), "Three factors"),
        ("share_lost", lost(factor=100), "leave out the factor 100"),
        ("share_lost", lost(count=True), "number of lost elements"),
        ("share_lost", lambda g: 1 - lost_by_cast(g), "those that are kept"),
        ("share_lost", lost(border=2.0**-14), "subnormal number"),
        ("share_lost", lost(absolute=False), "not their sign"),
        ("share_lost", lost(border=2.0**-24, strict=True), "rounded up"),
        ("share_lost", lost(strict=True), "tie goes to 0"),
        ("share_lost", lambda g: (g.half() == 0).float().mean(), "count the zeros as lost"),
        ("share_lost", lost_over_all, "you divide by five"),
        ("share_lost", lost_in_place, "changed the gradient"),
        ("share_lost", lambda g: 0.25, "two of four are lost"),
        ("vanishing_tokens", lambda v: 2**25 // v, "Round up"),
        ("vanishing_tokens", lambda v: 2**25 / v, "next whole number"),
        ("vanishing_tokens", lambda v: 2**25 // v + 1, "ties go to the even neighbor"),
        ("vanishing_tokens", lambda v: math.ceil(2**24 / v), "the smallest FP16 number"),
        ("vanishing_tokens", lambda v: math.ceil(2**14 / v), "the smallest normal number"),
        ("vanishing_tokens", lambda v: 50000, "33555 are enough"),
        ("vanishing_tokens", lambda v: 500, "FP16 still holds 2.03e-06"),
        ("vanishing_tokens", lambda v: 1, "FP16 still holds 0.001"),
        ("vanishing_tokens", lambda v: math.ceil(1 / 3.0e-8 / v), "as the table rounds it"),
        (
            "accumulated_gradients",
            lambda m, b: accumulate(m, b, divide_loss=True, divide_gradients=False),
            "divided before backward()",
        ),
        (
            "accumulated_gradients",
            lambda m, b: accumulate(m, b, divide_gradients=False),
            "Divide each p.grad by 4",
        ),
        ("accumulated_gradients", lambda m, b: accumulate(m, b, divide_loss=True), "0.25 times"),
        ("accumulated_gradients", lambda m, b: accumulate(m, b, k=6), "times what they should be"),
        ("accumulated_gradients", lambda m, b: accumulate(m, b[:3]), "3 backward passes"),
        ("accumulated_gradients", accumulate_with_zero_grad, "zero_grad() called in between"),
        ("accumulated_gradients", accumulate_and_divide_each_time, "divided inside the loop"),
        ("accumulated_gradients", accumulate_once, "3 backward passes"),
        ("accumulated_gradients", accumulate_nothing, "is backward() there"),
    ],
)
def test_each_typical_mistake_has_its_hint(name, attempt, hint, capsys):
    getattr(lab.checks, name)(attempt)
    out = capsys.readouterr().out
    assert out.startswith(f"NOT YET  {name}: "), out
    assert hint in out
    assert out.count("\n") == 1


def test_the_check_leaves_the_random_numbers_alone(capsys):
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    lab.checks.accumulated_gradients(accumulate)
    assert torch.equal(torch.rand(3), expected)
