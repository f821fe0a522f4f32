"""The router between its two products: the choice of experts and their weights, a program for each token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _best(choice, ids, experts, k: tl.constexpr, block: tl.constexpr):
    """Rounds of one maximum over unique integers: the fp32 value in an order of integers, then the lower id."""
    taken: tl.constexpr = -(2**63) + 1  # below the key of every number
    token = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, block)
    value = tl.load(choice + token * experts + lane, mask=lane < experts, other=0.0)
    value = tl.where(value == 0, 0.0, value)  # -0 equals 0
    bits = value.to(tl.int32, bitcast=True)
    order = tl.where(value == value, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)  # NaN first, as torch sorts
    key = (order.to(tl.int64) << 32) | (block - 1 - lane).to(tl.int64)
    key = tl.where(lane < experts, key, taken)
    for i in tl.static_range(k):
        best = tl.max(key, axis=0)
        tl.store(ids + token * k + i, block - 1 - (best & 0xFFFFFFFF))
        key = tl.where(key == best, taken, key)


@triton.jit
def _weights(logits, ids, scores, weights, experts, scale, k: tl.constexpr, slots: tl.constexpr, norm: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, slots)
    at, inside = token * k + slot, slot < k
    chosen = tl.load(ids + at, mask=inside, other=0)
    score = tl.sigmoid(tl.load(logits + token * experts + chosen, mask=inside, other=0.0))
    weight = tl.where(inside, score, 0.0)
    if norm:
        weight = weight / (tl.sum(weight, axis=0) + 1e-20)
    tl.store(scores + at, score, mask=inside)
    tl.store(weights + at, weight * scale, mask=inside)


@triton.jit
def _weights_backward(
    grad, ids, scores, split, experts, scale, k: tl.constexpr, slots: tl.constexpr, norm: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot, lane = tl.arange(0, slots), tl.arange(0, block)
    at, inside = token * k + slot, slot < k
    chosen = tl.load(ids + at, mask=inside, other=-1)
    score = tl.load(scores + at, mask=inside, other=0.0)
    g = tl.load(grad + at, mask=inside, other=0.0) * scale
    if norm:
        total = tl.sum(score, axis=0) + 1e-20
        g = (g - tl.sum(g * score, axis=0) / total) / total
    g *= score * (1 - score)
    value = tl.sum(tl.where(chosen[:, None] == lane[None, :], g[:, None], 0.0), axis=0)
    high = value.to(tl.bfloat16)
    low = (value - high.to(tl.float32)).to(tl.bfloat16)
    tl.store(split + token * 2 * experts + lane, high, mask=lane < experts)
    tl.store(split + token * 2 * experts + experts + lane, low, mask=lane < experts)


def best(choice: Tensor, k: int) -> Tensor:
    """choice [t, E] fp32, k <= E -> [t, k] int64: the k greatest, the greatest first; of equals the lowest id."""
    tokens, experts = choice.shape
    ids = choice.new_empty(tokens, k, dtype=torch.int64)
    if tokens:
        block = triton.next_power_of_2(experts)
        _best[(tokens,)](choice.contiguous(), ids, experts, k, block, num_warps=triton.cdiv(block, 512))
    return ids


def expert_weights(logits: Tensor, ids: Tensor, normalise: bool, scale: float) -> tuple[Tensor, Tensor]:
    """logits [t, E] fp32, ids [t, K] -> sigmoids [t, K] of the chosen, and scale times them (over their sum)."""
    (tokens, k), experts = ids.shape, logits.shape[1]
    scores, weights = logits.new_empty(tokens, k), logits.new_empty(tokens, k)
    if tokens:
        slots = triton.next_power_of_2(k)
        given = logits.contiguous(), ids.contiguous(), scores, weights, experts, scale
        _weights[(tokens,)](*given, k, slots, normalise, num_warps=1)
    return scores, weights


def split_gradient(grad: Tensor, ids: Tensor, scores: Tensor, experts: int, normalise: bool, scale: float) -> Tensor:
    """grad [t, K] fp32 of the weights -> that of the logits as [t, 2E] bf16, two addends of each: high and low part."""
    tokens, k = ids.shape
    split = grad.new_empty(tokens, 2 * experts, dtype=torch.bfloat16)
    if tokens:
        sizes = k, triton.next_power_of_2(k), normalise, triton.next_power_of_2(experts)
        _weights_backward[(tokens,)](
            grad.contiguous(), ids.contiguous(), scores, split, experts, scale, *sizes, num_warps=1
        )
    return split
