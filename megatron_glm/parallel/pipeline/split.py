"""The layers split over the stages of a pipeline so that a step takes the least simulated time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

from megatron_glm.config import LossConfig, ModelConfig, ParallelConfig
from megatron_glm.config.training import NEXT_TOKEN
from megatron_glm.parallel.pipeline.costs import MEASURED, Cost, part_costs, sum_costs
from megatron_glm.parallel.pipeline.schedule import Step, build_schedule, check_schedule, end_times, flat_costs

AUTO_MAX_CHUNKS = 10
AUTO_BUDGET = 500_000  # simulated actions in all: a tenth of a second; eight times as many gain 0.1 %


class Split(NamedTuple):
    """A split of the layers: its simulated time; the stages that MTP layer and head have, 1, or 2 of which the last has
    no layers; and the layers by stage."""

    time: float
    ends: int
    sizes: tuple[int, ...]


def auto_sizes(
    parallel: ParallelConfig,
    model: ModelConfig,
    seq_length: int,
    micro_batches: int,
    losses: LossConfig = NEXT_TOKEN,
) -> list[Split]:
    """The best split into 1 to AUTO_MAX_CHUNKS chunks a rank each, by local search, the fastest first.

    Each search starts twice, from the best two of the even splits; a move takes one layer from a stage and gives it to
    another. An MTP layer that runs is tried with the head, and on the stage before it. More micro-batches than two
    rounds are not simulated: the idle time at both ends does not depend on them.
    """
    pp = parallel.pipeline_model_parallel_size
    pipeline = ParallelConfig(
        pipeline_model_parallel_size=pp,
        microbatch_group_size_per_vp_stage=parallel.microbatch_group_size_per_vp_stage,
        pipeline_schedule=parallel.pipeline_schedule,
        recompute_granularity=parallel.recompute_granularity,
    )  # all that matters here: runs that differ elsewhere share the search
    return _auto_sizes(pipeline, model, seq_length, min(micro_batches, 2 * pp), losses)


@lru_cache(maxsize=256)
def _auto_sizes(
    parallel: ParallelConfig, model: ModelConfig, seq_length: int, micro_batches: int, losses: LossConfig
) -> list[Split]:
    layers, mtp, head = part_costs(model, seq_length, parallel, MEASURED, losses)
    pp, group_size = parallel.pipeline_model_parallel_size, parallel.microbatch_group_size_per_vp_stage
    options = range(1, 1 + (min(AUTO_MAX_CHUNKS, len(layers) // pp) if pp > 1 else 1))
    places = [(sum_costs(mtp, head),), (mtp, head)][: 2 if losses.mtp_steps and pp > 1 else 1]
    sums = [list(itertools.accumulate(way, initial=0.0)) for way in zip(*layers, strict=True)]
    found = []
    for chunks, ends in itertools.product(options, places):
        stages = pp * chunks
        steps = check_schedule(build_schedule(pp, chunks, micro_batches, group_size, name=parallel.pipeline_schedule))

        def makespan(sizes: Sequence[int], steps: tuple[Step, ...] = steps, ends: tuple[Cost, ...] = ends) -> float:
            edges = list(itertools.accumulate(sizes, initial=0))
            costs = [tuple(way[end] - way[start] for way in sums) for start, end in itertools.pairwise(edges)]
            costs[-len(ends) :] = [sum_costs(*pair) for pair in zip(costs[-len(ends) :], ends, strict=True)]
            return max(end_times(steps, flat_costs(costs)))

        starts = [sizes for sizes in _starts(len(layers), stages, max(1, pp // 4)) if len(ends) == 1 or not sizes[-1]]
        tries = 1 + AUTO_BUDGET // (2 * len(options) * len(places)) // len(steps)
        best = sorted(starts, key=lambda sizes: (makespan(sizes), sizes))[:2]
        found.append(min(_descend(makespan, start, len(ends), tries) for start in best))
    found.sort()
    return [split for i, split in enumerate(found) if len(split.sizes) not in {len(o.sizes) for o in found[:i]}]


def _starts(layers: int, stages: int, step: int) -> set[tuple[int, ...]]:
    """Splits as even as can be, with and without the last stage, which has the head; where the layers leave a
    remainder, the longer stages are a run that begins at each `step`-th one."""
    found = set()
    for used in {stages, max(1, stages - 1)}:
        longer, size = layers % used, layers // used
        for first in {*range(0, used - longer, step), used - longer}:
            sizes = (size,) * first + (size + 1,) * longer + (size,) * (used - longer - first)
            found.add(sizes + (0,) * (stages - used))
    return found


def layout_string(sizes: Sequence[int], ends: int = 1) -> str:
    """The layout string of two or more stages of these sizes; ends: see `Split`."""
    texts = [f"t*{size}" if size > 1 else "t" * size for size in sizes]
    if ends == 2:
        texts[-2] += "m"
    first, *inner, last = texts
    runs = [(text, len(list(group))) for text, group in itertools.groupby(inner)]
    middle = "".join(f"({text}|)*{count}" if count > 1 else f"{text}|" for text, count in runs)
    return f"E{first}|{middle}{last}L"


def _descend(makespan: Callable[[Sequence[int]], float], sizes: tuple[int, ...], ends: int, tries: int) -> Split:
    """First-improvement descent from `sizes` until no move helps or so many were tried; ends: see `Split`."""
    time = makespan(sizes)
    # Behind an MTP layer comes no other layer, so that the head is then alone.
    taking = len(sizes) + 1 - ends
    moves = [(i, j) for i in range(taking) for j in range(taking) if i != j]
    position = since = 0
    while since < len(moves) and tries > 0:
        source, target = moves[position]
        position, since = (position + 1) % len(moves), since + 1
        # Only the stage of the MTP layer or the head may be left without layers.
        if sizes[source] > (source < taking - 1):
            candidate = list(sizes)
            candidate[source] -= 1
            candidate[target] += 1
            new = makespan(candidate)
            tries -= 1
            if new < time:
                sizes, time, since = tuple(candidate), new, 0
    return Split(time, ends, sizes)
