"""Hugging Face folder -> sharded checkpoint -> Hugging Face folder, chunk by chunk: memory independent of the model."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..config import iterations
from ..config.hf_keys import EXPERT_ALIASES
from ..config.model import ModelConfig
from ..config.parameters import ADAPTER
from ..config.quantization import EXPORT_BLOCK
from ..config.source import read_json, require_outside
from ..ops.fp8 import quantize, scale_shape
from . import hf, sharded
from .chunks import Chunk, ChunkTable, Piece, cut
from .files import check_side_files, copy_side_files, write_durably
from .hf import SCALE_SUFFIX
from .output import OutputFile, Run, identity, produce
from .safetensors_io import INDEX_NAME, NO_METADATA, Outgoing, read_header, write_safetensors

# Keys of a config.json that say of a field of ModelConfig what its own key says, or follow from it: they go when an
# export changes the field.
OTHER_SPELLINGS = {
    "dtype": ("torch_dtype",),
    "indexer_types": ("index_topk_pattern", "index_topk_freq", "index_skip_topk_offset"),
    "mlp_layer_types": ("first_k_dense_replace",),
    "n_routed_experts": EXPERT_ALIASES,
    "num_hidden_layers": ("layer_types",),
    "qk_nope_head_dim": ("qk_head_dim",),
    "qk_rope_head_dim": ("qk_head_dim",),
    "rope_theta": ("rope_theta", "rope_scaling"),
}


class NewCheckpoint:
    """`folder`/iter_0000000, about to be written: weights alone, from which a run starts.

    chunks: all that it holds; side_files: the folder whose config, tokenizer and templates go along.
    state: of its state.json.
    Raises: ValueError if `folder` already holds checkpoints, or is in the folder `side_files`.
    """

    def __init__(
        self, folder: Path, chunks: list[Chunk], config: ModelConfig, side_files: Path, state: dict[str, Any]
    ) -> None:
        require_outside("--save", folder, side_files)
        if iterations.any_saved(folder):
            found = iterations.saved(folder)
            held = f"checkpoints of iterations {', '.join(map(str, found))}" if found else iterations.LATEST_NAME
            raise ValueError(f"{folder} already holds {held}: choose another folder")
        self.folder, self.chunks, self.config, self.side_files, self.state = folder, chunks, config, side_files, state
        self.target = iterations.iteration_folder(folder, 0)

    def files(self, run: Run) -> list[OutputFile]:
        """What `write` writes, metadata and side files aside."""
        found = []
        for number, chunks in enumerate(sharded.split(self.chunks)):
            keys = list(dict.fromkeys(chunk.piece.name for chunk in chunks))
            name, nbytes = f"part{number:05d}.distcp", sum(chunk.piece.nbytes for chunk in chunks)
            write, check = partial(self._write_file, name, chunks, run), partial(self._check_file, chunks)
            found.append(OutputFile(name, nbytes, keys, write, check))
        return found

    def _produce(self, sources: list[Path], run: Run) -> None:
        """Writes the checkpoint from these files; nothing half-written gets its name."""
        settings = {"source": str(self.side_files.resolve()), "chunks": len(self.chunks)} | identity(sources)
        produce(self.target, settings, self.files(run), run, self._complete)
        latest = self.folder / iterations.LATEST_NAME
        sharded.on_first_rank(run.group, lambda: write_durably(latest, b"0"))

    def _write_file(self, name: str, chunks: list[Chunk], run: Run, staging: Path) -> list[sharded.Written]:
        return sharded.write_file(staging / name, chunks, run.progress)

    def _complete(self, staging: Path, results: list[list[Any]]) -> None:
        table = ChunkTable.of([chunk.piece for chunk in self.chunks])
        written = [sharded.Written(*fields) for result in results for fields in result]
        sharded.write_metadata(staging, table, sharded.places_of(written), self.state, self.config, self.side_files)

    def _check_file(self, chunks: list[Chunk], staging: Path) -> None:
        reader = sharded.Reader(staging)
        for chunk in chunks:
            piece = chunk.piece
            stored = reader.tensor(piece.name, piece.offsets, piece.sizes, piece.dtype)
            require_equal(f"{staging}: {piece.name} at {list(piece.offsets)}", stored, chunk.read())


class Import(NewCheckpoint):
    """An opened Hugging Face folder about to become `folder`/iter_0000000."""

    def __init__(self, checkpoint: hf.HFCheckpoint, folder: Path) -> None:
        chunks = []
        for name, (shape, dtype) in checkpoint.shapes.items():
            for offsets, sizes in cut(shape, dtype.itemsize):
                read = partial(checkpoint.read, name, offsets, sizes)
                chunks.append(Chunk(Piece(name, shape, dtype, offsets, sizes), read))
        super().__init__(folder, chunks, checkpoint.config, checkpoint.folder, {})
        self.checkpoint = checkpoint

    def write(self, run: Run) -> None:
        """Writes the checkpoint; nothing half-written gets its name.

        Warns once if values changed because their dtype on disk was wider than the config's.
        """
        entries = self.checkpoint.source.entries.values()
        self._produce([self.checkpoint.folder / "config.json", *{entry.file for entry in entries}], run)
        if rounded := self.checkpoint.rounded:
            key, dtype = next(iter(rounded.items()))
            count = f"{len(rounded)} tensors were rounded to {self.checkpoint.config.dtype}"
            warnings.warn(f"{count}, first {key}, which is {dtype} on disk", stacklevel=2)


class Export:
    """A sharded checkpoint (converted or from training) about to become a Hugging Face folder.

    folder: one iteration. fp8: quantise what the FP8 releases quantise.
    max_shard_bytes: of a safetensors file, but at least a tensor with its scale each.
    Raises ValueError if its tensors are not those of its config; `optimizer.*` is ignored.
    """

    def __init__(self, folder: Path, max_shard_bytes: int = 5 * 10**9, fp8: bool = False) -> None:
        self.folder, self.max_shard_bytes, self.fp8 = folder, max_shard_bytes, fp8
        self.config = ModelConfig.from_hf(folder)
        self.reader = sharded.Reader(folder)
        if any(name.endswith(ADAPTER) for name in self.reader.shapes):
            raise ValueError(f"{folder} holds adapters alone: tools/export_adapter.py --merge exports them")
        self.readers = [self.reader]
        check_side_files(folder / "hf")
        self.shapes = hf.parameter_shapes(self.config)
        came = folder / "hf" / "config.json"
        quantization = hf.quantization_config(self.config) if fp8 else None
        source = came if came.is_file() else folder / "config.json"
        self.config_json = exported_config(source, self.config, quantization)
        self.reader.require({name: shape for name, (shape, _) in self.shapes.items()})
        for name in self.reader.shapes:
            if name not in self.shapes and not name.startswith("optimizer."):
                raise ValueError(f"{folder} holds {name}, which belongs to no part of the model in its config.json")
        if parts := sharded.state_of(folder).get("never_trained"):
            warnings.warn(f"{folder}: what it holds of {', '.join(parts)} was never trained", stacklevel=2)

    def files(self, run: Run) -> list[OutputFile]:
        """What `write` writes, index and side files aside."""
        shards: list[list[Outgoing]] = []
        size = self.max_shard_bytes
        for tensor in hf.all_hf_tensors(self.config):
            unit = self._outgoing(tensor)
            nbytes = sum(outgoing.nbytes for outgoing in unit)
            if size + nbytes > self.max_shard_bytes:
                shards.append([])
                size = 0
            shards[-1] += unit
            size += nbytes
        files = []
        for number, shard in enumerate(shards, start=1):
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            files.append(weights_file(name, shard, run))
        return files

    def write(self, target: Path, run: Run) -> None:
        """Writes the Hugging Face folder `target`; nothing half-written gets its name."""
        settings = {
            "source": str(self.folder.resolve()),
            "--max-shard-size": self.max_shard_bytes,
            "--fp8-block-quantize": self.fp8,
        }
        for reader in self.readers:
            settings |= identity([reader.index_file, *reader.folder.glob("*.distcp")])
            if run.verify:  # the checksums of the source first: a copy of damaged data equals its source
                verify_weights(reader, run)
        files = self.files(run)
        produce(target, settings, files, run, lambda staging, _: self._complete(staging, files))

    def _complete(self, staging: Path, files: list[OutputFile]) -> None:
        weight_map = {key: file.name for file in files for key in file.keys}
        index = {"metadata": {"total_size": sum(file.nbytes for file in files)}, "weight_map": weight_map}
        write_durably(staging / INDEX_NAME, json.dumps(index, indent=2, sort_keys=True).encode())
        copy_side_files(self.folder / "hf", staging)  # none if trained from scratch
        write_durably(staging / "config.json", self.config_json)

    def _outgoing(self, tensor: hf.HFTensor) -> list[Outgoing]:
        """The tensor as it is written: as it is, or quantised and followed by its scales."""
        if not (self.fp8 and tensor.fp8):
            return [Outgoing(tensor.key, tensor.dtype, tensor.shape, partial(self._blocks, tensor))]
        scales: list[torch.Tensor] = []

        def weights() -> Iterator[torch.Tensor]:
            scales.clear()
            for rows in _whole_blocks(self._blocks(tensor), EXPORT_BLOCK[0]):
                weight, scale = quantize(rows, EXPORT_BLOCK)
                if not scale.isfinite().all():
                    raise ValueError(f"{self.folder}: {tensor.key} holds values that are not finite: no FP8 for them")
                scales.append(scale)
                yield weight

        shape = scale_shape(tensor.shape, EXPORT_BLOCK)
        return [
            Outgoing(tensor.key, torch.float8_e4m3fn, tensor.shape, weights),
            Outgoing(tensor.key + SCALE_SUFFIX, torch.float32, shape, lambda: iter([torch.cat(scales)])),
        ]

    def _blocks(self, tensor: hf.HFTensor) -> Iterator[torch.Tensor]:
        if len(tensor.sizes) == 3:  # rows of one expert
            yield self.read(tensor.name, tensor.offsets, tensor.sizes, tensor.dtype)[0]
            return
        for offsets, sizes in cut(tensor.shape, self.reader.shapes[tensor.name][1].itemsize):
            yield self.read(tensor.name, offsets, sizes, tensor.dtype)

    def read(self, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A rectangle as it is exported, whole rows of a matrix or of one expert's."""
        return self.reader.tensor(name, offsets, sizes, dtype)


def verify_weights(reader: sharded.Reader, run: Run) -> None:
    """Reads all but the optimizer's state, shared by the processes. Raises ValueError if a byte has changed."""
    index = reader.index
    chunks = [i for part in index.by_file().values() for i in part if not index.piece(i).name.startswith("optimizer.")]
    sharded.together(run.group, lambda: reader.check_data(run.share(chunks)))


def weights_file(name: str, tensors: list[Outgoing], run: Run, metadata: Mapping[str, str] = NO_METADATA) -> OutputFile:
    """A safetensors file to write."""

    def write(staging: Path) -> None:
        for nbytes in write_safetensors(staging / name, tensors, metadata):
            run.progress(nbytes)

    def check(staging: Path) -> None:
        entries = read_header(staging / name)
        for outgoing in tensors:
            stored, start = entries[outgoing.key].tensor().view(torch.uint8).flatten(), 0
            for block in outgoing.blocks():
                piece = block.contiguous().view(torch.uint8).flatten()
                require_equal(f"{staging / name}: {outgoing.key}", stored[start : start + len(piece)], piece)
                start += len(piece)

    keys, nbytes = [tensor.key for tensor in tensors], sum(tensor.nbytes for tensor in tensors)
    return OutputFile(name, nbytes, keys, write, check)


def _whole_blocks(pieces: Iterator[torch.Tensor], rows: int) -> Iterator[torch.Tensor]:
    """The same rows, cut at multiples of `rows`."""
    left = None
    for piece in pieces:
        piece = piece if left is None else torch.cat([left, piece])
        whole = len(piece) // rows * rows
        if whole:
            yield piece[:whole]
        left = piece[whole:] if whole < len(piece) else None
    if left is not None:
        yield left


def require_equal(what: str, written: torch.Tensor, source: torch.Tensor) -> None:
    """Raises ValueError with the first byte that differs; equal bits are equal, NaN included."""
    left, right = (tensor.contiguous().view(torch.uint8).flatten() for tensor in (written, source))
    if len(left) == len(right) and torch.equal(left, right):
        return
    if len(left) != len(right):
        raise ValueError(f"{what} has {len(left)} bytes, the source {len(right)}")
    byte = int((left != right).nonzero()[0])
    raise ValueError(f"{what} was written wrongly: byte {byte} is {left[byte]:#04x}, in the source {right[byte]:#04x}")


def exported_config(config_file: Path, config: ModelConfig, quantization: dict[str, Any] | None) -> bytes:
    """The config.json that came with the model, saying what is exported; one that does is left byte for byte.

    It differs where the source promised an MTP layer that it lacked, and where flags of the run changed the model.
    """
    content, stored = read_json(config_file), ModelConfig.from_hf(config_file)
    changed = {f.name for f in fields(ModelConfig) if getattr(stored, f.name) != getattr(config, f.name)}
    if content.get("quantization_config") == quantization and not changed:
        return config_file.read_bytes()
    ours = config.to_hf()
    for name in changed:
        for other in OTHER_SPELLINGS.get(name, ()):
            content.pop(other, None)
        key = "rope_parameters" if name == "rope_theta" else name
        content[key] = ours[key]
    if "num_attention_heads" in changed:
        content["num_key_value_heads"] = ours["num_key_value_heads"]
    content.pop("quantization_config", None)
    content |= {} if quantization is None else {"quantization_config": quantization}
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
