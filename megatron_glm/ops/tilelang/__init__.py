"""Our own TileLang kernels for Hopper, behind the contracts of `ops/indexer.py` and `ops/sparse_mla.py`.

Importing this package imports TileLang; do so only when the backend is chosen. Kernels compile at their first use,
once per number of local heads, never per length; TileLang caches them on disk.
"""

from __future__ import annotations

from functools import cache

import tilelang
import torch
from torch import Tensor

from megatron_glm.ops.sparse_mla import PART_BYTES, sums_in_order
from megatron_glm.ops.tilelang import indexer, sparse_backward, sparse_forward
from megatron_glm.ops.triton.row_sums import add_rows

SCORE_BYTES = 1 << 29  # of the fp32 score chunk of `index_topk_tilelang`

# The kernels place every barrier and every bounds check themselves. Warpgroups run side by side, so that no two
# shared buffers may share memory, whatever the order in which the text uses them. Fast math: exp2 and log2 of the
# hardware, no denormals.
PASSES = {
    "tl.disable_thread_storage_sync": True,
    "tl.disable_shared_memory_reuse": True,
    "tl.disable_safe_memory_legalize": True,
    "tl.enable_fast_math": True,
}


@cache
def compiled(kernel, *static):
    """The compiled kernel made by the factory `kernel` for its static arguments."""
    return tilelang.compile(kernel(*static), pass_configs=PASSES)


def _check(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int | None, ...]) -> None:
    """Raise unless `tensor` is a contiguous CUDA tensor of this dtype and shape (None: any size)."""
    if tensor.dtype != dtype:
        raise ValueError(f"tilelang kernels need {name} in {dtype}, got {tensor.dtype}")
    got = tuple(tensor.shape)
    if len(got) != len(shape) or any(want not in (None, size) for want, size in zip(shape, got, strict=True)):
        raise ValueError(f"tilelang kernels need {name} of shape {shape}, got {got}")
    if not (tensor.is_cuda and tensor.is_contiguous()):
        layout = f"strides {tensor.stride()} on {tensor.device}"
        raise ValueError(f"tilelang kernels need {name} contiguous on a GPU, got {layout}")


def index_topk_tilelang(iq: Tensor, ik: Tensor, w: Tensor, start: Tensor, end: Tensor, k: int) -> Tensor:
    """`index_topk` for bf16, 32 heads of 128: scores of a chunk of rows at a time, then a radix select."""
    iq, ik, w = iq.contiguous(), ik.contiguous(), w.contiguous()
    rows, total = iq.shape[0], ik.shape[0]
    _check("iq", iq, torch.bfloat16, (None, indexer.HEADS, indexer.DIM))
    _check("ik", ik, torch.bfloat16, (None, indexer.DIM))
    _check("w", w, torch.float32, (rows, indexer.HEADS))
    output = torch.empty((rows, k), dtype=torch.int32, device=iq.device)
    # A multiple of the score kernel's rows a block, so that only the last chunk has an incomplete block.
    block = max(1, SCORE_BYTES // (4 * total * indexer.QUERIES)) * indexer.QUERIES
    scores = torch.empty((min(rows, block), total), dtype=torch.float32, device=iq.device)
    for begin in range(0, rows, block):
        part = slice(begin, min(begin + block, rows))
        chunk = scores[: part.stop - begin]
        compiled(indexer.score_kernel)(iq[part], ik, w[part], start[part], end[part], chunk)
        compiled(indexer.select_kernel)(chunk, start[part], end[part], output[part])
    return output


def sparse_mla_tilelang(
    q: Tensor, kv: Tensor, idx: Tensor, length: Tensor, v_dim: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Forward of `sparse_mla` for bf16, C = 512, R = 64, any number of heads (blocks of 64)."""
    q, kv, idx = q.contiguous(), kv.contiguous(), idx.contiguous()
    rows, heads = q.shape[:2]
    _check("q", q, torch.bfloat16, (None, None, sparse_forward.WIDTH))
    _check("kv", kv, torch.bfloat16, (None, sparse_forward.WIDTH))
    if v_dim != sparse_forward.LATENT:
        raise ValueError(f"tilelang kernels serve v_dim = {sparse_forward.LATENT} only, got {v_dim}")
    out = q.new_empty((rows, heads, v_dim))
    lse = torch.empty((rows, heads), dtype=torch.float32, device=q.device)
    if rows:
        compiled(sparse_forward.forward_kernel, heads)(q, kv, idx, length, out, lse, scale)
    return out, lse


def sparse_mla_backward_tilelang(
    grad: Tensor,
    q: Tensor,
    kv: Tensor,
    out: Tensor,
    lse: Tensor,
    idx: Tensor,
    length: Tensor,
    scale: float,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor]:
    """Backward of `sparse_mla`. dKV is summed in fp32: by atomics, or in a fixed order, if `deterministic` or for so
    many keys that it is faster.

    For the latter the part of each query and slot goes to memory, in bf16 as P and dS are before it, for as many
    queries at a time as `PART_BYTES` hold; then the parts of each key are added in the order of the queries.
    """
    grad, q, kv, idx = grad.contiguous(), q.contiguous(), kv.contiguous(), idx.contiguous()
    rows, heads = q.shape[:2]
    _check("grad", grad, torch.bfloat16, (rows, heads, sparse_forward.LATENT))
    _check("q", q, torch.bfloat16, (None, None, sparse_forward.WIDTH))
    _check("kv", kv, torch.bfloat16, (None, sparse_forward.WIDTH))
    grad_q = torch.empty_like(q)
    sums = torch.zeros(kv.shape, dtype=torch.float32, device=q.device)
    ordered = sums_in_order("tilelang", deterministic, len(kv))
    order = sparse_backward.PART_ORDER if ordered else sparse_backward.SUM_ORDER
    if rows:
        kernel = compiled(sparse_backward.backward_kernel, heads, ordered)
        if ordered:
            _add_in_order(kernel, kv, sums, scale, grad, q, out, lse, idx, length, grad_q)
        else:
            kernel(grad, q, kv, out, lse, idx, length, grad_q, sums, scale)
    grad_kv = torch.empty_like(kv)
    groups = sparse_forward.WIDTH // (8 * order)
    grad_kv.view(len(kv), groups, order, 4, 2).copy_(sums.view(len(kv), groups, 4, order, 2).transpose(2, 3))
    return grad_q, grad_kv


def _add_in_order(kernel, kv: Tensor, sums: Tensor, scale: float, *by_row: Tensor) -> None:
    """Run the backward kernel over the rows of `by_row` and add to `sums`, the same bits every time."""
    heads, (rows, slots) = by_row[1].shape[1], by_row[4].shape
    blocks = -(-heads // sparse_forward.BLOCK)  # thread blocks a row
    processors = torch.cuda.get_device_properties(kv.device).multi_processor_count
    room = PART_BYTES // (2 * slots * sparse_forward.WIDTH)
    # Full rounds of thread blocks: a processor runs one at a time.
    step = max(processors, room // processors * processors) // blocks
    parts = kv.new_empty(min(rows, step) * blocks, slots, sparse_forward.WIDTH)
    for begin in range(0, rows, step):
        grad, q, out, lse, idx, length, grad_q = (x[begin : begin + step] for x in by_row)
        part = parts[: len(q) * blocks]
        kernel(grad, q, kv, out, lse, idx, length, grad_q, part, scale)
        add_rows(part, idx, length, sums)
