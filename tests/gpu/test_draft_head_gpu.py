"""On CUDA: the total variation of MTP steps in one pass over the logits, against plain torch, and in the whole head."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_glm.ops.total_variation import overlap, overlap_gradient
from megatron_glm.parallel.draft_head import DraftHead
from megatron_glm.parallel.vocab import Prediction
from tests.helpers.reference import single_groups

pytestmark = pytest.mark.gpu


def logits(rows: int, width: int, valid: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    both = torch.randn(2, rows, width, device="cuda") * 3
    both[1] = both[0] + 0.5 * both[1]
    both[:, :, valid:] = float("nan")  # columns of padding are never read
    return both.to(dtype).unbind()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "width", "valid"), [(1, 50, 50), (7, 50, 47), (33, 4096, 4096), (5, 38720, 38711)])
def test_one_pass_equals_plain_torch(rows, width, valid, dtype):
    p, q = logits(rows, width, valid, dtype)
    lses = [x[:, :valid].float().logsumexp(1) for x in (p, q)]
    factor = torch.randn(rows, device="cuda")
    factor[0] = 0
    plain = [x.cpu() for x in (p, lses[0], q, lses[1])]
    expected = overlap(*plain, valid)
    found = overlap(p, lses[0], q, lses[1], valid)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-5)
    wanted = overlap_gradient(*plain, expected[1], factor.cpu(), valid)
    made = overlap_gradient(p, lses[0], q, lses[1], expected[1].cuda(), factor, valid)
    assert made.data_ptr() == q.data_ptr()
    # exp of another library may put a probability on the other side of the other one: rare, and of equal ones
    differs = (made.cpu().float() - wanted.float()).abs() > 1e-5 + 1e-2 * wanted.float().abs()
    assert differs.float().mean() < 1e-4 and not made[:, valid:].any() and not made[0].any()


def test_the_head_equals_the_one_on_a_cpu():
    groups, found = single_groups(), []
    torch.manual_seed(0)
    weight, hidden = torch.randn(1000, 64) / 8, torch.randn(4, 96, 64)
    labels = torch.randint(0, 1000, (96,)).masked_fill(torch.rand(96) < 0.2, -100)
    for device in ("cpu", "cuda"):
        head = DraftHead(1000, 64, groups.tp, groups.cp).to(device)
        head.weight.data = weight.to(device)
        leaves = hidden.clone().to(device).requires_grad_()
        given = [Prediction(each, labels.to(device).roll(-i), 0.1, 0.3, i == 0) for i, each in enumerate(leaves)]
        losses, best = head(given, 50, best=True)
        torch.autograd.backward(losses)
        assert leaves.grad is not None
        found.append([*(x.cpu() for x in (torch.stack(losses).detach(), leaves.grad, best))])
    for cpu, gpu in zip(*found, strict=True):
        torch.testing.assert_close(gpu, cpu, rtol=1e-4, atol=1e-5)
