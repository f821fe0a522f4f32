"""silu(gate) * up, times a row's weight if there is one, in one pass over memory forward and one backward."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048  # elements of a row that a program holds at a time
WARPS = 8  # 16 bytes of bf16 a thread


@triton.jit
def _forward(gate, up, weights, out, width, stride, weighted: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    gate_value = tl.load(gate + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    product = gate_value * tl.sigmoid(gate_value)
    product *= tl.load(up + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    if weighted:
        product *= tl.load(weights + row)
    tl.store(out + row * width + column, product.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    grad, gate, up, weights, grad_gate, grad_up, grad_weights, width, stride, weighted: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    """With weights, `grad` becomes the forward's result, in place."""
    row = tl.program_id(0).to(tl.int64)
    kind = grad_gate.dtype.element_ty
    inner = tl.zeros((block,), tl.float32)
    for begin in range(0, width, block):
        column = begin + tl.arange(0, block)
        inside = column < width
        g = tl.load(grad + row * width + column, mask=inside, other=0.0).to(tl.float32)
        gate_value = tl.load(gate + row * stride + column, mask=inside, other=0.0).to(tl.float32)
        up_value = tl.load(up + row * stride + column, mask=inside, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate_value)
        silu = gate_value * sigmoid
        if weighted:
            weight = tl.load(weights + row)
            product = silu * up_value
            inner += g * product
            g *= weight
            tl.store(grad + row * width + column, (product * weight).to(kind), mask=inside)
        grad_value = g * up_value * sigmoid * (1 + gate_value * (1 - sigmoid))
        tl.store(grad_gate + row * stride + column, grad_value.to(kind), mask=inside)
        tl.store(grad_up + row * stride + column, (g * silu).to(kind), mask=inside)
    if weighted:
        tl.store(grad_weights + row, tl.sum(inner, axis=0))


def swiglu(gate: Tensor, up: Tensor, weights: Tensor | None = None) -> Tensor:
    """gate, up [n, F] of equal strides, contiguous rows, weights [n] fp32 -> [n, F], in fp32, rounded once."""
    rows, width = gate.shape
    out = gate.new_empty(rows, width)
    if out.numel():
        grid, given = (rows, triton.cdiv(width, BLOCK)), gate if weights is None else weights
        _forward[grid](gate, up, given, out, width, gate.stride(0), weights is not None, BLOCK, num_warps=WARPS)
    return out


def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor, grad_gate: Tensor, grad_up: Tensor) -> None:
    """The gradients of `swiglu` into grad_gate and grad_up, which have the strides of gate and up; grad [n, F]."""
    _launch(grad, gate, up, None, grad_gate, grad_up, None)


def weighted_backward(
    grad: Tensor, gate: Tensor, up: Tensor, weights: Tensor, grad_gate: Tensor, grad_up: Tensor
) -> Tensor:
    """The same with weights -> their gradient [n] fp32. `grad` is overwritten with what `swiglu` had returned."""
    grad_weights = torch.empty_like(weights)
    _launch(grad, gate, up, weights, grad_gate, grad_up, grad_weights)
    return grad_weights


def _launch(grad, gate, up, weights, grad_gate, grad_up, grad_weights) -> None:
    rows, width = grad.shape
    if grad.numel():
        given = (gate, gate) if weights is None else (weights, grad_weights)
        _backward[(rows,)](
            grad, gate, up, given[0], grad_gate, grad_up, given[1], width, gate.stride(0), weights is not None, BLOCK,
            num_warps=WARPS,
        )  # fmt: skip
