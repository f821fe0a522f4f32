"""Hugging Face folder -> sharded checkpoint -> Hugging Face folder, chunk by chunk: memory independent of the model."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path

import torch

from ..model_config import ModelConfig
from . import hf, sharded
from .files import copy_side_files, staged_folder, write_durably
from .planners import Chunk, cut
from .safetensors_io import INDEX_NAME, Outgoing, write_safetensors

Progress = Callable[[int], object]


def hf_to_sharded(checkpoint: hf.HFCheckpoint, folder: Path, progress: Progress) -> None:
    """Writes `folder`/iter_0000000 from an opened Hugging Face folder.

    Warns once if values changed because their dtype on disk was wider than the config's.
    Raises: ValueError if `folder` already holds checkpoints; nothing half-written stays behind on any error.
    """
    if (newest := sharded.latest(folder)) is not None:
        raise ValueError(f"{folder} already holds a checkpoint of iteration {newest}: choose another folder")
    chunks = []
    for name, (shape, dtype) in checkpoint.shapes.items():
        for offsets, sizes in cut(shape, dtype.itemsize):
            read = partial(checkpoint.read, name, offsets, sizes)
            chunks.append(Chunk(name, shape, dtype, offsets, sizes, read))
    sharded.write_chunks(folder, 0, chunks, {}, checkpoint.config, checkpoint.folder, None, progress)
    if checkpoint.rounded:
        key, dtype = next(iter(checkpoint.rounded.items()))
        warnings.warn(
            f"{len(checkpoint.rounded)} tensors were rounded to {checkpoint.config.dtype}, "
            f"first {key}, which is {dtype} on disk",
            stacklevel=2,
        )


class Export:
    """A sharded checkpoint (converted or from training) about to become a Hugging Face folder.

    folder: one iteration. Raises ValueError if its tensors are not those of its config; `optimizer.*` is ignored.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.reader = sharded.Reader(folder)
        self.shapes = hf.parameter_shapes(ModelConfig.from_hf(folder))
        self.reader.require({name: shape for name, (shape, _) in self.shapes.items()})
        for name in self.reader.shapes:
            if name not in self.shapes and not name.startswith("optimizer."):
                raise ValueError(f"{folder} holds {name}, which belongs to no part of the model in its config.json")
        self._expert = lru_cache(maxsize=1)(self._read_expert)  # its gate and its up rows follow each other

    def write(self, target: Path, max_shard_bytes: int, progress: Progress) -> None:
        """Writes the Hugging Face folder `target`: files of at most `max_shard_bytes`, but at least a tensor each."""
        shards = self._shards(max_shard_bytes)
        weight_map = {}
        with staged_folder(target) as staging:
            for number, shard in enumerate(shards, start=1):
                file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
                weight_map |= {tensor.key: file for tensor in shard}
                for nbytes in write_safetensors(staging / file, shard):
                    progress(nbytes)
            index = {"metadata": {"total_size": hf.total_bytes(self.shapes)}, "weight_map": weight_map}
            write_durably(staging / INDEX_NAME, json.dumps(index, indent=2, sort_keys=True).encode())
            if (self.folder / "hf").is_dir():
                copy_side_files(self.folder / "hf", staging)
                _drop_quantization(staging / "config.json")
            else:  # trained from scratch
                write_durably(staging / "config.json", (self.folder / "config.json").read_bytes())

    def _shards(self, max_bytes: int) -> list[list[Outgoing]]:
        shards: list[list[Outgoing]] = []
        size = max_bytes
        for tensor in hf.all_hf_tensors(self.shapes):
            outgoing = Outgoing(tensor.key, tensor.dtype, tensor.shape, self._blocks(tensor))
            if size + outgoing.nbytes > max_bytes:
                shards.append([])
                size = 0
            shards[-1].append(outgoing)
            size += outgoing.nbytes
        return shards

    def _blocks(self, tensor: hf.HFTensor) -> Iterator[torch.Tensor]:
        if len(tensor.sizes) == 3:
            expert, first, _ = tensor.offsets
            yield self._expert(tensor.name, expert, tensor.dtype)[0, first : first + tensor.sizes[1]]
            return
        # blocks as they are stored, so that no stored chunk is read twice
        for offsets, sizes in cut(tensor.shape, self.reader.shapes[tensor.name][1].itemsize):
            yield self.reader.tensor(tensor.name, offsets, sizes, tensor.dtype)

    def _read_expert(self, name: str, expert: int, dtype: torch.dtype) -> torch.Tensor:
        """[1, rows, columns], all rows of one expert."""
        return self.reader.tensor(name, (expert, 0, 0), (1, *self.shapes[name][0][1:]), dtype)


def _drop_quantization(config_file: Path) -> None:
    """The exported weights are not quantised; a config that never said so is left byte for byte."""
    config = json.loads(config_file.read_text())
    if config.pop("quantization_config", None) is not None:
        write_durably(config_file, (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode())
