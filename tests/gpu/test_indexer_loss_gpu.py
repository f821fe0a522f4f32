"""Teacher and student of the indexer's loss on CUDA against the fp32 reference, and the indexer's gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_glm.ops import backends
from megatron_glm.ops.indexer_loss import attention_mass, selected_kl, student_log_probs

pytestmark = [
    pytest.mark.gpu,
    *(
        pytest.mark.skipif(bool(backends.lacking(name)), reason=f"needs {backends.lacking(name)}")
        for name in ("cudnn", "tilelang")
    ),
]
ROWS, SLOTS, SCALE = 2100, 2048, 256**-0.5


@pytest.fixture(autouse=True)
def loaded():
    backends.load("cudnn")
    backends.load("tilelang")
    torch.manual_seed(0)


def selection() -> Tensor:
    """Causal keys of one document, more than the slots in its last rows; then a row of padding."""
    slot = torch.arange(SLOTS, dtype=torch.int32, device="cuda")
    row = torch.arange(ROWS, dtype=torch.int32, device="cuda")
    first = (row + 1 - SLOTS).clamp(min=0).unsqueeze(1)
    idx = (first + slot).masked_fill(slot > row.unsqueeze(1), -1)
    idx[-1] = -1
    return idx


def error(value: Tensor, reference: Tensor) -> float:
    return ((value.float() - reference.float()).norm() / reference.float().norm()).item()


@pytest.mark.parametrize("backend", ["cudnn", "tilelang"])
@pytest.mark.parametrize("heads", [64, 32, 8, 128])
def test_teacher(heads, backend):
    q, kv, idx = (
        torch.randn(ROWS, heads, 576, device="cuda").bfloat16(),
        torch.randn(ROWS, 576, device="cuda"),
        selection(),
    )
    kv = kv.bfloat16()
    scores = torch.einsum("nhd,ud->nhu", q.float(), kv.float()) * SCALE
    seen = torch.zeros(ROWS, ROWS + 1, dtype=torch.bool, device="cuda")
    seen.scatter_(1, torch.where(idx < 0, ROWS, idx).long(), True)
    lse = scores.masked_fill(~seen[:, None, :ROWS], float("-inf")).logsumexp(-1)
    expected = attention_mass(q, kv, idx, lse, SCALE, "torch")
    found = attention_mass(q, kv, idx, lse, SCALE, backend)
    assert error(found, expected) < 2e-2 and not found[idx < 0].any()


def test_student_and_gradients():
    idx = selection()
    iq, ik = torch.randn(ROWS, 32, 128, device="cuda").bfloat16(), torch.randn(ROWS, 128, device="cuda").bfloat16()
    w = torch.randn(ROWS, 32, device="cuda") / 64
    teacher = torch.rand(ROWS, SLOTS, device="cuda").masked_fill(idx < 0, 0.0)
    teacher /= teacher.sum(-1, keepdim=True).clamp(min=1e-9)
    results = {}
    for backend in ("torch", "tilelang"):
        leaves = [x.clone().requires_grad_() for x in (iq, ik, w)]
        log_probs = student_log_probs(*leaves, idx, backend)
        loss = selected_kl(log_probs, teacher, 1e-3) / ROWS
        results[backend] = [log_probs.detach(), *torch.autograd.grad(loss, leaves)]
    for found, expected in zip(results["tilelang"], results["torch"], strict=True):
        assert found.isfinite().all() and error(found, expected) < 2e-2
