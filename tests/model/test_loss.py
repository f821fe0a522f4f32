"""The chunked cross entropy against torch's, and what it never allocates."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_glm.parallel.vocab import Prediction, VocabParallelHead
from tests.helpers.reference import single_groups

T, D, V = 64, 24, 96


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operator returns, views aside."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor) and not func.is_view]
        self.elements = max(self.elements, *sizes, 0)
        return out


def loss_of(head, hidden, labels, chunk_size, scale=1.0):
    return head([Prediction(hidden, labels, scale)], chunk_size)[0][0]


def case(dtype=torch.float32, rows=T):
    generator = torch.Generator().manual_seed(0)
    head = VocabParallelHead(V, D, single_groups().tp)
    head.weight.data = torch.randn(V, D, generator=generator).to(dtype)
    hidden = torch.randn(rows, D, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, V, (rows,), generator=generator)
    labels[::3] = -100
    return head, hidden, labels


def reference(head, hidden, labels):
    """Loss sum and both gradients in fp64."""
    leaves = [x.detach().double().requires_grad_() for x in (hidden, head.weight)]
    loss = F.cross_entropy(leaves[0] @ leaves[1].T, labels, ignore_index=-100, reduction="sum")
    return loss.detach(), *torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("chunk_size", [1, 7, 32, T, 1000])
def test_equals_torchs_cross_entropy_for_any_chunk_size(chunk_size):
    head, hidden, labels = case()
    loss = loss_of(head, hidden, labels, chunk_size, 1 / 5)  # the caller divides by the global count
    loss.backward()
    expected, grad_hidden, grad_weight = reference(head, hidden, labels)
    assert loss.dtype == torch.float32 and loss.shape == ()
    torch.testing.assert_close(loss.double(), expected / 5, rtol=1e-6, atol=0)
    torch.testing.assert_close(hidden.grad.double(), grad_hidden / 5, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(head.weight.grad.double(), grad_weight / 5, rtol=1e-5, atol=1e-6)
    assert not hidden.grad[labels == -100].any()


def test_a_factor_after_the_loss_is_refused():
    head, hidden, labels = case()
    with pytest.raises(RuntimeError, match="goes into the head's Prediction"):
        (loss_of(head, hidden, labels, 7) / 5).backward()


def test_without_labels_loss_and_gradients_are_zero():
    head, hidden, labels = case()
    loss = loss_of(head, hidden, torch.full_like(labels, -100), 7)
    loss.backward()
    assert loss == 0 and not hidden.grad.any() and not head.weight.grad.any()


def test_large_logits_do_not_overflow():
    head, hidden, labels = case()
    head.weight.data *= 1000
    expected, grad_hidden, _ = reference(head, hidden, labels)
    loss = loss_of(head, hidden, labels, 7)
    loss.backward()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(hidden.grad.double(), grad_hidden, rtol=1e-3, atol=1e-1)


def test_the_logits_of_all_tokens_never_exist():
    head, hidden, labels = case()
    with Largest() as largest:
        loss_of(head, hidden, labels, 8).backward()
    assert 8 * V <= largest.elements <= max(V, T) * D < T * V
    with Largest() as largest:
        F.cross_entropy(hidden @ head.weight.T, labels)
    assert largest.elements == T * V  # the record sees what it is meant to see


def test_evaluation_computes_no_gradient():
    head, hidden, labels = case()
    with torch.no_grad(), Largest() as largest:
        loss = loss_of(head, hidden.detach(), labels, 8)
    assert not loss.requires_grad and loss == loss_of(head, hidden, labels, 8)
    assert largest.elements == 8 * V < V * D


def test_frozen_weights_and_frozen_inputs_get_none():
    head, hidden, labels = case()
    head.weight.requires_grad_(False)
    loss_of(head, hidden, labels, 7).backward()
    assert hidden.grad is not None and head.weight.grad is None
    head.weight.requires_grad_(True)
    loss_of(head, hidden.detach(), labels, 7).backward()
    assert head.weight.grad is not None


def test_bf16_weights_lose_one_rounding_however_small_the_chunks():
    """The weight's gradient adds up in fp32: in bf16 hundreds of chunks would lose the small ones."""
    head, hidden, labels = case(torch.bfloat16, rows=1024)
    expected, *wanted = reference(head, hidden, labels)
    for chunk_size in (1, 1024):
        head.weight.grad = hidden.grad = None
        loss = loss_of(head, hidden, labels, chunk_size)
        loss.backward()
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss.double(), expected, rtol=2e-3, atol=0)
        for got, want in zip((hidden.grad, head.weight.grad), wanted, strict=True):
            assert got.dtype == torch.bfloat16
            assert (got.double() - want).norm() / want.norm() < 2**-7


def test_logits_are_fp32_and_those_of_the_loss():
    head, hidden, labels = case()
    logits = head.logits(hidden)
    torch.testing.assert_close(
        loss_of(head, hidden, labels, 7), F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
    )
    head.weight.data = head.weight.data.bfloat16()
    assert head.logits(hidden.bfloat16()).dtype == torch.float32
