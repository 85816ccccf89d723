"""One training loop for every precision: what differs between FP32, FP16 and BF16 is data."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from .emulation import tensor_core_emulation


@dataclass(frozen=True)
class Recipe:
    """How precise each part of a training step is.

    `autocast` is the dtype that autocast gives to the heavy operations, or None for no autocast.
    `scaling` says whether the loss is scaled. `parameters` is the dtype of the model's weights.
    """

    name: str
    autocast: torch.dtype | None = None
    scaling: bool = False
    parameters: torch.dtype = torch.float32

    def forward_context(self, device_type: str) -> torch.autocast:
        """The context manager for the forward pass and the loss."""
        return torch.autocast(device_type, dtype=self.autocast, enabled=self.autocast is not None)

    def arithmetic(self, device_type: str):
        """The context manager for a whole step: FP16 on a CPU is emulated, all else is native."""
        half = torch.float16 in (self.autocast, self.parameters)
        return (
            tensor_core_emulation() if half and device_type == "cpu" else contextlib.nullcontext()
        )


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("fp32"),
        Recipe("fp16 (no scaling)", autocast=torch.float16),
        Recipe("fp16 + GradScaler", autocast=torch.float16, scaling=True),
        Recipe("bf16", autocast=torch.bfloat16),
        Recipe("pure fp16", parameters=torch.float16),
        Recipe("pure bf16", parameters=torch.bfloat16),
    )
}


@dataclass(frozen=True)
class Step:
    """What one training step did.

    `index` counts from 0, `loss` is the unscaled loss, `scale` the loss scale that was used (1.0
    without scaling), `skipped` whether the scaler refused the update, `zero_share` the share of all
    gradient elements that are exactly 0, `seconds` the wall time of the step.
    """

    index: int
    loss: float
    scale: float
    skipped: bool
    zero_share: float
    seconds: float


def train(
    model: nn.Module,
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
    recipe: Recipe,
    optimizer: torch.optim.Optimizer | None = None,
    loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = F.cross_entropy,
    scaler=None,
    scheduler=None,
    emulate: bool = True,
) -> Iterator[Step]:
    """Train `model`, and yield a `Step` after each batch. The caller shows, stops or records.

    `batches` is any iterable of (input, target) on the model's device. Without an `optimizer` it is
    AdamW with learning rate 1e-3; without a `scaler` it is `torch.amp.GradScaler`, switched off if
    the recipe does not scale. A `scheduler` moves on only when the optimizer did. On a CPU, FP16 goes
    through `tensor_core_emulation` unless `emulate` is False.

    Ctrl-C (Jupyter's stop button) lets the current step finish, yields it, and then raises
    `KeyboardInterrupt`: model, optimizer and scaler always belong to the same step. To go on, call
    `train` again with the same optimizer, scaler and scheduler.

    Source: docs.pytorch.org, "Automatic Mixed Precision examples".
    """
    if not isinstance(recipe, Recipe):
        raise TypeError(
            f"train: recipe is {recipe!r}, expected a Recipe such as RECIPES['bf16']; "
            f"there are {', '.join(map(repr, RECIPES))}"
        )
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise ValueError(f"train: {type(model).__name__} has no parameter that requires a gradient")
    if scaler is not None and not recipe.scaling:
        raise ValueError(
            f"train: a scaler was given, but the recipe {recipe.name!r} does not scale the loss; "
            "leave the scaler out, or use 'fp16 + GradScaler'"
        )
    return _steps(
        model, parameters, batches, recipe, optimizer, loss_fn, scaler, scheduler, emulate
    )


def _steps(model, parameters, batches, recipe, optimizer, loss_fn, scaler, scheduler, emulate):
    device_type = parameters[0].device.type
    model.to(recipe.parameters).train()
    if optimizer is None:
        optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    if scaler is None:
        scaler = torch.amp.GradScaler(device_type, enabled=recipe.scaling)
    arithmetic = recipe.arithmetic if emulate else contextlib.nullcontext

    for index, (inputs, targets) in enumerate(batches):
        start = time.perf_counter()
        with interrupts_held_back() as interrupted:
            if inputs.is_floating_point():
                inputs = inputs.to(recipe.parameters)
            optimizer.zero_grad()
            with arithmetic(device_type):
                with recipe.forward_context(device_type):
                    loss = loss_fn(model(inputs), targets)
                scaler.scale(loss).backward()
            scale = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            skipped = scaler.get_scale() < scale
            if scheduler is not None and not skipped:
                scheduler.step()
            loss = loss.item()
        seconds = time.perf_counter() - start
        yield Step(index, loss, scale, skipped, _zero_share(parameters), seconds)
        if interrupted:
            raise KeyboardInterrupt


@torch.no_grad()
def accuracy(
    model: nn.Module, dataset: TensorDataset, recipe: Recipe = RECIPES["fp32"], size: int = 500
) -> float:
    """Share of the examples in `dataset` that `model` classifies correctly, from 0 to 1.

    The forward pass runs in the recipe's precision, `size` examples at a time, in evaluation mode.
    """
    device_type = next(model.parameters()).device.type
    was_training = model.training
    model.eval()
    inputs, targets = dataset.tensors
    correct = 0
    with recipe.arithmetic(device_type), recipe.forward_context(device_type):
        for x, y in zip(inputs.split(size), targets.split(size), strict=True):
            correct += (model(x.to(recipe.parameters)).argmax(1) == y).sum()
    model.train(was_training)
    return float(correct) / len(dataset)


def _zero_share(parameters) -> float:
    gradients = [p.grad for p in parameters if p.grad is not None]
    nonzero = torch.stack([g.count_nonzero() for g in gradients]).sum()
    return 1.0 - float(nonzero) / sum(g.numel() for g in gradients)


@contextlib.contextmanager
def interrupts_held_back():
    """Note Ctrl-C instead of raising it: the list that is yielded fills up if it was pressed."""
    pressed = []
    if threading.current_thread() is not threading.main_thread():
        yield pressed
        return
    previous = signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, previous)
