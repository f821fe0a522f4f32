"""Rotary position embedding with interleaved pairs (2i, 2i+1)."""

from __future__ import annotations

import torch
from torch import Tensor


def rope_tables(position: Tensor, dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin [t, dim/2] fp32 of `position * theta^(-2i/dim)`, for positions [t] within their documents."""
    exponent = torch.arange(0, dim, 2, dtype=torch.float32, device=position.device) / dim
    angle = position.float().unsqueeze(1) * (1.0 / theta**exponent)
    return angle.cos(), angle.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [t, R] or [t, h, R] by cos, sin [t, R/2]; computed in fp32, returned in x's dtype."""
    if x.is_cuda:
        from megatron_glm.ops.triton import rope  # needs Triton, which a CPU-only torch has not

        return rope.apply_rope(x, cos, sin)
    return _rotated(x, cos, sin)


def rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """`apply_rope` in place, outside autograd."""
    if x.is_cuda:
        from megatron_glm.ops.triton import rope

        rope.rotate_(x, cos, sin)
    else:
        x.copy_(_rotated(x, cos, sin))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    shape = (cos.shape[0], *(1,) * (x.dim() - 2), cos.shape[1])
    cos, sin = cos.view(shape), sin.view(shape)
    even, odd = x[..., 0::2].float(), x[..., 1::2].float()
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2).to(x.dtype)
