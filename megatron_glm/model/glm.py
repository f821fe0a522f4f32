"""GLMChunk: the layers of one virtual pipeline stage, with the embedding and the head where they belong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn

from megatron_glm.config import KernelConfig, ParallelConfig
from megatron_glm.config.model import ModelConfig
from megatron_glm.model.layer import DecoderLayer, MTPLayer
from megatron_glm.model.moe import MoE
from megatron_glm.model.norm import RMSNorm
from megatron_glm.model.plan import AttentionPlan
from megatron_glm.model.recompute import run_layer
from megatron_glm.model.router import Router
from megatron_glm.parallel.collectives import gather_values
from megatron_glm.parallel.groups import ParallelGroups
from megatron_glm.parallel.shard import collect_shards
from megatron_glm.parallel.vocab import VocabParallelEmbedding, VocabParallelHead


class ChunkOutput(NamedTuple):
    hidden: Tensor  # [t/TP, D]; in the last chunk before the final norm, and cut from the graph: the loss has it
    topk: Tensor | None  # [t/TP, K] int32: this sequence shard's selection, None where no row needs one
    loss: Tensor | None  # fp32 scalar: SUM of the token losses of the micro-batch, times the caller's scale


class GLMChunk(nn.Module):
    """A contiguous run of layers; parameter names are canonical (`layers.5...` is layer 5 of the model).

    Args:
        layer_ids: decoder layers of this chunk, ascending.
        embedding, head: whether the chunk starts with the embedding, ends with final norm, head and loss.
        mtp: whether it holds the MTP layers of the model, if there are any.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer_ids: Sequence[int],
        groups: ParallelGroups,
        parallel: ParallelConfig,
        kernels: KernelConfig,
        *,
        embedding: bool = True,
        head: bool = True,
        mtp: bool = True,
    ) -> None:
        super().__init__()
        self.config, self.groups, self.kernels = config, groups, kernels
        self.layer_ids = tuple(layer_ids)
        self.recompute = parallel.recompute_granularity
        self.embed_tokens = (
            VocabParallelEmbedding(config.vocab_size, config.hidden_size, groups.tp) if embedding else None
        )
        build = (groups, parallel, kernels)
        layers: dict[str, nn.Module] = {str(i): DecoderLayer(config, i, *build) for i in self.layer_ids}
        if mtp:
            layers |= {str(i): MTPLayer(config, i, *build) for i in config.mtp_layer_ids}
        self.layers = nn.ModuleDict(layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, groups.tp) if head else None
        self.lm_head = VocabParallelHead(config.vocab_size, config.hidden_size, groups.tp) if head else None
        self.shards = {}
        self.shards = collect_shards(self)

    def forward(
        self,
        inputs: Tensor,
        plan: AttentionPlan,
        topk: Tensor | None = None,
        labels: Tensor | None = None,
        loss_scale: float = 1.0,
    ) -> ChunkOutput:
        """Run one micro-batch.

        Args:
            inputs: tokens of the pack [T] int64 in the first chunk, else hidden states [t/TP, D].
            topk: [t/TP, K] int32 selection from the chunk before; needed where this one starts with a shared layer.
            labels: [T] int64 next tokens, -100 = no loss; read by the last chunk, None = no loss wanted.
            loss_scale: factor of the loss, whose own gradient must be 1.
        """
        hidden = inputs if self.embed_tokens is None else self.embed_tokens(plan.local(inputs))
        if topk is not None:
            topk = gather_values(topk, self.groups.tp)
        for layer_id in self.layer_ids:
            layer = self.layers[str(layer_id)]
            hidden, topk, expert_ids = run_layer(self.recompute, layer, hidden, plan, topk)
            if expert_ids is not None:
                layer.mlp.gate.count(expert_ids)
        loss = None
        if self.lm_head is not None and labels is not None:
            loss = self.lm_head(self.norm(hidden), plan.local(labels), self.kernels.loss_chunk_size, loss_scale)
        if self.lm_head is not None:
            hidden = hidden.detach()  # a chunk without layers returns its input, and FSDP2 warns of views with a graph
        return ChunkOutput(hidden, None if topk is None else topk[plan.shard], loss)

    def routers(self) -> list[Router]:
        """The routers of the layers that run, in the order of the layers."""
        mlps = [self.layers[str(i)].mlp for i in self.layer_ids]
        return [mlp.gate for mlp in mlps if isinstance(mlp, MoE)]
