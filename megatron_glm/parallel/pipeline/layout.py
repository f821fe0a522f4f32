"""Which layers each virtual stage holds.

Layout strings (Megatron's): E embedding, t decoder layer, m MTP layer, L norm + head + loss, `|` between stages,
`*n` repeats the letter or the (group) before it, `,` separates for the eye. Example, 32 stages: `Et*3|(tt|)*29,m|L`.
Layers come in model order: E first, then t, then m, then L last. `m` may be left out: the last stage then holds it.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from megatron_glm.config import LossConfig, ModelConfig, ParallelConfig, RunConfig
from megatron_glm.config.flops import LayerFlops, head_flops, layer_flops, mtp_step_flops
from megatron_glm.config.training import NEXT_TOKEN
from megatron_glm.parallel.grid import Grid
from megatron_glm.parallel.pipeline.schedule import (
    Placement,
    Schedule,
    Step,
    build_schedule,
    check_schedule,
    end_times,
    flat_costs,
)

MAX_ITEMS = 100_000  # of an expanded layout string
AUTO_MAX_CHUNKS = 10
AUTO_BUDGET = 4_000_000  # simulated actions in all: one or two seconds

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


# Costs and the split by cost

Cost = tuple[float, ...]  # forward, backward; maybe the gradients of weights, which the backward has put off


class Rates(NamedTuple):
    """Time of an operation of each kind, forward and backward, where one in a large matrix product takes 1.

    The backward is counted in operations of the forward, so that a product takes 2. The products and the experts carry
    the norms, additions and movements around them.
    """

    products: Cost
    experts: Cost
    attention: Cost
    index_scores: Cost
    index_projections: Cost
    head: Cost


# An H200, bf16, the cudnn backend, documents of 4,096 tokens and more (docs/performance.md). The head makes the
# gradient of its loss together with the loss.
MEASURED = Rates((1.15, 2.3), (1.3, 2.6), (2.3, 9.9), (2, 0), (1, 0), (3.1, 0))
# Share of what "full" computes again. Selective at 32,768 tokens was measured to take so much longer than its kernels.
REPEATED = {"none": 0.0, "selective": 0.12, "full": 1.0}


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
    layers, mtp, head = _part_costs(model, seq_length, parallel, rates, losses)
    apart = any(stage.mtp for stage in layout.stages[:-1])
    return _costs(sizes, layers, (mtp, head) if apart else (_sum(mtp, head),))


@lru_cache
def _part_costs(
    model: ModelConfig, seq_length: int, parallel: ParallelConfig, rates: Rates, losses: LossConfig
) -> tuple[list[Cost], Cost, Cost]:
    """Costs of each layer, of all MTP steps without their heads, and of the head in all its predictions."""
    kinds = 3 if parallel.defers_weights else 2
    layers = [layer_flops(model, layer, [seq_length]) for layer in range(model.num_hidden_layers)]
    steps = [mtp_step_flops(model, [seq_length], step) for step in range(1, 1 + losses.mtp_steps)]
    costs = [_cost(flops, seq_length, parallel, rates) for flops in layers]
    if losses.train_only is not None:
        costs = [(forward, *(0.0,) * len(rest)) for forward, *rest in costs]
    mtp = _sum((0.0,) * kinds, *(_cost(flops, seq_length, parallel, rates) for flops in steps))
    head, products = head_flops(model, 1), _head_products(losses) / 3
    return costs, mtp, (products * head * rates.head[0], products * head * rates.head[1], 0.0)[:kinds]


def _head_products(losses: LossConfig) -> int:
    """Products of the head with all rows: logits, and the gradients of hidden states and weight that are wanted."""
    main = 1 if losses.train_only is not None else 3
    detached = losses.mtp_detaches or losses.train_only is not None
    again = losses.mtp_loss == "tv"  # the main logits, beside those of the steps
    return main + again + losses.mtp_steps * (2 if detached else 3)


def _cost(flops: LayerFlops, seq_length: int, parallel: ParallelConfig, rates: Rates) -> Cost:
    """A token of a layer."""
    forward, backward = (
        sum(count * getattr(rates, kind)[way] for kind, count in flops._asdict().items()) / seq_length for way in (0, 1)
    )
    # Selections are kept, and the experts' down projection is spared: a third of their products.
    repeated = {"products": 1.0, "experts": 2 / 3, "attention": 1.0}
    again = sum(share * getattr(flops, kind) * getattr(rates, kind)[0] for kind, share in repeated.items()) / seq_length
    again *= REPEATED[parallel.recompute_granularity]
    if not parallel.defers_weights:
        return forward, backward + again
    weights = (flops.products * rates.products[1] + flops.experts * rates.experts[1]) / 2 / seq_length
    return forward, backward - weights + again, weights


def _sum(*costs: Cost) -> Cost:
    return tuple(map(sum, zip(*costs, strict=True)))


def _costs(sizes: Sequence[int], layers: list[Cost], ends: tuple[Cost, ...]) -> list[Cost]:
    """Costs of stages of these numbers of layers. ends: what the last stages have beside layers."""
    costs, first = [], 0
    others = ((0.0,) * len(ends[0]),) * (len(sizes) - len(ends)) + ends
    for size, other in zip(sizes, others, strict=True):
        costs.append(_sum(*layers[first : first + size], other))
        first += size
    return costs


class Split(NamedTuple):
    """A split of the layers: its simulated time; the stages that MTP layer and head have, 1, or 2 of which the last has
    no layers; and the layers by stage."""

    time: float
    ends: int
    sizes: tuple[int, ...]


def auto_sizes(
    parallel: ParallelConfig,
    model: ModelConfig,
    seq_length: int,
    micro_batches: int,
    losses: LossConfig = NEXT_TOKEN,
    budget: int = AUTO_BUDGET,
) -> list[Split]:
    """The best split into 1 to AUTO_MAX_CHUNKS chunks a rank each, by local search, the fastest first.

    Each search starts twice: from the even split, and with the head alone on the last stage; a move takes one layer
    from a stage and gives it to another. An MTP layer that runs is tried with the head, and on the stage before it.
    More micro-batches than two rounds are not simulated: the idle time at both ends does not depend on them.
    `budget`: simulated actions in all.
    """
    pp = parallel.pipeline_model_parallel_size
    pipeline = ParallelConfig(
        pipeline_model_parallel_size=pp,
        microbatch_group_size_per_vp_stage=parallel.microbatch_group_size_per_vp_stage,
        pipeline_schedule=parallel.pipeline_schedule,
        recompute_granularity=parallel.recompute_granularity,
    )  # all that matters here: runs that differ elsewhere share the search
    return _auto_sizes(pipeline, model, seq_length, min(micro_batches, 2 * pp), losses, budget)


@lru_cache(maxsize=256)
def _auto_sizes(
    parallel: ParallelConfig, model: ModelConfig, seq_length: int, micro_batches: int, losses: LossConfig, budget: int
) -> list[Split]:
    layers, mtp, head = _part_costs(model, seq_length, parallel, MEASURED, losses)
    pp, group_size = parallel.pipeline_model_parallel_size, parallel.microbatch_group_size_per_vp_stage
    options = range(1, 1 + (min(AUTO_MAX_CHUNKS, len(layers) // pp) if pp > 1 else 1))
    places = [(_sum(mtp, head),), (mtp, head)][: 2 if losses.mtp_steps and pp > 1 else 1]
    found, each = [], budget // (2 * len(options) * len(places))
    for chunks in options:
        stages = pp * chunks
        schedule = build_schedule(pp, chunks, micro_batches, group_size, name=parallel.pipeline_schedule)
        steps = check_schedule(schedule)
        starts = {even_sizes(len(layers), stages), even_sizes(len(layers), max(1, stages - 1)) + (0,) * (stages > 1)}
        tries = [(start, ends) for start in starts for ends in places if len(ends) == 1 or start[-1] == 0]
        found.append(min(_descend(start, steps, layers, ends, each) for start, ends in tries))
    return sorted(found)


def layout_string(sizes: Sequence[int], ends: int = 1) -> str:
    """The layout string of two or more stages of these sizes; ends: see `Split`."""
    texts = [f"t*{size}" if size > 1 else "t" * size for size in sizes]
    if ends == 2:
        texts[-2] += "m"
    first, *inner, last = texts
    runs = [(text, len(list(group))) for text, group in itertools.groupby(inner)]
    middle = "".join(f"({text}|)*{count}" if count > 1 else f"{text}|" for text, count in runs)
    return f"E{first}|{middle}{last}L"


def _descend(
    sizes: tuple[int, ...], steps: tuple[Step, ...], layers: list[Cost], ends: tuple[Cost, ...], budget: int
) -> Split:
    """First-improvement descent from `sizes` until no move helps or `budget` actions are simulated."""

    def makespan(candidate: Sequence[int]) -> float:
        return max(end_times(steps, flat_costs(_costs(candidate, layers, ends))))

    time = makespan(sizes)
    # Behind an MTP layer comes no other layer, so that the head is then alone.
    taking = len(sizes) + 1 - len(ends)
    moves = [(i, j) for i in range(taking) for j in range(taking) if i != j]
    position = since = 0
    while since < len(moves) and budget > 0:
        source, target = moves[position]
        position, since = (position + 1) % len(moves), since + 1
        # Only the stage of the MTP layer or the head may be left without layers.
        if sizes[source] > (source < taking - 1):
            candidate = list(sizes)
            candidate[source] -= 1
            candidate[target] += 1
            new = makespan(candidate)
            budget -= len(steps)
            if new < time:
                sizes, time, since = tuple(candidate), new, 0
    return Split(time, len(ends), sizes)
