"""Causal attention over rectangular segments, in the non-absorbed form of MLA.

A row that sees at most index_topk keys selects all of them: for it DSA *is* dense causal attention, at half the
operations a key of the absorbed form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_glm.ops.recompute import keep_product


def dense_mla(
    q: Tensor, k: Tensor, v: Tensor, segments: list[int], scale: float, backend: str = "torch"
) -> tuple[Tensor, Tensor]:
    """Attention of segments of query rows to segments of key rows, differentiable in q, k, v.

    Args:
        q: [t, h, Dk]; k: [n, h, Dk]; v: [n, h, Dv].
        segments: row begin, row end, key begin, key end of each segment, flattened. The last row of a segment sees
            all of its keys, each earlier row one key fewer. Query rows in no segment give zero.
    Returns:
        out [t, h, Dv] in q's dtype, lse [t, h] fp32 (natural logarithm; -inf where a row is in no segment).
    """
    return _DenseMLA.apply(q, k, v, segments, scale, backend)


class _DenseMLA(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, segments: list[int], scale: float, backend: str):
        out, lse = keep_product(lambda: BACKENDS[backend][0](q, k, v, segments, scale))
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.segments, ctx.scale, ctx.backend = segments, scale, backend
        return out, lse

    @staticmethod
    def backward(ctx, grad: Tensor, _):
        gradients = BACKENDS[ctx.backend][1](grad.contiguous(), *ctx.saved_tensors, ctx.segments, ctx.scale)
        return *gradients, None, None, None


def _scores(q: Tensor, k: Tensor, segments: list[int], scale: float) -> Iterator[tuple[slice, slice, Tensor]]:
    """Row range, key range and masked scaled scores [h, rows, keys] fp32 of each segment."""
    for i in range(0, len(segments), 4):
        rows, keys = slice(*segments[i : i + 2]), slice(*segments[i + 2 : i + 4])
        scores = q[rows].float().transpose(0, 1) @ k[keys].float().permute(1, 2, 0) * scale
        n_rows, n_keys = scores.shape[1:]
        hidden = torch.ones(n_rows, n_keys, dtype=torch.bool, device=q.device).triu(n_keys - n_rows + 1)
        yield rows, keys, scores.masked_fill(hidden, float("-inf"))


def dense_mla_torch(q: Tensor, k: Tensor, v: Tensor, segments: list[int], scale: float) -> tuple[Tensor, Tensor]:
    out = q.new_zeros((*q.shape[:2], v.shape[-1]))
    lse = torch.full(q.shape[:2], float("-inf"), device=q.device)
    for rows, keys, scores in _scores(q, k, segments, scale):
        lse[rows] = scores.logsumexp(dim=-1).T
        out[rows] = (scores.softmax(dim=-1) @ v[keys].float().transpose(0, 1)).transpose(0, 1).to(q.dtype)
    return out, lse


def dense_mla_backward_torch(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: list[int], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    grad_q = torch.zeros_like(q)
    grad_k, grad_v = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (k, v))
    for rows, keys, scores in _scores(q, k, segments, scale):
        probability = (scores - lse[rows].T.unsqueeze(-1)).exp()
        grad_out, values = grad[rows].float().transpose(0, 1), v[keys].float().transpose(0, 1)
        inner = (grad_out * out[rows].float().transpose(0, 1)).sum(-1, keepdim=True)
        grad_scores = probability * (grad_out @ values.transpose(1, 2) - inner) * scale
        grad_q[rows] = (grad_scores @ k[keys].float().transpose(0, 1)).transpose(0, 1).to(q.dtype)
        grad_k[keys] += (grad_scores.transpose(1, 2) @ q[rows].float().transpose(0, 1)).transpose(0, 1)
        grad_v[keys] += (probability.transpose(1, 2) @ grad_out).transpose(0, 1)
    return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype)


Kernels = tuple[Callable[..., Any], Callable[..., Any]]  # forward, backward
BACKENDS: dict[str, Kernels] = {"torch": (dense_mla_torch, dense_mla_backward_torch)}
