"""The lightning indexer of DSA: chooses the keys that a layer, and the shared layers after it, attend to."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_glm.config.model import ModelConfig
from megatron_glm.model.norm import LayerNorm
from megatron_glm.model.pack import PackRows
from megatron_glm.ops.indexer import index_topk
from megatron_glm.ops.rope import apply_rope, rotate_
from megatron_glm.ops.routing import linear_in_fp32
from megatron_glm.ops.rows import put_rows, row_count
from megatron_glm.parallel.collectives import gather_pack, gather_values
from megatron_glm.parallel.linear import ReplicatedLinear


class Indexer(nn.Module):
    """Scores the keys of the pack for the query rows of this rank's sequence shard."""

    def __init__(self, config: ModelConfig, tp: ProcessGroup, tp_cp: ProcessGroup, backend: str) -> None:
        super().__init__()
        self.n_heads, self.head_dim = config.index_n_heads, config.index_head_dim
        self.rope_dim = config.qk_rope_head_dim
        self.tp, self.tp_cp, self.backend = tp, tp_cp, backend
        self.wq_b = ReplicatedLinear(config.q_lora_rank, self.n_heads * self.head_dim, tp)
        self.wk = ReplicatedLinear(config.hidden_size, self.head_dim, tp)
        self.k_norm = LayerNorm(self.head_dim, config.indexer_norm_eps, tp)
        self.weights_proj = ReplicatedLinear(config.hidden_size, self.n_heads, tp)

    @torch.no_grad()
    def forward(self, x: Tensor, qr: Tensor, pack: PackRows) -> Tensor:
        """Select keys.

        Args:
            x: [t/TP, D] input of the attention; qr: [t/TP, q_lora_rank] normalised query latent.
        Returns:
            [t, K] int32 pack positions for all local rows, the same on every TP rank; -1 in unused slots and in rows
            that need no selection.
        """
        sparse = pack.sparse
        assert sparse is not None, "no row needs a selection"
        rows, (cos, sin) = sparse.shard_rows, pack.shard_rope
        key = self._rotate(self.k_norm(self.wk(x)), cos, sin)
        key = gather_pack(key, self.tp_cp, pack.order)
        query = self.wq_b(qr[rows]).view(-1, self.n_heads, self.head_dim)
        query = self._rotate(query, cos[rows], sin[rows])
        return self._select(query, key, self._head_weights(x[rows]), x.shape[0], pack)

    def features(self, x: Tensor, qr: Tensor, pack: PackRows) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [t/TP, Hi, Di], keys [t/TP, Di] and head weights [t/TP, Hi] fp32, for all rows of the shard.

        Differentiable in the indexer's weights, not in x and qr.
        """
        x, qr, rope = x.detach(), qr.detach(), pack.shard_rope

        def rotated(head: Tensor) -> Tensor:
            first, rest = head.split((self.rope_dim, self.head_dim - self.rope_dim), dim=-1)
            return torch.cat((apply_rope(first, *rope), rest), dim=-1)

        query = rotated(self.wq_b(qr).view(-1, self.n_heads, self.head_dim))
        weight = F.linear(x.float(), self.weights_proj.weight.float()) * self._weight_scale
        return query, rotated(self.k_norm(self.wk(x))), weight

    @torch.no_grad()
    def select(self, query: Tensor, key: Tensor, weight: Tensor, pack: PackRows) -> Tensor:
        """`forward` from `features`, with the keys gathered: [T, Di]."""
        assert pack.sparse is not None, "no row needs a selection"
        rows = pack.sparse.shard_rows
        return self._select(query[rows], key, weight[rows], len(query), pack)

    def _select(self, query: Tensor, key: Tensor, weight: Tensor, total: int, pack: PackRows) -> Tensor:
        """Of the rows that select; total: t/TP."""
        sparse = pack.sparse
        assert sparse is not None
        ranges = sparse.start, sparse.end
        selected = index_topk(query, key, weight, *ranges, pack.slots, self.backend, sparse.segments)
        if row_count(sparse.shard_rows) < total:
            part, selected = selected, selected.new_full((total, pack.slots), -1)
            put_rows(selected, sparse.shard_rows, part)
        return gather_values(selected, self.tp)

    @property
    def _weight_scale(self) -> float:
        return (self.n_heads * self.head_dim) ** -0.5

    def _head_weights(self, x: Tensor) -> Tensor:
        """[n, Hi] fp32, because a rounded head weight moves the selection.

        The scale of the scores is positive, so it passes through the relu and is folded in here.
        """
        return linear_in_fp32(x, self.weights_proj.weight) * self._weight_scale

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rope on the first dims of an index head (in MLA it is on the last), in place: x is a fresh projection."""
        rotate_(x[..., : self.rope_dim], cos, sin)
        return x
