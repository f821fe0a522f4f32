"""What a run does not train: the model under adapters, where it is, and the dtypes in which weights are held."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from megatron_glm.checkpoint import sharded
from megatron_glm.checkpoint.adapters import Base, read_adapter_state
from megatron_glm.checkpoint.hf import HFCheckpoint, parameter_shapes
from megatron_glm.config import RunConfig, iterations
from megatron_glm.config.parameters import ADAPTER, model_parameters
from megatron_glm.parallel.shard import Rectangle


def loaded_base(config: RunConfig) -> Base | None:
    """The model under the adapters that --load holds, where it is now; None if --load holds a whole model, or nothing.

    Raises: ValueError if it is missing or another, or if --base has no adapters to go under.
    """
    section, moved = config.checkpoint, config.lora.base
    found = None
    if section.load is not None:
        found = read_adapter_state(iterations.iteration_folder(*iterations.start(section.load, section.ckpt_step)))
    if found is None:
        if moved is not None:
            raise ValueError(f"--base {moved}: --load {section.load} holds no adapters that it could be under")
        return None
    if section.load_hf is not None:
        raise ValueError(
            f"--load-hf {section.load_hf} with the adapters of --load {section.load}: --base names their model"
        )
    return Base(found[1].find(moved), found[1].digest)


def base_of_run(config: RunConfig) -> Base | None:
    """The model under the adapters of this run, whether they are loaded or new; None without adapters.

    Raises: what `loaded_base` raises; ValueError if new adapters are to be saved and have no model.
    """
    section = config.checkpoint
    if (loaded := loaded_base(config)) is not None or not config.lora.lora_rank:
        return loaded
    if section.load_hf is not None:
        return Base.of(Path(section.load_hf))
    if section.load is not None:
        return Base.of(iterations.iteration_folder(*iterations.start(section.load, section.ckpt_step)))
    if section.save is not None:
        raise ValueError(
            f"--lora-rank {config.lora.lora_rank} with --save {section.save} needs a model to adapt: give --load-hf or "
            "--load"
        )
    return None


def fill_base(folder: Path, rectangles: Sequence[Rectangle]) -> None:
    """Reads this rank's parts of the frozen model, from a Hugging Face folder or an `iter_…` folder."""
    frozen = [r for r in rectangles if not r.name.endswith(ADAPTER)]
    if iterations.is_complete(folder):
        sharded.Reader(folder).read(frozen)
    else:
        HFCheckpoint(folder).fill(frozen)


def adapters(rectangles: Sequence[Rectangle]) -> list[Rectangle]:
    """Those of the adapters."""
    return [r for r in rectangles if r.name.endswith(ADAPTER)]


def stored_dtypes(config: RunConfig) -> dict[str, torch.dtype]:
    """The dtypes, by canonical name, of what --load or --load-hf holds; empty without either.

    A Hugging Face folder is read in the dtypes that its conversion would write: FP8 becomes the config's dtype. Under
    adapters the model has that of --base-precision.
    """
    section = config.checkpoint
    if config.lora.lora_rank:
        dtype = torch.float32 if config.lora.precision(config.train.bf16) == "fp32" else torch.bfloat16
        return {name: dtype for name, each in model_parameters(config.model).items() if each.kind != "buffer"}
    if section.load is not None:
        folder = iterations.iteration_folder(*iterations.start(section.load, section.ckpt_step))
        return {name: dtype for name, (_, dtype) in sharded.Reader(folder).shapes.items()}
    shapes = {} if section.load_hf is None else parameter_shapes(config.model)
    return {name: dtype for name, (_, dtype) in shapes.items()}
