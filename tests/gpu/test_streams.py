"""Work on a second stream gives the same bits as work in turn, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from megatron_glm.parallel.streams import beside

pytestmark = pytest.mark.gpu
SIZE, CYCLES = 2048, 2_000_000  # about a millisecond


def run(active: bool, x: Tensor, beside_it: nn.Module, main: nn.Module) -> list[Tensor]:
    x = x.detach().requires_grad_()
    for module in (beside_it, main):
        module.zero_grad()
    start = x * 1.5
    torch.cuda._sleep(CYCLES)  # what is read too early is not there yet
    start = start + 1
    result = beside(active, beside_it, start)
    out = main(start)
    torch.cuda._sleep(CYCLES)
    total = out + result()
    del out, result
    reused = torch.full_like(total, float("nan"))  # memory that was given away too early
    grad = torch.ones_like(total) * 0.5
    torch.cuda._sleep(CYCLES)
    total.backward(grad)
    # as data parallelism does, on this stream and before the backward's own wait for all others
    gradients = [p.grad.clone() for module in (beside_it, main) for p in module.parameters()]
    assert reused.isnan().all()
    return [total.detach(), x.grad, *gradients]


def test_the_same_bits_beside_and_in_turn():
    torch.manual_seed(0)
    modules = [nn.Sequential(nn.Linear(SIZE, SIZE), nn.SiLU(), nn.Linear(SIZE, SIZE)).cuda() for _ in range(2)]
    for _ in range(20):
        x = torch.randn(SIZE, SIZE, device="cuda")
        expected, found = (run(active, x, *modules) for active in (False, True))
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
