"""Time, throughput and bytes, measured so that the number means something."""

import contextlib
import statistics
import time
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def median_ms(
    fn: Callable[[], object], repeats: int = 20, warmup: int = 3, seconds: float = 2.0
) -> float:
    """Median wall time of `fn()` in milliseconds.

    Runs `warmup` calls first, then up to `repeats` measured ones, and stops early once `seconds`
    have passed (at least one call is measured). Waits for the GPU before it reads the clock: CUDA
    calls return before their work is done.
    """
    if repeats < 1 or warmup < 0:
        raise ValueError(
            f"median_ms: repeats={repeats}, warmup={warmup}; expected repeats >= 1 and warmup >= 0"
        )
    for _ in range(warmup):
        fn()
    _finish()
    times = []
    deadline = time.perf_counter() + seconds
    while len(times) < repeats and (not times or time.perf_counter() < deadline):
        start = time.perf_counter()
        fn()
        _finish()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def matmul_tflops(
    n: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    repeats: int = 20,
) -> float:
    """Measured throughput of an n x n by n x n matrix product, in TFLOP/s.

    A product of two n x n matrices takes 2 n**3 operations: n**3 multiplications and as many
    additions. The runs stop early after two seconds.
    """
    if n < 1:
        raise ValueError(f"matmul_tflops: n is {n}, expected a matrix size of at least 1")
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(n, n, generator=generator).to(device, dtype)
    b = torch.randn(n, n, generator=generator).to(device, dtype)
    return 2 * n**3 / (median_ms(lambda: a @ b, repeats) * 1e-3) / 1e12


@dataclass(frozen=True)
class Saved:
    """One tensor that is kept for backward: which layer's operation asked for it first, and its size.

    `weight_copy` says that it is the 16-bit copy of a weight, which autocast made.
    """

    layer: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int
    weight_copy: bool


@dataclass(frozen=True, repr=False)
class SavedBytes:
    """What a forward pass keeps for backward, one row a tensor, in the order of the forward pass."""

    rows: tuple[Saved, ...]

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(row.bytes for row in self.rows)

    @property
    def weight_copies(self) -> int:
        """The bytes that are 16-bit copies of weights."""
        return sum(row.bytes for row in self.rows if row.weight_copy)

    @property
    def by_dtype(self) -> dict[torch.dtype, int]:
        """Bytes of each dtype."""
        return self._sums("dtype")

    @property
    def by_layer(self) -> dict[str, int]:
        """Bytes of each layer."""
        return self._sums("layer")

    def _sums(self, key: str) -> dict:
        sums = Counter()
        for row in self.rows:
            sums[getattr(row, key)] += row.bytes
        return dict(sums)

    def __repr__(self):
        width = max([len("layer"), *(len(row.layer) for row in self.rows)])
        lines = [f"{'layer':{width}}  {'dtype':8}  {'bytes':>13}  shape"]
        for row in self.rows:
            dtype = str(row.dtype).removeprefix("torch.")
            note = "  16-bit copy of a weight" if row.weight_copy else ""
            shape = " x ".join(map(str, row.shape)) or "one number"
            lines.append(f"{row.layer:{width}}  {dtype:8}  {row.bytes:13,}  {shape}{note}")
        lines.append(f"{'total':{width}}  {'':8}  {self.total:13,}")
        return "\n".join(lines)


def saved_bytes(
    model: nn.Module,
    *inputs: torch.Tensor,
    dtype: torch.dtype | None = None,
    loss: Callable | None = None,
    targets=(),
) -> SavedBytes:
    """Count the bytes that `model(*inputs)` keeps for its backward pass, on any device.

    `dtype` is the dtype of autocast, or None for no autocast. With `loss` the count goes on through
    `loss(output, *targets)`; `targets` is a tensor or a tuple of tensors. The forward pass is run
    once, in the mode that the model is in (which updates BatchNorm's statistics in training mode). On
    a CPU, enter `tensor_core_emulation()` around it for FP16, or it takes long.

    Each storage counts once, whole, under the layer that asked for it first; an input counts with its
    own size, even if it is a slice of something bigger. Parameters and buffers, which exist anyway,
    do not count; 16-bit copies of them do.

    Source: docs.pytorch.org, "Hooks for autograd saved tensors".
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"saved_bytes: model is {type(model).__name__}, expected an nn.Module")
    tensors = [t for t in (*model.parameters(), *inputs) if isinstance(t, torch.Tensor)]
    if not tensors:
        raise ValueError("saved_bytes: no parameter and no input, so nothing can be kept")
    targets = targets if isinstance(targets, tuple) else (targets,)
    autocast = torch.autocast(tensors[0].device.type, dtype=dtype, enabled=dtype is not None)
    names = {module: name or "(model)" for name, module in model.named_modules()}
    given = {_storage(t)._cdata for t in _tensors((inputs, targets))}
    own = {_storage(t)._cdata for t in (*model.parameters(), *model.buffers())}
    copies = _WeightCopies({_storage(p)._cdata for p in model.parameters()})
    running, kept, rows = ["(loss)"], {}, []

    def pack(tensor):
        storage = _storage(tensor)
        if storage._cdata not in own and storage._cdata not in kept:
            kept[storage._cdata] = storage  # held, so that no other storage gets its address
            size = tensor.nbytes if storage._cdata in given else storage.nbytes()
            is_copy = storage._cdata in copies.made
            rows.append(Saved(running[-1], tuple(tensor.shape), tensor.dtype, size, is_copy))
        return tensor

    def enter(module, args):
        running.append(names[module])

    def leave(module, args, output):
        running.pop()

    with contextlib.ExitStack() as stack:
        for module in names:
            stack.callback(module.register_forward_pre_hook(enter).remove)
            stack.callback(module.register_forward_hook(leave).remove)
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor))
        stack.enter_context(copies)
        stack.enter_context(autocast)
        output = model(*inputs)
        if loss is not None:
            loss(output, *targets)
    return SavedBytes(tuple(rows))


def peak_memory(fn: Callable[[], object], device: torch.device | str = "cpu") -> int:
    """Bytes that `fn()` has allocated at its highest point, beyond what was allocated before.

    On CUDA it is the caching allocator's own counter, which includes the scratch space of kernels
    that ask PyTorch for it. On the CPU, where PyTorch keeps no such counter, it is the bytes of all
    tensors that operations make, until they are freed: exact for tensors, blind for scratch space
    inside kernels. Emulated FP16 makes FP32 copies, which count.
    """
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        fn()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    if device.type != "cpu":
        raise ValueError(f"peak_memory: device is {device}, expected a cpu or cuda device")
    with _LiveBytes() as live:
        fn()
    return live.peak


class _WeightCopies(TorchDispatchMode):
    """Notes which storages were made by casting a parameter."""

    def __init__(self, parameters: set[int]):
        super().__init__()
        self.parameters = parameters
        self.made = set()
        self._held = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            if _storage(args[0])._cdata in self.parameters:
                self._held.append(_storage(result))
                self.made.add(self._held[-1]._cdata)
        return result


class _LiveBytes(TorchDispatchMode):
    """Adds up the storages that operations make, and subtracts them when they are freed."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self._sizes = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {_storage(t)._cdata for t in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            storage = _storage(tensor)
            key = storage._cdata
            if key not in given and key not in self._sizes:
                self._sizes[key] = storage.nbytes()
                self.now += storage.nbytes()
                weakref.finalize(storage, self._freed, key)
        self.peak = max(self.peak, self.now)
        return result

    def _freed(self, key):
        self.now -= self._sizes.pop(key)


def _tensors(tree) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()


def _finish() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
