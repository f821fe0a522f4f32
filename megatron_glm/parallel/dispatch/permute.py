"""Rows grouped by destination: the maps and the two sums that every expert dispatcher is made of.

A token has S slots (its K experts, or the ranks that it is sent to). A slot whose key is -1 has no row. All sums run
over a token's slots in slot order, in fp32 at least, as gathers: no atomics, so the same bits in every run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class RowMap:
    """Where the slots of t tokens lie among n rows that are sorted by key, then by token.

    slot [n] int64: index in the flattened [t, S] of the slot behind each row.
    position [t, S] int64: row of each slot, -1 where it has none.
    counts [groups] int64: rows of each key; rows past their sum are tail, which nothing reads.
    """

    slot: Tensor
    position: Tensor
    counts: Tensor

    @classmethod
    def build(cls, key: Tensor, groups: int) -> RowMap:
        """key [t, S] int64 in [-1, groups). n is t * S until `head` cuts the tail; nothing waits for the device."""
        ordered, slot = torch.sort(torch.where(key < 0, groups, key).flatten(), stable=True)
        bounds = torch.searchsorted(ordered, torch.arange(groups + 1, device=key.device))
        position = torch.empty_like(slot)
        position[slot] = torch.arange(slot.numel(), device=key.device)
        return cls(slot, position.view(key.shape).masked_fill(key < 0, -1), bounds.diff())

    def head(self, rows: int) -> RowMap:
        """The same map without the tail: rows = counts.sum(), which the caller knows on the host."""
        return replace(self, slot=self.slot[:rows])

    @property
    def token(self) -> Tensor:
        """[n] int64: the token behind each row."""
        return self.slot // self.position.shape[1]


def _one_pass(x: Tensor) -> bool:
    """Whether the Triton kernels serve x; they sum as the code here does, without its temporaries."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float32)


def _fused():
    from megatron_glm.parallel.dispatch import fused  # needs Triton, which a CPU-only torch has not

    return fused


def gather(x: Tensor, rows: RowMap) -> Tensor:
    """x [t, D] -> [n, D], the token behind each row. Outside autograd; `accumulate` is its transpose."""
    return x.index_select(0, rows.token)


def _slot_rows(source: Tensor, position: Tensor) -> Tensor:
    """source [n, D], position [t] -> [t, D]; zero (never a product with an unread row) where the position is -1."""
    if source.shape[0] == 0:
        return source.new_zeros(position.shape[0], source.shape[1])
    return source.index_select(0, position.clamp(min=0)).masked_fill_((position < 0)[:, None], 0)


def accumulate(source: Tensor, rows: RowMap, weights: Tensor | None = None) -> Tensor:
    """source [n, D], weights [t, S] fp32 -> [t, D]: the (weighted) sum of each token's rows. Outside autograd."""
    if _one_pass(source):
        return _fused().sum_rows(source, rows.position, weights)
    t, slots = rows.position.shape
    total = source.new_zeros(t, source.shape[1], dtype=torch.promote_types(source.dtype, torch.float32))
    for k in range(slots):
        term = _slot_rows(source, rows.position[:, k])
        total += term if weights is None else term * weights[:, k, None]
    return total.to(source.dtype)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, rows: RowMap) -> Tensor:
        ctx.rows = rows
        return gather(x, rows)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return accumulate(grad, ctx.rows), None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, source: Tensor, weights: Tensor, rows: RowMap) -> Tensor:
        ctx.save_for_backward(source, weights)
        ctx.rows = rows
        return accumulate(source, rows, weights)

    @staticmethod
    def backward(ctx, grad: Tensor):
        source, weights = ctx.saved_tensors
        rows, grad_source, grad_weights = ctx.rows, None, None
        if _one_pass(source):
            return *_fused().scatter_grad(grad, source, weights, rows.position, rows.slot), None
        if ctx.needs_input_grad[0]:
            used = weights.masked_fill(rows.position < 0, 0).flatten()
            # In place: a bf16 row times its fp32 weight is rounded once and needs no fp32 copy of all rows.
            grad_source = gather(grad, rows).mul_(used[rows.slot, None])
        if ctx.needs_input_grad[1]:
            grad_weights = torch.empty_like(weights)
            for k in range(weights.shape[1]):
                term = _slot_rows(source, rows.position[:, k]).to(weights.dtype)
                grad_weights[:, k] = (term * grad).sum(-1)
        return grad_source, grad_weights, None


def permute(x: Tensor, rows: RowMap) -> Tensor:
    """x [t, D] -> [n, D]: a copy of its token for each row. Differentiable in x."""
    return _Permute.apply(x, rows)


def unpermute(source: Tensor, weights: Tensor, rows: RowMap) -> Tensor:
    """source [n, D], weights [t, S] fp32 -> [t, D] = sum over slots of weight * row, in fp32, rounded once.

    Differentiable in source and weights. Tail rows are never read; their gradient is zero.
    """
    return _Unpermute.apply(source, weights, rows)
