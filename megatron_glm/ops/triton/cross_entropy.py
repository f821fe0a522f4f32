"""The loss from logits and their gradient, one pass over memory each, in Triton; imported on CUDA only."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _row_statistics(logits, column, lse, target, width, valid, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = logits + row * width
    largest = tl.full((block,), -1e30, tl.float32)  # finite, so that a lane that sees nothing sums to zero
    total = tl.zeros((block,), tl.float32)
    for begin in range(0, valid, block):
        i = begin + tl.arange(0, block)
        x = tl.load(at + i, mask=i < valid, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(largest, x)
        total = total * tl.exp(largest - higher) + tl.exp(x - higher)
        largest = higher
    top = tl.max(largest, axis=0)
    tl.store(lse + row, top + tl.log(tl.sum(total * tl.exp(largest - top), axis=0)))
    place = tl.load(column + row)
    tl.store(target + row, tl.load(at + place, mask=place >= 0, other=0.0).to(tl.float32))


@triton.jit
def _logit_gradient(logits, column, counted, lse, width, valid, scale, per_row: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * block + tl.arange(0, block)
    at = logits + row * width + i
    x = tl.load(at, mask=i < valid, other=float("-inf")).to(tl.float32)
    factor = tl.load(scale + row) if per_row else scale
    gradient = (tl.exp(x - tl.load(lse + row)) - tl.where(i == tl.load(column + row), 1.0, 0.0)) * factor
    gradient = tl.where(tl.load(counted + row), gradient, 0.0)
    tl.store(at, gradient.to(logits.dtype.element_ty), mask=i < width)


def row_statistics(logits: Tensor, column: Tensor, valid: int) -> tuple[Tensor, Tensor]:
    """`parallel.vocab.row_statistics`."""
    rows, width = logits.shape
    lse, target = (torch.empty(rows, device=logits.device) for _ in range(2))
    if rows:
        _row_statistics[(rows,)](logits, column, lse, target, width, valid, BLOCK, num_warps=8)
    return lse, target


def logit_gradient(
    logits: Tensor, column: Tensor, counted: Tensor, lse: Tensor, valid: int, scale: float | Tensor
) -> Tensor:
    """`parallel.vocab.logit_gradient`, in the place of the logits."""
    rows, width = logits.shape
    if rows:
        grid, per_row = (rows, triton.cdiv(width, BLOCK)), isinstance(scale, Tensor)
        _logit_gradient[grid](logits, column, counted, lse, width, valid, scale, per_row, BLOCK, num_warps=8)
    return logits
