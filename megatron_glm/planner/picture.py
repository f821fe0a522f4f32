"""A plan as a picture: when each pipeline rank works, and what its memory holds. Needs matplotlib."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron_glm.parallel.pipeline.schedule import BACKWARD, FORWARD, WEIGHT
from megatron_glm.parallel.pipeline.simulate import Simulation
from megatron_glm.planner.memory import rank_memory
from megatron_glm.planner.plan import GIB, Plan
from megatron_glm.planner.time import StepTime

COLORS = {FORWARD: "tab:blue", BACKWARD: "tab:orange", WEIGHT: "tab:green"}
NAMES = {FORWARD: "forward", BACKWARD: "backward", WEIGHT: "weight gradients"}


def check_picture(file: Path) -> None:
    """Raises ValueError if it cannot be drawn there: before anything that takes time."""
    if find_spec("matplotlib") is None:
        raise ValueError(f"--picture {file} needs matplotlib: pip install matplotlib")
    if not file.parent.is_dir():
        raise ValueError(f"--picture {file}: the folder {file.parent} does not exist")


def figure(rows: int) -> tuple[Any, list[Any]]:
    """A figure with so many charts, one below the other."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    made, axes = pyplot.subplots(rows, 1, figsize=(10, 3.5 * rows), layout="constrained", squeeze=False)
    return made, list(axes.flatten())


def draw_timeline(axis: Any, simulation: Simulation, unit: str) -> None:
    """Bars of the actions of each pipeline rank; later virtual stages are darker, blanks are idle."""
    chunks = 1 + max(action.chunk for spans in simulation.spans for _, _, action in spans)
    for kind, color in COLORS.items():
        for chunk in range(chunks):
            label = NAMES[kind] if chunk == 0 else None
            for rank, spans in enumerate(simulation.spans):
                bars = [(begin, end - begin) for begin, end, action in spans if action[:2] == (kind, chunk)]
                shade = {"facecolors": color, "alpha": 0.45 + 0.55 * (chunk + 1) / chunks}
                if bars:
                    axis.broken_barh(bars, (rank - 0.4, 0.8), edgecolors="white", linewidth=0.2, label=label, **shade)
                    label = None
    axis.set(xlabel=unit, ylabel="pipeline rank", title=f"pipeline, idle {simulation.idle:.1%}")
    axis.set_yticks(range(len(simulation.spans)))
    axis.invert_yaxis()
    axis.legend(loc="lower right", ncols=3, fontsize="small")


def draw_plan(plan: Plan, time: StepTime | None, file: Path, memory: float) -> None:
    """Writes the picture. memory: bytes of a GPU; time: None where the plan predicts none."""
    made, (above, below) = figure(2)
    if time is None:
        draw_timeline(above, plan.simulation, "operations")
    else:
        draw_timeline(above, time.simulation, "seconds")
    ranks, held = range(plan.grid.pp), [0.0] * plan.grid.pp
    by_rank = [rank_memory(plan, rank) for rank in ranks]
    for kind in by_rank[0]:
        sizes = [found[kind] / GIB for found in by_rank]
        if max(sizes) > 0.005 * memory / GIB:
            grey = {"color": "lightgrey"} if kind.startswith("reserve") else {}
            below.bar(ranks, sizes, bottom=held, label=kind, **grey)
            held = [a + b for a, b in zip(held, sizes, strict=True)]
    below.axhline(memory / GIB, color="black", linestyle="dashed", linewidth=1)
    below.set(xlabel="pipeline rank", ylabel="GiB", title="memory at the peak; dashed: of a GPU", xticks=list(ranks))
    below.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small")
    save(made, file)


def save(made: Any, file: Path) -> None:
    from matplotlib import pyplot

    made.savefig(file, dpi=90)
    pyplot.close(made)
