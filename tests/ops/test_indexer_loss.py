"""The indexer's loss against brute force in fp64, by value and gradient, with rows of one key, of none, and all -1."""

from __future__ import annotations

import weakref
from collections import Counter

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_glm.ops import indexer_loss
from megatron_glm.ops.indexer_loss import attention_mass, dense_kl, dense_mass, key_chunks, selected_kl
from megatron_glm.ops.indexer_loss import student_log_probs as student

T, HI, DI, H, C, K, SCALE = 24, 4, 8, 6, 10, 7, 0.3
LENGTHS = (13, 1, 8)  # and two rows of padding


def inputs(rows: int = T) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((rows, HI, DI), (T, DI), (rows, HI), (rows, H, C), (T, C))
    return [torch.randn(*shape, generator=generator) for shape in shapes]


def ranges() -> tuple[Tensor, Tensor]:
    start, end, begin = [0] * T, [0] * T, 0
    for length in LENGTHS:
        for i in range(begin, begin + length):
            start[i], end[i] = begin, i + 1
        begin += length
    return torch.tensor(start, dtype=torch.int32), torch.tensor(end, dtype=torch.int32)


def visible_mask() -> Tensor:
    start, end = ranges()
    return indexer_loss.visible_keys(start, end, slice(0, T))


def brute_force(mask: Tensor) -> tuple[Tensor, list[Tensor], Tensor, Tensor]:
    """KL, gradients of iq, ik, w by autograd, teacher [T, T] and lse [T, H], in fp64."""
    iq, ik, w, q, kv = (x.double() for x in inputs())
    leaves = [x.requires_grad_() for x in (iq, ik, w)]
    attention = (torch.einsum("thc,uc->thu", q, kv) * SCALE).masked_fill(~mask.unsqueeze(1), -torch.inf)
    teacher = attention.softmax(-1).nan_to_num(0.0).mean(1)
    scores = torch.einsum("th,thu->tu", w, torch.relu(torch.einsum("thd,ud->thu", iq, ik)))
    log_probs = torch.where(mask, scores.masked_fill(~mask, -1e30).log_softmax(-1), 0.0)
    loss = torch.where(mask, torch.special.xlogy(teacher, teacher) - teacher * log_probs, 0.0).sum()
    return loss.detach(), list(torch.autograd.grad(loss, leaves)), teacher, attention.logsumexp(-1)


def brute_force_recall() -> float:
    """Row by row: the attention on the K keys of the highest scores, over that on its own highest."""
    iq, ik, w, *_ = (x.double() for x in inputs())
    mask, total = visible_mask(), 0.0
    scores = torch.einsum("th,thu->tu", w, torch.relu(torch.einsum("thd,ud->thu", iq, ik)))
    for row, p in enumerate(brute_force(mask)[2].detach()):
        keys = mask[row].nonzero().flatten().tolist()
        if len(keys) > K:
            chosen = sorted(keys, key=lambda u: -scores[row, u])[:K]
            total += (p[chosen].sum() / p.sort(descending=True).values[:K].sum()).item()
    assert 2 < total < 7  # of seven rows
    return total


def selection() -> tuple[Tensor, Tensor]:
    """Indices [T, K] ascending with -1 at the tail, and the mask [T, T] of the same keys."""
    chosen = torch.full((T, K), -1, dtype=torch.int32)
    mask, generator = torch.zeros(T, T, dtype=torch.bool), torch.Generator().manual_seed(1)
    for row, (a, b) in enumerate(zip(*(x.tolist() for x in ranges()), strict=True)):
        keys = (torch.randperm(b - a, generator=generator)[:K] + a).sort().values
        chosen[row, : len(keys)] = keys.int()
        mask[row, keys] = True
    return chosen, mask


def close(ours: list[Tensor], expected: list[Tensor]) -> None:
    for value, reference in zip(ours, expected, strict=True):
        assert (value.double() - reference).norm() <= 1e-6 * reference.norm()


def sparse_loss(coefficient: float = 1.0) -> tuple[Tensor, list[Tensor]]:
    idx, mask = selection()
    lse = brute_force(mask)[3].float()
    iq, ik, w, q, kv = inputs()
    leaves = [x.requires_grad_() for x in (iq, ik, w)]
    teacher = attention_mass(q, kv, idx, lse, SCALE, "torch") / H
    loss = selected_kl(student(*leaves, idx, "torch"), teacher, coefficient)
    return loss.detach(), list(torch.autograd.grad(loss, leaves))


def dense_loss(coefficient: float = 1.0, parts: int = 1) -> tuple[Tensor, list[Tensor]]:
    start, end = ranges()
    lse = brute_force(visible_mask())[3].float()
    iq, ik, w, q, kv = inputs()
    leaves = [x.requires_grad_() for x in (iq, ik, w)]

    def teacher(chunk) -> Tensor:
        rows, keys = slice(*chunk[:2]), slice(*chunk[2:])
        visible = indexer_loss.visible_keys(start[rows], end[rows], keys)
        return dense_mass(q[rows], kv[keys], lse[rows], visible, SCALE) / H

    chunks = key_chunks(start.long()[None], end.long()[None])
    assert len(chunks) >= parts
    loss, recall = dense_kl(*leaves, start, end, chunks, teacher, coefficient, K)
    assert not recall.requires_grad and recall.item() == pytest.approx(brute_force_recall(), rel=1e-6)
    return loss.detach(), list(torch.autograd.grad(loss, leaves))


def test_selected_keys():
    loss, gradients = sparse_loss()
    expected, reference, *_ = brute_force(selection()[1])
    close([loss, *gradients], [expected, *reference])
    value, scaled = sparse_loss(1e-3)
    assert value == loss  # the value has no coefficient
    close(scaled, [1e-3 * x for x in reference])


@pytest.mark.parametrize("small", [False, True], ids=["one chunk", "chunks and head blocks"])
def test_all_causal_keys(monkeypatch, small):
    if small:
        monkeypatch.setattr(indexer_loss, "CHUNK_BYTES", 4 * indexer_loss.ARRAYS * 40)
        monkeypatch.setattr(indexer_loss, "BLOCK_ELEMENTS", 100)
    loss, gradients = dense_loss(parts=4 if small else 1)
    expected, reference, *_ = brute_force(visible_mask())
    close([loss, *gradients], [expected, *reference])
    close(dense_loss(1e-3)[1], [1e-3 * x for x in reference])


def test_row_blocks_of_selected_keys(monkeypatch):
    loss, gradients = sparse_loss()
    monkeypatch.setattr(indexer_loss, "BLOCK_ELEMENTS", 2 * K * C)
    parts, reference = sparse_loss()
    close([loss, *gradients], [x.double() for x in (parts, *reference)])


def test_selecting_all_keys_equals_dense():
    mask, start = visible_mask(), ranges()[0]
    slot = torch.arange(T, dtype=torch.int32)
    idx = (start[:, None] + slot).masked_fill(slot >= mask.sum(1, keepdim=True), -1)
    lse = brute_force(mask)[3].float()
    iq, ik, w, q, kv = inputs()
    leaves = [x.requires_grad_() for x in (iq, ik, w)]
    loss = selected_kl(student(*leaves, idx, "torch"), attention_mass(q, kv, idx, lse, SCALE, "torch") / H, 1.0)
    dense, gradients = dense_loss()
    close([loss.detach(), *torch.autograd.grad(loss, leaves)], [x.double() for x in (dense, *gradients)])


def test_no_gradient_where_student_and_teacher_agree():
    idx, _ = selection()
    iq, ik, w, *_ = inputs()
    leaves = [x.requires_grad_() for x in (iq, ik, w)]
    log_probs = student(*leaves, idx, "torch")
    teacher = log_probs.detach().exp().masked_fill(idx < 0, 0.0)
    loss = selected_kl(log_probs, teacher, 1.0)
    assert abs(loss.item()) < 1e-5
    assert max(g.abs().max().item() for g in torch.autograd.grad(loss, leaves)) < 1e-5


def test_a_key_that_the_student_all_but_rules_out_keeps_its_gradient():
    """-p / (q + eps) would be 0 here: q is e^-60."""
    log_probs = torch.tensor([[0.0, -60.0]], requires_grad=True)
    selected_kl(log_probs, torch.tensor([[0.25, 0.75]]), 1.0).backward()
    assert torch.equal(log_probs.grad, torch.tensor([[-0.25, -0.75]]))


def test_rows_without_any_key_are_nothing():
    iq, ik, w, q, kv = inputs(3)
    idx = torch.full((3, K), -1, dtype=torch.int32)
    leaves = [x.requires_grad_() for x in (iq, ik, w)]
    teacher = attention_mass(q, kv, idx, torch.full((3, H), -torch.inf), SCALE, "torch")
    loss = selected_kl(student(*leaves, idx, "torch"), teacher, 1.0)
    assert loss == 0 and not any(g.any() for g in torch.autograd.grad(loss, leaves))
    empty = torch.zeros(3, dtype=torch.int32)
    assert key_chunks(empty.long()[None], empty.long()[None]) == []
    loss, recall = dense_kl(*leaves, empty, empty, [], lambda chunk: torch.empty(0), 1.0, K)
    assert loss == recall == 0 and not any(g.any() for g in torch.autograd.grad(loss, leaves))


@pytest.mark.parametrize("ranks", [1, 8])
def test_chunks_of_128k_rows_stay_within_their_bytes(ranks):
    end = torch.arange(1, 131073).view(ranks, -1)
    chunks = key_chunks(torch.zeros_like(end), end)
    sizes = [ranks * (b - a) * (v - u) * 4 * indexer_loss.ARRAYS for a, b, u, v in chunks]
    assert max(sizes) <= 1 << 30 and ranks * sum(b - a for a, b, *_ in chunks) == 131072
    assert max(ranks * (b - a) for a, b, *_ in chunks) <= indexer_loss.CHUNK_ROWS
    assert len(chunks) < 1000


class LiveBytes(TorchDispatchMode):
    """`most`: the most bytes that tensors made under it held at a time. What an operation needs inside is not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.handles, self.live, self.most = Counter[int](), 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.handles[storage.data_ptr()] += 1
                self.live += storage.nbytes() * (self.handles[storage.data_ptr()] == 1)
                weakref.finalize(tensor, self.drop, storage.data_ptr(), storage.nbytes())
        self.most = max(self.most, self.live)
        return result

    def drop(self, pointer: int, size: int) -> None:
        self.handles[pointer] -= 1
        self.live -= size * (self.handles[pointer] == 0)


def test_a_chunk_needs_no_more_than_its_bytes(monkeypatch):
    """All that warm-up's loss holds beside its inputs and their gradients, at 1/512 of the sizes."""
    monkeypatch.setattr(indexer_loss, "CHUNK_BYTES", indexer_loss.CHUNK_BYTES >> 9)
    monkeypatch.setattr(indexer_loss, "BLOCK_ELEMENTS", indexer_loss.BLOCK_ELEMENTS >> 9)
    rows, width = 512, 4
    start, end = torch.zeros(rows, dtype=torch.int32), torch.arange(1, rows + 1, dtype=torch.int32)
    iq, q = torch.randn(rows, 8, width), torch.randn(rows, 8, width)
    ik, kv, w, lse = (
        torch.randn(rows, width),
        torch.randn(rows, width),
        torch.randn(rows, 8),
        torch.full((rows, 8), 3.0),
    )

    def teacher(chunk) -> Tensor:
        part, keys = slice(*chunk[:2]), slice(*chunk[2:])
        visible = indexer_loss.visible_keys(start[part], end[part], keys)
        return dense_mass(q[part], kv[keys], lse[part], visible, SCALE) / 8

    chunks = key_chunks(start.long()[None], end.long()[None])
    largest = max((b - a) * (v - u) for a, b, u, v in chunks)
    with LiveBytes() as memory:
        dense_kl(iq, ik, w, start, end, chunks, teacher, 1.0, 32)
    gradients = 4 * (iq.numel() + ik.numel() + w.numel())
    assert 4 * 4 * largest < memory.most - gradients <= indexer_loss.CHUNK_BYTES and len(chunks) >= 3


def test_selected_teacher_of_several_layers_is_their_mean():
    """KL against each of two teachers, half each, has the gradient of one KL against their mean."""
    idx, mask = selection()
    iq, ik, w, q, kv = inputs()
    leaves = [x.requires_grad_() for x in (iq, ik, w)]
    lse = brute_force(mask)[3].float()
    first = attention_mass(q, kv, idx, lse, SCALE, "torch") / H
    other = first.flip(1).masked_fill(idx < 0, 0.0)
    other = other / other.sum(1, keepdim=True).clamp(min=1e-9)
    both = student(*leaves, idx, "torch")
    loss = selected_kl(both, first, 0.5) + selected_kl(both, other, 0.5)
    mean = selected_kl(student(*leaves, idx, "torch"), (first + other) / 2, 1.0)
    expected = [x.double() for x in torch.autograd.grad(mean, leaves)]
    close(list(torch.autograd.grad(loss, leaves)), expected)
