"""RMSNorm's kernels, alone and behind the residual addition, against the formula in plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="a CPU-only torch brings no Triton")
from megatron_glm.ops.triton.rmsnorm import add_rms_norm, rms_norm  # noqa: E402

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
EPS = 1e-5
SHAPES = [(1, 6144), (37, 6144), (600, 6144), (1000, 2048), (4500, 512), (70, 100), (3, 9000), (5, 64)]


@pytest.fixture(autouse=True)
def poisoned_memory():
    torch.manual_seed(0)
    torch.full((1 << 24,), float("nan"), device=DEVICE)  # what is allocated next holds NaN


def reference(x: Tensor, weight: Tensor) -> Tensor:
    """In fp32 with x's rounding of the normalised rows, through which the gradient passes unchanged."""
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
    return weight * (normed + (normed.bfloat16().float() - normed).detach())


def strided(rows: int, dim: int) -> Tensor:
    """bf16 rows that are part of wider ones, with NaN beside them."""
    wide = torch.full((rows, dim + 64), float("nan"))
    wide[:, :dim] = torch.randn(rows, dim) * torch.rand(rows, 1) * 3
    return wide.bfloat16().to(DEVICE)[:, :dim]


def leaves(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(t.detach().requires_grad_() for t in tensors)


def assert_close(value: Tensor, expected: Tensor, steps: float = 3) -> None:
    """Each element within `steps` halves of bf16's last place, and what cancellation leaves of the largest.

    One is a rounding; a normalised element on the edge between two roundings adds two.
    """
    assert value.dtype == torch.bfloat16 and value.shape == expected.shape
    difference = (value.detach().float().cpu() - expected.detach().cpu()).abs()
    allowed = 1.01 * steps * 2.0**-8 * expected.detach().abs().cpu()
    if expected.numel():
        allowed = allowed + 2e-3 * expected.detach().abs().max().cpu()
    assert (difference <= allowed).all(), (difference - allowed).max()


@pytest.mark.parametrize("rows, dim", SHAPES)
def test_the_norm_and_its_gradients(rows, dim):
    x, weight = leaves(strided(rows, dim), (1 + torch.randn(dim) / 2).bfloat16().to(DEVICE))
    grad = strided(rows, dim)
    expected_x, expected_weight = leaves(x.float(), weight.float())
    expected = reference(expected_x, expected_weight)
    expected.backward(grad.float())
    out = rms_norm(x, weight, EPS)
    out.backward(grad)
    assert_close(out, expected)
    assert_close(x.grad, expected_x.grad, steps=1)
    assert_close(weight.grad, expected_weight.grad)


@pytest.mark.parametrize("rows, dim", SHAPES)
def test_the_addition_its_norm_and_one_gradient_for_both(rows, dim):
    x, added, weight = leaves(strided(rows, dim), strided(rows, dim), torch.randn(dim).bfloat16().to(DEVICE))
    grad_total, grad = strided(rows, dim), strided(rows, dim)
    total, out = add_rms_norm(x, added, weight, EPS)
    assert torch.equal(total, x + added)
    expected_total, expected_weight = leaves(total.float(), weight.float())
    expected = reference(expected_total, expected_weight)
    torch.autograd.backward((expected_total * 1, expected), (grad_total.float(), grad.float()))
    torch.autograd.backward((total, out), (grad_total, grad))
    assert_close(out, expected)
    assert_close(x.grad, expected_total.grad, steps=1)
    assert torch.equal(x.grad, added.grad)
    assert_close(weight.grad, expected_weight.grad)


def test_the_weight_gradient_is_the_same_every_time():
    x, weight = leaves(strided(4500, 512), torch.randn(512).bfloat16().to(DEVICE))
    grad = strided(4500, 512)
    first, again = (torch.autograd.grad(rms_norm(x, weight, EPS), weight, grad)[0] for _ in range(2))
    assert torch.equal(first, again)


def test_no_rows_give_a_weight_gradient_of_zero():
    x, weight = leaves(strided(0, 512), torch.randn(512).bfloat16().to(DEVICE))
    total, out = add_rms_norm(x, x, weight, EPS)
    (total.sum() + out.sum() + rms_norm(x, weight, EPS).sum()).backward()
    assert x.grad.shape == (0, 512) and not weight.grad.any()


def test_what_autograd_keeps_is_the_rows_and_one_number_each():
    x, weight = leaves(strided(300, 2048), torch.randn(2048).bfloat16().to(DEVICE))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.nbytes) or t, lambda t: t):
        rms_norm(x, weight, EPS)
    assert sorted(kept) == [4 * 300, 2 * 2048, 2 * 300 * 2048]


def test_rows_past_two_to_the_31_elements():
    rows = 2**31 // 6144 + 10
    x = torch.ones(rows, 6144, device=DEVICE, dtype=torch.bfloat16)
    weight = torch.full((6144,), 2.0, device=DEVICE, dtype=torch.bfloat16)
    assert rms_norm(x, weight, 0.0)[-1].eq(2).all()
