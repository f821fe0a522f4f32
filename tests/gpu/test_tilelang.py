"""Our TileLang kernels against the fp32 references, on a Hopper GPU."""

from __future__ import annotations

import pytest
import torch

from megatron_glm.ops.indexer import index_topk_torch
from megatron_glm.ops.sparse_mla import sparse_mla_backward_torch, sparse_mla_torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a Hopper GPU", allow_module_level=True)
pytest.importorskip("tilelang")

from megatron_glm.ops import tilelang as kernels  # noqa: E402

LATENT, WIDTH, SCALE = 512, 576, 256**-0.5


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda").bfloat16()


def error(value: torch.Tensor, reference: torch.Tensor) -> float:
    return ((value.float() - reference).norm() / reference.norm().clamp_min(1e-30)).item()


def selection(rows: int, total: int, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random ascending keys with lengths that meet every edge of the blocks of 64 and 128; -1 tails."""
    idx = torch.rand(rows, total, device="cuda").topk(slots).indices.sort(1).values.int()
    length = torch.randint(0, slots + 1, (rows,), dtype=torch.int32, device="cuda")
    edges = torch.tensor([0, 1, 63, 64, 65, 127, 128, 129, slots - 1, slots], dtype=torch.int32)
    length[: len(edges)] = edges
    idx.masked_fill_(torch.arange(slots, device="cuda") >= length[:, None], -1)
    return idx, length


def poison() -> None:
    """Fill the allocator's free blocks with NaN, so that an element nobody writes shows."""
    blocks = [torch.full((1 << size,), float("nan"), device="cuda") for size in range(10, 26)]
    del blocks


@pytest.mark.parametrize("heads", [1, 2, 4, 8, 16, 24, 32, 64, 128])
@pytest.mark.parametrize("deterministic", [False, True])
def test_sparse_mla(heads: int, deterministic: bool) -> None:
    torch.manual_seed(heads)
    rows, total, slots = 77, 1500, 512
    q, kv, grad = normal(rows, heads, WIDTH), normal(total, WIDTH), normal(rows, heads, LATENT)
    idx, length = selection(rows, total, slots)
    want_out, want_lse = sparse_mla_torch(q.float(), kv.float(), idx, length, LATENT, SCALE)
    want_q, want_kv = sparse_mla_backward_torch(
        grad.float(), q.float(), kv.float(), want_out, want_lse, idx, length, SCALE
    )
    poison()
    out, lse = kernels.sparse_mla_tilelang(q, kv, idx, length, LATENT, SCALE)
    poison()
    grad_q, grad_kv = kernels.sparse_mla_backward_tilelang(grad, q, kv, out, lse, idx, length, SCALE, deterministic)
    assert error(out, want_out) <= 5e-3
    assert torch.equal(lse[0], want_lse[0]) and (out[0] == 0).all() and (grad_q[0] == 0).all()
    torch.testing.assert_close(lse, want_lse, rtol=0, atol=1e-2)
    assert error(grad_q, want_q) <= 1e-2 and error(grad_kv, want_kv) <= 1e-2


@pytest.mark.parametrize("heads", [8, 128])
def test_deterministic_sums(monkeypatch, heads: int) -> None:
    """The same bits every time, in several parts, with a key that all rows select and slots that name unused keys."""
    rows, total, slots = 700, 600, 256
    q, kv, grad = normal(rows, heads, WIDTH), normal(total, WIDTH), normal(rows, heads, LATENT)
    idx, length = selection(rows, total, slots)
    idx[:, 0] = 3
    idx.masked_fill_(idx < 0, 5)
    out, lse = kernels.sparse_mla_tilelang(q, kv, idx, length, LATENT, SCALE)
    arguments = (grad, q, kv, out, lse, idx, length, SCALE, True)
    monkeypatch.setattr(kernels, "PART_BYTES", 1)  # one round of thread blocks at a time
    runs = []
    for _ in range(3):
        poison()
        runs.append(kernels.sparse_mla_backward_tilelang(*arguments))
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))
    plain = kernels.sparse_mla_backward_tilelang(*arguments[:-1])
    assert error(runs[0][0], plain[0].float()) <= 1e-3 and error(runs[0][1], plain[1].float()) <= 5e-3


@pytest.mark.parametrize("deterministic", [False, True])
def test_sparse_mla_rows_without_keys(deterministic: bool) -> None:
    q, kv, grad = normal(5, 64, WIDTH), normal(9, WIDTH), normal(5, 64, LATENT)
    idx = torch.full((5, 64), -1, dtype=torch.int32, device="cuda")
    length = torch.zeros(5, dtype=torch.int32, device="cuda")
    poison()
    out, lse = kernels.sparse_mla_tilelang(q, kv, idx, length, LATENT, SCALE)
    grad_q, grad_kv = kernels.sparse_mla_backward_tilelang(grad, q, kv, out, lse, idx, length, SCALE, deterministic)
    assert (out == 0).all() and (lse == float("-inf")).all() and (grad_q == 0).all() and (grad_kv == 0).all()


def test_sparse_mla_offsets_past_2_31() -> None:
    rows, heads = 2**31 // (128 * LATENT) + 200, 128
    q = torch.zeros(rows, heads, WIDTH, dtype=torch.bfloat16, device="cuda")
    q[-3:] = normal(3, heads, WIDTH)
    kv, idx = normal(300, WIDTH), torch.arange(64, dtype=torch.int32, device="cuda").repeat(rows, 1)
    length = torch.zeros(rows, dtype=torch.int32, device="cuda")
    length[-3:] = 64
    out, lse = kernels.sparse_mla_tilelang(q, kv, idx, length, LATENT, SCALE)
    want, want_lse = sparse_mla_torch(q[-3:].float(), kv.float(), idx[-3:], length[-3:], LATENT, SCALE)
    assert error(out[-3:], want) <= 5e-3
    grad = torch.zeros_like(out)
    grad[-3:] = normal(3, heads, LATENT)
    grad_q, grad_kv = kernels.sparse_mla_backward_tilelang(grad, q, kv, out, lse, idx, length, SCALE)
    want_q, want_kv = sparse_mla_backward_torch(
        grad[-3:].float(), q[-3:].float(), kv.float(), want, want_lse, idx[-3:], length[-3:], SCALE
    )
    assert error(grad_q[-3:], want_q) <= 1e-2 and error(grad_kv, want_kv) <= 1e-2


def test_sparse_mla_no_compile_per_length() -> None:
    kv = normal(700, WIDTH)
    counts = set()
    for rows, slots in ((3, 64), (10, 128), (50, 256)):
        idx, length = selection(max(rows, 10), 700, slots)
        kernels.sparse_mla_tilelang(normal(len(idx), 64, WIDTH), kv[: 400 + rows * 4], idx % 300, length, LATENT, SCALE)
        counts.add(kernels.compiled.cache_info().currsize)
    assert len(counts) == 1


def test_backward_stays_finite() -> None:
    rows, total, slots = 64, 400, 128
    for _ in range(1000):
        q, kv, grad = normal(rows, 64, WIDTH), normal(total, WIDTH), normal(rows, 64, LATENT)
        idx = torch.randint(0, total, (rows, slots), dtype=torch.int32, device="cuda")
        length = torch.randint(0, slots + 1, (rows,), dtype=torch.int32, device="cuda")
        out, lse = kernels.sparse_mla_tilelang(q, kv, idx, length, LATENT, SCALE)
        for gradient in kernels.sparse_mla_backward_tilelang(grad, q, kv, out, lse, idx, length, SCALE):
            assert torch.isfinite(gradient).all()


def test_refuses_by_name() -> None:
    idx, length = selection(10, 700, 128)
    with pytest.raises(ValueError, match="q of shape"):
        kernels.sparse_mla_tilelang(normal(10, 64, 192), normal(700, WIDTH), idx, length, LATENT, SCALE)
    with pytest.raises(ValueError, match="kv in torch.bfloat16"):
        kernels.sparse_mla_tilelang(normal(10, 64, WIDTH), normal(700, WIDTH).float(), idx, length, LATENT, SCALE)


def ranges(rows: int, total: int, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random key ranges, among them empty ones, the whole pack and lengths around `slots`."""
    start = torch.randint(0, total // 2, (rows,), dtype=torch.int32)
    end = start + torch.randint(0, total // 2, (rows,), dtype=torch.int32)
    start[:6] = torch.tensor([0, 0, total, 5, 5, 5])
    end[:6] = torch.tensor([0, total, total, 5 + slots - 1, 5 + slots, 5 + slots + 1])
    return start.cuda(), end.cuda()


@pytest.mark.parametrize("score_bytes", [1 << 29, 1 << 20])
def test_index_topk_integers_with_ties(monkeypatch, score_bytes: int) -> None:
    """On small integers every sum is exact, so the selection must be the reference's, ties included."""
    monkeypatch.setattr(kernels, "SCORE_BYTES", score_bytes)
    rows, total, slots = 203, 3001, 512
    iq = torch.randint(-1, 2, (rows, 32, 128), device="cuda").bfloat16()
    ik = torch.randint(-1, 2, (total, 128), device="cuda").bfloat16()
    ik[100:2000] = ik[100]
    w = torch.randint(-2, 3, (rows, 32), device="cuda").float()
    w[7] = 0
    start, end = ranges(rows, total, slots)
    got = kernels.index_topk_tilelang(iq, ik, w, start, end, slots)
    assert torch.equal(got, index_topk_torch(iq, ik, w, start, end, slots))


def test_index_topk_random() -> None:
    """On normal inputs two sums in another order can differ in the last bits, and only keys that close may swap."""
    rows, total, slots = 150, 5003, 1024
    iq, ik, w = normal(rows, 32, 128), normal(total, 128), torch.randn(rows, 32, device="cuda")
    start, end = ranges(rows, total, slots)
    got = kernels.index_topk_tilelang(iq, ik, w, start, end, slots).tolist()
    want = index_topk_torch(iq, ik, w, start, end, slots).tolist()
    differing = sum(len(set(a) ^ set(b)) for a, b in zip(got, want, strict=True))
    assert differing <= rows // 10
    for row in got:
        used = [key for key in row if key >= 0]
        assert used == sorted(set(used)) and row == used + [-1] * (slots - len(used))
