"""The loss over a data set: one pass in order, nothing else changes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megatron_glm.config import RunConfig
from megatron_glm.data.packing import PackedBatch
from megatron_glm.model.glm import GLMChunk
from megatron_glm.parallel.groups import ParallelGroups
from megatron_glm.training.step import count, run_micro_batches, sum_over_ranks


def evaluate(
    chunks: Sequence[GLMChunk], steps: Iterable[Sequence[PackedBatch]], groups: ParallelGroups, config: RunConfig
) -> tuple[float, int]:
    """Mean loss of the loss tokens of all steps, over all ranks, and their number."""
    losses, tokens = [], 0
    for batches in steps:
        tokens += count(batches, groups, config).loss_tokens
        losses += run_micro_batches(chunks, batches, groups, config, training=False)
    for router in (router for chunk in chunks for router in chunk.routers()):
        router.counts.zero_()  # what was routed here moves no bias
    return sum_over_ranks(losses, groups) / tokens, tokens
