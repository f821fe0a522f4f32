"""The maps and row movements of `permute.py` in one pass over the rows each, in Triton; imported on CUDA only."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_glm.ops.triton.fp8 import cast_arguments, cast_groups, store_groups

BLOCK = 2048  # elements of a row that a program holds at a time
KEYS = 64  # keys that a program sorts among themselves, by comparing all pairs
GROUPS = 64  # groups that it counts at a time


@triton.jit
def _count_keys(key, table, total, groups, keys: tl.constexpr, at_a_time: tl.constexpr):
    """table [groups, programs]: how often each group occurs among the keys of each program."""
    block, blocks = tl.program_id(0), tl.num_programs(0)
    index = block * keys + tl.arange(0, keys)
    mine = tl.load(key + index, mask=index < total, other=-1)
    for first in range(0, groups, at_a_time):
        group = first + tl.arange(0, at_a_time)
        found = tl.sum((mine[:, None] == group[None, :]).to(tl.int32), axis=0)
        tl.store(table + group * blocks + block, found, mask=group < groups)


@triton.jit
def _place_keys(key, ends, position, counts, total, groups, keys: tl.constexpr, all_groups: tl.constexpr):
    """ends: running sum over the flattened table, so that a program's keys of a group begin where the cell before ends.

    Among themselves they keep their order.
    """
    block, blocks = tl.program_id(0), tl.num_programs(0)
    lane = tl.arange(0, keys)
    index = block * keys + lane
    mine = tl.load(key + index, mask=index < total, other=-1)
    other = tl.load(key + block * keys + lane[None, :], mask=block * keys + lane[None, :] < total, other=-1)
    before = tl.sum(((mine[:, None] == other) & (lane[None, :] < lane[:, None])).to(tl.int32), axis=1)
    cell = mine * blocks + block
    start = tl.load(ends + cell - 1, mask=cell > 0, other=0)
    tl.store(position + index, tl.where(mine >= 0, (start + before).to(tl.int64), -1), mask=index < total)
    if block == 0:
        group = tl.arange(0, all_groups)
        end = tl.load(ends + (group + 1) * blocks - 1, mask=group < groups, other=0)
        begin = tl.load(ends + group * blocks - 1, mask=(group > 0) & (group < groups), other=0)
        tl.store(counts + group, (end - begin).to(tl.int64), mask=group < groups)


@triton.jit
def _copy_rows(
    x, weights, position, out, row_weights, cast, scales, line, slots: tl.constexpr, dim, weighted: tl.constexpr,
    casts: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < dim
    value = tl.load(x + token * dim + column, mask=inside, other=0.0)
    if casts:
        values, scale = cast_groups(value, block // 128)
        first = tl.program_id(1) * block + tl.arange(0, block // 128) * 128
    for k in tl.static_range(slots):
        row = tl.load(position + token * slots + k)
        tl.store(out + row * dim + column, value, mask=inside & (row >= 0))
        if casts:
            store_groups(values, scale, cast, scales, row + 0 * first, first, (first < dim) & (row >= 0), dim, line)
        if weighted:
            weight = tl.load(weights + token * slots + k)
            tl.store(row_weights + row, weight, mask=(row >= 0) & (tl.program_id(1) == 0))


@triton.jit
def _sum_rows(
    source, row_weights, position, out, weights, slots: tl.constexpr, dim, weighted: tl.constexpr, block: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < dim
    total = tl.zeros((block,), tl.float32)
    for k in tl.static_range(slots):
        row = tl.load(position + token * slots + k)
        total += tl.load(source + row * dim + column, mask=inside & (row >= 0), other=0.0).to(tl.float32)
    tl.store(out + token * dim + column, total.to(out.dtype.element_ty), mask=inside)
    if weighted:
        for k in tl.static_range(slots):  # after the sum, whose loads would wait for these stores
            row = tl.load(position + token * slots + k)
            weight = tl.load(row_weights + row, mask=row >= 0, other=0.0)
            tl.store(weights + token * slots + k, weight, mask=tl.program_id(1) == 0)


@triton.jit
def _zero_rows(
    out, row_weights, cast, scales, line, filled, ends, most, dim, weighted: tl.constexpr, casts: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    """One row of those without a slot: of most a group there is at most one less."""
    group, number = tl.program_id(0) // most, tl.program_id(0) % most
    end = tl.load(ends + group)
    begin = tl.load(ends + group - 1, mask=group > 0, other=0)
    row = begin + tl.load(filled + group) + number
    column = tl.program_id(1) * block + tl.arange(0, block)
    zero = tl.zeros((block,), out.dtype.element_ty)
    tl.store(out + row * dim + column, zero, mask=(column < dim) & (row < end))
    if casts:
        values, scale = cast_groups(zero, block // 128)
        first = tl.program_id(1) * block + tl.arange(0, block // 128) * 128
        store_groups(values, scale, cast, scales, row + 0 * first, first, (first < dim) & (row < end), dim, line)
    if weighted:
        tl.store(row_weights + row, 0.0, mask=(row < end) & (tl.program_id(1) == 0))


def place(key: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """key [t, S] int64 in [-1, groups) -> position [t, S] int64 (-1 = none) and counts [groups] int64 of a `RowMap`."""
    key, total = key.contiguous(), key.numel()
    position, counts = torch.empty_like(key), key.new_empty(groups)
    if total == 0:
        return position, counts.zero_()
    blocks = triton.cdiv(total, KEYS)
    table = key.new_empty(groups * blocks, dtype=torch.int32)
    _count_keys[(blocks,)](key, table, total, groups, KEYS, GROUPS)
    ends = table.cumsum(0, dtype=torch.int32)
    _place_keys[(blocks,)](key, ends, position, counts, total, groups, KEYS, triton.next_power_of_2(groups))
    return position, counts


def copy_rows(
    x: Tensor, weights: Tensor | None, position: Tensor, size: int, cast: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor | None]:
    """x [t, D], weights [t, S] fp32, position [t, S] (-1 = none) -> [size, D] and [size]; no other row is written.

    cast: where the rows are written in FP8, too (`fp8.room`); D is a multiple of 128 then.
    """
    (tokens, slots), dim = position.shape, x.shape[1]
    out, row_weights = x.new_empty(size, dim), None if weights is None else weights.new_empty(size)
    if size:
        grid, weighted = (tokens, triton.cdiv(dim, BLOCK)), weights is not None
        given = (x, out) if weights is None else (weights.contiguous(), row_weights)
        _copy_rows[grid](
            x.contiguous(), given[0], position, out, given[1], *cast_arguments(x, cast), slots, dim, weighted,
            cast is not None, BLOCK,
        )  # fmt: skip
    return out, row_weights


def sum_rows(source: Tensor, row_weights: Tensor | None, position: Tensor) -> tuple[Tensor, Tensor | None]:
    """The transpose of `copy_rows`: [n, D], [n] -> [t, D], summed in slot order in fp32, rounded once, and [t, S]."""
    (tokens, slots), dim = position.shape, source.shape[1]
    out = source.new_empty(tokens, dim)
    weights = None if row_weights is None else row_weights.new_empty(tokens, slots)
    if tokens:
        grid, weighted = (tokens, triton.cdiv(dim, BLOCK)), weights is not None
        given = (source, out) if row_weights is None else (row_weights.contiguous(), weights)
        _sum_rows[grid](source.contiguous(), given[0], position, out, given[1], slots, dim, weighted, BLOCK)
    return out, weights


def zero_rows(
    out: Tensor, row_weights: Tensor | None, filled: Tensor, counts: Tensor, multiple: int,
    cast: tuple[Tensor, Tensor] | None = None,
) -> None:  # fmt: skip
    """Zeroes what `copy_rows` leaves of each group's counts [groups] rows: those behind the first filled [groups].

    multiple: above the most of them that a group has.
    """
    if len(out):
        grid = (len(counts) * multiple, triton.cdiv(out.shape[1], BLOCK))
        weights, weighted = (out, False) if row_weights is None else (row_weights, True)
        _zero_rows[grid](
            out, weights, *cast_arguments(out, cast), filled, counts.cumsum(0), multiple, out.shape[1], weighted,
            cast is not None, BLOCK,
        )  # fmt: skip
