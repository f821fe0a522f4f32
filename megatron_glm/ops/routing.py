"""Logits of the router, choice of experts, and the weights of the chosen."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def _fused():
    from megatron_glm.ops.triton import router as fused  # needs Triton, which a CPU-only torch has not

    return fused


def _one_pass(x: Tensor, weight: Tensor) -> bool:
    return x.is_cuda and x.dtype == weight.dtype == torch.bfloat16


def linear_in_fp32(x: Tensor, weight: Tensor) -> Tensor:
    """x [t, D], weight [E, D] -> x @ weight.T [t, E] in fp32; products of bf16 numbers are exact there.

    Differentiable, except on CUDA in bf16: there `expert_weights` has the gradient, and no fp32 copy of x is made.
    """
    if _one_pass(x, weight):
        return _product(x.detach(), weight.detach().t())
    return F.linear(x.float(), weight.float())


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of bf16 matrices in fp32."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


def select_experts(choice: Tensor, k: int, n_group: int, topk_group: int) -> Tensor:
    """The k best experts of each token.

    Args:
        choice: [t, E] fp32, scores with the correction bias.
        n_group, topk_group: only experts of the `topk_group` best of `n_group` equal groups are eligible, a group's
            score being the sum of its two best experts.
    Returns:
        [t, k] int64 expert ids, the best first; among equal scores the lowest id wins.
    """
    if n_group > 1:
        grouped = choice.view(choice.shape[0], n_group, -1)
        group_score = grouped.topk(2, dim=-1).values.sum(-1)
        best = group_score.sort(dim=-1, descending=True, stable=True).indices[:, :topk_group]
        eligible = torch.zeros_like(group_score, dtype=torch.bool).scatter_(1, best, True)
        choice = grouped.masked_fill(~eligible.unsqueeze(-1), float("-inf")).flatten(1)
    if choice.is_cuda and choice.dtype == torch.float32:
        return _fused().best(choice, k)
    return choice.sort(dim=-1, descending=True, stable=True).indices[:, :k].contiguous()


def expert_weights(x: Tensor, weight: Tensor, logits: Tensor, ids: Tensor, normalise: bool, scale: float) -> Tensor:
    """The weights [t, K] fp32 of the chosen experts: sigmoid of their logits, over their sum if asked, times scale.

    x [t, D], weight [E, D] and logits [t, E] are those of `linear_in_fp32`; ids [t, K] int64.
    """
    if _one_pass(x, weight):
        return _ExpertWeights.apply(x, weight, logits, ids, normalise, scale)
    weights = torch.sigmoid(logits).gather(1, ids)
    if normalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * scale


def logits_loss(x: Tensor, weight: Tensor, loss: Tensor, gradient: Tensor) -> Tensor:
    """`loss`, a scalar, with this gradient [t, E] fp32 by the logits: it reaches x and weight, arguments as above."""
    return _LogitsLoss.apply(x, weight, loss, gradient)


class _LogitsLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, loss: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, gradient)
        return loss.clone()

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, weight, gradient = ctx.saved_tensors
        gradient = gradient * grad
        if _one_pass(x, weight):
            high = gradient.bfloat16()
            split = torch.cat([high, (gradient - high).bfloat16()], dim=1)
            return *_through_logits(split, x, weight), None, None
        return (gradient @ weight.float()).to(x.dtype), (gradient.t() @ x.float()).to(weight.dtype), None, None


class _ExpertWeights(torch.autograd.Function):
    """Logits, sigmoid and normalisation as one node that keeps x, the weight and the chosen scores."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, logits: Tensor, ids: Tensor, normalise: bool, scale: float) -> Tensor:
        scores, weights = _fused().expert_weights(logits, ids, normalise, scale)
        ctx.save_for_backward(x, weight, ids, scores)
        ctx.options = normalise, scale
        return weights

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, weight, ids, scores = ctx.saved_tensors
        split = _fused().split_gradient(grad, ids, scores, weight.shape[0], *ctx.options)
        return *_through_logits(split, x, weight), None, None, None, None


def _through_logits(split: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and weight from that of the logits in fp32, [t, 2E]: as two bf16 addends, high and low part.

    They have 16 bits: both products run on tensor cores, and what they leave out is far below the rounding of their
    bf16 results.
    """
    grad_weight = _product(split.t(), x).view(2, weight.shape[0], -1).sum(0)
    return split @ torch.cat([weight, weight]), grad_weight.to(weight.dtype)
