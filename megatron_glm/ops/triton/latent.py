"""`ops/latent.py` with as few passes over memory as there are buffers: GEMMs write into the buffers that the attention
reads, and one kernel rotates. A buffer is zeroed only where rows of neither form remain in it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_glm.ops.rows import Rows, RowsByForm, put_rows, row_count
from megatron_glm.ops.triton.rope import move_rotated, rotate_


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
    def forward(ctx, q: Tensor, cos: Tensor, sin: Tensor, rows: RowsByForm, to_key: Tensor | None):
        nope = q.shape[2] - 2 * cos.shape[1]
        expanded = absorbed = q_nope = None
        if isinstance(rows[0], slice):
            expanded = q[rows[0]]
            rotate_(expanded[..., nope:], cos[rows[0]], sin[rows[0]])
        elif rows[0] is not None:
            expanded = q.new_empty(row_count(rows[0]), *q.shape[1:])
            move_rotated(q, expanded, cos, sin, source_rows=rows[0])
        if rows[1] is not None:
            assert to_key is not None
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
        if rows == (slice(0, ctx.shape[0]), None):
            assert grad_expanded is not None
            grad_q = grad_expanded.contiguous()
            move_rotated(grad_q[..., nope:], grad_q[..., nope:], cos, sin, inverse=True)
            return grad_q, None, None, None, None
        like = grad_expanded if grad_absorbed is None else grad_absorbed
        assert like is not None
        grad_q = _empty(like, ctx.shape[0], row_count(rows[0]) + row_count(rows[1]), *ctx.shape[1:])
        if rows[0] is not None:
            assert grad_expanded is not None
            if isinstance(rows[0], slice):
                move_rotated(grad_expanded, grad_q[rows[0]], cos[rows[0]], sin[rows[0]], inverse=True)
            else:
                move_rotated(grad_expanded, grad_q, cos, sin, target_rows=rows[0], inverse=True)
        if rows[1] is not None:
            assert grad_absorbed is not None
            part, latent = _view(grad_q, rows[1]), to_key.shape[2]
            grad_latent = _by_head(grad_absorbed[..., :latent])
            torch.bmm(grad_latent, to_key.transpose(1, 2), out=_by_head(part[..., :nope]))
            move_rotated(grad_absorbed[..., latent:], part[..., nope:], cos[rows[1]], sin[rows[1]], inverse=True)
            if not isinstance(rows[1], slice):
                put_rows(grad_q, rows[1], part)
            grad_to_key = torch.bmm(q_nope.permute(1, 2, 0), grad_latent)
        return grad_q, None, None, None, grad_to_key


def queries(
    q: Tensor, rope: tuple[Tensor, Tensor], rows: RowsByForm, to_key: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """`ops.latent.queries`, where q's rows and the gradient of all rows, which nothing else reads, turn in place."""
    return _Queries.apply(q, *rope, rows, to_key)


class _ExpandedKeys(torch.autograd.Function):
    @staticmethod
    def forward(ctx, kv: Tensor, weight: Tensor, rows: Rows, heads: int, nope: int):
        ctx.rows, ctx.heads, ctx.nope = rows, heads, nope
        ctx.save_for_backward(kv, weight)
        latents, (to_key, to_value) = kv[rows], _expansions(weight, heads, nope, kv.shape[1])
        keys, values = F.linear(latents, to_key), F.linear(latents[:, : weight.shape[1]], to_value)
        return keys.unflatten(1, (heads, -1)), values.unflatten(1, (heads, -1))

    @staticmethod
    def backward(ctx, grad_keys: Tensor, grad_values: Tensor):
        (kv, weight), rows, heads, nope = ctx.saved_tensors, ctx.rows, ctx.heads, ctx.nope
        latents, latent = kv[rows], weight.shape[1]
        to_key, to_value = _expansions(weight, heads, nope, kv.shape[1])
        grad_kv = _empty(kv, kv.shape[0], row_count(rows), kv.shape[1])
        part = _view(grad_kv, rows)
        torch.mm(grad_keys.flatten(1), to_key, out=part)
        part[:, :latent].addmm_(grad_values.flatten(1), to_value)
        if not isinstance(rows, slice):
            put_rows(grad_kv, rows, part)
        grad_weight = torch.empty_like(weight)
        by_head, shared = grad_weight.view(heads, -1, latent), latents[:, :latent].expand(heads, -1, -1)
        torch.bmm(grad_keys[..., :nope].permute(1, 2, 0), shared, out=by_head[:, :nope])
        torch.bmm(grad_values.permute(1, 2, 0), shared, out=by_head[:, nope:])
        return grad_kv, grad_weight, None, None, None


def _expansions(weight: Tensor, heads: int, nope: int, width: int) -> tuple[Tensor, Tensor]:
    """Weights [h * (N+R), C+R] and [h * V, C] whose products with latents are keys and values as attention reads them.

    A unit matrix in each head's part takes k_rope to its keys, which is exact, and its gradients to their sum.
    """
    latent = weight.shape[1]
    rope, by_head = width - latent, weight.view(heads, -1, latent)
    to_key = weight.new_zeros(heads, nope + rope, width)
    to_key[:, :nope, :latent] = by_head[:, :nope]
    to_key[:, nope:, latent:] = torch.eye(rope, dtype=weight.dtype, device=weight.device)
    return to_key.flatten(0, 1), by_head[:, nope:].flatten(0, 1)


def expanded_keys(kv: Tensor, weight: Tensor, rows: Rows, heads: int, nope: int) -> tuple[Tensor, Tensor]:
    """`ops.latent.expanded_keys`."""
    return _ExpandedKeys.apply(kv, weight, rows, heads, nope)


class _Outputs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, total: int, rows: RowsByForm, expanded: Tensor | None, absorbed: Tensor | None, to_value: Tensor | None
    ) -> Tensor:
        ctx.rows = rows
        ctx.save_for_backward(absorbed, to_value)
        like = absorbed if expanded is None else expanded
        assert like is not None
        width = to_value.shape[1] if to_value is not None and expanded is None else like.shape[2]
        out = _empty(like, total, row_count(rows[0]) + row_count(rows[1]), like.shape[1], width)
        if expanded is not None and rows[0] is not None:
            put_rows(out, rows[0], expanded)
        if absorbed is not None:
            assert rows[1] is not None and to_value is not None
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
    total: int, rows: RowsByForm, expanded: Tensor | None, absorbed: Tensor | None, to_value: Tensor | None
) -> Tensor:
    """`ops.latent.outputs`."""
    return _Outputs.apply(total, rows, expanded, absorbed, to_value)
