"""Rows grouped by destination: the maps and the two movements that every expert dispatcher is made of.

A token has S slots (its K experts, or the ranks that it is sent to). A slot whose key is -1 has no row. All sums run
over a token's slots in slot order, in fp32 at least, as gathers: no atomics, so the same bits in every run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class RowMap:
    """Where the slots of t tokens lie among `size` rows that are sorted by key, then by token.

    position [t, S] int64: row of each slot, -1 where it has none.
    counts [groups] int64: rows of each key; rows past their sum are tail: what they hold is undefined.
    """

    position: Tensor
    counts: Tensor
    size: int

    @classmethod
    def build(cls, key: Tensor, groups: int) -> RowMap:
        """key [t, S] int64 in [-1, groups). size is t * S until `head` cuts the tail; nothing waits for the device."""
        if key.is_cuda:
            return cls(*_fused().place(key, groups), key.numel())
        ordered, slot = torch.sort(torch.where(key < 0, groups, key).flatten(), stable=True)
        bounds = torch.searchsorted(ordered, torch.arange(groups + 1))
        position = torch.empty_like(slot)
        position[slot] = torch.arange(slot.numel())
        return cls(position.view(key.shape).masked_fill(key < 0, -1), bounds.diff(), key.numel())

    def head(self, rows: int) -> RowMap:
        """The same map without the tail: rows = counts.sum(), which the caller knows on the host."""
        return replace(self, size=rows)


def _one_pass(x: Tensor) -> bool:
    """Whether the Triton kernels serve x; they do as the code here does, without its temporaries."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float32)


def _fused():
    from megatron_glm.ops.triton import permute as fused  # needs Triton, which a CPU-only torch has not

    return fused


def _filled(values: Tensor, slots: Tensor, rows: RowMap) -> Tensor:
    """[size, ...] with values [m, ...], one for each True in `slots` [t, S] in order, in those slots' rows."""
    return values.new_zeros(rows.size, *values.shape[1:]).index_copy_(0, rows.position[slots], values)


def gather(x: Tensor, rows: RowMap) -> Tensor:
    """x [t, D] -> [size, D], the token behind each row. Outside autograd; `accumulate` is its transpose."""
    if _one_pass(x):
        return _fused().copy_rows(x, None, rows.position, rows.size)[0]
    slots = rows.position >= 0
    return _filled(x[slots.nonzero()[:, 0]], slots, rows)


def _slot_rows(source: Tensor, position: Tensor) -> Tensor:
    """source [n, D], position [t] -> [t, D]; zero (never a product with an unread row) where the position is -1."""
    if source.shape[0] == 0:
        return source.new_zeros(position.shape[0], source.shape[1])
    return source.index_select(0, position.clamp(min=0)).masked_fill_((position < 0)[:, None], 0)


def accumulate(source: Tensor, rows: RowMap) -> Tensor:
    """source [size, D] -> [t, D]: the sum of each token's rows. Outside autograd."""
    if _one_pass(source):
        return _fused().sum_rows(source, None, rows.position)[0]
    t, slots = rows.position.shape
    total = source.new_zeros(t, source.shape[1], dtype=torch.promote_types(source.dtype, torch.float32))
    for k in range(slots):
        total += _slot_rows(source, rows.position[:, k])
    return total.to(source.dtype)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weights: Tensor, rows: RowMap) -> tuple[Tensor, Tensor]:
        ctx.rows = rows
        if _one_pass(x):
            copied, row_weights = _fused().copy_rows(x, weights, rows.position, rows.size)
            assert row_weights is not None
            return copied, row_weights
        slots = rows.position >= 0
        return gather(x, rows), _filled(weights[slots], slots, rows)

    @staticmethod
    def backward(ctx, grad: Tensor, grad_weights: Tensor):
        rows = ctx.rows
        if _one_pass(grad):
            return *_fused().sum_rows(grad, grad_weights, rows.position), None
        slots = rows.position >= 0
        of_slots = grad_weights.new_zeros(slots.shape)
        of_slots[slots] = grad_weights[rows.position[slots]]
        return accumulate(grad, rows), of_slots, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, source: Tensor, rows: RowMap) -> Tensor:
        ctx.rows = rows
        return accumulate(source, rows)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return gather(grad, ctx.rows), None


def permute(x: Tensor, weights: Tensor, rows: RowMap) -> tuple[Tensor, Tensor]:
    """x [t, D], weights [t, S] fp32 -> rows [size, D], a copy of its token for each row, and the rows' weights [size].

    Differentiable in x and weights; the weight of a slot without a row has gradient zero.
    """
    return _Permute.apply(x, weights, rows)


def unpermute(source: Tensor, rows: RowMap) -> Tensor:
    """source [size, D] -> [t, D], the sum of each token's rows, in fp32, rounded once.

    Differentiable. Tail rows are never read; their gradient is undefined.
    """
    return _Unpermute.apply(source, rows)
