"""The gated product of the feed-forwards: silu(gate) * up, for routed experts times the row's routing weight.

On CUDA one pass over memory forward and one backward.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_glm.ops.fp8_casts import remembered, room_for


def _fused():
    from megatron_glm.ops.triton import swiglu as fused  # needs Triton, which a CPU-only torch has not

    return fused


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor, cast: bool) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        room = room_for(gate, cast)
        return remembered(_fused().swiglu(gate, up, cast=room), room)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        grads = torch.empty_like(gate), torch.empty_like(up)
        _fused().swiglu_backward(grad.contiguous(), gate, up, *grads)
        return *grads, None


def swiglu(gate: Tensor, up: Tensor, cast: bool = False) -> Tensor:
    """silu(gate) * up of [n, F] each; CUDA in bf16 computes in fp32 and rounds once.

    cast: a product in FP8 takes it, so the kernel casts it, too. So below.
    """
    if gate.is_cuda and gate.dtype == torch.bfloat16:
        return _SwiGLU.apply(gate, up, cast)
    return F.silu(gate) * up


def weighted_swiglu(gate_up: Tensor, row_weights: Tensor, cast: bool = False) -> Tensor:
    """gate_up [n, 2F], gate first, row_weights [n] fp32 -> row_weight * silu(gate) * up [n, F], rounded once.

    Differentiable on the CPU; on CUDA outside autograd, `weighted_swiglu_backward` is its backward.
    """
    if gate_up.is_cuda:
        gate, up = gate_up.chunk(2, dim=-1)
        room = room_for(gate, cast)
        return remembered(_fused().swiglu(gate, up, row_weights, room), room)
    return weighted_swiglu_torch(gate_up, row_weights)


def weighted_swiglu_torch(gate_up: Tensor, row_weights: Tensor) -> Tensor:
    """The definition of `weighted_swiglu`: in fp32 at least."""
    gate, up = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32)).chunk(2, dim=-1)
    return (F.silu(gate) * up * row_weights[:, None]).to(gate_up.dtype)


def weighted_swiglu_backward(
    grad: Tensor, gate_up: Tensor, row_weights: Tensor, cast: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """grad [n, F], of which the caller has no more use -> gradients of gate_up and row_weights, and the product [n, F]
    that the forward returned, which is computed again in the same pass instead of being kept.
    """
    if gate_up.is_cuda:
        grad_gate_up, room = torch.empty_like(gate_up), room_for(gate_up, cast)
        halves = *gate_up.chunk(2, dim=-1), row_weights, *grad_gate_up.chunk(2, dim=-1)
        grad_weights = _fused().weighted_backward(grad, *halves, cast=room)
        return remembered(grad_gate_up, room), grad_weights, grad
    with torch.enable_grad():
        leaves = gate_up.detach().requires_grad_(), row_weights.detach().requires_grad_()
        product = weighted_swiglu_torch(*leaves)
    grad_gate_up, grad_weights = torch.autograd.grad(product, leaves, grad)
    return grad_gate_up, grad_weights, product.detach()
