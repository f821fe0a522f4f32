"""What a run does not train: the model under adapters, where it is, and the dtypes in which weights are held."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from megatron_glm import heartbeat
from megatron_glm.checkpoint import sharded
from megatron_glm.checkpoint.adapters import Base, read_adapter_state
from megatron_glm.checkpoint.hf import HFCheckpoint, parameter_shapes
from megatron_glm.config import RunConfig, iterations
from megatron_glm.config.parameters import ADAPTER, model_parameters
from megatron_glm.model.glm import GLMChunk
from megatron_glm.model.moe import Experts
from megatron_glm.ops.fp8 import FP8, quantize
from megatron_glm.parallel.fsdp import rectangle
from megatron_glm.parallel.shard import Rectangle, ShardInfo


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
            raise ValueError(f"--base {moved} is the model under the adapters of --load, which holds none")
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


def fill_base(folder: Path, chunks: Sequence[GLMChunk], rectangles: Sequence[Rectangle]) -> int:
    """Reads this rank's parts of the frozen model, from a Hugging Face folder or an `iter_…` folder.

    Experts that are held in FP8 are read one matrix at a time: as they are, where the folder holds them in FP8 in
    blocks of 128 x 128, else cast by the rule of an export. Returns how many matrices were cast.
    """
    source = sharded.Reader(folder) if iterations.is_complete(folder) else HFCheckpoint(folder)
    frozen = [r for r in rectangles if not r.name.endswith(ADAPTER) and r.tensor.dtype != FP8]
    source.read(frozen) if isinstance(source, sharded.Reader) else source.fill(frozen)
    cast = 0
    for chunk in chunks:
        for at, module in chunk.named_modules():
            for name in module.held_in_fp8 if isinstance(module, Experts) else ():
                info = chunk.shards[f"{at}.{name}"]
                here = rectangle(f"{at}.{name}", getattr(module, name), info)
                cast += _fill_blocks(source, here, info, getattr(module, f"{name}_scale"))
    return cast


def _fill_blocks(source: sharded.Reader | HFCheckpoint, here: Rectangle, info: ShardInfo, scales: Tensor) -> int:
    """here: the values that this rank holds, which data ranks may share; scales: of all in `info`."""
    experts, parts = scales.shape[:2]
    name, cast = here.name, 0
    rows, columns = info.global_shape[1] // parts, info.global_shape[2]
    for expert, part in itertools.product(range(experts), range(parts)):
        heartbeat.beat()
        offsets, sizes = (info.offsets[0] + expert, part * rows, 0), (1, rows, columns)
        if isinstance(source, HFCheckpoint) and (stored := source.stored_blocks(name, offsets[0], part)) is not None:
            values, found = stored
        else:
            whole = (
                source.read(name, offsets, sizes)
                if isinstance(source, HFCheckpoint)
                else source.tensor(name, offsets, sizes, torch.bfloat16)
            )
            (values, found), cast = quantize(whole[0].to(scales.device)), cast + 1
        scales[expert, part].copy_(found)
        _copy_overlap(values, offsets, here)
    return cast


def _copy_overlap(values: Tensor, offsets: tuple[int, int, int], into: Rectangle) -> None:
    """Copy values [rows, columns] that lie at these offsets in the global tensor, where `into` has them, too."""
    ours, theirs = [], []
    for at, size, first, held in zip(offsets, (1, *values.shape), into.offsets, into.tensor.shape, strict=True):
        begin, end = max(at, first), min(at + size, first + held)
        if begin >= end:
            return
        ours.append(slice(begin - first, end - first))
        theirs.append(slice(begin - at, end - at))
    into.tensor[tuple(ours)].copy_(values[None][tuple(theirs)])


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
