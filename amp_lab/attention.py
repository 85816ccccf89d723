"""The attention kernel that CUDA would take.

On fake tensors `scaled_dot_product_attention` finds no kernel available and takes its unfused path,
which computes in FP32: the dtypes, the FLOPs and the bytes kept for backward are then not a GPU's.
"""

from types import FunctionType

import torch
import torch.nn.functional as F
from torch import Tensor

from .dryrun import CAST_BY_AUTOCAST

_aten = torch.ops.aten

# The same function, without its question whether a function mode wants to handle it: under a mode
# that calls it again, that question would not end.
multi_head_attention = FunctionType(
    F.multi_head_attention_forward.__code__,
    vars(F) | {"has_torch_function": lambda tensors: False},
    argdefs=F.multi_head_attention_forward.__defaults__,
)


def fused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Tensor, str]:
    """What `scaled_dot_product_attention` returns on a GPU, and the kernel that is assumed for it.

    Flash attention takes 16-bit inputs without a mask, memory-efficient attention the rest.
    Autocast casts the inputs as it does for the function; it does not know both kernels by name.
    """
    if q.dim() != 4 or q.dtype == torch.float64:
        options = {"scale": scale, "enable_gqa": enable_gqa}
        attend = F.scaled_dot_product_attention
        return attend(q, k, v, attn_mask, dropout_p, is_causal, **options), "unfused attention"
    if torch.is_autocast_enabled("cuda"):
        target = torch.get_autocast_dtype("cuda")
        q, k, v = (t.to(target) if t.dtype in CAST_BY_AUTOCAST else t for t in (q, k, v))
    if attn_mask is None and q.dtype in (torch.float16, torch.bfloat16):
        flash = _aten._scaled_dot_product_flash_attention.default
        return flash(q, k, v, dropout_p, is_causal, scale=scale)[0], "flash attention"
    if enable_gqa:
        k, v = (t.repeat_interleave(q.size(1) // t.size(1), 1) for t in (k, v))
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            zeros = torch.zeros_like(attn_mask, dtype=q.dtype)
            attn_mask = zeros.masked_fill(~attn_mask, float("-inf"))
        attn_mask = attn_mask.to(q.dtype).expand(*q.shape[:-1], k.size(2))
    efficient = _aten._scaled_dot_product_efficient_attention.default
    result = efficient(q, k, v, attn_mask, q.requires_grad, dropout_p, is_causal, scale=scale)
    return result[0], "memory-efficient attention"
