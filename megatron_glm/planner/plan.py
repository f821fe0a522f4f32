"""What a run needs, from its configuration alone: bytes and work of each pipeline rank. No device, no process.

Parameter, gradient and moment bytes follow from the declared parameters, cut as tensor and expert parallelism and FSDP2
cut them: exact. Activations and buffers are estimates from shapes; each function has its
formula. Every document is taken to fill its pack, which attends the most. All amounts are bytes, unless said.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

from megatron_glm.config import RunConfig
from megatron_glm.config.fp8 import MULTIPLE
from megatron_glm.ops.sparse_mla import PART_BYTES, sums_in_order
from megatron_glm.parallel.dispatch import Dispatcher, make_dispatcher
from megatron_glm.parallel.fsdp import holds_whole
from megatron_glm.parallel.grid import Grid
from megatron_glm.parallel.groups import ParallelGroups
from megatron_glm.parallel.pipeline.costs import Cost
from megatron_glm.parallel.pipeline.layout import (
    PipelineLayout,
    Stage,
    build_layout,
    check_layout,
    schedule_of,
    stage_costs,
)
from megatron_glm.parallel.pipeline.schedule import WEIGHT, Schedule
from megatron_glm.parallel.pipeline.simulate import Simulation, simulate
from megatron_glm.planner.activations import (
    Shapes,
    head_bytes,
    head_gradient,
    head_kept,
    indexer_kept,
    indexer_working,
    layer_again,
    layer_deferred,
    layer_gradients,
    layer_kept,
    student_arrived,
)
from megatron_glm.planner.units import BytesHeld, FsdpUnit, stage_units

Value = TypeVar("Value")
FP32 = 4
GIB = 2**30
# A plan lists all of them; up to these that takes a minute at most, and no memory to speak of.
MOST = {"ranks": 2**17, "micro-batches x stages": 2**18, "rows of a micro-batch": 2**27}
RESERVE = 5 * GIB  # an assumption: CUDA context and libraries, NCCL's channels of about ten groups, fragmentation


@dataclass(frozen=True)
class Plan:
    """The plan of one run on `world_size` ranks; all of it follows from these fields."""

    config: RunConfig
    world_size: int
    gpus_per_node: int
    grid: Grid
    layout: PipelineLayout
    schedule: Schedule

    @classmethod
    def create(cls, config: RunConfig, world_size: int, gpus_per_node: int) -> Plan:
        """Raises ValueError, in the words of a real run, if these ranks cannot run this configuration."""
        config.check(world_size)
        parallel, model, length = config.parallel, config.model, config.data.seq_length
        count = config.micro_batches(parallel.data_parallel_size(world_size))
        sizes = {"ranks": world_size, "micro-batches x stages": count * parallel.pipeline_model_parallel_size}
        for what, number in (sizes | {"rows of a micro-batch": config.train.micro_batch_size * length}).items():
            if number > (most := MOST[what]):
                raise ValueError(f"too large to plan: {number:,} {what}, at most {most:,}")
        grid = check_layout(parallel, model, world_size, length, count, config.losses)
        layout = build_layout(parallel, model, length, count, config.losses)
        return cls(config, world_size, gpus_per_node, grid, layout, schedule_of(parallel, layout, count))

    def with_settings(self, config: RunConfig) -> Plan:
        """The same plan with other resharding, synchronisation of gradients or type of moments, and nothing else."""
        other = replace(self, config=config)
        for name in ("_lasting", "shapes", "dispatcher"):
            other.__dict__[name] = getattr(self, name)
        return other

    @cached_property
    def _lasting(self) -> dict[Any, Any]:
        """What was computed and no setting changes, by name and pipeline rank."""
        return {}

    def _once(self, key: Any, compute: Callable[[], Value]) -> Value:
        if key not in self._lasting:
            self._lasting[key] = compute()
        return self._lasting[key]

    @cached_property
    def costs(self) -> list[Cost]:
        """Times of the stages, see `stage_costs`."""
        config = self.config
        return stage_costs(self.layout, config.model, config.data.seq_length, config.parallel, losses=config.losses)

    @cached_property
    def simulation(self) -> Simulation:
        """The schedule with these times alone: transfers take none."""
        return simulate(self.schedule, self.costs)

    @cached_property
    def rank_work(self) -> tuple[float, ...]:
        """Of each pipeline rank's stages, forward and backward."""
        return tuple(sum(sum(self.costs[stage]) for stage in stages) for stages in self.layout.placement.stages)

    @cached_property
    def shapes(self) -> Shapes:
        config, grid = self.config, self.grid
        length, topk = config.data.seq_length, config.model.index_topk
        pack = config.train.micro_batch_size * length
        tokens = pack // grid.cp
        dense = tokens * min(length, topk) // length
        if config.dense_rows == "off" or (config.dense_rows == "short" and length > topk):
            dense = 0
        if config.dense_rows == "all":
            dense = tokens
        padding = (MULTIPLE - 1) * config.model.n_routed_experts // grid.ep if config.fp8.blockwise else 0
        b = 2 if config.train.bf16 else 4
        return Shapes(pack, tokens, tokens // grid.tp, dense, min(topk, pack), grid.tp, b, padding, config.lora)

    @cached_property
    def dispatcher(self) -> Dispatcher:
        """What would move the tokens to their experts: it knows what that sends and holds."""
        return make_dispatcher(self.config, ParallelGroups.of_sizes(self.grid))

    def units(self, stage: Stage) -> tuple[FsdpUnit, ...]:
        model, parts, lora = self.config.model, self.config.trained_parts, self.config.lora
        return self._once(stage, lambda: stage_units(model, self.grid, stage, parts, lora))

    def rank_units(self, pp_rank: int) -> list[FsdpUnit]:
        stages = self.layout.of_rank(pp_rank)
        return self._once(("units", pp_rank), lambda: [unit for stage in stages for unit in self.units(stage)])

    def held(self, rank: int) -> BytesHeld:
        """What global rank `rank` holds of parameters, gradients and AdamW's two moments."""
        places = (next(g.index(rank) for g in self.grid.groups(n) if rank in g) for n in ("pp", "dp_cp", "edp"))
        return self._held(*places)

    def held_most(self, pp_rank: int) -> BytesHeld:
        """What the fullest rank of a pipeline rank holds: the first one, whose shards are never the smaller ones."""
        return self._held(pp_rank, 0, 0)

    def elements(self, pp_rank: int, dp_cp_rank: int = 0, edp_rank: int = 0) -> tuple[int, int, int]:
        """Those that a rank holds: trained, frozen, and frozen in FP8, of which FSDP2 has no shards."""
        grid, trained, frozen, blocks = self.grid, 0, 0, 0
        for unit in self.rank_units(pp_rank):
            index, size = (edp_rank, grid.edp) if unit.expert else (dp_cp_rank, grid.dp * grid.cp)
            more, still = unit.shard(index, size)
            trained += more
            if unit.expert and self.experts_in_fp8:
                blocks += still if self.has_slabs else unit.shard(0, 1)[1]
            else:
                frozen += still
        return trained, frozen, blocks

    def _held(self, *place: int) -> BytesHeld:
        trained, frozen, blocks = self._once(("held", *place), lambda: self.elements(*place))
        moment = 2 if self.config.optimizer.adam_moments_dtype == "bf16" else FP32
        scaled = sum(unit.shard(0, 1)[1] for unit in self.rank_units(place[0]) if unit.expert) * self.experts_in_fp8
        held = self.frozen_bytes * frozen + blocks + FP32 * scaled // MULTIPLE**2
        return BytesHeld(FP32 * trained, held, FP32 * trained, 2 * moment * trained)

    @property
    def experts_in_fp8(self) -> bool:
        """Whether the routed experts are frozen and held in FP8."""
        return self.config.lora.base_precision == "fp8"

    @property
    def frozen_bytes(self) -> int:
        """Of an element that is not trained: as a released checkpoint holds it, or fp32, in which it is drawn.

        Under adapters as --base-precision says; routed experts may be in FP8 then.
        """
        if self.config.lora.lora_rank:
            return FP32 if self.config.lora.precision(self.config.train.bf16) == "fp32" else 2
        section, narrow = self.config.checkpoint, self.config.model.dtype != "float32"
        return 2 if narrow and (section.load or section.load_hf) is not None else FP32

    def memory(self, pp_rank: int) -> dict[str, int]:
        """Bytes by kind at the peak of the fullest rank of a pipeline rank: the sum of each kind's own peak.

        Gradients are at their largest either after the reduction (shards) or, with --grad-sync last and several
        micro-batches, before it: FSDP then accumulates the unsharded fp32 gradients of the whole rank.
        """
        s, model = self.shapes, self.config.model
        held = self.held_most(pp_rank)
        running = [unit for unit in self.rank_units(pp_rank) if unit.runs]
        accumulated = 0
        if self._accumulates:
            accumulated = FP32 * sum(unit.trained_elements for unit in running)
        stages = self.layout.of_rank(pp_rank)
        head = any(stage.head for stage in stages)
        reduced = max((unit.trained_elements for unit in running if not self._whole(unit.expert)), default=0)
        sent = self.dispatcher.buffer_bytes() if any(unit.expert for unit in running) else 0
        drafts = self.config.losses.mtp_steps if any(stage.mtp != stage.head for stage in stages) else 0
        crossing = 4 * (1 + drafts) * s.shard * model.hidden_size * s.b if self.grid.pp > 1 else 0
        return {
            "fp32 master weights": held.masters,
            "frozen weights": held.frozen,
            "AdamW moments": held.moments,
            "gradients (shards)": held.gradients,
            "gradients before reduction": max(0, accumulated - held.gradients),
            "gathered weights": self._gathered(pp_rank),
            "activations": self._once(("kept", pp_rank), lambda: self._kept(pp_rank)),
            "working set of a layer": self._once(("working", pp_rank), lambda: self._working_set(pp_rank))
            + self._gradients_on_their_way(pp_rank),
            "logits chunk and head": self._head() if head else 0,
            "communication buffers": reduced * FP32 + sent + crossing,
            "reserve (CUDA, NCCL, fragments)": RESERVE,
        }

    @property
    def _accumulates(self) -> bool:
        """Whether FSDP sums gradients of several micro-batches before it reduces them."""
        return self.config.parallel.grad_sync == "last" and self.schedule.micro_batches > 1

    def fits(self, memory: float) -> bool:
        """Whether every rank stays within so many bytes."""
        return all(sum(self.memory(rank).values()) <= memory for rank in range(self.grid.pp))

    def peak(self) -> int:
        return max(sum(self.memory(rank).values()) for rank in range(self.grid.pp))

    def _whole(self, expert: bool) -> bool:
        """Whether units of this kind are plain parameters, of which the forward makes copies in its own type."""
        if self.has_slabs:
            return self.sharing(expert) == 1
        return holds_whole(self.grid.dp * self.grid.cp, self.grid.edp)[0 if expert else 1]

    @property
    def has_slabs(self) -> bool:
        return self.config.parallel.data_parallel_sharding == "slabs"

    def sharing(self, expert: bool) -> int:
        """How many ranks have a shard of units of this kind."""
        return self.grid.edp if expert else self.grid.dp * self.grid.cp

    def _gradients_on_their_way(self, pp_rank: int) -> int:
        """Most bytes of one unit's gradients before they are where they are summed; the head's are counted with it.

        FSDP's dense ones are made in fp32, and where several are summed, they are made there.
        """
        dense = self.shapes.b if self._whole(False) else 0 if self._accumulates else FP32
        largest = 0
        for unit in self.rank_units(pp_rank):
            if unit.runs and unit.kind != "head":
                largest = max(largest, unit.trained_elements * (self.shapes.b if unit.expert else dense))
        return largest

    def _head(self) -> int:
        """What head and loss hold; the gradient of their matrix only where it is in no sum of gradients."""
        summed = self._accumulates or self._whole(False)
        matrix = head_gradient(self.config, self.shapes) if summed else 0
        return head_bytes(self.config, self.shapes) - matrix

    def _gathered(self, pp_rank: int) -> int:
        """Forward weights: the layer at work with the next one, embedding or head beside them; all that stay gathered.

        Copies of whole weights are of one layer at a time where they are recomputed; autograd keeps them otherwise.
        One in FP8 takes as much as one in bf16: a byte for each orientation.
        """
        parallel, b = self.config.parallel, self.shapes.b
        kept = largest = arriving = 0  # arriving: FSDP2 receives a unit's weights in a buffer, and copies them
        keep = {True: not parallel.reshard_experts_after_forward, False: not parallel.reshard_after_forward}
        for stage in self.layout.of_rank(pp_rank):
            passing = 0
            for expert in (True, False):
                whole, units = self._whole(expert), [u for u in self.units(stage) if u.runs and u.expert == expert]
                cast = keep[expert] and self.config.fp8.blockwise
                as_held = whole and self.frozen_bytes == b and not cast  # frozen weights compute as they are
                if expert and self.experts_in_fp8:  # one matrix at a time is dequantised
                    as_held, matrices = True, [math.prod(shape) for unit in units for shape in unit.frozen]
                    passing += max(matrices, default=0)
                if self.has_slabs and not whole:
                    continue
                sizes = [(u.trained_elements if as_held else u.elements, u.vocabulary) for u in units]
                vocabulary, layers = ([size for size, kind in sizes if kind == wanted] for wanted in (True, False))
                if whole and b == FP32:
                    continue
                if keep[expert]:
                    kept += sum(vocabulary)
                    arriving = max([arriving, *vocabulary, *layers] if not whole else [arriving])
                else:
                    passing += max(vocabulary, default=0)
                if keep[expert] or (whole and parallel.recompute_granularity == "none"):
                    kept += sum(layers)
                else:
                    passing += (1 if whole else 2) * max(layers, default=0)
            largest = max(largest, passing)
        return b * (kept + largest + arriving) + (self._slab_bytes(pp_rank) if self.has_slabs else 0)

    def _slab_bytes(self, pp_rank: int) -> int:
        """With slabs: shards in the type that computes, where their masters have another, and gathered weights."""
        b, found, stages = self.shapes.b, 0, self.layout.of_rank(pp_rank)
        largest: dict[Any, int] = {}  # of each slab
        for (chunk, place), slab in self.slabs(pp_rank).items():
            unit = self.units(stages[chunk])[place]
            if unit.runs:
                trained, frozen = unit.shard(0, self.sharing(unit.expert))
                in_fp8 = unit.expert and self.experts_in_fp8
                found += b * (trained * (b < FP32) + frozen * (self.frozen_bytes != b and not in_fp8))
            if unit.runs or slab != (chunk, place):
                largest[slab] = max(largest.get(slab, 0), self.gathered_bytes(unit))
        return found + sum(largest.values())

    def slabs(self, pp_rank: int) -> dict[tuple[int, int], Any]:
        """By virtual stage and place in its units, the slab of each unit that ranks share: two for each kind, which all
        stages of the rank take turns in, one for embedding and head, and its own for one that stays gathered."""
        parallel, found, turns = self.config.parallel, {}, Counter()
        for chunk, stage in enumerate(self.layout.of_rank(pp_rank)):
            for place, unit in enumerate(self.units(stage)):
                reshards = parallel.reshard_experts_after_forward if unit.expert else parallel.reshard_after_forward
                if self.sharing(unit.expert) == 1:
                    continue
                found[chunk, place] = chunk, place
                if reshards and unit.kind != "root":
                    kind = "vocabulary" if unit.vocabulary else unit.kind
                    found[chunk, place] = kind, turns[kind] % (1 if unit.vocabulary else 2)
                    turns[kind] += 1
        return found

    def gathered_bytes(self, unit: FsdpUnit) -> int:
        """Of a unit with slabs, where it is whole."""
        in_fp8 = unit.elements - unit.trained_elements if unit.expert and self.experts_in_fp8 else 0
        return self.shapes.b * (unit.elements - in_fp8) + in_fp8

    def _kept_of_layers(self, stage: Stage) -> int:
        """Bytes of activations of one micro-batch that a virtual stage's layers keep until its backward."""
        granularity, model, s = self.config.parallel.recompute_granularity, self.config.model, self.shapes
        indexer = self.config.indexer
        student = sum(indexer_kept(indexer, model, layer, s, granularity) for layer in stage.layers)
        student += student_arrived(indexer, model, s) * stage.needs_topk(model)
        if indexer.indexer_training == "warmup":
            return student
        arrived = s.tokens * s.slots * 4 if stage.needs_topk(model) else 0  # the selection, with the hidden states
        kept = student + sum(layer_kept(model, layer, s, granularity) for layer in stage.layers)
        if stage.mtp and self.config.losses.mtp_steps:  # and of each step the hidden states, embeddings and their pair
            step = layer_kept(model, model.num_hidden_layers, s, granularity) + 4 * s.shard * model.hidden_size * s.b
            steps = self.config.losses.mtp_steps
            taught = indexer_kept(indexer, model, model.num_hidden_layers, s, granularity)
            kept += steps * step + model.mtp_selections(steps) * taught
        if stage.head and not stage.mtp:  # the hidden states of the steps, with the trunk's
            kept += self.config.losses.mtp_steps * s.shard * model.hidden_size * s.b
        return arrived + kept

    def kept_by_a_forward(self, pp_rank: int) -> int:
        """Bytes that one forward of all stages of a pipeline rank leaves for its backward, the head's included.

        Where autograd keeps copies of whole weights that each forward makes, these, too.
        """
        parallel, s, total = self.config.parallel, self.shapes, 0
        keep = {True: not parallel.reshard_experts_after_forward, False: not parallel.reshard_after_forward}
        for stage in self.layout.of_rank(pp_rank):
            total += self._kept_of_layers(stage) + (head_kept(self.config, s) if stage.head else 0)
            if parallel.recompute_granularity == "none" and s.b < FP32:
                copied = (u for u in self.units(stage) if u.runs and not u.vocabulary and not keep[u.expert])
                total += s.b * sum(unit.trained_elements for unit in copied if self._whole(unit.expert))
        return total

    def _kept(self, pp_rank: int) -> int:
        """Most bytes of activations between forwards and backwards, action by action through the schedule."""
        stages, model = self.layout.of_rank(pp_rank), self.config.model
        kept = [self._kept_of_layers(stage) for stage in stages]
        defers = WEIGHT in self.schedule.kinds
        put_off = [defers * sum(layer_deferred(model, i, self.shapes) for i in stage.layers) for stage in stages]
        live = peak = 0
        for kind, chunk, _ in self.schedule.actions[pp_rank]:
            live += {"F": kept[chunk], "B": put_off[chunk] - kept[chunk], "W": -put_off[chunk]}[kind]
            peak = max(peak, live)
        return peak

    def _working_set(self, pp_rank: int) -> int:
        """What a layer's recomputation adds, and the gradients that its backward holds at a time."""
        model, s, granularity = self.config.model, self.shapes, self.config.parallel.recompute_granularity
        kernels = self.config.kernels
        ordered = sums_in_order(kernels.attention_backend, kernels.deterministic, s.pack)
        gradients = layer_gradients(model, s) + (PART_BYTES if ordered else 0)
        layers = [layer for stage in self.layout.of_rank(pp_rank) for layer in stage.layers]
        loss = indexer_working(self.config.indexer, model, s)
        if self.config.indexer.indexer_training == "warmup":  # of a layer's forward
            return max((layer_kept(model, i, s, "none") + loss for i in layers), default=0)
        return max((layer_again(model, i, s, granularity) + gradients + loss for i in layers), default=0)
