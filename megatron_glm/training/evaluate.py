"""The loss over a data set: one pass in order, nothing else changes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megatron_glm.config import RunConfig
from megatron_glm.data.packing import PackedBatch
from megatron_glm.model.glm import GLMChunk
from megatron_glm.parallel.groups import ParallelGroups
from megatron_glm.training.step import Requests, count, run_micro_batches, sum_over_ranks


class LeftOnSignal(SystemExit):
    """An evaluation that ended before its last batch, on all ranks; its code is that of the signal."""


def evaluate(
    chunks: Sequence[GLMChunk], steps: Iterable[Sequence[PackedBatch]], groups: ParallelGroups, config: RunConfig
) -> tuple[float, int]:
    """Mean loss of the loss tokens of all steps, over all ranks, and their number.

    Raises: LeftOnSignal if a signal has reached any rank before the last step.
    """
    losses, tokens = [], 0
    try:
        for batches in steps:
            counts = count(batches, groups, config, Requests.of_signals())
            if counts.requests.exit_code:
                raise LeftOnSignal(counts.requests.exit_code)
            tokens += counts.loss_tokens
            losses += run_micro_batches(chunks, batches, groups, config, training=False)
    finally:
        for router in (router for chunk in chunks for router in chunk.routers()):
            router.counts.zero_()  # what was routed here moves no bias
    return sum_over_ranks(losses, groups) / tokens, tokens
