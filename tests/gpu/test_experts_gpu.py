"""The experts' kernels on CUDA: grouped GEMMs, the gated product and the row movements against plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_glm.ops.experts import grouped_mlp
from megatron_glm.ops.permute import RowMap, permute, unpermute

pytestmark = pytest.mark.gpu
NAN = float("nan")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def error(value: Tensor, reference: Tensor) -> float:
    difference = (value.detach().cpu().float() - reference.detach().cpu().float()).norm()
    return (difference / reference.detach().float().norm().cpu().clamp_min(1e-20)).item()


@pytest.mark.parametrize("counts", [[40, 0, 7, 1, 0, 80], [0, 0, 0, 0, 0, 0], [128, 0, 0, 0, 0, 0]])
def test_grouped_mlp_and_gradients(counts):
    """Empty experts, and tail rows that hold NaN and whose outputs stay out of everything."""
    used, hidden, width = sum(counts), 256, 128
    inputs = [torch.randn(150, hidden), torch.randn(6, 2 * width, hidden) / 16, torch.randn(6, hidden, width) / 11]
    grad, row_weights = torch.randn(150, hidden), torch.rand(150)
    references = [x.bfloat16().float().requires_grad_() for x in inputs]
    references.insert(1, row_weights.clone().requires_grad_())
    expected = grouped_mlp(*references[:2], torch.tensor(counts), *references[2:])
    expected[:used].backward(grad[:used].bfloat16().float())

    leaves = [x.bfloat16().cuda() for x in inputs]
    leaves.insert(1, row_weights.cuda())
    leaves[0][used:] = leaves[1][used:] = NAN
    leaves = [x.requires_grad_() for x in leaves]
    torch.full((1 << 26,), NAN, device="cuda")  # what is allocated next holds NaN
    out = grouped_mlp(*leaves[:2], torch.tensor(counts).cuda(), *leaves[2:])
    grad = grad.bfloat16().cuda()
    grad[used:] = NAN
    out.backward(grad)
    assert error(out[:used], expected[:used]) < 5e-3
    for leaf, reference in zip(leaves[:2], references[:2], strict=True):
        assert error(leaf.grad[:used], reference.grad[:used]) < 1e-2
    for leaf, reference in zip(leaves[2:], references[2:], strict=True):
        assert leaf.grad.isfinite().all() and error(leaf.grad, reference.grad) < 1e-2


@pytest.mark.parametrize("dim", [6144, 100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_row_movements_equal_the_plain_ones(dtype, dim):
    """Slots without a row are not read, and two runs have the same bits."""
    ids = torch.randint(-1, 6, (90, 4))
    ids[:3] = -1
    x, weights = torch.randn(90, dim).to(dtype), torch.rand(90, 4)
    grad = torch.randn(90, dim).to(dtype)
    results = []
    for device in ("cpu", "cuda", "cuda"):
        leaf, weight = (y.to(device).requires_grad_() for y in (x.clone(), weights.clone()))
        rows = RowMap.build(ids.to(device), 6)
        moved, row_weights = permute(leaf, weight, rows)
        moved = (moved * row_weights[:, None]).to(dtype)
        tail = torch.arange(len(moved), device=device) >= rows.counts.sum()
        out = unpermute(moved.masked_fill(tail[:, None], NAN), rows)
        out.backward(grad.to(device))
        results.append((out, leaf.grad, weight.grad))
    plain, first, second = results
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    for ours, reference in zip(first, plain, strict=True):
        assert error(ours, reference) < (1e-5 if dtype == torch.float32 else 5e-3)
    assert not first[0][:3].any() and not first[2][:3].any()


def test_rows_past_two_to_the_31_elements():
    tokens, dim = 45_000, 6144  # times 8 slots: 2.2e9 elements
    x = torch.randn(tokens, dim, device="cuda").bfloat16().requires_grad_()
    ids = torch.arange(8, device="cuda").repeat(tokens, 1)
    weights = torch.full((tokens, 8), 0.125, device="cuda").requires_grad_()
    rows = RowMap.build(ids, 8)
    moved, row_weights = permute(x, weights, rows)
    assert torch.equal(moved[-1], x[-1])
    out = unpermute(moved, rows)
    torch.autograd.backward((out, row_weights), (torch.full_like(out, 0.125), torch.arange(8.0 * tokens).cuda()))
    assert torch.equal(out, 8 * x)
    assert torch.equal(x.grad, torch.ones_like(x))
    assert weights.grad[-1].tolist() == [tokens * (k + 1) - 1.0 for k in range(8)]
