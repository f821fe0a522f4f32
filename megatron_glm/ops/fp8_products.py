"""The products of weights in FP8: the plain torch definition, which the kernels of a GPU are held to.

Activations and gradients are cast in rows of 1 x 128 along the sum of the product, weights in blocks of 128 x 128, and
the products of what they stand for are summed in fp32 (DeepSeek-V3, section 3.3). A weight is cast from its values in
the dtype that computes, so that every layout casts the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_glm.ops.fp8 import BLOCKS, ROW, Blocks, dequantize, quantize
from megatron_glm.ops.grad_sum import Products, groups_of


@dataclass(frozen=True)
class Fp8Products(Products):
    """The torch definition, on any device and in any size.

    weight_gradients: sum them in FP8, too, with rows of 1 x 128 along the tokens; else as they are.
    blocks: of the weight, where it is held in FP8 (`bound`); else it is cast at each product.
    """

    weight_gradients: bool = True
    blocks: Blocks | None = None

    def bound(self, weight: Tensor) -> Products:
        blocks = getattr(weight, BLOCKS, None)
        return self if blocks is None else replace(self, blocks=blocks)

    def cast_weight(self, weight: Tensor, dtype: torch.dtype, into: Blocks | None = None) -> Blocks:
        """The blocks of a weight [..., out, in], rounded to the dtype that computes before.

        into: whose memory they take, if it is given.
        """
        blocks = Blocks.of(weight.to(dtype))
        if into is None:
            return blocks
        into.values.copy_(blocks.values)
        into.scales.copy_(blocks.scales)
        return into

    def blocks_of(self, weight: Tensor) -> Blocks:
        return self.cast_weight(weight, weight.dtype) if self.blocks is None else self.blocks

    def output(self, x: Tensor, weight: Tensor, ends: Tensor | None = None) -> Tensor:
        return super().output(_seen(x), self.blocks_of(weight).whole(), ends).to(x.dtype)

    def input_gradient(self, gradient: Tensor, weight: Tensor, ends: Tensor | None = None) -> Tensor:
        return super().input_gradient(_seen(gradient), self.blocks_of(weight).whole(), ends).to(gradient.dtype)

    def weight_gradient(self, gradient: Tensor, x: Tensor, ends: Tensor | None = None) -> Tensor:
        if not self.weight_gradients:
            return super().weight_gradient(gradient, x, ends)
        if ends is None:
            return self.add_in_fp8(None, gradient, x)
        pairs = zip(groups_of(gradient, ends)[:-1], groups_of(x, ends)[:-1], strict=True)
        return torch.stack([self.add_in_fp8(None, g, rows) for g, rows in pairs])

    def add_weight_gradient(self, total: Tensor | None, gradient: Tensor, x: Tensor) -> Tensor:
        if not self.weight_gradients:
            return super().add_weight_gradient(total, gradient, x)
        return self.add_in_fp8(total, gradient, x)

    def add_in_fp8(self, total: Tensor | None, gradient: Tensor, x: Tensor) -> Tensor:
        """`add_weight_gradient` as a product in FP8."""
        product = _seen(gradient.T) @ _seen(x.T).T
        return product if total is None else total.add_(product)


@dataclass(frozen=True)
class HeldInFp8(Products):
    """Products of a frozen weight that is held in FP8, in the precision of the rows: what it stands for is made for
    each product, and kept by none."""

    blocks: Blocks | None = None

    def bound(self, weight: Tensor) -> Products:
        return replace(self, blocks=getattr(weight, BLOCKS))

    def output(self, x: Tensor, weight: Tensor, ends: Tensor | None = None) -> Tensor:
        return super().output(x, self._whole(x), ends)

    def input_gradient(self, gradient: Tensor, weight: Tensor, ends: Tensor | None = None) -> Tensor:
        return super().input_gradient(gradient, self._whole(gradient), ends)

    def _whole(self, rows: Tensor) -> Tensor:
        blocks = self.blocks
        assert blocks is not None, "`bound` gives them"
        if rows.is_cuda:
            from megatron_glm.ops.triton.fp8 import uncast_blocks  # needs Triton, which a CPU-only torch has not

            return uncast_blocks(blocks.parts, blocks.scales, rows.dtype).view(blocks.values.shape)
        return blocks.whole(rows.dtype)


def _seen(x: Tensor) -> Tensor:
    """x [n, k] as an FP8 product sees it, in fp32."""
    return dequantize(*quantize(x, ROW), ROW)
