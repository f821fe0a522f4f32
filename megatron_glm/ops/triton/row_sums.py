"""Sums of rows by key in a fixed order, so that they have the same bits every time."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

STEP = 16  # rows that a program loads at a time


@triton.jit
def _sparse_mla_row_sums(
    rows,
    order,
    edges,
    sums,
    slots,
    parts: tl.constexpr,
    left: tl.constexpr,
    right: tl.constexpr,
    step: tl.constexpr,
):
    """sums[key] += the rows order[edges[key] : edges[key + 1]] of every part; columns left | right."""
    key = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(edges + key), tl.load(edges + key + 1)
    if begin < end:
        column, last = tl.arange(0, left)[None, :], left + tl.arange(0, right)[None, :]
        total = tl.zeros((left,), tl.float32)
        rest = tl.zeros((step, right), tl.float32)  # a thread has a few rows of it: summed over them at the end
        for first in range(begin, end, step):
            at = first + tl.arange(0, step)
            pair = tl.load(order + at, mask=at < end, other=0)
            for part in tl.static_range(parts):
                row = rows + (pair + (pair // slots * (parts - 1) + part) * slots)[:, None] * (left + right)
                inside = (at < end)[:, None]
                x = tl.load(row + column, mask=inside, other=0.0, eviction_policy="evict_first")
                y = tl.load(row + last, mask=inside, other=0.0, eviction_policy="evict_first")
                total += tl.sum(x.to(tl.float32), axis=0)
                rest += y.to(tl.float32)
        target = sums + key * (left + right) + tl.arange(0, left)
        tl.store(target, tl.load(target) + total)
        target = sums + key * (left + right) + left + tl.arange(0, right)
        tl.store(target, tl.load(target) + tl.sum(rest, axis=0))


def add_rows(rows: Tensor, idx: Tensor, length: Tensor, sums: Tensor) -> None:
    """sums[idx[t, s]] += rows[t * parts + p, s] for every t, s < length[t] and p, in fp32, the rows of a key by (t, s).

    Args:
        rows: [t * parts, K, D], D a power of two and another one, at most an eighth of it; unused slots are not read.
        idx: [t, K] int32; length: [t] int32.
        sums: [T, D] fp32, changed in place.
    """
    (count, slots), (keys, width) = idx.shape, sums.shape
    slot = torch.arange(slots, dtype=torch.int32, device=idx.device)
    used, order = idx.masked_fill(slot >= length.unsqueeze(1), -1).flatten().sort(stable=True)
    edges = torch.searchsorted(used, torch.arange(keys + 1, dtype=torch.int32, device=idx.device), out_int32=True)
    left = 1 << (width.bit_length() - 1)
    parts = rows.shape[0] // count
    _sparse_mla_row_sums[(keys,)](rows, order, edges, sums, slots, parts, left, width - left, STEP, num_warps=2)
