"""Exercises of notebook 09, ward C: NaN, where it is born, and one function for specialists."""

import torch
import torch.nn.functional as F
from torch import nn

from .clinic_bench import HALF, Patient, must_be_differentiable, parameters_of, samples, treat
from .clinic_errors import PRECISIONS, attention_inputs, exact_weights, short, under_autocast
from .exercise import Hint, exercise

__all__ = ["heal_blank", "heal_exam", "heal_function", "heal_scores", "heal_standardize"]


@exercise
def heal_scores(attempt):
    """Check `attention(q, k, v)`: right for products q.k beyond 65504, and for ordinary ones."""
    q, k, v, _ = attention_inputs(torch.float32, size=64)
    large_q, large_k = torch.zeros(2, 3, 5, 64)
    large_q[..., :] = 40.0
    large_k[...] = torch.tensor([0.1, 20.0, 45.0, 60.0, 30.0]).view(5, 1)  # q.k up to 153,600
    cases = [
        ("large", large_q, large_k),
        ("ordinary", q.detach()[[0, 2, 2]], k.detach()[[0, 2, 2]]),
    ]
    for name, q, k in cases:
        half = [t.half().requires_grad_() for t in (q, k, v.detach())]
        with under_autocast(torch.float16):
            out = treat(attempt, *half)
        if not isinstance(out, torch.Tensor) or out.shape != v.shape:
            raise Hint(f"return a tensor of v's shape, {tuple(v.shape)}.")
        if not out.isfinite().all():
            raise Hint(
                "the output is still NaN where q.k is beyond 65504. It becomes inf inside the product: "
                "whatever you do to the scores afterwards comes too late, and .float() on q and k is "
                "undone by autocast."
            )
        exact = exact_weights(*half[:2]) @ half[2].detach().double()
        if (out.detach().double() - exact).abs().max() > 0.05:
            raise Hint(
                "no NaN any more, but the wrong answer: products of 115,000 and 154,000 are equal "
                "now. inf was replaced or clamped. Let it not arise: make q or k smaller before "
                "the product."
                if name == "large"
                else "large scores are right, ordinary ones are not: each score is q.k / sqrt(64)."
            )
        hint = "the output is right, but gradients are missing, inf or NaN."
        must_be_differentiable(out, half, hint)
    return "small before the product, so that nothing overflows inside it."


@exercise
def heal_blank(attempt):
    """Check `attention(q, k, v, hidden)`: zeros for a query that may see nothing."""
    for dtype in PRECISIONS:
        q, k, v, hidden = attention_inputs(dtype)
        hidden = hidden.clone()
        hidden[2] = True
        with under_autocast(dtype):
            out = treat(attempt, q, k, v, hidden)
        if not isinstance(out, torch.Tensor) or out.shape != v.shape:
            raise Hint(f"return a tensor of v's shape, {tuple(v.shape)}.")
        if out[2].isnan().any():
            raise Hint(
                "the lines that may see nothing are still NaN: softmax over -inf alone is 0/0."
            )
        if out[2].abs().max() > 1e-6:
            raise Hint(
                "no NaN any more, but the lines that may see nothing get the average of all that is "
                "hidden from them. They must be zero: mask the weights once more, after the softmax."
            )
        exact = exact_weights(q, k, hidden)[0] @ v[0].detach().double()
        limit = 0.1 if dtype is torch.bfloat16 else 0.02
        if not (out[0].detach().double() - exact).abs().max() < limit:
            raise Hint(f"the other lines are no longer right, for {short(dtype)} inputs.")
        hint = (
            "forward is finite now, but there are NaN gradients: a NaN was made and replaced later, "
            "and the backward pass multiplied by it. Best let none arise."
        )
        must_be_differentiable(out, (q, k, v), hint)
    return "zeros for those who see nothing, and finite gradients for all."


@exercise
def heal_standardize(attempt):
    """Check `standardize(x)`: finite without contrast, right with little, in both directions."""
    generator = torch.Generator().manual_seed(4)
    rows = torch.randn(4, 64, generator=generator)
    rows = (rows - rows.mean(-1, keepdim=True)) / rows.std(-1, keepdim=True)
    contrast = torch.tensor([0.0, 0.05, 1.0, 300.0]).unsqueeze(1)
    for dtype in PRECISIONS:
        x = (rows * contrast).to(dtype).requires_grad_()
        with under_autocast(dtype):
            out = treat(attempt, x)
        if not isinstance(out, torch.Tensor) or out.shape != x.shape:
            raise Hint(f"return a tensor of x's shape, {tuple(x.shape)}.")
        if not out[0].isfinite().all():
            raise Hint(
                f"a row without contrast still gives NaN in {short(dtype)}: 0 divided by 0. 1e-8 is 0 "
                "in FP16, whose smallest number is 6e-8."
            )
        if not out.isfinite().all():
            raise Hint("a row with a contrast of 300 gives inf or NaN: its squares pass 65504.")
        exact = x.detach().double()
        exact = exact - exact.mean(-1, keepdim=True)
        exact = exact / exact.std(-1, keepdim=True).clamp_min(1e-30)
        error = (out.detach().double() - exact).norm(dim=-1) / exact.norm(dim=-1).clamp_min(1)
        if error[1] > 0.05:
            raise Hint(
                "a row with a contrast of 0.05 is off by more than 5 %: the eps is too large, and "
                "drowns the standard deviation."
            )
        if error.max() > 0.05:
            raise Hint(f"a row with contrast is off by more than 5 % in {short(dtype)}.")
        # The gradients of a mean over 4 x 64 numbers, scaled by 1024.
        weights = torch.randn(4, 64, generator=generator)
        hint = (
            "forward is finite, but the gradients of a row without contrast are not, in "
            f"{short(dtype)}: backward multiplies by 1/eps. Choose an eps that both directions can "
            "bear, about 1e-3, or layer_norm's, which stands inside the root."
        )
        must_be_differentiable(out, [x], hint, weights * 1024 / weights.numel())
    return "an eps that FP16 can hold, forward and backward."


@exercise
def heal_exam(attempt):
    """Check `train_step(model, optimizer, scaler, images, labels)`: a finite exam."""

    def make_model():
        return nn.Sequential(
            nn.Linear(12, 32), nn.BatchNorm1d(32, momentum=0.3), nn.ReLU(), nn.Linear(32, 4)
        )

    batches = samples(55)
    reference, patient = Patient(make_model), Patient(make_model)
    for x, y in batches[:10]:
        loss = F.cross_entropy(reference.model(x), y)
        reference.optimizer.zero_grad()
        loss.backward()
        reference.optimizer.step()
        treat(attempt, patient.model, patient.optimizer, patient.scaler, x, y)
    patient.must_be_mixed()
    norm, right = patient.model[1], reference.model[1]
    if not norm.running_mean.any():
        raise Hint(
            "on good batches the running statistics never moved, so evaluation would be wrong: batch "
            "norm must stay in train() mode."
        )
    patient.must_match(reference.update, {}, tolerance=0.05)
    if (norm.running_var - right.running_var).norm() > 0.05 * right.running_var.norm():
        raise Hint(
            "on good batches the running statistics are not what they were before your change."
        )

    x, y = batches[10]
    bad = x.clone()
    bad[0] *= 2e5
    treat(attempt, patient.model, patient.optimizer, patient.scaler, bad, y)
    if not parameters_of(patient.model).isfinite().all():
        raise Hint(
            "the bad batch made the weights inf or NaN: step through scaler.step(optimizer)."
        )
    if not all(buffer.isfinite().all() for buffer in patient.model.buffers()):
        raise Hint(
            "a bad batch still leaves inf or NaN in batch norm's running statistics. They were updated "
            "in the forward pass: looking at the loss, or skipping the step, comes after that."
        )
    for x, y in batches[11:]:
        treat(attempt, patient.model, patient.optimizer, patient.scaler, x, y)
    patient.model.eval()
    x, y = samples(1, size=256, seed=1)[0]
    with torch.no_grad():
        loss = F.cross_entropy(patient.model(x), y)
    if not loss.isfinite():
        raise Hint("evaluation is still inf or NaN after the bad batch.")
    before = Patient(make_model)
    before.model.eval()
    with torch.no_grad():
        start = F.cross_entropy(before.model(x), y)
    if not loss < start:
        raise Hint("evaluation is finite, but no better than before the training.")
    return "a bad batch leaves no trace, and evaluation is finite."


@exercise
def heal_function(attempt):
    """Check `Product`, an autograd.Function: 16 bits under autocast, in both directions."""
    generator = torch.Generator().manual_seed(5)
    x0, w0 = (torch.randn(*shape, generator=generator) for shape in ((6, 12), (4, 12)))
    weights = torch.randn(6, 4, generator=generator)
    product = getattr(attempt, "apply", attempt)
    for dtype in PRECISIONS:
        x, w = x0.clone().requires_grad_(), w0.clone().requires_grad_()
        try:
            with under_autocast(dtype):
                out = treat(product, x, w)
            if not isinstance(out, torch.Tensor) or out.shape != weights.shape:
                raise Hint("forward returns x @ weight.T, of shape (6, 4) here.")
            treat(lambda out=out: (out.float() * weights).sum().backward())
        except RuntimeError as error:
            if "same dtype" in str(error):
                raise Hint(
                    f"two dtypes still meet, {short(dtype)} autocast: grad has the dtype of the "
                    "output, the saved tensors that of the inputs, and autocast is off in backward. "
                    "(custom_fwd and custom_bwd do nothing for another device_type.)"
                ) from None
            raise
        except AttributeError as error:
            if "_fwd_used_autocast" in str(error):
                raise Hint(
                    "custom_bwd needs custom_fwd on forward, which notes the autocast state for it."
                ) from None
            raise
        if dtype in HALF and out.dtype is torch.float32:
            raise Hint(
                f"under {short(dtype)} autocast the product now runs in FP32. It works, at the price "
                "of speed: leave forward to autocast, and mend backward."
            )
        if out.dtype is not dtype:
            raise Hint(
                f"under {short(dtype)} the product gives {out.dtype}: do not hard-code a dtype."
            )
        right_x, right_w = weights @ w0, weights.T @ x0
        limit = 0.05 if dtype in HALF else 1e-4
        for name, got, right in (("x", x.grad, right_x), ("weight", w.grad, right_w)):
            if got is None or not (got - right).norm() < limit * right.norm():
                raise Hint(f"the gradient of {name} is wrong under {short(dtype)}.")
    return "16 bits under autocast, right gradients, and FP32 where autocast is off."
