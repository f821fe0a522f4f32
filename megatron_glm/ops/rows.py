"""Rows of a rank that a kernel works on: a run of them, or a list on the device."""

from __future__ import annotations

from torch import Tensor

Rows = slice | Tensor  # rows that rise: one run of them, or int64 [n] on the device
RowsByForm = tuple[Rows | None, Rows | None]  # the rows of the expanded and of the absorbed form; None = it is not used


def row_count(rows: Rows | None) -> int:
    if rows is None:
        return 0
    return rows.stop - rows.start if isinstance(rows, slice) else rows.numel()


def part_of(rows: Rows, begin: int, end: int) -> Rows:
    """rows[begin:end]."""
    if isinstance(rows, slice):
        return slice(rows.start + begin, min(rows.start + end, rows.stop))
    return rows[begin:end]


def add_rows(target: Tensor, rows: Tensor, values: Tensor) -> None:
    """target[rows] += values, outside autograd: the same bits in every run. rows: int64 [n], which may repeat."""
    if target.is_cuda:
        target.index_put_((rows,), values, accumulate=True)  # sorts
    else:
        target.index_add_(0, rows, values)


def put_rows(target: Tensor, rows: Rows, values: Tensor) -> None:
    """target[rows] = values, outside autograd."""
    if isinstance(rows, slice):
        target[rows].copy_(values)
    else:
        target.index_copy_(0, rows, values)
