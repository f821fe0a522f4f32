"""Which layers each virtual stage holds.

Layout strings (Megatron's): E embedding, t decoder layer, m MTP layer, L norm + head + loss, `|` between stages,
`*n` repeats the letter or the (group) before it, `,` separates for the eye. Example, 32 stages: `Et*3|(tt|)*29,m|L`.
Layers come in model order: E first, then t, then m, then L last. `m` may be left out: the last stage then holds it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_glm.config import LossConfig, ModelConfig, ParallelConfig, RunConfig
from megatron_glm.config.training import NEXT_TOKEN
from megatron_glm.parallel.grid import Grid
from megatron_glm.parallel.pipeline.costs import MEASURED, Cost, Rates, part_costs, sum_costs
from megatron_glm.parallel.pipeline.schedule import Placement, Schedule, build_schedule
from megatron_glm.parallel.pipeline.split import auto_sizes

MAX_ITEMS = 100_000  # of an expanded layout string

N_FLAG, LAYOUT_FLAG = "--num-layers-per-virtual-pipeline-stage", "--pipeline-model-parallel-layout"
PP_FLAG = "--pipeline-model-parallel-size"


@dataclass(frozen=True)
class Stage:
    layers: tuple[int, ...]  # decoder layers, ascending and contiguous; may be empty
    embedding: bool = False
    head: bool = False
    mtp: bool = False

    def needs_topk(self, model: ModelConfig) -> bool:
        """Whether the selection of an earlier stage must come with the hidden states."""
        return bool(self.layers) and not model.has_indexer(self.layers[0])


@dataclass(frozen=True)
class PipelineLayout:
    """The stages of a pipeline in the order of the model, and where they are."""

    placement: Placement
    stages: tuple[Stage, ...]

    @property
    def pp(self) -> int:
        return self.placement.pp

    @property
    def chunks(self) -> int:
        return self.placement.chunks

    def of_rank(self, rank: int) -> tuple[Stage, ...]:
        """The stages of one pipeline rank, chunk by chunk."""
        return tuple(self.stages[stage] for stage in self.placement.stages[rank])

    def embedding_ranks(self, predicts: bool) -> list[int]:
        """The pipeline ranks that hold the embedding. predicts: MTP steps run, for which their stage has it, too."""
        holding = [i for i, stage in enumerate(self.stages) if stage.embedding or (stage.mtp and predicts)]
        return sorted({self.placement.of_stage[stage][0] for stage in holding})


def check_run(config: RunConfig, world_size: int) -> None:
    """Refuse, by ValueError, a configuration that these ranks cannot run: all that is known without torch."""
    config.check(world_size)
    micro_batches = config.micro_batches(config.parallel.data_parallel_size(world_size))
    check_layout(config.parallel, config.model, world_size, config.data.seq_length, micro_batches, config.losses)


def check_layout(
    parallel: ParallelConfig,
    model: ModelConfig,
    world_size: int,
    seq_length: int,
    micro_batches: int,
    losses: LossConfig = NEXT_TOKEN,
) -> Grid:
    """Refuse, by ValueError, every layout that these ranks, this model and its pipeline stages cannot have."""
    parallel.check(model, world_size)
    grid = Grid.create(parallel, world_size)
    if math.ceil(model.vocab_size / grid.tp) * (grid.tp - 1) >= model.vocab_size:
        raise ValueError(
            f"--tensor-model-parallel-size {grid.tp} leaves its last rank no row of vocab_size {model.vocab_size}"
        )
    layout = build_layout(parallel, model, seq_length, micro_batches, losses)
    schedule_of(parallel, layout, micro_batches)
    return grid


def schedule_of(
    parallel: ParallelConfig, layout: PipelineLayout, micro_batches: int, forward_only: bool = False
) -> Schedule:
    """The schedule that the flags name. Raises ValueError if these micro-batches cannot run in it."""
    group_size = parallel.microbatch_group_size_per_vp_stage
    return build_schedule(layout.pp, layout.chunks, micro_batches, group_size, forward_only, parallel.pipeline_schedule)


def build_layout(
    parallel: ParallelConfig,
    model: ModelConfig,
    seq_length: int,
    micro_batches: int,
    losses: LossConfig = NEXT_TOKEN,
) -> PipelineLayout:
    """The stages that the flags ask for. The last three arguments matter to `auto` only, which optimises for them.

    Raises:
        ValueError: the flags, the layers of the model and the pipeline size do not fit each other.
    """
    pp, layers = parallel.pipeline_model_parallel_size, model.num_hidden_layers
    per_stage, text = parallel.num_layers_per_virtual_pipeline_stage, parallel.pipeline_model_parallel_layout
    if text is not None and text != "auto":
        return _from_string(text, pp, model)
    if pp > layers:
        raise ValueError(f"{PP_FLAG} {pp} exceeds the {layers} layers of the model")
    chunks = 1
    if text == "auto":
        _, ends, sizes = auto_sizes(parallel, model, seq_length, micro_batches, losses)[0]
        return _from_sizes(sizes, ends, pp, model)
    if per_stage is not None:
        chunks = layers // (pp * per_stage)
        if chunks == 0:
            raise ValueError(f"{N_FLAG} {per_stage} x {PP_FLAG} {pp} exceeds the {layers} layers of the model")
    return _from_sizes(even_sizes(layers, pp * chunks), 1, pp, model)


def even_sizes(layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each stage; the first ones take one more each if there is a remainder."""
    return tuple(layers // stages + (stage < layers % stages) for stage in range(stages))


def _from_sizes(sizes: tuple[int, ...], ends: int, pp: int, model: ModelConfig) -> PipelineLayout:
    """ends: the stages that MTP layer and head have: 1 where they are together, 2 where each has its own."""
    stages, first, last = [], 0, len(sizes) - 1
    for i, size in enumerate(sizes):
        mtp = i == len(sizes) - ends and model.num_nextn_predict_layers > 0
        stages.append(Stage(tuple(range(first, first + size)), i == 0, i == last, mtp))
        first += size
    return PipelineLayout(Placement.interleaved(pp, len(stages) // pp), tuple(stages))


# Layout strings


def _from_string(text: str, pp: int, model: ModelConfig) -> PipelineLayout:
    stages = _expand(text).split("|")
    flat, mtp = "".join(stages), model.num_nextn_predict_layers
    if not re.fullmatch("Et*m*L", flat):
        raise ValueError(f"{LAYOUT_FLAG} {text!r} must hold one E, then every t, then m if any, then one L")
    if flat.count("t") != model.num_hidden_layers:
        raise ValueError(
            f"{LAYOUT_FLAG} {text!r} has {flat.count('t')} layers (t), the model has {model.num_hidden_layers}"
        )
    if flat.count("m") not in (0, mtp):
        raise ValueError(f"{LAYOUT_FLAG} {text!r} has {flat.count('m')} MTP layers (m), the model has {mtp}")
    if len(stages) % pp:
        raise ValueError(f"{LAYOUT_FLAG} {text!r} has {len(stages)} stages, which {PP_FLAG} {pp} does not divide")
    if "" in stages:
        raise ValueError(f"{LAYOUT_FLAG} {text!r}: stage {stages.index('')} of {len(stages)} is empty")
    if len({i for i, stage in enumerate(stages) if "m" in stage}) > 1:
        raise ValueError(f"{LAYOUT_FLAG} {text!r} spreads the {mtp} MTP layers (m) over several stages")
    built, first = [], 0
    for stage in stages:
        layers = tuple(range(first, first + stage.count("t")))
        holds_mtp = "m" in stage or ("m" not in flat and "L" in stage and mtp > 0)
        built.append(Stage(layers, "E" in stage, "L" in stage, holds_mtp))
        first += len(layers)
    return PipelineLayout(Placement.interleaved(pp, len(built) // pp), tuple(built))


def _expand(text: str) -> str:
    """A layout string without `*`, brackets and commas."""
    groups, i = [[]], 0  # open groups, innermost last: lists of expanded items
    for token in re.findall(r"\*[0-9]+|.", text.replace(" ", "").replace(",", "")):
        if token == "(":
            groups.append([])
        elif token == ")" and len(groups) > 1:
            inner = "".join(groups.pop())
            groups[-1].append(inner)
        elif token[0] == "*" and token[1:] and groups[-1]:
            if len(token) > 7 or len(groups[-1][-1]) * int(token[1:]) > MAX_ITEMS:
                raise ValueError(f"{LAYOUT_FLAG} {text!r}: {token} repeats beyond {MAX_ITEMS} layers and stages")
            groups[-1][-1] *= int(token[1:])
        elif token in "EtmL|":
            groups[-1].append(token)
        else:
            raise ValueError(f"{LAYOUT_FLAG} {text!r}: unexpected {token!r} at item {i}; known are E t m L | ( ) *n")
        i += 1
    if len(groups) > 1:
        raise ValueError(f"{LAYOUT_FLAG} {text!r}: {len(groups) - 1} brackets are not closed")
    return "".join(groups[0])


def stage_costs(
    layout: PipelineLayout,
    model: ModelConfig,
    seq_length: int,
    parallel: ParallelConfig,
    rates: Rates = MEASURED,
    losses: LossConfig = NEXT_TOKEN,
) -> list[Cost]:
    """(forward, backward) times of each stage a token, in FLOPs of a large matrix product.

    For documents of `seq_length` tokens. With recomputation "full" a layer's backward has its forward, too; what
    "selective" computes again is little. The embedding and an MTP layer that is not trained cost nothing.
    A schedule that defers the gradients of weights has their time, half of the products' backward, as a third one.
    """
    sizes = tuple(len(stage.layers) for stage in layout.stages)
    layers, mtp, head = part_costs(model, seq_length, parallel, rates, losses)
    apart = any(stage.mtp for stage in layout.stages[:-1])
    return _costs(sizes, layers, (mtp, head) if apart else (sum_costs(mtp, head),))


def _costs(sizes: Sequence[int], layers: list[Cost], ends: tuple[Cost, ...]) -> list[Cost]:
    """Costs of stages of these numbers of layers. ends: what the last stages have beside layers."""
    costs, first = [], 0
    others = ((0.0,) * len(ends[0]),) * (len(sizes) - len(ends)) + ends
    for size, other in zip(sizes, others, strict=True):
        costs.append(sum_costs(*layers[first : first + size], other))
        first += size
    return costs
