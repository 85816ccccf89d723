"""Loss scaling from nothing: what ``torch.amp.GradScaler`` does, in Python that reads top down.

FP16 flushes small gradients to zero. Multiply the loss by a large scale before backward, and by the
chain rule every gradient is multiplied by it too; divide it out before the optimizer uses them. The
best scale is the largest one that does not overflow. It is found by trying: grow it after a row of
good steps; when a gradient comes out as inf or NaN, skip that step and back off.
"""

import math
import warnings
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

import torch


class _Stage(Enum):
    """How far one optimizer has come since the last ``update()``."""

    READY = "ready"
    UNSCALED = "unscaled"
    STEPPED = "stepped"


@dataclass
class _OptimizerState:
    stage: _Stage = _Stage.READY
    found_inf: bool | None = None  # None: no gradient was checked


def _float32(value: float | torch.Tensor) -> float:
    """Round to FP32, in which ``GradScaler`` keeps its scale; too large becomes inf."""
    return torch.as_tensor(value, dtype=torch.float64).float().item()


class LossScaler:
    """Dynamic loss scaling with the methods and the state of ``torch.amp.GradScaler``.

    One iteration is ``scale(loss).backward()``, ``step(optimizer)`` for each optimizer, then one
    ``update()``. To see or clip the true gradients, call ``unscale_(optimizer)`` before ``step``.

    ``device`` is ``"cuda"`` or ``"cpu"``, the type of device that the gradients live on.
    ``init_scale`` is the first scale. After ``growth_interval`` good iterations in a row the scale
    is multiplied by ``growth_factor`` (above 1), after an overflow by ``backoff_factor`` (below 1);
    other factors raise ``ValueError``. With ``enabled=False`` (or ``"cuda"`` on a machine without
    CUDA, which warns) ``step`` is ``optimizer.step`` and every other method does nothing. Methods
    called in the wrong order raise the error that ``GradScaler`` raises.

    Three things are simpler than in ``GradScaler``. Each check waits for the device to know whether
    it found inf. Optimizers made with ``fused=True``, which could unscale inside their kernel, are
    treated like any other: unscale, then step or skip. And ``step`` refuses a closure that is
    passed by position, not only one that is passed by name.

    Source: Micikevicius et al., Mixed Precision Training, ICLR 2018, section 3.2, for the idea;
    the documentation of ``torch.amp.GradScaler`` for the rules.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        if enabled and growth_factor <= 1.0:
            raise ValueError(f"growth_factor is {growth_factor}; it must be above 1, such as 2.0")
        if enabled and backoff_factor >= 1.0:
            raise ValueError(f"backoff_factor is {backoff_factor}; it must be below 1, such as 0.5")
        if enabled and device == "cuda" and not torch.cuda.is_available():
            warnings.warn("LossScaler: CUDA is not available, scaling is disabled", stacklevel=2)
            enabled = False
        self._device = device
        self._enabled = enabled
        self._scale = init_scale
        self._has_scaled = False  # becomes True with the first scale(loss)
        self._growth_factor = growth_factor
        self._backoff_factor = backoff_factor
        self._growth_interval = growth_interval
        self._growth_tracker = 0  # good iterations in a row
        self._optimizers = defaultdict(_OptimizerState)  # since the last update()

    def scale(self, outputs: torch.Tensor | Iterable) -> torch.Tensor | Iterable:
        """Multiply a tensor of any shape, or each tensor in a nested iterable, by the scale.

        The scale enters as a 0-dim FP32 tensor, so type promotion makes a 0-dim FP16 loss FP32,
        while an FP16 vector stays FP16 (and 65536 times 1 is inf there). Lists and tuples keep
        their type, other iterables become lazy. Anything else raises ``ValueError``.
        """
        if not self._enabled:
            return outputs
        if isinstance(outputs, torch.Tensor):
            self._has_scaled = True
            self._scale = _float32(self._scale)
            return outputs * torch.tensor(self._scale, dtype=torch.float32, device=outputs.device)
        if isinstance(outputs, (list, tuple)):
            return type(outputs)(self.scale(output) for output in outputs)
        if isinstance(outputs, Iterable):
            return map(self.scale, outputs)
        raise ValueError(f"scale() takes a Tensor or an iterable of them, got {type(outputs)}")

    @torch.no_grad()
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the optimizer's gradients by the scale, in place, and note if one is inf or NaN.

        Inf and NaN are looked for before the division. Of a sparse gradient the stored values are
        unscaled. FP16 gradients raise ``ValueError``: they belong to FP16 parameters, and dividing
        in FP16 would flush them to zero again. A second call before ``update()``, or one after
        ``step``, raises ``RuntimeError``.
        """
        if not self._enabled:
            return
        self._require_scaled_loss("unscale_()")
        state = self._optimizers[optimizer]
        if state.stage is _Stage.UNSCALED:
            raise RuntimeError("unscale_() was already called on this optimizer since update()")
        if state.stage is _Stage.STEPPED:
            raise RuntimeError("unscale_() after step(): unscale first, then step, then update()")

        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for p in parameters if p.grad is not None]
        if any(grad.dtype == torch.float16 for grad in gradients):
            raise ValueError(
                "unscale_() found FP16 gradients: keep the parameters in FP32 (no model.half()) "
                "and let autocast choose FP16"
            )
        gradients = [grad._values() if grad.is_sparse else grad for grad in gradients]
        inverse = torch.tensor(self._scale, dtype=torch.float64).reciprocal().float().item()
        if gradients:
            state.found_inf = not all(torch.isfinite(grad).all() for grad in gradients)
        for grad in gradients:
            grad.mul_(inverse)
        state.stage = _Stage.UNSCALED

    def step(self, optimizer: torch.optim.Optimizer, *args, **kwargs):
        """Unscale if that is still to be done, then step, or skip if this optimizer overflowed.

        Returns what ``optimizer.step(*args, **kwargs)`` returns, ``None`` when skipped. A closure,
        or a second call before ``update()``, raises ``RuntimeError``; an optimizer without any
        gradient raises ``AssertionError``.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if "closure" in kwargs or any(callable(arg) for arg in args):
            raise RuntimeError("step() takes no closure: nothing would unscale its gradients")
        self._require_scaled_loss("step()")
        state = self._optimizers[optimizer]
        if state.stage is _Stage.STEPPED:
            raise RuntimeError("step() was already called on this optimizer since update()")
        if state.stage is _Stage.READY:
            self.unscale_(optimizer)
        if state.found_inf is None:
            raise AssertionError("No inf checks: no parameter of this optimizer has a gradient")
        result = None if state.found_inf else optimizer.step(*args, **kwargs)
        state.stage = _Stage.STEPPED
        return result

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Choose the next scale: back off if any optimizer overflowed, else count, perhaps grow.

        The scale never grows to inf. ``new_scale``, a number or a tensor of one element, replaces
        it and leaves the count of good iterations alone. Without it, and with no gradient checked
        since the last ``update()``, raises ``AssertionError``.
        """
        if not self._enabled:
            return
        self._require_scaled_loss("update()")
        checks = [s.found_inf for s in self._optimizers.values() if s.found_inf is not None]
        if new_scale is not None:
            self._scale = _float32(new_scale)
        elif not checks:
            raise AssertionError("No inf checks since the last update(): call step(optimizer)")
        elif any(checks):
            self._scale = _float32(self._scale * self._backoff_factor)
            self._growth_tracker = 0
        else:
            self._growth_tracker += 1
            if self._growth_tracker == self._growth_interval:
                grown = _float32(self._scale * self._growth_factor)
                self._scale = grown if math.isfinite(grown) else self._scale
                self._growth_tracker = 0
        self._optimizers.clear()

    def state_dict(self) -> dict:
        """Everything to resume from; also fits a ``GradScaler``. Empty when disabled."""
        if not self._enabled:
            return {}
        return {
            "scale": self._scale,
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": self._growth_tracker,
        }

    def load_state_dict(self, state_dict: dict) -> None:
        """Resume from a ``LossScaler`` or ``GradScaler``; an empty state is a ``RuntimeError``."""
        if not self._enabled:
            return
        if not state_dict:
            raise RuntimeError("the state is empty: it was saved from a disabled scaler")
        scale = state_dict["scale"]
        self._scale = _float32(scale) if self._has_scaled else scale
        self._growth_factor = state_dict["growth_factor"]
        self._backoff_factor = state_dict["backoff_factor"]
        self._growth_interval = state_dict["growth_interval"]
        self._growth_tracker = state_dict["_growth_tracker"]

    def is_enabled(self) -> bool:
        """Whether the scaler scales at all."""
        return self._enabled

    def get_scale(self) -> float:
        """The current scale; 1.0 when disabled."""
        return self._scale if self._enabled else 1.0

    def get_growth_factor(self) -> float:
        """The factor of growth."""
        return self._growth_factor

    def set_growth_factor(self, new_factor: float) -> None:
        """Change the factor of growth."""
        self._growth_factor = new_factor

    def get_backoff_factor(self) -> float:
        """The factor after an overflow."""
        return self._backoff_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        """Change the factor after an overflow."""
        self._backoff_factor = new_factor

    def get_growth_interval(self) -> int:
        """The number of good iterations in a row after which the scale grows."""
        return self._growth_interval

    def set_growth_interval(self, new_interval: int) -> None:
        """Change the number of good iterations after which the scale grows.

        A number at or below the present count is never met until an overflow resets the count.
        """
        self._growth_interval = new_interval

    def _require_scaled_loss(self, method: str) -> None:
        if not self._has_scaled:
            raise AssertionError(f"{method} before scale(): call scale(loss).backward() first")
