"""A plan as text, from the flags of a run: `--dry-run` of the training scripts, and tools/plan.py."""

from __future__ import annotations

import argparse
import glob
import itertools
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_glm.config import LARGEST_BF16_BETA, DataConfig, PretrainDataConfig, RunConfig, flag_name, iterations
from megatron_glm.config.data import validation_sets
from megatron_glm.config.flags import DataSection, print_always_so, refuse, resolve
from megatron_glm.config.flops import training_flops
from megatron_glm.config.plan_flags import PLAN_SIZES, REHEARSAL_FLAGS
from megatron_glm.data.blend import parse_blend
from megatron_glm.model.pack import work_per_rank
from megatron_glm.parallel.pipeline.simulate import Simulation
from megatron_glm.planner.machine import MEASURED_ROWS, Machine, machine_of
from megatron_glm.planner.memory import peak_memory, rank_memory
from megatron_glm.planner.picture import check_picture, draw_plan
from megatron_glm.planner.plan import GIB, Plan
from megatron_glm.planner.time import StepTime, step_time, unpredictable
from megatron_glm.planner.traffic import traffic, transfer_seconds


def print_plan(flags: argparse.Namespace, data: DataSection = DataConfig) -> None:
    """Prints the plan of these flags; a layout that cannot be ends with one line and exit code 2.

    `data`: the kind of data that the planned script trains on. The number of ranks is --nnodes x --nproc-per-node, else
    WORLD_SIZE, else 1. That it does not fit is no error.
    """
    try:
        refuse_rehearsal(flags)
        check_sizes(flags)
        ranks, per_node = ranks_of(flags)
        machine = machine_of(flags)
        picture = Path(flags.picture) if "picture" in flags else None
        if picture is not None:
            check_picture(picture)
        config, warnings = planned_config(flags, data)
        plan = Plan.create(config, ranks, per_node)
        lines = list(report(plan, machine))
        if picture is not None:
            draw_plan(plan, None if unpredictable(config) else step_time(plan, machine), picture, machine.memory)
    except ValueError as error:
        refuse(str(error))
    print_always_so(flags)
    print("\n".join([f"warning: {warning}" for warning in warnings] + lines))


def refuse_rehearsal(flags: argparse.Namespace) -> None:
    """Refuses the flags of a rehearsal: a plan runs nothing."""
    if useless := [name for name in REHEARSAL_FLAGS if name in flags]:
        raise ValueError(f"{flag_name(useless[0])} does not go with a plan, which runs nothing: leave one of them out")


def check_sizes(flags: argparse.Namespace) -> None:
    """Refuses a size or rate of the planned machines that is none."""
    for name in PLAN_SIZES:
        if not 0 < (value := getattr(flags, name, 1)) < math.inf:
            raise ValueError(f"{flag_name(name)} is {value}; it must be a finite number above 0")


def ranks_of(flags: argparse.Namespace) -> tuple[int, int]:
    """(ranks in all, GPUs of a node)."""
    given = vars(flags)
    if "nnodes" in given or "nproc_per_node" in given:
        per_node = given.get("nproc_per_node", 8)
        return given.get("nnodes", 1) * per_node, per_node
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    return ranks, int(os.environ.get("LOCAL_WORLD_SIZE", min(ranks, 8)))


def planned_config(
    flags: argparse.Namespace, data: DataSection = DataConfig, gpu: bool = True
) -> tuple[RunConfig, list[str]]:
    """The configuration of these flags on GPUs, else CPUs; what a run would miss is filled in, with a warning each."""
    given, warnings = dict(vars(flags)), []
    load = given.get("load")
    if load is not None and not iterations.any_saved(Path(load)) and "hf_config" in given:
        warnings.append(f"--load {load}: the folder holds no checkpoint; convert one with tools/convert_hf.py")
        del given["load"]
    load_hf = given.get("load_hf")
    if load_hf is not None and not Path(load_hf, "config.json").is_file() and "hf_config" in given:
        warnings.append(f"--load-hf {load_hf}: the folder holds no model (config.json is missing)")
        del given["load_hf"]
    config = resolve(argparse.Namespace(**given), data)
    config = replace(config, checkpoint=replace(config.checkpoint, load=load, load_hf=load_hf))
    config = config.with_backend(gpu)
    planned = _planned_pretraining if data is PretrainDataConfig else _planned_finetuning
    config = replace(config, data=planned(config, warnings))
    if not config.train.eval_only and not config.train.has_length:
        missing = (
            "--train-iters is not" if data is PretrainDataConfig else "neither --train-iters nor --train-epochs is"
        )
        warnings.append(f"{missing} given")
        config = replace(config, train=replace(config.train, train_iters=config.optimizer.lr_warmup_iters + 1))
    return config, warnings


def _planned_finetuning(config: RunConfig, warnings: list[str]) -> DataConfig:
    """The data of a run whose files may be missing."""
    data = config.data
    assert isinstance(data, DataConfig)
    paths, _ = parse_blend(data.data_path, "--data-path")
    sets = validation_sets(data.valid_data_path)
    for flag, found in (("--data-path", paths), *(("--valid-data-path", paths) for paths in sets.values())):
        warnings += [f"{flag} {path} does not exist" for path in found if not glob.glob(path)]
    if data.tokenizer_model is not None and not Path(data.tokenizer_model).exists():
        warnings.append(f"--tokenizer-model {data.tokenizer_model} does not exist")
    if data.tokenizer_model is None and config.hf_folder is None:
        warnings.append("no tokenizer: give --tokenizer-model, or --load a converted checkpoint")
    if not data.data_path:
        warnings.append("--data-path is not given")
    return data if data.data_path else replace(data, data_path=("missing",))


def _planned_pretraining(config: RunConfig, warnings: list[str]) -> PretrainDataConfig:
    """The same for the prefixes of a pre-training run."""
    data = config.data
    assert isinstance(data, PretrainDataConfig)
    for field in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        flag, entries = flag_name(field), getattr(data, field)
        if field == "valid_data_path":
            entries = [path for paths in validation_sets(entries).values() for path in paths]
        prefixes, _ = parse_blend(entries, flag)
        files = [f"{prefix}{ending}" for prefix in prefixes for ending in (".bin", ".idx")]
        warnings += [f"{flag} {file} does not exist" for file in files if not Path(file).exists()]
    if data.data_path or data.train_data_path or data.mock_data:
        return data
    warnings.append("--data-path is not given")
    return replace(data, mock_data=True)


def report(plan: Plan, machine: Machine) -> Iterator[str]:
    """All lines of a plan for these GPUs."""
    reason = unpredictable(plan.config)
    time = step_time(plan, machine) if reason is None else None
    yield from _layout_lines(plan)
    yield ""
    yield from _memory_lines(plan)
    yield ""
    yield from _pipeline_lines(plan, plan.simulation if time is None else time.simulation)
    yield ""
    yield from _work_lines(plan)
    yield ""
    yield from _traffic_lines(plan, machine)
    yield ""
    if time is None:
        yield f"time: not predicted, no rates were measured {reason}"
    else:
        yield from _time_lines(time, machine)
    yield ""
    yield from _verdict_lines(plan, machine)


def _time_lines(time: StepTime, machine: Machine) -> Iterator[str]:
    plan, rank = time.plan, time.slowest
    yield (
        f"time of a step, predicted for {machine.name}, {machine.nvlink / 1e9:.0f} GB/s in a node and "
        f"{machine.nic / 1e9:.0f} GB/s between nodes; hidden: behind computing"
    )
    yield f"  {f'pp rank {rank}, the last to end':<34}{'seconds':>10}{'hidden':>10}{'share':>10}"
    for kind, spent in time.by_rank[rank].items():
        if spent.whole > 0.5e-3 * time.seconds:
            hidden = spent.whole - spent.exposed
            yield f"  {kind:<34}{spent.whole:10.3f}{hidden:10.3f}{spent.exposed / time.seconds:10.1%}"
    yield f"  {time.seconds:.3f} s a step, {time.tokens_per_second_per_gpu:,.1f} tokens/s a GPU"
    rows = plan.shapes.shard
    if rows < MEASURED_ROWS:
        yield f"  steps of {MEASURED_ROWS:,} rows a rank and more were measured; for its {rows:,} an estimate is added"


def _layout_lines(plan: Plan) -> Iterator[str]:
    grid, parallel = plan.grid, plan.config.parallel
    nodes = -(-plan.world_size // plan.gpus_per_node)
    axes = " ".join(f"{name.upper()} {getattr(grid, name)}" for name in ("tp", "cp", "dp", "pp", "ep", "edp"))
    yield f"layout: {plan.world_size} ranks on {nodes} nodes of {plan.gpus_per_node}: {axes}"
    yield (
        f"  {plan.layout.chunks} virtual stages a rank, {plan.schedule.micro_batches} micro-batches of "
        f"{plan.shapes.pack} tokens a step, recompute {parallel.recompute_granularity}, grad sync "
        f"{parallel.grad_sync}, attention {plan.config.kernels.attention_backend}"
    )
    yield "stages: layers (full indexers) and parameters, as tensor and expert parallelism leave them to a rank"
    for rank in range(grid.pp):
        stages = plan.layout.of_rank(rank)
        layers = [layer for stage in stages for layer in stage.layers]
        full = sum(plan.config.model.has_indexer(layer) for layer in layers)
        mtp = any(stage.mtp for stage in stages) and plan.config.model.num_nextn_predict_layers > 0
        ends = (any(stage.embedding for stage in stages), mtp, any(stage.head for stage in stages))
        extra = [name for name, here in zip(("embedding", "MTP", "head"), ends, strict=True) if here]
        units = plan.rank_units(rank)
        dense, experts = (sum(u.elements for u in units if u.expert == kind) for kind in (False, True))
        held = sum(plan.elements(rank))
        yield (
            f"  pp rank {rank}: {len(layers)} layers ({full}){''.join(' + ' + name for name in extra)}, "
            f"{dense / 1e9:.3f} B dense + {experts / 1e9:.3f} B in experts, {held / 1e9:.3f} B of them on each GPU"
        )


def _memory_lines(plan: Plan) -> Iterator[str]:
    ranks = [rank_memory(plan, rank) for rank in range(plan.grid.pp)]
    yield "memory of a GPU at its peak, GiB (weights, moments and gradient shards exact, the rest estimated)"
    yield f"  {'pp rank':<34}" + "".join(f"{rank:>8}" for rank in range(len(ranks)))
    for kind in ranks[0]:
        yield f"  {kind:<34}" + "".join(f"{rank[kind] / GIB:8.2f}" for rank in ranks)
    yield f"  {'sum':<34}" + "".join(f"{sum(rank.values()) / GIB:8.2f}" for rank in ranks)
    if host := max(host_copy(plan, rank) for rank in range(plan.grid.pp)):
        node = host * min(plan.gpus_per_node, plan.world_size)
        yield f"host memory for --async-save: {host / GIB:.2f} GiB a rank at most, {node / GIB:.1f} GiB a node"


def host_copy(plan: Plan, pp_rank: int) -> int:
    """Bytes of host memory in which a rank keeps what --async-save writes; 0 without it. Exact, buffers aside."""
    section = plan.config.checkpoint
    if section.save is None or not section.async_save:
        return 0
    held = plan.held_most(pp_rank)
    return held.parameters + (0 if section.no_save_optim else held.moments)


def _pipeline_lines(plan: Plan, simulation: Simulation) -> Iterator[str]:
    work = plan.rank_work
    longest = max(range(len(work)), key=lambda rank: work[rank])
    yield f"pipeline: idle {simulation.idle:.1%}, digits forward, letters backward of each virtual stage, dots idle"
    yield simulation.timeline(100)
    yield (
        f"  longest pole: pp rank {longest} with {work[longest] / (sum(work) / len(work)):.3f} of the mean work; "
        f"peak live micro-batches, summed over virtual stages: {' '.join(map(str, simulation.peak_live))}"
    )


def _work_lines(plan: Plan) -> Iterator[str]:
    config, cp = plan.config, plan.grid.cp
    length, packs = config.data.seq_length, config.train.global_batch_size
    dense = config.attends_densely
    flops = packs * training_flops(config.model, [length], config.losses, config.indexer, dense, config.lora)
    yield (
        f"work: {packs * length:,} tokens and {flops / 1e15:,.1f} PFLOP a step (recomputation not counted), "
        f"{flops / plan.world_size / 1e12:,.1f} TFLOP a GPU, if each document fills its pack"
    )
    keys = work_per_rank((length,) * config.train.micro_batch_size, plan.shapes.pack, config.model.index_topk, cp)
    attended, causal = zip(*keys, strict=True)
    if cp > 1:
        yield (
            f"  context parallel balance (mean over largest): attention {_balance(attended):.3f}, "
            f"indexer {_balance(causal):.3f} over {cp} ranks"
        )


def _balance(work: Iterable[int]) -> float:
    """Mean over the largest: 1.0 where all ranks have the same work."""
    values = list(work)
    return sum(values) / len(values) / max(values) if max(values) else 1.0


def _traffic_lines(plan: Plan, machine: Machine) -> Iterator[str]:
    yield "communication: GiB that the busiest rank sends in a step, by the share of its peers in its node"
    yield f"  {'axis':<10}{'what':<30}{'in node':>12}{'between':>12}"
    for axis, what, inside, between in traffic(plan):
        yield f"  {axis:<10}{what:<30}{inside / GIB:12.2f}{between / GIB:12.2f}"
    rates = f"{machine.nvlink / 1e9:.0f} GB/s in a node and {machine.nic / 1e9:.0f} GB/s between nodes"
    yield f"  {transfer_seconds(plan, machine):.2f} s in all at {rates}, hidden behind computing or not"


def _verdict_lines(plan: Plan, machine: Machine) -> Iterator[str]:
    peak, gpu_memory = peak_memory(plan), machine.memory
    sizes = f"{peak / GIB:.1f} GiB at the peak of the fullest rank, {gpu_memory / GIB:.1f} GiB a GPU"
    if peak <= gpu_memory:
        yield f"verdict: fits ({sizes})"
        yield from _faster_lines(plan, machine)
        return
    yield f"verdict: does not fit ({sizes}); what changes it:"
    for text, other in (*_alternatives(plan), *_together(plan, gpu_memory)):
        reached = peak_memory(other)
        yield f"  {text}: {reached / GIB:.1f} GiB{', fits' if reached <= gpu_memory else ''}"


# What spends memory to send less. Recomputation sends the tokens of the experts again, too.
SPENDING = (
    {"reshard_after_forward": False},
    {"reshard_experts_after_forward": False},
    {"grad_sync": "last"},
    {"recompute_granularity": "none"},
)


def _faster_lines(plan: Plan, machine: Machine) -> Iterator[str]:
    """The settings with which a step sends at least 1 % less and still fits well; last, the best of them together."""
    seconds, found = transfer_seconds(plan, machine), []
    for changes in (chosen for n in range(1, len(SPENDING) + 1) for chosen in itertools.combinations(SPENDING, n)):
        change = {field: value for each in changes for field, value in each.items()}
        if all(getattr(plan.config.parallel, field) != value for field, value in change.items()):
            other = replace(plan.config, parallel=replace(plan.config.parallel, **change))
            other = Plan.create(other, plan.world_size, plan.gpus_per_node)
            if peak_memory(other) <= 0.99 * machine.memory:  # what is estimated of a plan should not decide
                found.append((change, other))
    alone = [(change, other) for change, other in found if len(change) == 1]
    # Of settings that send as little, the one that needs least memory: some spend it and send nothing less.
    best = min(
        found, key=lambda pair: (round(transfer_seconds(pair[1], machine), 2), peak_memory(pair[1])), default=None
    )
    shown = alone if best is None or best in alone else [*alone, best]
    for change, other in shown:
        if (less := seconds - transfer_seconds(other, machine)) > max(0.01 * seconds, 0.05):  # 0.0 s says nothing
            more = (peak_memory(other) - peak_memory(plan)) / GIB
            yield f"  faster: {_flags(change)} takes {more:.1f} GiB more and {less:.1f} of {seconds:.1f} s less to send"


def _savings(config: RunConfig) -> list[dict[str, Any]]:
    """Settings that need less memory on the same ranks in the same layout, in the order of their price."""
    moments: dict[str, Any] = {"adam_moments_dtype": "bf16"}
    if config.optimizer.adam_beta2 > LARGEST_BF16_BETA:
        moments["adam_beta2"] = 0.95
    return [
        {"recompute_granularity": "selective"},
        {"recompute_granularity": "full"},
        {"reshard_after_forward": True},
        {"reshard_experts_after_forward": True},
        {"grad_sync": "every"},
        {"micro_batch_size": max(1, config.train.micro_batch_size // 2)},
        moments,
    ]


def _alternatives(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """Plans with one change each that need less memory, and what the change is."""
    parallel, world = plan.config.parallel, plan.world_size
    sizes = ("context_parallel_size", "expert_model_parallel_size", "pipeline_model_parallel_size")
    for change in [*_savings(plan.config), *({size: 2 * getattr(parallel, size)} for size in sizes)]:
        if (other := _less(plan, change)) is not None:
            yield _flags(change), other
    twice = {"global_batch_size": 2 * plan.config.train.global_batch_size}
    for change in ({}, twice):
        if (other := _less(plan, change, 2 * world)) is not None:
            yield " ".join(filter(None, (f"twice the ranks ({2 * world})", _flags(change)))), other
            return


def _together(plan: Plan, gpu_memory: float) -> Iterator[tuple[str, Plan]]:
    """The plan with the cheapest savings with which it fits, or with all of them; nothing where that is one."""

    def merged(changes: list[dict[str, Any]]) -> dict[str, Any]:
        return {field: value for change in changes for field, value in change.items()}  # full, not selective before it

    changes, best = [], plan
    for change in _savings(plan.config):
        if peak_memory(best) > gpu_memory and (other := _less(best, change)) is not None:
            changes, best = [*changes, change], other
    for change in reversed(changes):  # what a later one has made needless
        fewer = [kept for kept in changes if kept is not change]
        if (other := _less(plan, merged(fewer))) is not None and peak_memory(other) <= gpu_memory:
            changes, best = fewer, other
    if len(changes) > 1:
        yield f"together {_flags(merged(changes))}", best


def _less(plan: Plan, change: dict[str, Any], ranks: int | None = None) -> Plan | None:
    """The plan with these fields of the configuration, on as many ranks, if it can be and needs less memory."""
    config = plan.config
    for name in ("parallel", "optimizer", "train"):
        section = getattr(config, name)
        here = {field: value for field, value in change.items() if hasattr(section, field)}
        config = replace(config, **{name: replace(section, **here)})
    try:
        other = Plan.create(config, ranks or plan.world_size, plan.gpus_per_node)
    except ValueError:
        return None  # a layout that cannot be is no advice
    return other if peak_memory(other) < peak_memory(plan) else None


def _flags(change: dict[str, Any]) -> str:
    return " ".join(f"{flag_name(name)} {str(value).lower()}" for name, value in change.items())
