"""silu(gate) * up as one pass over memory forward and one backward, in Triton; imported on CUDA only."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _forward(gate_up, out, width, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    gate = tl.load(gate_up + row * 2 * width + column, mask=inside).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=inside).to(tl.float32)
    tl.store(out + row * width + column, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(grad, gate_up, grad_gate_up, width, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    gate_at = row * 2 * width + column
    g = tl.load(grad + row * width + column, mask=inside).to(tl.float32)
    gate = tl.load(gate_up + gate_at, mask=inside).to(tl.float32)
    up = tl.load(gate_up + gate_at + width, mask=inside).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    grad_gate = g * up * sigmoid * (1 + gate * (1 - sigmoid))
    kind = grad_gate_up.dtype.element_ty
    tl.store(grad_gate_up + gate_at, grad_gate.to(kind), mask=inside)
    tl.store(grad_gate_up + gate_at + width, (g * gate * sigmoid).to(kind), mask=inside)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up: Tensor) -> Tensor:
        gate_up = gate_up.contiguous()
        ctx.save_for_backward(gate_up)
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, width)
        _forward[(rows, triton.cdiv(width, BLOCK))](gate_up, out, width, BLOCK)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        grad_gate_up = torch.empty_like(gate_up)
        rows, width = grad.shape
        _backward[(rows, triton.cdiv(width, BLOCK))](grad.contiguous(), gate_up, grad_gate_up, width, BLOCK)
        return grad_gate_up


def swiglu(gate_up: Tensor) -> Tensor:
    """gate_up [n, 2F], gate first, n > 0 -> silu(gate) * up [n, F], computed in fp32, rounded once."""
    return _SwiGLU.apply(gate_up)
