"""What autocast does to your model, without a GPU."""

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from .causes import Causes, pattern
from .dryrun import dry_run
from .recorder import AuditError, Recording, record
from .report import Audit, Banned, CastRow, Row, SavedRow
from .roofline import Work, find_gpu

__all__ = ["Audit", "AuditError", "audit"]


def audit(
    model: nn.Module,
    *inputs: Any,
    device_type: str = "cuda",
    dtype: torch.dtype = torch.float16,
    loss: Callable[..., Any] | None = None,
    targets: Any = (),
    gpu: str | None = None,
    skip: Iterable[str] | Mapping[str, Callable] = (),
    **keyword_inputs: Any,
) -> "Audit":
    """Find out what autocast does to `model(*inputs, **keyword_inputs)`, on any machine.

    The forward pass runs twice on fake tensors, without autocast and with it. No kernel is run and
    the model's memory is not allocated: `model` and inputs may live on the CPU or on the "meta"
    device, and be larger than this machine. The model, its buffers, the random state and autocast's
    state stay as they are. Whether it is in training mode counts.

    `device_type` says whose rules to ask, "cuda" or "cpu"; `dtype` is float16 or bfloat16. `loss`
    is called, under autocast as well, as `loss(output, *targets)`; `targets` is a tensor or a tuple
    of tensors. `gpu` names a row of `data/gpus.csv` for an estimate of the speed-up, on "cuda".

    `skip` names modules that the dry run cannot follow, such as `skip=["encoder.sampler"]`. A
    skipped module returns its first input unchanged, and none of its work is counted. Where the
    result has another shape, give a function to call instead, with the same arguments:
    `skip={"encoder.sampler": lambda x: x.new_empty(x.shape[0], 10)}`.

    An input whose name is one of these options needs a wrapper module.

    FLOPs are those of `torch.utils.flop_counter`: two for each multiplication with its addition, in
    matrix products (in-place ones as well), convolutions and attention of the forward pass; other
    operations count as none.
    CUDA's fused attention kernels are assumed, and named in the report.

    Raises `AuditError` if the dry run cannot follow the model, `TypeError` if `model` is not an
    `nn.Module`, `ValueError` for a device type, dtype, GPU or module path that does not exist.
    """
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise TypeError(f"model is the class {model.__name__}; build one: {model.__name__}(...)")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {type(model).__name__}; audit needs an nn.Module")
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise TypeError("TorchScript hides its operations: audit the model that was scripted")
    if gpu is not None and device_type != "cuda":
        raise ValueError(f"gpu is {gpu!r} and device_type {device_type!r}; a GPU runs 'cuda'")
    chosen = find_gpu(gpu, dtype) if gpu is not None else None
    if isinstance(skip, str):
        skip = [skip]
    stand_ins = dict(skip) if isinstance(skip, Mapping) else dict.fromkeys(skip, _first_input)
    for path in stand_ins:
        if path not in dict(model.named_modules()):
            raise ValueError(f"skip names {path!r}, and the model has no module of that name")
    targets = targets if isinstance(targets, tuple) else (targets,)

    def run(enabled: bool) -> Recording:
        with ExitStack() as stack:
            stack.enter_context(_random_state_kept())
            stack.enter_context(torch.inference_mode(False))
            dry = stack.enter_context(dry_run(device_type, dtype, enabled))
            return record(dry, model, inputs, keyword_inputs, loss, targets, stand_ins)

    plain, autocast = run(False), run(True)
    causes = Causes(device_type, dtype)
    for call, module, where in autocast.refused:
        if not causes.bans(call):
            raise AuditError(f"in {module or 'the model'} ({where}): {call.refused}")
    kernels = _rows(autocast, causes)
    return Audit(
        model=type(model).__name__,
        device_type=device_type,
        dtype=dtype,
        training=model.training,
        rows=kernels,
        casts=_cast_rows(autocast, causes),
        saved=_saved_rows(plain, autocast),
        banned=tuple(
            Banned(pattern(module), call.name, where, str(call.refused).strip().splitlines()[0])
            for call, module, where in autocast.refused
        ),
        skipped=tuple(stand_ins),
        assumed=tuple(_assumed(model, plain, autocast)),
        work=(_work(plain), _work(autocast)),
        gpu=chosen,
    )


def _rows(recording: Recording, causes: Causes) -> tuple[Row, ...]:
    groups = defaultdict(list)
    for kernel in recording.kernels:
        key = (pattern(kernel.module), kernel.name, kernel.dtype, causes.cause(kernel))
        groups[key].append(kernel)
    rows = [
        Row(
            module,
            tuple(dict.fromkeys(k.module for k in kernels)),
            op,
            dtype,
            len(kernels),
            sum(k.flops for k in kernels),
            sum(k.bytes for k in kernels),
            cause,
        )
        for (module, op, dtype, cause), kernels in groups.items()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.flops, -row.bytes)))


def _cast_rows(recording: Recording, causes: Causes) -> tuple[CastRow, ...]:
    groups = defaultdict(list)
    for cast in recording.casts:
        key = (
            pattern(cast.module),
            causes.cast_source(cast),
            cast.origin,
            cast.target,
            cast.by_autocast,
            cast.weight is not None,
        )
        groups[key].append(cast)
    rows = [
        CastRow(
            *key,
            casts=sum(c.times for c in casts),
            repeated=sum(c.times - 1 for c in casts),
            bytes=sum(c.times * c.bytes for c in casts),
            uncached=casts[0].uncached,
        )
        for key, casts in groups.items()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.repeated, -row.bytes)))


def _saved_rows(plain: Recording, autocast: Recording) -> tuple[SavedRow, ...]:
    without, with_autocast, copies = Counter(), Counter(), Counter()
    for saved in plain.saved:
        without[saved.op] += saved.bytes
    for saved in autocast.saved:
        with_autocast[saved.op] += saved.bytes
        copies[saved.op] += saved.bytes * saved.weight_copy
    rows = [
        SavedRow(op, without[op], with_autocast[op], copies[op]) for op in without | with_autocast
    ]
    return tuple(sorted(rows, key=lambda row: -max(row.without, row.with_autocast)))


def _assumed(model: nn.Module, plain: Recording, autocast: Recording) -> Iterator[str]:
    """Where a GPU has a choice of kernels and fake tensors have not."""
    kernels = [" and ".join(sorted(r.attention)) for r in (plain, autocast)]
    if any(kernels):
        yield f"{kernels[1]} with autocast, {kernels[0]} without"
    if any(isinstance(module, nn.RNNBase) for module in model.modules()):
        yield "recurrent layers cell by cell, where cuDNN has one kernel"


def _work(recording: Recording) -> Counter[Work]:
    return Counter(Work("conv" in k.name, k.dtype, k.flops, k.bytes) for k in recording.kernels)


def _first_input(*args: Any, **kwargs: Any) -> Any:
    return next(iter((*args, *kwargs.values())))


@contextmanager
def _random_state_kept() -> Iterator[None]:
    """A model may draw random numbers in Python; its fake kernels draw none."""
    python, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy_state)
