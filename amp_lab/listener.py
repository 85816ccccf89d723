"""Listening to a training loop: what it calls, in which order, and a few numbers of each step.

PyTorch has hooks for the forward pass and for optimizers. For the rest (the scaler, `backward`,
autocast, schedulers, norms) the function or method itself is replaced, while listening, by one that
notes the call and makes it.
"""

import functools
import inspect
import math
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim.lr_scheduler import LRScheduler

from .findings import ADVICE, CERTAIN, LIKELY, Finding, note_no_gradients
from .nonfinite import (
    LOWER_PRECISION,
    Origin,
    OriginFinder,
    nonfinite_shares,
    stored,
    tensors_in,
    to_floats,
)
from .scaler import LossScaler

SCALER_METHODS = ("scale", "unscale_", "step", "update")
SMALLEST_NORMAL_FP16 = 2.0**-14
SEARCHES = 3  # at most so many forward passes are searched for the first inf or NaN
COMPARED_WEIGHTS = 1_000_000  # at most so many 16-bit weights are copied to see whether they move


@dataclass(frozen=True)
class WatchedStep:
    """One attempt to step one optimizer.

    `index` counts the attempts of this optimizer from 0, `optimizer` is its position among those
    that were given to `watch`. `loss` is the mean of the losses, without the loss scale, of the
    backward passes since the last attempt (None if there were none), `scale` the loss scale in use
    (1.0 without scaling), `skipped` whether the scaler refused the update.

    `zero_share` gives, by parameter, the share of gradient elements that are exactly 0 (None in steps
    that are not sampled). `nonfinite_share` gives the share that is inf or NaN, for the parameters
    that have any. Both are counted after `unscale_` and before clipping, where the loop calls it.
    `nonfinite_buffers` names the buffers of the model that hold inf or NaN.
    """

    index: int
    optimizer: int
    loss: float | None
    scale: float
    skipped: bool
    zero_share: dict[str, float] | None
    nonfinite_share: dict[str, float]
    nonfinite_buffers: tuple[str, ...]


@dataclass
class _Scaler:
    """What is known about one scaler."""

    scaler: object
    scale: float
    fresh: bool
    updates: int = 0


@dataclass
class _Measured:
    """Numbers of one attempt, taken when its gradients were unscaled."""

    loss: float | None
    zero_share: dict[str, float] | None
    nonfinite_share: dict[str, float]


@dataclass
class _Optimizer:
    """What is known about one optimizer: for the whole block, and since its last attempt."""

    optimizer: torch.optim.Optimizer
    position: int
    attempts: list[bool] = field(default_factory=list)  # True: skipped
    at_update: list[int] = field(default_factory=list)  # how many update() came before each
    scalers: dict[int, _Scaler] = field(default_factory=dict)  # those that stepped it
    without_scaling: int = 0
    had_state: bool = False
    with_gradient: set[int] = field(default_factory=set)  # id(parameter)
    scheduler_calls: int = 0
    scheduler_on_skip: list[int] = field(default_factory=list)
    tiny: dict[str, tuple[float, float, int]] = field(default_factory=dict)  # tiny, 0, size
    unmoved: list[float] = field(default_factory=list)
    settled: dict[int, int] = field(default_factory=dict)  # versions after unscale_ or step
    erased: bool = False  # zero_grad() came after backward()
    copies: list = field(default_factory=list)  # of 16-bit weights, before the step
    ran: bool = False  # the optimizer made its last step

    def __post_init__(self):
        self.begin()

    def begin(self):
        """Forget what belongs to one attempt."""
        self.scaled_by: list[tuple[_Scaler, float, int]] = []
        self.backwards = 0
        self.versions: dict[int, int] = {}  # after the last backward
        self.losses: list[torch.Tensor] = []
        self.checked = self.unscaled = False
        self.norm_read = self.multiplied = self.clamped = False  # while scaled
        self.mixed: str | None = None  # scaled gradients were added to unscaled ones, and why
        self.measured: _Measured | None = None

    def forget_gradients(self):
        self.erased = self.backwards > 0
        self.settled = {}
        self.begin()

    @property
    def parameters(self) -> list[torch.Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    @property
    def index(self) -> int:
        return len(self.attempts)

    @property
    def sampled(self) -> bool:
        return self.index < 10 or self.index % 10 == 0

    def grad_versions(self) -> dict[int, int]:
        return {id(p): p.grad._version for p in self.parameters if p.grad is not None}


class Listener:
    """Listens between `start` and `stop`. What it heard is in its public attributes."""

    def __init__(self, models, optimizers, scaler):
        self.models: list[nn.Module] = models
        self.root = models[0] if len(models) == 1 else nn.ModuleList(models)
        self.optimizers = {id(o): _Optimizer(o, i) for i, o in enumerate(optimizers)}
        self.given_scaler = scaler

        self.steps: list[WatchedStep] = []
        self.notes: dict[str, Finding] = {}
        self.scalers: dict[int, _Scaler] = {}
        self.failed: _Optimizer | None = None  # its scaler.step raised
        self.backwards = 0
        self.forwards: Counter = Counter()  # by autocast dtype, None without autocast
        self.autocast_devices: set[str] = set()
        self.bad_buffers: dict[str, int] = {}  # by name, the first step
        self.origin: Origin | None = None  # of the first inf or NaN in a forward pass
        self.probed = 0  # forward passes that were searched for it

        self._undo: ExitStack | None = None
        self._inside: set[str] = set()  # the listening functions that are running
        self._names = {id(p): name for name, p in self.root.named_parameters()}
        self._pending: _Scaler | None = None  # scale() was called since the last step
        self._outputs: dict[int, tuple] = {}  # what scale() returned, and the loss it was given
        self._stepping: _Optimizer | None = None  # inside scaler.step
        self._ignored_buffers: set[str] = set()
        self._in_trouble = False  # search the next forward pass
        self._finder: OriginFinder | None = None

    def start(self) -> None:
        """Listen. Raises `RuntimeError` the second time."""
        if self._undo is not None:
            raise RuntimeError(
                "this log has its record: call lab.watch(...) again for another loop"
            )
        with ExitStack() as undo:
            self._undo = undo
            self._listen()
            self._undo = undo.pop_all()
        running = {
            f"{name}.{statistic}".lstrip(".")
            for name, module in self.root.named_modules()
            if isinstance(module, _NormBase)
            for statistic in ("running_mean", "running_var")
        }
        self._ignored_buffers = set(self._find_bad_buffers()) - running

    def stop(self) -> None:
        """Put everything back, and look at the model for the last time."""
        self._undo.close()
        self._end_search()
        last = max(known.index for known in self.optimizers.values()) - 1
        self._note_bad_buffers(max(last, 0))

    def note(self, code: str, certainty: str, sentence: str, step: int | None = None) -> None:
        """Keep the first finding of each kind."""
        self.notes.setdefault(code, Finding(code, sentence, certainty, ADVICE[code], step))

    def _listen(self) -> None:
        for known in self.optimizers.values():
            before = known.optimizer.register_step_pre_hook(self._before_optimizer)
            after = known.optimizer.register_step_post_hook(self._after_optimizer)
            self._undo.callback(before.remove)
            self._undo.callback(after.remove)
        for model in self.models:
            self._undo.callback(model.register_forward_pre_hook(self._before_forward).remove)
            after = model.register_forward_hook(self._after_forward, always_call=True)
            self._undo.callback(after.remove)

        kinds = [torch.amp.GradScaler, LossScaler]
        if self.given_scaler is not None:
            kinds += type(self.given_scaler).__mro__
        for kind in dict.fromkeys(kinds):
            for name in SCALER_METHODS:
                if name in vars(kind):
                    self._replace(kind, name, getattr(self, f"_scaler_{name}"))
        for kind in _family(LRScheduler):
            if "step" in vars(kind):
                self._replace(kind, "step", self._scheduler_step)
        self._replace(torch.autograd, "backward", self._backward)
        self._replace(torch.autocast, "__init__", self._autocast)
        for owner, name in (
            (torch, "_foreach_norm"),  # clip_grad_norm_ and get_total_norm
            (torch.linalg, "vector_norm"),
            (torch.linalg, "norm"),
            (torch, "norm"),
            (torch.Tensor, "norm"),
        ):
            self._replace(owner, name, self._norm)
        self._replace(torch, "_foreach_mul_", self._multiply)  # clip_grad_norm_
        for owner, name in (
            (torch, "_foreach_clamp_min_"),  # clip_grad_value_
            (torch.Tensor, "clamp_"),
        ):
            self._replace(owner, name, self._clamp)
        self._replace(torch.optim.Optimizer, "zero_grad", self._optimizer_zero_grad)
        self._replace(nn.Module, "zero_grad", self._module_zero_grad)

    def _replace(self, owner, name: str, listener) -> None:
        """Call `listener(original, ...)` in place of `owner.name`, but not again from inside it."""
        original = inspect.getattr_static(owner, name)
        key = listener.__name__

        @functools.wraps(original)
        def listening(*args, **kwargs):
            if key in self._inside:
                return original(*args, **kwargs)
            self._inside.add(key)
            try:
                return listener(original, *args, **kwargs)
            finally:
                self._inside.discard(key)

        inherited = name not in vars(owner)
        setattr(owner, name, listening)
        self._undo.callback(
            *((delattr, owner, name) if inherited else (setattr, owner, name, original))
        )

    # --- forward and backward ------------------------------------------------------------------

    def _before_forward(self, module, args) -> None:
        if torch.is_grad_enabled():
            kind = device_type_of(module)
            active = torch.is_autocast_enabled(kind)
            self.forwards[torch.get_autocast_dtype(kind) if active else None] += 1
            if self._in_trouble and self._finder is None:
                self._in_trouble = False
                self._finder = OriginFinder(module)
                self._finder.__enter__()

    def _after_forward(self, module, args, output) -> None:
        self._end_search()

    def _end_search(self) -> None:
        if self._finder is not None:
            self._finder.__exit__(None, None, None)
            self.origin = self._finder.origin
            self._finder = None
            self.probed += 1

    def _autocast(self, original, autocast, device_type, dtype=None, enabled=True, *args, **kwargs):
        if enabled:
            self.autocast_devices.add(device_type)
        return original(autocast, device_type, dtype, enabled, *args, **kwargs)

    def _backward(self, original, tensors, *args, **kwargs):
        self.backwards += 1
        roots = list(tensors_in(tensors))
        scaled, losses = self._scaling_of(roots)
        if any(torch.is_autocast_enabled(root.device.type) for root in roots):
            self.note("backward-in-autocast", CERTAIN, "backward() ran inside the autocast block.")
        known = list(self.optimizers.values())
        before = [[(p.grad, _version(p.grad)) for p in each.parameters] for each in known]

        result = original(tensors, *args, **kwargs)

        for each, old in zip(known, before, strict=True):
            new = [(p.grad, _version(p.grad)) for p in each.parameters]
            changed = [a is not c or b != d for (a, b), (c, d) in zip(old, new, strict=True)]
            if not any(changed):
                continue
            if all(grad is None for grad, _ in old):
                each.begin()
            kept = any(
                grad is not None and touched and each.settled.get(id(p)) == version
                for p, (grad, version), touched in zip(each.parameters, old, changed, strict=True)
            )
            if kept and scaled is not None:
                each.mixed = (
                    "unscale_ was called before the last backward of the accumulation"
                    if each.unscaled
                    else "zero_grad() is missing after the step"
                )
            each.settled = {}
            each.erased = False
            each.backwards += 1
            each.losses += losses
            each.versions = each.grad_versions()
            if scaled is not None:
                each.scaled_by.append((scaled, scaled.scale, scaled.updates))
        return result

    def _scaling_of(self, roots) -> tuple[_Scaler | None, list[torch.Tensor]]:
        """By which scaler the tensors given to backward() were scaled, and the unscaled losses."""
        scaled, losses = self._pending, []
        for root in roots:
            output, scaler, loss = self._outputs.get(id(root), (lambda: None, None, None))
            if output() is root:
                scaled = scaler
                losses.append(loss)
            else:
                losses.append(_mean(root) / (1.0 if scaled is None else scaled.scale))
        return scaled, losses

    # --- the scaler ----------------------------------------------------------------------------

    def _known_scaler(self, scaler) -> _Scaler:
        if id(scaler) not in self.scalers:
            fresh = (
                getattr(scaler, "_scale", 0) is None
                or getattr(scaler, "_has_scaled", True) is False
            )
            fresh = fresh and scaler.state_dict().get("_growth_tracker") == 0
            scale = scaler.get_scale()
            self.scalers[id(scaler)] = _Scaler(scaler, scale, fresh and scale == 65536.0)
        return self.scalers[id(scaler)]

    def _scaler_scale(self, original, scaler, outputs):
        if not scaler.is_enabled():
            return original(scaler, outputs)
        self._pending = self._known_scaler(scaler)
        result = original(scaler, outputs)
        for loss, output in zip(tensors_in(outputs), tensors_in(result), strict=False):
            self._outputs[id(output)] = (weakref.ref(output), self._pending, _mean(loss))
        return result

    def _scaler_unscale_(self, original, scaler, optimizer):
        known = self.optimizers.get(id(optimizer))
        if known is None or not scaler.is_enabled():
            return original(scaler, optimizer)
        self._before_unscaling(known, self._known_scaler(scaler))
        result = original(scaler, optimizer)
        known.unscaled = True
        known.settled = known.grad_versions()
        known.measured = self._measure(known)
        return result

    def _scaler_step(self, original, scaler, optimizer, *args, **kwargs):
        known = self.optimizers.get(id(optimizer))
        if known is None or not scaler.is_enabled():
            return original(scaler, optimizer, *args, **kwargs)
        record = self._known_scaler(scaler)
        if not known.attempts:
            known.had_state = any(optimizer.state.values())
        self._before_unscaling(known, record)
        if known.mixed:
            self.note(
                "gradients-kept",
                CERTAIN,
                f"Scaled gradients were added to gradients that were already unscaled: {known.mixed}.",
                known.index,
            )
        self._stepping, known.ran = known, False
        try:
            result = original(scaler, optimizer, *args, **kwargs)
        except Exception:
            self.failed = known
            raise
        finally:
            self._stepping = None
        known.scalers[id(scaler)] = record
        self._finish(known, record.scale, skipped=not known.ran)
        known.settled = known.grad_versions()
        return result

    def _scaler_update(self, original, scaler, *args, **kwargs):
        result = original(scaler, *args, **kwargs)
        if scaler.is_enabled():
            record = self._known_scaler(scaler)
            record.updates += 1
            record.scale = scaler.get_scale()
        return result

    def _before_unscaling(self, known: _Optimizer, scaler: _Scaler) -> None:
        """The last moment at which the gradients are scaled: are they what backward() left?"""
        if known.checked or not known.backwards:
            return
        known.checked = True
        if not known.scaled_by:
            self.note(
                "loss-not-scaled",
                CERTAIN,
                f"The gradients were divided by the scale {scaler.scale:g}, but the loss had not been "
                "multiplied by it.",
                known.index,
            )
            return
        now = known.grad_versions()
        changed = known.multiplied or any(
            now[p] != version for p, version in known.versions.items() if p in now
        )
        if known.clamped or (changed and known.norm_read):
            self.note(
                "clip-before-unscale",
                CERTAIN,
                f"Gradients were clipped while they were still multiplied by {scaler.scale:g}: the "
                "threshold was that many times too small.",
                known.index,
            )
        elif changed:
            self.note(
                "changed-before-unscale",
                LIKELY,
                f"Gradients were changed in place while still multiplied by {scaler.scale:g}.",
                known.index,
            )
        elif known.norm_read:
            self.note(
                "norm-before-unscale",
                LIKELY,
                f"A gradient norm was read while the gradients were multiplied by {scaler.scale:g}: "
                "such a curve jumps with the scale.",
                known.index,
            )
        by, used, updates = known.scaled_by[0]
        if used != scaler.scale:
            self.note(
                "update-between-steps",
                CERTAIN,
                f"The gradients were multiplied by {used:g} and divided by {scaler.scale:g}: the scale "
                "changed between backward() and the step.",
                known.index,
            )
        elif by is scaler and updates != scaler.updates:
            self.note(
                "update-between-steps",
                LIKELY,
                "update() was called between backward() and the step; at the next change of the "
                "scale this step is wrong by that factor.",
                known.index,
            )

    # --- the optimizer and the scheduler -------------------------------------------------------

    def _before_optimizer(self, optimizer, args, kwargs) -> None:
        known = self.optimizers[id(optimizer)]
        if self._stepping is None and known.scaled_by:
            if not known.unscaled:
                self.note(
                    "optimizer-without-scaler",
                    CERTAIN,
                    "optimizer.step() used gradients that are still multiplied by "
                    f"{known.scaled_by[0][1]:g}.",
                    known.index,
                )
            else:
                self.note(
                    "step-outside-scaler",
                    LIKELY,
                    "optimizer.step() was called directly after unscale_: an overflow is not skipped.",
                    known.index,
                )
        if _has_closure(args, kwargs):  # the gradients come within the step
            return
        if known.measured is None:
            known.measured = self._measure(known)
        if not any(p.grad is not None for p in known.parameters):
            note_no_gradients(self, known)
        known.copies = self._copy_16_bit_weights(known) if known.sampled else []

    def _after_optimizer(self, optimizer, args, kwargs) -> None:
        known = self.optimizers[id(optimizer)]
        found_inf = getattr(optimizer, "found_inf", None)  # a fused optimizer skips by itself
        known.ran = found_inf is None or not bool(found_inf)
        if known.copies and known.ran:
            known.unmoved.append(_unmoved_share(known.copies))
        known.copies = []
        if self._stepping is None:
            if not known.scaled_by:
                known.without_scaling += 1
            scale = known.scaled_by[0][1] if known.scaled_by else 1.0
            self._finish(known, scale, skipped=False)

    def _optimizer_zero_grad(self, original, optimizer, *args, **kwargs):
        result = original(optimizer, *args, **kwargs)
        if id(optimizer) in self.optimizers:
            self.optimizers[id(optimizer)].forget_gradients()
        return result

    def _module_zero_grad(self, original, module, *args, **kwargs):
        result = original(module, *args, **kwargs)
        zeroed = {id(p) for p in module.parameters()}
        for known in self.optimizers.values():
            if zeroed.issuperset(map(id, known.parameters)):
                known.forget_gradients()
        return result

    def _scheduler_step(self, original, scheduler, *args, **kwargs):
        result = original(scheduler, *args, **kwargs)
        known = self.optimizers.get(id(getattr(scheduler, "optimizer", None)))
        if known is not None and known.attempts:
            known.scheduler_calls += 1
            last = known.index - 1
            if known.attempts[-1] and last not in known.scheduler_on_skip:
                known.scheduler_on_skip.append(last)
        return result

    def _finish(self, known: _Optimizer, scale: float, skipped: bool) -> None:
        """Close the record of one attempt."""
        measured, index = known.measured or self._measure(known), known.index
        trouble = skipped or bool(measured.nonfinite_share)
        if known.sampled or trouble:
            self._note_bad_buffers(index)
        self.steps.append(
            WatchedStep(
                index,
                known.position,
                measured.loss,
                scale,
                skipped,
                measured.zero_share,
                measured.nonfinite_share,
                tuple(self.bad_buffers),
            )
        )
        known.attempts.append(skipped)
        known.at_update.append(sum(scaler.updates for scaler in self.scalers.values()))
        self._pending = None
        known.begin()
        self._outputs = {k: v for k, v in self._outputs.items() if v[0]() is not None}
        bad_loss = measured.loss is not None and not math.isfinite(measured.loss)
        if bad_loss or (measured.nonfinite_share and not skipped):
            self._in_trouble = self.origin is None and self.probed < SEARCHES

    def _norm(self, original, *args, **kwargs):
        for known in self._scaled_and_among(args, kwargs):
            known.norm_read = True
        return original(*args, **kwargs)

    def _multiply(self, original, *args, **kwargs):
        for known in self._scaled_and_among(args, kwargs):
            known.multiplied = True
        return original(*args, **kwargs)

    def _clamp(self, original, *args, **kwargs):
        for known in self._scaled_and_among(args, kwargs):
            known.clamped = True
        return original(*args, **kwargs)

    def _scaled_and_among(self, *arguments) -> list[_Optimizer]:
        """The optimizers with a gradient among the arguments that is still scaled."""
        scaled = [o for o in self.optimizers.values() if o.scaled_by and not o.unscaled]
        if not scaled or self._stepping is not None:
            return []
        where = {t.data_ptr() for t in tensors_in(arguments)}
        return [
            known
            for known in scaled
            if any(p.grad is not None and p.grad.data_ptr() in where for p in known.parameters)
        ]

    # --- numbers -------------------------------------------------------------------------------

    @torch.no_grad()
    def _measure(self, known: _Optimizer) -> _Measured:
        with_gradient = [p for p in known.parameters if p.grad is not None]
        known.with_gradient.update(map(id, with_gradient))
        named = [(self.name(p), stored(p.grad)) for p in with_gradient]
        named = [(name, grad) for name, grad in named if grad.numel()]
        losses = to_floats(known.losses)
        loss = sum(losses) / len(losses) if losses else None
        zero = None
        if known.sampled:
            counts = to_floats([grad.count_nonzero() for _, grad in named])
            zero = {
                name: 1.0 - count / grad.numel()
                for (name, grad), count in zip(named, counts, strict=True)
            }
            if not known.scaled_by and self.forwards[torch.float16]:
                self._look_for_tiny(known, named, zero)
        return _Measured(loss, zero, nonfinite_shares(named))

    def _look_for_tiny(self, known: _Optimizer, named, zero: dict[str, float]) -> None:
        """Gradients below FP16's smallest normal number have lost bits; further down they are 0."""
        small = to_floats([(v.abs() < SMALLEST_NORMAL_FP16).sum() for _, v in named])
        for (name, v), count in zip(named, small, strict=True):
            share = count / v.numel() - zero[name]
            known.tiny[name] = max(
                known.tiny.get(name, (0.0, 0.0, 0)), (share, zero[name], v.numel())
            )

    @torch.no_grad()
    def _copy_16_bit_weights(self, known: _Optimizer) -> list[tuple[torch.Tensor, torch.Tensor]]:
        copies, room = [], COMPARED_WEIGHTS
        for group in known.optimizer.param_groups:
            for p in group["params"]:
                moves = p.dtype in LOWER_PRECISION and p.grad is not None and not p.grad.is_sparse
                if moves and group.get("lr", 1.0) > 0 and p.numel() <= room:
                    room -= p.numel()
                    copies.append((p, stored(p).clone()))
        return copies

    def _find_bad_buffers(self) -> list[str]:
        return list(
            nonfinite_shares(
                [
                    (name, buffer)
                    for name, buffer in self.root.named_buffers()
                    if buffer.is_floating_point() and name not in self._ignored_buffers
                ]
            )
        )

    def _note_bad_buffers(self, step: int) -> None:
        for name in self._find_bad_buffers():
            self.bad_buffers.setdefault(name, step)

    def name(self, parameter: torch.Tensor) -> str:
        """The name of a parameter in the model."""
        if id(parameter) not in self._names:
            self._names.update({id(p): name for name, p in self.root.named_parameters()})
        shape = tuple(parameter.shape)
        return self._names.setdefault(id(parameter), f"(a parameter of shape {shape})")


def _family(kind: type) -> Iterator[type]:
    """A class and everything that inherits from it."""
    yield kind
    for child in kind.__subclasses__():
        yield from _family(child)


def device_type_of(module: nn.Module) -> str:
    parameter = next(module.parameters(), None)
    return "cpu" if parameter is None else parameter.device.type


def _version(grad: torch.Tensor | None) -> int:
    return -1 if grad is None else grad._version


def _mean(loss: torch.Tensor) -> torch.Tensor:
    return loss.detach().float().mean()


def _unmoved_share(copies) -> float:
    """Of the weights with a gradient other than 0, the share that the step left as they were."""
    stayed = sum(int(((stored(p) == old) & (stored(p.grad) != 0)).sum()) for p, old in copies)
    pulled = sum(int((stored(p.grad) != 0).sum()) for p, _ in copies)
    return stayed / pulled if pulled else 0.0


def _has_closure(args, kwargs) -> bool:
    return kwargs.get("closure") is not None or any(callable(arg) for arg in args[1:])
