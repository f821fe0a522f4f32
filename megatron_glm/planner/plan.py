"""What a run needs, from its configuration alone: bytes and work of each pipeline rank. No device, no process.

Parameter, gradient and moment bytes follow from the declared parameters, cut as tensor and expert parallelism and FSDP2
cut them: exact. Activations and buffers are estimates from shapes; each function has its
formula. Every document is taken to fill its pack, which attends the most. All amounts are bytes, unless said.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

from megatron_glm.config import RunConfig
from megatron_glm.config.fp8 import MULTIPLE
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
from megatron_glm.parallel.pipeline.schedule import Schedule
from megatron_glm.parallel.pipeline.simulate import Simulation, simulate
from megatron_glm.planner.activations import (
    Shapes,
    head_kept,
    indexer_kept,
    layer_kept,
    student_arrived,
)
from megatron_glm.planner.units import BytesHeld, FsdpUnit, stage_units

Value = TypeVar("Value")
FP32 = 4
GIB = 2**30
# A plan lists all of them; up to these that takes a minute at most, and no memory to speak of.
MOST = {"ranks": 2**17, "micro-batches x stages": 2**18, "rows of a micro-batch": 2**27}


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

    def once(self, key: Any, compute: Callable[[], Value]) -> Value:
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
        return self.once(stage, lambda: stage_units(model, self.grid, stage, parts, lora))

    def rank_units(self, pp_rank: int) -> list[FsdpUnit]:
        stages = self.layout.of_rank(pp_rank)
        return self.once(("units", pp_rank), lambda: [unit for stage in stages for unit in self.units(stage)])

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
        trained, frozen, blocks = self.once(("held", *place), lambda: self.elements(*place))
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

    @property
    def asks_reference(self) -> bool:
        """Whether each step begins with a forward of the model without its adapters, for --loss dpo."""
        preference = self.config.preference
        return preference.is_dpo and not preference.reference_logprobs

    def message_bytes(self, pp_rank: int) -> int:
        """Of what crosses between stages: sent and received, forwards and backwards, and once more received early."""
        stages, s = self.layout.of_rank(pp_rank), self.shapes
        drafts = self.config.losses.mtp_steps if any(stage.mtp != stage.head for stage in stages) else 0
        messages = (4 + (self.config.parallel.communication_sms > 0)) * (1 + drafts) if self.grid.pp > 1 else 0
        return messages * s.shard * self.config.model.hidden_size * s.b

    @property
    def accumulates(self) -> bool:
        """Whether FSDP sums gradients of several micro-batches before it reduces them."""
        return self.config.parallel.grad_sync == "last" and self.schedule.micro_batches > 1

    def is_whole(self, expert: bool) -> bool:
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

    def kept_of_layers(self, stage: Stage) -> int:
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
        for stage in self.layout.of_rank(pp_rank):
            total += self.kept_of_layers(stage) + (head_kept(self.config, s) if stage.head else 0)
            if parallel.recompute_granularity == "none" and s.b < FP32:
                copied = (u for u in self.units(stage) if u.runs and not u.vocabulary and parallel.reshards(u.expert))
                total += s.b * sum(unit.trained_elements for unit in copied if self.is_whole(unit.expert))
        return total
