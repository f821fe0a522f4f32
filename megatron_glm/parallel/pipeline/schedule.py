"""Pipeline schedules as data: lists of actions made by pure functions, checked and simulated without a process.

`chunks` virtual stages a rank; stage = chunk * pp + rank, so a micro-batch runs through all ranks once per chunk.
Everything here counts in actions: F(chunk, micro-batch) and B(chunk, micro-batch). Transfers cost no simulated time.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple


class Action(NamedTuple):
    kind: str  # "F" or "B"
    chunk: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}({self.chunk}, {self.micro_batch})"


@dataclass(frozen=True)
class Schedule:
    """What every rank does, in order: `actions[rank]`."""

    pp: int
    chunks: int
    micro_batches: int
    forward_only: bool
    actions: tuple[tuple[Action, ...], ...]

    def cause(self, rank: int, action: Action) -> tuple[int, Action] | None:
        """(rank, action) whose result `action` needs, None for a forward of the first stage."""
        kind, chunk, micro_batch = action
        stage = chunk * self.pp + rank
        if kind == "B" and stage == self.pp * self.chunks - 1:
            return rank, Action("F", chunk, micro_batch)
        other = stage - 1 if kind == "F" else stage + 1
        return (other % self.pp, Action(kind, other // self.pp, micro_batch)) if other >= 0 else None

    def effect(self, rank: int, action: Action) -> tuple[int, Action] | None:
        """(rank, action) that needs the tensors which `action` makes, None where they end."""
        kind, chunk, micro_batch = action
        other = chunk * self.pp + rank + (1 if kind == "F" else -1)
        if not 0 <= other < self.pp * self.chunks:
            return None
        return other % self.pp, Action(kind, other // self.pp, micro_batch)

    def arrivals(self, rank: int, kind: str) -> Iterator[Action]:
        """The actions of `rank` that messages of one direction are for, in the order in which its neighbour sends."""
        sender = (rank + (-1 if kind == "F" else 1)) % self.pp
        for action in self.actions[sender]:
            effect = self.effect(sender, action) if action.kind == kind else None
            if effect is not None:
                yield effect[1]


@lru_cache(maxsize=8)  # each step asks again
def build_schedule(
    pp: int, chunks: int, micro_batches: int, group_size: int | None = None, forward_only: bool = False
) -> Schedule:
    """1F1B (one chunk a rank) or interleaved 1F1B, after Narayanan et al. 2021, section 2.2.

    Args:
        group_size: micro-batches that one chunk runs in a row (--microbatch-group-size-per-vp-stage), at least and by
            default `pp`. No group is smaller, because ranks can wait for each other around a short last group: what
            is left of the micro-batches makes the groups longer instead.
    """
    if min(pp, chunks, micro_batches) < 1:
        raise ValueError(
            f"a schedule needs at least one of each: --pipeline-model-parallel-size {pp}, "
            f"{chunks} virtual stages a rank, {micro_batches} micro-batches"
        )
    group_size = pp if group_size is None else group_size
    if group_size < pp:
        raise ValueError(
            f"--microbatch-group-size-per-vp-stage {group_size} is below --pipeline-model-parallel-size {pp}: "
            "the ranks would wait for each other"
        )
    count = max(1, micro_batches // group_size)
    edges = [micro_batches * i // count for i in range(count + 1)]
    groups = [range(start, end) for start, end in zip(edges, edges[1:], strict=False)]
    forwards = [Action("F", chunk, mb) for group in groups for chunk in range(chunks) for mb in group]
    backwards = [Action("B", chunk, mb) for group in groups for chunk in reversed(range(chunks)) for mb in group]
    ranks = []
    for rank in range(pp):
        warm_up = pp - rank - 1
        if chunks > 1:  # the first backward waits for the last chunk; twice the distance, as F and B alternate
            warm_up = 2 * warm_up + (chunks - 1) * max(map(len, groups))
        warm_up = min(warm_up, len(forwards))
        steady = [a for pair in zip(forwards[warm_up:], backwards, strict=False) for a in pair]
        rest = backwards[len(forwards) - warm_up :]
        ranks.append(tuple(forwards if forward_only else forwards[:warm_up] + steady + rest))
    return Schedule(pp, chunks, micro_batches, forward_only, tuple(ranks))


class Step(NamedTuple):
    """One action in an order that respects every dependency; positions are into that order, -1 = none."""

    rank: int
    action: Action
    before: int  # the rank's previous action
    cause: int  # the action whose result this one needs
    cost: int  # 2 * stage (forward) or 2 * stage + 1 (backward)


@lru_cache(maxsize=8)  # each step asks again
def check_schedule(schedule: Schedule) -> tuple[Step, ...]:
    """Every action exactly once and after its cause, with no rank waiting for ever: all of it in one valid order.

    Messages have no tags, so a rank must also need those of a neighbour in the order in which they are sent.

    Raises:
        ValueError: an action is missing or twice, the ranks wait for each other, or messages are needed out of order.
    """
    wanted = [
        Action(kind, chunk, micro_batch)
        for kind in ("F" if schedule.forward_only else "FB")
        for chunk in range(schedule.chunks)
        for micro_batch in range(schedule.micro_batches)
    ]
    for rank, actions in enumerate(schedule.actions):
        if sorted(actions) != sorted(wanted):
            wrong = sorted({a for a in {*actions, *wanted} if actions.count(a) != wanted.count(a)})
            raise ValueError(f"schedule of rank {rank}: {wrong[0]} occurs {actions.count(wrong[0])} times")
    steps: list[Step] = []
    position: dict[tuple[int, Action], int] = {}
    done = [0] * schedule.pp
    while len(steps) < schedule.pp * len(wanted):
        before = len(steps)
        for rank, actions in enumerate(schedule.actions):
            while done[rank] < len(actions):
                action = actions[done[rank]]
                cause = schedule.cause(rank, action)
                if cause is not None and cause not in position:
                    break
                previous = position[rank, actions[done[rank] - 1]] if done[rank] else -1
                cost = 2 * (action.chunk * schedule.pp + rank) + (action.kind == "B")
                position[rank, action] = len(steps)
                steps.append(Step(rank, action, previous, -1 if cause is None else position[cause], cost))
                done[rank] += 1
        if len(steps) == before:
            stuck = [f"rank {r} at {a[done[r]]}" for r, a in enumerate(schedule.actions) if done[r] < len(a)]
            raise ValueError(f"the schedule cannot go on: {', '.join(stuck)}")
    for rank, actions in enumerate(schedule.actions if schedule.pp > 1 else ()):
        places = {action: place for place, action in enumerate(actions)}
        for kind in "FB":
            messages = list(schedule.arrivals(rank, kind))
            for action, message in zip(sorted(messages, key=places.__getitem__), messages, strict=True):
                if action != message:
                    raise ValueError(f"rank {rank} needs {action}, and its neighbour sends {message} first")
    return tuple(steps)


def end_times(steps: Sequence[Step], costs: Sequence[float]) -> list[float]:
    """When each step ends. `costs`: forward and backward of each stage in turn (see `Step.cost`)."""
    ends = [0.0] * (len(steps) + 1)  # the extra last entry is the start of time, which -1 points at
    for i, (_, _, before, cause, cost) in enumerate(steps):
        start, other = ends[before], ends[cause]
        ends[i] = (start if start > other else other) + costs[cost]
    return ends[:-1]


@dataclass(frozen=True)
class Simulation:
    makespan: float
    idle: float  # share of rank-time without work
    peak_live: tuple[int, ...]  # per rank: most (chunk, micro-batch) pairs between their forward and their backward
    spans: tuple[tuple[tuple[float, float, Action], ...], ...]  # per rank: (start, end, action)

    def timeline(self, width: int = 120) -> str:
        """One line a rank: digits are forwards and letters backwards of chunk 0 (a), 1 (b), …; dots are idle."""
        lines = []
        for rank, spans in enumerate(self.spans):
            row = ["."] * width
            for start, end, (kind, chunk, _) in spans:
                first, last = round(start / self.makespan * width), round(end / self.makespan * width)
                row[first:last] = ("0123456789" if kind == "F" else "abcdefghij")[chunk % 10] * (last - first)
            lines.append(f"rank {rank:2} |{''.join(row)}|")
        return "\n".join(lines)


def simulate(schedule: Schedule, costs: Sequence[tuple[float, float]]) -> Simulation:
    """Runs a schedule with `costs[stage] = (forward, backward)` in any unit of time."""
    if len(costs) != schedule.pp * schedule.chunks:
        raise ValueError(f"{len(costs)} stage costs for {schedule.pp} x {schedule.chunks} stages")
    flat = [cost for pair in costs for cost in pair]
    steps = check_schedule(schedule)
    spans: list[list[tuple[float, float, Action]]] = [[] for _ in range(schedule.pp)]
    for step, end in zip(steps, end_times(steps, flat), strict=True):
        spans[step.rank].append((end - flat[step.cost], end, step.action))
    peak = []
    for actions in schedule.actions:
        live = [0]
        for action in actions:
            live.append(live[-1] + (1 if action.kind == "F" else -1))
        peak.append(0 if schedule.forward_only else max(live))
    makespan = max(rank[-1][1] for rank in spans)
    work = sum(flat[step.cost] for step in steps)
    return Simulation(makespan, 1 - work / (schedule.pp * makespan), tuple(peak), tuple(map(tuple, spans)))


def _stage_costs(text: str) -> list[tuple[float, float]]:
    """Forward and backward costs of "1:3,1:3,2:5"."""
    costs = []
    for pair in text.split(","):
        try:
            forward, backward = map(float, pair.split(":"))
        except ValueError:
            forward = backward = math.nan
        if not (0 < forward < math.inf and 0 < backward < math.inf):
            raise ValueError(f"--stage-costs {text}: {pair!r} is not two positive numbers, forward:backward")
        costs.append((forward, backward))
    return costs


def _refuse_unused(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Raises ValueError for a flag that only counts with a model, or without one."""
    with_model = (
        "num_layers_per_virtual_pipeline_stage", "pipeline_model_parallel_layout", "seq_length", "recompute_granularity"
    )  # fmt: skip
    without = ("stage_costs", "num_virtual_stages_per_pipeline_rank")
    for name in without if args.hf_config is not None else with_model:
        if getattr(args, name) != parser.get_default(name):
            verb = "needs" if args.hf_config is None else "does not go with"
            raise ValueError(f"--{name.replace('_', '-')} {verb} --hf-config")
    if args.seq_length < 1:
        raise ValueError(f"--seq-length is {args.seq_length}; it must be at least 1")


def main() -> None:
    """Prints idle share, peak live micro-batches and the timeline of one schedule."""
    from megatron_glm.config import ModelConfig, ParallelConfig
    from megatron_glm.config.flags import Parser  # here, because the layouts need the schedules
    from megatron_glm.parallel.pipeline.layout import build_layout, stage_costs

    parser = Parser(description=main.__doc__)
    parser.add_argument("--pipeline-model-parallel-size", type=int, required=True)
    parser.add_argument("--micro-batches", type=int, help="default: the pipeline size")
    parser.add_argument("--microbatch-group-size-per-vp-stage", type=int)
    parser.add_argument("--hf-config", help="a model, split by the two flags below")
    parser.add_argument("--num-layers-per-virtual-pipeline-stage", type=int)
    parser.add_argument("--pipeline-model-parallel-layout")
    parser.add_argument("--seq-length", type=int, default=4096)
    parser.add_argument("--recompute-granularity", choices=["none", "selective", "full"], default="none")
    parser.add_argument("--stage-costs", default="1:3", help="without a model: forward:backward of each stage, or one")
    parser.add_argument("--num-virtual-stages-per-pipeline-rank", type=int, default=1, help="without a model")
    args = parser.parse_args()
    pp = args.pipeline_model_parallel_size
    micro_batches = pp if args.micro_batches is None else args.micro_batches
    try:
        _refuse_unused(parser, args)
        if args.hf_config is not None:
            model = ModelConfig.from_hf(args.hf_config)
            parallel = ParallelConfig(
                pipeline_model_parallel_size=pp,
                num_layers_per_virtual_pipeline_stage=args.num_layers_per_virtual_pipeline_stage,
                pipeline_model_parallel_layout=args.pipeline_model_parallel_layout,
                microbatch_group_size_per_vp_stage=args.microbatch_group_size_per_vp_stage,
                recompute_granularity=args.recompute_granularity,
            )
            parallel.check(model, pp)
            layout = build_layout(parallel, model, args.seq_length, micro_batches)
            chunks, costs = layout.chunks, stage_costs(layout, model, args.seq_length, args.recompute_granularity)
            sizes = [len(stage.layers) for stage in layout.stages]
        else:
            chunks, sizes = args.num_virtual_stages_per_pipeline_rank, None
            costs = _stage_costs(args.stage_costs)
            costs = costs * pp * chunks if len(costs) == 1 else costs
        schedule = build_schedule(pp, chunks, micro_batches, args.microbatch_group_size_per_vp_stage)
        result = simulate(schedule, costs)
    except ValueError as error:
        parser.error(str(error))
    if sizes is not None:
        print("layers of each stage:", *sizes)
    print(f"{pp} ranks x {chunks} virtual stages, {micro_batches} micro-batches: idle {result.idle:.1%}")
    print("peak live micro-batches of each rank, summed over its virtual stages:", *result.peak_live)
    print(result.timeline())


if __name__ == "__main__":
    main()
