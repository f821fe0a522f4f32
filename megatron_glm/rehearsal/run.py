"""Rehearses one rank: its groups, its model, real steps between mirrors, its part of a save."""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_glm.checkpoint import sharded
from megatron_glm.checkpoint.chunks import chunks_of
from megatron_glm.config import CheckpointConfig, DataConfig, LoggingConfig, RunConfig
from megatron_glm.config.flags import DataSection
from megatron_glm.config.flops import training_flops
from megatron_glm.config.parameters import model_parameters
from megatron_glm.data.packing import PackedBatch
from megatron_glm.parallel import mirror
from megatron_glm.parallel.fsdp import local
from megatron_glm.parallel.groups import ParallelGroups, host_group
from megatron_glm.parallel.pipeline.schedule import Action
from megatron_glm.planner.machine import Machine, machine_of
from megatron_glm.planner.memory import OUTSIDE
from megatron_glm.planner.plan import GIB, Plan
from megatron_glm.planner.report import check_sizes, planned_config, ranks_of
from megatron_glm.rehearsal.kept import KeptTensors
from megatron_glm.rehearsal.made_up import balance, draw, packs
from megatron_glm.rehearsal.messages import Messages, counted
from megatron_glm.training.base_model import adapters
from megatron_glm.training.checkpointing import model_rectangles, optimizer_rectangles
from megatron_glm.training.engine import Engine, losses_of
from megatron_glm.training.host_copy import HostCopy
from megatron_glm.training.initialize import build_chunks, prepare
from megatron_glm.training.logging import log
from megatron_glm.training.optimizer import AdamW, build_optimizer
from megatron_glm.training.step import StepCounts, train_step

SMALL = 0.02  # standard deviation of hidden states and gradients that arrive
Mark = torch.cuda.Event | float  # a time: of the device, or of the host in seconds


@dataclass
class Saved:
    """This rank's part of a checkpoint: seconds that a step waits for the copy, then of a thread that writes."""

    copy_seconds: float
    write_seconds: float
    files: list[int]  # bytes


@dataclass
class Rehearsal:
    """What one rank did in two steps; the first compiles kernels, and shows what is kept and sent.

    held: bytes by the plan's kinds, between steps; kept: the most bytes that autograd kept; peak: of the tensors on
    the device in the two steps; taken: of its memory, with free blocks and CUDA's own; both None on a CPU. Seconds are
    those of the second step; on a GPU the device times its actions. host_seconds: of its actions, until the last was
    handed to the device.
    """

    plan: Plan
    machine: Machine
    rank: int
    device: str
    held: dict[str, int]
    kept: int
    peak: int | None
    taken: int | None
    messages: Messages
    step_seconds: float
    actions: list[tuple[Action, float]]
    host_seconds: float
    saved: Saved

    @property
    def pp_rank(self) -> int:
        return next(ranks.index(self.rank) for ranks in self.plan.grid.groups("pp") if self.rank in ranks)


@dataclass
class Part:
    """One rank's model, optimizer and packs, random ones, in the process groups that are there."""

    config: RunConfig
    engine: Engine
    optimizer: AdamW
    batches: list[PackedBatch]
    counts: StepCounts

    @classmethod
    def of(cls, plan: Plan) -> Part:
        config = without_files(plan.config)
        torch.manual_seed(config.train.seed)
        copies = plan.layout.embedding_ranks(config.losses.mtp_steps > 0)
        groups = ParallelGroups.create(config.parallel, host_group(config.parallel), copies)
        engine = Engine(config, groups, build_chunks(config, groups, draw, stored_as_planned(plan)))
        length, first = config.data.seq_length, config.data.seq_length // 2
        lengths = (first, length - first) if config.preference.is_dpo else (length,)
        batches = packs(config, groups.dp.rank(), plan.schedule.micro_batches, lengths)
        optimizer = build_optimizer(config.optimizer, engine.chunks)
        return cls(config, engine, optimizer, batches, counts_of_all(config, batches[0]))

    def step(self) -> None:
        train_step(self.engine, self.optimizer, self.batches, self.config.optimizer.lr, self.counts)

    def first_step(self, kind: type[ProcessGroup]) -> tuple[int, Messages]:
        """The most bytes that autograd keeps, and what is sent by groups of this class."""
        with KeptTensors() as kept, counted(kind) as messages:
            self.step()
        return kept.peak, messages

    def held_bytes(self) -> dict[str, int]:
        """Between steps, by the plan's kinds."""
        masters = frozen = 0
        for chunk in self.engine.chunks:
            for parameter in chunk.parameters():
                masters += local(parameter).nbytes if parameter.requires_grad else 0
                frozen += 0 if parameter.requires_grad else local(parameter).nbytes
            frozen += sum(buffer.nbytes for name, buffer in chunk.named_buffers() if name.endswith("_scale"))
        moments = sum(r.tensor.nbytes for r in optimizer_rectangles(self.engine.chunks, self.optimizer))
        return {"fp32 master weights": masters, "frozen weights": frozen, "AdamW moments": moments}

    def save(self, folder: Path) -> Saved:
        """Writes what this rank owns, as --async-save does, but for the joining of small pieces with other ranks'."""
        weights = model_rectangles(self.engine.chunks)
        weights = adapters(weights) if self.config.lora.lora_rank else weights
        rectangles = weights + optimizer_rectangles(self.engine.chunks, self.optimizer)
        rank = dist.get_rank()
        copy = HostCopy(rectangles, mirror.MirrorGroup(0, [rank], "alone"))
        _wait()
        begin = time.perf_counter()
        owned = copy.take(rectangles)
        copied = time.perf_counter()
        files = []
        with sharded.BackgroundSync() as background:
            for number, chunks in enumerate(sharded.split(chunks_of(owned))):
                files.append(folder / f"rank{rank:05d}_{number:05d}.distcp")
                sharded.write_file(files[-1], chunks)
                background.sync(files[-1])
        written = time.perf_counter()
        return Saved(copied - begin, written - copied, [file.stat().st_size for file in files])


def rehearse(flags: argparse.Namespace, data: DataSection = DataConfig) -> Rehearsal:
    """Runs the rank that --rehearse-rank names. Raises ValueError, naming the flag, for what cannot be rehearsed."""
    given, rank = vars(flags), flags.rehearse_rank
    check_sizes(flags)
    ranks, per_node = ranks_of(flags)
    if "RANK" in os.environ:
        raise ValueError(f"--rehearse-rank {rank} is one process: start it without torchrun or srun")
    if "picture" in given:
        raise ValueError(f"--picture {given['picture']} is of a plan: --rehearse-json FILE draws one beside FILE")
    if not 0 <= rank < ranks:
        raise ValueError(f"--rehearse-rank {rank}: there are ranks 0 to {ranks - 1} (--nnodes x --nproc-per-node)")
    machine = machine_of(flags)
    config, warnings = planned_config(flags, data, torch.cuda.is_available())
    if config.train.eval_only:
        raise ValueError("--rehearse-rank with --eval-only: a rehearsal trains")
    plan = Plan.create(config, ranks, per_node)
    for warning in warnings:
        log(f"warning: {warning}")
    if given.get("rehearse_routing", "balanced") == "balanced":
        balance(config.model.n_routed_experts)
    if torch.cuda.is_available():
        torch.cuda.set_device(0)
        total = torch.cuda.mem_get_info()[1]
        if (most := memory_limit(given, machine, total)) is not None:
            log(f"this GPU has {total / GIB:.1f} GiB: tensors may take {most / GIB:.1f} of them, as on {machine.name}")
            torch.cuda.set_per_process_memory_fraction(most / total)
    prepare(without_files(config), ranks)
    log(f"rehearsing rank {rank} of {ranks}")
    mirror.start(rank, ranks, lambda tensor: plausible(tensor, plan.shapes.pack))
    try:
        return _two_steps(plan, machine, rank)
    finally:
        dist.destroy_process_group()


def memory_limit(given: Mapping[str, Any], machine: Machine, total: int) -> float | None:
    """What the allocator may take on a GPU of `total` bytes that stands for the smaller one which flags name; or None.

    CUDA and NCCL take theirs beside it, which is a part of the plan's reserve.
    """
    named = {"gpu_type", "gpu_memory_gb"} & given.keys()
    return machine.memory - OUTSIDE if named and machine.memory < total else None


def _two_steps(plan: Plan, machine: Machine, rank: int) -> Rehearsal:
    part = Part.of(plan)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()  # random weights are drawn where a run reads its own
    kept, messages = part.first_step(mirror.MirrorGroup)
    watch = ActionTimes()
    part.engine.around_actions = watch.around
    _wait()
    begin = time.perf_counter()
    part.step()
    _wait()
    seconds = time.perf_counter() - begin
    peak, taken = _device_memory()
    with tempfile.TemporaryDirectory(prefix="megatron_glm_rehearsal_") as folder:
        saved = part.save(Path(folder))
    return Rehearsal(
        plan=plan,
        machine=machine,
        rank=rank,
        device=torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        held=part.held_bytes(),
        kept=kept,
        peak=peak,
        taken=taken,
        messages=messages,
        step_seconds=seconds,
        actions=watch.seconds(),
        host_seconds=watch.host_seconds,
        saved=saved,
    )


def without_files(config: RunConfig) -> RunConfig:
    """The same run with nothing to read or to write."""
    return replace(config, checkpoint=CheckpointConfig(), logging=LoggingConfig(), lora=replace(config.lora, base=None))


def stored_as_planned(plan: Plan) -> dict[str, torch.dtype]:
    """The dtypes of frozen weights, as the plan counts them."""
    dtype = {2: torch.bfloat16, 4: torch.float32}[plan.frozen_bytes]
    return {name: dtype for name, each in model_parameters(plan.config.model).items() if each.kind != "buffer"}


def plausible(tensor: torch.Tensor, keys: int) -> None:
    """What arrives from another stage: small numbers; of a selection [rows, slots], keys all over the pack."""
    if tensor.is_floating_point():
        tensor.normal_(0.0, SMALL)
        return
    rows, slots = tensor.shape
    first = torch.randint(keys, (rows, 1), device=tensor.device)
    tensor.copy_((first + torch.arange(slots, device=tensor.device) * (keys // slots)) % keys)


def counts_of_all(config: RunConfig, batch: PackedBatch) -> StepCounts:
    """The counts of a step of all ranks, whose packs are all like this one."""
    all_packs = config.train.global_batch_size // config.train.micro_batch_size
    losses = {name: of_pack(batch) * all_packs for name, of_pack in losses_of(config).items()}
    dense, lengths = config.attends_densely, batch.doc_lengths
    flops = training_flops(config.model, lengths, config.losses, config.indexer, dense, config.lora)
    return StepCounts(losses, sum(lengths) * all_packs, flops * all_packs)


class ActionTimes:
    """Seconds of each action of a step: of the device by events, else of the host."""

    def __init__(self) -> None:
        self._marks: list[tuple[Action, Mark, Mark]] = []
        self.host_seconds = 0.0

    @contextmanager
    def around(self, action: Action) -> Iterator[None]:
        host, begin = time.perf_counter(), _mark()
        yield
        self._marks.append((action, begin, _mark()))
        self.host_seconds += time.perf_counter() - host

    def seconds(self) -> list[tuple[Action, float]]:
        return [(action, _between(begin, end)) for action, begin, end in self._marks]


def _device_memory() -> tuple[int | None, int | None]:
    """Bytes of the tensors at their peak, and of the device's memory that this process has taken by now."""
    if not torch.cuda.is_available():
        return None, None
    free, total = torch.cuda.mem_get_info()
    return torch.cuda.max_memory_allocated(), total - free


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _mark() -> Mark:
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(begin: Mark, end: Mark) -> float:
    if isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        return begin.elapsed_time(end) / 1e3
    assert isinstance(begin, float) and isinstance(end, float)
    return end - begin
