"""Teacher and student of the indexer's loss over selected keys, a program a row, in Triton; imported on CUDA only.

See `ops/indexer_loss.py` for what the functions compute. Products take bf16 and add in fp32. On an H200, 4,096 rows of
up to 2,048 keys: teacher 1.9 ms (cuDNN's kernel 1.3), student 0.4, its backward 1.3 (cuDNN's 14, where rows have
unused slots, and 2.5 where they have none).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 64  # slots that a program works on at a time
FEW_HEADS = {"block": BLOCK, "num_warps": 4, "num_stages": 3}
MANY_HEADS = {"block": 32, "num_warps": 8, "num_stages": 2}  # above 64: what fits beside 128 queries of 576
LOG2E = tl.constexpr(1.4426950408889634)  # e^x = 2^(x LOG2E)


@triton.jit
def _attention_mass(
    q, kv, idx, lse, used, mass, slots, scale, heads,
    padded: tl.constexpr, left: tl.constexpr, right: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """mass [n, K]: over the heads, the sum of exp(scale * q . key - lse); the width is left + right."""
    row = tl.program_id(0).to(tl.int64)
    head, column, last = tl.arange(0, padded), tl.arange(0, left), left + tl.arange(0, right)
    width = left + right
    here = (head < heads)[:, None]
    query = q + (row * heads + head)[:, None] * width
    first_query = tl.load(query + column[None, :], mask=here, other=0.0)
    last_query = tl.load(query + last[None, :], mask=here, other=0.0)
    total = tl.load(lse + row * heads + head, mask=head < heads, other=float("inf"))
    count = tl.load(used + row)
    for first in range(0, count, block):
        slot = first + tl.arange(0, block)
        inside = slot < count
        key = kv + tl.load(idx + row * slots + slot, mask=inside, other=0).to(tl.int64)[:, None] * width
        scores = tl.dot(first_query, tl.trans(tl.load(key + column[None, :])))
        scores = tl.dot(last_query, tl.trans(tl.load(key + last[None, :])), scores)
        seen = tl.sum(tl.exp2((scores * scale - total[:, None]) * LOG2E), axis=0)
        tl.store(mass + row * slots + slot, seen, mask=inside)


@triton.jit
def _scores(
    iq, ik, w, idx, used, scores, slots, heads: tl.constexpr, dim: tl.constexpr, block: tl.constexpr
):  # fmt: skip
    """scores [n, K] of the indexer."""
    row = tl.program_id(0).to(tl.int64)
    head, column = tl.arange(0, heads), tl.arange(0, dim)
    queries = tl.load(iq + (row * heads + head)[:, None] * dim + column[None, :])
    weight = tl.load(w + row * heads + head)
    count = tl.load(used + row)
    for first in range(0, count, block):
        slot = first + tl.arange(0, block)
        inside = slot < count
        key = tl.load(idx + row * slots + slot, mask=inside, other=0).to(tl.int64)
        keys = tl.load(ik + key[:, None] * dim + column[None, :])
        products = tl.maximum(tl.dot(queries, tl.trans(keys)), 0.0)
        tl.store(scores + row * slots + slot, tl.sum(products * weight[:, None], axis=0), mask=inside)


@triton.jit
def _student_backward(
    grad, total, log_probs, iq, ik, w, idx, used, grad_q, grad_k, grad_w, slots,
    heads: tl.constexpr, dim: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Gradients of a row's queries and head weights, and what it adds to its keys' [T, Di] fp32.

    A row begins with another block than its neighbours: they select nearly the same keys and add to them in turn.
    """
    row = tl.program_id(0).to(tl.int64)
    head, column = tl.arange(0, heads), tl.arange(0, dim)
    at = (row * heads + head)[:, None] * dim + column[None, :]
    queries = tl.load(iq + at)
    weight, given = tl.load(w + row * heads + head), tl.load(total + row)
    count = tl.load(used + row)
    blocks = (count + block - 1) // block
    sum_q, sum_w = tl.zeros((heads, dim), tl.float32), tl.zeros((heads,), tl.float32)
    for turn in range(0, blocks):
        slot = (turn + row.to(tl.int32)) % blocks * block + tl.arange(0, block)
        inside = slot < count
        key = tl.load(idx + row * slots + slot, mask=inside, other=0).to(tl.int64)
        keys = tl.load(ik + key[:, None] * dim + column[None, :])
        probability = tl.exp2(tl.load(log_probs + row * slots + slot, mask=inside, other=0.0) * LOG2E)
        of_score = tl.load(grad + row * slots + slot, mask=inside, other=0.0) - probability * given
        of_score = tl.where(inside, of_score, 0.0)[None, :]
        products = tl.dot(queries, tl.trans(keys))
        sum_w += tl.sum(tl.maximum(products, 0.0) * of_score, axis=1)
        of_product = tl.where(products > 0, of_score * weight[:, None], 0.0).to(keys.dtype)
        sum_q = tl.dot(of_product, keys, sum_q)
        of_keys = tl.dot(tl.trans(of_product), queries)
        tl.atomic_add(grad_k + key[:, None] * dim + column[None, :], of_keys, mask=inside[:, None], sem="relaxed")
    tl.store(grad_q + at, sum_q.to(grad_q.dtype.element_ty))
    tl.store(grad_w + row * heads + head, sum_w)


def attention_mass_triton(q: Tensor, kv: Tensor, idx: Tensor, lse: Tensor, scale: float) -> Tensor:
    """`ops.indexer_loss.attention_mass`."""
    (rows, heads, width), slots = q.shape, idx.shape[1]
    left = 1 << (width.bit_length() - 1)
    mass = torch.zeros(idx.shape, dtype=torch.float32, device=q.device)
    padded = max(16, triton.next_power_of_2(heads))
    if rows:
        _attention_mass[(rows,)](
            q.contiguous(), kv, idx.contiguous(), lse.contiguous(), _used(idx), mass, slots, scale, heads,
            padded, left, width - left, **FEW_HEADS if padded <= 64 else MANY_HEADS,
        )  # fmt: skip
    return mass


def student_log_probs_triton(iq: Tensor, ik: Tensor, w: Tensor, idx: Tensor) -> Tensor:
    """`ops.indexer_loss.student_log_probs`."""
    (rows, heads, dim), slots = iq.shape, idx.shape[1]
    scores = torch.full(idx.shape, float("-inf"), device=iq.device)
    if rows:
        _scores[(rows,)](
            iq.contiguous(), ik, w.contiguous(), idx.contiguous(), _used(idx), scores, slots, heads, dim, BLOCK
        )
    return scores.log_softmax(-1).masked_fill_(idx < 0, 0.0)


def student_backward_triton(
    grad: Tensor, iq: Tensor, ik: Tensor, w: Tensor, idx: Tensor, log_probs: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums into ik's gradient by atomics: last bits vary by run."""
    (rows, heads, dim), slots = iq.shape, idx.shape[1]
    grad_q, grad_w = torch.empty(iq.shape, dtype=iq.dtype, device=iq.device), torch.empty_like(w)
    grad_k = torch.zeros(ik.shape, dtype=torch.float32, device=ik.device)
    if rows:
        grad = grad.masked_fill(idx < 0, 0.0)
        _student_backward[(rows,)](
            grad, grad.sum(-1), log_probs, iq.contiguous(), ik, w.contiguous(), idx.contiguous(), _used(idx),
            grad_q, grad_k, grad_w, slots, heads, dim, BLOCK, num_warps=2,
        )  # fmt: skip
    return grad_q, grad_k.to(ik.dtype), grad_w


def _used(idx: Tensor) -> Tensor:
    """Used slots of each row, int32 [n]."""
    return (idx >= 0).sum(-1, dtype=torch.int32)
