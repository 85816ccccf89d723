"""Tensor-Core arithmetic on a CPU.

A Tensor Core multiplies FP16 numbers, adds the products in FP32, and rounds the sum to FP16 once.
The same recipe in three steps on any CPU: widen the FP16 inputs to FP32 (exact), run PyTorch's FP32
kernel, round its result to FP16. Widened FP16 numbers multiply exactly in FP32, since 11 significant
bits times 11 make at most 22, and FP32 has 24.

One difference remains: the order of the additions, and the rounding inside a Tensor Core's adder,
which does not follow IEEE 754.

Source: Fasi, Higham, Mikaitis, Pranesh, "Numerical behavior of NVIDIA tensor cores", PeerJ Computer
Science 7:e330, 2021.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

aten = torch.ops.aten

# What Tensor Cores do: matrix products and convolutions, forward and backward.
TENSOR_CORE_OPS = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten.mv.default,
    aten.addmv.default,
    aten.dot.default,
    aten.convolution.default,
    aten.convolution_backward.default,
}

# Fused attention. Its softmax is FP32 on a GPU, too, and so is the second result of the forward pass,
# the logarithm of the softmax's denominator.
ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default
ATTENTION_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class tensor_core_emulation(TorchDispatchMode):
    """Context manager: FP16 matrix products and convolutions on the CPU by a Tensor Core's recipe.

    Inside it, `mm`, `addmm`, `bmm`, `baddbmm`, `mv`, `addmv`, `dot`, convolutions in 1, 2 and 3
    dimensions, `scaled_dot_product_attention` and their backward passes, called on FP16 tensors on
    the CPU, run in FP32 on the same values and are rounded to FP16 once. (Attention on a GPU also
    rounds the softmax, which lies between its two products.) Everything above stays the real thing:
    autocast, autograd, the scaler, your model. Other ops, dtypes and devices are untouched: on "cuda"
    nothing changes.

    Enter it around forward *and* backward:

        with tensor_core_emulation():
            with torch.autocast("cpu", torch.float16):
                loss = loss_fn(model(x), y)
            loss.backward()

    It may be nested, and is left cleanly on an exception.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is ATTENTION and _all_cpu_half((args, kwargs)):
            result, log_denominator = _in_fp32(func, args, kwargs)
            return _round_once(result), log_denominator
        if func is ATTENTION_BACKWARD and _all_cpu_half(args[:4]):
            return tree_map(_round_once, _in_fp32(func, args, kwargs))
        if func in TENSOR_CORE_OPS and _all_cpu_half(args):
            return tree_map(_round_once, _in_fp32(func, args, kwargs))
        return func(*args, **kwargs)


def _in_fp32(func, args, kwargs):
    return func(*tree_map(_widen, args), **tree_map(_widen, kwargs))


def _all_cpu_half(args) -> bool:
    """Mixed dtypes go on to PyTorch's own kernel, which refuses them with its own error."""
    tensors = [x for x in tree_flatten(args)[0] if isinstance(x, torch.Tensor)]
    return all(x.dtype is torch.float16 and x.device.type == "cpu" for x in tensors)


def _widen(x):
    return x.float() if isinstance(x, torch.Tensor) else x


def _round_once(x):
    return x.half() if isinstance(x, torch.Tensor) else x
