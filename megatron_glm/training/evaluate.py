"""The loss over a data set: one pass in order, nothing else changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from megatron_glm.data.packing import PackedBatch
from megatron_glm.training.engine import LM, Engine
from megatron_glm.training.step import Requests, count, sum_over_ranks


class LeftOnSignal(SystemExit):
    """An evaluation that ended before its last batch, on all ranks; its code is that of the signal."""


def evaluate(engine: Engine, steps: Iterable[Sequence[PackedBatch]]) -> tuple[dict[str, float], int]:
    """The mean of each loss over all steps and ranks, by name, and the number of loss tokens.

    Raises: LeftOnSignal if a signal has reached any rank before the last step.
    """
    losses, totals = [], Counter[str]()
    try:
        for batches in steps:
            counts = count(engine.config, engine.groups, batches, Requests.of_signals())
            if counts.requests.exit_code:
                raise LeftOnSignal(counts.requests.exit_code)
            totals.update(counts.losses)
            losses += engine.evaluate(batches)
    finally:
        for router in (router for chunk in engine.chunks for router in chunk.routers()):
            router.counts.zero_()  # what was routed here moves no bias
    sums = sum_over_ranks(engine, losses)
    return {name: loss / max(1, totals[name]) for name, loss in sums.items()}, totals[LM]
