"""FP8 weights with one fp32 scale a block, as in the FP8 releases: W = fp8 * scale."""

from __future__ import annotations

import torch

SCALE_SUFFIX = "_scale_inv"
LARGEST = torch.finfo(torch.float8_e4m3fn).max  # 448


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


def quantize(weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(fp8, scale) with the largest magnitude of each block on the largest e4m3 number: scale = amax / 448.

    Quantising what `dequantize` made of them in bf16 gives the same bits again: a block's amax comes back exactly,
    and rounding to bf16 moves no value past the middle between two e4m3 numbers.

    Args:
        weight: [r, in], whole rows of blocks but the last.
    Returns:
        [r, in] e4m3 and [ceil(r / block[0]), ceil(in / block[1])] fp32; a scale is not finite where the block is not.
    """
    scale = torch.empty(scale_shape(tuple(weight.shape), block), dtype=torch.float32)
    result = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for number, rows in enumerate(weight.split(block[0])):
        values = rows.float()
        largest = values.abs().amax(0)
        ragged = -len(largest) % block[1]
        largest = torch.nn.functional.pad(largest, (0, ragged)).view(-1, block[1]).amax(1)
        # at least the smallest normal number, so that blocks of zeros divide
        scale[number] = (largest / LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
        values /= scale[number].repeat_interleave(block[1])[: weight.shape[1]]
        # a quotient just above 448 by rounding is 448; e4m3 has no infinity to round to
        result[number * block[0] : number * block[0] + len(rows)] = values.clamp_(-LARGEST, LARGEST)
    return result, scale
