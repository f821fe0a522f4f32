"""`ops.total_variation`, one pass over the logits each, in Triton; imported on CUDA only."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _overlap(p, p_lse, q, q_lse, found, p_stride, q_stride, rows, valid, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    wanted_lse, drafted_lse = tl.load(p_lse + row), tl.load(q_lse + row)
    least = tl.zeros((block,), tl.float32)
    below = tl.zeros((block,), tl.float32)
    for begin in range(0, valid, block):
        i = begin + tl.arange(0, block)
        x = tl.load(p + row * p_stride + i, mask=i < valid, other=float("-inf")).to(tl.float32)
        y = tl.load(q + row * q_stride + i, mask=i < valid, other=float("-inf")).to(tl.float32)
        wanted, drafted = tl.exp(x - wanted_lse), tl.exp(y - drafted_lse)
        least += tl.minimum(wanted, drafted)
        below += tl.where(drafted < wanted, drafted, 0.0)
    tl.store(found + row, tl.sum(least, axis=0))
    tl.store(found + rows + row, tl.sum(below, axis=0))


@triton.jit
def _overlap_gradient(
    p, p_lse, q, q_lse, below, factor, p_stride, q_stride, width, valid, block: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * block + tl.arange(0, block)
    x = tl.load(p + row * p_stride + i, mask=i < valid, other=float("-inf")).to(tl.float32)
    y = tl.load(q + row * q_stride + i, mask=i < valid, other=float("-inf")).to(tl.float32)
    wanted, drafted = tl.exp(x - tl.load(p_lse + row)), tl.exp(y - tl.load(q_lse + row))
    gradient = drafted * (tl.where(drafted < wanted, 1.0, 0.0) - tl.load(below + row)) * tl.load(factor + row)
    tl.store(q + row * q_stride + i, gradient.to(q.dtype.element_ty), mask=i < width)


def overlap(p: Tensor, p_lse: Tensor, q: Tensor, q_lse: Tensor, valid: int) -> Tensor:
    """`ops.total_variation.overlap`."""
    rows = len(q)
    found = torch.empty(2, rows, device=q.device)
    if rows:
        strides = p.stride(0), q.stride(0)
        _overlap[(rows,)](p, p_lse, q, q_lse, found, *strides, rows, valid, BLOCK, num_warps=8)
    return found


def overlap_gradient(
    p: Tensor, p_lse: Tensor, q: Tensor, q_lse: Tensor, below: Tensor, factor: Tensor, valid: int
) -> Tensor:
    """`ops.total_variation.overlap_gradient`, in the place of q."""
    rows, width = q.shape
    if rows:
        grid, strides = (rows, triton.cdiv(width, BLOCK)), (p.stride(0), q.stride(0))
        _overlap_gradient[grid](p, p_lse, q, q_lse, below, factor, *strides, width, valid, BLOCK, num_warps=8)
    return q
