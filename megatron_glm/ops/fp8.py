"""FP8 by blocks: e4m3 numbers with one fp32 scale a block, x = values * scale. The rule of files and of products.

Weights have blocks of 128 x 128 (`BLOCK`), activations and gradients of 1 x 128 (`ROW`). Where 128 does not divide a
size, the last blocks are smaller.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max  # 448
SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # a block of zeros divides by it
BLOCK, ROW = (128, 128), (1, 128)
BLOCKS = "fp8_blocks"  # attribute of a weight: its `Blocks`
SLAB = 128  # rows that are worked on at a time: beside a result of 20 GB the temporaries are small


def scale_shape(shape: tuple[int, ...], block: tuple[int, int] = BLOCK) -> tuple[int, ...]:
    """Shape of the scales of a tensor [..., rows, columns]: [..., ceil(rows / block), ceil(columns / block)]."""
    return (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))


def quantize(x: Tensor, block: tuple[int, int] = BLOCK) -> tuple[Tensor, Tensor]:
    """(values, scales) with the largest magnitude of each block on the largest e4m3 number: scale = amax / 448.

    Quantising what `dequantize` made of them in bf16 gives the same bits again: a block's amax comes back exactly,
    and rounding to bf16 moves no value past the middle between two e4m3 numbers.

    Args:
        x: [..., rows, columns] in fp32 or narrower; no block crosses from one of its matrices to the next.
    Returns:
        e4m3 of x's shape, and fp32 of `scale_shape`, at least the smallest normal number. A scale is not finite where
        the block is not.
    """
    values = torch.empty(x.shape, dtype=FP8, device=x.device)
    most = torch.full((), LARGEST, device=x.device)  # by a Python number CUDA multiplies with its inverse: other bits
    scales = torch.empty(scale_shape(tuple(x.shape), block), dtype=torch.float32, device=x.device)
    for matrix, into, scale in zip(*map(_matrices, (x, values, scales)), strict=True):
        for start, stop in _slabs(len(matrix), block[0]):
            rows = matrix[start:stop].float()
            largest = _blocks(rows.abs(), block).amax((1, 3)) / most
            mine = scale[start // block[0] : -(-stop // block[0])]
            mine.copy_(largest.clamp(min=SMALLEST_SCALE))
            # By the inverse, as kernels do: a division for each number costs them more than reading it. A product just
            # above 448 by rounding is 448; e4m3 has no infinity to round to.
            into[start:stop] = (rows * _spread(1 / mine, block, rows.shape)).clamp_(-LARGEST, LARGEST)
    return values, scales


def dequantize(
    values: Tensor,
    scales: Tensor,
    block: tuple[int, int] = BLOCK,
    dtype: torch.dtype = torch.float32,
    first_row: int = 0,
) -> Tensor:
    """What `quantize` was given, up to its rounding: computed in fp32 and rounded once to `dtype`.

    Args:
        values: [..., r, columns] e4m3, the rows from `first_row` on of a tensor [..., rows, columns].
        scales: [..., ceil(rows / block[0]), ceil(columns / block[1])], of the whole tensor.
    Returns:
        [..., r, columns] of `dtype`. Beside it only a slab of rows is in memory at a time.
    """
    result = torch.empty(values.shape, dtype=dtype, device=values.device)
    for matrix, scale, into in zip(*map(_matrices, (values, scales, result)), strict=True):
        for start, stop in _slabs(len(matrix), block[0], first_row):
            rows = matrix[start:stop].float()
            first = (first_row + start) // block[0]
            mine = scale[first : -(-(first_row + stop) // block[0])].float()
            whole = _spread(mine, block, (len(mine) * block[0], rows.shape[1]))
            skipped = first_row + start - first * block[0]
            into[start:stop] = rows * whole[skipped : skipped + len(rows)]
    return result


class Blocks:
    """A weight in FP8, as the products take it; under the attribute `BLOCKS` of the tensor in the weight's place.

    values [..., out, in] e4m3 and scales [..., ceil(out / 128), ceil(in / 128)] fp32; transposed: the same of its
    transpose, which GPU kernels multiply gradients by, or None: it is made when it is asked for.
    """

    def __init__(self, values: Tensor, scales: Tensor, transposed: tuple[Tensor, Tensor] | None = None) -> None:
        self.values, self.scales, self.transposed = values, scales, transposed

    @classmethod
    def of(cls, weight: Tensor) -> Blocks:
        """By the torch definition, from [..., out, in] in the dtype that computes."""
        return cls(*quantize(weight))

    def whole(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[..., out, in]; with scales [e, parts, ...], each part of the rows has blocks of its own."""
        return dequantize(self.parts, self.scales, dtype=dtype).view(self.values.shape)

    @property
    def parts(self) -> Tensor:
        """The values as the scales are for them: [..., rows, columns]."""
        return self.values.view(*self.scales.shape[:-2], -1, self.values.shape[-1])

    def for_gradients(self) -> tuple[Tensor, Tensor]:
        """The transpose: values [..., in, out], in memory in that order, and scales [..., in / 128, out / 128]."""
        if self.transposed is not None:
            return self.transposed
        values, scales = (part.transpose(-2, -1) for part in (self.values, self.scales))
        return values.contiguous(), scales.contiguous()


def _matrices(x: Tensor) -> tuple[Tensor, ...]:
    """The matrices of [..., rows, columns], as views."""
    return (x,) if x.dim() == 2 else x.flatten(0, -3).unbind()


def _slabs(rows: int, block: int, first_row: int = 0) -> list[tuple[int, int]]:
    """Start and stop of pieces of about SLAB rows that begin, but for the first, where a block of rows begins."""
    size = -(-SLAB // block) * block
    starts = range(-(first_row % size), rows, size)
    return [(max(start, 0), min(start + size, rows)) for start in starts]


def _blocks(rows: Tensor, block: tuple[int, int]) -> Tensor:
    """[r, c] -> [r / block, block, c / block, block], with zeros behind the ends."""
    r, c = rows.shape
    padded = F.pad(rows, (0, -c % block[1], 0, -r % block[0]))
    return padded.view(padded.shape[0] // block[0], block[0], padded.shape[1] // block[1], block[1])


def _spread(scales: Tensor, block: tuple[int, int], shape: tuple[int, ...] | torch.Size) -> Tensor:
    """The scale of each number of a matrix of this shape; of each row where a block has one row."""
    columns = scales.repeat_interleave(block[1], 1)[:, : shape[1]]
    return columns if block[0] == 1 else columns.repeat_interleave(block[0], 0)[: shape[0]]
