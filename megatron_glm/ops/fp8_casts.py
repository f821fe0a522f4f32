"""Casts of rows to FP8; on a GPU those that were made a moment ago, by the kernel that wrote a tensor or a product.

A tensor is cast once: the gate and the up projection take the same rows, a gradient is read once for both products.
A cast is found again by its tensor, the same object unchanged; the last few are kept, as long as their tensor lives.
"""

from __future__ import annotations

import weakref
from collections import deque

import torch
from torch import Tensor

from megatron_glm.ops.fp8 import ROW, dequantize, quantize
from megatron_glm.torch_private import private

private(__name__, "torch.Tensor._version")

Cast = tuple[Tensor, Tensor]  # values and scales


class _CastsOf:
    """What is known of one tensor: its cast by rows and by columns, if they were made."""

    def __init__(self, x: Tensor) -> None:
        mine = weakref.ref(self)  # a cycle would keep the casts of every layer until Python looks for cycles
        self.tensor, self.version = weakref.ref(x, lambda _: _forget(mine())), x._version
        self.rows: Cast | None = None
        self.columns: Cast | None = None


def _forget(casts: _CastsOf | None) -> None:
    if casts is not None:
        casts.rows = casts.columns = None


_recent: deque[_CastsOf] = deque(maxlen=3)


def _casts_of(x: Tensor) -> _CastsOf:
    for known in _recent:
        if known.tensor() is x and known.version == x._version:
            return known
    _recent.append(_CastsOf(x))
    return _recent[-1]


def forget_casts() -> None:
    """Behind the last product of a forward: what its backward keeps of it is not cast again for the same product."""
    _recent.clear()


def cast_rows(x: Tensor) -> Cast:
    """`quantize` of rows [n, k], by the kernel on a GPU, which takes multiples of 128 columns."""
    return _kernels().cast_rows(x) if x.is_cuda else quantize(x, ROW)


def uncast_rows(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """`dequantize` of rows, both contiguous, by the kernel on a GPU."""
    return _kernels().uncast_rows(values, scales, dtype) if values.is_cuda else dequantize(values, scales, ROW, dtype)


def room_for(x: Tensor, wanted: bool, rows: int | None = None) -> Cast | None:
    """Memory for a kernel that writes a tensor of x's shape, or of so many rows, to write its cast by rows, too.

    None if that is not wanted.
    """
    return _kernels().room(x, rows) if wanted else None


def remembered(x: Tensor, rows: Cast | None) -> Tensor:
    """x, of which a kernel has written this cast by rows, if any."""
    if rows is not None:
        _casts_of(x).rows = rows
    return x


def rows_of(x: Tensor, columns_too: bool = False) -> Cast:
    """The cast of x [n, k] by rows; columns_too: that by columns will be asked for, too."""
    known = _casts_of(x)
    if known.rows is None and columns_too and known.columns is None:
        known.rows, known.columns = _kernels().cast_both(x)
    if known.rows is None:
        known.rows = _kernels().cast_rows(x)
    return known.rows


def columns_of(x: Tensor) -> Cast:
    """The cast of x's transpose by rows."""
    known = _casts_of(x)
    if known.columns is None:
        known.columns = _kernels().cast_columns(x)
    return known.columns


def _kernels():
    from megatron_glm.ops.triton import fp8 as casts  # needs Triton, which a CPU-only torch has not

    return casts
