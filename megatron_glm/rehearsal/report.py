"""What a rehearsal found beside what the plan says: as text, as JSON, and as a picture."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from statistics import mean
from typing import Any

from megatron_glm.config import DataConfig
from megatron_glm.config.flags import DataSection, refuse
from megatron_glm.parallel.pipeline.schedule import BACKWARD, FORWARD, WEIGHT
from megatron_glm.parallel.pipeline.simulate import Simulation, simulate
from megatron_glm.planner import picture
from megatron_glm.planner.memory import RESERVE, kept_at_once, rank_memory
from megatron_glm.planner.picture import NAMES
from megatron_glm.planner.plan import GIB
from megatron_glm.planner.time import transfers
from megatron_glm.planner.traffic import rank_traffic
from megatron_glm.rehearsal.run import Rehearsal, rehearse

MOST_KEPT = "most activations at a time"


def print_rehearsal(flags: argparse.Namespace, data: DataSection = DataConfig) -> None:
    """--rehearse-rank of the training scripts: the report, with --rehearse-json also a file and a picture beside it."""
    try:
        out = getattr(flags, "rehearse_json", None)
        if out is not None and not Path(out).parent.is_dir():
            raise ValueError(f"--rehearse-json {out}: the folder {Path(out).parent} does not exist")
        found = rehearse(flags, data)
    except ValueError as error:
        refuse(str(error))
    print("\n".join(lines(found)))
    if out is not None:
        write(found, Path(out))


def memory(found: Rehearsal) -> dict[str, dict[str, int | None]]:
    """Bytes by the plan's kinds at the fullest moment: planned, and measured of what is held between steps; None
    elsewhere. Last the most activations at a time, which may be another moment's."""
    planned, most = rank_memory(found.plan, found.pp_rank), kept_at_once(found.plan, found.pp_rank)
    measured: dict[str, int] = found.held | {MOST_KEPT: found.kept}
    return {
        kind: {"planned": nbytes, "measured": measured.get(kind)}
        for kind, nbytes in (planned | {MOST_KEPT: most}).items()
    }


def stage_seconds(found: Rehearsal) -> dict[tuple[str, int], float]:
    """Mean seconds of the actions of one kind and virtual stage of this rank."""
    spent: dict[tuple[str, int], list[float]] = {}
    for action, seconds in found.actions:
        spent.setdefault((action.kind, action.chunk), []).append(seconds)
    return {key: mean(seconds) for key, seconds in spent.items()}


def simulated_seconds(found: Rehearsal) -> dict[tuple[str, int], float]:
    """The same in the proportions that the simulator has, so that they add up to what this rank took."""
    costs, stages = found.plan.costs, found.plan.layout.placement.stages[found.pp_rank]
    units = {
        (kind, chunk): cost
        for chunk, stage in enumerate(stages)
        for kind, cost in zip((FORWARD, BACKWARD, WEIGHT), costs[stage], strict=False)
    }
    scale = sum(stage_seconds(found).values()) / sum(units.values())
    return {key: scale * cost for key, cost in units.items()}


def predicted(found: Rehearsal) -> Simulation:
    """The whole run's pipeline: this rank's times, the other stages' in the plan's proportions, planned transfers."""
    plan, mine = found.plan, stage_seconds(found)
    stages = plan.layout.placement.stages[found.pp_rank]
    scale = sum(mine.values()) / sum(sum(plan.costs[stage]) for stage in stages)
    costs = []
    for number, (cost, waits) in enumerate(zip(plan.costs, transfers(plan, found.machine), strict=True)):
        own = [scale * part for part in cost]
        if number in stages:
            own = [mine[kind, stages.index(number)] for kind in (FORWARD, BACKWARD, WEIGHT)[: len(cost)]]
        costs.append((own[0] + waits[0], own[1] + waits[1], *own[2:]))
    return simulate(plan.schedule, costs)


def after_actions(found: Rehearsal) -> float:
    """Seconds of a step outside its actions: last reductions, norm and AdamW, and before them DPO's reference."""
    return max(0.0, found.step_seconds - sum(seconds for _, seconds in found.actions))


def sent(found: Rehearsal) -> list[dict[str, Any]]:
    """Bytes of a step by group: what the plan counts for its axes, and what was sent by collectives of the same ranks.

    Sums of losses, norms and counts, which the plan leaves out, are in the rows without a planned axis, or small.
    """
    grid, rank = found.plan.grid, found.rank
    planned: Counter = Counter()
    axes: dict[tuple[int, ...], list[str]] = {}
    for (axis, _), nbytes in rank_traffic(found.plan, found.pp_rank).items():
        ranks = tuple(next(group for group in grid.groups(axis) if rank in group))
        planned[ranks] += nbytes
        if axis not in axes.setdefault(ranks, []):
            axes[ranks].append(axis)
    counted: Counter = Counter()
    pipeline = tuple(next(group for group in grid.groups("pp") if rank in group))
    for key, nbytes in found.messages.bytes.items():
        counted[pipeline if key.operation == "send" else key.ranks] += nbytes
    return [
        {
            "axes": axes.get(ranks, []),
            "ranks": len(ranks),
            "planned": round(planned[ranks]) if ranks in axes else None,
            "sent": counted[ranks],
        }
        for ranks in dict.fromkeys([*axes, *counted])
    ]


def as_json(found: Rehearsal) -> dict[str, Any]:
    """Everything; times are seconds, sizes bytes."""
    plan, run = found.plan, predicted(found)
    step = run.makespan + after_actions(found)
    simulated, train = simulated_seconds(found), plan.config.train
    return {
        "rank": found.rank,
        "world_size": plan.world_size,
        "pipeline_rank": found.pp_rank,
        "device": found.device,
        "memory": memory(found),
        "peak": {
            "planned": sum(rank_memory(plan, found.pp_rank).values()),
            "measured": found.peak,
            "reserve": RESERVE,
            "taken": found.taken,
        },
        "actions": [
            {
                "kind": NAMES[action.kind],
                "virtual_stage": action.chunk,
                "micro_batch": action.micro_batch,
                "seconds": seconds,
                "simulated": simulated[action.kind, action.chunk],
            }
            for action, seconds in found.actions
        ],
        "collectives": [
            {
                "ranks": list(key.ranks),
                "operation": key.operation,
                "on_host": key.on_host,
                "calls": found.messages.calls[key],
                "sent": nbytes,
            }
            for key, nbytes in found.messages.bytes.items()
        ],
        "sent": sent(found),
        "step": {
            "seconds": found.step_seconds,
            "after_actions": after_actions(found),
            "host_seconds": found.host_seconds,
            "predicted_for_the_run": step,
            "tokens_per_second_per_gpu": train.global_batch_size * plan.config.data.seq_length / step / plan.world_size,
        },
        "save": {
            "copy_seconds": found.saved.copy_seconds,
            "write_seconds": found.saved.write_seconds,
            "files": found.saved.files,
        },
    }


def lines(found: Rehearsal) -> Iterator[str]:
    """The report for the screen."""
    whole = as_json(found)
    yield (
        f"rank {found.rank} of {found.plan.world_size}, pipeline rank {found.pp_rank}, alone between its mirrors on "
        f"{found.device}"
    )
    yield ""
    yield f"{'memory, GiB':<36}{'planned':>10}{'here':>10}"
    for kind, row in whole["memory"].items():
        yield f"  {kind:<34}{row['planned'] / GIB:10.3f}{_gib(row['measured'])}"
    peak = whole["peak"]
    yield f"  {'peak without the reserve':<34}{(peak['planned'] - RESERVE) / GIB:10.3f}{_gib(peak['measured'])}"
    yield f"  {'memory of the device taken':<34}{peak['planned'] / GIB:10.3f}{_gib(peak['taken'])}"
    yield ""
    yield f"{'seconds of an action (mean)':<36}{'simulated':>10}{'here':>10}"
    simulated = simulated_seconds(found)
    for (kind, chunk), seconds in stage_seconds(found).items():
        yield f"  {f'{NAMES[kind]} of virtual stage {chunk}':<34}{simulated[kind, chunk]:10.4f}{seconds:10.4f}"
    yield ""
    yield f"{'GiB sent in a step':<36}{'planned':>10}{'here':>10}"
    for row in whole["sent"]:
        name = f"{' = '.join(row['axes']) or 'sums of others'} ({row['ranks']} ranks)"
        yield f"  {name:<34}{_gib(row['planned'])}{row['sent'] / GIB:10.4f}"
    step, save = whole["step"], whole["save"]
    yield ""
    yield (
        f"a step: {step['seconds']:.3f} s here, {step['after_actions']:.3f} s of them outside its actions; the host "
        f"was busy for {step['host_seconds']:.3f} s with the actions"
    )
    yield (
        f"the run: {step['predicted_for_the_run']:.3f} s a step, {step['tokens_per_second_per_gpu']:,.1f} tokens/s a "
        "GPU, by these times, the other stages in the plan's proportions, and planned transfers"
    )
    yield (
        f"its part of a checkpoint: {sum(save['files']) / GIB:.3f} GiB in {len(save['files'])} files; a step waits "
        f"{save['copy_seconds']:.2f} s for the copy, the files take {save['write_seconds']:.2f} s behind it"
    )


def _gib(nbytes: int | None) -> str:
    return f"{'':>10}" if nbytes is None else f"{nbytes / GIB:10.4f}"


def write(found: Rehearsal, file: Path) -> None:
    """The report as JSON in `file`, and the picture beside it as .png, where matplotlib is installed."""
    file.write_text(json.dumps(as_json(found), indent=1) + "\n")
    if find_spec("matplotlib") is None:
        print("no picture: matplotlib is not installed (pip install matplotlib)")
        return
    made, (above, below) = picture.figure(2)
    picture.draw_timeline(above, predicted(found), f"seconds, from the times of rank {found.rank}")
    rows = {kind: row for kind, row in memory(found).items() if row["measured"] is not None}
    for shift, name in ((-0.2, "planned"), (0.2, "measured")):
        sizes = [(row[name] or 0) / GIB for row in rows.values()]
        below.barh([place + shift for place in range(len(rows))], sizes, 0.4, label=name)
    below.set(yticks=range(len(rows)), yticklabels=list(rows), xlabel="GiB", title="memory by kind")
    below.invert_yaxis()
    below.legend()
    picture.save(made, file.with_suffix(".png"))
