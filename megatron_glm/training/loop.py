"""The training loop: data, step, report, validation, checkpoint, and the ways to leave it early."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from megatron_glm.config import RunConfig
from megatron_glm.data.loader import MicroBatches
from megatron_glm.data.packing import PackedBatch
from megatron_glm.model.glm import GLMChunk
from megatron_glm.parallel.groups import ParallelGroups
from megatron_glm.training.batch_size import batch_size, iterations_for
from megatron_glm.training.checkpointing import Progress, Saver
from megatron_glm.training.evaluate import evaluate
from megatron_glm.training.logging import IterationLog, log
from megatron_glm.training.lr import learning_rate
from megatron_glm.training.profiling import Profiler
from megatron_glm.training.sinks import open_sinks
from megatron_glm.training.step import Requests, StepCounts, count, train_step

START = time.monotonic()  # for --exit-duration-in-mins: when the program imported this
REQUEUE = 75  # exit code (EX_TEMPFAIL) after a signal: the checkpoint is written, start the same command again


def train(
    config: RunConfig,
    chunks: Sequence[GLMChunk],
    optimizer: torch.optim.Optimizer,
    data: MicroBatches,
    validation: MicroBatches | None,
    groups: ParallelGroups,
    progress: Progress,
) -> None:
    """Train from `progress` to the last iteration; what a step does depends on the iteration and the seed alone.

    Raises:
        FloatingPointError: naming the iteration, if a loss or gradient is not finite, with --on-nan stop.
        ValueError: before the first step, if --save holds later checkpoints than this run starts from.
        OSError: if a checkpoint cannot be written, with --save-failure stop, or the last one, whatever the flag says.
        SystemExit: with code REQUEUE, after a signal and a save.
    """
    train_iters = total_iterations(config, data)
    if progress.iteration >= train_iters:
        log(f"nothing to train: iteration {progress.iteration} of {train_iters} is reached")
    with (
        noted_signals(config.checkpoint.save is not None) as signals,
        Saver(config, chunks, optimizer, groups, progress, data) as saver,
        IterationLog(config.logging, train_iters, open_sinks(config, progress, groups)) as iteration_log,
        Profiler(config.logging) as profiler,
    ):
        while progress.iteration < train_iters:
            profiler.at(progress.iteration)
            start = time.perf_counter()
            batches = data.batch(progress.consumed_samples, *batch_shape(config, groups, progress.consumed_samples))
            requests = Requests(len(signals) > 0, time_is_up(config), saver.failed)
            counts = count(batches, groups, config, requests)
            if counts.requests.save_failed:
                saver.wait()
            if counts.requests.preempted or counts.requests.time_up:
                log(f"leaving after iteration {progress.iteration}")
                saver.save(progress)
                saver.wait()
                if counts.requests.preempted:
                    sys.exit(REQUEUE)
                return
            ids = sample_ids(config, data, progress)
            record = next_step(config, chunks, batches, optimizer, groups, progress, counts, iteration_log) | ids
            seconds = time.perf_counter() - start
            iteration = progress.iteration
            leave = iteration == train_iters or divides(config.train.exit_interval, iteration)
            if validation is not None and (iteration == train_iters or divides(config.train.eval_interval, iteration)):
                steps = validation.evaluation(*batch_shape(config, groups), config.train.eval_iters)
                record["valid_lm_loss"], tokens = evaluate(chunks, steps, groups, config)
                log(f" validation at iteration {iteration} | lm loss: {record['valid_lm_loss']:.6E} | tokens: {tokens}")
            iteration_log.report(record, seconds, counts.tokens, counts.flops)
            if leave or divides(config.checkpoint.save_interval, iteration):
                saver.save(progress)
            if leave:
                return


def next_step(
    config: RunConfig,
    chunks: Sequence[GLMChunk],
    batches: Sequence[PackedBatch],
    optimizer: torch.optim.Optimizer,
    groups: ParallelGroups,
    progress: Progress,
    counts: StepCounts,
    iteration_log: IterationLog,
) -> dict[str, Any]:
    """The next iteration of `progress`, and its record for the log; a skipped one has no loss, but says why."""
    iteration = progress.iteration + 1
    rate = learning_rate(config.optimizer, iteration, iteration_log.train_iters)
    more = iteration_log.wants_statistics(iteration)
    try:
        result = train_step(chunks, batches, optimizer, groups, config, rate, counts, more)
    except FloatingPointError as error:
        raise FloatingPointError(f"iteration {iteration}: {error}") from error
    size = batch_size(config.train, progress.consumed_samples)
    progress.iteration = iteration
    progress.consumed_samples += size
    record = {"iteration": iteration, "consumed_samples": progress.consumed_samples, "global_batch_size": size}
    record |= {"learning_rate": rate, "loss_tokens": counts.loss_tokens}
    if result.fault is not None:
        return record | {"lm_loss": None, "grad_norm": None, "skipped": result.fault}
    return record | {"lm_loss": result.loss, "grad_norm": result.grad_norm, **result.statistics}


def sample_ids(config: RunConfig, data: MicroBatches, progress: Progress) -> dict[str, list[str]]:
    """What the next step is made of, with --log-samples."""
    if not config.logging.log_samples:
        return {}
    size = batch_size(config.train, progress.consumed_samples)
    return {"samples": data.sample_ids(progress.consumed_samples, size)}


def divides(interval: int | None, iteration: int) -> bool:
    return interval is not None and iteration % interval == 0


def time_is_up(config: RunConfig) -> bool:
    minutes = config.train.exit_duration_in_mins
    return minutes is not None and time.monotonic() - START > minutes * 60


@contextmanager
def noted_signals(note: bool) -> Iterator[list[int]]:
    """Yields a list of the SIGTERM and SIGUSR1 (SLURM's preemption) that have come; without `note` none is caught."""
    received: list[int] = []
    before = {}
    for number in (signal.SIGTERM, signal.SIGUSR1) if note else ():
        before[number] = signal.signal(number, lambda number, _: received.append(number))
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: it was not set from Python


def batch_shape(
    config: RunConfig, groups: ParallelGroups, consumed_samples: int | None = None
) -> tuple[int, int, int, int]:
    """Packs of the step after `consumed_samples` (else a full one), of a micro-batch, and the place among DP ranks."""
    train = config.train
    size = train.global_batch_size if consumed_samples is None else batch_size(train, consumed_samples)
    return size, train.micro_batch_size, groups.dp.rank(), groups.dp.size()


def total_iterations(config: RunConfig, data: MicroBatches) -> int:
    """--train-iters, or as many as --train-epochs takes; the last one may reach into the next epoch."""
    train = config.train
    if train.train_iters is not None:
        return train.train_iters
    return iterations_for(train, train.train_epochs * data.dataset.packs_per_epoch)
