"""What a run does not train: the model under adapters, where it is, and the dtypes in which weights are held."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import torch

from megatron_glm import heartbeat
from megatron_glm.checkpoint import sharded
from megatron_glm.checkpoint.adapters import Base, read_adapter_state
from megatron_glm.checkpoint.hf import HFCheckpoint, parameter_shapes
from megatron_glm.config import RunConfig, iterations
from megatron_glm.config.parameters import ADAPTER, model_parameters
from megatron_glm.model.glm import GLMChunk
from megatron_glm.model.moe import Experts
from megatron_glm.ops.fp8 import FP8, Blocks, quantize
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
            for name, blocks in module.fp8_blocks().items() if isinstance(module, Experts) else ():
                info = chunk.shards[f"{at}.{name}"]
                cast += _fill_blocks(source, f"{at}.{name}", info, blocks)
    return cast


def _fill_blocks(source: sharded.Reader | HFCheckpoint, name: str, info: ShardInfo, blocks: Blocks) -> int:
    experts, parts = blocks.scales.shape[:2]
    values = blocks.values.unflatten(1, (parts, -1))
    rows, columns = values.shape[2:]
    cast = 0
    for expert, part in itertools.product(range(experts), range(parts)):
        heartbeat.beat()
        offsets, sizes = (info.offsets[0] + expert, part * rows, 0), (1, rows, columns)
        into = values[expert, part], blocks.scales[expert, part]
        if isinstance(source, HFCheckpoint) and (stored := source.stored_blocks(name, offsets[0], part)) is not None:
            found = stored
        else:
            whole = (
                source.read(name, offsets, sizes)
                if isinstance(source, HFCheckpoint)
                else source.tensor(name, offsets, sizes, torch.bfloat16)
            )
            found, cast = quantize(whole[0].to(into[0].device)), cast + 1
        for target, tensor in zip(into, found, strict=True):
            target.copy_(tensor)
    return cast


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
