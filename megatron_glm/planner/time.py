"""Seconds of a training step on a `Machine`, by what they are spent on, and what of it is hidden.

Each virtual stage has a forward and a backward of computing, waits for transfers and passes over memory; the schedule
is simulated with these times. What a rank does once a step (FSDP's last reductions, AdamW) follows its last action.

Hidden is what the code overlaps today: FSDP2's transfers in part (`FSDP_HIDDEN`); the sender's side of a pipeline
message. All other transfers are waited for. Routing is taken to be uniform, documents to fill their pack.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from megatron_glm.config import RunConfig
from megatron_glm.parallel.pipeline.costs import MEASURED, REPEATED, Cost, Rates
from megatron_glm.parallel.pipeline.layout import schedule_of, stage_costs
from megatron_glm.parallel.pipeline.simulate import Simulation, simulate
from megatron_glm.planner.machine import (
    DENSE_ATTENTION,
    EXPERT_ROWS,
    EXPERTS_WAIT,
    FEWER_SMS,
    FP8_TIME,
    FSDP_HIDDEN,
    MEASURED_ROWS,
    OPTIMIZER_BYTES,
    Machine,
    rows_factor,
)
from megatron_glm.planner.plan import FP32, Plan
from megatron_glm.planner.traffic import crossing_fields, layer_traffic, shared_elements
from megatron_glm.planner.units import FsdpUnit

COMPUTING, AGAIN, COPIES, FSDP = "forward and backward", "computed again", "FSDP's copies", "FSDP's transfers"
EXPERTS, LATENTS, SHARDS, MESSAGES = "tokens to experts", "latents over CP", "sequence shards over TP", "messages of PP"
OPTIMIZER, IDLE, REFERENCE = "AdamW", "idle in the pipeline", "reference of the pairs"
TRANSFERS = {"ep": EXPERTS, "ep_node": EXPERTS, "ep_inter": EXPERTS, "tp_cp": LATENTS, "tp": SHARDS}


class Spent(NamedTuple):
    """Seconds of one kind: all of them, and those that make the rank's step longer. The rest is hidden."""

    whole: float = 0.0
    exposed: float = 0.0

    def plus(self, other: Spent, times: float = 1.0) -> Spent:
        return Spent(self.whole + times * other.whole, self.exposed + times * other.exposed)


class Ledger(defaultdict[str, Spent]):
    """Seconds by kind."""

    def __init__(self) -> None:
        super().__init__(Spent)

    def add(self, kind: str, whole: float, exposed: float | None = None) -> None:
        self[kind] = self[kind].plus(Spent(whole, whole if exposed is None else exposed))

    def add_all(self, other: Ledger, times: float) -> None:
        for kind, spent in other.items():
            self[kind] = self[kind].plus(spent, times)

    @property
    def exposed(self) -> float:
        return sum(spent.exposed for spent in self.values())


def unpredictable(config: RunConfig) -> str | None:
    """Why the time of this run cannot be predicted: no rates were measured of it. None if it can."""
    if not config.train.bf16:
        return "without --bf16"
    if config.kernels.attention_backend == "torch":
        return "of --attention-backend torch"
    if config.indexer.indexer_training != "off":
        return f"of --indexer-training {config.indexer.indexer_training}"
    return None if config.losses.train_only is None else f"of --train-only {config.losses.train_only}"


@dataclass(frozen=True)
class StepTime:
    """A step of `plan`, for the pipeline rank that ends last.

    by_rank: the ledger of each pipeline rank, its idle time included; once: those of what follows its last action.
    """

    plan: Plan
    simulation: Simulation
    by_rank: tuple[Ledger, ...]
    ends: tuple[float, ...]

    @property
    def seconds(self) -> float:
        return max(self.ends)

    @property
    def slowest(self) -> int:
        return self.ends.index(self.seconds)

    @property
    def tokens_per_second_per_gpu(self) -> float:
        config = self.plan.config
        return config.train.global_batch_size * config.data.seq_length / self.seconds / self.plan.world_size


def step_time(plan: Plan, machine: Machine, optimizer: bool = True) -> StepTime:
    """optimizer: with AdamW; without it, a step is forward and backward, as tools/benchmark.py measures them."""
    clock = _Clock(plan, machine)
    stages = plan.layout.stages
    forwards, backwards = zip(*(clock.stage(number) for number in range(len(stages))), strict=True)
    deferred = [clock.deferred(number) for number in range(len(stages))]
    costs = [
        (f.exposed, b.exposed - w, w)[: 3 if plan.config.parallel.defers_weights else 2]
        for f, b, w in zip(forwards, backwards, deferred, strict=True)
    ]
    simulation = simulate(plan.schedule, costs)
    ahead = 0.0
    if plan.asks_reference:
        parallel, count = plan.config.parallel, plan.schedule.micro_batches
        ahead = simulate(
            schedule_of(parallel, plan.layout, count, forward_only=True), [(cost[0], 0.0) for cost in costs]
        ).makespan
    by_rank, ends = [], []
    for rank, numbers in enumerate(plan.layout.placement.stages):
        ledger = Ledger()
        for number in numbers:
            ledger.add_all(forwards[number], plan.schedule.micro_batches)
            ledger.add_all(backwards[number], plan.schedule.micro_batches)
        end = simulation.spans[rank][-1][1]
        idle = end - ledger.exposed
        once = clock.once(rank, optimizer)
        ledger.add_all(once, 1)
        ledger.add(IDLE, idle)
        if ahead:
            ledger.add(REFERENCE, ahead)
        by_rank.append(ledger)
        ends.append(ahead + end + once.exposed)
    return StepTime(plan, simulation, tuple(by_rank), tuple(ends))


def least_work(plan: Plan, machine: Machine) -> float:
    """Seconds of one micro-batch on a rank that has the whole model: computing and waits for tokens, none for FSDP."""
    ledgers = _Clock(plan, machine).stage(0)
    return sum(spent.exposed for ledger in ledgers for kind, spent in ledger.items() if kind not in (FSDP, COPIES))


def transfers(plan: Plan, machine: Machine) -> list[tuple[float, float]]:
    """Seconds that a forward and a backward of each virtual stage wait for other ranks; needs no rates of computing."""
    clock = _Clock(plan, machine)
    return [
        (sum(s.exposed for s in there.values()), sum(s.exposed for s in back.values()))
        for there, back in map(clock.waiting, range(len(plan.layout.stages)))
    ]


def calibration(plan: Plan, machine: Machine, forward: float, backward: float) -> dict[str, float]:
    """How many times as long as predicted the forwards and the backwards of one GPU's step took, in seconds."""
    if plan.world_size > 1:
        raise ValueError(f"a calibration is of one GPU, there are {plan.world_size} ranks")
    if reason := unpredictable(plan.config):
        raise ValueError(f"no calibration: no rates were measured {reason}")
    ways = _Clock(plan, machine).stage(0)
    predicted = [plan.schedule.micro_batches * way.exposed for way in ways]
    return {"forward": forward / predicted[0], "backward": backward / predicted[1]}


class _Clock:
    """Times of the parts of one plan."""

    def __init__(self, plan: Plan, machine: Machine) -> None:
        self.plan, self.machine, self.config = plan, machine, plan.config
        self.parallel, self.grid, self.s = plan.config.parallel, plan.grid, plan.shapes
        self.seen = self.config.model  # whose rows attend to as many keys as they do in this run
        if self.config.attends_densely:
            self.seen = replace(self.seen, index_topk=self.config.data.seq_length)
        self.per_operation = self.s.pack / (self.grid.tp * self.grid.cp) / machine.products
        self._of_layer: dict[tuple[bool, ...], tuple[Ledger, Ledger]] = {}
        self._of_unit: dict[tuple[str, int, int, int], tuple[Ledger, Ledger]] = {}
        self._sizes: dict[str, tuple[int, int]] = {}
        self.reductions = 1 if self.parallel.grad_sync == "last" else plan.schedule.micro_batches

    @cached_property
    def rates(self) -> Rates:
        model = self.config.model
        factor = rows_factor(self.s.shard * model.num_experts_per_tok * self.grid.ep / model.n_routed_experts)
        fewer = rows_factor(EXPERT_ROWS[0][0] * self.s.shard / MEASURED_ROWS)  # at the others, as at the experts
        scale = dict.fromkeys(MEASURED._fields, fewer)
        scale["experts"] = factor * FEWER_SMS[self.parallel.communication_sms][self.config.fp8.blockwise]
        rates = Rates(*(tuple(scale[kind] * rate for rate in getattr(MEASURED, kind)) for kind in MEASURED._fields))
        for kind, times in FP8_TIME.items() if self.config.fp8.blockwise else ():
            share = self.config.fp8.share_of_layers(model.num_hidden_layers)
            scaled = [rate * (1 - share + share * time) for rate, time in zip(getattr(rates, kind), times, strict=True)]
            rates = rates._replace(**{kind: tuple(scaled)})
        if self.config.attends_densely:
            dense = tuple(fewer * rate for rate in DENSE_ATTENTION)
            rates = rates._replace(attention=dense, index_scores=(0, 0), index_projections=(0, 0))
        return rates

    def stage(self, number: int) -> tuple[Ledger, Ledger]:
        """One micro-batch's forward and backward of a virtual stage."""
        forward, backward = self._computing(number)
        there, back = self._beside(number)
        forward.add_all(there, 1)
        backward.add_all(back, 1)
        return forward, backward

    def waiting(self, number: int) -> tuple[Ledger, Ledger]:
        """What of it is spent on other ranks."""
        ledgers = self._beside(number)
        for ledger in ledgers:
            ledger.pop(COPIES, None)
        return ledgers

    def _beside(self, number: int) -> tuple[Ledger, Ledger]:
        """Transfers and FSDP's copies of a virtual stage."""
        stage, model = self.plan.layout.stages[number], self.config.model
        forward, backward = Ledger(), Ledger()
        steps = self.config.losses.mtp_steps
        parts = [self._transfers(layer) for layer in stage.layers]
        if stage.mtp:
            parts += [self._transfers(model.num_hidden_layers, again=step > 0) for step in range(steps)]
        parts += [self._fsdp(unit, unit.calls(stage, steps)) for unit in self.plan.units(stage) if unit.runs]
        for there, back in parts:
            forward.add_all(there, 1)
            backward.add_all(back, 1)
        for passed, ledger in ((0, forward), (1, backward)):
            if seconds := self._messages(number)[passed]:
                early = self.parallel.communication_sms > 0  # then it comes beside the action before
                ledger.add(MESSAGES, 2 * seconds, 0.0 if early else seconds)  # the sender goes on meanwhile
        return forward, backward

    @cached_property
    def _costs(self) -> tuple[list[Cost], list[Cost]]:
        """Costs of all stages as they are, and without recomputation."""
        plain = replace(self.parallel, recompute_granularity="none")
        length, losses, layout = self.config.data.seq_length, self.config.losses, self.plan.layout
        costs, without = (stage_costs(layout, self.seen, length, p, self.rates, losses) for p in (self.parallel, plain))
        return costs, without

    def _computing(self, number: int) -> tuple[Ledger, Ledger]:
        (forward, *backward), (_, *plain) = self._costs[0][number], self._costs[1][number]
        again, plain_backward = sum(backward) - sum(plain), sum(plain)
        ledgers = Ledger(), Ledger()
        for ledger, kind, operations, factor in (
            (ledgers[0], COMPUTING, forward, self.machine.forward),
            (ledgers[1], COMPUTING, plain_backward, self.machine.backward),
            (ledgers[1], AGAIN, again, self.machine.forward),
        ):
            if operations:
                ledger.add(kind, operations * self.per_operation * factor)
        return ledgers

    def deferred(self, number: int) -> float:
        """Seconds of a stage's gradients of weights that a backward puts off."""
        costs = self._costs[0][number]
        return costs[2] * self.per_operation * self.machine.backward if len(costs) == 3 else 0.0

    def _transfers(self, layer: int, again: bool = False) -> tuple[Ledger, Ledger]:
        """What the ranks of one layer send to each other, all of it waited for. A backward sends it back.

        again: a later MTP step, which may attend to the keys of the first.
        """
        model = self.config.model
        moe, shares = model.is_moe(layer), again and model.index_share_for_mtp_iteration
        key = moe, model.has_indexer(layer), self.config.fp8.in_layer(layer, model.num_hidden_layers), shares
        if key in self._of_layer:
            return self._of_layer[key]
        forward, backward = self._of_layer[key] = Ledger(), Ledger()
        repeats = REPEATED[self.parallel.recompute_granularity] > 0
        for (axis, _), sent in layer_traffic(self.plan, layer).items():
            if shares and axis == "tp_cp":
                continue
            seconds, kind = self.seconds(axis, sent), TRANSFERS[axis]
            forward.add(kind, seconds)
            # The recomputation of a layer ends before its tokens go back from the experts.
            backward.add(kind, seconds * (1 + repeats * (0.5 if kind == EXPERTS else 1.0)))
        if self.grid.ep > 1 and moe:
            forward.add(EXPERTS, EXPERTS_WAIT)
            backward.add(EXPERTS, EXPERTS_WAIT * (1 + repeats))
        return forward, backward

    def _fsdp(self, unit: FsdpUnit, calls: int) -> tuple[Ledger, Ledger]:
        """Gathers of a unit's weights and reductions of its gradients that every micro-batch has.

        calls: of the unit in a forward.

        FSDP2 casts its shard, copies it into a buffer and copies out what it has gathered: 4 + 10 / n bytes of passes a
        weight on n ranks, in bf16. Whole weights that do not stay are copied from their masters.
        """
        axis, n = self._group(unit)
        key = unit.kind, unit.elements, unit.trained_elements, calls
        if key in self._of_unit:
            return self._of_unit[key]
        forward, backward = self._of_unit[key] = Ledger(), Ledger()
        every = self.plan.schedule.micro_batches > 1 and unit.expert  # sums of several bf16 gradients are fp32
        if n == 1:
            if self._reshards(unit):
                forward.add(COPIES, 6 * unit.trained_elements / self.machine.copies)
                if REPEATED[self.parallel.recompute_granularity]:
                    backward.add(COPIES, 6 * unit.trained_elements / self.machine.copies)
            if every:
                backward.add(COPIES, 10 * unit.trained_elements / self.machine.copies)
            return forward, backward
        if self._gathers_each(unit):
            calls = calls if self._reshards(unit) else 1
            self._gather(unit, axis, n, forward, calls)
            if self._reshards(unit) and not unit.vocabulary:
                self._gather(unit, axis, n, backward, calls)
        if self.reductions > 1:
            self._reduce(unit, axis, n, backward)
        elif every:
            backward.add(COPIES, 10 * unit.trained_elements / self.machine.copies)
        return forward, backward

    def once(self, rank: int, optimizer: bool) -> Ledger:
        """What a pipeline rank does once a step."""
        ledger = Ledger()
        for unit in self.plan.rank_units(rank):
            axis, n = self._group(unit)
            if unit.runs and n > 1:
                if not self._gathers_each(unit):
                    self._gather(unit, axis, n, ledger)
                if self.reductions == 1:
                    self._reduce(unit, axis, n, ledger)
        if optimizer:
            moved = (
                OPTIMIZER_BYTES[self.config.optimizer.adam_moments_dtype] * self.plan.held_most(rank).masters // FP32
            )
            ledger.add(OPTIMIZER, moved / self.machine.copies)
        return ledger

    def _group(self, unit: FsdpUnit) -> tuple[str, int]:
        return ("edp", self.grid.edp) if unit.expert else ("dp_cp", self.grid.dp * self.grid.cp)

    def _reshards(self, unit: FsdpUnit) -> bool:
        return self.parallel.reshards(unit.expert)

    def _gathers_each(self, unit: FsdpUnit) -> bool:
        """Whether each micro-batch gathers; what stays gathered does until it is reduced."""
        return self._reshards(unit) or self.reductions > 1

    def _gather(self, unit: FsdpUnit, axis: str, n: int, ledger: Ledger, calls: int = 1) -> None:
        seconds = calls * self.seconds(axis, (n - 1) / n * shared_elements(self.plan, unit) * self.s.b)
        ledger.add(FSDP, seconds, (1 - FSDP_HIDDEN) * seconds)
        ledger.add(COPIES, calls * (4 + 10 / n) * shared_elements(self.plan, unit) / self.machine.copies)

    def _reduce(self, unit: FsdpUnit, axis: str, n: int, ledger: Ledger) -> None:
        """fp32 on the way; gradients are copied into a buffer, the experts' are widened before."""
        seconds = self.seconds(axis, (n - 1) / n * unit.trained_elements * FP32)
        ledger.add(FSDP, seconds, (1 - FSDP_HIDDEN) * seconds)
        widened = unit.expert and (self.reductions > 1 or self.plan.schedule.micro_batches == 1)
        ledger.add(COPIES, (14 if widened else 8) * unit.trained_elements / self.machine.copies)

    def _messages(self, number: int) -> tuple[float, float]:
        """Seconds to receive the inputs of a stage, and the gradients of its outputs."""
        incoming, _ = self._crossing[number]
        following = self._crossing[number + 1][1] if number + 1 < len(self._crossing) else 0.0
        return incoming, following

    @cached_property
    def _crossing(self) -> list[tuple[float, float]]:
        """Seconds of what enters each stage, and of the gradients that leave it backwards."""
        plan, fields = self.plan, crossing_fields(self.plan)
        stages, place = plan.layout.stages, plan.layout.placement.of_stage
        found = [(0.0, 0.0)]
        block = plan.world_size // self.grid.pp
        for number in range(1, len(stages)):
            ends = (place[number - 1][0], place[number][0])
            nodes = {rank * block // plan.gpus_per_node for rank in ends}
            rate = self.machine.nvlink if len(nodes) == 1 else self.machine.nic
            sizes = [(math.prod(f.shape) * f.dtype.itemsize, f.differentiable) for f in fields if f.stages[number]]
            sizes = sizes if ends[0] != ends[1] else []
            found.append((sum(n for n, _ in sizes) / rate, sum(n for n, back in sizes if back) / rate))
        return found

    def seconds(self, axis: str, sent: float) -> float:
        """Of `sent` bytes that a rank sends to the others of its group.

        Tokens go to all ranks, those of its node first. A ring passes each node by as many adapters as it has ranks
        there: 8 ranks a node cross at eight times a GPU's rate.
        """
        if axis not in self._sizes:
            ranks = self.plan.grid.first(axis)
            self._sizes[axis] = len(ranks), sum(rank < self.plan.gpus_per_node for rank in ranks)
        size, near = self._sizes[axis]
        nvlink, nic = self.machine.nvlink, self.machine.nic
        if TRANSFERS.get(axis) == EXPERTS and self.parallel.moe_token_dispatcher_type != "allgather":
            inside = (near - 1) / (size - 1)
            return sent * (inside / nvlink + (1 - inside) / nic)
        return sent / nvlink if near == size else max(sent / nvlink if near > 1 else 0.0, sent / near / nic)
