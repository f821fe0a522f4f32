"""Attention of each query to its own list of latent keys, in the absorbed form of MLA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_glm.ops.recompute import keep_product
from megatron_glm.ops.rows import add_rows

GATHER_ELEMENTS = 1 << 24  # fp32 elements of the gathered keys of the torch reference: 64 MiB
PART_BYTES = 9 << 28  # of the ordered backward's parts of dKV: 1024 queries of 2048 slots and 64 heads


def sums_in_order(backend: str, deterministic: bool, keys: int) -> bool:
    """Whether a backward writes parts of dKV to memory and adds them in order, and not by atomics.

    From so many keys on, whose sums are far from fitting the L2 cache, atomics take 1.3 times as long.
    """
    return backend == "tilelang" and (deterministic or keys >= 1 << 17)


def sparse_mla(
    q: Tensor, kv: Tensor, idx: Tensor, length: Tensor, v_dim: int, scale: float, backend: str = "torch"
) -> tuple[Tensor, Tensor]:
    """softmax(scale * q . kv[idx]) @ kv[idx, :C], differentiable in q and kv.

    Args:
        q: [t, h, C+R] absorbed queries; kv: [T, C+R] latents `[c | k_rope]`, whose first `v_dim` = C are the values.
        idx: [t, K] int32 rows of kv; only the first `length[t]` of a row are read.
        length: [t] int32, 0 is legal: that row's output is 0 and its lse -inf.
    Returns:
        out [t, h, C] in q's dtype, lse [t, h] fp32 (natural logarithm, of the scaled scores; not differentiable).
    """
    return _SparseMLA.apply(q, kv, idx, length, v_dim, scale, backend)


class _SparseMLA(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, kv: Tensor, idx: Tensor, length: Tensor, v_dim: int, scale: float, backend: str):
        out, lse = keep_product(lambda: BACKENDS[backend][0](q, kv, idx, length, v_dim, scale))
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, kv, out, lse, idx, length)
        ctx.scale, ctx.backend = scale, backend
        return out, lse

    @staticmethod
    def backward(ctx, grad: Tensor, _):
        gradients = BACKENDS[ctx.backend][1](grad.contiguous(), *ctx.saved_tensors, ctx.scale)
        return *gradients, None, None, None, None, None


def _blocks(q: Tensor, kv: Tensor, idx: Tensor, length: Tensor):
    """Blocks of rows with their gathered keys [n, K, C+R] fp32 and the mask of used slots [n, K]."""
    slots = idx.shape[1]
    block = max(1, GATHER_ELEMENTS // max(1, slots * kv.shape[1]))
    slot = torch.arange(slots, device=idx.device)
    for begin in range(0, q.shape[0], block):
        rows = slice(begin, begin + block)
        used = slot < length[rows].unsqueeze(1)
        index = idx[rows].long().masked_fill(~used, 0)
        yield rows, index, used, kv[index].float()


def sparse_mla_torch(
    q: Tensor, kv: Tensor, idx: Tensor, length: Tensor, v_dim: int, scale: float
) -> tuple[Tensor, Tensor]:
    out = q.new_zeros((*q.shape[:2], v_dim))
    lse = torch.full(q.shape[:2], float("-inf"), device=q.device)
    for rows, _, used, keys in _blocks(q, kv, idx, length):
        scores = (q[rows].float() @ keys.transpose(1, 2)) * scale
        scores = scores.masked_fill(~used.unsqueeze(1), float("-inf"))
        lse[rows] = scores.logsumexp(dim=-1)
        probability = (scores - lse[rows].unsqueeze(-1)).exp().masked_fill(~used.unsqueeze(1), 0.0)
        out[rows] = (probability @ keys[..., :v_dim]).to(q.dtype)
    return out, lse


def sparse_mla_backward_torch(
    grad: Tensor, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor, idx: Tensor, length: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    grad_q = torch.zeros_like(q)
    grad_kv = torch.zeros(kv.shape, dtype=torch.float32, device=kv.device)
    v_dim = out.shape[-1]
    for rows, index, used, keys in _blocks(q, kv, idx, length):
        queries, grad_out = q[rows].float(), grad[rows].float()
        scores = (queries @ keys.transpose(1, 2)) * scale
        probability = (scores - lse[rows].unsqueeze(-1)).exp().masked_fill(~used.unsqueeze(1), 0.0)
        inner = (grad_out * out[rows].float()).sum(-1, keepdim=True)
        grad_scores = probability * (grad_out @ keys[..., :v_dim].transpose(1, 2) - inner) * scale
        grad_q[rows] = (grad_scores @ keys).to(q.dtype)
        grad_keys = grad_scores.transpose(1, 2) @ queries
        grad_keys[..., :v_dim] += probability.transpose(1, 2) @ grad_out
        add_rows(grad_kv, index.flatten(), grad_keys.flatten(0, 1))
    return grad_q, grad_kv.to(kv.dtype)


Kernels = tuple[Callable[..., Any], Callable[..., Any]]  # forward, backward
BACKENDS: dict[str, Kernels] = {"torch": (sparse_mla_torch, sparse_mla_backward_torch)}
