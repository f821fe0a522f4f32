"""FP8 by blocks: the scale multiplies, the last blocks are smaller, and the largest number of a block is exact."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from megatron_glm.ops import fp8_casts
from megatron_glm.ops.fp8 import BLOCK, ROW, SMALLEST_SCALE, dequantize, quantize, scale_shape

SHAPE = (576, 200)


def quantized(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(SHAPE, generator=generator).to(torch.float8_e4m3fn)
    return weight, torch.rand(scale_shape(SHAPE), generator=generator) + 0.5


def spread(scale: torch.Tensor, block: tuple[int, int], shape: tuple[int, ...]) -> torch.Tensor:
    full = scale.repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)
    return full[..., : shape[-2], : shape[-1]]


def test_scale_shape_rounds_up():
    assert scale_shape((576, 200)) == (5, 2)
    assert scale_shape((8, 256, 129)) == (8, 2, 2)
    assert scale_shape((7, 129), ROW) == (7, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_whole_weight(dtype: torch.dtype):
    weight, scale = quantized()
    expected = (weight.float() * spread(scale, BLOCK, SHAPE)).to(dtype)
    assert torch.equal(dequantize(weight, scale, BLOCK, dtype), expected)


@pytest.mark.parametrize("first, stop", [(0, 1), (100, 300), (127, 129), (512, 576), (448, 576), (5, 5)])
def test_rows_take_the_scales_of_their_place(first: int, stop: int):
    weight, scale = quantized()
    rows = dequantize(weight[first:stop], scale, first_row=first)
    assert torch.equal(rows, dequantize(weight, scale)[first:stop])


@pytest.mark.parametrize("block", [BLOCK, ROW, (16, 48)])
@pytest.mark.parametrize("shape", [SHAPE, (3, 130, 129), (1, 1), (0, 128), (2, 0, 64)])
def test_a_block_has_one_scale_and_small_errors(shape: tuple[int, ...], block: tuple[int, int]):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 10.0 ** torch.arange(shape[-1]).remainder(5)
    values, scales = quantize(x, block)
    assert values.shape == x.shape and scales.shape == scale_shape(shape, block) and scales.dtype == torch.float32
    error = (dequantize(values, scales, block) - x).abs()
    # half a step of 3 mantissa bits, or of the subnormals' step 2^-9
    bound = torch.maximum(x.abs() / 16, spread(scales, block, shape) * 2.0**-10) * (1 + 1e-5)
    assert (error <= bound).all()
    if not x.numel():
        return
    for matrix, scale in zip(x.view(-1, *shape[-2:]), scales.view(-1, *scales.shape[-2:]), strict=True):
        for i, j in ((0, 0), (-1, -1)):
            rows = matrix[: block[0]] if i == 0 else matrix[(len(scale) - 1) * block[0] :]
            part = rows[:, : block[1]] if j == 0 else rows[:, (scale.shape[1] - 1) * block[1] :]
            assert scale[i, j] == part.abs().max() / 448


def test_zeros_stay_zero_and_tiny_numbers_stay_exact():
    x = torch.zeros(2, 300)
    x[1, 299] = 1e-30  # a gradient that is divided by millions of tokens
    values, scales = quantize(x, ROW)
    assert torch.equal(values.float().nonzero(), torch.tensor([[1, 299]]))
    assert scales[0].tolist() == [SMALLEST_SCALE] * 3
    torch.testing.assert_close(dequantize(values, scales, ROW)[1, 299], x[1, 299], rtol=1e-6, atol=0)


def test_what_is_not_finite_shows_in_its_scale_alone():
    x = torch.ones(2, 256)
    x[0, 3], x[1, 200] = float("nan"), float("inf")
    assert quantize(x, ROW)[1].isfinite().tolist() == [[False, True], [True, False]]


def test_casts_live_as_long_as_the_last_few_tensors_without_the_garbage_collector(monkeypatch):
    """Memory of a GPU does not start it: casts that wait for it stay for the whole forward."""
    monkeypatch.setattr(fp8_casts, "_kernels", lambda: SimpleNamespace(cast_rows=lambda x: quantize(x, ROW)))
    fp8_casts.forget_casts()
    gc.disable()
    try:
        tensors = [torch.randn(2, 128) for _ in range(5)]
        casts = [weakref.ref(fp8_casts.rows_of(x)[0]) for x in tensors]
        assert [cast() is not None for cast in casts] == [False, False, True, True, True]
        assert fp8_casts.rows_of(tensors[4])[0] is casts[4]()
        del tensors[3]
        assert casts[3]() is None
        fp8_casts.forget_casts()
        assert not any(cast() is not None for cast in casts)
    finally:
        gc.enable()
