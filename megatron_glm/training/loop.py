"""The training loop: data, step, report, validation, checkpoint."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_glm.config import RunConfig
from megatron_glm.data.loader import MicroBatches
from megatron_glm.model.glm import GLMChunk
from megatron_glm.parallel.groups import ParallelGroups
from megatron_glm.training.checkpointing import Progress, save_checkpoint
from megatron_glm.training.evaluate import evaluate
from megatron_glm.training.logging import IterationLog, log
from megatron_glm.training.lr import learning_rate
from megatron_glm.training.step import train_step


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
        FloatingPointError: naming the iteration, if a loss or gradient is not finite.
        ValueError: before the first step, if a checkpoint that this run will write is already there.
    """
    train_iters = total_iterations(config, data)
    check_save_folder(config, progress)
    if progress.iteration >= train_iters:
        log(f"nothing to train: iteration {progress.iteration} of {train_iters} is reached")
    iteration_log = IterationLog(config.train.log_file, config.train.log_interval, train_iters)
    while progress.iteration < train_iters:
        start = time.perf_counter()
        iteration = progress.iteration + 1
        rate = learning_rate(config.optimizer, iteration, train_iters)
        batches = data.batch(progress.consumed_samples, *batch_shape(config, groups))
        try:
            result = train_step(chunks, batches, optimizer, groups, config, rate)
        except FloatingPointError as error:
            raise FloatingPointError(f"iteration {iteration}: {error}") from error
        seconds = time.perf_counter() - start
        progress.iteration = iteration
        progress.consumed_samples += config.train.global_batch_size
        record: dict[str, Any] = {
            "iteration": iteration,
            "lm_loss": result.loss,
            "grad_norm": result.grad_norm,
            "learning_rate": rate,
            "loss_tokens": result.counts.loss_tokens,
        }
        last = iteration == train_iters
        if validation is not None and (last or iteration % config.train.eval_interval == 0):
            steps = validation.evaluation(*batch_shape(config, groups), config.train.eval_iters)
            record["valid_lm_loss"], tokens = evaluate(chunks, steps, groups, config)
            log(f" validation at iteration {iteration} | lm loss: {record['valid_lm_loss']:.6E} | tokens: {tokens}")
        iteration_log.report(record, progress.consumed_samples, seconds, result.counts.tokens, result.counts.flops)
        interval = config.checkpoint.save_interval
        if config.checkpoint.save is not None and (last or (interval and iteration % interval == 0)):
            save_checkpoint(config, chunks, optimizer, groups, progress)


def batch_shape(config: RunConfig, groups: ParallelGroups) -> tuple[int, int, int, int]:
    """Packs of a step, of a micro-batch, and this rank's place among the data-parallel ranks."""
    return config.train.global_batch_size, config.train.micro_batch_size, groups.dp.rank(), groups.dp.size()


def total_iterations(config: RunConfig, data: MicroBatches) -> int:
    """--train-iters, or as many as --train-epochs takes; the last one may reach into the next epoch."""
    if config.train.train_iters is not None:
        return config.train.train_iters
    return -(-config.train.train_epochs * data.dataset.packs_per_epoch // config.train.global_batch_size)


def check_save_folder(config: RunConfig, progress: Progress) -> None:
    """Refuse to start a run whose checkpoints would meet later ones of another."""
    if config.checkpoint.save is not None:
        found = [int(path.name[5:]) for path in Path(config.checkpoint.save).glob("iter_" + "[0-9]" * 7)]
        if max(found, default=0) > progress.iteration:
            raise ValueError(
                f"--save {config.checkpoint.save} already holds iteration {max(found)}, this run starts after "
                f"{progress.iteration}: resume with --load, or choose another folder"
            )
