"""One decoder layer, and the MTP layer that is built around one."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from megatron_glm.config import KernelConfig, ParallelConfig
from megatron_glm.config.model import ModelConfig
from megatron_glm.model.mla import MLA
from megatron_glm.model.mlp import MLP
from megatron_glm.model.moe import MoE
from megatron_glm.model.norm import RMSNorm
from megatron_glm.model.pack import PackRows
from megatron_glm.parallel.groups import ParallelGroups
from megatron_glm.parallel.linear import ReplicatedLinear


class LayerOutput(NamedTuple):
    hidden: Tensor  # [t/TP, D]
    topk: Tensor | None  # [t, K] int32: the selection in force after the layer
    expert_ids: Tensor | None  # [t/TP, K] int64 in a MoE layer


class DecoderLayer(nn.Module):
    """x += attention(norm(x)); x += mlp(norm(x))."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        groups: ParallelGroups,
        parallel: ParallelConfig,
        kernels: KernelConfig,
    ) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, groups.tp)
        self.self_attn = MLA(config, layer, groups, kernels.attention_backend)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, groups.tp)
        self.mlp: nn.Module = (
            MoE(config, groups, parallel)
            if config.is_moe(layer)
            else MLP(config.hidden_size, config.intermediate_size, groups.tp)
        )

    def forward(self, x: Tensor, pack: PackRows, topk: Tensor | None) -> LayerOutput:
        attended, topk = self.self_attn(self.input_layernorm(x), pack, topk)
        x, normed = self.post_attention_layernorm.add(x, attended)
        if isinstance(self.mlp, MoE):
            out, expert_ids = self.mlp(normed, pack)
            return LayerOutput(x + out, topk, expert_ids)
        return LayerOutput(x + self.mlp(normed), topk, None)


class MTPLayer(DecoderLayer):
    """The weights of a multi-token-prediction layer: held, sharded, saved and converted, frozen and never run."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        groups: ParallelGroups,
        parallel: ParallelConfig,
        kernels: KernelConfig,
    ) -> None:
        super().__init__(config, layer, groups, parallel, kernels)
        self.enorm = RMSNorm(config.hidden_size, config.rms_norm_eps, groups.tp)
        self.hnorm = RMSNorm(config.hidden_size, config.rms_norm_eps, groups.tp)
        self.eh_proj = ReplicatedLinear(2 * config.hidden_size, config.hidden_size, groups.tp)
        self.shared_head = nn.ModuleDict({"norm": RMSNorm(config.hidden_size, config.rms_norm_eps, groups.tp)})
