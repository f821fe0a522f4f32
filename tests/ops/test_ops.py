"""Each op against a plain fp64 implementation: values, gradients, ties, unused slots."""

from __future__ import annotations

import pytest
import torch

from megatron_glm.ops import indexer as indexer_ops
from megatron_glm.ops import sparse_mla as sparse_ops
from megatron_glm.ops.dense_mla import dense_mla
from megatron_glm.ops.indexer import index_topk
from megatron_glm.ops.rope import apply_rope, rope_tables
from megatron_glm.ops.routing import select_experts
from megatron_glm.ops.sparse_mla import sparse_mla

C, R = 6, 4  # latent and rope width
HEADS = [1, 2, 3, 4, 8, 16, 24, 32, 64, 128]


def draw(*shape, seed=0, scale=1.0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def attend(q, keys, values, scale):
    """One row: q [h, D], keys [n, h, D], values [n, h, V] -> out [h, V], lse [h], in the inputs' precision."""
    scores = torch.einsum("hd,nhd->hn", q, keys) * scale
    return torch.einsum("hn,nhv->hv", scores.softmax(-1), values), scores.exp().sum(-1).log()


def naive_sparse(q, kv, idx, length, scale):
    outs, lses = [], []
    for row in range(q.shape[0]):
        keys = kv[idx[row, : length[row]].long()].unsqueeze(1).expand(-1, q.shape[1], -1)
        out, lse = attend(q[row], keys, keys[..., :C], scale)
        outs.append(out)
        lses.append(lse)
    return torch.stack(outs), torch.stack(lses)


def sparse_case(heads, rows=7, total=12, slots=5):
    """Rows of 0 to `slots` keys; unused slots hold -1, and nothing selects the last key, where -1 would point."""
    generator = torch.Generator().manual_seed(1)
    idx = torch.stack([torch.randperm(total - 1, generator=generator)[:slots].sort().values for _ in range(rows)])
    length = torch.arange(rows).clamp(max=slots)
    idx = idx.masked_fill(torch.arange(slots) >= length.unsqueeze(1), -1)
    return draw(rows, heads, C + R), draw(total, C + R, seed=2), idx.int(), length.int()


def close(actual, expected, tolerance=2e-5):
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("heads", HEADS)
def test_sparse_attention_equals_fp64_for_every_head_count(heads):
    q, kv, idx, length = sparse_case(heads)
    leaves = [x.double().requires_grad_() for x in (q, kv)]
    expected, lse = naive_sparse(*leaves, idx, length, 0.3)
    ours = [x.requires_grad_() for x in (q, kv)]
    actual, actual_lse = sparse_mla(*ours, idx, length, C, 0.3)
    close(actual, expected)
    close(actual_lse, lse)  # a natural logarithm; -inf without keys
    probe = draw(*actual.shape, seed=3)
    wanted = torch.autograd.grad(expected, leaves, probe.double())
    for got, want in zip(torch.autograd.grad(actual, ours, probe), wanted, strict=True):
        close(got, want, 5e-5)


def test_blocks_of_rows_do_not_change_sparse_attention(monkeypatch):
    q, kv, idx, length = sparse_case(3)
    results = []
    for elements in (1 << 24, 2 * 5 * (C + R), 1):  # all rows, two, one
        monkeypatch.setattr(sparse_ops, "GATHER_ELEMENTS", elements)
        leaves = [x.clone().requires_grad_() for x in (q, kv)]
        out, lse = sparse_mla(*leaves, idx, length, C, 0.3)
        results.append([out, lse, *torch.autograd.grad(out.square().sum(), leaves)])
    for other in results[1:]:
        for got, want in zip(other, results[0], strict=True):
            close(got, want)


def test_unused_slots_are_never_read():
    """The key where -1 points holds NaN, and so do slots filled with any other number."""
    q, kv, idx, length = sparse_case(4)
    kv[-1] = float("nan")
    results = []
    for filler in (-1, kv.shape[0] - 1, 10**6):
        leaves = [x.clone().requires_grad_() for x in (q, kv)]
        out, lse = sparse_mla(*leaves, idx.masked_fill(idx == -1, filler), length, C, 0.3)
        gradients = torch.autograd.grad(out.square().sum(), leaves)
        assert not lse.isnan().any() and all(x.isfinite().all() for x in (out, *gradients))
        assert not gradients[1][-1].any()
        results.append([out, *gradients])
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(other, results[0], strict=True))


def test_a_row_without_keys_is_zero_and_has_no_gradient():
    q, kv, idx, _ = sparse_case(4)
    q.requires_grad_(), kv.requires_grad_()
    out, lse = sparse_mla(q, kv, torch.full_like(idx, -1), torch.zeros(q.shape[0], dtype=torch.int32), C, 0.3)
    out.sum().backward()
    assert not out.any() and (lse == float("-inf")).all()
    assert not q.grad.any() and not kv.grad.any()
    out, lse = sparse_mla(q[:0], kv, idx[:0], idx[:0, 0], C, 0.3)
    assert out.shape == (0, 4, C) and lse.shape == (0, 4)


def test_large_scores_do_not_overflow():
    q, kv, idx, length = sparse_case(2)
    out, lse = sparse_mla(q, kv, idx, length, C, 1000.0)
    keys = kv[idx[-1].long()].double()
    scores = q[-1].double() @ keys.T * 1000.0
    assert scores.max() > 1000  # exp of it is no number
    close(lse[-1], scores.logsumexp(-1))
    close(out[-1], scores.softmax(-1) @ keys[:, :C], 1e-3)


def test_bf16_loses_one_rounding():
    """In the output and in each gradient; what is summed over keys, heads and rows stays fp32."""
    q, kv, idx, length = sparse_case(64, rows=40)
    leaves = [x.bfloat16().requires_grad_() for x in (q, kv)]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    out, lse = sparse_mla(*leaves, idx, length, C, 0.3)
    expected, expected_lse = naive_sparse(*exact, idx, length, 0.3)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    close(lse, expected_lse)
    close(out, expected, 2**-8)
    wanted = torch.autograd.grad(expected.sum(), exact)
    for got, want in zip(torch.autograd.grad(out.sum(), leaves), wanted, strict=True):
        assert got.dtype == torch.bfloat16
        assert (got.double() - want).norm() / want.norm() < 2**-8


@pytest.mark.parametrize("heads", [1, 2, 3, 16])
def test_dense_attention_equals_fp64_over_rectangular_segments(heads):
    """Segments of a split document: later queries against more keys than queries, keys shared, a row in none."""
    q, k, v = draw(9, heads, 5), draw(10, heads, 5, seed=1), draw(10, heads, 3, seed=2)
    segments = [0, 3, 0, 3, 3, 5, 0, 7, 6, 9, 7, 10]
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    rows, row_lse = [torch.zeros(heads, 3).double()] * 9, [torch.full((heads,), float("-inf")).double()] * 9
    for i in range(0, len(segments), 4):
        begin, end, first, last = segments[i : i + 4]
        for row in range(begin, end):
            seen = slice(first, last - (end - 1 - row))
            rows[row], row_lse[row] = attend(leaves[0][row], leaves[1][seen], leaves[2][seen], 0.4)
    expected = torch.stack(rows)
    ours = [x.requires_grad_() for x in (q, k, v)]
    out, lse = dense_mla(*ours, segments, 0.4)
    close(out, expected)
    close(lse, torch.stack(row_lse))
    assert not out[5].any()
    probe = draw(*out.shape, seed=4)
    wanted = torch.autograd.grad(expected, leaves, probe.double())
    for got, want in zip(torch.autograd.grad(out, ours, probe), wanted, strict=True):
        close(got, want, 5e-5)


def test_dense_rows_equal_sparse_rows_that_select_every_key():
    """The two forms of MLA: keys expanded for each head against queries absorbed into the latent space."""
    heads, total, nope, value = 3, 9, 5, 7
    q, kv = draw(total, heads, nope + R), draw(total, C + R, seed=1)
    to_key, to_value = draw(heads, nope, C, seed=2), draw(heads, value, C, seed=3)
    k_rope = kv[:, None, C:].expand(-1, heads, -1)
    k = torch.cat((torch.einsum("uc,hnc->uhn", kv[:, :C], to_key), k_rope), dim=-1)
    v = torch.einsum("uc,hvc->uhv", kv[:, :C], to_value)
    dense, dense_lse = dense_mla(q, k, v, [0, total, 0, total], 0.3)
    absorbed = torch.cat((torch.einsum("thn,hnc->thc", q[..., :nope], to_key), q[..., nope:]), dim=-1)
    idx = torch.arange(total).repeat(total, 1)
    length = torch.arange(1, total + 1)
    idx = idx.masked_fill(idx >= length.unsqueeze(1), -1)
    out, lse = sparse_mla(absorbed, kv, idx.int(), length.int(), C, 0.3)
    close(torch.einsum("thc,hvc->thv", out, to_value), dense)
    close(lse, dense_lse)


def index_case(rows, total, heads=4, dim=6, values=2):
    """Small whole numbers: every score is exact in fp32, in any order of summation, and ties abound."""
    generator = torch.Generator().manual_seed(rows)
    shapes = [(rows, heads, dim), (total, dim), (rows, heads)]
    return [torch.randint(-values, values + 1, shape, generator=generator).float() for shape in shapes]


def naive_topk(iq, ik, w, start, end, k):
    found = torch.full((iq.shape[0], k), -1)
    for row in range(iq.shape[0]):
        scores = torch.einsum("h,hu->u", w[row].double(), (iq[row].double() @ ik.double().T).clamp(min=0))
        candidates = sorted(range(start[row], end[row]), key=lambda u: (-scores[u].item(), u))[:k]
        found[row, : len(candidates)] = torch.tensor(sorted(candidates), dtype=torch.int64)
    return found.int()


@pytest.mark.parametrize("k", [1, 4, 9, 40])
def test_selection_is_exact_causal_and_the_lowest_index_wins_ties(k):
    """Document ranges that are empty, shorter than k, longer than twice k."""
    total = 40
    iq, ik, w = index_case(total, total)
    start = torch.tensor([0] * 25 + [25] * 15).int()
    end = torch.arange(1, total + 1).int()
    end[3], end[30] = 0, 25  # no key at all
    chosen = index_topk(iq, ik, w, start, end, k, "torch")
    assert chosen.dtype == torch.int32 and torch.equal(chosen, naive_topk(iq, ik, w, start, end, k))
    assert ((chosen == -1) | ((chosen >= start.unsqueeze(1)) & (chosen < end.unsqueeze(1)))).all()


def test_equal_keys_are_taken_from_the_lowest_index_again_and_again():
    rows, total, k = 3, 300, 7
    iq, ik, w = index_case(rows, total)
    ik[:] = ik[0]
    start, end = torch.tensor([0, 11, 290]).int(), torch.tensor([300, 200, 295]).int()
    first = index_topk(iq, ik, w, start, end, k, "torch")
    assert first.tolist() == [[*range(7)], [*range(11, 18)], [290, 291, 292, 293, 294, -1, -1]]
    assert all(torch.equal(first, index_topk(iq, ik, w, start, end, k, "torch")) for _ in range(3))


def test_blocks_of_rows_do_not_change_the_selection(monkeypatch):
    iq, ik, w = index_case(30, 50)
    start, end = torch.zeros(30).int(), torch.arange(21, 51).int()
    expected = naive_topk(iq, ik, w, start, end, 5)
    for elements in (1, 4 * 50 * 7):  # one row a block, seven
        monkeypatch.setattr(indexer_ops, "SCORE_ELEMENTS", elements)
        assert torch.equal(index_topk(iq, ik, w, start, end, 5, "torch"), expected)


def test_a_key_of_negative_weight_ranks_below_one_without_score():
    iq, ik = torch.tensor([[[1.0], [1.0]]]), torch.tensor([[3.0], [-2.0], [1.0], [0.0]])
    ends = torch.tensor([4]).int()
    chosen = index_topk(iq, ik, torch.tensor([[-1.0, 0.5]]), torch.zeros(1).int(), ends, 2, "torch")
    assert chosen.tolist() == [[1, 3]]  # relu: 0 for both, against -1.5 and -0.5


@pytest.mark.parametrize("n_group, topk_group, k", [(1, 1, 5), (2, 1, 3), (4, 2, 4), (4, 3, 5), (6, 6, 12)])
def test_experts_come_from_the_best_groups_only(n_group, topk_group, k):
    experts = 12
    choice = draw(64, experts)  # a correction bias makes negative choices legal
    chosen = select_experts(choice, k, n_group, topk_group)
    for scores, ids in zip(choice.tolist(), chosen.tolist(), strict=True):
        size = experts // n_group
        groups = [range(g * size, (g + 1) * size) for g in range(n_group)]
        best = sorted(groups, key=lambda group: -sum(sorted(scores[e] for e in group)[-2:]))[:topk_group]
        eligible = [e for group in (best if n_group > 1 else groups) for e in group]
        assert ids == sorted(eligible, key=lambda e: -scores[e])[:k]


def test_equal_experts_and_groups_are_taken_from_the_lowest_id():
    assert select_experts(torch.zeros(2, 300), 4, 1, 1).tolist() == [[0, 1, 2, 3]] * 2
    assert select_experts(torch.zeros(2, 300), 3, 100, 2).tolist() == [[0, 1, 2]] * 2


def test_rope_turns_neighbouring_pairs():
    """Pairs (2i, 2i+1), not (i, i + R/2), by position * theta^(-2i/R)."""
    position, theta, dim = torch.tensor([0, 1, 7, 100_000]), 8e6, 6
    x = draw(4, 2, dim)
    pairs = torch.view_as_complex(x.double().view(4, 2, 3, 2))
    angle = position.double()[:, None] * theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    expected = torch.view_as_real(pairs * torch.exp(1j * angle)[:, None]).flatten(-2)
    cos, sin = rope_tables(position, dim, theta)
    assert cos.dtype == torch.float32
    torch.testing.assert_close(apply_rope(x, cos, sin).double(), expected, rtol=0, atol=2e-2)  # angles are fp32
    torch.testing.assert_close(apply_rope(x, cos, sin)[:3].double(), expected[:3], rtol=0, atol=2e-6)
    assert apply_rope(x.bfloat16(), cos, sin).dtype == torch.bfloat16
