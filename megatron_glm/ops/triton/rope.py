"""Rotary position embedding as one pass over strided memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

HEADS = 16  # of one program


@triton.jit
def _move_rotated(
    source,
    target,
    cos,
    sin,
    source_rows,
    target_rows,
    heads,
    source_row_stride,
    source_head_stride,
    target_row_stride,
    target_head_stride,
    table_stride,
    copied: tl.constexpr,
    rope: tl.constexpr,
    inverse: tl.constexpr,
    block_heads: tl.constexpr,
    block_copied: tl.constexpr,
    block_pairs: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    source_row, target_row, table_row = row, row, row
    if source_rows is not None:
        source_row = tl.load(source_rows + row)
        table_row = source_row
    if target_rows is not None:
        target_row = tl.load(target_rows + row)
        table_row = target_row
    head = (tl.program_id(1) * block_heads + tl.arange(0, block_heads))[:, None]
    source += source_row * source_row_stride + head * source_head_stride
    target += target_row * target_row_stride + head * target_head_stride
    if copied > 0:
        column = tl.arange(0, block_copied)[None, :]
        inside = (head < heads) & (column < copied)
        tl.store(target + column, tl.load(source + column, mask=inside), mask=inside)
    column = tl.arange(0, 2 * block_pairs)[None, :]
    inside = (head < heads) & (column < rope)
    pair = tl.arange(0, block_pairs)
    c = tl.load(cos + table_row * table_stride + pair, mask=pair < rope // 2)[None, :]
    s = tl.load(sin + table_row * table_stride + pair, mask=pair < rope // 2)[None, :]
    if inverse:
        s = -s
    x = tl.load(source + copied + column, mask=inside).to(tl.float32)
    even, odd = tl.split(tl.reshape(x, (block_heads, block_pairs, 2)))
    turned = tl.reshape(tl.join(even * c - odd * s, odd * c + even * s), (block_heads, 2 * block_pairs))
    tl.store(target + copied + column, turned.to(target.dtype.element_ty), mask=inside)


def move_rotated(
    source: Tensor,
    target: Tensor,
    cos: Tensor,
    sin: Tensor,
    source_rows: Tensor | None = None,
    target_rows: Tensor | None = None,
    inverse: bool = False,
) -> None:
    """target[i] = source[i] with the last R dims of each head rotated, the dims before them copied.

    Args:
        source, target: [., h, n + R], any strides but those of the last dim; they may be the same tensor.
        cos, sin: [., R/2] fp32 of the same row stride, counted like the tensor whose rows are chosen.
        source_rows, target_rows: int64, takes row source_rows[i] for i, or puts it into target_rows[i]; at most one.
        inverse: rotate by the negative angle, which is the gradient.
    """
    if source.stride(-1) != 1:
        source = source.contiguous()
    chosen = source_rows if source_rows is not None else target_rows
    rows, heads = source.shape[0] if chosen is None else chosen.numel(), source.shape[1]
    if rows == 0:
        return
    rope = 2 * cos.shape[1]
    copied = source.shape[2] - rope
    block_heads = min(HEADS, triton.next_power_of_2(heads))
    _move_rotated[(rows, triton.cdiv(heads, block_heads))](
        source,
        target,
        cos,
        sin,
        source_rows,
        target_rows,
        heads,
        *source.stride()[:2],
        *target.stride()[:2],
        cos.stride(0),
        copied,
        rope,
        inverse,
        block_heads,
        triton.next_power_of_2(max(1, copied)),
        triton.next_power_of_2(rope // 2),
        num_warps=4 if heads > 1 else 1,
    )


def _heads(x: Tensor) -> Tensor:
    return x if x.dim() == 3 else x.unsqueeze(1)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        move_rotated(_heads(x), _heads(out), cos, sin)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        grad_x = torch.empty_like(grad, memory_format=torch.contiguous_format)
        move_rotated(_heads(grad), _heads(grad_x), *ctx.saved_tensors, inverse=True)
        return grad_x, None, None


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`ops.rope.apply_rope` of x [t, R] or [t, h, R]."""
    return _Rope.apply(x, cos, sin)


def rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """`ops.rope.rotate_` of x [t, R] or [t, h, R]."""
    move_rotated(_heads(x), _heads(x), cos, sin)
