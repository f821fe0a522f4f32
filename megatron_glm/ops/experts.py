"""The routed experts' feed-forward: one small gated MLP for each group of rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_glm.ops.recompute import keep_products
from megatron_glm.ops.swiglu import weighted_swiglu, weighted_swiglu_backward, weighted_swiglu_torch


def grouped_mlp(rows: Tensor, row_weights: Tensor, counts: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """down_e(row_weight * silu(gate_e(x)) * up_e(x)) for rows grouped by expert.

    The weight multiplies the product in fp32 before its one rounding. transformers multiplies the expert's output:
    the same up to rounding, but here no backward needs that output.

    rows [n, D], the first counts[0] of them for expert 0 and so on; row_weights [n] fp32; counts [e] int64 on the
    rows' device, zeros legal; gate_up [e, 2F, D], gate first; down [e, D, F]; -> [n, D]. Rows past counts.sum() are
    tail: what comes out of them is undefined, and it never reaches another row or a weight's gradient.
    CUDA in bf16 runs grouped GEMMs without waiting for the counts; every other case, no rows at all included, is the
    reference loop.
    """
    if rows.is_cuda and rows.dtype == torch.bfloat16 and rows.shape[0] > 0:
        return _grouped(rows, row_weights, counts, gate_up, down)
    return _reference(rows, row_weights, counts, gate_up, down)


class _Keep(torch.autograd.Function):
    """Keeps what the backward of the gated product and the down projection needs, and is that backward.

    `_Down` is its forward. They are two nodes because a node's tensors are packed when its forward has ended, and
    activation recomputation stops at the last one that is packed: so it is spared what `_Down` computes.
    """

    @staticmethod
    def forward(ctx, gate_up: Tensor, row_weights: Tensor, down: Tensor, ends: Tensor, grads: list[Tensor]) -> Tensor:
        ctx.save_for_backward(gate_up, row_weights, down, ends)
        ctx.grads = grads
        ctx.set_materialize_grads(False)
        return gate_up.view_as(gate_up)

    @staticmethod
    def backward(ctx, _):
        gate_up, row_weights, down, ends = ctx.saved_tensors
        grad = ctx.grads.pop()
        grad_hidden = F.grouped_mm(grad, down, offs=ends)
        grad_gate_up, grad_weights, hidden = weighted_swiglu_backward(grad_hidden, gate_up, row_weights)
        return grad_gate_up, grad_weights, F.grouped_mm(grad.t(), hidden, offs=ends), None, None


class _Down(torch.autograd.Function):
    """The gated product and the down projection; the backward leaves the gradient to `_Keep`, which runs next."""

    @staticmethod
    def forward(ctx, gate_up: Tensor, row_weights: Tensor, down: Tensor, ends: Tensor, grads: list[Tensor]) -> Tensor:
        ctx.grads = grads
        return F.grouped_mm(weighted_swiglu(gate_up, row_weights), down.transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx, grad: Tensor):
        ctx.grads.append(grad.contiguous())
        return None, None, None, None, None


def _grouped(rows: Tensor, row_weights: Tensor, counts: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    ends = counts.cumsum(0).to(torch.int32)
    with keep_products():
        product = F.grouped_mm(rows, gate_up.transpose(1, 2), offs=ends)
    grads: list[Tensor] = []  # where _Down's backward leaves the output's gradient
    product = _Keep.apply(product, row_weights, down, ends, grads)
    return _Down.apply(product, row_weights.detach(), down.detach(), ends, grads)


def _reference(rows: Tensor, row_weights: Tensor, counts: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    sizes = counts.tolist()
    sizes.append(rows.shape[0] - sum(sizes))
    *groups, tail = rows.split(sizes)
    *weights, _ = row_weights.split(sizes)
    # Empty experts run too, so that every weight has a gradient (zero) on every rank and no rank skips its reduction.
    # unbind, because the backward of weight[e] would be one zero tensor of all experts for each expert.
    with keep_products():
        products = [F.linear(group, w_in) for group, w_in in zip(groups, gate_up.unbind(), strict=True)]
    outputs = [
        F.linear(weighted_swiglu_torch(product, weight), w_out)
        for product, weight, w_out in zip(products, weights, down.unbind(), strict=True)
    ]
    return torch.cat([*outputs, torch.zeros_like(tail)])
