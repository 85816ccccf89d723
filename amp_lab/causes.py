"""Why did a kernel run in FP32? The answer in words.

`recorder` knows which function was called and whether autocast was on; `classify` asks autocast
about that function; and an FP32 input has a history, which is followed back to where FP32 began.
"""

import re
from functools import partial

import torch
from torch.utils._pytree import tree_map_only

from .policy import Policy, classify
from .recorder import HALF, Call, Cast, Kernel


def pattern(path: str) -> str:
    """A module path with a star for each number: layers of the same kind look the same."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path) or "(model)"


class Causes:
    """Answers for the kernels of one recording, made under one device type and dtype."""

    def __init__(self, device_type: str, dtype: torch.dtype):
        self.device_type = device_type
        self.dtype = dtype
        self._policies: dict[tuple, Policy | None] = {}

    def cause(self, kernel: Kernel) -> str:
        """Why `kernel` ran in FP32 or FP64; empty if it did not."""
        call = kernel.call
        if call is None:
            return ""
        if kernel.is_cast and call.casts_explicitly:
            return f"{call.name}() in the code" + (f" ({kernel.where})" if kernel.where else "")
        if kernel.is_cast and call.autocast:
            return "inserted by autocast"
        if kernel.dtype in HALF or not kernel.dtype.is_floating_point:
            return ""
        if kernel.dtype == torch.float64:
            return "FP64 input, which autocast leaves alone"
        if call.refused:
            return "banned under autocast"
        if not call.autocast:
            return "autocast is off here" + (f" ({kernel.where})" if kernel.where else "")
        policy = self.policy(call)
        if policy is Policy.FP32:
            return f"autocast keeps {call.name} in FP32"
        if policy is Policy.LOWER_PRECISION:
            return f"{call.name} takes 16 bits, but computes this step in FP32"
        rule = "takes its widest input" if policy is Policy.WIDEST else "follows its input"
        return f"{call.name} {rule}, FP32 from {self.origin(kernel.source)}"

    def origin(self, source: Kernel | str) -> str:
        """Where FP32 began: a parameter, the model's input, or an operation."""
        while isinstance(source, Kernel):
            call = source.call
            place = f"in {pattern(source.module)}"
            if call is None:
                return place
            if source.is_cast and call.casts_explicitly:
                return f".{call.name}()" + (f" at {source.where}" if source.where else "")
            if not call.autocast:
                return f"{call.name} {place}, where autocast is off"
            if self.policy(call) is Policy.FP32:
                return f"{call.name} {place}, which autocast keeps in FP32"
            if not source.source:
                return f"{call.name} {place}"
            source = source.source
        return pattern(source) if source else "a constant"

    def cast_source(self, cast: Cast) -> str:
        """What a cast converts: a weight's name, or the operation that made the tensor."""
        if cast.weight:
            return pattern(cast.weight)
        if isinstance(cast.source, Kernel):
            name = cast.source.call.name if cast.source.call else cast.source.name
            return f"{name} in {pattern(cast.source.module)}"
        return cast.source

    def bans(self, call: Call) -> bool:
        """Whether autocast refuses the called function whatever its inputs' dtypes."""
        return self.policy(call) is Policy.BANNED

    def policy(self, call: Call) -> Policy | None:
        """Autocast's class of the called function; None where it cannot be asked."""
        key = (call.function, *sorted(call.kwargs))
        if key not in self._policies:
            args, kwargs = tree_map_only(torch.Tensor, _on_meta, (call.args, call.kwargs))
            fixed = {k: kwargs.pop(k) for k in ("device_type", "dtype") if k in kwargs}
            function = partial(call.function, **fixed) if fixed else call.function
            try:
                policy = classify(
                    function, *args, device_type=self.device_type, dtype=self.dtype, **kwargs
                )
            except (TypeError, ValueError):
                policy = None
            self._policies[key] = policy
        return self._policies[key]


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
