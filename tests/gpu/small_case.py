"""Every op of the attention and the experts once, on a small case: python -m tests.gpu.small_case BACKEND DEVICE."""

from __future__ import annotations

import sys

import torch

from megatron_glm.ops import backends, dense_mla, indexer, sparse_mla
from megatron_glm.ops.experts import grouped_mlp
from megatron_glm.ops.permute import RowMap, permute, unpermute

ROWS, KEYS, HEADS, SLOTS = 70, 300, 8, 256


def attention(backend: str, device: str) -> None:
    """Rows without keys, rows with few, -1 behind a row's length."""
    q, kv, grad = (torch.randn(*shape, device=device).bfloat16() for shape in ((ROWS, HEADS, 576), (KEYS, 576), (1, 1)))
    iq, ik = (torch.randn(*shape, device=device).bfloat16() for shape in ((ROWS, 32, 128), (KEYS, 128)))
    w = torch.randn(ROWS, 32, device=device)
    start = torch.zeros(ROWS, dtype=torch.int32, device=device)
    end = torch.arange(KEYS - ROWS, KEYS, dtype=torch.int32, device=device)
    end[::7] = 0
    idx = indexer.index_topk(iq, ik, w, start, end, SLOTS, backend, indexer.key_segments(start, end))
    length = (idx >= 0).sum(1).int()
    assert length.tolist() == end.clamp(max=SLOTS).tolist()
    leaves = q.requires_grad_(), kv.requires_grad_()
    out, _ = sparse_mla.sparse_mla(*leaves, idx, length, 512, 256**-0.5, backend)
    out.backward(grad.expand_as(out))
    dense = [torch.randn(ROWS, HEADS, 256, device=device).bfloat16().requires_grad_() for _ in range(3)]
    attended, _ = dense_mla.dense_mla(*dense, [0, 30, 0, 30, 30, 65, 30, 65], 256**-0.5, backend)
    attended.sum().backward()
    for tensor in (out, attended, *(leaf.grad for leaf in (*leaves, *dense))):
        assert tensor.isfinite().all()


def experts(device: str) -> None:
    """Tokens without experts, experts without tokens."""
    x = torch.randn(ROWS, 256, device=device).bfloat16().requires_grad_()
    ids, weights = torch.randint(0, 5, (ROWS, 4), device=device), torch.rand(ROWS, 4, device=device).requires_grad_()
    ids[::5] = -1
    matrices = [torch.randn(6, *shape, device=device).bfloat16().requires_grad_() for shape in ((256, 256), (256, 128))]
    rows = RowMap.build(ids, 6)
    moved, row_weights = permute(x, weights, rows)
    out = unpermute(grouped_mlp(moved, row_weights, rows.counts, *matrices), rows)
    out.sum().backward()
    assert out.isfinite().all() and x.grad.isfinite().all() and weights.grad.isfinite().all()


if __name__ == "__main__":
    backend, device = sys.argv[1:]
    torch.manual_seed(0)
    for deterministic in (False, True) if backend == "tilelang" else (False,):
        backends.load(backend, "auto", deterministic)
        attention(backend, device)
    experts(device)
