"""The dense products in FP8 by Transformer Engine: its casts of activations and its matrix product, cuBLASLt.

The experts stay with DeepGEMM: Transformer Engine's grouped product waits for the counts. Weights are cast as for
DeepGEMM, so that what a checkpoint or a frozen base holds in FP8 is taken as it is.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.cpp_extensions import general_gemm
from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
from transformer_engine.pytorch.tensor.storage.float8_blockwise_tensor_storage import Float8BlockwiseQTensorStorage

from megatron_glm.ops.fp8 import Blocks
from megatron_glm.ops.fp8_deepgemm import DeepGemmProducts

E4M3 = DType.kFloat8E4M3
ALIGNED = 4  # scales in a line of a weight's, as cuBLASLt wants them


class TransformerEngineProducts(DeepGemmProducts):
    """bf16 tensors of a multiple of 128 rows on a GPU."""

    takes_casts = False

    def output(self, x: Tensor, weight: Tensor, ends: Tensor | None = None) -> Tensor:
        if ends is not None:
            return super().output(x, weight, ends)
        operands = _weight(self.blocks_of(weight)), _rows()(x.contiguous())
        return general_gemm(*operands, out_dtype=torch.bfloat16, layout="TN", use_split_accumulator=True)[0]

    def input_gradient(self, gradient: Tensor, weight: Tensor, ends: Tensor | None = None) -> Tensor:
        if ends is not None:
            return super().input_gradient(gradient, weight, ends)
        operands = _weight(self.blocks_of(weight)), _rows()(gradient.contiguous())
        options = {"out_dtype": torch.bfloat16, "grad": True, "use_split_accumulator": True}
        return general_gemm(*operands, layout="NN", **options)[0]

    def add_in_fp8(self, total: Tensor | None, gradient: Tensor, x: Tensor) -> Tensor:
        if total is None:
            total = torch.zeros(gradient.shape[1], x.shape[1], device=x.device)
        operands = _columns()(x.contiguous()), _columns()(gradient.contiguous())
        options = {"out_dtype": torch.float32, "grad": True, "use_split_accumulator": True}
        general_gemm(*operands, layout="NT", out=total, accumulate=True, **options)
        return total


@cache
def _rows() -> Any:
    return _quantizer(rowwise=True, columnwise=False)


@cache
def _columns() -> Any:
    return _quantizer(rowwise=False, columnwise=True)


def _quantizer(block_scaling_dim: int = 1, **orientation: bool) -> Any:
    """With the scales of `ops/fp8.py`; Transformer Engine's own default is powers of 2."""
    return Float8BlockQuantizer(E4M3, force_pow_2_scales=False, block_scaling_dim=block_scaling_dim, **orientation)


def _weight(blocks: Blocks) -> Any:
    values, scales = blocks.for_gradients()
    return Float8BlockwiseQTensorStorage(
        blocks.values.view(torch.uint8), _padded(blocks.scales), values.view(torch.uint8), _padded(scales), E4M3,
        _quantizer(2, rowwise=True, columnwise=True), True, fake_dtype=torch.bfloat16,
    )  # fmt: skip


def _padded(scales: Tensor) -> Tensor:
    return F.pad(scales, (0, -scales.shape[1] % ALIGNED))
