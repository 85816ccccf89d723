"""One forward pass, kernel by kernel.

Three of PyTorch's own windows, opened at once over a dry run: forward hooks tell which module is at
work, a function mode sees the calls that the model makes (*above* autocast), a dispatch mode sees
the kernels that they become (*below* autocast). What autocast did is the difference.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from .attention import fused_attention, multi_head_attention
from .dryrun import DryRun
from .tables import short
from .where import explain, own_line

HALF = (torch.float16, torch.bfloat16)
LOSS = "(loss)"
_FLOATS = {torch.float64, torch.float32, *HALF}
_aten = torch.ops.aten
_CAST = _aten._to_copy.default
_CPU_ATTENTION = _aten._scaled_dot_product_flash_attention_for_cpu
_EXPLICIT_CASTS = {
    getattr(torch.Tensor, name)
    for name in ("to", "type", "type_as", "float", "double", "half", "bfloat16")
}
# Real kernels refuse mixed dtypes here, which fake ones let pass.
_ONE_DTYPE = {
    getattr(_aten, name)
    for name in (
        "mm",
        "addmm",
        "addmm_",
        "bmm",
        "baddbmm",
        "baddbmm_",
        "convolution",
        "index_add",
        "index_add_",
    )
}
# These read the rows that they return, not the whole table.
_ROW_READERS = {_aten.embedding, _aten.index, _aten.index_select, _aten.gather}


class AuditError(RuntimeError):
    """The dry run cannot follow a model. The message names the module, the line and a way out."""


@dataclass(eq=False)
class Call:
    """A function that the model called, and whether autocast was on at that moment."""

    function: Callable
    args: tuple
    kwargs: dict
    autocast: bool
    refused: Exception | None = None

    @property
    def name(self) -> str:
        name = getattr(self.function, "__name__", str(self.function))
        return (name.strip("_") if name.startswith("__") else name.lstrip("_")) + (
            "(out=)" if self.kwargs.get("out") is not None else ""
        )

    @property
    def casts_explicitly(self) -> bool:
        return self.function in _EXPLICIT_CASTS or self.kwargs.get("dtype") is not None


@dataclass(eq=False)
class Kernel:
    """One kernel that ran.

    `dtype` is what it takes, where it does matrix products, casts or compares, and what it gives
    otherwise. A conversion between floating dtypes is called `cast to FP16`, say, and `is_cast`.

    `bytes` is what it reads and writes if nothing is cached or fused. `source` tells where the
    first of its FP32 inputs comes from: the kernel that made it, or words.
    """

    module: str
    name: str
    dtype: torch.dtype
    flops: int
    bytes: int
    call: Call | None
    where: str
    source: "Kernel | str"
    is_cast: bool


@dataclass(eq=False)
class Cast:
    """One conversion between floating dtypes, out of place. `times` counts equal ones.

    `by_autocast` is false for `x.float()` and the like in the model's code. `weight` is the name of
    the parameter that is converted, if it is one; `uncached` says why autocast's cache does not
    keep the result for the next op.
    """

    module: str
    origin: torch.dtype
    target: torch.dtype
    bytes: int
    by_autocast: bool
    weight: str | None
    source: Kernel | str
    uncached: str
    times: int = 1


@dataclass(eq=False)
class Saved:
    """A storage that autograd keeps for backward, and the first operation that asked for it."""

    module: str
    op: str
    dtype: torch.dtype
    bytes: int
    weight_copy: bool


@dataclass(eq=False)
class Recording:
    """What one forward pass did."""

    kernels: list[Kernel] = field(default_factory=list)
    casts: list[Cast] = field(default_factory=list)
    saved: list[Saved] = field(default_factory=list)
    refused: list[tuple[Call, str, str]] = field(default_factory=list)
    attention: set[str] = field(default_factory=set)


def record(
    dry: DryRun,
    model: nn.Module,
    args: tuple,
    kwargs: dict,
    loss: Callable | None = None,
    targets: tuple = (),
    skip: Mapping[str, Callable] | None = None,
) -> Recording:
    """Run a fake copy of `model` inside `dry`, and its loss, and write down what happens.

    `skip` maps module paths to stand-ins for their `forward`. Raises `AuditError` where the dry run
    cannot go on.
    """
    try:
        twin = dry.to_device(model)
    except Exception as error:
        raise AuditError(f"the model cannot be copied by copy.deepcopy: {error}") from error
    args, kwargs, targets, loss = map(dry.to_device, (args, kwargs, targets, loss))
    for path, stand_in in (skip or {}).items():
        twin.get_submodule(path).forward = stand_in
    recorder = _Recorder(dry, twin)
    try:
        return recorder.run(args, kwargs, loss, targets)
    except Exception as error:
        path = recorder.modules[-1]
        module = None if path == LOSS else twin.get_submodule(path)
        raise AuditError(explain(error, path, module)) from error


class _Recorder:
    def __init__(self, dry: DryRun, model: nn.Module):
        from torch.utils.flop_counter import flop_registry, sdpa_flop

        self.device_type = dry.device_type
        self.model = model
        in_place = {
            _aten.addmm_: flop_registry[_aten.addmm],
            _aten.baddbmm_: flop_registry[_aten.baddbmm],
        }
        self.flop_formulas = {_CPU_ATTENTION: sdpa_flop, **in_place, **flop_registry}
        self.recording = Recording()
        self.modules: list[str] = [""]
        self.calls: list[Call] = []
        # Storages are told apart by address; holding them keeps an address from being used again.
        self.held: dict[int, torch.UntypedStorage] = {}
        self.own: dict[int, str] = {}
        self.sources: dict[int, Kernel | str] = {}
        self.weight_copies: set[int] = set()
        self.saved: dict[int, Saved] = {}
        self.casts: dict[tuple, Cast] = {}
        self.parameters = set()
        for kind, named in (("parameter", model.named_parameters), ("buffer", model.named_buffers)):
            for name, tensor in named():
                key = self.key(tensor)
                self.own[key] = name
                self.sources[key] = f"the {kind} {name}"
                if kind == "parameter":
                    self.parameters.add(key)

    def run(self, args: tuple, kwargs: dict, loss: Callable | None, targets: tuple) -> Recording:
        for tensor in tree_leaves((args, kwargs, targets)):
            if isinstance(tensor, torch.Tensor):
                self.sources.setdefault(self.key(tensor), "the model's input")
        for path, module in self.model.named_modules():
            module.register_forward_pre_hook(partial(self.enter, path))
            module.register_forward_hook(partial(self.leave, path))
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self.pack, lambda t: t))
            stack.enter_context(_Kernels(self))
            stack.enter_context(_Calls(self))
            output = self.model(*args, **kwargs)
            if loss is not None:
                self.modules.append(LOSS)
                loss(output, *targets)
        self.recording.saved = list(self.saved.values())
        self.recording.casts = list(self.casts.values())
        return self.recording

    def enter(self, path: str, module: nn.Module, args: tuple) -> None:
        self.modules.append(path)

    def leave(self, path: str, module: nn.Module, args: tuple, output: Any) -> None:
        while self.modules.pop() != path:
            pass

    def key(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        self.held[storage._cdata] = storage
        return storage._cdata

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        key = self.key(tensor)
        if key not in self.own and key not in self.saved:
            size = tensor.untyped_storage().nbytes()
            op = self.calls[-1].name if self.calls else ""
            copy = key in self.weight_copies
            self.saved[key] = Saved(self.modules[-1], op, tensor.dtype, size, copy)
        return tensor

    def kernel(self, func: Any, args: tuple, kwargs: dict, result: Any) -> None:
        inputs, outputs = _tensors((args, kwargs)), _tensors(result)
        read, written = [self.key(t) for t in inputs], [self.key(t) for t in outputs]
        mutates = func._schema.is_mutable
        if not outputs or (not mutates and set(read) & set(written)) or _allocates(func):
            for key in written:
                for origin in read[:1]:
                    self.sources.setdefault(key, self.sources.get(origin, "a constant"))
            return
        call = self.calls[-1] if self.calls else None
        packet = func.overloadpacket
        floats = {t.dtype for t in inputs if t.is_floating_point()}
        if packet in _ONE_DTYPE and len(floats) > 1:
            names = " and ".join(sorted(short(dtype) for dtype in floats))
            raise RuntimeError(f"{packet.__name__} expects inputs of the same dtype, not {names}")
        flops = 0
        if packet in self.flop_formulas:
            flops = int(self.flop_formulas[packet](*args, **kwargs, out_val=result))
        dtype = outputs[0].dtype
        if inputs and (flops or func is _CAST or not dtype.is_floating_point):
            dtype = max((t.dtype for t in inputs), key=lambda d: (d.is_floating_point, d.itemsize))
        sizes = [_bytes(t) for t in inputs]
        out_size = sum(map(_bytes, outputs))
        if packet in _ROW_READERS:
            sizes[0] = min(sizes[0], out_size)
        wide = [k for k, t in zip(read, inputs, strict=True) if t.dtype == torch.float32]
        is_cast = func is _CAST and {t.dtype for t in (*inputs, *outputs)} <= _FLOATS
        is_cast = is_cast and inputs[0].dtype != outputs[0].dtype
        name = f"cast to {short(outputs[0].dtype)}" if is_cast else packet.__name__.lstrip("_")
        explicit = is_cast and (call is None or call.casts_explicitly)
        where = own_line() if explicit or (flops and dtype not in HALF) else ""
        kernel = Kernel(
            self.modules[-1],
            name,
            dtype,
            flops,
            sum(sizes) + out_size,
            call,
            where,
            self.sources.get(wide[0], "a constant") if wide else "",
            is_cast,
        )
        self.recording.kernels.append(kernel)
        for key in written:
            self.sources[key] = kernel
        if is_cast:
            self.cast(inputs[0], outputs[0], call)

    def cast(self, tensor: torch.Tensor, result: torch.Tensor, call: Call | None) -> None:
        key = self.key(tensor)
        weight = self.own[key] if key in self.parameters else None
        by_autocast = call is not None and call.autocast and not call.casts_explicitly
        if weight and by_autocast:
            self.weight_copies.add(self.key(result))
        same = (
            key,
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
            tensor._version,
            result.dtype,
            by_autocast,
        )
        if same in self.casts:
            self.casts[same].times += 1
        else:
            self.casts[same] = Cast(
                self.modules[-1],
                tensor.dtype,
                result.dtype,
                _bytes(tensor) + _bytes(result),
                by_autocast,
                weight,
                self.sources.get(key, "a constant"),
                _uncached(tensor, result.dtype, weight),
            )


class _Kernels(TorchDispatchMode):
    """Below autocast: hands every kernel to the recorder."""

    def __init__(self, recorder: _Recorder):
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.namespace != "prim":
            self.recorder.kernel(func, args, kwargs, result)
        return result


class _Calls(TorchFunctionMode):
    """Above autocast: tells the recorder which function runs, and replaces attention on CUDA."""

    def __init__(self, recorder: _Recorder):
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") == "__get__":
            return func(*args, **kwargs)
        recorder = self.recorder
        autocast = torch.is_autocast_enabled(recorder.device_type)
        recorder.calls.append(Call(func, args, kwargs, autocast))
        try:
            if func is F.scaled_dot_product_attention and recorder.device_type == "cuda":
                result, kernel = fused_attention(*args, **kwargs)
                recorder.recording.attention.add(kernel)
                return result
            if func is F.multi_head_attention_forward:
                # A function mode is off inside its own handler; the attention inside needs it.
                with self:
                    return multi_head_attention(*args, **kwargs)
            return self.call(func, args, kwargs)
        finally:
            recorder.calls.pop()

    def call(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """Call `func`; where autocast refuses it, note that and go on without autocast."""
        recorder = self.recorder
        call = recorder.calls[-1]
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            if not call.autocast:
                raise
            call.refused = error
            with torch.autocast(recorder.device_type, enabled=False):
                wide_args, wide_kwargs = tree_map_only(torch.Tensor, _widen, (args, kwargs))
                try:
                    result = func(*wide_args, **wide_kwargs)
                except Exception:
                    raise error from None
        recorder.recording.refused.append((call, recorder.modules[-1], own_line()))
        return result


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _widen(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in HALF else tensor


def _bytes(tensor: torch.Tensor) -> int:
    """Bytes of memory behind a tensor; an expanded dimension is stored once."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return prod(n for n, stride in sizes if stride or n == 0) * tensor.element_size()


def _allocates(func: Any) -> bool:
    return func.overloadpacket.__name__.startswith(("empty", "new_empty"))


def _uncached(tensor: torch.Tensor, target: torch.dtype, weight: str | None) -> str:
    """Why autocast's cache does not keep this cast: it keeps FP32 leaves that need gradients."""
    if weight and not tensor.requires_grad:
        return "the weight is frozen (requires_grad=False)"
    if not tensor.requires_grad or not tensor.is_leaf or tensor._is_view():
        return "a view of a weight, not a leaf" if weight else "not a leaf"
    if target not in HALF:
        return "only casts to 16 bits are cached"
    return "" if torch.is_autocast_cache_enabled() else "autocast's cache is off"
