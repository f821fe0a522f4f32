"""The routed experts' feed-forward: one small gated MLP for each group of rows."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_glm.ops import grad_sum
from megatron_glm.ops.grad_sum import AS_THEY_ARE, GradSum, Products, grouped_linear, weight_inputs
from megatron_glm.ops.swiglu import weighted_swiglu, weighted_swiglu_backward, weighted_swiglu_torch


class ExpertAdapters(NamedTuple):
    """(A [e, r, in], B [e, out, r]) of the gate, up and down matrices, and their scale."""

    gate: list[Tensor]
    up: list[Tensor]
    down: list[Tensor]
    scale: float

    def output(self, x: Tensor, pair: list[Tensor], ends: Tensor) -> Tensor:
        """What an adapter adds to the product of x [n, in], grouped by expert: [n, out]."""
        first, second = pair
        return grouped_linear(grouped_linear(x, first, ends) * self.scale, second, ends)


def grouped_mlp(
    rows: Tensor,
    row_weights: Tensor,
    counts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    products: Products = AS_THEY_ARE,
    adapters: ExpertAdapters | None = None,
) -> Tensor:
    """down_e(row_weight * silu(gate_e(x)) * up_e(x)) for rows grouped by expert.

    The weight multiplies the product in fp32 before its one rounding. transformers multiplies the expert's output:
    the same up to rounding, but here no backward needs that output.

    rows [n, D], the first counts[0] of them for expert 0 and so on; row_weights [n] fp32; counts [e] int64 on the
    rows' device, zeros legal; gate_up [e, 2F, D], gate first; down [e, D, F]; -> [n, D]. Rows past counts.sum() are
    tail: what comes out of them is undefined, and it never reaches another row or a weight's gradient.
    CUDA in bf16 runs grouped GEMMs without waiting for the counts; every other case, no rows at all included, is a loop
    over the experts. One without rows has a gradient, too (zero): no rank skips its reduction.
    """
    ends = counts.cumsum(0).to(torch.int32)
    product = grouped_linear(rows, gate_up, ends, kept=True, products=products)
    if adapters is not None:
        halves = adapters.output(rows, adapters.gate, ends), adapters.output(rows, adapters.up, ends)
        hidden = _Gated.apply(product + torch.cat(halves, dim=-1), row_weights)
        out = grouped_linear(hidden, down, ends, products=products)
        return out + adapters.output(hidden, adapters.down, ends)
    if not grad_sum.has_grouped_products(rows):
        return grouped_linear(weighted_swiglu_torch(product, row_weights), down, ends, products=products)
    products = products.bound(down)
    grads: list[Tensor] = []  # where _Down's backward leaves the output's gradient
    product = _Keep.apply(product, row_weights, *weight_inputs(down), ends, grads, products)
    return _Down.apply(product, row_weights.detach(), down.detach(), ends, grads, products)


class _Gated(torch.autograd.Function):
    """`weighted_swiglu` with its gradient."""

    @staticmethod
    def forward(ctx, gate_up: Tensor, row_weights: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up, row_weights)
        return weighted_swiglu(gate_up, row_weights)

    @staticmethod
    def backward(ctx, grad: Tensor):
        # It may overwrite the gradient, which is a sum of autograd's own: of the down projection and its adapter.
        grad_gate_up, grad_weights, _ = weighted_swiglu_backward(grad, *ctx.saved_tensors)
        return grad_gate_up, grad_weights


class _Keep(torch.autograd.Function):
    """Keeps what the backward of the gated product and the down projection needs, and is that backward.

    `_Down` is its forward. They are two nodes because a node's tensors are packed when its forward has ended, and
    activation recomputation stops at the last one that is packed: so it is spared what `_Down` computes.
    """

    @staticmethod
    def forward(
        ctx,
        gate_up: Tensor,
        row_weights: Tensor,
        down: Tensor,
        parameter: Tensor,
        total: GradSum | None,
        ends: Tensor,
        grads: list[Tensor],
        products: Products,
    ) -> Tensor:
        ctx.save_for_backward(gate_up, row_weights, down, ends)
        ctx.total, ctx.grads, ctx.products = total, grads, products
        ctx.set_materialize_grads(False)
        return gate_up.view_as(gate_up)

    @staticmethod
    def backward(ctx, _):
        gate_up, row_weights, down, ends = ctx.saved_tensors
        grad = ctx.grads.pop()
        grad_hidden = ctx.products.input_gradient(grad, down, ends)
        grad_gate_up, grad_weights, hidden = weighted_swiglu_backward(
            grad_hidden, gate_up, row_weights, ctx.products.takes_casts
        )
        grad_down = None
        if ctx.total is not None:
            ctx.total.add_product(grad, hidden, ends, ctx.products)
        elif ctx.needs_input_grad[3]:
            grad_down = ctx.products.weight_gradient(grad, hidden, ends)
        return grad_gate_up, grad_weights, None, grad_down, None, None, None, None


class _Down(torch.autograd.Function):
    """The gated product and the down projection; the backward leaves the gradient to `_Keep`, which runs next."""

    @staticmethod
    def forward(
        ctx,
        gate_up: Tensor,
        row_weights: Tensor,
        down: Tensor,
        ends: Tensor,
        grads: list[Tensor],
        products: Products,
    ) -> Tensor:
        ctx.grads = grads
        return products.output(weighted_swiglu(gate_up, row_weights, products.takes_casts), down, ends)

    @staticmethod
    def backward(ctx, grad: Tensor):
        ctx.grads.append(grad.contiguous())
        return None, None, None, None, None, None
