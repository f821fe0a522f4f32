"""A model with its adapters merged: W + scale * B A in fp32, rounded once to the model's own dtype.

Where that is FP8 the rule of exports quantises it again, from its rounded values. The memory is that of a few tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ..config import iterations
from ..config.model import ModelConfig
from ..config.parameters import adapter_parameters, model_parameters
from ..config.source import read_json, require_outside
from ..ops.fp8 import quantize
from .adapters import AdapterCheckpoint
from .convert import Export, exported_config, verify_weights, weights_file
from .files import copy_side_files, write_durably
from .hf import SCALE_SUFFIX, HFCheckpoint, HFTensor
from .output import OutputFile, Run, identity, produce
from .safetensors_io import INDEX_NAME, Entry, Outgoing


def open_merge(adapters: AdapterCheckpoint, base: Path, max_shard_bytes: int | None) -> MergedExport | MergedFolder:
    """The merge of adapters into their model, a Hugging Face folder or one `iter_…` folder.

    Raises: ValueError if the model lacks a weight that is adapted, or has it in another shape.
    """
    if iterations.is_complete(base):
        return MergedExport(adapters, base, max_shard_bytes or 5 * 10**9)
    if max_shard_bytes is not None:
        raise ValueError(f"--max-shard-size: the merged files are cut as those of the model, in {base}")
    return MergedFolder(adapters, HFCheckpoint(base))


class MergedExport(Export):
    """Of a model in a checkpoint, in the dtype of its config."""

    def __init__(self, adapters: AdapterCheckpoint, base: Path, max_shard_bytes: int) -> None:
        super().__init__(base, max_shard_bytes)
        self.adapters, stored = adapters, self.config
        self.readers += [adapters.reader]
        came = base / "hf" / "config.json"
        source = came if came.is_file() else base / "config.json"
        self.config_json = exported_config(source, _merged_config(adapters, stored), None)

    def read(self, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if not self.adapters.adapts(model_parameters(self.config)[name]):
            return super().read(name, offsets, sizes, dtype)
        return _merged(self.adapters, name, offsets, super().read(name, offsets, sizes, torch.float32)).to(dtype)


class MergedFolder:
    """Of a model in a Hugging Face folder: its files again, in which only the adapted weights (and scales) differ."""

    def __init__(self, adapters: AdapterCheckpoint, base: HFCheckpoint) -> None:
        self.adapters, self.base = adapters, base
        file = base.folder / "config.json"
        quantization = read_json(file).get("quantization_config")
        self.config_json = exported_config(file, _merged_config(adapters, base.config), quantization)
        self.adapted = {
            tensor.key: tensor
            for name, tensors in base.tensors.items()
            if adapters.adapts(model_parameters(base.config)[name])
            for tensor in tensors
        }
        if (scales := (quantization or {}).get("scale_fmt")) == "ue8m0" and self._in_fp8():
            raise ValueError(
                f"{file}: scale_fmt is {scales}, scales that are powers of 2; merged weights get other ones: "
                "merge into a model in bfloat16"
            )
        self._scales: tuple[str, Tensor] = "", torch.empty(0)  # of the weight that was written last

    def _in_fp8(self) -> bool:
        return any(key + SCALE_SUFFIX in self.base.source.entries for key in self.adapted)

    def files(self, run: Run) -> list[OutputFile]:
        """What `write` writes, index and side files aside."""
        by_file: dict[Path, list[tuple[str, Entry]]] = {}
        for key, entry in self.base.source.entries.items():
            by_file.setdefault(entry.file, []).append((key, entry))
        return [
            weights_file(
                str(file.relative_to(self.base.folder)),
                [self._outgoing(key, entry) for key, entry in sorted(entries, key=lambda pair: pair[1].start)],
                run,
            )
            for file, entries in sorted(by_file.items())
        ]

    def write(self, target: Path, run: Run) -> None:
        """Writes the Hugging Face folder `target`; nothing half-written gets its name."""
        require_outside("--to-hf", target, self.base.folder)
        reader = self.adapters.reader
        if run.verify:
            verify_weights(reader, run)
        read = [entry.file for entry in self.base.source.entries.values()]
        settings = {"source": str(self.base.folder.resolve()), "adapters": str(reader.folder.resolve())}
        settings |= identity([self.base.folder / "config.json", *set(read), *reader.folder.glob("*.distcp")])
        produce(target, settings, self.files(run), run, lambda staging, _: self._complete(staging))

    def _complete(self, staging: Path) -> None:
        copy_side_files(self.base.folder, staging)
        if (index := self.base.folder / INDEX_NAME).is_file():
            write_durably(staging / INDEX_NAME, index.read_bytes())
        write_durably(staging / "config.json", self.config_json)

    def _outgoing(self, key: str, entry: Entry) -> Outgoing:
        weight = key.removesuffix(SCALE_SUFFIX)
        if weight not in self.adapted:
            return Outgoing(key, entry.dtype, entry.shape, lambda: iter([entry.tensor()]))
        if key == weight:
            return Outgoing(key, entry.dtype, entry.shape, partial(self._weights, self.adapted[key], entry.dtype))
        return Outgoing(key, torch.float32, entry.shape, partial(self._scales_of, self.adapted[weight]))

    def _weights(self, tensor: HFTensor, dtype: torch.dtype) -> Iterator[Tensor]:
        """What a merged tensor holds, expert by expert; its scales are kept, as they are written next or never."""
        scales = []
        for matrix in self._matrices(tensor):
            if dtype.itemsize > 1:
                yield matrix.to(dtype)
                continue
            values, scale = quantize(matrix.to(tensor.dtype), self.base.block)
            if not scale.isfinite().all():
                raise ValueError(f"{tensor.key}, merged, holds values that are not finite: no FP8 for them")
            scales.append(scale)
            yield values
        if scales:
            self._scales = tensor.key, torch.cat(scales)

    def _scales_of(self, tensor: HFTensor) -> Iterator[Tensor]:
        if self._scales[0] != tensor.key:  # they lie before their weights, or in another file
            for _ in self._weights(tensor, torch.float8_e4m3fn):
                pass
        yield self._scales[1]

    def _matrices(self, tensor: HFTensor) -> Iterator[Tensor]:
        """Each merged matrix [rows, in] in fp32: one of a weight, one of each expert that the tensor holds."""
        if len(tensor.sizes) == 2:
            whole = self.base.read(tensor.name, tensor.offsets, tensor.sizes)
            yield _merged(self.adapters, tensor.name, tensor.offsets, whole)
            return
        first, *offset = tensor.offsets
        for expert in range(first, first + tensor.sizes[0]):
            offsets = expert, *offset
            one = self.base.read(tensor.name, offsets, (1, *tensor.sizes[1:]))
            yield _merged(self.adapters, tensor.name, offsets, one)[0]


def _merged(adapters: AdapterCheckpoint, name: str, offsets: tuple[int, ...], rectangle: Tensor) -> Tensor:
    """A rectangle [n, in] of a weight, or [1, n, in] of an expert's, with its adapters: in fp32, in its own memory."""
    result, weight = rectangle.to(torch.float32, copy=True), model_parameters(adapters.config)[name]
    if len(offsets) == 2:
        adapters.add_to(result, weight, offsets[0])
    else:
        adapters.add_to(result[0], weight, offsets[1], expert=offsets[0])
    return result


def _merged_config(adapters: AdapterCheckpoint, base: ModelConfig) -> ModelConfig:
    """What the adapters were trained with, MTP layers and dtype as the base has them.

    Raises: ValueError where the adapters are of other shapes than this model's.
    """
    for name, parameter in adapter_parameters(base, adapters.lora).items():
        here = adapters.parameters.get(name)
        if here is None or here.shape != parameter.shape:
            shape = "missing" if here is None else list(here.shape)
            raise ValueError(f"{adapters.folder}: {name} is {shape}, the model needs {list(parameter.shape)}")
    if extra := adapters.parameters.keys() - adapter_parameters(base, adapters.lora).keys():
        raise ValueError(f"{adapters.folder} holds {min(extra)}, and the model has no such weight")
    kept = {name: getattr(base, name) for name in ("num_nextn_predict_layers", "dtype")}
    return replace(adapters.config, **kept)
