"""One decoder layer, and the MTP layer that is built around one."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron_glm.config import RunConfig
from megatron_glm.model.balance import Balance
from megatron_glm.model.indexer_training import Losses, Student
from megatron_glm.model.mla import MLA
from megatron_glm.model.mlp import MLP
from megatron_glm.model.moe import MoE
from megatron_glm.model.norm import RMSNorm
from megatron_glm.model.pack import PackRows
from megatron_glm.parallel.dispatch import of_layer
from megatron_glm.parallel.dispatch.local import Dispatcher
from megatron_glm.parallel.groups import ParallelGroups
from megatron_glm.parallel.linear import ReplicatedLinear


class LayerOutput(NamedTuple):
    hidden: Tensor  # [t/TP, D]
    topk: Tensor | None  # [t, K] int32: the selection in force after the layer
    expert_ids: Tensor | None  # [t/TP, K] int64 in a MoE layer
    student: Student  # of the indexer whose selection is in force; empty where none is trained
    losses: Losses  # what this layer adds to losses by name: sums over the rows of the sequence shard


class DecoderLayer(nn.Module):
    """x += attention(norm(x)); x += mlp(norm(x))."""

    def __init__(self, config: RunConfig, groups: ParallelGroups, layer: int, dispatcher: Dispatcher) -> None:
        super().__init__()
        model, norm = config.model, (config.model.hidden_size, config.model.rms_norm_eps, groups.tp)
        self.input_layernorm = RMSNorm(*norm)
        self.self_attn = MLA(config, groups, layer)
        self.post_attention_layernorm = RMSNorm(*norm)
        balances = config.losses.balances and layer < model.num_hidden_layers  # not the MTP layer
        balance = Balance(config.losses, model, groups) if balances else None
        self.mlp: nn.Module = (
            MoE(model, groups, of_layer(dispatcher, config, layer), balance)
            if model.is_moe(layer)
            else MLP(model.hidden_size, model.intermediate_size, groups.tp)
        )

    def share_casts(self, gathers: bool) -> None:
        """Norms cast their result for the product in FP8 that takes it; with `gathers` only q_a takes it as it is."""
        attention, mlp = self.self_attn, self.mlp.shared_experts if isinstance(self.mlp, MoE) else self.mlp
        self.input_layernorm.casts = attention.q_a_proj.products.takes_casts
        attention.q_a_layernorm.casts = attention.q_b_proj.products.takes_casts and not gathers
        assert isinstance(mlp, MLP)
        self.post_attention_layernorm.casts = mlp.gate_proj.products.takes_casts and not gathers

    def forward(self, x: Tensor, pack: PackRows, topk: Tensor | None, student: Student = ()) -> LayerOutput:
        return self._run(x, pack, topk, student, None)[0]

    def _run(
        self, x: Tensor, pack: PackRows, topk: Tensor | None, student: Student, latents: Tensor | None
    ) -> tuple[LayerOutput, Tensor]:
        """The layer, and the latents that it has attended to: see `MLA.forward`."""
        normed = self.input_layernorm(x)
        attended, topk, student, losses, seen = self.self_attn(normed, pack, topk, student, latents)
        x, normed = self.post_attention_layernorm.add(x, attended)
        if isinstance(self.mlp, MoE):
            out, expert_ids, of_router = self.mlp(normed, pack)
            return LayerOutput(x + out, topk, expert_ids, student, losses | of_router), seen
        return LayerOutput(x + self.mlp(normed), topk, None, student, losses), seen


class MTPOutput(NamedTuple):
    hidden: Tensor  # [t/TP, D], behind the layer's own last norm
    topk: Tensor | None
    latents: Tensor  # [T, C+R] that the step has attended to
    expert_ids: Tensor | None
    losses: Losses  # as of a decoder layer


class MTPLayer(DecoderLayer):
    """A multi-token-prediction layer: a decoder layer whose input joins what was predicted with the token there."""

    def __init__(self, config: RunConfig, groups: ParallelGroups, layer: int, dispatcher: Dispatcher) -> None:
        super().__init__(config, groups, layer, dispatcher)
        width, eps = config.model.hidden_size, config.model.rms_norm_eps
        self.enorm = RMSNorm(width, eps, groups.tp)
        self.hnorm = RMSNorm(width, eps, groups.tp)
        self.eh_proj = ReplicatedLinear(2 * width, width, groups.tp)
        self.shared_head = nn.ModuleDict({"norm": RMSNorm(width, eps, groups.tp)})

    def forward(  # of other arguments than a decoder layer's, which it is built as
        self, embedded: Tensor, previous: Tensor, pack: PackRows, topk: Tensor | None, latents: Tensor | None
    ) -> MTPOutput:
        """One step.

        Args:
            embedded: [t/TP, D] embeddings of the step's tokens; previous: [t/TP, D] hidden states of the step before,
                or of the main model, behind the last norm.
            topk, latents: of the first step where this one shares them, else None.
        """
        x = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(previous)], dim=-1))
        output, latents = self._run(x, pack, topk, (), latents)
        hidden = self.shared_head["norm"](output.hidden)
        return MTPOutput(hidden, output.topk, latents, output.expert_ids, output.losses)
