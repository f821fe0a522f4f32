"""The products in FP8 on a Hopper GPU: casts by Triton, matrix products by DeepGEMM. `Fp8Products` defines them.

DeepGEMM sums over the last dim of both operands, so each product takes a cast along its own sum: the output takes rows
of x and the weight, the input gradient rows of the gradient and the weight's transpose, the weight's gradient columns
of both. Sizes are multiples of 128, also the rows of each expert (`RowMap`), so that nothing waits for the counts.
"""

from __future__ import annotations

import deep_gemm
import torch
from torch import Tensor

from megatron_glm.ops.fp8 import Blocks
from megatron_glm.ops.fp8_casts import columns_of, rows_of
from megatron_glm.ops.fp8_products import Fp8Products
from megatron_glm.ops.triton import fp8 as casts

RECIPE = (1, 1, 128)  # of a weight's gradient: both operands have a scale for each row and 128 numbers of the sum


class DeepGemmProducts(Fp8Products):
    """bf16 tensors on a GPU; weights and their blocks as `Fp8Products` has them."""

    takes_casts = True

    def cast_weight(self, weight: Tensor, dtype: torch.dtype, into: Blocks | None = None) -> Blocks:
        room = None  # the kernel rounds a master to bf16 itself
        if into is not None and into.transposed is not None:
            room = into.values, into.scales, *into.transposed
        values, scales, *transposed = casts.cast_blocks(weight, room)
        return into or Blocks(values, scales, (transposed[0], transposed[1]))

    def output(self, x: Tensor, weight: Tensor, ends: Tensor | None = None) -> Tensor:
        blocks = self.blocks_of(weight)
        return _multiply(rows_of(x), (blocks.values, blocks.scales), ends)

    def input_gradient(self, gradient: Tensor, weight: Tensor, ends: Tensor | None = None) -> Tensor:
        rows = rows_of(gradient, columns_too=self.weight_gradients and ends is None)
        return _multiply(rows, self.blocks_of(weight).for_gradients(), ends)

    def add_in_fp8(self, total: Tensor | None, gradient: Tensor, x: Tensor) -> Tensor:
        if total is None:
            total = torch.zeros(gradient.shape[1], x.shape[1], device=x.device)
        if len(x):
            deep_gemm.fp8_gemm_nt(columns_of(gradient), columns_of(x), total, c=total, recipe=RECIPE)
        return total


def _multiply(rows: tuple[Tensor, Tensor], weight: tuple[Tensor, Tensor], ends: Tensor | None) -> Tensor:
    """rows [t, k], weight [n, k] or [e, n, k] -> rows @ weight.T [t, n] bf16; rows past the last end are undefined."""
    out = torch.empty(len(rows[0]), weight[0].shape[-2], dtype=torch.bfloat16, device=rows[0].device)
    if not len(out):
        return out
    if ends is None:
        deep_gemm.fp8_gemm_nt(rows, weight, out)
    else:
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(rows, weight, out, ends, use_psum_layout=True)
    return out
