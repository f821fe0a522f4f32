"""The Triton kernels of the feed-forwards, one by one, against the plain torch that defines them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_glm.ops import permute, routing
from megatron_glm.ops import swiglu as plain

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
NAN = float("nan")
ROUNDING = 5e-3  # of bf16


@pytest.fixture(autouse=True)
def poisoned():
    """What torch.empty gives holds NaN, and the largest integer."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3, device=DEVICE).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def kernels():
    """Import on a machine that has Triton."""
    from megatron_glm.ops.triton import permute as fused
    from megatron_glm.ops.triton import router, swiglu

    return swiglu, router, fused


def close(got: Tensor, want: Tensor, limit: float) -> None:
    got, want = got.detach().double().cpu(), want.detach().double().cpu()
    assert got.shape == want.shape and got.isfinite().all()
    assert (got - want).norm() <= limit * want.norm()


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape).to(dtype).to(DEVICE)


@pytest.mark.parametrize("rows, width", [(5, 2048), (3, 2500), (7, 24), (0, 64)])
def test_gated_product_and_its_gradients(rows, width):
    swiglu, *_ = kernels()
    gate, up, grad = (normal(rows, width) for _ in range(3))
    leaves = [x.float().requires_grad_() for x in (gate, up)]
    expected = F.silu(leaves[0]) * leaves[1]
    close(swiglu.swiglu(gate, up), expected, ROUNDING)
    grads = torch.empty_like(gate), torch.empty_like(up)
    swiglu.swiglu_backward(grad, gate, up, *grads)
    for got, want in zip(grads, torch.autograd.grad(expected, leaves, grad.float()), strict=True):
        close(got, want, ROUNDING)


@pytest.mark.parametrize("rows, width, tail", [(5, 2048, 2), (3, 2500, 0), (7, 24, 7), (0, 64, 0)])
def test_weighted_product_and_its_gradients(rows, width, tail):
    """Tail rows hold NaN, which stays in them; the product that the backward computes again has the forward's bits."""
    swiglu, *_ = kernels()
    gate_up, weights, grad = normal(rows, 2 * width), normal(rows, dtype=torch.float32), normal(rows, width)
    used = rows - tail
    gate_up[used:] = weights[used:] = grad[used:] = NAN
    leaves = [x[:used].float().requires_grad_() for x in (gate_up, weights)]
    expected = plain.weighted_swiglu_torch(*leaves)
    wanted = torch.autograd.grad(expected, leaves, grad[:used].float())

    product = swiglu.swiglu(*gate_up.chunk(2, dim=-1), weights)
    close(product[:used], expected, ROUNDING)
    grad_gate_up = torch.empty_like(gate_up)
    grad_weights = swiglu.weighted_backward(grad, *gate_up.chunk(2, dim=-1), weights, *grad_gate_up.chunk(2, dim=-1))
    assert torch.equal(grad[:used], product[:used])
    close(grad_gate_up[:used], wanted[0], ROUNDING)
    close(grad_weights[:used], wanted[1], 1e-5)


@pytest.mark.parametrize("tokens, slots, groups", [(90, 4, 6), (33, 8, 256), (64, 8, 70), (3, 1, 1), (0, 8, 32)])
def test_rows_are_sorted_by_key_then_by_token(tokens, slots, groups):
    *_, fused = kernels()
    key = torch.randint(-1, groups, (tokens, slots))
    key[: tokens // 8] = -1
    expected = permute.RowMap.build(key, groups)
    position, counts = fused.place(key.to(DEVICE), groups)
    assert torch.equal(position.cpu(), expected.position) and torch.equal(counts.cpu(), expected.counts)


@pytest.mark.parametrize("dim", [6144, 100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_row_movements(dtype, dim):
    """Slots without a row are not read, and rows without a slot not written."""
    *_, fused = kernels()
    key = torch.randint(-1, 6, (20, 4))
    key[:3] = -1
    rows = permute.RowMap.build(key, 6)
    used, position = int(rows.counts.sum()), rows.position.to(DEVICE)
    x, weights = torch.randn(20, dim).to(dtype), torch.rand(20, 4)
    there, row_weights = permute.permute(x, weights, rows)
    moved, moved_weights = fused.copy_rows(x.to(DEVICE), weights.to(DEVICE), position, rows.size)
    assert torch.equal(moved[:used].cpu(), there[:used]) and moved[used:].isnan().all()
    assert torch.equal(moved_weights[:used].cpu(), row_weights[:used]) and moved_weights[used:].isnan().all()
    back, slot_weights = fused.sum_rows(moved, moved_weights, position)
    close(back, permute.accumulate(there, rows), ROUNDING if dtype == torch.bfloat16 else 1e-6)
    assert torch.equal(slot_weights.cpu(), weights.masked_fill(key < 0, 0)) and not back[:3].any()
    assert torch.equal(fused.sum_rows(moved, None, position)[0], back)
    assert fused.copy_rows(x[:0].to(DEVICE), weights[:0].to(DEVICE), position[:0], 0)[0].shape == (0, dim)
    assert fused.sum_rows(moved[:0], moved_weights[:0], position[:0])[1].shape == (0, 4)


@pytest.mark.parametrize("experts, k", [(256, 8), (32, 8), (300, 3), (5, 5)])
def test_best_experts_with_ties(experts, k):
    _, router, _ = kernels()
    choice = torch.randint(-3, 4, (40, experts)) / 4  # many ties
    choice[0], choice[1], choice[2, 1::2] = 0.0, torch.randn(experts), -0.0
    choice[3] = torch.tensor([float("-inf"), 1.0]).repeat(experts)[:experts]
    choice[4, 2] = NAN
    assert torch.equal(router.best(choice.to(DEVICE), k).cpu(), routing.select_experts(choice, k, 1, 1))
    assert router.best(choice[:0].to(DEVICE), k).shape == (0, k)


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("experts, k", [(256, 8), (32, 8), (12, 3)])
def test_weights_of_the_chosen_and_all_gradients(experts, k, normalise):
    _, router, _ = kernels()
    x, weight = normal(37, 64), normal(experts, 64) / 8
    ids = torch.rand(37, experts).topk(k).indices.to(DEVICE)
    leaves = [y.double().requires_grad_() for y in (x, weight)]
    logits = leaves[0] @ leaves[1].t()
    expected = torch.sigmoid(logits).gather(1, ids)
    if normalise:
        expected = expected / expected.sum(-1, keepdim=True)
    expected, grad = expected * 2.5, normal(37, k, dtype=torch.float32)
    of_logits, *wanted = torch.autograd.grad(expected, (logits, *leaves), grad.double())

    _, weights = router.expert_weights(logits.float(), ids, normalise, 2.5)
    close(weights, expected, 1e-6)
    scores = torch.sigmoid(logits.float()).gather(1, ids)
    split = router.split_gradient(grad, ids, scores, experts, normalise, 2.5)
    close(split[:, :experts].double() + split[:, experts:].double(), of_logits, 2e-5)
    inputs = [y.clone().requires_grad_() for y in (x, weight)]
    weights = routing._ExpertWeights.apply(*inputs, routing._product(x, weight.t()), ids, normalise, 2.5)
    close(weights, expected, 1e-6)
    for got, want in zip(torch.autograd.grad(weights, inputs, grad), wanted, strict=True):
        close(got, want, ROUNDING)
        assert got.dtype == torch.bfloat16
