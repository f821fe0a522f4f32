"""silu(gate) * up, times a row's weight if there is one, in one pass over memory forward and one backward."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_glm.ops.triton.fp8 import cast_arguments, cast_groups, store_groups

BLOCK = 2048  # elements of a row that a program holds at a time
WARPS = 8  # 16 bytes of bf16 a thread


@triton.jit
def _forward(
    gate, up, weights, out, cast, scales, line, width, stride, weighted: tl.constexpr, casts: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    gate_value = tl.load(gate + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    product = gate_value * tl.sigmoid(gate_value)
    product *= tl.load(up + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    if weighted:
        product *= tl.load(weights + row)
    product = product.to(out.dtype.element_ty)
    tl.store(out + row * width + column, product, mask=inside)
    if casts:
        values, scale = cast_groups(product, block // 128)
        first = tl.program_id(1) * block + tl.arange(0, block // 128) * 128
        store_groups(values, scale, cast, scales, row + 0 * first, first, first < width, width, line)


@triton.jit
def _backward(
    grad, gate, up, weights, grad_gate, grad_up, grad_weights, cast, scales, line, width, stride,
    weighted: tl.constexpr, casts: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """With weights, `grad` becomes the forward's result, in place. cast: of both gradients, gate first, as one row."""
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
        grad_value, g = grad_value.to(kind), (g * silu).to(kind)
        tl.store(grad_gate + row * stride + column, grad_value, mask=inside)
        tl.store(grad_up + row * stride + column, g, mask=inside)
        if casts:
            first = begin + tl.arange(0, block // 128) * 128
            values, scale = cast_groups(grad_value, block // 128)
            store_groups(values, scale, cast, scales, row + 0 * first, first, first < width, 2 * width, line)
            values, scale = cast_groups(g, block // 128)
            store_groups(values, scale, cast, scales, row + 0 * first, width + first, first < width, 2 * width, line)
    if weighted:
        tl.store(grad_weights + row, tl.sum(inner, axis=0))


def swiglu(
    gate: Tensor, up: Tensor, weights: Tensor | None = None, cast: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """gate, up [n, F] of equal strides, contiguous rows, weights [n] fp32 -> [n, F], in fp32, rounded once.

    cast: where that is written in FP8, too (`fp8.room`); F is a multiple of 128 then.
    """
    rows, width = gate.shape
    out = gate.new_empty(rows, width)
    if out.numel():
        grid, given = (rows, triton.cdiv(width, BLOCK)), gate if weights is None else weights
        _forward[grid](
            gate, up, given, out, *cast_arguments(gate, cast), width, gate.stride(0), weights is not None,
            cast is not None, BLOCK, num_warps=WARPS,
        )  # fmt: skip
    return out


def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor, grad_gate: Tensor, grad_up: Tensor) -> None:
    """The gradients of `swiglu` into grad_gate and grad_up, which have the strides of gate and up; grad [n, F]."""
    _launch(grad, gate, up, None, grad_gate, grad_up, None, None)


def weighted_backward(
    grad: Tensor, gate: Tensor, up: Tensor, weights: Tensor, grad_gate: Tensor, grad_up: Tensor,
    cast: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """The same with weights -> their gradient [n] fp32. `grad` is overwritten with what `swiglu` had returned.

    cast: where both gradients are written in FP8, too, side by side: [n, 2F].
    """
    grad_weights = torch.empty_like(weights)
    _launch(grad, gate, up, weights, grad_gate, grad_up, grad_weights, cast)
    return grad_weights


def _launch(grad, gate, up, weights, grad_gate, grad_up, grad_weights, cast) -> None:
    rows, width = grad.shape
    if grad.numel():
        given = (gate, gate) if weights is None else (weights, grad_weights)
        _backward[(rows,)](
            grad, gate, up, given[0], grad_gate, grad_up, given[1], *cast_arguments(gate, cast), width, gate.stride(0),
            weights is not None, cast is not None, BLOCK, num_warps=WARPS,
        )  # fmt: skip
