"""A flight recorder for training loops that use AMP.

    with lab.watch(model, optimizer, scaler) as log:
        ...                                 # any training loop, unchanged

Most AMP mistakes raise no error: the loss comes down more slowly, or only the evaluation is NaN. Each
of them leaves traces in what the loop calls, in which order, and in the gradients. `watch` listens to
those calls, takes a few cheap numbers in each step, and tells at the end what does not fit.
"""

import functools
import html
import inspect
import math
import re
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim.lr_scheduler import LRScheduler

from .scaler import LossScaler

CERTAIN, LIKELY, POSSIBLE = "certain", "likely", "possible"

# Every finding there is, causes before their consequences, and what to try.
ADVICE = {
    # the order of scaler calls
    "optimizer-without-scaler": "Call scaler.step(optimizer) in place of optimizer.step().",
    "step-outside-scaler": "Call scaler.step(optimizer): it skips the step after an overflow.",
    "loss-not-scaled": "Call scaler.scale(loss).backward() in every iteration.",
    "scaler-recreated": "Make one scaler before the loop, and keep it for the whole run.",
    "update-missing": "Call scaler.update() once at the end of every iteration, also when you "
    "leave it early by `continue`.",
    "update-without-step": "Call scaler.update() once an iteration, after every scaler.step().",
    "update-between-steps": "One scaler, one update(): after the last scaler.step() of the iteration. "
    "With gradient accumulation, only at its end.",
    "unscale-twice": "Unscale, clip, step and update only where the accumulated gradients are "
    "complete; and call update() in every iteration that called unscale_().",
    "gradients-kept": "Call optimizer.zero_grad() after each step; with accumulation, call unscale_ "
    "only after the last backward.",
    "clip-before-unscale": "Call scaler.unscale_(optimizer) first, then clip.",
    "changed-before-unscale": "Multiplying all gradients by one number is harmless. Anything else "
    "(clipping, noise, a threshold) belongs after scaler.unscale_(optimizer).",
    "norm-before-unscale": "Call scaler.unscale_(optimizer) first, then take the norm; or divide what "
    "you read by scaler.get_scale().",
    "scaler-not-restored": "Save scaler.state_dict() in the checkpoint, after update(), and load it "
    "when you resume.",
    # which precision runs where
    "fp16-without-scaler": "Use torch.amp.GradScaler, or BF16 autocast, which needs none.",
    "autocast-wrong-device": "Write torch.autocast(device_type=inputs.device.type, ...).",
    "scaler-without-autocast": "Run the forward pass under torch.autocast, or leave the scaler out.",
    "scaler-with-bf16": "BF16 has the range of FP32 and needs no scaling: "
    "GradScaler(enabled=dtype is torch.float16).",
    "backward-in-autocast": "Close the autocast block after the loss, and call backward() outside: "
    "PyTorch advises against backward under autocast.",
    "parameters-16-bit": "Keep the parameters in FP32 (no .half() or .bfloat16()) and let autocast "
    "cast copies of them.",
    "updates-lost": "Keep FP32 weights: an update below half the spacing of a 16-bit weight is "
    "rounded away.",
    # gradients that do not arrive
    "no-gradients": "Build the optimizer from the parameters that backward() reaches, and call "
    "zero_grad() before backward or after the step, never between them.",
    "parameters-without-gradient": "If they should learn, see that the loss depends on them; if not, "
    "set requires_grad=False and keep them out of the optimizer.",
    "all-gradients-zero": "Look for a detached loss or a dead activation; in FP16, scale the loss.",
    # numbers
    "activation-overflow": "Use BF16 autocast, or run that module in FP32: autocast(enabled=False) "
    "around it, with inputs.float().",
    "loss-nonfinite": "No loss scale repairs a forward pass. Look at that place for values beyond "
    "65504, log or division of a zero, and softmax over a row that is masked completely.",
    "gradients-nonfinite": "Without a scaler nothing skips such a step: clip, lower the learning rate, "
    "or stop at the first NaN. In FP16 use GradScaler.",
    "buffers-nonfinite": "Skipping a step does not undo the forward pass. Run the layer before it in "
    "FP32 or BF16, or restore the buffers on a skip; evaluation stays NaN until they are reset.",
    "weights-nonfinite": "These weights are lost: load the last good checkpoint and repair the cause.",
    # the scale
    "scale-collapse": "Lower scales do not help, so the cause is not the scale: look for NaN in the "
    "forward pass, or use BF16.",
    "no-real-step": "If the loss is finite, go on, or lower init_scale; if it is not, see there.",
    "many-skips": "A skip every few hundred steps is normal, so many are not: find the layer that "
    "overflows (`log.steps`), or use BF16. A very short growth_interval does this too.",
    "init-scale-too-high": "Expected once, and harmless. Use the mean loss in place of the sum, or pass "
    "a lower init_scale.",
    "scheduler-on-skip": "Compare scaler.get_scale() before and after update(), and move the scheduler "
    "only if the scale did not drop.",
    "optimizers-out-of-step": "Each optimizer is skipped for its own gradients. If they must move "
    "together, skip both by hand, or use BF16.",
    # exceptions
    "bce-unsafe": "Return logits and use binary_cross_entropy_with_logits (BCEWithLogitsLoss).",
    "value-beyond-fp16": "FP16 ends at 65504: use torch.finfo(x.dtype).min as fill value, or "
    "scaled_dot_product_attention with a boolean mask.",
    "dtype-mismatch": "Keep model and loss in one autocast block, or call .float() on what leaves it. "
    "In a custom autograd.Function use torch.amp.custom_fwd and custom_bwd.",
    "buffer-dtype": "Allocate the buffer with the dtype of the result that is written into it.",
    "no-16-bit-kernel": "Call .float() on the inputs of that operation, inside "
    "autocast(enabled=False).",
    "numpy-bfloat16": "NumPy has no BF16: call .float() before .numpy().",
    "no-steps": "Give watch the optimizer that the loop steps.",
}

# PyTorch's error messages, and what they mean.
MESSAGES = (
    (r"unscale_\(\) (has already been|was already) called", "unscale-twice"),
    (r"unscale_\(\) (is being called )?after step\(\)", "update-missing"),
    (r"step\(\) (has already been|was already) called", "update-missing"),
    (r"No inf checks.* (prior to|since the last) update", "update-without-step"),
    (r"_scale is None|before scale\(\)", "loss-not-scaled"),
    (r"_amp_foreach_non_finite_check_and_unscale\w*\" not implemented for 'BF", "scaler-with-bf16"),
    (r"unsafe to autocast", "bce-unsafe"),
    (r"cannot be converted to type .* without overflow", "value-beyond-fp16"),
    (
        r"Index put requires .* dtypes|(scatter|index)\w*\(\).*type|masked_scatter.*dtypes",
        "buffer-dtype",
    ),
    (r"must have the same dtype|to have the same dtype|should be the same", "dtype-mismatch"),
    (r"expected scalar type \w+ but found", "dtype-mismatch"),
    (r"not implemented for '(Half|BFloat16)'", "no-16-bit-kernel"),
    (r"unsupported ScalarType BFloat16", "numpy-bfloat16"),
)

SCALER_METHODS = ("scale", "unscale_", "step", "update")
LOWER_PRECISION = {torch.float16: "FP16", torch.bfloat16: "BF16"}
SMALLEST_NORMAL_FP16 = 2.0**-14
COMPARED_WEIGHTS = 1_000_000  # at most so many 16-bit weights are copied to see whether they move

_foreach_norm = torch._foreach_norm  # the original: watch replaces it while it listens


@dataclass(frozen=True)
class Finding:
    """One thing that does not fit.

    `code` is its name, a key of `ADVICE`. `sentence` says what was seen. `certainty` is "certain"
    (seen directly, and wrong), "likely" (what was seen has usually this cause) or "possible" (it may
    be intended). `advice` says what to try. `step` is the optimizer step in which it was first seen,
    counted from 0, or None where it belongs to no step.
    """

    code: str
    sentence: str
    certainty: str
    advice: str
    step: int | None = None


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


def watch(model, optimizer, scaler=None, report: bool = True) -> "Log":
    """Record a training loop that uses AMP, and tell what is wrong with it.

    `model` is an `nn.Module`, `optimizer` a `torch.optim.Optimizer`, or a list or tuple of them.
    `scaler` is a `torch.amp.GradScaler`, a `LossScaler`, an object with the same methods, or None.
    The result is a context manager to put around any loop; the loop needs no change:

        with lab.watch(model, optimizer, scaler) as log:
            for inputs, targets in batches: ...

    On leaving the block the report is printed if there is a finding (unless `report` is False); a
    healthy loop prints nothing. `print(log)` shows the report at any time, `log.findings` and
    `log.steps` hold the same as data. An exception ends the record and passes through unchanged.

    Nothing in model, optimizer or scaler is changed and no random number is drawn: training is
    bit-equal with and without `watch`. While the block runs, the scaler classes, `torch.autocast`,
    `torch.autograd.backward`, the schedulers and a few norm functions are replaced by listening
    versions; on leaving, all are put back. Statistics by parameter are taken in the first ten
    steps and in every tenth after that; every step waits once for the device.

    What cannot be seen: scaled gradients that are read by other ways than `norm`, `linalg.norm`,
    `linalg.vector_norm` or `torch.nn.utils` (a histogram in a hook, `abs().max()`), and even these if
    `from torch import norm` was bound before; precision inside a forward pass that does not go
    through `model(...)`; schedulers that do not inherit from `LRScheduler`; loops captured in a CUDA
    graph. Whether a run is slow or short of memory is no matter for `watch`.

    Raises `TypeError` for arguments of other types, and `RuntimeError` if one log is entered twice.
    """
    models = _several("model", model, nn.Module, "an nn.Module")
    optimizers = _several("optimizer", optimizer, torch.optim.Optimizer, "a torch.optim.Optimizer")
    missing = [m for m in (*SCALER_METHODS, "get_scale", "is_enabled") if not hasattr(scaler, m)]
    if scaler is not None and missing:
        raise TypeError(
            f"watch: scaler is a {type(scaler).__name__} without {missing[0]}(); expected a "
            "torch.amp.GradScaler, an amp_lab.scaler.LossScaler or None"
        )
    return Log(models, optimizers, scaler, report)


def _several(argument: str, value, kind: type, expected: str) -> list:
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    for each in values:
        if not isinstance(each, kind):
            raise TypeError(
                f"watch: {argument} is a {type(each).__name__}, expected {expected} or a list of them; "
                "the order is watch(model, optimizer, scaler)"
            )
    if not values:
        raise TypeError(f"watch: {argument} is empty, expected {expected} or a list of them")
    return values


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
    overflow: bool


@dataclass
class _Optimizer:
    """What is known about one optimizer: for the whole block, and since its last attempt."""

    optimizer: torch.optim.Optimizer
    position: int
    attempts: list[bool] = field(default_factory=list)  # True: skipped
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
    copies: list = field(default_factory=list)

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


class Log:
    """What `watch` recorded. `steps` is a list of `WatchedStep`, `findings` a list of `Finding`."""

    def __init__(self, models, optimizers, scaler, report):
        self.steps: list[WatchedStep] = []
        self._models = models
        self._root = models[0] if len(models) == 1 else nn.ModuleList(models)
        self._names = {id(p): name for name, p in self._root.named_parameters()}
        self._optimizers = {id(o): _Optimizer(o, i) for i, o in enumerate(optimizers)}
        self._given_scaler = scaler
        self._report = report
        self._undo: ExitStack | None = None
        self._inside: set[str] = set()  # the listeners that are running

        self._scalers: dict[int, _Scaler] = {}
        self._pending: _Scaler | None = None  # scale() was called since the last step
        self._outputs: dict[int, tuple] = {}  # what scale() returned, and the loss it was given
        self._stepping: _Optimizer | None = None  # inside scaler.step
        self._failed: _Optimizer | None = None  # its scaler.step raised
        self._backwards = 0
        self._forwards: Counter = Counter()  # by autocast dtype, None without autocast
        self._autocast_devices: set[str] = set()
        self._ignored_buffers: set[str] = set()
        self._bad_buffers: dict[str, int] = {}  # name, first step
        self._probes = ExitStack()
        self._probing = False
        self._passes_to_probe = 3
        self._origin: str | None = None  # where in the forward pass the first inf or NaN arose
        self._origin_overflow = False
        self._bad_weights: list[str] = []
        self._16_bit: dict[str, torch.dtype] = {}
        self._notes: dict[str, Finding] = {}

    # --- the block -----------------------------------------------------------------------------

    def __enter__(self) -> "Log":
        if self._undo is not None:
            raise RuntimeError(
                "this log has its record: call lab.watch(...) again for another loop"
            )
        with ExitStack() as undo:
            self._undo = undo
            self._listen()
            self._undo = undo.pop_all()
        running = {f"{name}.running_{s}" for name, _ in self._norms() for s in ("mean", "var")}
        self._ignored_buffers = set(self._find_bad_buffers()) - running
        return self

    def __exit__(self, kind, error, traceback) -> bool:
        self._undo.close()
        self._probes.close()
        if isinstance(error, Exception):
            self._explain(error)
        self._look_at_the_end(failed=error is not None)
        if self._report and self.findings:
            print(self)
        return False

    def _listen(self) -> None:
        for known in self._optimizers.values():
            known.had_state = any(known.optimizer.state.values())
            before = known.optimizer.register_step_pre_hook(self._before_optimizer)
            after = known.optimizer.register_step_post_hook(self._after_optimizer)
            self._undo.callback(before.remove)
            self._undo.callback(after.remove)
        for model in self._models:
            self._undo.callback(model.register_forward_pre_hook(self._before_forward).remove)

        kinds = [torch.amp.GradScaler, LossScaler]
        if self._given_scaler is not None:
            kinds += type(self._given_scaler).__mro__
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
            kind = _device_type(module)
            active = torch.is_autocast_enabled(kind)
            self._forwards[torch.get_autocast_dtype(kind) if active else None] += 1

    def _autocast(self, original, autocast, device_type, dtype=None, enabled=True, *args, **kwargs):
        if enabled:
            self._autocast_devices.add(device_type)
        return original(autocast, device_type, dtype, enabled, *args, **kwargs)

    def _backward(self, original, tensors, *args, **kwargs):
        self._backwards += 1
        roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        scaled, losses = self._scaling_of(roots)
        if torch.is_autocast_enabled(roots[0].device.type):
            self._note("backward-in-autocast", CERTAIN, "backward() ran inside the autocast block.")
        known = list(self._optimizers.values())
        before = [[(p.grad, _version(p.grad)) for p in each.parameters] for each in known]

        result = original(roots, *args, **kwargs)

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
            output, scaler, loss = self._outputs.pop(id(root), (lambda: None, None, None))
            if output() is root:
                scaled = scaler
                losses.append(loss)
            else:
                losses.append(_mean(root) / (1.0 if scaled is None else scaled.scale))
        return scaled, losses

    # --- the scaler ----------------------------------------------------------------------------

    def _known_scaler(self, scaler) -> _Scaler:
        if id(scaler) not in self._scalers:
            fresh = (
                getattr(scaler, "_scale", 0) is None
                or getattr(scaler, "_has_scaled", True) is False
            )
            fresh = fresh and scaler.state_dict().get("_growth_tracker") == 0
            scale = scaler.get_scale()
            self._scalers[id(scaler)] = _Scaler(scaler, scale, fresh and scale == 65536.0)
        return self._scalers[id(scaler)]

    def _scaler_scale(self, original, scaler, outputs):
        if not scaler.is_enabled():
            return original(scaler, outputs)
        self._pending = self._known_scaler(scaler)
        result = original(scaler, outputs)
        for loss, output in zip(_tensors(outputs), _tensors(result), strict=False):
            self._outputs[id(output)] = (weakref.ref(output), self._pending, _mean(loss))
        return result

    def _scaler_unscale_(self, original, scaler, optimizer):
        known = self._optimizers.get(id(optimizer))
        if known is None or not scaler.is_enabled():
            return original(scaler, optimizer)
        self._before_unscaling(known, self._known_scaler(scaler))
        result = original(scaler, optimizer)
        known.unscaled = True
        known.settled = known.grad_versions()
        known.measured = self._measure(known)
        return result

    def _scaler_step(self, original, scaler, optimizer, *args, **kwargs):
        known = self._optimizers.get(id(optimizer))
        if known is None or not scaler.is_enabled():
            return original(scaler, optimizer, *args, **kwargs)
        record = self._known_scaler(scaler)
        self._before_unscaling(known, record)
        if known.mixed:
            self._note(
                "gradients-kept",
                CERTAIN,
                f"Scaled gradients were added to gradients that were already unscaled: {known.mixed}.",
                known.index,
            )
        self._stepping = known
        try:
            result = original(scaler, optimizer, *args, **kwargs)
        except Exception:
            self._failed = known
            raise
        finally:
            self._stepping = None
        known.scalers[id(scaler)] = record
        skipped = known.measured.overflow
        self._finish(known, record.scale, skipped)
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
            self._note(
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
            self._note(
                "clip-before-unscale",
                CERTAIN,
                f"Gradients were clipped while they were still multiplied by {scaler.scale:g}: the "
                "threshold was that many times too small.",
                known.index,
            )
        elif changed:
            self._note(
                "changed-before-unscale",
                LIKELY,
                f"Gradients were changed in place while they were still multiplied by {scaler.scale:g}.",
                known.index,
            )
        elif known.norm_read:
            self._note(
                "norm-before-unscale",
                LIKELY,
                f"A gradient norm was read while the gradients were multiplied by {scaler.scale:g}: "
                "such a curve jumps with the scale.",
                known.index,
            )
        by, used, updates = known.scaled_by[0]
        if used != scaler.scale:
            self._note(
                "update-between-steps",
                CERTAIN,
                f"The gradients were multiplied by {used:g} and divided by {scaler.scale:g}: the scale "
                "changed between backward() and the step.",
                known.index,
            )
        elif by is scaler and updates != scaler.updates:
            self._note(
                "update-between-steps",
                LIKELY,
                "update() was called between backward() and the step; at the next change of the "
                "scale this step is wrong by that factor.",
                known.index,
            )

    # --- the optimizer and the scheduler -------------------------------------------------------

    def _before_optimizer(self, optimizer, args, kwargs) -> None:
        known = self._optimizers[id(optimizer)]
        if self._stepping is None and known.scaled_by:
            if not known.unscaled:
                self._note(
                    "optimizer-without-scaler",
                    CERTAIN,
                    "optimizer.step() used gradients that are still multiplied by "
                    f"{known.scaled_by[0][1]:g}.",
                    known.index,
                )
            else:
                self._note(
                    "step-outside-scaler",
                    LIKELY,
                    "optimizer.step() was called directly after unscale_: an overflow is not skipped.",
                    known.index,
                )
        if not _has_closure(args, kwargs):
            self._measure_before_step(known)

    def _measure_before_step(self, known: _Optimizer) -> None:
        if known.measured is None:
            known.measured = self._measure(known)
        found_inf = getattr(known.optimizer, "found_inf", None)
        if found_inf is not None:  # a fused optimizer skips by itself
            known.measured.overflow = bool(found_inf)
        if not any(p.grad is not None for p in known.parameters):
            self._note_no_gradients(known)
        known.copies = self._copy_16_bit_weights(known) if known.sampled else []

    def _after_optimizer(self, optimizer, args, kwargs) -> None:
        known = self._optimizers[id(optimizer)]
        if _has_closure(args, kwargs):
            self._measure_before_step(known)
            known.copies = []
        if known.copies and not (self._stepping and known.measured.overflow):
            known.unmoved.append(_unmoved_share(known.copies))
        known.copies = []
        if self._stepping is None:
            if not known.scaled_by:
                known.without_scaling += 1
            scale = known.scaled_by[0][1] if known.scaled_by else 1.0
            self._finish(known, scale, skipped=False)

    def _optimizer_zero_grad(self, original, optimizer, *args, **kwargs):
        result = original(optimizer, *args, **kwargs)
        if id(optimizer) in self._optimizers:
            self._optimizers[id(optimizer)].forget_gradients()
        return result

    def _module_zero_grad(self, original, module, *args, **kwargs):
        result = original(module, *args, **kwargs)
        zeroed = {id(p) for p in module.parameters()}
        for known in self._optimizers.values():
            if zeroed.issuperset(map(id, known.parameters)):
                known.forget_gradients()
        return result

    def _scheduler_step(self, original, scheduler, *args, **kwargs):
        result = original(scheduler, *args, **kwargs)
        known = self._optimizers.get(id(scheduler.optimizer))
        if known is not None and known.attempts:
            known.scheduler_calls += 1
            last = known.index - 1
            if known.attempts[-1] and last not in known.scheduler_on_skip:
                known.scheduler_on_skip.append(last)
        return result

    def _finish(self, known: _Optimizer, scale: float, skipped: bool) -> None:
        """Close the record of one attempt."""
        measured, index = known.measured, known.index
        trouble = skipped or bool(measured.nonfinite_share)
        if known.sampled or trouble:
            for name in self._find_bad_buffers():
                self._bad_buffers.setdefault(name, index)
        self.steps.append(
            WatchedStep(
                index,
                known.position,
                measured.loss,
                scale,
                skipped,
                measured.zero_share,
                measured.nonfinite_share,
                tuple(self._bad_buffers),
            )
        )
        known.attempts.append(skipped)
        self._pending = None
        known.begin()
        self._stop_probing()
        bad_loss = measured.loss is not None and not math.isfinite(measured.loss)
        if bad_loss or (measured.nonfinite_share and not skipped):
            self._probe_next_forward()

    def _norm(self, original, tensors, *args, **kwargs):
        for known in self._scaled_and_among(tensors):
            known.norm_read = True
        return original(tensors, *args, **kwargs)

    def _multiply(self, original, tensors, *args, **kwargs):
        for known in self._scaled_and_among(tensors):
            known.multiplied = True
        return original(tensors, *args, **kwargs)

    def _clamp(self, original, tensors, *args, **kwargs):
        for known in self._scaled_and_among(tensors):
            known.clamped = True
        return original(tensors, *args, **kwargs)

    def _scaled_and_among(self, tensors) -> list[_Optimizer]:
        """The optimizers with a gradient among `tensors` that is still scaled."""
        scaled = [o for o in self._optimizers.values() if o.scaled_by and not o.unscaled]
        if not scaled or self._stepping is not None:
            return []
        where = {t.data_ptr() for t in _tensors(tensors)}
        return [
            known
            for known in scaled
            if any(p.grad is not None and p.grad.data_ptr() in where for p in known.parameters)
        ]

    # --- numbers -------------------------------------------------------------------------------

    @torch.no_grad()
    def _measure(self, known: _Optimizer) -> _Measured:
        named = [(self._name(p), p) for p in known.parameters if p.grad is not None]
        known.with_gradient.update(id(p) for _, p in named)
        values = [p.grad._values() if p.grad.is_sparse else p.grad for _, p in named]
        named = [(name, v) for (name, _), v in zip(named, values, strict=True) if v.numel()]
        values = [v for _, v in named]
        numbers = _foreach_norm(values, 2) if values else []
        numbers = _to_floats([*numbers, *known.losses])
        norms, losses = numbers[: len(values)], numbers[len(values) :]

        nonfinite = {}
        for (name, v), norm in zip(named, norms, strict=True):
            if not math.isfinite(norm):  # the squares may overflow where the values do not: count
                bad = v.numel() - int(v.isfinite().sum())
                if bad:
                    nonfinite[name] = bad / v.numel()
        zero = None
        if known.sampled:
            counts = _to_floats([v.count_nonzero() for v in values])
            zero = {
                name: 1.0 - count / v.numel()
                for (name, v), count in zip(named, counts, strict=True)
            }
            if not known.scaled_by and self._forwards[torch.float16]:
                self._look_for_tiny(known, named, zero)
        loss = sum(losses) / len(losses) if losses else None
        return _Measured(loss, zero, nonfinite, overflow=bool(nonfinite))

    def _look_for_tiny(self, known: _Optimizer, named, zero: dict[str, float]) -> None:
        """Gradients below FP16's smallest normal number have lost bits; further down they are 0."""
        small = _to_floats([(v.abs() < SMALLEST_NORMAL_FP16).sum() for _, v in named])
        for (name, v), count in zip(named, small, strict=True):
            share = count / v.numel() - zero[name]
            known.tiny[name] = max(known.tiny.get(name, (0.0, 0.0, 0)), (share, zero[name], v.numel()))

    @torch.no_grad()
    def _copy_16_bit_weights(self, known: _Optimizer) -> list[tuple[torch.Tensor, torch.Tensor]]:
        copies, room = [], COMPARED_WEIGHTS
        for group in known.optimizer.param_groups:
            for p in group["params"]:
                moves = p.dtype in LOWER_PRECISION and p.grad is not None and not p.grad.is_sparse
                if moves and group.get("lr", 1.0) > 0 and p.numel() <= room:
                    room -= p.numel()
                    copies.append((p, p.detach().clone()))
        return copies

    def _norms(self) -> Iterator[tuple[str, nn.Module]]:
        return ((n, m) for n, m in self._root.named_modules() if isinstance(m, _NormBase))

    @torch.no_grad()
    def _find_bad_buffers(self) -> list[str]:
        named = [
            (name, b)
            for name, b in self._root.named_buffers()
            if b.is_floating_point() and b.numel() and name not in self._ignored_buffers
        ]
        return _nonfinite_names(named)

    def _name(self, parameter) -> str:
        if id(parameter) not in self._names:
            self._names.update({id(p): name for name, p in self._root.named_parameters()})
        return self._names.setdefault(
            id(parameter), f"(a parameter of shape {tuple(parameter.shape)})"
        )

    # --- where the first inf or NaN comes from -------------------------------------------------

    def _probe_next_forward(self) -> None:
        if self._origin is not None or not self._passes_to_probe:
            return
        self._passes_to_probe -= 1
        self._probing = True
        for name, module in self._root.named_modules():
            handle = module.register_forward_hook(functools.partial(self._probe, name))
            self._probes.callback(handle.remove)

    def _stop_probing(self) -> None:
        self._probing = False
        self._probes.close()

    @torch.no_grad()
    def _probe(self, name, module, inputs, output) -> None:
        if not self._probing:
            return
        if self._origin is None and any(_beyond_infinity(t) for t in _tensors(output)):
            kind = type(module).__name__
            bad = next(t for t in _tensors(output) if _beyond_infinity(t))
            what = f"{'NaN' if bad.isnan().any() else 'inf'} in {_dtype_name(bad.dtype)}"
            weights = _nonfinite_names(module.named_parameters(recurse=False))
            if weights:
                self._origin = f"The weights of {name} ({kind}) are inf or NaN themselves."
            elif any(_beyond_infinity(t) for t in _tensors(inputs)):
                parent = name.rpartition(".")[0]
                owner = f"{parent}.forward" if parent else "the forward() of the model"
                self._origin = f"The first inf or NaN enters {name} ({kind}): it arose in {owner}, before that."
            else:
                self._origin = f"The first place is {name} ({kind}): finite inputs, output {what}."
            self._origin_overflow = bad.dtype is torch.float16 and not weights
        if module in self._models:
            if any(_beyond_infinity(t) for t in _tensors(inputs)):
                self._origin = "The inputs of the model are inf or NaN already."
                self._origin_overflow = False
            elif self._origin is None:
                self._origin = (
                    "The output of the model was finite in the next step, so the place may be the loss "
                    "function or a single batch."
                )
            self._stop_probing()

    # --- conclusions ---------------------------------------------------------------------------

    def _note(self, code: str, certainty: str, sentence: str, step: int | None = None) -> None:
        """Keep the first finding of each kind."""
        self._notes.setdefault(code, Finding(code, sentence, certainty, ADVICE[code], step))

    def _explain(self, error: Exception) -> None:
        message = str(error)
        step = min(known.index for known in self._optimizers.values())
        if "No inf checks" in message and self._failed is not None:
            self._note_no_gradients(self._failed)
            return
        code = next((code for pattern, code in MESSAGES if re.search(pattern, message)), None)
        if code is None:
            return
        if code == "update-without-step" and "optimizer-without-scaler" in self._notes:
            return
        sentence = f"{type(error).__name__}: {message.splitlines()[0]}"
        if code == "unscale-twice":
            passes = max(known.backwards for known in self._optimizers.values())
            sentence += (
                f" There were {passes} backward passes since the last step: unscale_ ran before "
                "the accumulation was complete."
                if passes > 1
                else " The iteration before it ended without update()."
            )
        self._note(code, CERTAIN if code in SCALER_ERRORS else LIKELY, sentence, step)

    def _note_no_gradients(self, known: _Optimizer) -> None:
        parameters = known.parameters
        mine = {id(p) for p in self._root.parameters()}
        if not any(p.requires_grad for p in parameters):
            why = "all of them are frozen (requires_grad=False)"
        elif not any(id(p) in mine for p in parameters):
            why = "they do not belong to the model: the optimizer was made for another one"
        elif known.erased:
            why = "backward() made gradients, and zero_grad() removed them before the step"
        else:
            why = "no backward() reached them"
        self._note(
            "no-gradients",
            CERTAIN,
            f"None of the {len(parameters)} parameters of the optimizer had a gradient: {why}.",
            known.index,
        )

    @torch.no_grad()
    def _look_at_the_end(self, failed: bool) -> None:
        last = max(known.index for known in self._optimizers.values()) - 1
        for name in self._find_bad_buffers():
            self._bad_buffers.setdefault(name, max(last, 0))
        trainable = [(n, p) for n, p in self._root.named_parameters() if p.requires_grad]
        self._16_bit = {n: p.dtype for n, p in trainable if p.dtype in LOWER_PRECISION}
        self._bad_weights = _nonfinite_names(trainable)
        if self._backwards and not self.steps and not failed:
            self._note("no-steps", LIKELY, "backward() ran, but no watched optimizer made a step.")

        scaled = any(known.scalers for known in self._optimizers.values())
        self._judge_precision(scaled)
        self._judge_numbers()
        for known in self._optimizers.values():
            self._judge_gradients(known)
            self._judge_scale(known)
            self._judge_schedule(known)
        self._judge_pairs()

    def _judge_precision(self, scaled: bool) -> None:
        half, brain, none = (self._forwards[d] for d in (torch.float16, torch.bfloat16, None))
        device = _device_type(self._root)
        elsewhere = self._autocast_devices - {device}
        if none and not half and not brain:
            if elsewhere:
                self._note(
                    "autocast-wrong-device",
                    CERTAIN,
                    f"The loop used autocast for {elsewhere.pop()!r}, but the model is on {device!r}: "
                    "its forward pass ran without autocast.",
                )
            elif scaled and not self._16_bit:
                self._note(
                    "scaler-without-autocast",
                    CERTAIN,
                    "The loss is scaled, but the model's forward pass never ran under autocast: this "
                    "is FP32 training.",
                )
        if brain and not half and scaled and not self._16_bit:
            self._note("scaler-with-bf16", CERTAIN, "The loss is scaled, but autocast used BF16.")
        unscaled = [k for k in self._optimizers.values() if k.without_scaling]
        if half and unscaled:
            self._judge_flushing(unscaled)
        if self._16_bit:
            kinds = {LOWER_PRECISION[d] for d in self._16_bit.values()}
            sure = CERTAIN if "FP16" in kinds else POSSIBLE
            self._note(
                "parameters-16-bit",
                sure,
                f"{len(self._16_bit)} trainable parameters are {' and '.join(sorted(kinds))}: "
                f"{_some(self._16_bit)}. So are their gradients and updates.",
            )

    def _judge_flushing(self, unscaled: list[_Optimizer]) -> None:
        sentence = "The forward pass ran under FP16 autocast, and the loss was not scaled."
        given = self._given_scaler
        if given is not None:
            state = "was not used" if given.is_enabled() else "is switched off (enabled=False)"
            sentence += f" The scaler given to watch {state}."
        tiny = {n: t for k in unscaled for n, t in k.tiny.items() if t[0] > 0.0}
        worst = max(tiny, key=lambda name: (tiny[name][0] + tiny[name][1]) * tiny[name][2], default=None)
        harmful = False
        if worst is not None:
            lossy, zero, _ = tiny[worst]
            harmful = lossy + zero >= 0.5 and lossy >= 0.1 * (1.0 - zero)
            sentence += (
                f" In {worst} {lossy:.0%} of the gradients are below 6.1e-5, where FP16 loses bits, "
                f"and {zero:.0%} are exactly 0."
            )
        self._note("fp16-without-scaler", CERTAIN if harmful else LIKELY, sentence)

    def _judge_gradients(self, known: _Optimizer) -> None:
        trainable = [p for p in known.parameters if p.requires_grad]
        missing = [self._name(p) for p in trainable if id(p) not in known.with_gradient]
        if known.with_gradient and missing:
            self._note(
                "parameters-without-gradient",
                POSSIBLE,
                f"{len(missing)} trainable parameters never had a gradient: {_some(missing)}.",
            )
        steps = [s for s in self.steps if s.optimizer == known.position]
        shares = [s.zero_share for s in steps if s.zero_share]
        if shares and all(zero == 1.0 for share in shares for zero in share.values()):
            self._note(
                "all-gradients-zero",
                CERTAIN,
                "Every gradient was exactly 0 in every step that was sampled.",
                steps[0].index,
            )
        if known.unmoved and sum(known.unmoved) / len(known.unmoved) >= 0.5:
            share = sum(known.unmoved) / len(known.unmoved)
            self._note(
                "updates-lost",
                CERTAIN,
                f"{share:.0%} of the 16-bit weights that had a gradient did not change in a step.",
            )

    def _judge_numbers(self) -> None:
        bad = [s for s in self.steps if s.loss is not None and not math.isfinite(s.loss)]
        if bad:
            code = "activation-overflow" if self._origin_overflow else "loss-nonfinite"
            found = f" {self._origin}" if self._origin else ""
            self._note(
                code,
                CERTAIN,
                f"The loss was inf or NaN in {len(bad)} of {len(self.steps)} steps.{found}",
                bad[0].index,
            )
        passed = [s for s in self.steps if s.nonfinite_share and not s.skipped]
        if passed:
            names = passed[0].nonfinite_share
            self._note(
                "gradients-nonfinite",
                CERTAIN,
                f"The optimizer used gradients that are inf or NaN: {_some(names)}.",
                passed[0].index,
            )
        if self._bad_buffers:
            self._note(
                "buffers-nonfinite",
                CERTAIN,
                f"Buffers hold inf or NaN: {_some(self._bad_buffers)}. They are used in eval().",
                min(self._bad_buffers.values()),
            )
        if self._bad_weights:
            self._note(
                "weights-nonfinite",
                CERTAIN,
                f"Weights hold inf or NaN: {_some(self._bad_weights)}.",
            )

    def _judge_scale(self, known: _Optimizer) -> None:
        if len(known.scalers) > 1:
            self._note(
                "scaler-recreated",
                CERTAIN,
                f"{len(known.scalers)} different scalers stepped the same optimizer in "
                f"{known.index} steps: each starts at its initial scale and forgets what the last learned.",
            )
            return
        if not known.scalers:
            return
        scaler = next(iter(known.scalers.values()))
        if scaler.fresh and known.had_state:
            skipped = any(known.attempts[:10])
            self._note(
                "scaler-not-restored",
                LIKELY if skipped else POSSIBLE,
                "The optimizer brought state from earlier steps, but the scaler was new and started at "
                "65536" + (", and skipped steps to come down again." if skipped else "."),
                0,
            )
        first = known.attempts.index(False) if False in known.attempts else known.index
        later = known.attempts[first:]
        steps = [s for s in self.steps if s.optimizer == known.position]
        where = _some(dict.fromkeys(n for s in steps if s.skipped for n in s.nonfinite_share))
        low = min([scaler.scale, *(s.scale for s in steps)])
        if low < 1.0:
            self._note(
                "scale-collapse",
                CERTAIN,
                f"The loss scale fell to {low:g}; {sum(known.attempts)} of {known.index} steps were "
                f"skipped. Overflow in {where}.",
                next((s.index for s in steps if s.scale < 1.0), known.index - 1),
            )
        elif not later and first > 5:
            self._note(
                "no-real-step", CERTAIN, f"All {first} steps were skipped. Overflow in {where}.", 0
            )
        elif _longest_run(later) >= 5 or (sum(later) >= 5 and sum(later) >= 0.2 * len(later)):
            self._note(
                "many-skips",
                LIKELY,
                f"{sum(later)} of {len(later)} steps were skipped after the first real one; the scale "
                f"is {scaler.scale:g}. Overflow in {where}.",
                first + later.index(True),
            )
        elif first > 5:
            self._note(
                "init-scale-too-high",
                CERTAIN,
                f"The first {first} steps were skipped, until the scale had come down to "
                f"{steps[first].scale:g}.",
                0,
            )

    def _judge_schedule(self, known: _Optimizer) -> None:
        every_step = known.scheduler_calls >= 0.75 * known.index
        if known.scheduler_on_skip and every_step:
            self._note(
                "scheduler-on-skip",
                CERTAIN,
                f"The learning rate scheduler moved on in {len(known.scheduler_on_skip)} steps that the "
                "scaler skipped.",
                known.scheduler_on_skip[0],
            )

    def _judge_pairs(self) -> None:
        """Optimizers of one scaler that part company after each has made a real step."""
        known = [k for k in self._optimizers.values() if len(k.scalers) == 1]
        if len(known) < 2 or len({next(iter(k.scalers)) for k in known}) > 1:
            return
        if not all(False in k.attempts for k in known):
            return
        start = max(k.attempts.index(False) for k in known)
        rows = zip(*(k.attempts for k in known), strict=False)
        apart = [i for i, row in enumerate(rows) if i > start and len(set(row)) > 1]
        if len(apart) >= 2:
            self._note(
                "optimizers-out-of-step",
                POSSIBLE,
                f"In {len(apart)} steps one optimizer was skipped and another was not.",
                apart[0],
            )

    # --- the report ----------------------------------------------------------------------------

    @property
    def findings(self) -> list[Finding]:
        """What does not fit, causes before their consequences. Complete when the block is left."""
        order = list(ADVICE)
        return sorted(self._notes.values(), key=lambda finding: order.index(finding.code))

    def _summary(self) -> str:
        skipped = sum(s.skipped for s in self.steps)
        text = f"watch: {len(self.steps)} steps, {skipped} skipped"
        if self._scalers and self.steps:
            last = list(self._scalers.values())[-1].scale
            text += f", loss scale {self.steps[0].scale:g} to {last:g}"
        kinds = [LOWER_PRECISION.get(d, str(d)) for d in self._forwards if d is not None]
        text += f", autocast {' and '.join(kinds)}" if kinds else ", no autocast"
        if not self.findings:
            text += ". Nothing to report."
        return text

    def __str__(self) -> str:
        lines = [self._summary()]
        for finding in self.findings:
            since = "" if finding.step is None else f", from step {finding.step}"
            lines += [
                "",
                f"{finding.code} ({finding.certainty}{since})",
                f"  {finding.sentence}",
                f"  Try: {finding.advice}",
            ]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td><code>{f.code}</code></td><td>{f.certainty}</td>"
            f"<td>{'' if f.step is None else f.step}</td>"
            f"<td style='text-align:left'>{html.escape(f.sentence)}</td>"
            f"<td style='text-align:left'>{html.escape(f.advice)}</td></tr>"
            for f in self.findings
        )
        head = (
            "<tr><th>finding</th><th>how sure</th><th>from step</th><th>seen</th><th>try</th></tr>"
        )
        table = f"<table>{head}{rows}</table>" if rows else ""
        return f"<p>{html.escape(self._summary())}</p>{table}"


SCALER_ERRORS = {
    code for _, code in MESSAGES[:5]
}  # the scaler's own protests: what they say is what happened


def _family(kind: type) -> Iterator[type]:
    """A class and everything that inherits from it."""
    yield kind
    for child in kind.__subclasses__():
        yield from _family(child)


def _device_type(module: nn.Module) -> str:
    parameter = next(module.parameters(), None)
    return "cpu" if parameter is None else parameter.device.type


def _version(grad: torch.Tensor | None) -> int:
    return -1 if grad is None else grad._version


def _mean(loss: torch.Tensor) -> torch.Tensor:
    return loss.detach().float().mean()


def _tensors(nested) -> Iterator[torch.Tensor]:
    """The tensors in a tensor, a list, tuple or dict of them, and so on; lazy iterables are left."""
    if isinstance(nested, torch.Tensor):
        yield nested
    elif isinstance(nested, dict):
        yield from _tensors(list(nested.values()))
    elif isinstance(nested, (list, tuple)):
        for each in nested:
            yield from _tensors(each)


def _to_floats(tensors: list[torch.Tensor]) -> list[float]:
    """The values of 0-dim tensors, with one wait for the device."""
    if not tensors:
        return []
    device = tensors[0].device
    return torch.stack([t.detach().to(device, torch.float32) for t in tensors]).tolist()


def _nonfinite_names(named: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    named = [(name, t) for name, t in named if t.numel()]
    norms = _to_floats(list(_foreach_norm([t.detach() for _, t in named], 2))) if named else []
    suspects = [pair for pair, norm in zip(named, norms, strict=True) if not math.isfinite(norm)]
    return [name for name, t in suspects if not bool(t.isfinite().all())]


def _beyond_infinity(tensor: torch.Tensor) -> bool:
    """Whether it holds inf or NaN. Not -inf alone: attention masks are made of it."""
    return tensor.is_floating_point() and not bool((tensor < math.inf).all())


def _unmoved_share(copies) -> float:
    """Of the weights with a gradient other than 0, the share that the step left as they were."""
    stayed = sum(int(((p == old) & (p.grad != 0)).sum()) for p, old in copies)
    pulled = sum(int((p.grad != 0).sum()) for p, _ in copies)
    return stayed / pulled if pulled else 0.0


def _has_closure(args, kwargs) -> bool:
    return kwargs.get("closure") is not None or any(callable(arg) for arg in args[1:])


def _longest_run(flags: list[bool]) -> int:
    longest = current = 0
    for flag in flags:
        current = current + 1 if flag else 0
        longest = max(longest, current)
    return longest


def _dtype_name(dtype: torch.dtype) -> str:
    return LOWER_PRECISION.get(dtype, str(dtype).removeprefix("torch."))


def _some(names: Iterable[str], shown: int = 3) -> str:
    names = list(names)
    rest = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + rest
