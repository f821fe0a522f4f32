"""The cuDNN + FlashMLA backend and the dense rows against the fp32 reference, and the faults such kernels had."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_glm.ops import backends, dense_mla, indexer, sparse_mla

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(backends.lacking("cudnn", "auto")), reason=f"needs {backends.lacking('cudnn', 'auto')}"),
]
SLOTS, C, WIDTH, SCALE = 2048, 512, 576, 256**-0.5
NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def loaded():
    backends.load("cudnn")
    torch.manual_seed(0)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


def error(value: Tensor, reference: Tensor) -> float:
    """Relative error in norm; NaN if a value is NaN."""
    return ((value.float() - reference.float()).norm() / reference.float().norm().clamp_min(1e-20)).item()


def poison_free_memory() -> None:
    """What is allocated next holds NaN."""
    torch.full((1 << 28,), NAN, device="cuda")


# ---- selection ----


def ranges(documents: list[int], padding: int = 0) -> tuple[Tensor, Tensor]:
    start, end = [], []
    for length in documents:
        first = len(start)
        start += [first] * length
        end += range(first + 1, first + length + 1)
    empty = [0] * padding
    return tuple(torch.tensor(x + empty, dtype=torch.int32, device="cuda") for x in (start, end))


CASES = {
    "one document": ([3000], 0, torch.arange(3000)),
    "packed": ([100, 2600, 1, 2300, 300], 7, torch.arange(5308)),
    "zigzag": ([1500, 4500], 0, torch.arange(6000).view(8, 750)[[1, 6]].flatten()),
    "gaps": ([4000], 100, torch.arange(0, 4100, 3)),
    "only padding": ([], 130, torch.arange(130)),
}


@pytest.mark.parametrize("case", CASES)
def test_selection_is_exact_and_ties_go_to_the_lowest_index(case):
    """Small whole numbers: every score is exact in any order of summation, and most have equals."""
    documents, padding, rows = CASES[case]
    start, end = (x[rows.cuda()] for x in ranges(documents, padding))
    iq = torch.randint(-1, 2, (len(start), 32, 128), device="cuda").bfloat16()
    ik = torch.randint(-1, 2, (6000, 128), device="cuda").bfloat16()
    w = torch.randint(-3, 4, (len(start), 32), device="cuda").float()
    expected = indexer.index_topk_torch(iq, ik, w, start, end, SLOTS)
    poison_free_memory()
    assert torch.equal(indexer.index_topk(iq, ik, w, start, end, SLOTS, "cudnn"), expected)
    segments = indexer.key_segments(start, end)
    assert torch.equal(indexer.index_topk(iq, ik, w, start, end, SLOTS, "cudnn", segments), expected)


def test_selection_of_real_scores_differs_only_between_equals():
    start, end = ranges([3500, 500])
    iq, ik, w = normal(4000, 32, 128), normal(4000, 128), torch.randn(4000, 32, device="cuda")
    chosen = indexer.index_topk(iq, ik, w, start, end, SLOTS, "cudnn")
    expected = indexer.index_topk_torch(iq, ik, w, start, end, SLOTS)
    differ = (chosen != expected).any(1).nonzero().flatten().tolist()
    assert len(differ) < 20
    for row in differ:
        apart = sorted(set(chosen[row].tolist()) ^ set(expected[row].tolist()))
        score = w[row].double() @ torch.relu(iq[row].double() @ ik[apart].double().T)
        assert score.max() - score.min() < 1e-5 * score.abs().max() and len(apart) <= 4


def test_selection_in_chunks_stays_within_its_buffer(monkeypatch):
    from megatron_glm.ops import cudnn

    start, end = ranges([5000, 3000])
    iq, ik, w = normal(8000, 32, 128), normal(8000, 128), torch.randn(8000, 32, device="cuda")
    whole = indexer.index_topk(iq, ik, w, start, end, SLOTS, "cudnn")
    monkeypatch.setattr(cudnn, "SCORE_BYTES", 3 << 24)
    monkeypatch.setattr(cudnn, "SCRATCH_BYTES", 1 << 24)
    cudnn._score_calls.cache_clear()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    pieces = indexer.index_topk(iq, ik, w, start, end, SLOTS, "cudnn")
    peak = torch.cuda.max_memory_allocated() - before - pieces.nbytes
    cudnn._score_calls.cache_clear()
    assert torch.equal(pieces, whole)
    assert peak < 1.2 * (1 << 26)


# ---- sparse attention ----


def sparse_case(rows: int, heads: int, keys: int, lengths: Tensor | None = None):
    q, kv, grad = normal(rows, heads, WIDTH), normal(keys, WIDTH), normal(rows, heads, C)
    few = min(SLOTS, keys)
    idx = torch.full((rows, SLOTS), -1, dtype=torch.int32, device="cuda")
    idx[:, :few] = torch.rand(rows, keys, device="cuda").topk(few, dim=1).indices.sort(1).values.int()
    length = torch.randint(0, few + 1, (rows,), device="cuda") if lengths is None else lengths.cuda()
    length = length.int()
    return q, kv, idx.masked_fill(torch.arange(SLOTS, device="cuda") >= length[:, None], -1), length, grad


@pytest.mark.parametrize("heads", [1, 2, 4, 8, 16, 24, 32, 64, 96, 128])
def test_sparse_attention_and_its_gradients_for_every_head_count(heads):
    q, kv, idx, length, grad = sparse_case(96, heads, 2300)
    length[:5] = 0
    idx[:5] = -1
    leaves = [x.clone().requires_grad_() for x in (q, kv)]
    poison_free_memory()
    out, lse = sparse_mla.sparse_mla(*leaves, idx, length, C, SCALE, "cudnn")
    out.backward(grad)
    true_out, true_lse = sparse_mla.sparse_mla_torch(q.float(), kv.float(), idx, length, C, SCALE)
    wide = (x.float() for x in (grad, q, kv))
    true_q, true_kv = sparse_mla.sparse_mla_backward_torch(*wide, true_out, true_lse, idx, length, SCALE)
    assert error(out, true_out) < 5e-3
    assert torch.equal(lse.isneginf(), true_lse.isneginf()) and torch.allclose(lse[5:], true_lse[5:], atol=1e-4)
    assert error(leaves[0].grad, true_q) < 1e-2 and error(leaves[1].grad, true_kv) < 1e-2
    assert not out[:5].any() and not leaves[0].grad[:5].any()


@pytest.mark.parametrize("rows", [0, 70])
def test_rows_without_keys_give_zero(rows):
    q, kv, idx, length, grad = sparse_case(rows, 64, 100, torch.zeros(rows))
    leaves = [x.requires_grad_() for x in (q, kv)]
    poison_free_memory()
    out, lse = sparse_mla.sparse_mla(*leaves, idx, length, C, SCALE, "cudnn")
    out.backward(grad)
    assert not out.any() and bool(lse.isneginf().all())
    assert not leaves[0].grad.any() and not leaves[1].grad.any()


def test_keys_that_no_row_selects_are_not_read():
    q, kv, idx, length, grad = sparse_case(80, 64, 3000)
    idx = torch.where(idx >= 0, idx.clamp(1, 2998), idx)
    kv[0] = kv[-1] = NAN
    leaves = [x.requires_grad_() for x in (q, kv)]
    out, lse = sparse_mla.sparse_mla(*leaves, idx, length, C, SCALE, "cudnn")
    out.backward(grad)
    assert out.isfinite().all() and leaves[0].grad.isfinite().all() and leaves[1].grad[1:-1].isfinite().all()


def test_thousand_random_backward_runs_are_finite():
    bad = torch.zeros((), dtype=torch.bool, device="cuda")
    for i in range(1000):
        q, kv, idx, length, grad = sparse_case(8 + i % 57, (64, 32)[i % 2], 300 + i)
        out, lse = sparse_mla.sparse_mla(q, kv, idx, length, C, SCALE, "cudnn")
        grads = sparse_mla.BACKENDS["cudnn"][1](grad, q, kv, out, lse, idx, length, SCALE)
        bad |= ~torch.stack([x.isfinite().all() for x in (out, *grads)]).all()
    assert not bad


def test_rows_past_two_to_the_31_elements():
    rows = (1 << 31) // (64 * WIDTH) + 700
    q, grad = normal(rows, 64, WIDTH), normal(rows, 64, C)
    kv = normal(4096, WIDTH)
    idx = torch.arange(SLOTS, dtype=torch.int32, device="cuda").repeat(rows, 1)
    length = torch.full((rows,), 100, dtype=torch.int32, device="cuda")
    out, lse = sparse_mla.sparse_mla(q, kv, idx, length, C, SCALE, "cudnn")
    grad_q, grad_kv = sparse_mla.BACKENDS["cudnn"][1](grad, q, kv, out, lse, idx, length, SCALE)
    last = slice(rows - 64, rows)
    tail = [x[last].contiguous() for x in (q, idx, length)]
    true_out, true_lse = sparse_mla.sparse_mla_torch(tail[0].float(), kv.float(), *tail[1:], C, SCALE)
    true_q, _ = sparse_mla.sparse_mla_backward_torch(
        grad[last].float(), tail[0].float(), kv.float(), true_out, true_lse, *tail[1:], SCALE
    )
    assert error(out[last], true_out) < 5e-3 and error(grad_q[last], true_q) < 1e-2
    # The value part of the gradient is linear in probabilities near 1/100: its size grows with all rows, not some.
    total = grad.float().sum((0, 1)).norm()
    assert abs(grad_kv[:100, :C].float().sum(0).norm() / total - 1) < 0.1 and not grad_kv[100:].any()


def test_no_new_length_compiles_again(monkeypatch):
    import cutlass.cute

    def lengths(rows: int, keys: int) -> None:
        q, kv, idx, length, grad = sparse_case(rows, 64, keys)
        out, lse = sparse_mla.sparse_mla(q, kv, idx, length, C, SCALE, "cudnn")
        sparse_mla.BACKENDS["cudnn"][1](grad, q, kv, out, lse, idx, length, SCALE)
        start, end = ranges([keys, rows])
        iq, ik = normal(keys + rows, 32, 128), normal(keys + rows, 128)
        indexer.index_topk(iq, ik, torch.randn(keys + rows, 32, device="cuda"), start, end, SLOTS, "cudnn")

    def refuse(*args, **kwargs):
        raise AssertionError("compiled again")

    lengths(300, 2500)
    monkeypatch.setattr(cutlass.cute, "compile", refuse)
    lengths(333, 3001)


def test_what_is_not_served_is_refused_by_name():
    start, end = ranges([10])
    w = torch.randn(10, 32, device="cuda")
    with pytest.raises(ValueError, match="index_n_heads 32 of index_head_dim 64"):
        indexer.index_topk(normal(10, 32, 64), normal(10, 64), w, start, end, 5, "cudnn")
    with pytest.raises(ValueError, match="bfloat16"):
        indexer.index_topk(normal(10, 32, 128).float(), normal(10, 128), w, start, end, 5, "cudnn")
    q, kv, idx, length, _ = sparse_case(4, 130, 50)
    with pytest.raises(ValueError, match="up to 128 attention heads a rank, not 130"):
        sparse_mla.sparse_mla(q, kv, idx, length, C, SCALE, "cudnn")
    with pytest.raises(ValueError, match="kv_lora_rank 512"):
        sparse_mla.sparse_mla(q[:, :64, :320], kv[:, :320], idx, length, 256, SCALE, "cudnn")


# ---- dense rows ----

SEGMENTS = {
    "documents": ([100, 700, 1, 2], None),
    "one": ([900], None),
    "later rows": ([], [0, 100, 0, 400, 100, 300, 400, 900]),
    "shared keys, gaps": ([], [0, 100, 0, 300, 120, 300, 0, 600, 300, 350, 650, 700]),
    "nothing": ([], []),
}


@pytest.mark.parametrize("heads", [8, 64])
@pytest.mark.parametrize("case", SEGMENTS)
def test_dense_rows_and_their_gradients(case, heads):
    documents, segments = SEGMENTS[case]
    edges = torch.tensor([0, *documents]).cumsum(0).tolist()
    if segments is None:
        segments = [x for a, b in zip(edges, edges[1:], strict=False) for x in (a, b, a, b)]
    rows, keys = (edges[-1], edges[-1]) if documents else (360, 900)
    q, k, v, grad = (
        normal(rows, heads, 256),
        normal(keys, heads, 256),
        normal(keys, heads, 256),
        normal(rows, heads, 256),
    )
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    poison_free_memory()
    out, lse = dense_mla.dense_mla(*leaves, segments, SCALE, "cudnn")
    out.backward(grad)
    wide = [x.float() for x in (q, k, v)]
    truth = dense_mla.dense_mla_torch(*wide, segments, SCALE)
    gradients = dense_mla.dense_mla_backward_torch(grad.float(), *wide, *truth, segments, SCALE)
    assert error(out, truth[0]) < 5e-3
    assert torch.equal(lse.isneginf(), truth[1].isneginf())
    assert torch.allclose(lse[lse.isfinite()], truth[1][lse.isfinite()], atol=1e-4)
    for leaf, expected in zip(leaves, gradients, strict=True):
        assert error(leaf.grad, expected) < 1e-2


def test_new_lengths_build_no_new_graph():
    from megatron_glm.ops import cudnn_dense

    def run(*documents: int) -> None:
        edges = torch.tensor([0, *documents]).cumsum(0).tolist()
        segments = [x for a, b in zip(edges, edges[1:], strict=False) for x in (a, b, a, b)]
        q, k, v = (normal(edges[-1], 8, 256).requires_grad_() for _ in range(3))
        out, _ = dense_mla.dense_mla(q, k, v, segments, SCALE, "cudnn")
        out.sum().backward()

    run(100, 300, 120)
    built = cudnn_dense._graph.cache_info().misses
    run(7, 400, 233)
    run(511)
    assert cudnn_dense._graph.cache_info().misses == built


def test_dense_rows_past_two_to_the_31_elements():
    rows, last = (1 << 31) // (64 * 256) + 1024, 256
    q, k, v, grad = (normal(rows, 64, 256) for _ in range(4))
    edges = [*range(0, rows - last, 2048), rows - last, rows]
    segments = [x for a, b in zip(edges, edges[1:], strict=False) for x in (a, b, a, b)]
    out, lse = dense_mla.dense_mla(q, k, v, segments, SCALE, "cudnn")
    grads = dense_mla.BACKENDS["cudnn"][1](grad, q, k, v, out, lse, segments, SCALE)
    tail = [x[-last:].float() for x in (q, k, v)]
    truth = dense_mla.dense_mla_torch(*tail, [0, last, 0, last], SCALE)
    expected = dense_mla.dense_mla_backward_torch(grad[-last:].float(), *tail, *truth, [0, last, 0, last], SCALE)
    assert error(out[-last:], truth[0]) < 5e-3
    assert all(error(x[-last:], y) < 1e-2 for x, y in zip(grads, expected, strict=True))
