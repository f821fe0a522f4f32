"""Rows grouped by destination: the maps and the two movements that every expert dispatcher is made of.

A token has S slots (its K experts, or the ranks that it is sent to). A slot whose key is -1 has no row. All sums run
over a token's slots in slot order, in fp32 at least, as gathers: no atomics, so the same bits in every run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from megatron_glm.ops.fp8_casts import remembered, room_for
from megatron_glm.ops.linear_map import linear_map


@dataclass(frozen=True)
class RowMap:
    """Where the slots of t tokens lie among `size` rows that are sorted by key, then by token.

    position [t, S] int64: row of each slot, -1 where it has none.
    counts [groups] int64: rows of each key; rows past their sum are tail: what they hold is undefined.
    multiple: each key has a multiple of it of rows; filled [groups] int64: how many of them have a slot. The others, at
        the end of the key's rows, are zero. None: all have one.
    """

    position: Tensor
    counts: Tensor
    size: int
    multiple: int = 1
    filled: Tensor | None = None

    @classmethod
    def build(cls, key: Tensor, groups: int, multiple: int = 1) -> RowMap:
        """key [t, S] int64 in [-1, groups). size is that of t * S rows until `head` cuts it.

        Nothing waits for the device.
        """
        position, counts = _place(key, groups)
        if multiple == 1:
            return cls(position, counts, key.numel())
        padded = -(-counts // multiple) * multiple
        moved = (padded.cumsum(0) - padded) - (counts.cumsum(0) - counts)  # by how much each key's rows
        position = torch.where(key < 0, -1, position + moved[key.clamp(min=0)])
        return cls(position, padded, 0, multiple, counts).head(key.numel())

    def head(self, slots: int) -> RowMap:
        """The same map for as many slots with a row as the caller knows, on the host, that there are.

        There is no tail then with multiple 1, and as little as can be said without the counts with another: of 7 slots
        in 2 groups there are at most 7 + 2 * 127 rows, so 256.
        """
        most = slots + min(slots, len(self.counts)) * (self.multiple - 1)
        return replace(self, size=most // self.multiple * self.multiple)


def _place(key: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Position of each slot where every key has as many rows as slots, and how many."""
    if key.is_cuda:
        return _fused().place(key, groups)
    ordered, slot = torch.sort(torch.where(key < 0, groups, key).flatten(), stable=True)
    bounds = torch.searchsorted(ordered, torch.arange(groups + 1))
    position = torch.empty_like(slot)
    position[slot] = torch.arange(slot.numel())
    return position.view(key.shape).masked_fill(key < 0, -1), bounds.diff()


def _one_pass(x: Tensor) -> bool:
    """Whether the Triton kernels serve x; they do as the code here does, without its temporaries."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float32)


def _fused():
    from megatron_glm.ops.triton import permute as fused  # needs Triton, which a CPU-only torch has not

    return fused


def _copied(x: Tensor, weights: Tensor | None, rows: RowMap) -> tuple[Tensor, Tensor | None]:
    """The rows, and their weights if those of the slots are given, by the Triton kernels."""
    cast = rows.filled is not None and x.shape[1] % rows.multiple == 0  # products in FP8 take them
    room = room_for(x, cast, rows.size)
    copied, row_weights = _fused().copy_rows(x, weights, rows.position, rows.size, room)
    if rows.filled is not None:
        _fused().zero_rows(copied, row_weights, rows.filled, rows.counts, rows.multiple, room)
    return remembered(copied, room), row_weights


def _filled(values: Tensor, slots: Tensor, rows: RowMap) -> Tensor:
    """[size, ...] with values [m, ...], one for each True in `slots` [t, S] in order, in those slots' rows."""
    return values.new_zeros(rows.size, *values.shape[1:]).index_copy_(0, rows.position[slots], values)


def gather(x: Tensor, rows: RowMap) -> Tensor:
    """x [t, D] -> [size, D], the token behind each row. Outside autograd; `accumulate` is its transpose."""
    if _one_pass(x):
        return _copied(x, None, rows)[0]
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
            copied, row_weights = _copied(x, weights, rows)
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


def permute(x: Tensor, weights: Tensor, rows: RowMap) -> tuple[Tensor, Tensor]:
    """x [t, D], weights [t, S] fp32 -> rows [size, D], a copy of its token for each row, and the rows' weights [size].

    Differentiable in x and weights; the weight of a slot without a row has gradient zero.
    """
    return _Permute.apply(x, weights, rows)


def unpermute(source: Tensor, rows: RowMap) -> Tensor:
    """source [size, D] -> [t, D], the sum of each token's rows, in fp32, rounded once.

    Differentiable. Tail rows are never read; their gradient is undefined.
    """
    return linear_map(source, partial(accumulate, rows=rows), partial(gather, rows=rows))
