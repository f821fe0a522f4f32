"""What --data-parallel-sharding slabs holds, and gathers and reduces in a step: which unit each slab has, and when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from megatron_glm.parallel.pipeline.layout import Stage
from megatron_glm.parallel.pipeline.schedule import BACKWARD, FORWARD
from megatron_glm.planner.plan import FP32, Plan
from megatron_glm.planner.units import FsdpUnit

Place = tuple[int, int]  # of a unit: the virtual stage of its rank, and where it is in the stage's units


def slab_traffic(plan: Plan, pp_rank: int, differentiates: bool) -> Counter:
    """Bytes by (axis, what) that a rank sends; differentiates: the layers of the trunk have a backward.

    In the dtype that computes, also where `--fp8` gathers less. The only gradient of an expert's weight before a
    reduction is sent in that dtype, all others are sums in fp32.
    """
    found: Any = Counter()
    parallel, count, steps = plan.config.parallel, plan.schedule.micro_batches, plan.config.losses.mtp_steps
    reductions = 1 if parallel.grad_sync == "last" else count
    gathers = times_gathered(plan, pp_rank, differentiates)
    for chunk, stage in enumerate(plan.layout.of_rank(pp_rank)):
        for place, unit in enumerate(plan.units(stage)):
            ranks = plan.sharing(unit.expert)
            if ranks == 1 or not unit.runs:
                continue
            axis, share = "edp" if unit.expert else "dp_cp", (ranks - 1) / ranks
            alone = unit.expert and reductions == count and unit.calls(stage, steps) == 1
            found[axis, "gathered weights"] += share * gathered_bytes(plan, unit) * gathers[chunk, place]
            gradient = plan.shapes.b if alone else FP32
            found[axis, "reduced gradients"] += share * unit.trained_elements * gradient * reductions
    return found


def times_gathered(plan: Plan, pp_rank: int, differentiates: bool) -> Counter[Place]:
    """How often a step gathers each unit: whenever its slab holds another one, or weights of before the step."""
    stages, held = plan.layout.of_rank(pp_rank), slabs(plan, pp_rank)
    found: Counter[Place] = Counter()
    holders: dict[Any, Place] = {}
    for kind, chunk, _ in plan.schedule.actions[pp_rank]:
        units = plan.units(stages[chunk])
        order: Iterator[int] = iter(())
        if kind == FORWARD:
            order = _forward(units, stages[chunk], plan.config.losses.mtp_steps)
        elif kind == BACKWARD:
            order = _backward(units, differentiates)
        for place in order:
            at = chunk, place
            if at in held and holders.get(held[at]) != at:
                holders[held[at]] = at
                found[at] += 1
    return found


def _forward(units: tuple[FsdpUnit, ...], stage: Stage, mtp_steps: int) -> Iterator[int]:
    """Places in the order in which a forward comes to them. MTP steps run between trunk and head."""
    by_kind = {unit.kind: place for place, unit in enumerate(units) if unit.kind in ("root", "embedding", "head")}
    if "root" in by_kind:
        yield by_kind["root"]
    if stage.embedding:
        yield by_kind["embedding"]
    layers = [place for place, unit in enumerate(units) if place not in by_kind.values()]
    yield from (place for place in layers if not units[place].mtp)
    for _ in range(mtp_steps if stage.mtp else 0):
        yield by_kind["embedding"]
        yield from (place for place in layers if units[place].mtp)
    if "head" in by_kind:
        yield by_kind["head"]


def _backward(units: tuple[FsdpUnit, ...], differentiates: bool) -> Iterator[int]:
    """Those of the layers, the last one first, experts behind the rest of their layer."""
    layers: list[list[int]] = []
    for place, unit in enumerate(units):
        if unit.kind == "layer":
            layers.append([place])
        elif unit.expert:
            layers[-1].append(place)
    for places in reversed(layers):
        yield from (p for p in places if units[p].runs and (differentiates or units[p].trained_elements))


def slab_bytes(plan: Plan, pp_rank: int) -> int:
    """With slabs: shards in the type that computes, where their masters have another, and gathered weights."""
    b, found, stages = plan.shapes.b, 0, plan.layout.of_rank(pp_rank)
    largest: dict[Any, int] = {}  # of each slab
    for (chunk, place), slab in slabs(plan, pp_rank).items():
        unit = plan.units(stages[chunk])[place]
        if unit.runs:
            trained, frozen = unit.shard(0, plan.sharing(unit.expert))
            in_fp8 = unit.expert and plan.experts_in_fp8
            found += b * (trained * (b < FP32) + frozen * (plan.frozen_bytes != b and not in_fp8))
        if unit.runs or slab != (chunk, place):
            largest[slab] = max(largest.get(slab, 0), gathered_bytes(plan, unit))
    return found + sum(largest.values())


def slabs(plan: Plan, pp_rank: int) -> dict[Place, Any]:
    """By virtual stage and place in its units, the slab of each unit that ranks share: two for each kind, which all
    stages of the rank take turns in, one for embedding and head, and its own for one that stays gathered."""
    parallel, found, turns = plan.config.parallel, {}, Counter()
    for chunk, stage in enumerate(plan.layout.of_rank(pp_rank)):
        for place, unit in enumerate(plan.units(stage)):
            if plan.sharing(unit.expert) == 1:
                continue
            found[chunk, place] = chunk, place
            if parallel.reshards(unit.expert) and unit.kind != "root":
                kind = "vocabulary" if unit.vocabulary else unit.kind
                found[chunk, place] = kind, turns[kind] % (1 if unit.vocabulary else 2)
                turns[kind] += 1
    return found


def gathered_bytes(plan: Plan, unit: FsdpUnit) -> int:
    """Of a unit with slabs, where it is whole."""
    in_fp8 = unit.elements - unit.trained_elements if unit.expert and plan.experts_in_fp8 else 0
    return plan.shapes.b * (unit.elements - in_fp8) + in_fp8
