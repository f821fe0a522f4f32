"""The loss over a data set: one pass in order, nothing else changes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from megatron_glm.config import RunConfig
from megatron_glm.data.packing import PackedBatch
from megatron_glm.model.glm import GLMChunk
from megatron_glm.parallel.groups import ParallelGroups
from megatron_glm.training.initialize import current_device
from megatron_glm.training.step import count, forward, sum_losses


@torch.no_grad()
def evaluate(
    chunks: Sequence[GLMChunk], steps: Iterable[Sequence[PackedBatch]], groups: ParallelGroups, config: RunConfig
) -> tuple[float, int]:
    """Mean loss of the loss tokens of all steps, over all ranks, and their number."""
    loss_sum = torch.zeros((), dtype=torch.float64, device=current_device())
    tokens = 0
    for batches in steps:
        tokens += count(batches, groups, config).loss_tokens
        for batch in batches:
            loss_sum += forward(chunks, batch, groups, config)
    for router in (router for chunk in chunks for router in chunk.routers()):
        router.counts.zero_()  # what was routed here moves no bias
    return sum_losses(loss_sum, groups) / tokens, tokens
