"""Bytes that the ranks of a plan send to each other in a step, and the seconds that this takes."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import torch

from megatron_glm.model.glm import carry_fields
from megatron_glm.model.pack import has_sparse_rows
from megatron_glm.parallel.dispatch import of_layer
from megatron_glm.parallel.pipeline.carry import CarryField
from megatron_glm.parallel.pipeline.layout import Stage
from megatron_glm.planner.gathers import slab_traffic
from megatron_glm.planner.machine import Machine
from megatron_glm.planner.plan import FP32, Plan
from megatron_glm.planner.units import FsdpUnit

EXPERTS = "tokens to experts and back"


def traffic(plan: Plan) -> list[tuple[str, str, float, float]]:
    """(axis, what, bytes inside a node, bytes between nodes) that a rank sends in a step, the busiest rank's."""
    by_rank = [rank_traffic(plan, rank) for rank in range(plan.grid.pp)]
    rows = []
    for axis, what in dict.fromkeys(key for rank in by_rank for key in rank):
        total = max(rank[axis, what] for rank in by_rank)
        inside = _inside(plan, axis)
        rows.append((axis, what, total * inside, total * (1 - inside)))
    return rows


def transfer_seconds(plan: Plan, machine: Machine) -> float:
    """Seconds of a step that the busiest rank sends at the rates of this machine, hidden or not."""
    return sum(inside / machine.nvlink + between / machine.nic for _, _, inside, between in traffic(plan))


def _inside(plan: Plan, axis: str) -> float:
    """Share of a rank's peers in the group `axis` that are in its node."""
    ranks = plan.grid.first(axis)
    near = sum(rank // plan.gpus_per_node == ranks[0] // plan.gpus_per_node for rank in ranks)
    return (near - 1) / (len(ranks) - 1)


def rank_traffic(plan: Plan, pp_rank: int) -> Counter:
    """Bytes by (axis, what): ring all-gathers and reduce-scatters move (n - 1) / n of the whole.

    A backward repeats its forward's traffic the other way, and recomputation the forward's, except the way back from
    the experts; index keys and selections, which have no gradient, are counted with the rest. Without gradients in the
    trunk (warm-up, --train-only) its layers have a forward only; what DPO asks the model without adapters is one more.
    """
    grid = plan.grid
    found: Any = Counter()  # of fractions, which its type does not know
    count = plan.schedule.micro_batches
    again = plan.config.parallel.recompute_granularity != "none"
    steps = plan.config.losses.mtp_steps
    differentiates = not plan.config.trained_parts.isdisjoint({"trunk", "adapters"})
    forwards = 1 + plan.asks_reference

    def whole(forward: dict[tuple[str, str], float], differentiates: bool) -> dict[tuple[str, str], float]:
        """Of all micro-batches, with their backwards, if they have any."""
        share = {key: 0.5 if key[1] == EXPERTS else 1.0 for key in forward}
        backward = {key: differentiates * (1 + again * share[key]) for key in forward}
        return {key: count * (forwards + backward[key]) * sent for key, sent in forward.items()}

    if plan.has_slabs:
        found.update(slab_traffic(plan, pp_rank, differentiates))
    for stage in plan.layout.of_rank(pp_rank):
        if not plan.has_slabs:
            found.update(_fsdp_traffic(plan, stage, differentiates))
        for layer in stage.layers:
            found.update(whole(layer_traffic(plan, layer), differentiates))
        if stage.mtp and steps:
            found.update(whole(mtp_traffic(plan), True))
    if grid.pp > 1:
        for stage, field in itertools.product(plan.layout.placement.stages[pp_rank], crossing_fields(plan)):
            outputs = field.stages[stage + 1 : stage + 2]  # () after the last stage
            times = forwards * sum(outputs) + (
                field.differentiable and field.stages[stage]
            )  # and the input's gradient back
            size = math.prod(field.shape) * field.dtype.itemsize
            found["pp", "hidden states, selections"] += count * times * size
    return found


def _fsdp_traffic(plan: Plan, stage: Stage, differentiates: bool) -> Counter:
    """Bytes by (axis, what) of all micro-batches of a stage; differentiates: its layers have a backward."""
    found: Any = Counter()
    grid, parallel, count = plan.grid, plan.config.parallel, plan.schedule.micro_batches
    steps = plan.config.losses.mtp_steps
    reductions = 1 if parallel.grad_sync == "last" else count
    for unit in plan.units(stage):
        axis, size = ("edp", grid.edp) if unit.expert else ("dp_cp", grid.dp * grid.cp)
        if size == 1 or not unit.runs:
            continue
        share = (size - 1) / size
        has_backward = differentiates or unit.trained_elements > 0
        gathers = count * (1 + plan.asks_reference + (has_backward and not unit.vocabulary)) * unit.calls(stage, steps)
        # What stays gathered does until it is reduced, which a step of MTP is on its own.
        if not parallel.reshards(unit.expert):
            gathers = reductions * (steps if unit.mtp else 1)
        found[axis, "gathered weights"] += share * shared_elements(plan, unit) * plan.shapes.b * gathers
        found[axis, "reduced gradients"] += share * unit.trained_elements * FP32 * reductions
    return found


def mtp_traffic(plan: Plan) -> dict[tuple[str, str], float]:
    """`layer_traffic` of all MTP steps; where later ones attend to the keys of the first, these are gathered once."""
    model, steps = plan.config.model, plan.config.losses.mtp_steps
    [layer] = model.mtp_layer_ids
    times = {"tp_cp": model.mtp_selections(steps)}
    return {key: times.get(key[0], steps) * sent for key, sent in layer_traffic(plan, layer).items()}


def crossing_fields(plan: Plan) -> tuple[CarryField, ...]:
    """What micro-batches take from stage to stage. Documents that attend to all their keys need no selection."""
    config, s = plan.config, plan.shapes
    dtype = torch.bfloat16 if config.train.bf16 else torch.float32
    fields = carry_fields(config.model, plan.layout.stages, s.shard, s.pack, dtype, config.indexer, config.losses)
    sparse = has_sparse_rows(config.model, (config.data.seq_length,), config.dense_rows)
    return tuple(field for field in fields if sparse or not field.sparse_only)


def shared_elements(plan: Plan, unit: FsdpUnit) -> int:
    """Those of which each data rank has a shard: all but experts in FP8, which are whole on each."""
    return unit.trained_elements if unit.expert and plan.experts_in_fp8 else unit.elements


def layer_traffic(plan: Plan, layer: int) -> dict[tuple[str, str], float]:
    """Bytes of one forward of one layer over the groups tp, tp_cp and those of the dispatcher."""
    grid, model, s, found = plan.grid, plan.config.model, plan.shapes, {}
    both = grid.tp * grid.cp
    if both > 1:
        index_key = model.index_head_dim if model.has_indexer(layer) else 0
        row = (model.kv_lora_rank + model.qk_rope_head_dim + index_key) * s.b
        found["tp_cp", "latents, index keys"] = (both - 1) / both * s.pack * row
    if grid.tp > 1:  # q_a gathered; attention scattered; MLP gathered and scattered; selections gathered
        row = (model.q_lora_rank + 3 * model.hidden_size) * s.b + 4 * s.slots * model.has_indexer(layer)
        found["tp", "sequence shards"] = (grid.tp - 1) / grid.tp * s.tokens * row
    if model.is_moe(layer):
        dispatcher = of_layer(plan.dispatcher, plan.config, layer)
        found |= {(axis, EXPERTS): sent for axis, sent in dispatcher.traffic().items()}
    return found
