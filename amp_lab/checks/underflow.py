"""Exercises of notebook 04, gradient underflow."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from .exercise import Hint, exercise

__all__ = [
    "accumulated_gradients",
    "share_lost",
    "vanishing_tokens",
    "wrong_word_gradient",
]


def _number(answer):
    try:
        return float(answer)
    except (TypeError, ValueError, RuntimeError):
        raise Hint(f"return one number; this is a {type(answer).__name__}.") from None


def _close(a, b):
    return math.isclose(a, b, rel_tol=1e-4)


# ---- the size of one gradient --------------------------------------------------------------------


def _measured(vocabulary, tokens, micro_batches):
    """The same from autograd: logits of zero make all words equally likely."""
    logits = torch.zeros(tokens, vocabulary, dtype=torch.float64, requires_grad=True)
    loss = F.cross_entropy(logits, torch.zeros(tokens, dtype=torch.int64)) / micro_batches
    loss.backward()
    return logits.grad[0, -1].item()


@exercise
def wrong_word_gradient(attempt):
    """Check `wrong_word_gradient(vocabulary, tokens, micro_batches)`.

    It must return the gradient of the loss with respect to one wrong word's logit, where all words are
    equally likely, the loss is the mean over `tokens`, and is divided by `micro_batches`.
    """
    for v, n, k in ((10, 4, 1), (50, 6, 1), (10, 4, 5)):
        case = f"vocabulary {v}, {n} tokens, {k} micro-batches"
        given, right = _number(attempt(v, n, k)), _measured(v, n, k)
        if _close(given, right):
            continue
        if _close(given, -right):
            raise Hint(
                f"{case}: the size is right, the sign is not. A wrong word's target is 0, so p minus "
                "the target is positive: gradient descent pushes the word down."
            )
        if _close(abs(given), (1 - 1 / v) / (n * k)):
            raise Hint(
                f"{case}: that is the right word's gradient, p - 1. A wrong word's target is 0."
            )
        if _close(given, 1 / v) or _close(given, 1 / (v * k)):
            raise Hint(f"{case}: the loss is a mean over the tokens, so each gets 1/{n} of it.")
        if _close(given, 1 / n) or _close(given, 1 / (n * k)):
            raise Hint(
                f"{case}: how likely is one word, if all {v} are equally likely? Its gradient is p."
            )
        if k > 1 and _close(given, 1 / (v * n)):
            raise Hint(f"{case}: with 1 micro-batch it was right. Here the loss is divided by {k}.")
        if k > 1 and _close(given, k / (v * n)):
            raise Hint(f"{case}: more micro-batches make each gradient smaller, not larger.")
        if _close(given, v * n * k):
            raise Hint(f"{case}: that is one over the right number.")
        raise Hint(
            f"{case}: autograd says {right:.6g}, you say {given:.6g}. Three factors: the probability "
            "of one word, the mean over the tokens, the division by the micro-batches."
        )
    return "as autograd has it: 1 / (vocabulary x tokens x micro-batches)."


# ---- the share that FP16 loses -------------------------------------------------------------------


@exercise
def share_lost(attempt):
    """Check `share_lost(gradient)`: the share of the nonzero elements that FP16 flushes to zero."""
    plain = torch.tensor([1e-9, 1e-8, 0.5, 1.0])
    before = plain.clone()
    given = _number(attempt(plain))
    if not torch.equal(plain, before):
        raise Hint("your function changed the gradient it was given; work on a copy.")
    if _close(given, 50):
        raise Hint("a share lies between 0 and 1: leave out the factor 100.")
    if given == 2:
        raise Hint("that is the number of lost elements; divide by how many there are.")
    if given != 0.5:
        raise Hint(f"of [1e-9, 1e-8, 0.5, 1.0] two of four are lost: 0.5. You say {given:.4g}.")

    given = _number(attempt(torch.tensor([1e-9, 1.0, 1.0, 1.0])))
    if given == 0.75:
        raise Hint("of [1e-9, 1, 1, 1] one of four is lost: you count those that are kept.")
    given = _number(attempt(torch.tensor([1e-6, 1e-5, 2.0**-24, 1.0])))
    if given in (0.5, 0.75):
        raise Hint(
            "1e-6 is below the smallest normal number, 6.1e-5, but it is not lost: it becomes a "
            "subnormal number. What does .half() make of it?"
        )
    if given != 0:
        raise Hint(
            "of [1e-6, 1e-5, 2**-24, 1] nothing is lost: 2**-24 is the smallest FP16 number."
        )
    given = _number(attempt(torch.tensor([-1e-6, -1.0, 1e-9, 1.0])))
    if given > 0.25:
        raise Hint("-1e-6 and -1.0 are not small: their size counts, not their sign.")

    given = _number(attempt(torch.tensor([1.1 * 2.0**-25, 1.9 * 2.0**-25, 2.0**-25, 1e-9])))
    if given == 1:
        raise Hint(
            "1.1 x 2^-25 is below the smallest FP16 number, 2^-24, but nearer to it than to 0, and is "
            "rounded up. Half the smallest number is the border."
        )
    if given == 0.25:
        raise Hint("2^-25 lies exactly in the middle between 0 and 2^-24. The tie goes to 0.")
    zeros = torch.tensor([0.0, 0.0, 0.0, 1e-9, 1.0])
    given = _number(attempt(zeros))
    if given in (0.8, 4.0) or _close(given, 0.8):
        raise Hint(
            "of [0, 0, 0, 1e-9, 1.0] you count the zeros as lost. They were zero "
            "before: nothing is lost."
        )
    if _close(given, 0.2):
        raise Hint(
            "of [0, 0, 0, 1e-9, 1.0] one of two nonzero elements is lost; you divide by five."
        )

    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(64, 64, generator=generator) * 2.0**-25
    gradient[:16] = 0
    nonzero = gradient[gradient != 0]
    right = (nonzero.half() == 0).float().mean().item()
    given = _number(attempt(gradient))
    if abs(given - right) > 1e-6:
        raise Hint(f"for a random 64 x 64 gradient the share is {right:.4f}, you say {given:.4f}.")
    return "zeros, subnormal numbers and the tie at 2^-25 included."


# ---- the batch at which they vanish --------------------------------------------------------------


@exercise
def vanishing_tokens(attempt):
    """Check `vanishing_tokens(vocabulary)`: the smallest number of tokens at which FP16 gets 0.

    All words are equally likely, and the loss is the mean over the tokens.
    """
    for v in (1000, 16384, 50257):
        given, right = _number(attempt(v)), math.ceil(2**25 / v)
        if given == right:
            continue
        case = f"vocabulary {v}"
        if v == 16384 and given == right + 1:
            raise Hint(
                f"{case}: at {right} tokens the gradient is exactly 2^-25, half the smallest FP16 "
                "number, and ties go to the even neighbor: 0."
            )
        if given != math.floor(given) and _close(given, 2**25 / v):
            raise Hint(f"{case}: {given:.2f} tokens? Return the next whole number.")
        if given == math.floor(2**25 / v) or given == round(2**25 / v):
            raise Hint(
                f"{case}: {given:.0f} tokens are not quite enough: {1 / (v * given):.8g} is still "
                f"above 2^-25 = {2**-25:.8g}. Round up."
            )
        for exponent, meaning in ((24, "smallest FP16 number"), (14, "smallest normal number")):
            if abs(given - 2**exponent / v) <= 1:
                raise Hint(
                    f"{case}: you use 2^-{exponent}, the {meaning}. Rounding to nearest gives 0 only "
                    "at or below half the smallest number, 2^-25."
                )
        if abs(given - 1 / 3.0e-8 / v) <= 1:
            raise Hint(
                f"{case}: 3.0e-8 is the border as the table rounds it. Use the exact one, 2^-25."
            )
        raise Hint(
            f"{case}: solve 1 / (vocabulary x tokens) <= 2^-25 for the tokens. You say {given:g}, but "
            + (
                f"{right} are enough."
                if given > right
                else f"then FP16 still holds {torch.tensor(1 / (v * max(given, 1))).half().item():.3g}."
            )
        )
    return "668 tokens are enough for a vocabulary of 50,257 words, that of GPT-2."


# ---- accumulate without making it worse ----------------------------------------------------------


class _Watched(nn.Module):
    """A tiny word model that notes how large the gradients at its logits are."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.output = nn.Linear(8, 16)
        self.sizes = []

    def forward(self, words):
        logits = self.output(self.embedding(words))
        logits.register_hook(
            lambda gradient: self.sizes.append(gradient.float().abs().max().item())
        )
        return logits


@exercise
def accumulated_gradients(attempt):
    """Check `accumulated_gradients(model, micro_batches)`.

    It must leave in `.grad` the mean of the gradients of all micro-batches, from backward passes that
    are not made smaller. It is run in FP32 on the CPU, whatever this machine has.
    """
    state = torch.random.get_rng_state()
    torch.manual_seed(0)
    model, reference = _Watched(), _Watched()
    reference.load_state_dict(model.state_dict())
    micro_batches = [(torch.randint(16, (6,)), torch.randint(16, (6,))) for _ in range(4)]
    torch.random.set_rng_state(state)
    losses = [F.cross_entropy(reference(words), targets) for words, targets in micro_batches]
    torch.stack(losses).mean().backward()
    whole = 4 * max(reference.sizes)

    attempt(model, list(micro_batches))

    gradients = [p.grad for p in model.parameters()]
    if any(g is None for g in gradients):
        raise Hint(
            "a parameter has no gradient afterwards: is backward() there, and no zero_grad()?"
        )
    if len(model.sizes) < 4:
        raise Hint(
            f"{len(model.sizes)} backward passes for 4 micro-batches: call backward() for each of them."
        )
    ratio = _ratio(gradients, [p.grad for p in reference.parameters()])
    small = max(model.sizes) < 0.5 * whole
    if ratio is None:
        raise Hint(
            "the gradients are not the mean over the micro-batches. Was one left out, zero_grad() "
            "called in between, or p.grad divided inside the loop, earlier micro-batches included?"
        )
    if _near(ratio, 4) and not small:
        raise Hint(
            "the gradients are the sum over the 4 micro-batches. Divide each p.grad by 4 at the end, "
            "in place."
        )
    if small and _near(ratio, 1):
        raise Hint(
            "the mean is right, but the loss was divided before backward(), so the gradients at the "
            "logits were 4 times smaller. Divide the parameters' gradients instead: those are FP32."
        )
    if not _near(ratio, 1):
        raise Hint(
            f"the gradients are {ratio:.4g} times what they should be. Divide once, after the last "
            "backward pass, by the number of micro-batches."
        )
    return "the mean is right, and no backward pass was made smaller for it."


def _near(a, b):
    """Equal as far as FP16 can tell: the learner may use autocast."""
    return math.isclose(a, b, rel_tol=0.01)


def _ratio(ours, theirs):
    """By how much `ours` is a multiple of `theirs`, or None if it is not."""
    a, b = (torch.cat([g.flatten() for g in gradients]) for gradients in (ours, theirs))
    ratio = (a @ b / (b @ b)).item()
    return ratio if torch.allclose(a, ratio * b, rtol=0, atol=0.01 * a.abs().max().item()) else None
