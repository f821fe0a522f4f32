"""The total variation of chains of MTP steps against autograd, on one rank and cut over vocabulary and context."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_glm.config import ParallelConfig
from megatron_glm.data.packing import PackedBatch, ahead
from megatron_glm.ops.total_variation import overlap, overlap_gradient
from megatron_glm.parallel.context import with_following, zigzag_rows
from megatron_glm.parallel.draft_head import DraftHead, chain_gradient
from megatron_glm.parallel.groups import ParallelGroups
from megatron_glm.parallel.vocab import Prediction
from megatron_glm.training.engine import _labels_from
from tests.helpers import distributed
from tests.helpers.reference import single_groups

T, D, V = 32, 12, 50
LENGTHS = (13, 1, 3, 4, 8)  # of 3 steps: documents of 1, k and k + 1 tokens; 3 rows of padding
WEIGHT = 0.3


def case(steps: int) -> tuple[Tensor, Tensor, PackedBatch]:
    """The head's weight, hidden states of the trunk and of each step [1 + S, T, D], and the pack."""
    generator = torch.Generator().manual_seed(steps)
    weight, hidden = torch.randn(V, D, generator=generator), torch.randn(1 + steps, T, D, generator=generator)
    hidden[1:] = hidden[:1] + 0.5 * hidden[1:]
    used, tokens = sum(LENGTHS), torch.randint(0, V, (T,), generator=generator)
    labels = tokens.roll(-1)
    labels[torch.tensor(LENGTHS).cumsum(0) - 1] = -100
    labels[used:] = -100
    mask = (labels >= 0) & (torch.rand(T, generator=generator) < 0.9)
    position = torch.cat([*map(torch.arange, LENGTHS), torch.zeros(T - used, dtype=torch.int64)])
    return weight, hidden, PackedBatch(tokens, labels, mask, position, LENGTHS, T - used)


def expected(weight: Tensor, hidden: Tensor, packed: PackedBatch) -> tuple[list[float], Tensor, int]:
    """Sum of each step's loss over the rows, the gradient of WEIGHT times the mean of their sums, and the rows."""
    steps = len(hidden) - 1
    hidden = hidden.double().requires_grad_()
    probabilities = (hidden @ weight.double().T).softmax(-1)
    losses, rows, begin = [torch.zeros((), dtype=torch.float64)] * steps, 0, 0
    for length in packed.doc_lengths:
        for i in range(begin, begin + length - steps):
            if packed.loss_mask[i + 1 : i + 1 + steps].all():
                rows, chain = rows + 1, torch.ones((), dtype=torch.float64)
                for j in range(1, steps + 1):
                    chain = chain * torch.minimum(probabilities[0, i + j].detach(), probabilities[j, i]).sum()
                    losses[j - 1] = losses[j - 1] + 1 - chain
        begin += length
    (WEIGHT / steps * sum(losses) / rows).backward()
    assert not hidden.grad[0].any()
    return [loss.item() / rows for loss in losses], hidden.grad[1:], rows


def predictions(hidden: Tensor, packed: PackedBatch, rows: int, local: Tensor, shard: slice):
    """Of one rank: `local` are its rows of the pack, `shard` those of them that it holds."""
    leaves = hidden[:, local][:, shard].clone().requires_grad_()
    labels = packed.labels.masked_fill(~packed.loss_mask, -100)
    found = [Prediction(leaves[0], labels[local])]
    for step in range(1, len(hidden)):
        labels = ahead(packed, step)[1][local]
        found.append(Prediction(leaves[step], labels, 1 / rows, WEIGHT / (len(hidden) - 1), False))
    return found, leaves


@pytest.mark.parametrize("chunk_size", [1, 9, 1000])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_value_and_gradient_equal_autograds(steps, chunk_size):
    weight, hidden, packed = case(steps)
    losses, gradient, rows = expected(weight, hidden, packed)
    assert rows == _labels_from(packed, 1, steps) > 5
    head = DraftHead(V, D, single_groups().tp, single_groups().cp)
    head.weight.data = weight
    given, leaves = predictions(hidden, packed, rows, torch.arange(T), slice(None))
    found, best = head(given, chunk_size, best=True)
    assert [loss.item() for loss in found[1:]] == pytest.approx(losses, rel=1e-6)
    assert torch.equal(best, (hidden @ weight.T).argmax(-1))
    torch.autograd.backward(found[1:])
    torch.testing.assert_close(leaves.grad[1:].double(), gradient, rtol=1e-6, atol=1e-8)
    assert not leaves.grad[0].any() and head.weight.grad is None
    with torch.no_grad():
        again, best = head(given, chunk_size)
    assert best is None and torch.equal(torch.stack(again), torch.stack(found)) and not again[1].requires_grad


def test_a_scaled_loss_is_refused_and_the_logits_of_all_rows_never_exist():
    from tests.model.test_loss import Largest

    weight, hidden, packed = case(3)
    head = DraftHead(V, D, single_groups().tp, single_groups().cp)
    head.weight.data = weight
    given, _ = predictions(hidden, packed, 5, torch.arange(T), slice(None))
    with Largest() as largest:
        found, _ = head(given, 11)
    assert 11 * V <= largest.elements < T * V
    with pytest.raises(RuntimeError, match="goes into the head's Prediction"):
        (found[1] / 2).backward()


def test_chains_with_a_draft_that_is_never_accepted():
    accepted = torch.tensor([[0.0, 0.5], [0.0, 0.0], [0.7, 0.2]], requires_grad=True)
    accepted.cumprod(0).sum().backward()
    torch.testing.assert_close(chain_gradient(accepted.detach()), accepted.grad)


def test_columns_of_padding_are_nothing():
    p, q = torch.randn(2, 5, 12).unbind()
    lses = p[:, :9].logsumexp(1), q[:, :9].logsumexp(1)
    part = overlap(p, lses[0], q, lses[1], 9)
    whole = overlap(p[:, :9], lses[0], q[:, :9], lses[1], 9)
    assert torch.equal(part, whole)
    gradient = overlap_gradient(p, lses[0], q, lses[1], part[1], torch.ones(5), 9)
    assert not gradient[:, 9:].any() and gradient.sum(1).abs().max() < 1e-6


def in_layout(tp: int, cp: int) -> None:
    """Both the rows that follow, for any number of them, and loss and gradient of the rank's rows."""
    parallel = ParallelConfig(tensor_model_parallel_size=tp, sequence_parallel=tp > 1, context_parallel_size=cp)
    groups = ParallelGroups.create(parallel)
    local = zigzag_rows(T, groups.cp.rank(), cp)
    for count in (1, 3, 8, 9, 20) if tp == 1 else ():
        pack = torch.cat([torch.arange(1, T + 1), torch.zeros(count, dtype=torch.int64)])
        runs = local.chunk(2)
        for run, found in zip(runs, with_following(pack[local], count, groups.cp), strict=True):
            assert torch.equal(found, pack[run[0] : run[-1] + 1 + count])
    for steps in (1, 3):
        weight, hidden, packed = case(steps)
        losses, gradient, rows = expected(weight, hidden, packed)
        head = DraftHead(V, D, groups.tp, groups.cp)
        head.weight.data.zero_()
        head.weight.data[: head.valid] = weight[head.first :][: head.valid]
        size = T // cp // tp
        shard = slice(groups.tp.rank() * size, (groups.tp.rank() + 1) * size)
        given, leaves = predictions(hidden, packed, rows, local, shard)
        found, best = head(given, 9, best=True)
        torch.autograd.backward(found[1:])
        torch.testing.assert_close(leaves.grad[1:].double(), gradient[:, local][:, shard], rtol=1e-6, atol=1e-8)
        assert torch.equal(best, (hidden @ weight.T).argmax(-1)[:, local])
        total = torch.stack(found[1:]).detach()
        torch.distributed.all_reduce(total, group=groups.cp)
        assert total.tolist() == pytest.approx(losses, rel=1e-6)
    distributed.close_groups(groups)


def in_layouts(*sizes: tuple[int, int]) -> None:
    for tp, cp in sizes:
        in_layout(tp, cp)


@pytest.mark.parametrize(("ranks", "sizes"), [(2, [(2, 1), (1, 2)]), (4, [(4, 1), (2, 2), (1, 4)])])
def test_every_cut_of_vocabulary_and_rows_gives_the_same(ranks, sizes):
    distributed.run(ranks, in_layouts, *sizes)
