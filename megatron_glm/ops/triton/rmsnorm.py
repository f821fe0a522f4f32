"""RMSNorm, alone or behind the residual addition, as one pass over memory forward and one backward.

Autograd keeps the rows that are normalised and one fp32 number for each of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_glm.ops.fp8_casts import remembered, room_for
from megatron_glm.ops.triton.fp8 import cast_arguments, cast_groups, store_groups

TILE = 4096  # elements that a program holds at a time: several short rows, or at least one long one
PROGRAMS = 264  # of the backward, two for each multiprocessor of an H200; a constant, so that sums keep their order


@triton.jit
def _forward(
    x, x_stride, added, added_stride, weight, total, out, rstd, cast, scales, line, rows, dim, eps,
    has_added: tl.constexpr, casts: tl.constexpr, height: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * height + tl.arange(0, height)[:, None]
    column = tl.arange(0, width)[None, :]
    inside = (row < rows) & (column < dim)
    kind = out.dtype.element_ty
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if has_added:
        value += tl.load(added + row * added_stride + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(total + row * dim + column, value.to(kind), mask=inside)
        value = value.to(kind).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=1, keep_dims=True) / dim + eps)
    normed = (value * scale).to(kind).to(tl.float32)
    scaled = normed * tl.load(weight + column, mask=column < dim, other=0.0).to(tl.float32)
    scaled = scaled.to(kind)
    tl.store(out + row * dim + column, scaled, mask=inside)
    tl.store(rstd + row, scale, mask=row < rows)
    if casts:
        groups: tl.constexpr = width // 128  # of a row; dim is a multiple of 128, so none is of two rows or half inside
        values, sizes = cast_groups(scaled, height * groups)
        number = tl.arange(0, height * groups)
        line_of, first = tl.program_id(0) * height + number // groups, number % groups * 128
        store_groups(values, sizes, cast, scales, line_of, first, (line_of < rows) & (first < dim), dim, line)


@triton.jit
def _backward(
    grad, grad_stride, grad_total, grad_total_stride, x, x_stride, weight, rstd, grad_x, partial, rows, dim, turns,
    has_total: tl.constexpr, height: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, width)[None, :]
    factor = tl.load(weight + column, mask=column < dim, other=0.0).to(tl.float32)
    grad_weight = tl.zeros((height, width), tl.float32)
    kind = grad_x.dtype.element_ty
    for turn in range(turns):
        tile = turn * tl.num_programs(0).to(tl.int64) + tl.program_id(0)
        row = tile * height + tl.arange(0, height)[:, None]
        inside = (row < rows) & (column < dim)
        g = tl.load(grad + row * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(rstd + row, mask=row < rows, other=0.0)
        normed = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32) * scale
        grad_weight += g * normed.to(kind).to(tl.float32)
        g *= factor
        g = (g - normed * (tl.sum(g * normed, axis=1, keep_dims=True) / dim)) * scale
        if has_total:
            at = grad_total + row * grad_total_stride + column
            g += tl.load(at, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_x + row * dim + column, g.to(kind), mask=inside)
    tl.store(partial + tl.program_id(0) * dim + column, tl.sum(grad_weight, axis=0, keep_dims=True), mask=column < dim)


def _tile(dim: int) -> tuple[int, int, int]:
    """Rows and columns of a program's tile, and its warps."""
    width = triton.next_power_of_2(dim)
    return max(1, TILE // width), width, min(32, max(8, width // 512))


def _by_rows(x: Tensor) -> Tensor:
    """x, or a copy of it if the elements of its rows are not neighbours."""
    return x if x.stride(1) == 1 else x.contiguous()


class _RMSNorm(torch.autograd.Function):
    """With `added`: x + added first, which is an output, too."""

    @staticmethod
    def forward(ctx, x: Tensor, added: Tensor | None, weight: Tensor, eps: float, cast: bool):
        x = _by_rows(x)
        rows, dim = x.shape
        out, rstd = x.new_empty(rows, dim), x.new_empty(rows, dtype=torch.float32)
        other = x if added is None else _by_rows(added)
        total = x if added is None else torch.empty_like(out)
        into = room_for(out, cast)
        if rows:
            height, width, warps = _tile(dim)
            _forward[(triton.cdiv(rows, height),)](
                x, x.stride(0), other, other.stride(0), weight, total, out, rstd, *cast_arguments(out, into), rows,
                dim, eps, added is not None, cast, height, width, num_warps=warps,
            )  # fmt: skip
        remembered(out, into)
        ctx.save_for_backward(total, weight, rstd)
        return out if added is None else (total, out)

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        x, weight, rstd = ctx.saved_tensors
        rows, dim = x.shape
        grad_total, grad = (_by_rows(g) for g in (gradients[0], gradients[-1]))
        height, width, warps = _tile(dim)
        tiles = triton.cdiv(rows, height)
        programs = min(PROGRAMS, tiles)
        grad_x = x.new_empty(rows, dim)
        partial = x.new_empty(programs, dim, dtype=torch.float32)
        has_total = len(gradients) == 2
        if rows:
            _backward[(programs,)](
                grad, grad.stride(0), grad_total, grad_total.stride(0), x, x.stride(0), weight, rstd, grad_x, partial,
                rows, dim, triton.cdiv(tiles, programs), has_total, height, width, num_warps=warps,
            )  # fmt: skip
        return grad_x, grad_x if has_total else None, partial.sum(0).to(weight.dtype), None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float, cast: bool = False) -> Tensor:
    """x [n, D], rows of any stride; weight [D] -> weight * cast(x * rsqrt(mean(x^2) + eps)), in x's dtype.

    cast: a product in FP8 takes the result, so the kernel casts it, too; D is a multiple of 128 then.
    """
    return _RMSNorm.apply(x, None, weight, eps, cast)


def add_rms_norm(x: Tensor, added: Tensor, weight: Tensor, eps: float, cast: bool = False) -> tuple[Tensor, Tensor]:
    """The sum of x and added [n, D], rounded to their dtype, and its `rms_norm`."""
    return _RMSNorm.apply(x, added, weight, eps, cast)
