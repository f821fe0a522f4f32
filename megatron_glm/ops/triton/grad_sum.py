"""Gradients added up in fp32 in one pass, in Triton; imported on CUDA only."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _add_widened(total, addend, narrow, size, first: tl.constexpr, block: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    value = tl.load(narrow + i, mask=i < size).to(tl.float32)
    if not first:
        value += tl.load(addend + i, mask=i < size).to(tl.float32)
    tl.store(total + i, value, mask=i < size)


def add_widened(addend: Tensor | None, narrow: Tensor) -> Tensor:
    """addend + narrow in fp32: in place where the addend is fp32, else a new tensor."""
    in_place = addend is not None and addend.dtype == torch.float32
    total = addend if addend is not None and in_place else torch.empty(narrow.shape, device=narrow.device)
    if narrow.numel():
        grid, given = (triton.cdiv(narrow.numel(), BLOCK),), total if addend is None else addend
        _add_widened[grid](total, given, narrow.contiguous(), narrow.numel(), addend is None, BLOCK, num_warps=8)
    return total


@triton.jit
def _add_pieces(into, pieces, size, count: tl.constexpr, adds: tl.constexpr, block: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    total = tl.load(pieces + i, mask=i < size).to(tl.float32)
    for _ in range(1, count):
        pieces += size
        total += tl.load(pieces + i, mask=i < size).to(tl.float32)
    if adds:
        total += tl.load(into + i, mask=i < size)
    tl.store(into + i, total, mask=i < size)


def add_pieces(into: Tensor, pieces: Tensor, adds: bool) -> None:
    """`ops.grad_sum.add_pieces` in one pass over contiguous tensors."""
    if into.numel():
        grid = (triton.cdiv(into.numel(), BLOCK),)
        _add_pieces[grid](into, pieces, into.numel(), len(pieces), adds, BLOCK, num_warps=8)
