"""The whole state of a run as rectangles of global tensors and a few scalars, to disk and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_glm.checkpoint import sharded
from megatron_glm.config import RunConfig, flag_name
from megatron_glm.model.glm import GLMChunk
from megatron_glm.parallel.fsdp import rectangle
from megatron_glm.parallel.groups import ParallelGroups
from megatron_glm.parallel.shard import Rectangle
from megatron_glm.training.logging import log
from megatron_glm.training.optimizer import trained_parameters

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass
class Progress:
    """Where a run stands: optimizer steps taken, packs consumed."""

    iteration: int = 0
    consumed_samples: int = 0


def save_checkpoint(
    config: RunConfig,
    chunks: Sequence[GLMChunk],
    optimizer: torch.optim.Optimizer,
    groups: ParallelGroups,
    progress: Progress,
) -> None:
    """Write the state after `progress.iteration` to --save; every rank calls it."""
    folder = Path(config.checkpoint.save)
    rectangles = model_rectangles(chunks) + optimizer_rectangles(chunks, optimizer)
    state = {"consumed_samples": progress.consumed_samples} | data_order(config)
    hf_files = None if config.hf_folder is None else Path(config.hf_folder)
    sharded.save(folder, progress.iteration, rectangles, state, config.model, hf_files, groups.checkpoint)
    log(f"saved iteration {progress.iteration} to {folder}")


def load_checkpoint(
    config: RunConfig,
    chunks: Sequence[GLMChunk],
    optimizer: torch.optim.Optimizer | None,
    groups: ParallelGroups,
) -> Progress:
    """Fill model and optimizer from the latest checkpoint of --load and say where that run stood.

    Weights only, at iteration 0, without an optimizer, with --finetune and from a converted checkpoint.

    Raises:
        ValueError: if the checkpoint is of another model, or resuming it would deal other data.
    """
    if config.checkpoint.load is None:
        return Progress()
    folder = Path(config.checkpoint.load)
    iteration = sharded.latest(folder)
    resume = optimizer is not None and iteration > 0 and not config.checkpoint.finetune
    rectangles, progress = model_rectangles(chunks), Progress()
    if resume:
        state = sharded.read_state(folder, iteration)
        for name, value in data_order(config).items():
            if state[name] != value:
                raise ValueError(
                    f"{folder} was trained with {flag_name(name)} {state[name]}, this run has {value}; "
                    "--finetune starts a new run from its weights"
                )
        rectangles += optimizer_rectangles(chunks, optimizer)
        for moments in optimizer.state.values():
            moments["step"].fill_(iteration)
        progress = Progress(iteration, state["consumed_samples"])
    sharded.load(folder, iteration, rectangles, groups.checkpoint)
    log(f"loaded iteration {iteration} of {folder}" + ("" if resume else " (weights only)"))
    return progress


def data_order(config: RunConfig) -> dict[str, Any]:
    """The settings that decide which documents are in which step."""
    data = config.data
    return {
        "seed": config.train.seed,
        "seq_length": data.seq_length,
        "packing": data.packing,
        "overlong": data.overlong,
    }


def model_rectangles(chunks: Sequence[GLMChunk]) -> list[Rectangle]:
    """This rank's part of every parameter and persistent buffer."""
    return [
        rectangle(name, tensor, chunk.shards[name]) for chunk in chunks for name, tensor in chunk.state_dict().items()
    ]


def optimizer_rectangles(chunks: Sequence[GLMChunk], optimizer: torch.optim.Optimizer) -> list[Rectangle]:
    """This rank's part of AdamW's moments, each cut as its parameter."""
    return [
        rectangle(f"optimizer.{moment}.{name}", optimizer.state[parameter][moment], shard)
        for name, parameter, shard in trained_parameters(chunks)
        for moment in MOMENTS
    ]
