"""Multi-token prediction: what the one MTP layer makes of a micro-batch, step by step.

Step k predicts the token k + 1 ahead, from its embedding of the token k ahead and the hidden states of step k - 1
(DeepSeek-V3, section 2.2; one layer for all steps: GLM-5, section 2.1). Where the config shares them, later steps
attend to the keys and the selection of the first, as an engine does that drafts with them (GLM-5.2).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_glm.config import LossConfig
from megatron_glm.model.indexer_training import Losses
from megatron_glm.model.layer import MTPLayer, MTPOutput
from megatron_glm.model.micro_batch import MicroBatch
from megatron_glm.model.moe import MoE
from megatron_glm.model.recompute import run_layer
from megatron_glm.parallel.collectives import gather_values
from megatron_glm.parallel.groups import ParallelGroups
from megatron_glm.parallel.vocab import Prediction, VocabParallelEmbedding


def draft(
    losses: LossConfig,
    shares: bool,
    batch: MicroBatch,
    main: Tensor,
    embed: VocabParallelEmbedding,
    layer: MTPLayer,
    recompute: str,
) -> tuple[list[Tensor], list[Losses]]:
    """Hidden states [t/TP, D] of each MTP step, from which the head predicts, and what it adds to losses by name.

    Args:
        shares: whether later steps attend to the keys of the first.
        main: [t/TP, D] hidden states of the trunk behind the last norm.
        recompute: granularity, see `run_layer`.
    """
    found: list[Tensor] = []
    added: list[Losses] = []
    hidden, topk, latents = main.detach() if losses.mtp_detaches else main, None, None
    with torch.set_grad_enabled(torch.is_grad_enabled() and not losses.mtp_detaches):
        embedded = embed_all([step.pack.local(step.tokens) for step in batch.ahead], embed)
    for step, tokens in zip(batch.ahead, embedded, strict=True):
        output: MTPOutput = run_layer(recompute, layer, tokens, hidden, step.pack, topk, latents)
        if isinstance(layer.mlp, MoE) and output.expert_ids is not None:
            layer.mlp.gate.count(output.expert_ids)
        hidden = output.hidden
        added.append(output.losses)
        if shares:
            topk, latents = output.topk, output.latents
        found.append(hidden)
    return found, added


def embed_all(tokens: Sequence[Tensor], embed: VocabParallelEmbedding) -> tuple[Tensor, ...]:
    """Embeddings [t/TP, D] of the sequence shard, for each of these tokens [t].

    All at once: FSDP gathers the matrix, 1.9 GB of GLM-5.2, for each call.
    """
    ranks = embed.tp.size()
    by_rank = torch.stack(tuple(tokens)).unflatten(1, (ranks, -1)).transpose(0, 1)  # [TP, steps, t/TP]
    return embed(by_rank.flatten()).unflatten(0, (len(tokens), -1)).unbind()


def predictions(losses: LossConfig, batch: MicroBatch, hidden: Sequence[Tensor]) -> list[Prediction]:
    """What the head is to predict from the hidden states of each step."""
    weight, trains_head = losses.mtp_loss_scaling_factor / max(1, losses.mtp_steps), not losses.mtp_detaches
    return [
        Prediction(rows, batch.pack.local(step.labels), batch.scale(f"mtp_{number}"), weight, trains_head)
        for number, (step, rows) in enumerate(zip(batch.ahead, hidden, strict=True), 1)
    ]


def accepted(best: Tensor, batch: MicroBatch, groups: ParallelGroups) -> dict[str, Tensor]:
    """How many tokens of each step are those that the trunk itself finds most probable there, times their scale.

    Args:
        best: int64 [1 + steps, t], of the trunk and of each step, the same on every TP rank.
    """
    pack, found = batch.pack, {}
    trunk = gather_values(best[0][pack.shard], groups.tp_cp)
    trunk = trunk if pack.order is None else trunk[pack.order.gathered]
    for number, (chosen, step) in enumerate(zip(best[1:], batch.ahead, strict=True), 1):
        same = chosen == pack.local(trunk.roll(-number))
        name = f"accepted_{number}"
        found[name] = (same & (pack.local(step.labels) >= 0)).sum() * batch.scale(name)
    return found
