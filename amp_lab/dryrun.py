"""The CUDA dispatcher without a GPU.

Autocast decides by a tensor's *device* and *dtype*, never by its values. PyTorch's fake tensors
have a device and a dtype and no values. Put the two together and the real CUDA autocast answers
on any machine, without memory and without running a kernel.
"""

import copy
import ctypes
import functools
import logging
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

CAST_BY_AUTOCAST = (torch.float32, torch.float16, torch.bfloat16)


class DryRun:
    """What `dry_run` yields: the door through which real things come in.

    `device_type` is "cuda" or "cpu"; `mode` is the active `FakeTensorMode`.
    """

    def __init__(self, device_type: str, mode: FakeTensorMode):
        self.device_type = device_type
        self.mode = mode

    def to_device(self, value: Any, dtype: torch.dtype | None = None) -> Any:
        """A fake copy of `value` on this dry run's device; the original is left untouched.

        `value` is a tensor on any device ("meta" too), a module, or lists, tuples and dicts of
        tensors; whatever else it holds is returned as it is. Shapes, strides, dtypes and
        `requires_grad` are kept, values are not; a non-leaf tensor becomes a leaf. A module comes
        back as a copy with fake parameters and buffers, tied ones still tied, and takes no memory
        for them. `dtype` replaces FP32, FP16 and BF16; all other dtypes stay, as under autocast.

        Prefer it to `module.to("cuda")`, which would move the module itself: its values are gone
        after that.
        """

        def fake(tensor: torch.Tensor, device: str | torch.device) -> torch.Tensor:
            new_dtype = dtype if dtype and tensor.dtype in CAST_BY_AUTOCAST else tensor.dtype
            twin = torch.empty_strided(
                tensor.size(), tensor.stride(), dtype=new_dtype, device=device
            )
            if isinstance(tensor, nn.Parameter):
                return nn.Parameter(twin, tensor.requires_grad)
            return twin.requires_grad_(tensor.requires_grad)

        with self.mode:
            if isinstance(value, nn.Module):
                own = {id(t): t for t in chain(value.parameters(), value.buffers())}
                twins = {key: fake(t, self.device_type) for key, t in own.items()}
                # Like `module.to`, this leaves tensors that are neither on their device.
                for attribute in tree_leaves([vars(module) for module in value.modules()]):
                    if isinstance(attribute, torch.Tensor) and id(attribute) not in own:
                        twins[id(attribute)] = fake(attribute, attribute.device)
                return copy.deepcopy(value, twins)
            return tree_map_only(torch.Tensor, lambda t: fake(t, self.device_type), value)


@contextmanager
def dry_run(
    device_type: str = "cuda", dtype: torch.dtype = torch.float16, enabled: bool = True
) -> Iterator[DryRun]:
    """Run code on tensors that need no GPU and hold no data, under the real autocast.

    Inside, every new tensor is fake: `torch.empty(8, 8, device="cuda")` has a shape, a dtype and
    a device, and takes no memory. Operations compute shapes and dtypes, nothing else, and PyTorch's
    own CUDA autocast rules (`device_type="cpu"`: its CPU rules) choose the dtypes. Where there is
    a GPU the rules are the same, and of the GPU only its CUDA context is set up.

    `dtype` is autocast's 16-bit dtype, float16 or bfloat16; `enabled=False` gives fake tensors with
    autocast off. The block yields a `DryRun`, whose `to_device` brings in real tensors and modules.
    Dry runs nest, and `torch.autocast` works inside as it does on a machine with a GPU: switched
    off for an FP32 island, on again, or with another dtype. Like autocast, a dry run holds for its
    own thread. At the end everything is as before, also after an exception.

    Limits: what needs values raises (`.item()`, `if tensor:`, boolean indexing), and so does
    `backward()`. A `torch.autocast("cuda")` object that was created *before* the dry run, on a
    machine without CUDA (a decorator on a `forward`, say), switched itself off at that moment and
    stays off. The first dry run of a process takes a second, because PyTorch loads its compiler.

    Raises `ValueError` for another device type or dtype; `RuntimeError` where this build of
    PyTorch cannot be asked.
    """
    if device_type not in ("cuda", "cpu"):
        raise ValueError(f"device_type is {device_type!r}; dry_run knows 'cuda' and 'cpu'")
    if dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(
            f"dtype is {dtype}; autocast's lower precision is torch.float16 or torch.bfloat16"
        )
    with ExitStack() as stack:
        if device_type == "cuda":
            stack.enter_context(_pretend_cuda())
        # Autocast keeps casts of weights for reuse: real ones must not leak in, nor fake ones out.
        torch.clear_autocast_cache()
        stack.callback(torch.clear_autocast_cache)
        stack.enter_context(torch.autocast(device_type, dtype, enabled))
        stack.enter_context(_errors_told_once())
        active = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
        mode = active or FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        stack.enter_context(mode)
        if device_type == "cuda":
            stack.enter_context(_MissingAnswers())
        yield DryRun(device_type, mode)


@contextmanager
def _errors_told_once() -> Iterator[None]:
    """Fake tensors log an exception before they raise it; in this thread the raise is enough."""
    log, thread = logging.getLogger("torch._subclasses.fake_tensor"), threading.get_ident()

    def keep(record: logging.LogRecord) -> bool:
        return record.exc_info is None or record.thread != thread

    log.addFilter(keep)
    try:
        yield
    finally:
        log.removeFilter(keep)


# What follows exists because PyTorch asks for the GPU itself in a few places. The stand-ins are
# process-wide, so the first dry run puts them in place and the last takes them away, and the Python
# ones still tell the truth to every thread that is not in a dry run.

_lock = threading.Lock()
_users = 0
_undo = ExitStack()
_this_thread = threading.local()


@contextmanager
def _pretend_cuda() -> Iterator[None]:
    global _users
    with _lock:
        if _users == 0:
            with ExitStack() as stack:
                _answer(stack, torch.cuda.amp.common, "amp_definitely_not_available", False)
                _answer(stack, torch.cuda, "is_bf16_supported", True)
                if not torch.cuda.is_available():
                    _lend_noop_guard_to_cuda(stack)
                    # On a CUDA build `nn.LSTM` asks cuDNN, which asks the driver.
                    stack.callback(torch._C._set_cudnn_enabled, torch._C._get_cudnn_enabled())
                    torch._C._set_cudnn_enabled(False)
                _undo.push(stack.pop_all())
        _users += 1
    _this_thread.depth = getattr(_this_thread, "depth", 0) + 1
    try:
        yield
    finally:
        _this_thread.depth -= 1
        with _lock:
            _users -= 1
            if _users == 0:
                _undo.close()


def _answer(stack: ExitStack, module: Any, name: str, answer: bool) -> None:
    """Let `module.name()` return `answer` in threads that are in a dry run, until `stack` closes.

    `torch.autocast("cuda")` asks these functions, and switches itself off where there is no GPU.
    """
    real = getattr(module, name)

    @functools.wraps(real)
    def asked(*args: Any, **kwargs: Any) -> bool:
        in_dry_run = getattr(_this_thread, "depth", 0) > 0
        return answer if in_dry_run else real(*args, **kwargs)

    setattr(module, name, asked)
    stack.callback(setattr, module, name, real)


_CUDA, _META, _DEVICE_TYPES = 1, 14, 21  # c10::DeviceType
_GUARDS = "_ZN3c104impl26device_guard_impl_registryE"


def _lend_noop_guard_to_cuda(stack: ExitStack) -> None:
    """Give CUDA a device guard that does nothing, until `stack` closes.

    PyTorch switches the current device around some operations (`x[0]`, `x.to("cuda")`) through a
    "device guard". Fake tensors need no switching, but a CPU build has no guard for CUDA and raises,
    and the guard of a CUDA build asks the driver, which old releases do not survive without one.
    PyTorch also has a guard that does nothing, for the meta device; this lends it to CUDA.
    The guards stand in `c10::impl::device_guard_impl_registry`, an array in libc10 of one pointer
    per device type (c10/core/impl/DeviceGuardImplInterface.h).
    """
    lib = Path(torch.__file__).parent / "lib"
    try:
        (path, *_) = [*lib.glob("libc10.so"), *lib.glob("libc10.dylib"), *lib.glob("c10.dll")]
        guards = (ctypes.c_void_p * _DEVICE_TYPES).in_dll(ctypes.CDLL(str(path)), _GUARDS)
    except (ValueError, OSError) as error:
        if torch.version.cuda is not None:
            return  # it has a guard, which will do
        raise RuntimeError(
            f"this CPU build of PyTorch ({torch.__version__}) has no place for a CUDA device guard "
            f"({error}): install a CUDA build of PyTorch; it needs no GPU"
        ) from error
    stack.callback(guards.__setitem__, _CUDA, guards[_CUDA])
    guards[_CUDA] = guards[_META]


class _MissingAnswers(TorchDispatchMode):
    """Two answers about CUDA that fake tensors get wrong or lack."""

    def __init__(self):
        super().__init__()
        self.guard_is_lent = not torch.cuda.is_available()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is _TO_COPY and kwargs.get("device") == _META_DEVICE and self.guard_is_lent:
            # `x.to("cuda")` names no index, so PyTorch asks the guard for the current device. The
            # lent guard says "meta".
            kwargs = {**kwargs, "device": torch.device("cuda", 0)}
        elif func is _GRU_CELL:
            # The fused GRU cell has no fake kernel. The real one returns the new state, and five
            # values per state element for backward (aten/src/ATen/native/cuda/RNN.cu).
            batch, hidden = args[2].shape
            return torch.empty_like(args[2]), args[2].new_empty(batch, 5 * hidden)
        return func(*args, **kwargs)


_META_DEVICE = torch.device("meta")
_TO_COPY = torch.ops.aten._to_copy.default
_GRU_CELL = torch.ops.aten._thnn_fused_gru_cell.default
