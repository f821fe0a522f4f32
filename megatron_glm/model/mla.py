"""Multi-head latent attention with DeepSeek sparse attention (DSA).

Under TP the down-projections, latent norms and the indexer are replicated and run on the sequence shard; what is
gathered are latents. q_b and kv_b are column-, o_proj row-parallel.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_glm.config import RunConfig
from megatron_glm.model.indexer import Indexer
from megatron_glm.model.indexer_training import Attended, IndexerTeaching, Losses, Student
from megatron_glm.model.norm import RMSNorm
from megatron_glm.model.pack import PackRows
from megatron_glm.ops.dense_mla import dense_mla
from megatron_glm.ops.latent import LatentAdapter, expanded_keys, outputs, queries
from megatron_glm.ops.recompute import keep_choice
from megatron_glm.ops.rope import apply_rope
from megatron_glm.ops.sparse_mla import sparse_mla
from megatron_glm.parallel.collectives import gather_pack, gather_rows
from megatron_glm.parallel.groups import ParallelGroups
from megatron_glm.parallel.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from megatron_glm.parallel.streams import beside


class MLA(nn.Module):
    """Attention of one layer. h = heads of this rank; C latent, R rope, N = qk_nope, V = v_head_dim."""

    def __init__(self, run: RunConfig, groups: ParallelGroups, layer: int) -> None:
        super().__init__()
        config, backend = run.model, run.kernels.attention_backend
        tp, heads = groups.tp, config.num_attention_heads
        self.groups, self.backend = groups, backend
        self.heads = heads // tp.size()
        self.nope, self.rope, self.value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        self.latent = config.kv_lora_rank
        self.scale = config.qk_head_dim**-0.5

        self.q_a_proj = ReplicatedLinear(config.hidden_size, config.q_lora_rank, tp, kept=True)
        self.q_a_layernorm = RMSNorm(config.q_lora_rank, config.latent_norm_eps, tp)
        self.q_b_proj = ColumnParallelLinear(config.q_lora_rank, heads * config.qk_head_dim, tp)
        self.kv_a_proj_with_mqa = ReplicatedLinear(config.hidden_size, self.latent + self.rope, tp, kept=True)
        self.kv_a_layernorm = RMSNorm(self.latent, config.latent_norm_eps, tp)
        self.kv_b_proj = ColumnParallelLinear(self.latent, heads * (self.nope + self.value), tp)
        self.o_proj = RowParallelLinear(heads * self.value, config.hidden_size, tp, kept=True)
        self.indexer = Indexer(config, tp, groups.tp_cp, backend) if config.has_indexer(layer) else None
        mode, mtp = run.indexer.indexer_training, layer >= config.num_hidden_layers
        teaches = mode == "sparse" and run.losses.mtp_steps > 0 if mtp else mode != "off"
        self.teaching = IndexerTeaching(run, layer, groups) if teaches else None

    def forward(
        self,
        x: Tensor,
        pack: PackRows,
        topk: Tensor | None,
        student: Student = (),
        latents: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, Student, Losses, Tensor]:
        """Attend.

        Args:
            x: [t/TP, D] normalised hidden states of the sequence shard.
            topk: [t, K] int32 selection of the nearest earlier full layer; a full layer replaces it.
            student: of the same layer, see `indexer_training`; empty where no indexer is trained.
            latents: [T, C+R] of an earlier call, to attend to with its selection `topk`; None: those of x.
        Returns:
            [t/TP, D], where rows of padding are zero; selection and student in force after this layer; what it adds
            to the losses of `IndexerTeaching.losses`, if it teaches; and the latents.
        """
        cp_without_tp = self.groups.cp.size() > 1 and self.groups.tp.size() == 1  # q communicates under TP
        kv = None if latents is not None else beside(cp_without_tp, lambda x: self._latents(x, pack), x)
        qr = self.q_a_layernorm(self.q_a_proj(x))
        teaching = self.teaching if torch.is_grad_enabled() and kv is not None else None
        if (indexer := self.indexer) is not None and teaching is not None:
            topk, student = self._choose(indexer, teaching, x, qr, pack)
        elif indexer is not None and kv is not None and pack.sparse is not None:
            topk = keep_choice(lambda: indexer(x, qr, pack))
        q = self.q_b_proj(gather_rows(qr, self.groups.tp)).view(-1, self.heads, self.nope + self.rope)
        if kv is not None:
            latents = kv()
        assert latents is not None
        losses = {}
        out, attended = self.attend(q, latents, topk, pack)
        if teaching is not None and teaching.weight:
            to_key, _ = self._absorbed_weights()
            losses = teaching.losses(student, attended, latents, to_key, topk, pack)
        return self.o_proj(out.flatten(1)), topk, student, losses, latents

    def _choose(
        self, indexer: Indexer, teaching: IndexerTeaching, x: Tensor, qr: Tensor, pack: PackRows
    ) -> tuple[Tensor | None, Student]:
        """Selection and student of an indexer that is trained."""
        query, shard_key, weight = indexer.features(x, qr, pack)
        key = gather_pack(shard_key, self.groups.tp_cp, pack.order)
        topk = None if pack.sparse is None else keep_choice(lambda: indexer.select(query, key, weight, pack))
        return topk, teaching.student(query, shard_key, key, weight, topk, pack)

    def _absorbed_weights(self) -> tuple[Tensor, ...]:
        """kv_b_proj's weight by head: [h, N, C], that makes keys of latents, and [h, V, C], values."""
        return self._by_head(self.kv_b_proj.weight)

    def _by_head(self, weight: Tensor) -> tuple[Tensor, ...]:
        """[h * (N+V), C or rank] -> the parts of each head for keys and for values."""
        return weight.view(self.heads, -1, weight.shape[1]).split((self.nope, self.value), dim=1)

    def _latent_adapter(self) -> LatentAdapter | None:
        kv_b = self.kv_b_proj
        if not kv_b.adapter_scale:
            return None
        to_key, to_value = self._by_head(kv_b.lora_B)
        return LatentAdapter(kv_b.lora_A, to_key, to_value, kv_b.adapter_scale)

    def _latents(self, x: Tensor, pack: PackRows) -> Tensor:
        """Keys of the whole pack, `[c | k_rope]` [T, C+R] in pack order."""
        c, k_rope = self.kv_a_proj_with_mqa(x).split((self.latent, self.rope), dim=-1)
        kv = torch.cat((self.kv_a_layernorm(c), apply_rope(k_rope, *pack.shard_rope)), dim=-1)
        return gather_pack(kv, self.groups.tp_cp, pack.order)

    def attend(self, q: Tensor, kv: Tensor, topk: Tensor | None, pack: PackRows) -> tuple[Tensor, list[Attended]]:
        """Queries [t, h, N+R] as projected, which may be overwritten, latents [T, C+R], selection [t, K] -> [t, h, V].

        Also the queries of each form, rotated, with their lse.

        Dense rows expand keys and values for each head; sparse rows take the query into the latent space.
        """
        dense, sparse, weight = pack.dense, pack.sparse, self.kv_b_proj.weight
        to_key = to_value = out_dense = out_sparse = None
        attended, adapter, q_nope = [], self._latent_adapter(), q[..., : self.nope]
        if sparse is not None:
            to_key, to_value = self._absorbed_weights()
        q_dense, q_sparse = queries(q, pack.rope, pack.rows, to_key)
        if dense is not None:
            assert q_dense is not None
            k, v = expanded_keys(kv, weight, dense.keys, self.heads, self.nope)
            if adapter is not None:
                k, v = adapter.add_to_keys(k, v, kv[dense.keys, : self.latent])
            out_dense, lse = dense_mla(q_dense, k, v, dense.segments, self.scale, self.backend)
            attended.append(Attended(dense.rows, q_dense, lse, absorbed=False))
        if sparse is not None:
            assert q_sparse is not None and topk is not None, "a shared layer needs the selection of the one before"
            if adapter is not None:
                q_sparse = adapter.add_to_queries(q_sparse, q_nope[sparse.rows])
            idx = topk[sparse.rows]
            out_sparse, lse = sparse_mla(q_sparse, kv, idx, sparse.length, self.latent, self.scale, self.backend)
            attended.append(Attended(sparse.rows, q_sparse, lse, absorbed=True))
        out = outputs(q.shape[0], pack.rows, out_dense, out_sparse, to_value)
        if adapter is not None and sparse is not None and out_sparse is not None:
            out = adapter.add_to_outputs(out, sparse.rows, out_sparse)
        return out, attended
