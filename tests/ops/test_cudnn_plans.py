"""What the cuDNN backend does on the host (chunks, paddings, offsets), with its kernels played by plain torch."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_glm.ops import dense_mla, indexer, sparse_mla

INF = float("inf")


def score(q, k, w, *, ratio, out, q_causal_offsets, **packed):
    """`indexer_forward_wrapper` on one sequence or on packed ones; columns count from each sequence's first key."""
    out.fill_(-INF)
    if not packed:
        assert out.shape == (1, q.shape[1], k.shape[1])
        rows, keys = [0, q.shape[1]], [0, k.shape[1]]
        q, k, w, out = q[0], k[0], w[0], out[0]
    else:
        rows, keys = packed["cu_seqlens_q"].tolist(), packed["cu_seqlens_k"].tolist()
        assert max(b - a for a, b in zip(rows, rows[1:], strict=False)) <= packed["max_seqlen_q"]
        assert out.shape[1] == packed["max_seqlen_k"]
    for i, first in enumerate(q_causal_offsets.tolist()):
        part = slice(rows[i], rows[i + 1])
        scores = torch.einsum(
            "thk,th->tk", torch.relu(q[part].float() @ k[keys[i] : keys[i + 1], 0].float().T), w[part]
        )
        scores = scores[:, : out.shape[1]]  # the kernel stops at the last key that a row sees
        limit = first + 1 + torch.arange(scores.shape[0])
        assert limit.max() <= out.shape[1]
        out[part, : scores.shape[1]] = scores.masked_fill(torch.arange(scores.shape[1]) >= limit[:, None], -INF)


class IndexerTopK:
    def __init__(self, scores: Tensor, lengths: Tensor, k: int, return_val: bool, deterministic: bool) -> None:
        assert deterministic and not return_val
        self.shape, self.k = scores.shape, k

    def check_support(self) -> None: ...

    def compile(self) -> None: ...

    def scratch_workspace_bytes(self) -> int:
        return 8 * self.shape[0] * self.shape[1]

    def execute(self, scores: Tensor, lengths: Tensor, out_indices: Tensor, workspace: Tensor) -> None:
        assert scores.shape == self.shape and workspace.numel() >= self.scratch_workspace_bytes()
        for row, length, out in zip(scores, lengths.tolist(), out_indices, strict=True):
            best = row[:length].sort(descending=True, stable=True).indices[: self.k].sort().values
            out.copy_(F.pad(best, (0, self.k - len(best)), value=-1))


def flash(q, kv, indices, sm_scale, d_v, attn_sink, topk_length):
    assert q.shape[1] in (64, 128) and indices.shape[2] % 128 == 0
    out, lse = sparse_mla.sparse_mla_torch(q, kv[:, 0], indices[:, 0], topk_length, d_v, sm_scale)
    return out, lse, lse.masked_fill(lse == -INF, INF)


def sparse_backward(q, kv, out, dout, lse, sink, idx, *, softmax_scale, topk_length):
    assert q.shape[1] in (64, 128) and bool((sink == -INF).all())
    assert not bool((lse == -INF)[topk_length > 0].any())
    grads = sparse_mla.sparse_mla_backward_torch(dout, q, kv, out, lse, idx, topk_length, softmax_scale)
    return dict(zip(("dq", "dkv"), grads, strict=True))


@pytest.fixture
def modules(monkeypatch):
    """cudnn.py and cudnn_dense.py on the stand-ins."""
    library = ModuleType("cudnn")
    library.data_type = SimpleNamespace(BFLOAT16=1, FLOAT=2, INT32=3, INT64=4)
    library.Handle = library.pygraph = library.tensor = object
    library.DSA = SimpleNamespace(
        IndexerTopK=IndexerTopK, indexer_forward_wrapper=score, sparse_attention_backward_wrapper=sparse_backward
    )
    attention = ModuleType("flash_mla")
    attention.flash_mla_sparse_fwd = flash
    monkeypatch.setitem(sys.modules, "cudnn", library)
    monkeypatch.setitem(sys.modules, "flash_mla", attention)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: x)
    names = ("megatron_glm.ops.cudnn", "megatron_glm.ops.cudnn_dense")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    loaded = [importlib.import_module(name) for name in names]
    monkeypatch.setattr(loaded[0], "_processors", lambda _: 132)
    yield loaded
    for name in names:
        del sys.modules[name]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape).bfloat16()


PACKS = {"one": [60], "packed": [5, 40, 1, 30], "long and short": [3, 100]}


@pytest.mark.parametrize("rows", ["all", "zigzag", "every third"])
@pytest.mark.parametrize("chunk", [1 << 30, 8 * 64 * 4])
@pytest.mark.parametrize("pack", PACKS)
def test_selection(modules, monkeypatch, pack, chunk, rows):
    """In one call or in many, for rows with gaps, rows of shared documents and padding."""
    cudnn, _ = modules
    monkeypatch.setattr(cudnn, "SCORE_BYTES", chunk)
    monkeypatch.setattr(cudnn, "SCRATCH_BYTES", chunk // 2)
    monkeypatch.setattr(cudnn, "_processors", lambda _: 1)
    monkeypatch.setattr(cudnn, "ROW_STEP", 4)
    monkeypatch.setattr(cudnn, "WIDTH_STEP", 8)
    monkeypatch.setattr(cudnn, "ALIGNED", 4)
    total = sum(PACKS[pack]) + 4
    start = torch.cat([torch.full((n,), sum(PACKS[pack][:i])) for i, n in enumerate(PACKS[pack])])
    start, end = F.pad(start, (0, 4)).int(), F.pad(torch.arange(1, len(start) + 1), (0, 4)).int()
    part = total // 4
    chosen = {"all": slice(None), "every third": slice(0, None, 3)}
    chosen["zigzag"] = torch.cat((torch.arange(part), torch.arange(3 * part, total)))
    start, end = start[chosen[rows]], end[chosen[rows]]
    iq, ik, w = (
        torch.randint(-1, 2, (len(start), 16, 128)),
        torch.randint(-1, 2, (total, 128)),
        torch.ones(len(start), 16),
    )
    inputs = (iq.bfloat16(), ik.bfloat16(), w, start, end, 12)
    expected = indexer.index_topk_torch(*inputs)
    assert torch.equal(cudnn.index_topk_cudnn(*inputs), expected)
    assert torch.equal(cudnn.index_topk_cudnn(*inputs, indexer.key_segments(start, end)), expected)


def test_score_buffer_is_bounded_at_any_length(modules):
    cudnn, _ = modules
    for segments in ((0, 131072, 0, 131072), (0, 1024, 0, 1 << 20), (0, 9000, 0, 9000, 9000, 99000, 9000, 99000)):
        calls = cudnn._score_calls(segments, segments[-1], 2048, torch.device("cpu"))
        assert calls[0].begin == 0 and calls[-1].end == segments[-3]
        assert all(call.rows * call.width * 4 <= cudnn.SCORE_BYTES for call in calls)
        full = [call.end - call.begin for call in calls[1:] if call.begin not in segments[::4]]
        assert all(rows % (cudnn.TOP_K_ROUND * 132) == 0 for rows in full if rows >= cudnn.TOP_K_ROUND * 132)
        scratch = [top_k.scratch_workspace_bytes() for call in calls for _, top_k in call.top_ks]
        assert max(scratch) <= max(cudnn.SCRATCH_BYTES, 8 * cudnn.ROW_STEP * max(call.width for call in calls))


@pytest.mark.parametrize("elements", [1 << 31, 64 * 576 * 1024])
@pytest.mark.parametrize("heads", [3, 64, 70])
def test_sparse_attention(modules, monkeypatch, heads, elements):
    """Padded heads and slots, rows without keys, calls over parts of the rows whose key gradients are summed."""
    cudnn, _ = modules
    monkeypatch.setattr(
        cudnn, "row_chunks", lambda rows, _: [slice(0, 2), slice(2, rows)] if elements < 1 << 31 else [slice(0, rows)]
    )
    q, kv, grad = normal(5, heads, 576), normal(40, 576), normal(5, heads, 512)
    length = torch.tensor([0, 30, 7, 1, 30], dtype=torch.int32)
    idx = torch.stack([torch.randperm(40)[:30].sort().values for _ in range(5)]).int()
    idx = idx.masked_fill(torch.arange(30) >= length[:, None], -1)
    out, lse = cudnn.sparse_mla_cudnn(q, kv, idx, length, 512, 0.05)
    true_out, true_lse = sparse_mla.sparse_mla_torch(q, kv, idx, length, 512, 0.05)
    assert torch.allclose(out.float(), true_out.float(), atol=1e-2) and torch.allclose(lse, true_lse)
    grads = cudnn.sparse_mla_backward_cudnn(grad, q, kv, out, lse, idx, length, 0.05)
    expected = sparse_mla.sparse_mla_backward_torch(grad, q, kv, out, lse, idx, length, 0.05)
    for ours, theirs in zip(grads, expected, strict=True):
        assert ours.shape == theirs.shape and torch.allclose(ours.float(), theirs.float(), atol=2e-2, rtol=2e-2)


def test_no_call_reaches_two_to_the_31_elements(modules):
    cudnn, dense = modules
    for heads in (64, 128):
        chunks = cudnn.row_chunks(200_000, heads)
        assert chunks[0].start == 0 and chunks[-1].stop >= 200_000
        assert all((chunk.stop - chunk.start) * heads * 576 < 1 << 31 for chunk in chunks)
    documents = [x for i in range(0, 140_000, 2000) for x in (i, i + 2000, i, i + 2000)]
    parts = dense._parts(tuple(documents), 64 * 256)
    assert sum(rows.stop - rows.start for rows, *_ in parts) == 140_000
    assert all((keys.stop - keys.start) * 64 * 256 <= dense.ELEMENTS for _, keys, _ in parts)


def run_dense(graph: str, plan, q, k, v, o, stats, grad=None, dq=None, dk=None, dv=None) -> None:
    """cuDNN's ragged SDPA, as it reads the arrays of the plan."""
    assert plan.batch == len(plan.arrays["rows"]) and len(plan.arrays["q_at"]) == plan.batch + 1
    for i in range(plan.batch):
        rows, keys = (int(plan.arrays[name][i]) for name in ("rows", "keys"))
        if rows == 0:
            continue
        assert rows <= plan.longest[0] and keys <= plan.longest[1] and (plan.rectangular or rows == keys)

        def at(x: Tensor, name: str, count: int, i=i) -> Tensor:
            offset = int(plan.arrays[name][i])
            return x.view(-1)[offset : offset + count * x[0].numel()].view(count, *x.shape[1:])

        inputs = (at(q, "q_at", rows), at(k, "k_at", keys), at(v, "v_at", keys))
        segment, results = [0, rows, 0, keys], (at(o, "o_at", rows), at(stats, "stats_at", rows))
        if grad is None:
            values = dense_mla.dense_mla_torch(*inputs, segment, 0.1)
        else:
            values = dense_mla.dense_mla_backward_torch(at(grad, "o_at", rows), *inputs, *results, segment, 0.1)
            results = at(dq, "q_at", rows), at(dk, "k_at", keys), at(dv, "v_at", keys)
        for target, value in zip(results, values, strict=True):
            target.copy_(value)


@pytest.mark.parametrize("elements", [1 << 29, 100])
@pytest.mark.parametrize(
    "segments, rows, keys",
    [
        ([0, 4, 0, 4, 4, 11, 4, 11], 11, 11),
        ([0, 4, 0, 6, 4, 7, 6, 20], 7, 20),  # rows that start inside their documents
        ([0, 4, 0, 6, 5, 8, 0, 12, 8, 10, 13, 15], 12, 16),  # shared keys, rows and keys in no segment
        ([3, 3, 0, 5], 4, 5),
        ([], 3, 0),
    ],
)
def test_dense_rows(modules, monkeypatch, segments, rows, keys, elements):
    """In one call, or in one a segment."""
    _, dense = modules
    monkeypatch.setattr(dense, "ELEMENTS", elements)
    monkeypatch.setattr(dense, "_graph", lambda *shape: shape)
    monkeypatch.setattr(dense, "_execute", run_dense)
    q, k, v, grad = normal(rows, 2, 16), normal(keys, 2, 16), normal(keys, 2, 8), normal(rows, 2, 8)
    out, lse = dense.dense_mla_cudnn(q, k, v, segments, 0.1)
    expected = dense_mla.dense_mla_torch(q, k, v, segments, 0.1)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    grads = dense.dense_mla_backward_cudnn(grad, q, k, v, out, lse, segments, 0.1)
    truth = dense_mla.dense_mla_backward_torch(grad, q, k, v, out, lse, segments, 0.1)
    for ours, theirs in zip(grads, truth, strict=True):
        assert ours.shape == theirs.shape and torch.allclose(ours.float(), theirs.float(), atol=2e-2, rtol=2e-2)
