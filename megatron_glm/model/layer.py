"""One decoder layer, and the MTP layer that is built around one."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from megatron_glm.config import RunConfig
from megatron_glm.model.indexer_training import Student
from megatron_glm.model.mla import MLA
from megatron_glm.model.mlp import MLP
from megatron_glm.model.moe import MoE
from megatron_glm.model.norm import RMSNorm
from megatron_glm.model.pack import PackRows
from megatron_glm.parallel.dispatch.local import Dispatcher
from megatron_glm.parallel.groups import ParallelGroups
from megatron_glm.parallel.linear import ReplicatedLinear


class LayerOutput(NamedTuple):
    hidden: Tensor  # [t/TP, D]
    topk: Tensor | None  # [t, K] int32: the selection in force after the layer
    expert_ids: Tensor | None  # [t/TP, K] int64 in a MoE layer
    student: Student  # of the indexer whose selection is in force; empty where none is trained
    indexer_loss: Tensor | None  # fp32 scalar, this layer's share of a sum over the rows of the sequence shard


class DecoderLayer(nn.Module):
    """x += attention(norm(x)); x += mlp(norm(x))."""

    def __init__(self, config: RunConfig, groups: ParallelGroups, layer: int, dispatcher: Dispatcher) -> None:
        super().__init__()
        model, norm = config.model, (config.model.hidden_size, config.model.rms_norm_eps, groups.tp)
        self.input_layernorm = RMSNorm(*norm)
        self.self_attn = MLA(config, groups, layer)
        self.post_attention_layernorm = RMSNorm(*norm)
        self.mlp: nn.Module = (
            MoE(model, groups, dispatcher)
            if model.is_moe(layer)
            else MLP(model.hidden_size, model.intermediate_size, groups.tp)
        )

    def forward(self, x: Tensor, pack: PackRows, topk: Tensor | None, student: Student = ()) -> LayerOutput:
        attended, topk, student, loss = self.self_attn(self.input_layernorm(x), pack, topk, student)
        x, normed = self.post_attention_layernorm.add(x, attended)
        if isinstance(self.mlp, MoE):
            out, expert_ids = self.mlp(normed, pack)
            return LayerOutput(x + out, topk, expert_ids, student, loss)
        return LayerOutput(x + self.mlp(normed), topk, None, student, loss)


class MTPLayer(DecoderLayer):
    """The weights of a multi-token-prediction layer: held, sharded, saved and converted, frozen and never run."""

    def __init__(self, config: RunConfig, groups: ParallelGroups, layer: int, dispatcher: Dispatcher) -> None:
        super().__init__(config, groups, layer, dispatcher)
        width, eps = config.model.hidden_size, config.model.rms_norm_eps
        self.enorm = RMSNorm(width, eps, groups.tp)
        self.hnorm = RMSNorm(width, eps, groups.tp)
        self.eh_proj = ReplicatedLinear(2 * width, width, groups.tp)
        self.shared_head = nn.ModuleDict({"norm": RMSNorm(width, eps, groups.tp)})
