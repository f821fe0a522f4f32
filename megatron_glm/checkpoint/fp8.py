"""FP8 weights with one fp32 scale a block, as in the FP8 releases: W = fp8 * scale."""

from __future__ import annotations

import torch

SCALE_SUFFIX = "_scale_inv"


def scale_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """Shape of the scales of a weight [..., out, in]: [..., ceil(out / block), ceil(in / block)]."""
    return (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))


def dequantize(
    weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int], dtype: torch.dtype, first_row: int = 0
) -> torch.Tensor:
    """Rows of a block-quantised weight in full precision, computed in fp32 and rounded once.

    Args:
        weight: [r, in] e4m3, the rows from `first_row` on of a weight [out, in].
        scale: [ceil(out / block[0]), ceil(in / block[1])], of the whole weight; the last blocks may be ragged.
    Returns:
        [r, in] of `dtype`. Beside it only one row of blocks is in memory at a time.
    """
    result = torch.empty(weight.shape, dtype=dtype)
    start = 0
    while start < weight.shape[0]:
        row_block = (first_row + start) // block[0]
        stop = min((row_block + 1) * block[0] - first_row, weight.shape[0])
        columns = scale[row_block].float().repeat_interleave(block[1])[: weight.shape[1]]
        result[start:stop] = weight[start:stop].float() * columns
        start = stop
    return result
