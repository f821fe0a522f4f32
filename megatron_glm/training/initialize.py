"""From a checked configuration to process groups and the model that is trained on them."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from megatron_glm import heartbeat, launch, signals
from megatron_glm.checkpoint import sharded
from megatron_glm.config import RunConfig
from megatron_glm.model.glm import GLMChunk
from megatron_glm.model.init import initialize_weights
from megatron_glm.model.trained import hold_as_stored
from megatron_glm.ops import backends
from megatron_glm.ops.multiprocessors import leave_free
from megatron_glm.parallel.dispatch import hybridep, make_dispatcher
from megatron_glm.parallel.fsdp import local, shard_chunk
from megatron_glm.parallel.groups import ParallelGroups, host_group, time_limit
from megatron_glm.parallel.pipeline.layout import PipelineLayout, build_layout, check_run
from megatron_glm.parallel.rendezvous import Meeting, meet
from megatron_glm.parallel.sharded import Slabs
from megatron_glm.training import watchdog
from megatron_glm.training.agreement import facts_of_run, require_same
from megatron_glm.training.base_model import stored_dtypes
from megatron_glm.training.checkpointing import check_checkpoints, check_hf_files, start_of_run
from megatron_glm.training.logging import log
from megatron_glm.training.never_trained import warn_of_untrained
from megatron_glm.training.outputs import check_folders, check_sinks
from megatron_glm.training.sinks import require_packages


def choose_backend(config: RunConfig) -> RunConfig:
    """The configuration with the attention backend of this machine where --attention-backend is auto."""
    return config.with_backend(gpu=torch.cuda.is_available())


def initialize(config: RunConfig) -> ParallelGroups:
    """Check the configuration, then start torch.distributed (torchrun, srun or one process) and make the groups.

    Raises:
        ValueError: naming the flags, before any process group exists; what --load and --save hold; or what differs
            between the ranks, on all of them.
        OSError: if a file or folder of the flags cannot be written.
    """
    world_size = launch.world_size()
    prepare(config, world_size)
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")  # connect at the first message: else 2 x ranks descriptors each
    if not dist.is_initialized():
        limit = time_limit(config.parallel)
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        if world_size > 1:
            log(f"meeting {world_size} ranks at {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}")
        meeting = meet(limit)
        dist.init_process_group(
            backend, store=meeting.store, rank=meeting.rank, world_size=meeting.world_size, timeout=limit
        )
        if meeting.world_size > 1:
            signals.share(meeting.store)
            watch(config, meeting)
    host = host_group(config.parallel)
    require_same(host, facts_of_run(config))
    torch.manual_seed(config.train.seed)
    fp8 = f", FP8 by {backends.fp8_kernels(config.fp8)}" if config.fp8.blockwise else ""
    log(f"{machine(world_size)}, torch {torch.__version__}, attention by {config.kernels.attention_backend}{fp8}")
    layout = pipeline_layout(config, config.parallel.data_parallel_size(world_size))
    groups = ParallelGroups.create(config.parallel, host, layout.embedding_ranks(config.losses.mtp_steps > 0))
    sharded.on_first_rank(groups.checkpoint, lambda: check_hf_files(config))
    if not config.train.eval_only:
        start = start_of_run(config).iteration
        sharded.on_first_rank(groups.checkpoint, lambda: check_sinks(config.logging, start))
    warn_of_untrained(config)
    return groups


def prepare(config: RunConfig, world_size: int) -> None:
    """What a rank does before it meets the others: checks, its device, the kernels. Raises as `initialize` says."""
    check_run(config, world_size)
    require_packages(config.logging)
    check_folders(config)
    if not config.train.eval_only:
        check_checkpoints(config)
    if torch.cuda.is_available():
        torch.cuda.set_device(launch.local_rank(torch.cuda.device_count()))
    kernels = config.kernels
    selects = not config.attends_densely
    backends.check(kernels.attention_backend, config.model, config.parallel.tensor_model_parallel_size, selects)
    backends.check_fp8(config)
    hybridep.check(config)
    backends.load(kernels.attention_backend, config.dense_rows, kernels.deterministic)
    if torch.cuda.is_available() and (free := config.parallel.communication_sms):
        leave_free(free, config.fp8.blockwise and config.fp8.fp8_backend == "deepgemm")


def watch(config: RunConfig, meeting: Meeting) -> None:
    """Start the hang watchdog; what it leaves lies in one folder for all ranks."""
    first = meeting.store.compare_set("run", "", time.strftime("%Y%m%d-%H%M%S")).decode()
    folder = watchdog.report_folder(config.logging.log_file, config.checkpoint.save, first)
    minutes = config.parallel.distributed_timeout_minutes
    watchdog.start(meeting.store, meeting.rank, meeting.world_size, minutes, folder)


def machine(ranks: int) -> str:
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    threads = "" if torch.cuda.is_available() else f", OMP_NUM_THREADS={torch.get_num_threads()}"
    return f"{ranks} rank{'s' * (ranks > 1)} on {where}{threads}"


@functools.cache
def pipeline_layout(config: RunConfig, dp_size: int) -> PipelineLayout:
    """The stages of all pipeline ranks."""
    micro_batches = config.micro_batches(dp_size)
    return build_layout(config.parallel, config.model, config.data.seq_length, micro_batches, config.losses)


def build_chunks(
    config: RunConfig,
    groups: ParallelGroups,
    draw: Callable[[GLMChunk, int], None] = initialize_weights,
    stored: Mapping[str, torch.dtype] | None = None,
) -> list[GLMChunk]:
    """This rank's chunks, sharded over the data ranks, with the weights that `draw` makes of the seed.

    They are cut before they take memory. Where a checkpoint is to be loaded all is zero, vocabulary padding included,
    and frozen parameters have its dtypes.

    stored: the dtypes of a model that is not there; None: those of --load or --load-hf.
    """
    layout = pipeline_layout(config, groups.dp.size())
    chunks, dispatcher, slabs = [], make_dispatcher(config, groups), Slabs()
    stored = stored_dtypes(config) if stored is None else stored
    log("making the model")
    for stage in layout.of_rank(groups.pp.rank()):
        with torch.device("meta"):
            chunk = GLMChunk(config, groups, stage, dispatcher)
        heartbeat.beat()
        hold_as_stored(chunk, stored)
        shard_chunk(config.parallel, groups, chunk, config.train.bf16, slabs)
        chunk.to_empty(device=current_device())
        if config.checkpoint.load is None and config.checkpoint.load_hf is None:
            draw(chunk, config.train.seed)
        else:
            for tensor in (*chunk.parameters(), *chunk.buffers()):
                local(tensor).detach().zero_()
            initialize_weights(chunk, config.train.seed, only="adapters")
        chunks.append(chunk)
    return chunks


def current_device() -> torch.device:
    """Where this rank computes."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
