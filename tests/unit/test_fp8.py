"""FP8 block quantisation: the scale multiplies, and the last blocks are ragged."""

from __future__ import annotations

import pytest
import torch

from megatron_glm.checkpoint.fp8 import dequantize, scale_shape

SHAPE, BLOCK = (576, 200), (128, 128)


def quantized(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(SHAPE, generator=generator).to(torch.float8_e4m3fn)
    return weight, torch.rand(scale_shape(SHAPE, BLOCK), generator=generator) + 0.5


def reference(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    full = scale.repeat_interleave(BLOCK[0], 0).repeat_interleave(BLOCK[1], 1)
    return (weight.float() * full[: SHAPE[0], : SHAPE[1]]).to(dtype)


def test_scale_shape_rounds_up():
    assert scale_shape(SHAPE, BLOCK) == (5, 2)
    assert scale_shape((8, 256, 129), BLOCK) == (8, 2, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_whole_weight(dtype: torch.dtype):
    weight, scale = quantized()
    assert torch.equal(dequantize(weight, scale, BLOCK, dtype), reference(weight, scale, dtype))


@pytest.mark.parametrize("first, stop", [(0, 1), (100, 300), (127, 129), (512, 576), (448, 576)])
def test_rows_take_the_scales_of_their_place(first: int, stop: int):
    weight, scale = quantized()
    rows = dequantize(weight[first:stop], scale, BLOCK, torch.float32, first)
    assert torch.equal(rows, reference(weight, scale, torch.float32)[first:stop])
