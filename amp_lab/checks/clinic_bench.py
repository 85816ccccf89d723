"""A tiny model under observation: what the checks of notebook 09 share."""

import warnings

import torch
import torch.nn.functional as F
from torch import nn

from ..emulation import tensor_core_emulation
from .exercise import Hint

HALF = {torch.float16, torch.bfloat16}


def treat(attempt, *arguments):
    """Run a learner's function: FP16 products as on a Tensor Core, random numbers left alone."""
    with (
        torch.random.fork_rng(devices=[]),
        warnings.catch_warnings(action="ignore"),
        tensor_core_emulation(),
    ):
        torch.manual_seed(0)
        return attempt(*arguments)


def classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4))


def samples(count: int, size: int = 32, seed: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """`count` batches of inputs (size, 12), and labels of 4 classes that a linear model can learn."""
    generator = torch.Generator().manual_seed(seed)
    teacher = torch.randn(12, 4, generator=generator)
    inputs = torch.randn(count, size, 12, generator=generator)
    return [(x, (x @ teacher).argmax(1)) for x in inputs]


def parameters_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().float().flatten() for p in model.parameters()])


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """How far `a` is from `b`, relative to the length of `b`."""
    return ((a - b).norm() / b.norm().clamp_min(1e-30)).item()


def must_be_differentiable(out: torch.Tensor, inputs, hint: str, weights=1.0) -> None:
    """Refuse a result without a graph, and with `hint` one whose gradients are not finite."""
    if not out.requires_grad:
        raise Hint("the result has no graph: nothing below it would learn.")
    (out.float() * weights).sum().backward()
    if not all(t.grad is not None and t.grad.isfinite().all() for t in inputs):
        raise Hint(hint)


class CountingScaler(torch.amp.GradScaler):
    """A GradScaler that counts how often it was asked to step and to update."""

    steps = updates = 0

    def step(self, *args, **kwargs):
        self.steps += 1
        return super().step(*args, **kwargs)

    def update(self, *args, **kwargs):
        self.updates += 1
        return super().update(*args, **kwargs)


class Patient:
    """A model, its SGD optimizer and its scaler, and a witness of how they are treated.

    `outputs` are the dtypes that came out of Linear layers, `weights` those of the weights at that
    moment.
    """

    def __init__(self, make_model=classifier, lr: float = 0.1, **scaler):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model = make_model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)
        self.scaler = CountingScaler("cpu", **({"init_scale": 1024.0} | scaler))
        self.start = parameters_of(self.model)
        self.outputs, self.weights = set(), set()
        for module in self.model.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(self._look)

    def _look(self, module, inputs, output):
        self.outputs.add(output.dtype)
        self.weights.add(module.weight.dtype)

    @property
    def update(self) -> torch.Tensor:
        """How far the parameters have come since the start, as one FP32 vector."""
        return parameters_of(self.model) - self.start

    @property
    def loss(self) -> float:
        x, y = samples(1, size=256, seed=2)[0]
        with torch.no_grad():
            return F.cross_entropy(self.model.float()(x), y).item()

    def must_be_mixed(self) -> None:
        """Refuse a cure that gives up FP32 weights, or 16-bit products."""
        narrow = (self.weights | {p.dtype for p in self.model.parameters()}) & HALF
        if torch.bfloat16 in narrow:
            raise Hint(
                "the weights are BF16 now. The CPU lets that pass, a scaler on CUDA refuses BF16 "
                "gradients. Keep FP32 weights; autocast casts copies of them."
            )
        if narrow:
            raise Hint("the weights are FP16. Keep FP32 weights; autocast casts copies of them.")
        if not self.outputs:
            raise Hint("the model was not called.")
        if not self.outputs & HALF:
            raise Hint(
                "no layer runs in 16 bits any more. The fault is gone, and so is mixed precision: keep "
                "the forward pass under autocast."
            )

    def must_match(self, expected: torch.Tensor, mistakes: dict, tolerance: float = 0.03) -> None:
        """Compare the update with that of FP32; `mistakes` maps hints to wrong updates."""
        if distance(self.update, expected) < tolerance:
            return
        if not self.update.isfinite().all():
            raise Hint("the weights are inf or NaN after this.")
        if not self.update.any():
            raise Hint("the weights did not change at all.")
        for hint, wrong in mistakes.items():
            if distance(self.update, wrong) < tolerance:
                raise Hint(hint)
        length = (self.update.norm() / expected.norm()).item()
        raise Hint(
            f"the weights moved, but not as FP32 would move them: {length:.2g} times as far. Is every "
            "gradient unscaled once, and are there as many steps as there should be?"
        )


def fp32_update(
    batches,
    make_model=classifier,
    lr: float = 0.1,
    accumulate: int = 1,
    max_norm: float | None = None,
    divide: bool = True,
    reduction: str = "mean",
) -> torch.Tensor:
    """The update that training in FP32 makes, from the same start as a `Patient`."""
    patient = Patient(make_model, lr)
    for i, (x, y) in enumerate(batches, start=1):
        loss = F.cross_entropy(patient.model(x), y, reduction=reduction)
        (loss / accumulate if divide else loss).backward()
        if i % accumulate == 0:
            if max_norm is not None:
                nn.utils.clip_grad_norm_(patient.model.parameters(), max_norm)
            patient.optimizer.step()
            patient.optimizer.zero_grad()
    return patient.update
