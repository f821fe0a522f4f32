"""Before and after the two attention ops of MLA: queries, expanded keys and outputs.

A row attends in one of two forms: *expanded*, where each head has keys and values of its own (dense rows), or
*absorbed*, where the query goes into the latent space and all heads share one key (sparse rows). h = heads of this
rank; C latent, R rope, N = qk_nope, V = v_head_dim. `to_key` [h, N, C] and `to_value` [h, V, C] are the parts of
kv_b_proj's weight.

In bf16 on CUDA these are few passes over memory (`ops/triton/latent.py`); the code here runs in every other case and
says what they compute.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_glm.ops.rope import apply_rope
from megatron_glm.ops.rows import Rows, RowsByForm, row_count


def queries(
    q: Tensor, rope: tuple[Tensor, Tensor], rows: RowsByForm, to_key: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Queries of the rows of each form.

    Args:
        q: [t, h, N+R] projected queries, which may be overwritten; rope: cos, sin [t, R/2].
        to_key: None without absorbed rows.
    Returns:
        expanded [n, h, N+R], whose last R dims are rotated; absorbed [m, h, C+R], whose first C are q_nope @ to_key.
    """
    if _fused(q):
        from megatron_glm.ops.triton import latent  # needs Triton, which a CPU-only torch has not

        return latent.queries(q, rope, rows, to_key)
    width = 2 * rope[0].shape[1]
    q_nope, q_rope = q.split((q.shape[2] - width, width), dim=-1)
    q_rope = apply_rope(q_rope, *rope)
    expanded = absorbed = None
    if rows[0] is not None:
        expanded = torch.cat((q_nope[rows[0]], q_rope[rows[0]]), dim=-1)
    if rows[1] is not None:
        q_latent = torch.einsum("thn,hnc->thc", q_nope[rows[1]], to_key)
        absorbed = torch.cat((q_latent, q_rope[rows[1]]), dim=-1)
    return expanded, absorbed


def expanded_keys(kv: Tensor, weight: Tensor, rows: Rows, heads: int, nope: int) -> tuple[Tensor, Tensor]:
    """Keys [n, h, N+R] and values [n, h, V] of rows of the latents kv [T, C+R]; weight [h * (N+V), C] of kv_b_proj."""
    if _fused(kv):
        from megatron_glm.ops.triton import latent

        return latent.expanded_keys(kv, weight, rows, heads, nope)
    latent = weight.shape[1]
    c, k_rope = kv[rows].split((latent, kv.shape[1] - latent), dim=-1)
    both = F.linear(c, weight).view(-1, heads, weight.shape[0] // heads)
    k_nope, v = both.split((nope, both.shape[2] - nope), dim=-1)
    return torch.cat((k_nope, k_rope.unsqueeze(1).expand(-1, heads, -1)), dim=-1), v.contiguous()


def outputs(
    total: int, rows: RowsByForm, expanded: Tensor | None, absorbed: Tensor | None, to_value: Tensor | None
) -> Tensor:
    """[total, h, V] of all rows from the outputs of each form; zero in rows of neither.

    Args:
        expanded: [n, h, V]; absorbed: [m, h, C], still in the latent space.
    """
    if absorbed is None and expanded is not None and row_count(rows[0]) == total:
        return expanded
    given = expanded if absorbed is None else absorbed
    assert given is not None, "there are rows of one form at least"
    if _fused(given):
        from megatron_glm.ops.triton import latent

        return latent.outputs(total, rows, expanded, absorbed, to_value)
    parts: list[tuple[Rows, Tensor]] = [] if expanded is None or rows[0] is None else [(rows[0], expanded)]
    if absorbed is not None and rows[1] is not None:
        parts.append((rows[1], torch.einsum("thc,hvc->thv", absorbed, to_value)))
    if len(parts) == 1 and row_count(parts[0][0]) == total:
        return parts[0][1]
    out = parts[0][1].new_zeros(total, *parts[0][1].shape[1:])
    for at, values in parts:
        if isinstance(at, slice):
            out = out.slice_scatter(values, 0, at.start, at.stop)
        else:
            out = out.index_copy(0, at, values)
    return out


class LatentAdapter(NamedTuple):
    """The adapter of kv_b_proj in both forms: what scale * B(A c) adds. A sum of the weights would be rounded to bf16.

    first: A [r, C]; to_key [h, N, r] and to_value [h, V, r]: the parts of B by head.
    """

    first: Tensor
    to_key: Tensor
    to_value: Tensor
    scale: float

    def add_to_queries(self, absorbed: Tensor, q_nope: Tensor) -> Tensor:
        """absorbed [m, h, C+R] of q_nope [m, h, N]."""
        latent = self.first.shape[1]
        added = (torch.einsum("thn,hnr->thr", q_nope, self.to_key) * self.scale) @ self.first
        return torch.cat((absorbed[..., :latent] + added, absorbed[..., latent:]), dim=-1)

    def add_to_keys(self, keys: Tensor, values: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [n, h, N+R] and values [n, h, V] of the latents c [n, C]."""
        low, nope = F.linear(c, self.first) * self.scale, self.to_key.shape[1]
        added = torch.einsum("tr,hnr->thn", low, self.to_key)
        keys = torch.cat((keys[..., :nope] + added, keys[..., nope:]), dim=-1)
        return keys, values + torch.einsum("tr,hvr->thv", low, self.to_value)

    def add_to_outputs(self, out: Tensor, rows: Rows, absorbed: Tensor) -> Tensor:
        """out [total, h, V] in these rows, whose outputs in the latent space are absorbed [m, h, C]."""
        added = torch.einsum("thr,hvr->thv", F.linear(absorbed, self.first) * self.scale, self.to_value)
        if isinstance(rows, slice):
            return out.slice_scatter(out[rows] + added, 0, rows.start, rows.stop)
        return out.index_add(0, rows, added)


def _fused(x: Tensor) -> bool:
    return x.is_cuda and x.dtype == torch.bfloat16
