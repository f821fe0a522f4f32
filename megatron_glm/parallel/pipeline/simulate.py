"""A schedule in simulated time: when each action ends, how long ranks idle, and a picture of it.

python -m megatron_glm.parallel.pipeline.simulate …     prints these for any layout. Transfers cost no time.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_glm.config import ModelConfig, ParallelConfig
from megatron_glm.config.flags import Parser
from megatron_glm.parallel.pipeline.layout import build_layout, stage_costs
from megatron_glm.parallel.pipeline.schedule import (
    BACKWARD,
    FORWARD,
    NAMES,
    WEIGHT,
    Action,
    Schedule,
    build_schedule,
    check_schedule,
    end_times,
    flat_costs,
    peak_live,
)

LETTERS = {FORWARD: "0123456789", BACKWARD: "abcdefghij", WEIGHT: "ABCDEFGHIJ"}


@dataclass(frozen=True)
class Simulation:
    makespan: float
    idle: float  # share of rank-time without work
    peak_live: tuple[int, ...]  # per rank, see `peak_live`
    spans: tuple[tuple[tuple[float, float, Action], ...], ...]  # per rank: (start, end, action)

    def timeline(self, width: int = 120) -> str:
        """One line a rank: digits are forwards and letters backwards of chunk 0 (a), 1 (b), …; dots are idle.

        A deferred weight gradient is a capital letter.
        """
        lines = []
        for rank, spans in enumerate(self.spans):
            row = ["."] * width
            for start, end, (kind, chunk, _) in spans:
                first, last = round(start / self.makespan * width), round(end / self.makespan * width)
                row[first:last] = LETTERS[kind][chunk % 10] * (last - first)
            lines.append(f"rank {rank:2} |{''.join(row)}|")
        return "\n".join(lines)


def simulate(schedule: Schedule, costs: Sequence[tuple[float, ...]]) -> Simulation:
    """Runs a schedule with `costs[stage] = (forward, backward)`, maybe a deferred part too, in any unit of time."""
    if len(costs) != schedule.placement.count:
        raise ValueError(f"{len(costs)} stage costs for {schedule.pp} x {schedule.chunks} stages")
    flat = flat_costs(costs)
    steps = check_schedule(schedule)
    spans: list[list[tuple[float, float, Action]]] = [[] for _ in range(schedule.pp)]
    for step, end in zip(steps, end_times(steps, flat), strict=True):
        spans[step.rank].append((end - flat[step.cost], end, step.action))
    peak = [0 if schedule.forward_only else peak_live(actions) for actions in schedule.actions]
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
    parser = Parser(description=main.__doc__)
    parser.add_argument("--pipeline-model-parallel-size", type=int, required=True)
    parser.add_argument("--micro-batches", type=int, help="default: the pipeline size")
    parser.add_argument("--microbatch-group-size-per-vp-stage", type=int)
    parser.add_argument("--pipeline-schedule", choices=NAMES, default="1f1b", help="a W is half of a backward")
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
                pipeline_schedule=args.pipeline_schedule,
            )
            parallel.check(model, pp)
            layout = build_layout(parallel, model, args.seq_length, micro_batches)
            chunks, costs = layout.chunks, stage_costs(layout, model, args.seq_length, parallel)
            sizes = [len(stage.layers) for stage in layout.stages]
        else:
            chunks, sizes = args.num_virtual_stages_per_pipeline_rank, None
            costs = _stage_costs(args.stage_costs)
            costs = costs * pp * chunks if len(costs) == 1 else costs
            if args.pipeline_schedule != "1f1b":
                costs = [(forward, backward / 2, backward / 2) for forward, backward in costs]
        group_size = args.microbatch_group_size_per_vp_stage
        schedule = build_schedule(pp, chunks, micro_batches, group_size, name=args.pipeline_schedule)
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
