"""What an attention layer adds to the training of the indexer whose selection it uses.

The layer with the indexer hands its student on, beside the selection: in the sparse stage the log-probabilities of the
selected keys, [t/TP, K] fp32; in dense warm-up, where those would be [t/TP, T], the indexer's queries, keys and head
weights. Each layer that teaches compares its own attention with it. Neither the layer's input nor its attention gets
a gradient from this.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_glm.config import IndexerConfig, RunConfig
from megatron_glm.config.model import ModelConfig
from megatron_glm.model.pack import PackRows
from megatron_glm.ops.indexer_loss import (
    Chunk,
    attention_mass,
    dense_kl,
    dense_mass,
    selected_kl,
    student_log_probs,
    visible_keys,
)
from megatron_glm.ops.recompute import keep_product
from megatron_glm.ops.rows import Rows, part_of, put_rows, row_count
from megatron_glm.parallel.collectives import gather_pack, scatter_sum_rows
from megatron_glm.parallel.groups import ParallelGroups
from megatron_glm.parallel.pipeline.carry import CarryField

Student = tuple[Tensor, ...]  # the tensors of `student_fields`; empty where nothing is trained
Losses = dict[str, Tensor]  # fp32 scalars by name
ROWS = 4096  # whose queries are taken into the latent space at a time


class Attended(NamedTuple):
    """Queries of one form [n, h, N+R] or, if absorbed, [n, h, C+R], and their lse [n, h], of these local rows."""

    rows: Rows
    queries: Tensor
    lse: Tensor
    absorbed: bool


def student_fields(
    config: IndexerConfig, model: ModelConfig, stages: tuple[bool, ...], rows: int, total: int, dtype: torch.dtype
) -> tuple[CarryField, ...]:
    """The student as it crosses between chunks; nothing if only the layer with the indexer teaches.

    Args:
        stages: for each stage, whether it starts with a layer that uses an earlier layer's selection.
        rows: t/TP; total: T; dtype: of the hidden states.
    """
    if config.indexer_training == "off" or config.indexer_teacher == "own":
        return ()
    heads, dim = model.index_n_heads, model.index_head_dim
    fields: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "index_log_probs": ((rows, min(model.index_topk, total)), torch.float32)
    }
    if config.indexer_training == "warmup":
        fields = {
            "index_query": ((rows, heads, dim), dtype),
            "index_key": ((rows, dim), dtype),
            "index_weight": ((rows, heads), torch.float32),
        }
    return tuple(
        CarryField(name, shape, kind, differentiable=True, stages=stages) for name, (shape, kind) in fields.items()
    )


class IndexerTeaching:
    """The teaching of one layer; heads: of this rank, N = nope, scale: of the attention's scores."""

    def __init__(self, run: RunConfig, layer: int, groups: ParallelGroups) -> None:
        self.config, self.groups, self.backend = run.indexer, groups, run.kernels.attention_backend
        model = run.model
        self.weight = self.config.taught_by(model, layer)
        self.mtp = layer >= model.num_hidden_layers
        if self.mtp:
            self.weight /= model.mtp_selections(run.losses.mtp_steps)
        self.heads, self.nope = model.num_attention_heads, model.qk_nope_head_dim
        self.scale = model.qk_head_dim**-0.5

    def student(self, iq: Tensor, shard_key: Tensor, ik: Tensor, w: Tensor, topk: Tensor | None, pack: PackRows):
        """What the layer with the indexer hands on.

        Args:
            iq [t/TP, Hi, Di], shard_key [t/TP, Di] and w [t/TP, Hi] of the sequence shard; ik: [T, Di], of the pack.
            topk: [t, K], None where no row selects.
        """
        if self.config.indexer_training == "warmup":
            return iq, shard_key, w
        keys = self._keys(topk, pack)[pack.shard]
        if self.mtp and pack.valid is not None:  # rows without an input token
            keys = keys.masked_fill(~pack.valid.unsqueeze(1), -1)
        return (student_log_probs(iq, ik, w, keys, self.backend),)

    def losses(
        self,
        student: Student,
        attended: list[Attended],
        kv: Tensor,
        to_key: Tensor,
        topk: Tensor | None,
        pack: PackRows,
    ) -> Losses:
        """What this layer adds to the loss "indexer" and, in warm-up, to "recall": sums over the rows of the shard.

        Recall is a number without gradient, see `ops.indexer_loss.recalled`.

        Args:
            kv: [T, C+R] latents; to_key: [h, N, C], that takes a query's first N dims into the latent space.
        """
        attended = [part._replace(queries=part.queries.detach()) for part in attended]
        kv, to_key = kv.detach(), to_key.detach()
        if self.config.indexer_training == "sparse":
            keys = self._keys(topk, pack)
            teacher = keep_product(lambda: self._selected_teacher(attended, kv, to_key, keys))
            if self.mtp and pack.valid is not None:
                teacher = teacher * pack.valid.unsqueeze(1)
            (log_probs,) = student
            return {"indexer": self.weight * selected_kl(log_probs, teacher, self.config.coefficient)}
        loss, recall = self._dense_loss(student, attended, kv, to_key, pack)
        return {"indexer": self.weight * loss, "recall": self.weight * recall}

    def _keys(self, topk: Tensor | None, pack: PackRows) -> Tensor:
        """[t, K] int32: the keys over which each local row teaches, -1 in unused slots.

        A row that sees at most K keys selects all of them, though no selection was made for it where it is dense.
        """
        seen = (pack.end - pack.start).unsqueeze(1)
        slot = torch.arange(pack.slots, dtype=torch.int32, device=seen.device)
        keys = (pack.start.unsqueeze(1) + slot).masked_fill(slot >= seen, -1)
        if self.config.indexer_loss_rows == "sparse":
            keys = torch.full_like(keys, -1)
        return keys.masked_fill(seen > pack.slots, -1) if topk is None else torch.where(seen <= pack.slots, keys, topk)

    @torch.no_grad()
    def _selected_teacher(self, attended: list[Attended], kv: Tensor, to_key: Tensor, keys: Tensor) -> Tensor:
        """p [t/TP, K] fp32 of the sequence shard: the mean over the heads of all TP ranks."""
        mass = torch.zeros(keys.shape, dtype=torch.float32, device=keys.device)
        for rows, queries, lse, absorbed in attended:
            for begin in range(0, len(queries), ROWS):
                part, local = slice(begin, begin + ROWS), part_of(rows, begin, begin + ROWS)
                q = queries[part] if absorbed else self._absorb(queries[part], to_key)
                put_rows(mass, local, attention_mass(q, kv, keys[local], lse[part], self.scale, self.backend))
        return scatter_sum_rows(mass, self.groups.tp) / self.heads

    def _dense_loss(
        self, student: Student, attended: list[Attended], kv: Tensor, to_key: Tensor, pack: PackRows
    ) -> tuple[Tensor, Tensor]:
        (iq, shard_key, w), tp = student, self.groups.tp
        ik = gather_pack(shard_key, self.groups.tp_cp, pack.order)
        queries, lse = _all_rows(attended, len(pack.start))

        def of_ranks(x: Tensor, chunk: Chunk) -> Tensor:
            """The rows of a chunk in every rank's sequence shard: each rank has heads that the others need."""
            return x.unflatten(0, (tp.size(), -1))[:, chunk[0] : chunk[1]].flatten(0, 1)

        def teacher(chunk: Chunk) -> Tensor:
            keys = slice(*chunk[2:])
            visible = visible_keys(of_ranks(pack.start, chunk), of_ranks(pack.end, chunk), keys)
            q = self._absorb(of_ranks(queries, chunk), to_key)
            mass = dense_mass(q, kv[keys], of_ranks(lse, chunk), visible, self.scale)
            return scatter_sum_rows(mass, tp) / self.heads

        start, end = pack.start[pack.shard], pack.end[pack.shard]
        return dense_kl(iq, ik, w, start, end, pack.chunks, teacher, self.config.coefficient, pack.slots)

    def _absorb(self, queries: Tensor, to_key: Tensor) -> Tensor:
        """[n, h, N+R], rotated -> [n, h, C+R]."""
        q_nope, q_rope = queries.split((self.nope, queries.shape[2] - self.nope), dim=-1)
        return torch.cat((torch.einsum("thn,hnc->thc", q_nope, to_key), q_rope), dim=-1)


def _all_rows(attended: list[Attended], total: int) -> tuple[Tensor, Tensor]:
    """Queries [t, h, N+R] and lse [t, h] of all local rows, where every row that is no padding is dense."""
    rows, queries, lse, _ = attended[0]
    if row_count(rows) == total:
        return queries, lse
    all_queries, all_lse = queries.new_zeros(total, *queries.shape[1:]), lse.new_zeros(total, lse.shape[1])
    put_rows(all_queries, rows, queries)
    put_rows(all_lse, rows, lse)
    return all_queries, all_lse
