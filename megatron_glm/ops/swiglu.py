"""The gated product of the feed-forwards: silu(gate) * up, for routed experts times the row's routing weight.

On CUDA one pass over memory forward and one backward.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def _fused():
    from megatron_glm.ops.triton import swiglu as fused  # needs Triton, which a CPU-only torch has not

    return fused


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        return _fused().swiglu(gate, up)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grads = torch.empty_like(gate), torch.empty_like(up)
        _fused().swiglu_backward(grad.contiguous(), gate, up, *grads)
        return grads


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up of [n, F] each; CUDA in bf16 computes in fp32 and rounds once."""
    if gate.is_cuda and gate.dtype == torch.bfloat16:
        return _SwiGLU.apply(gate, up)
    return F.silu(gate) * up


def weighted_swiglu(gate_up: Tensor, row_weights: Tensor) -> Tensor:
    """gate_up [n, 2F], gate first, row_weights [n] fp32 -> row_weight * silu(gate) * up [n, F], rounded once.

    Differentiable on the CPU; on CUDA outside autograd, `weighted_swiglu_backward` is its backward.
    """
    if gate_up.is_cuda:
        gate, up = gate_up.chunk(2, dim=-1)
        return _fused().swiglu(gate, up, row_weights)
    return weighted_swiglu_torch(gate_up, row_weights)


def weighted_swiglu_torch(gate_up: Tensor, row_weights: Tensor) -> Tensor:
    """The definition of `weighted_swiglu`: in fp32 at least."""
    gate, up = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32)).chunk(2, dim=-1)
    return (F.silu(gate) * up * row_weights[:, None]).to(gate_up.dtype)


def weighted_swiglu_backward(grad: Tensor, gate_up: Tensor, row_weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """grad [n, F], of which the caller has no more use -> gradients of gate_up and row_weights, and the product [n, F]
    that the forward returned, which is computed again in the same pass instead of being kept.
    """
    if gate_up.is_cuda:
        grad_gate_up = torch.empty_like(gate_up)
        halves = *gate_up.chunk(2, dim=-1), row_weights, *grad_gate_up.chunk(2, dim=-1)
        grad_weights = _fused().weighted_backward(grad, *halves)
        return grad_gate_up, grad_weights, grad
    with torch.enable_grad():
        leaves = gate_up.detach().requires_grad_(), row_weights.detach().requires_grad_()
        product = weighted_swiglu_torch(*leaves)
    grad_gate_up, grad_weights = torch.autograd.grad(product, leaves, grad)
    return grad_gate_up, grad_weights, product.detach()
