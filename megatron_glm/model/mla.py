"""Multi-head latent attention with DeepSeek sparse attention (DSA).

Under TP the down-projections, latent norms and the indexer are replicated and run on the sequence shard; what is
gathered are latents. q_b and kv_b are column-, o_proj row-parallel.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_glm.model.indexer import Indexer
from megatron_glm.model.norm import RMSNorm
from megatron_glm.model.plan import AttentionPlan
from megatron_glm.model_config import ModelConfig
from megatron_glm.ops.dense_mla import dense_mla
from megatron_glm.ops.kept import decided_once, kept_products
from megatron_glm.ops.rope import apply_rope
from megatron_glm.ops.sparse_mla import sparse_mla
from megatron_glm.parallel.collectives import gather_pack, gather_rows
from megatron_glm.parallel.groups import ParallelGroups
from megatron_glm.parallel.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear


class MLA(nn.Module):
    """Attention of one layer. h = heads of this rank; C latent, R rope, N = qk_nope, V = v_head_dim."""

    def __init__(self, config: ModelConfig, layer: int, groups: ParallelGroups, backend: str) -> None:
        super().__init__()
        tp, heads = groups.tp, config.num_attention_heads
        if heads % tp.size():
            raise ValueError(
                f"num_attention_heads {heads} is not divisible by --tensor-model-parallel-size {tp.size()}"
            )
        self.groups, self.backend = groups, backend
        self.heads = heads // tp.size()
        self.nope, self.rope, self.value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        self.latent = config.kv_lora_rank
        self.scale = config.qk_head_dim**-0.5

        self.q_a_proj = ReplicatedLinear(config.hidden_size, config.q_lora_rank, tp)
        self.q_a_layernorm = RMSNorm(config.q_lora_rank, config.latent_norm_eps, tp)
        self.q_b_proj = ColumnParallelLinear(config.q_lora_rank, heads * config.qk_head_dim, tp)
        self.kv_a_proj_with_mqa = ReplicatedLinear(config.hidden_size, self.latent + self.rope, tp)
        self.kv_a_layernorm = RMSNorm(self.latent, config.latent_norm_eps, tp)
        self.kv_b_proj = ColumnParallelLinear(self.latent, heads * (self.nope + self.value), tp)
        self.o_proj = RowParallelLinear(heads * self.value, config.hidden_size, tp)
        self.indexer = Indexer(config, tp, groups.tp_cp, backend) if config.has_indexer(layer) else None

    def forward(self, x: Tensor, plan: AttentionPlan, topk: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Attend.

        Args:
            x: [t/TP, D] normalised hidden states of the sequence shard.
            topk: [t, K] int32 selection of the nearest earlier full layer; a full layer replaces it.
        Returns:
            [t/TP, D] and the selection in force after this layer. Rows of padding give zero.
        """
        with kept_products():
            qr = self.q_a_proj(x)
        qr = self.q_a_layernorm(qr)
        if self.indexer is not None and plan.sparse is not None:
            topk = decided_once(lambda: self.indexer(x, qr, plan))
        kv = self._latents(x, plan)
        q = self.q_b_proj(gather_rows(qr, self.groups.tp)).view(-1, self.heads, self.nope + self.rope)
        q_nope, q_rope = q.split((self.nope, self.rope), dim=-1)
        q_rope = apply_rope(q_rope, *plan.rope)

        parts = []
        if plan.dense is not None:
            parts.append((plan.dense.rows, self._attend_dense(q_nope, q_rope, kv, plan)))
        if plan.sparse is not None:
            parts.append((plan.sparse.rows, self._attend_sparse(q_nope, q_rope, kv, topk, plan)))
        out = _put_rows(q.shape[0], parts).flatten(1)
        with kept_products():
            return self.o_proj(out), topk

    def _latents(self, x: Tensor, plan: AttentionPlan) -> Tensor:
        """Keys of the whole pack, `[c | k_rope]` [T, C+R] in pack order."""
        with kept_products():
            kv = self.kv_a_proj_with_mqa(x)
        c, k_rope = kv.split((self.latent, self.rope), dim=-1)
        kv = torch.cat((self.kv_a_layernorm(c), apply_rope(k_rope, *plan.shard_rope)), dim=-1)
        return gather_pack(kv, self.groups.tp_cp, plan.order)

    def _attend_dense(self, q_nope: Tensor, q_rope: Tensor, kv: Tensor, plan: AttentionPlan) -> Tensor:
        """Non-absorbed: keys and values are expanded for each head. -> [dense rows, h, V]"""
        rows = plan.dense.rows
        q = torch.cat((_take_rows(q_nope, rows), _take_rows(q_rope, rows)), dim=-1)
        c, k_rope = _take_rows(kv, plan.dense.keys).split((self.latent, self.rope), dim=-1)
        k_nope, v = (
            self.kv_b_proj(c).view(-1, self.heads, self.nope + self.value).split((self.nope, self.value), dim=-1)
        )
        k = torch.cat((k_nope, k_rope.unsqueeze(1).expand(-1, self.heads, -1)), dim=-1)
        with kept_products():
            return dense_mla(q, k, v.contiguous(), plan.dense.segments, self.scale, self.backend)[0]

    def _attend_sparse(self, q_nope: Tensor, q_rope: Tensor, kv: Tensor, topk: Tensor, plan: AttentionPlan) -> Tensor:
        """Absorbed: queries go into the latent space, where all heads share one key. -> [sparse rows, h, V]"""
        rows = plan.sparse.rows
        weight = self.kv_b_proj.weight.view(self.heads, self.nope + self.value, self.latent)
        to_key, to_value = weight.split((self.nope, self.value), dim=1)
        q_latent = torch.einsum("thn,hnc->thc", _take_rows(q_nope, rows), to_key)
        q = torch.cat((q_latent, _take_rows(q_rope, rows)), dim=-1)
        idx = _take_rows(topk, rows)
        with kept_products():
            out, _ = sparse_mla(q, kv, idx, plan.sparse.length, self.latent, self.scale, self.backend)
        return torch.einsum("thc,hvc->thv", out, to_value)


def _take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """x[rows], without a copy where the plan's rows, which rise, are all rows of x."""
    return x if rows.numel() == x.shape[0] else x[rows]


def _put_rows(total: int, parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """[total, ...] of (rows, values) that share no row; zero in rows of none. One part of all rows is no copy."""
    rows, values = parts[0]
    if len(parts) == 1 and rows.numel() == total:
        return values
    out = values.new_zeros(total, *values.shape[1:])
    for rows, values in parts:
        out = out.index_copy(0, rows, values)
    return out
