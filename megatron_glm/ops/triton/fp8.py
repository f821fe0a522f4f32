"""The casts of `ops/fp8.py` on a GPU, with the same bits: one pass over a matrix, in one orientation or both.

A program has one tile of 128 x 128. Scales of rows are stored with the rows next to each other, as matrix products on
Hopper load them: [columns / 128, rows], whose transpose is returned, each line a multiple of 16 bytes apart.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_glm.ops.fp8 import FP8, SMALLEST_SCALE

TILE = 128
SMALLEST = tl.constexpr(SMALLEST_SCALE)
WARPS = 8
GROUPS = 16  # of 128 numbers of a row, that a program turns back
ALIGNED = 4  # rows between the lines of scales: 16 bytes, TMA's granularity


@triton.jit
def _quantum(largest):
    """The scale of a block, and its inverse."""
    scale = tl.maximum(tl.div_rn(largest, 448.0), SMALLEST)
    return scale, tl.div_rn(1.0, scale)


@triton.jit
def cast_groups(values, groups: tl.constexpr):
    """values of groups * 128 elements, of whole rows or of one, as they
    are rounded in memory -> e4m3 [groups, 128] and scales [groups]."""
    values = tl.reshape(values.to(tl.float32), (groups, 128))
    scale, inverse = _quantum(tl.max(tl.abs(values), axis=1))
    return tl.clamp(values * inverse[:, None], -448.0, 448.0).to(tl.float8e4nv), scale


@triton.jit
def store_groups(cast, scale, values, scales, row, first, inside, width, line):
    """What `cast_groups` made, into values [rows, width] and scales [width / 128, line].

    row, first, inside [groups]: of each group its row, its first column, and whether it is to be stored.
    """
    place = (row.to(tl.int64) * width + first)[:, None] + tl.arange(0, 128)[None, :]
    tl.store(values + place, cast, mask=inside[:, None])
    tl.store(scales + (first // 128).to(tl.int64) * line + row, scale, mask=inside)


@triton.jit
def _cast_lines(
    x, along, along_scales, across, across_scales, rows, columns, line, depth,
    has_along: tl.constexpr, has_across: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """x [rows, columns]; along [rows, columns] with scales [columns / tile, line], one a row and tile of columns;
    across [columns, depth] with scales [depth / tile, columns], one a column and tile of rows, zero behind the rows."""
    row = tl.program_id(0) * tile + tl.arange(0, tile)
    column = tl.program_id(1) * tile + tl.arange(0, tile)
    inside = row < rows
    place = row[:, None].to(tl.int64) * columns + column[None, :]
    value = tl.load(x + place, mask=inside[:, None], other=0.0).to(tl.float32)
    size = tl.abs(value)
    if has_along:
        scale, inverse = _quantum(tl.max(size, axis=1))
        cast = tl.clamp(value * inverse[:, None], -448.0, 448.0).to(tl.float8e4nv)
        tl.store(along + place, cast, mask=inside[:, None])
        tl.store(along_scales + tl.program_id(1).to(tl.int64) * line + row, scale, mask=inside)
    if has_across:
        scale, inverse = _quantum(tl.max(size, axis=0))
        cast = tl.clamp(value * inverse[None, :], -448.0, 448.0).to(tl.float8e4nv)
        tl.store(across + column[:, None].to(tl.int64) * depth + row[None, :], tl.trans(cast))
        tl.store(across_scales + tl.program_id(0).to(tl.int64) * columns + column, scale)


@triton.jit
def _cast_blocks(w, values, scales, across, across_scales, rows, columns, tile: tl.constexpr):
    """w [matrices, rows, columns], rounded to bf16; across: the transpose of each matrix."""
    block_row, block_column, matrix = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    row, column = block_row * tile + tl.arange(0, tile), block_column * tile + tl.arange(0, tile)
    first, first_scale = matrix * rows * columns, matrix * (rows // tile) * (columns // tile)
    place = first + row[:, None].to(tl.int64) * columns + column[None, :]
    value = tl.load(w + place).to(tl.bfloat16).to(tl.float32)
    scale, inverse = _quantum(tl.max(tl.max(tl.abs(value), axis=1), axis=0))
    cast = tl.clamp(value * inverse, -448.0, 448.0).to(tl.float8e4nv)
    tl.store(values + place, cast)
    tl.store(scales + first_scale + block_row * (columns // tile) + block_column, scale)
    tl.store(across + first + column[:, None].to(tl.int64) * rows + row[None, :], tl.trans(cast))
    tl.store(across_scales + first_scale + block_column * (rows // tile) + block_row, scale)


@triton.jit
def _uncast_rows(values, scales, out, columns, groups: tl.constexpr):
    """A part of one row; scales [rows, columns / 128]."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * groups + tl.arange(0, groups)
    inside = group < columns // 128
    scale = tl.load(scales + row * (columns // 128) + group, mask=inside, other=0.0)
    place = row * columns + group[:, None] * 128 + tl.arange(0, 128)[None, :]
    value = tl.load(values + place, mask=inside[:, None], other=0.0).to(tl.float32)
    tl.store(out + place, (value * scale[:, None]).to(out.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _uncast_blocks(values, scales, out, rows, columns, lines, across, tile: tl.constexpr):
    """A tile of 128 x 128 of one of several matrices; lines, across: blocks of a matrix along rows and columns."""
    matrix, line, column = tl.program_id(2).to(tl.int64), tl.program_id(1), tl.program_id(0)
    row, at = line * tile + tl.arange(0, tile), column * tile + tl.arange(0, tile)
    inside = (row < rows)[:, None] & (at < columns)[None, :]
    place = (matrix * rows + row)[:, None] * columns + at[None, :]
    scale = tl.load(scales + (matrix * lines + line) * across + column)
    number = tl.load(values + place, mask=inside, other=0.0).to(tl.float32) * scale
    tl.store(out + place, number.to(out.dtype.element_ty), mask=inside)


def uncast_blocks(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """`ops.fp8.dequantize` of [..., rows, columns] by blocks of 128 x 128."""
    out = torch.empty(values.shape, dtype=dtype, device=values.device)
    rows, columns = values.shape[-2:]
    lines, across = scales.shape[-2:]
    grid = across, lines, values.numel() // (rows * columns)
    _uncast_blocks[grid](
        values.contiguous(), scales.contiguous(), out, rows, columns, lines, across, TILE, num_warps=WARPS
    )
    return out


def cast_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [n, k], k a multiple of 128 -> e4m3 [n, k] and scales [n, k / 128], as `quantize(x, ROW)`."""
    along, scales = room(x)
    _launch(x, along, scales, None, None)
    return along, scales


def cast_columns(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [n, k], k a multiple of 128 -> the same of its transpose: e4m3 [k, n] and scales [k, n / 128].

    n is rounded up to a multiple of 128, with zeros.
    """
    across, scales = _room_across(x)
    _launch(x, None, None, across, scales)
    return across, scales


def cast_both(x: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """`cast_rows` and `cast_columns`, reading x once."""
    rows, columns = room(x), _room_across(x)
    _launch(x, *rows, *columns)
    return rows, columns


def uncast_rows(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """e4m3 [n, k], k a multiple of 128, and scales [n, k / 128], both contiguous -> [n, k] of `dtype`."""
    rows, columns = values.shape
    out = torch.empty(rows, columns, dtype=dtype, device=values.device)
    if out.numel():
        _uncast_rows[(rows, triton.cdiv(columns // TILE, GROUPS))](values, scales, out, columns, GROUPS)
    return out


def cast_blocks(w: Tensor, into: tuple[Tensor, ...] | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """w [.., out, in], both multiples of 128, bf16 or rounded to it -> as `quantize`: values and scales of w, and of
    its transpose, in the memory of `into` if it is given."""
    *outer, rows, columns = w.shape
    if into is None:
        values, across = w.new_empty(w.shape, dtype=FP8), w.new_empty(*outer, columns, rows, dtype=FP8)
        scales = w.new_empty(*outer, rows // TILE, columns // TILE, dtype=torch.float32)
        into = values, scales, across, w.new_empty(*outer, columns // TILE, rows // TILE, dtype=torch.float32)
    values, scales, across, across_scales = into
    if w.numel():
        grid = (rows // TILE, columns // TILE, w.numel() // (rows * columns))
        _cast_blocks[grid](w.contiguous(), values, scales, across, across_scales, rows, columns, TILE, num_warps=WARPS)
    return values, scales, across, across_scales


def room(x: Tensor, rows: int | None = None) -> tuple[Tensor, Tensor]:
    """Memory for the cast by rows of x [n, k], or of so many rows like its own."""
    rows, columns = len(x) if rows is None else rows, x.shape[1]
    line = triton.cdiv(rows, ALIGNED) * ALIGNED
    scales = x.new_empty(columns // TILE, line, dtype=torch.float32)
    return x.new_empty(rows, columns, dtype=FP8), scales[:, :rows].t()


def cast_arguments(instead: Tensor, cast: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, int]:
    """What a kernel takes to write a cast by rows: values, scales, line to line; `instead` where it writes none."""
    return (instead, instead, 0) if cast is None else (*cast, cast[1].stride(1))


def _room_across(x: Tensor) -> tuple[Tensor, Tensor]:
    columns, depth = x.shape[1], triton.cdiv(x.shape[0], TILE) * TILE
    return x.new_empty(columns, depth, dtype=FP8), x.new_empty(depth // TILE, columns, dtype=torch.float32).t()


def _launch(
    x: Tensor, along: Tensor | None, along_scales: Tensor | None, across: Tensor | None, across_scales: Tensor | None
) -> None:
    rows, columns = x.shape
    if not x.numel():
        return
    line = 0 if along_scales is None else along_scales.stride(1)
    depth = 0 if across is None else across.shape[1]
    given = [x if part is None else part for part in (along, along_scales, across, across_scales)]
    _cast_lines[(triton.cdiv(rows, TILE), columns // TILE)](
        x.contiguous(), *given, rows, columns, line, depth,
        along is not None, across is not None, TILE, num_warps=WARPS,
    )  # fmt: skip
