"""`ops/latent.py` with as few passes over memory as there are buffers: GEMMs write into parts of the buffer that the
attention reads, and one kernel moves what is left. A buffer is zeroed only where rows of neither form remain in it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from megatron_glm.ops.latent import Forms, Rows, count, put_rows
from megatron_glm.ops.triton.rope import move_rotated

HEADS = 16  # of one program, or of one step of a program


@triton.jit
def _expand(
    both,
    latents,
    keys,
    values,
    heads,
    latent_stride,
    nope: tl.constexpr,
    rope: tl.constexpr,
    value: tl.constexpr,
    block_heads: tl.constexpr,
    block_nope: tl.constexpr,
    block_rope: tl.constexpr,
    block_value: tl.constexpr,
):
    """keys = [both[:nope] | rope of all heads], values = both[nope:]."""
    row = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * block_heads + tl.arange(0, block_heads))[:, None]
    at = row * heads + head
    column = tl.arange(0, block_nope)[None, :]
    inside = (head < heads) & (column < nope)
    x = tl.load(both + at * (nope + value) + column, mask=inside)
    tl.store(keys + at * (nope + rope) + column, x, mask=inside)
    column = tl.arange(0, block_value)[None, :]
    inside = (head < heads) & (column < value)
    x = tl.load(both + at * (nope + value) + nope + column, mask=inside)
    tl.store(values + at * value + column, x, mask=inside)
    column = tl.arange(0, block_rope)[None, :]
    x = tl.load(latents + row * latent_stride + column, mask=column < rope)
    inside = (head < heads) & (column < rope)
    x = tl.broadcast_to(x, (block_heads, block_rope))
    tl.store(keys + at * (nope + rope) + nope + column, x, mask=inside)


@triton.jit
def _collapse(
    grad_keys,
    grad_values,
    grad_both,
    grad_latents,
    heads,
    latent_stride,
    nope: tl.constexpr,
    rope: tl.constexpr,
    value: tl.constexpr,
    block_heads: tl.constexpr,
    block_nope: tl.constexpr,
    block_rope: tl.constexpr,
    block_value: tl.constexpr,
):
    """The gradient of `_expand`: that of rope is a sum over the heads, in fp32 and in a fixed order."""
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros((block_heads, block_rope), tl.float32)
    for first in range(0, heads, block_heads):
        head = (first + tl.arange(0, block_heads))[:, None]
        at = row * heads + head
        column = tl.arange(0, block_nope)[None, :]
        inside = (head < heads) & (column < nope)
        x = tl.load(grad_keys + at * (nope + rope) + column, mask=inside)
        tl.store(grad_both + at * (nope + value) + column, x, mask=inside)
        column = tl.arange(0, block_value)[None, :]
        inside = (head < heads) & (column < value)
        x = tl.load(grad_values + at * value + column, mask=inside)
        tl.store(grad_both + at * (nope + value) + nope + column, x, mask=inside)
        column = tl.arange(0, block_rope)[None, :]
        inside = (head < heads) & (column < rope)
        x = tl.load(grad_keys + at * (nope + rope) + nope + column, mask=inside, other=0.0)
        total += x.to(tl.float32)
    column = tl.arange(0, block_rope)
    target = grad_latents + row * latent_stride + column
    tl.store(target, tl.sum(total, axis=0).to(grad_latents.dtype.element_ty), mask=column < rope)


def _by_head(x: Tensor) -> Tensor:
    """[n, h, d] -> [h, n, d], a view: GEMMs of all heads read and write through it."""
    return x.transpose(0, 1)


def _empty(like: Tensor, total: int, used: int, *shape: int) -> Tensor:
    """[total, *shape], zero unless all rows will be written."""
    return like.new_empty(total, *shape) if used == total else like.new_zeros(total, *shape)


def _view(x: Tensor, rows: Rows) -> Tensor:
    """x[rows] to write into: the rows themselves, or a buffer that `put_rows` moves there."""
    return x[rows] if isinstance(rows, slice) else x.new_empty(rows.numel(), *x.shape[1:])


class _Queries(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, cos: Tensor, sin: Tensor, rows: Forms, to_key: Tensor | None):
        nope = q.shape[2] - 2 * cos.shape[1]
        expanded = absorbed = q_nope = None
        if rows[0] is not None:
            expanded = q.new_empty(count(rows[0]), *q.shape[1:])
            if isinstance(rows[0], slice):
                move_rotated(q[rows[0]], expanded, cos[rows[0]], sin[rows[0]])
            else:
                move_rotated(q, expanded, cos, sin, source_rows=rows[0])
        if rows[1] is not None:
            part, latent = q[rows[1]], to_key.shape[2]
            absorbed = q.new_empty(*part.shape[:2], latent + q.shape[2] - nope)
            q_nope = part[..., :nope]
            torch.bmm(_by_head(q_nope), to_key, out=_by_head(absorbed[..., :latent]))
            move_rotated(part[..., nope:], absorbed[..., latent:], cos[rows[1]], sin[rows[1]])
        ctx.rows, ctx.shape = rows, q.shape
        ctx.save_for_backward(q_nope, cos, sin, to_key)
        return expanded, absorbed

    @staticmethod
    def backward(ctx, grad_expanded: Tensor | None, grad_absorbed: Tensor | None):
        (q_nope, cos, sin, to_key), rows = ctx.saved_tensors, ctx.rows
        nope, grad_to_key = ctx.shape[2] - 2 * cos.shape[1], None
        like = grad_expanded if grad_absorbed is None else grad_absorbed
        grad_q = _empty(like, ctx.shape[0], count(rows[0]) + count(rows[1]), *ctx.shape[1:])
        if rows[0] is not None:
            if isinstance(rows[0], slice):
                move_rotated(grad_expanded, grad_q[rows[0]], cos[rows[0]], sin[rows[0]], inverse=True)
            else:
                move_rotated(grad_expanded, grad_q, cos, sin, target_rows=rows[0], inverse=True)
        if rows[1] is not None:
            part, latent = _view(grad_q, rows[1]), to_key.shape[2]
            grad_latent = _by_head(grad_absorbed[..., :latent])
            torch.bmm(grad_latent, to_key.transpose(1, 2), out=_by_head(part[..., :nope]))
            move_rotated(grad_absorbed[..., latent:], part[..., nope:], cos[rows[1]], sin[rows[1]], inverse=True)
            if not isinstance(rows[1], slice):
                put_rows(grad_q, rows[1], part)
            grad_to_key = torch.bmm(q_nope.permute(1, 2, 0), grad_latent)
        return grad_q, None, None, None, grad_to_key


def queries(
    q: Tensor, rope: tuple[Tensor, Tensor], rows: Forms, to_key: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """`ops.latent.queries`."""
    return _Queries.apply(q, *rope, rows, to_key)


class _ExpandedKeys(torch.autograd.Function):
    @staticmethod
    def forward(ctx, kv: Tensor, weight: Tensor, rows: Rows, heads: int, nope: int):
        ctx.rows, ctx.heads, ctx.nope = rows, heads, nope
        ctx.save_for_backward(kv, weight)
        latents, latent = kv[rows], weight.shape[1]
        rope, value = kv.shape[1] - latent, weight.shape[0] // heads - nope
        both = F.linear(latents[:, :latent], weight)
        keys = kv.new_empty(len(latents), heads, nope + rope)
        values = kv.new_empty(len(latents), heads, value)
        if len(latents):
            blocks = _blocks(heads, nope, rope, value)
            grid = len(latents), triton.cdiv(heads, blocks[0])
            _expand[grid](both, latents[:, latent:], keys, values, heads, latents.stride(0), nope, rope, value, *blocks)
        return keys, values

    @staticmethod
    def backward(ctx, grad_keys: Tensor, grad_values: Tensor):
        (kv, weight), rows, heads, nope = ctx.saved_tensors, ctx.rows, ctx.heads, ctx.nope
        latent = weight.shape[1]
        rope, value = kv.shape[1] - latent, weight.shape[0] // heads - nope
        grad_kv = _empty(kv, kv.shape[0], count(rows), kv.shape[1])
        part = _view(grad_kv, rows)
        grad_both = kv.new_empty(len(part), weight.shape[0])
        if len(part):
            sources = grad_keys.contiguous(), grad_values.contiguous()
            sizes = nope, rope, value, *_blocks(heads, nope, rope, value)
            _collapse[(len(part),)](*sources, grad_both, part[:, latent:], heads, part.stride(0), *sizes, num_warps=8)
        torch.mm(grad_both, weight, out=part[:, :latent])
        if not isinstance(rows, slice):
            put_rows(grad_kv, rows, part)
        return grad_kv, grad_both.t() @ kv[rows][:, :latent], None, None, None


def _blocks(heads: int, *sizes: int) -> list[int]:
    return [min(HEADS, triton.next_power_of_2(heads)), *(triton.next_power_of_2(size) for size in sizes)]


def expanded_keys(kv: Tensor, weight: Tensor, rows: Rows, heads: int, nope: int) -> tuple[Tensor, Tensor]:
    """`ops.latent.expanded_keys`."""
    return _ExpandedKeys.apply(kv, weight, rows, heads, nope)


class _Outputs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, total: int, rows: Forms, expanded: Tensor | None, absorbed: Tensor | None, to_value: Tensor | None
    ) -> Tensor:
        ctx.rows = rows
        ctx.save_for_backward(absorbed, to_value)
        like = absorbed if expanded is None else expanded
        width = to_value.shape[1] if expanded is None else expanded.shape[2]
        out = _empty(like, total, count(rows[0]) + count(rows[1]), like.shape[1], width)
        if expanded is not None:
            put_rows(out, rows[0], expanded)
        if absorbed is not None:
            part = _view(out, rows[1])
            torch.bmm(_by_head(absorbed), to_value.transpose(1, 2), out=_by_head(part))
            if not isinstance(rows[1], slice):
                put_rows(out, rows[1], part)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        absorbed, to_value = ctx.saved_tensors
        grad_expanded = grad_absorbed = grad_to_value = None
        if ctx.rows[0] is not None:
            grad_expanded = grad[ctx.rows[0]]
        if absorbed is not None:
            part = _by_head(grad[ctx.rows[1]])
            grad_absorbed = torch.empty_like(absorbed)
            torch.bmm(part, to_value, out=_by_head(grad_absorbed))
            grad_to_value = torch.bmm(part.transpose(1, 2), _by_head(absorbed))
        return None, None, grad_expanded, grad_absorbed, grad_to_value


def outputs(
    total: int, rows: Forms, expanded: Tensor | None, absorbed: Tensor | None, to_value: Tensor | None
) -> Tensor:
    """`ops.latent.outputs`."""
    return _Outputs.apply(total, rows, expanded, absorbed, to_value)
