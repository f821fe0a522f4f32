"""The row movements of `permute.py` as one pass over the rows each, in Triton; imported on CUDA only."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048  # elements of a row that a program holds at a time


@triton.jit
def _sum_rows(source, position, weights, out, slots: tl.constexpr, dim, weighted: tl.constexpr, block: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < dim
    total = tl.zeros((block,), tl.float32)
    for k in tl.static_range(slots):
        row = tl.load(position + token * slots + k)
        term = tl.load(source + row * dim + column, mask=inside & (row >= 0), other=0.0).to(tl.float32)
        if weighted:
            term *= tl.load(weights + token * slots + k)
        total += tl.where(row >= 0, term, 0.0)
    tl.store(out + token * dim + column, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _scatter_grad(grad, source, position, slot, weights, grad_source, grad_weights, slots, dim, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(slot + row)
    used = tl.load(position + place) >= 0
    weight = tl.load(weights + place)
    token = place // slots
    inner = tl.zeros((block,), tl.float32)
    for begin in range(0, dim, block):
        column = begin + tl.arange(0, block)
        inside = (column < dim) & used
        g = tl.load(grad + token * dim + column, mask=inside, other=0.0).to(tl.float32)
        inner += g * tl.load(source + row * dim + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_source + row * dim + column, (g * weight).to(grad_source.dtype.element_ty), mask=column < dim)
    tl.store(grad_weights + place, tl.sum(inner, axis=0))


def sum_rows(source: Tensor, position: Tensor, weights: Tensor | None) -> Tensor:
    """source [n, D], position [t, S] (-1 = none), weights [t, S] fp32 -> [t, D]; slot order, fp32, rounded once."""
    (tokens, slots), dim = position.shape, source.shape[1]
    out = source.new_empty(tokens, dim)
    if out.numel():
        grid = (tokens, triton.cdiv(dim, BLOCK))
        weighted = weights is not None
        given = weights.contiguous() if weighted else source
        _sum_rows[grid](source.contiguous(), position, given, out, slots, dim, weighted, BLOCK)
    return out


def scatter_grad(
    grad: Tensor, source: Tensor, weights: Tensor, position: Tensor, slot: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of `sum_rows` in source [n, D] and weights [t, S]; rows and slots that were not read get zero."""
    grad_source, grad_weights = torch.empty_like(source), torch.zeros_like(weights)
    if source.numel():
        _scatter_grad[(source.shape[0],)](
            grad.contiguous(), source, position, slot, weights, grad_source, grad_weights, position.shape[1],
            source.shape[1], BLOCK,
        )  # fmt: skip
    return grad_source, grad_weights
