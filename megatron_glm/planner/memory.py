"""Bytes of a pipeline rank's fullest GPU at its fullest moment: the schedule, action by action.

What is held between steps, gradients included, is exact; activations and what works are estimates from shapes. A stage
holds gathered weights from its first forward of a step to its last backward, activations from the forward of a
micro-batch to its backward, and gradients from its first backward on. So the gathered weights of all stages never meet
the gradients of all.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from megatron_glm.ops.sparse_mla import PART_BYTES, sums_in_order
from megatron_glm.parallel.pipeline.layout import Stage
from megatron_glm.parallel.pipeline.schedule import BACKWARD, FORWARD, WEIGHT, Schedule
from megatron_glm.planner.activations import (
    head_bytes,
    head_gradient,
    head_kept,
    indexer_working,
    layer_again,
    layer_deferred,
    layer_gradients,
    layer_kept,
)
from megatron_glm.planner.gathers import slab_bytes
from megatron_glm.planner.plan import FP32, GIB, Plan
from megatron_glm.planner.units import FsdpUnit

OUTSIDE = 1.3 * GIB  # an assumption: CUDA's context and NCCL's channels of about ten groups
# And free blocks of the allocator: one that might take 65 GiB of an H200 ran 58.3 of tensors (docs/recipes.md).
RESERVE = 8 * GIB
MASTERS, FROZEN, MOMENTS = "fp32 master weights", "frozen weights", "AdamW moments"
SHARDS, UNREDUCED, GATHERED = "gradients (shards)", "gradients before reduction", "gathered weights"
KEPT, WORKING, HEAD, BUFFERS = "activations", "working set of a layer", "logits chunk and head", "communication buffers"
RESERVED = "reserve (CUDA, NCCL, fragments)"
KINDS = (MASTERS, FROZEN, MOMENTS, SHARDS, UNREDUCED, GATHERED, KEPT, WORKING, HEAD, BUFFERS, RESERVED)


def rank_memory(plan: Plan, pp_rank: int) -> dict[str, int]:
    """Bytes by kind while the fullest rank of a pipeline rank holds the most."""
    stages, moments = _stages(plan, pp_rank), _moments(plan, pp_rank)
    fullest = moments.list[int(_totals(stages, moments).argmax())]
    found = _always(plan, pp_rank, stages) + _held(stages, fullest)
    return {kind: found[kind] for kind in KINDS}


def peak_memory(plan: Plan) -> int:
    """Bytes of the fullest GPU."""
    return max(_peak(plan, rank) for rank in range(plan.grid.pp))


def fits_in(plan: Plan, most: float) -> bool:
    """Whether every GPU stays within so many bytes."""
    return all(_peak(plan, rank) <= most for rank in range(plan.grid.pp))


def _peak(plan: Plan, pp_rank: int) -> int:
    stages = _stages(plan, pp_rank)
    return _always(plan, pp_rank, stages).total() + int(_totals(stages, _moments(plan, pp_rank)).max())


def kept_at_once(plan: Plan, pp_rank: int) -> int:
    """Most bytes of activations between forwards and backwards."""
    stages, moments = _stages(plan, pp_rank), _moments(plan, pp_rank)
    kept, head, deferred = (np.array([getattr(s, n) for s in stages]) for n in ("kept", "head_kept", "deferred"))
    return int((moments.live @ (kept + head) + moments.deferred @ deferred).max())


def _stages(plan: Plan, pp_rank: int) -> list[_StageBytes]:
    stages = plan.layout.of_rank(pp_rank)
    return [plan.once(_traits(plan, stage), lambda stage=stage: _StageBytes(plan, stage)) for stage in stages]


def _traits(plan: Plan, stage: Stage) -> tuple:
    """What the bytes of a stage depend on: equal ones hold the same."""
    model, taught_by = plan.config.model, plan.config.indexer.taught_by
    layers = tuple((model.is_moe(i), model.has_indexer(i), bool(taught_by(model, i))) for i in stage.layers)
    fp8 = tuple(plan.config.fp8.in_layer(i, model.num_hidden_layers) for i in stage.layers)
    ends = stage.embedding, stage.mtp, stage.head, stage.needs_topk(model)
    return "stage", layers, fp8, ends, plan.config.parallel


def _always(plan: Plan, pp_rank: int, stages: list[_StageBytes]) -> Counter[str]:
    """What a rank holds at any time."""
    held = plan.held_most(pp_rank)
    found = Counter({MASTERS: held.masters, FROZEN: held.frozen, MOMENTS: held.moments, RESERVED: RESERVE})
    found[BUFFERS] = plan.message_bytes(pp_rank)
    found[GATHERED] = sum(stage.copies for stage in stages) + (slab_bytes(plan, pp_rank) if plan.has_slabs else 0)
    return found


class Moment(NamedTuple):
    """One action of a rank, and how far each of its virtual stages is in the step.

    live, deferred: micro-batches between forward and backward, and between backward and "W", the action's own included.
    """

    kind: str
    chunk: int
    first: bool  # forward of this stage
    last: bool  # backward, behind which the stage's gradients are complete
    live: tuple[int, ...]
    deferred: tuple[int, ...]
    phases: tuple[int, ...]


IDLE, FORWARDS, BACKWARDS, COMPLETE = range(4)  # phases of a stage: from its first forward, first backward, last one


class Moments:
    """Those of a pipeline rank's step, equal ones once; live, deferred and phases as arrays [moments, stages], too."""

    def __init__(self, schedule: Schedule, pp_rank: int) -> None:
        self.list = [*dict.fromkeys(_walk(schedule, pp_rank))]
        self.live, self.deferred, self.phases = (
            np.array([getattr(moment, name) for moment in self.list]) for name in ("live", "deferred", "phases")
        )


def _walk(schedule: Schedule, pp_rank: int) -> Iterator[Moment]:
    live, deferred, phases = ([0] * schedule.chunks for _ in range(3))
    ends, done = WEIGHT if WEIGHT in schedule.kinds else BACKWARD, Counter[tuple[str, int]]()
    for kind, chunk, _ in schedule.actions[pp_rank]:
        done[kind, chunk] += 1
        first = kind == FORWARD and done[kind, chunk] == 1
        last = kind == ends and done[kind, chunk] == schedule.micro_batches
        if kind == FORWARD:
            live[chunk] += 1
        elif kind == BACKWARD:
            deferred[chunk] += ends == WEIGHT
        phases[chunk] = max(phases[chunk], FORWARDS if kind == FORWARD else BACKWARDS)
        yield Moment(kind, chunk, first, last, tuple(live), tuple(deferred), tuple(phases))
        if kind == BACKWARD:
            live[chunk] -= 1
        elif kind == WEIGHT:
            deferred[chunk] -= 1
        if last:
            phases[chunk] = COMPLETE


def _moments(plan: Plan, pp_rank: int) -> Moments:
    return plan.once(("moments", pp_rank), lambda: Moments(plan.schedule, pp_rank))


def _totals(stages: list[_StageBytes], moments: Moments) -> np.ndarray:
    """[moments]: bytes that are held beside what always is."""
    kept = np.array([stage.kept + stage.head_kept for stage in stages])
    put_off = np.array([stage.deferred for stage in stages])
    by_phase = np.array([[stage.held(phase).total() for phase in range(COMPLETE + 1)] for stage in stages])
    stays = moments.live @ kept + moments.deferred @ put_off + by_phase[range(len(stages)), moments.phases].sum(1)
    return stays + [stages[m.chunk].at_work(m.kind, m.first, m.last).total() for m in moments.list]


def _held(stages: list[_StageBytes], moment: Moment) -> Counter[str]:
    """The same of one moment, by kind."""
    found = stages[moment.chunk].at_work(moment.kind, moment.first, moment.last).copy()
    for stage, live, deferred, phase in zip(stages, moment.live, moment.deferred, moment.phases, strict=True):
        found.update({KEPT: live * stage.kept + deferred * stage.deferred, HEAD: live * stage.head_kept})
        found.update(stage.held(phase))
    return found


class _StageBytes:
    """What one virtual stage of a rank holds, by when it does.

    copies: of whole weights, which stay; gathered: what FSDP2 does not reshard. kept, deferred, head_kept: of a
    micro-batch. unreduced: sums of gradients before the reduction, head_sum: the part that the head's forward makes.
    summed: gradients where they are summed as they will be; shards: all of the stage's, complete.
    """

    def __init__(self, plan: Plan, stage: Stage) -> None:
        self.plan, self.stage, config, s = plan, stage, plan.config, plan.shapes
        self.units = [unit for unit in plan.units(stage) if unit.runs]
        self.kept = plan.kept_of_layers(stage)
        defers = WEIGHT in plan.schedule.kinds
        self.deferred = sum(layer_deferred(config.model, layer, s) for layer in stage.layers) if defers else 0
        trained = [(unit, FP32 * unit.trained_elements) for unit in self.units]
        self.shards = sum(FP32 * unit.shard(0, plan.sharing(unit.expert))[0] for unit in self.units)
        self.summed, self.unreduced, self.head_sum = self.shards, 0, 0
        if plan.accumulates:
            sharded = [(unit, nbytes) for unit, nbytes in trained if not plan.is_whole(unit.expert)]
            self.unreduced = sum(nbytes for _, nbytes in sharded)
            self.summed = sum(nbytes for unit, nbytes in trained if plan.is_whole(unit.expert))
            self.head_sum = sum(nbytes for unit, nbytes in sharded if unit.kind == "head")
        self.head_kept = self.head_working = 0
        if stage.head:
            in_sum = head_gradient(config, s) if plan.accumulates or plan.is_whole(False) else 0
            self.head_kept = head_kept(config, s) - in_sum
            self.head_working = head_bytes(config, s) - head_kept(config, s)
        self.copies, self.gathered, self.passing = self._weights()
        self.working = self._working(False), self._working(True)
        self._at_work: dict[Any, Counter[str]] = {}

    def _weights(self) -> tuple[int, int, int]:
        """Copies of whole weights that stay, what stays gathered, and what passes while a layer works.

        Copies that do not stay are of one layer at a time where they are recomputed; autograd keeps them otherwise.
        One in FP8 takes as much as one in bf16: a byte for each orientation.
        """
        plan, b = self.plan, self.plan.shapes.b
        copies = gathered = passing = 0
        for expert in (True, False):
            keep, whole, units = not plan.config.parallel.reshards(expert), plan.is_whole(expert), self._of(expert)
            if expert and plan.experts_in_fp8:  # one matrix at a time is dequantised
                passing += max((math.prod(shape) for unit in units for shape in unit.frozen), default=0)
            if plan.has_slabs and not whole:
                continue
            sizes = [self._forward_elements(unit) for unit in units if not unit.vocabulary]
            always = whole and (keep or plan.config.parallel.recompute_granularity == "none")
            if keep or always:
                ends = [self._forward_elements(unit) for unit in units if unit.vocabulary] if keep else []
                copies += sum(sizes + ends) * whole
                gathered += sum(sizes + ends) * (not whole)
            else:
                passing += (1 if whole else 2) * max(sizes, default=0)
        return b * copies, b * gathered, b * passing

    def _of(self, expert: bool) -> list[FsdpUnit]:
        return [unit for unit in self.units if unit.expert == expert]

    def _forward_elements(self, unit: FsdpUnit) -> int:
        """Elements of the copy that computes; 0 where the parameter itself does."""
        plan, whole = self.plan, self.plan.is_whole(unit.expert)
        if whole and plan.shapes.b == FP32:
            return 0
        cast = plan.config.fp8.blockwise and not plan.config.parallel.reshards(unit.expert)
        as_held = (unit.expert and plan.experts_in_fp8) or (whole and plan.frozen_bytes == plan.shapes.b and not cast)
        return unit.trained_elements if as_held else unit.elements

    def held(self, phase: int) -> Counter[str]:
        """Weights and gradients."""
        found = Counter({GATHERED: self.gathered if phase in (FORWARDS, BACKWARDS) else 0})
        if phase == FORWARDS:
            found[UNREDUCED] = self.head_sum
        elif phase == BACKWARDS:
            found[UNREDUCED], found[SHARDS] = self.unreduced, self.summed
        elif phase == COMPLETE:
            found[SHARDS] = self.shards
        return found

    def at_work(self, *action: Any) -> Counter[str]:
        """What an action (kind, first, last) holds beside what stays, in its fullest part."""
        if action not in self._at_work:
            self._at_work[action] = max(self._parts(*action), key=Counter.total)
        return self._at_work[action]

    def _parts(self, kind: str, first: bool, last: bool) -> list[Counter[str]]:
        """Those of an action: its layers, and the ends of the model."""
        plan = self.plan
        layers = [unit for unit in self.units if not unit.vocabulary]
        sent = plan.dispatcher.buffer_bytes() if any(unit.expert for unit in layers) else 0
        if kind != FORWARD:  # what comes back meets the gradients of no product
            sent = max(0, sent - layer_gradients(plan.config.model, plan.shapes))
        parts = [Counter({WORKING: self.working[kind == BACKWARD], GATHERED: self.passing, BUFFERS: sent})]
        parts[0].update(self._transfers(layers, kind, first, last))
        for unit in self.units:
            if unit.vocabulary:
                parts.append(self._transfers([unit], kind, first, last))
                if unit.kind == "head" and kind == FORWARD:
                    parts[-1][HEAD] += self.head_working
                if plan.config.parallel.reshards(False) and kind == FORWARD and not plan.has_slabs:
                    parts[-1][GATHERED] += plan.shapes.b * self._forward_elements(unit)
        return parts

    def _transfers(self, units: list[FsdpUnit], kind: str, first: bool, last: bool) -> Counter[str]:
        """The largest of these units on its way: FSDP2 receives it in a buffer and copies it, and reduces gradients
        from one, whose addends are held until they are in it. Dense ones are made in fp32, where several are summed,
        in their sum."""
        plan, b, arrives, way, reduced = self.plan, self.plan.shapes.b, 0, 0, 0
        for unit in units:
            whole, stay = plan.is_whole(unit.expert), not plan.config.parallel.reshards(unit.expert)
            if kind == FORWARD:
                if first and stay and not whole and not plan.has_slabs:
                    arrives = max(arrives, b * unit.elements)
                continue
            if unit.kind != "head" and (unit.expert or not plan.accumulates):
                way = max(way, unit.trained_elements * (b if unit.expert or whole else FP32))
            if not whole and (last or not plan.accumulates):  # behind the weights' own memory, where they stayed
                reduced = max(reduced, FP32 * unit.trained_elements - b * unit.elements * (last and stay))
        return Counter({GATHERED: arrives, WORKING: way, BUFFERS: reduced})

    def _working(self, backward: bool) -> int:
        """What a layer's forward or recomputation adds, and the gradients that its backward holds at a time."""
        plan, model, s = self.plan, self.plan.config.model, self.plan.shapes
        granularity, kernels = plan.config.parallel.recompute_granularity, plan.config.kernels
        layers, loss = [*self.stage.layers], indexer_working(plan.config.indexer, model, s)
        if self.stage.mtp and plan.config.losses.mtp_steps:
            layers.append(model.num_hidden_layers)
        if plan.config.indexer.indexer_training == "warmup":  # of a layer's forward
            return max((layer_kept(model, layer, s, "none") + loss for layer in layers), default=0)
        gradients = 0
        if backward:
            ordered = sums_in_order(kernels.attention_backend, kernels.deterministic, s.pack)
            gradients = layer_gradients(model, s) + (PART_BYTES if ordered else 0)
        return max((layer_again(model, layer, s, granularity) + gradients + loss for layer in layers), default=0)
