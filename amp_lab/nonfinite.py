"""Where inf and NaN are, and where the first of them came from."""

import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

LOWER_PRECISION = {torch.float16: "FP16", torch.bfloat16: "BF16"}

# The original, also where somebody listens to it.
foreach_norm = torch._foreach_norm


def tensors_in(nested) -> Iterator[torch.Tensor]:
    """The tensors in a tensor, a list, tuple or dict of them, and so on; lazy iterables are left."""
    if isinstance(nested, torch.Tensor):
        yield nested
    elif isinstance(nested, dict):
        for each in nested.values():
            yield from tensors_in(each)
    elif isinstance(nested, (list, tuple)):
        for each in nested:
            yield from tensors_in(each)


def stored(tensor: torch.Tensor) -> torch.Tensor:
    """The values in this process: of a sparse tensor those it holds, of a sharded one its shard."""
    tensor = tensor.detach()
    if tensor.is_sparse:
        return tensor._values()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def to_floats(tensors: list[torch.Tensor]) -> list[float]:
    """The values of 0-dim tensors, with one wait for the device."""
    if not tensors:
        return []
    device = tensors[0].device
    return torch.stack([t.detach().to(device, torch.float32) for t in tensors]).tolist()


def nonfinite_shares(named: list[tuple[str, torch.Tensor]]) -> dict[str, float]:
    """By name, the share of elements that are inf or NaN, for the tensors that have any.

    One fused norm per tensor finds the suspects; only those are counted, since a sum of squares may
    overflow where the values themselves do not.
    """
    named = [(name, stored(t)) for name, t in named]
    named = [(name, t) for name, t in named if t.numel()]
    norms = to_floats(list(foreach_norm([t for _, t in named], 2))) if named else []
    shares = {}
    for (name, t), norm in zip(named, norms, strict=True):
        if not math.isfinite(norm):
            bad = t.numel() - int(t.isfinite().sum())
            if bad:
                shares[name] = bad / t.numel()
    return shares


@dataclass(frozen=True)
class Origin:
    """Where the first inf or NaN of a forward pass came from, in words.

    `overflow` says that an operation made inf in FP16 from finite numbers.
    """

    sentence: str
    overflow: bool = False


class OriginFinder(TorchDispatchMode):
    """Context manager around one forward pass of `model`: looks at the result of every operation.

    `origin` is then the first inf or NaN that was made, or what was inf or NaN before; None if the
    pass was finite. Negative infinity alone does not count: attention masks are made of it. It waits
    for the device after every operation, so it is for a pass that is in trouble anyway.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.origin: Origin | None = None
        self._model = model
        self._path: list[str] = [f"the model ({type(model).__name__})"]
        self._hooks = ExitStack()

    def __enter__(self):
        for name, module in self._model.named_modules():
            if name:
                label = f"{name} ({type(module).__name__})"

                def enter(module, args, label=label):
                    self._path.append(label)

                def leave(module, args, output):
                    self._path.pop()

                self._hooks.callback(module.register_forward_pre_hook(enter).remove)
                hook = module.register_forward_hook(leave, always_call=True)
                self._hooks.callback(hook.remove)
        return super().__enter__()

    def __exit__(self, *error):
        self._hooks.close()
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        if self.origin is None and "empty" not in name:  # empty tensors hold what was there before
            bad = next((t for t in tensors_in(result) if _beyond_infinity(t)), None)
            if bad is not None:
                self.origin = self._origin(name, bad, _any_beyond_infinity((args, kwargs)))
        return result

    def _origin(self, operation: str, bad: torch.Tensor, inherited: bool) -> Origin:
        if not inherited:
            infinite = bool(bad.isinf().any())
            dtype = LOWER_PRECISION.get(bad.dtype, str(bad.dtype).removeprefix("torch."))
            return Origin(
                f"The first place is {self._path[-1]}: the operation {operation} made "
                f"{'inf' if infinite else 'NaN'} in {dtype} from finite numbers.",
                overflow=infinite and bad.dtype is torch.float16,
            )
        for kind, named in (
            ("weights", self._model.named_parameters()),
            ("buffers", self._model.named_buffers()),
        ):
            names = [name for name, t in named if _beyond_infinity(t)]
            if names:
                return Origin(f"Its own {kind} are inf or NaN already: {some(names)}.")
        return Origin("The inputs of the model are inf or NaN already.")


def some(names: Iterable[str], shown: int = 3) -> str:
    """The first names of a list, and how many more there are."""
    names = list(names)
    rest = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + rest


def _beyond_infinity(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and not bool((tensor < math.inf).all())


def _any_beyond_infinity(nested) -> bool:
    return any(_beyond_infinity(t) for t in tensors_in(nested))
