"""FP8 on a Hopper GPU: the casts have the bits of the torch definition, the products are its products."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from megatron_glm.ops import fp8
from megatron_glm.ops.experts import grouped_mlp
from megatron_glm.ops.fp8_products import Fp8Products
from megatron_glm.ops.grad_sum import AS_THEY_ARE
from megatron_glm.ops.permute import RowMap, permute, unpermute

pytestmark = pytest.mark.gpu
NAN = float("nan")
randn = partial(torch.randn, device="cuda", dtype=torch.bfloat16)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def kernels():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    pytest.importorskip("deep_gemm")
    from megatron_glm.ops.fp8_deepgemm import DeepGemmProducts

    return DeepGemmProducts


@pytest.fixture(params=["deepgemm", "te"])
def dense(request, kernels):
    if request.param == "deepgemm":
        return kernels
    pytest.importorskip("transformer_engine_torch")
    from megatron_glm.ops.fp8_te import TransformerEngineProducts

    return TransformerEngineProducts


def error(value: Tensor, reference: Tensor) -> float:
    return ((value.float() - reference.float()).norm() / reference.float().norm().clamp_min(1e-20)).item()


def same(ours: tuple[Tensor, Tensor], reference: tuple[Tensor, Tensor]) -> None:
    assert torch.equal(ours[0].view(torch.uint8), reference[0].view(torch.uint8))
    assert torch.equal(ours[1], reference[1])


@pytest.mark.parametrize("rows", [1, 3, 128, 130, 4096])
def test_casts_of_rows_have_the_bits_of_the_definition(rows):
    from megatron_glm.ops.triton import fp8 as casts

    x = (randn(rows, 512) * 10.0 ** torch.randint(-30, 30, (rows, 1), device="cuda")).bfloat16()
    x[0] = 0
    x[-1, 130], x[-1, 260] = torch.finfo(torch.bfloat16).max, 1e-40
    along, across = casts.cast_both(x)
    same(along, fp8.quantize(x, fp8.ROW))
    padded = torch.nn.functional.pad(x, (0, 0, 0, -rows % 128))
    same(across, fp8.quantize(padded.T.contiguous(), fp8.ROW))
    same(casts.cast_rows(x), along)
    rows_again = casts.uncast_rows(along[0], along[1].contiguous(), torch.bfloat16)
    assert torch.equal(rows_again, fp8.dequantize(*along, fp8.ROW, torch.bfloat16))
    same(casts.cast_rows(rows_again), along)
    same(casts.cast_columns(x), across)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_casts_of_weights_have_the_bits_of_the_definition(dtype):
    from megatron_glm.ops.triton import fp8 as casts

    w = torch.randn(3, 256, 640, device="cuda", dtype=dtype)
    w[1, :128, :128] = 0
    values, scales, *across = casts.cast_blocks(w)
    same((values, scales), fp8.quantize(w.bfloat16()))
    same((across[0], across[1]), fp8.quantize(w.bfloat16().transpose(1, 2).contiguous()))
    values.view(torch.uint8).fill_(1)
    casts.cast_blocks(w, (values, scales, *across))
    same((values, scales), fp8.quantize(w.bfloat16()))


@pytest.mark.parametrize("width", [256, 2048, 2304])
def test_kernels_that_write_a_tensor_cast_it_as_the_cast_does(width):
    from megatron_glm.ops.fp8_casts import rows_of
    from megatron_glm.ops.swiglu import swiglu, weighted_swiglu, weighted_swiglu_backward
    from megatron_glm.ops.triton.fp8 import cast_rows
    from megatron_glm.ops.triton.rmsnorm import add_rms_norm, rms_norm

    x, added, weight = randn(77, width), randn(77, width), randn(width)
    both, row_weights = randn(77, 2 * width), torch.rand(77, device="cuda")

    def written(cast: bool) -> Iterator[Tensor]:
        gradient, *others = weighted_swiglu_backward(x.clone(), both, row_weights, cast)
        yield gradient
        yield rms_norm(x, weight, 1e-5, cast)
        yield add_rms_norm(x, added, weight, 1e-5, cast)[1]
        yield swiglu(x, added, cast)
        yield weighted_swiglu(both, row_weights, cast)
        yield others[1]  # what the forward had returned

    for ours, plain in zip(written(True), written(False), strict=True):
        assert torch.equal(ours, plain)
        same(rows_of(ours), cast_rows(ours))


def test_a_cast_is_found_again_until_its_tensor_changes(monkeypatch):
    from megatron_glm.ops import fp8_casts
    from megatron_glm.ops.triton import fp8 as casts

    made = []
    original = casts.cast_rows
    monkeypatch.setattr(casts, "cast_rows", lambda x: made.append(x.shape) or original(x))
    x = randn(130, 256)
    first = fp8_casts.rows_of(x)
    assert fp8_casts.rows_of(x) is first and len(made) == 1
    x.add_(1)
    same(fp8_casts.rows_of(x), original(x))
    assert len(made) == 2


def test_moved_rows_are_cast_with_their_padding():
    from megatron_glm.ops.fp8_casts import rows_of
    from megatron_glm.ops.triton.fp8 import cast_rows

    ids, x, weights = torch.randint(-1, 5, (400, 3), device="cuda"), randn(400, 2304), torch.rand(400, 3, device="cuda")
    rows, plain = RowMap.build(ids, 6, 128), RowMap.build(ids, 6)
    torch.full((1 << 26,), NAN, device="cuda")  # what is allocated next holds NaN
    moved, row_weights = permute(x, weights, rows)
    used, slots = int(rows.counts.sum()), ids >= 0
    assert torch.equal(moved[rows.position[slots]], permute(x, weights, plain)[0][plain.position[slots]])
    assert moved[:used].count_nonzero() == moved[rows.position[slots]].count_nonzero()
    assert row_weights[:used].count_nonzero() == int(slots.sum())
    same(tuple(part[:used] for part in rows_of(moved)), tuple(part[:used] for part in cast_rows(moved)))


@pytest.mark.parametrize("tokens", [4096, 1000, 1])
@pytest.mark.parametrize(("inner", "outer"), [(6144, 2048), (2048, 16384), (256, 384)])
def test_dense_products(dense, tokens, inner, outer):
    if dense.__name__ == "TransformerEngineProducts" and tokens % 128:
        pytest.skip("takes multiples of 128 tokens")
    x, weight, gradient = randn(tokens, inner), randn(outer, inner) / 50, randn(tokens, outer)
    total, seen = torch.randn(outer, inner, device="cuda"), []
    for products in (Fp8Products(), dense(), AS_THEY_ARE):
        added = products.add_weight_gradient(total.clone(), gradient, x) - total
        y, dx = products.output(x, weight), products.input_gradient(gradient, weight)
        seen.append((y, dx, added, products.weight_gradient(gradient, x)))
    for reference, ours, plain in zip(*seen, strict=True):
        assert error(ours, reference) < 5e-3
        assert error(ours, plain) < 5e-2


@pytest.mark.parametrize("weight_gradients", [False, True])
@pytest.mark.parametrize("counts", [[256, 0, 128, 0, 384], [0, 0, 0, 0, 0], [1152, 0, 0, 0, 0], [0, 0, 0, 0, 128]])
def test_grouped_products_keep_the_tail_out(kernels, counts, weight_gradients):
    used, (experts, inner, outer) = sum(counts), (len(counts), 512, 384)
    ends = torch.tensor(counts, device="cuda").cumsum(0).int()
    x, weight, gradient = randn(1280, inner), randn(experts, outer, inner) / 20, randn(1280, outer)
    seen = []
    for products in (Fp8Products(weight_gradients), kernels(weight_gradients), AS_THEY_ARE):
        seen.append(
            (
                products.output(x, weight, ends)[:used],
                products.input_gradient(gradient, weight, ends)[:used],
                products.weight_gradient(gradient, x, ends),
            )
        )
        x[used:] = gradient[used:] = NAN
        torch.full((1 << 26,), NAN, device="cuda")  # what is allocated next holds NaN
    for reference, ours, plain in zip(*seen, strict=True):
        assert ours.isfinite().all() and error(ours, reference) < 8e-3 and error(ours, plain) < 5e-2


def test_experts_and_their_rows(kernels):
    """One token, no token, all tokens of an expert; slots without one. Padding and memory that holds NaN stay out."""
    experts, tokens, hidden, width = 5, 300, 256, 128
    ids = torch.randint(1, 4, (tokens, 2))
    ids[:, 1] = torch.where(ids[:, 1] == ids[:, 0], -1, ids[:, 1])
    ids[7, 0], ids[8] = 4, -1
    x, weights, grad = torch.randn(tokens, hidden), torch.rand(tokens, 2), torch.randn(tokens, hidden)
    matrices = torch.randn(experts, 2 * width, hidden) / 16, torch.randn(experts, hidden, width) / 11
    results = []
    for device, products, multiple in (("cpu", Fp8Products(False), 1), ("cuda", kernels(False), 128)):
        torch.full((1 << 26,), NAN, device="cuda")
        leaves = [y.to(device).bfloat16().requires_grad_() for y in (x, *matrices)]
        weight = weights.detach().to(device).requires_grad_()
        rows = RowMap.build(ids.to(device), experts, multiple)
        moved, row_weights = permute(leaves[0], weight, rows)
        out = unpermute(grouped_mlp(moved, row_weights, rows.counts, *leaves[1:], products), rows)
        out.backward(grad.to(device).bfloat16())
        results.append([y.detach().cpu() for y in (out, *(leaf.grad for leaf in (*leaves, weight)))])
    for reference, ours in zip(*results, strict=True):
        assert ours.isfinite().all() and error(ours, reference) < 2e-2


@pytest.mark.parametrize("shape", [(3, 2, 256, 384), (2, 1, 200, 130), (128, 128)])
def test_what_blocks_stand_for(shape):
    """Experts that are held in FP8: the same bits as on a CPU."""
    from megatron_glm.ops.triton.fp8 import uncast_blocks

    values, scales = fp8.quantize(randn(*shape))
    for dtype in (torch.bfloat16, torch.float32):
        expected = fp8.Blocks(values.cpu(), scales.cpu()).whole(dtype)
        assert torch.equal(uncast_blocks(values, scales, dtype).cpu(), expected)
