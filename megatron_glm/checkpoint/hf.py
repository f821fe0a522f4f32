"""One table of names: canonical tensors and the Hugging Face keys that hold them, used in both directions.

A canonical name is the Hugging Face key without the leading "model."; only the routed experts differ: all experts of
a layer are one tensor here (`mlp.experts.gate_up` [E, 2F, D] with the gate rows first, `mlp.experts.down` [E, D, F])
and one tensor an expert and matrix there. Newer Hugging Face classes hold them fused; that form is read, not written.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from .. import heartbeat
from ..config.model import ModelConfig
from ..config.parameters import Parameter, model_parameters
from ..config.quantization import EXPORT_BLOCK, weight_block
from ..config.source import read_json, without_null
from ..ops.fp8 import BLOCK, FP8, dequantize, scale_shape
from ..parallel.shard import Rectangle
from .chunks import Shapes, pieces_of, require
from .hf_folder import SafetensorsFolder, check_folder, format_of

SCALE_SUFFIX = "_scale_inv"  # of the key that holds the scales of FP8 weights


@dataclass(frozen=True)
class HFTensor:
    """A tensor of a Hugging Face checkpoint, and which rectangle (offsets, sizes) of the canonical `name` it is.

    fp8: whether the FP8 releases hold it in FP8.
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    fp8: bool


def parameter_shapes(config: ModelConfig) -> Shapes:
    """{canonical name: (shape, dtype)} of all that is declared: the config's dtype, and fp32 for buffers."""
    dtype = getattr(torch, config.dtype)
    parameters = model_parameters(config).items()
    return {name: (p.shape, torch.float32 if p.kind == "buffer" else dtype) for name, p in parameters}


def hf_tensors(parameter: Parameter, dtype: torch.dtype) -> list[HFTensor]:
    """The Hugging Face tensors that make up one canonical tensor: one an expert and matrix, as released."""
    if not parameter.expert_matrices:
        return [fused_tensor(parameter, dtype)]
    experts, stacked, columns = parameter.shape
    name, fp8, folder = parameter.name, parameter.fp8, parameter.hf_key.rpartition(".")[0]
    rows = stacked // len(parameter.expert_matrices)
    size = rows, columns
    return [
        HFTensor(f"{folder}.{e}.{matrix}.weight", size, dtype, name, (e, i * rows, 0), (1, *size), fp8)
        for e in range(experts)
        for i, matrix in enumerate(parameter.expert_matrices)
    ]


def fused_tensor(parameter: Parameter, dtype: torch.dtype) -> HFTensor:
    """The one Hugging Face tensor that holds all of a canonical one."""
    name, shape = parameter.name, parameter.shape
    return HFTensor(parameter.hf_key, shape, dtype, name, (0,) * len(shape), shape, parameter.fp8)


class HFCheckpoint:
    """A Hugging Face folder read as canonical tensors: checked completely from the headers, data read when asked for.

    config: the model that the folder holds: without MTP layers where the config promises them but no tensor exists
        (which is what transformers itself saves), with one warning.
    shapes: `parameter_shapes(config)`.
    headers_only: the files may end behind their headers, as for a plan without the weights.
    Raises ValueError naming tensor and file for missing, extra, misshapen and truncated tensors.
    """

    def __init__(self, folder: Path, headers_only: bool = False) -> None:
        check_folder(folder)
        self.folder = folder
        config_file = folder / "config.json"
        config = ModelConfig.from_hf(config_file)
        self.block = weight_block(without_null(read_json(config_file)), config_file)
        self.source = SafetensorsFolder(folder, headers_only)
        self.config = self._drop_absent_mtp(config)
        self.shapes = parameter_shapes(self.config)
        parameters = model_parameters(self.config)
        self.tensors = {name: self._holders(parameters[name], dtype) for name, (_, dtype) in self.shapes.items()}
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self.rounded: dict[str, torch.dtype] = {}  # keys whose values changed when they took the config's dtype
        self._check_extra()
        for tensors in self.tensors.values():
            for tensor in tensors:
                self._check_tensor(tensor)

    def _drop_absent_mtp(self, config: ModelConfig) -> ModelConfig:
        prefixes = tuple(f"model.layers.{layer}." for layer in config.mtp_layer_ids)
        if not prefixes or any(key.startswith(prefixes) for key in self.source.entries):
            return config
        warnings.warn(
            f"{self.folder / 'config.json'}: num_nextn_predict_layers is {config.num_nextn_predict_layers}, but there "
            f"are no tensors {prefixes[0]}*: converted without the MTP layer",
            stacklevel=2,
        )
        return replace(config, num_nextn_predict_layers=0)

    def _holders(self, parameter: Parameter, dtype: torch.dtype) -> list[HFTensor]:
        """The tensors that make up a canonical one here, there or not."""
        fused = fused_tensor(parameter, dtype)
        return [fused] if fused.key in self.source.entries else hf_tensors(parameter, dtype)

    def _check_tensor(self, tensor: HFTensor) -> None:
        entry = self.source.entries.get(tensor.key)
        if entry is None:
            raise ValueError(f"{self.folder} lacks the tensor {tensor.key} {list(tensor.shape)}")
        if entry.shape != tensor.shape:
            shapes = f"is {list(entry.shape)}, config.json says {list(tensor.shape)}"
            raise ValueError(f"{entry.file}: {tensor.key} {shapes}")
        self._check_scale(tensor)

    def _check_scale(self, tensor: HFTensor) -> None:
        entry, scale = self.source.entries[tensor.key], self.source.entries.get(tensor.key + SCALE_SUFFIX)
        if not entry.dtype.is_floating_point:
            raise ValueError(f"{entry.file}: {tensor.key} is {entry.dtype}, weights are floating-point numbers")
        if (scale is not None) != (entry.dtype.itemsize == 1):  # FP8 goes with a scale, and nothing else does
            has = "has no" if scale is None else "has a"
            raise ValueError(f"{entry.file}: {tensor.key} is {entry.dtype} but {has} {tensor.key + SCALE_SUFFIX}")
        if scale is None:
            return
        if scale.dtype.itemsize < 2 or not scale.dtype.is_floating_point:
            raise ValueError(
                f"{scale.file}: {tensor.key + SCALE_SUFFIX} is {scale.dtype}, scales are float32, bfloat16 or float16"
            )
        if len(tensor.shape) < 2 or scale.shape != (wanted := scale_shape(tensor.shape, self.block)):
            raise ValueError(
                f"{scale.file}: {tensor.key + SCALE_SUFFIX} is {list(scale.shape)}, blocks of {list(self.block)} "
                f"in {list(tensor.shape)} need {list(wanted)}"
            )

    def _check_extra(self) -> None:
        """Refuses tensors that are no part of the model; those of a quantised one name its format."""
        used = {tensor.key for tensors in self.tensors.values() for tensor in tensors}
        extra = [key for key in self.source.entries if key not in used and key.removesuffix(SCALE_SUFFIX) not in used]
        if not extra:
            return
        if (quantised := format_of(extra)) is not None:
            raise ValueError(
                f"{self.folder} holds quantised weights: {quantised}. Read are bfloat16, float16, float32 and FP8 with "
                "a scale for each block (*.weight_scale_inv)"
            )
        key, entry = extra[0], self.source.entries[extra[0]]
        layer = re.match(r"model\.layers\.(\d+)\.", key)
        layers, mtp = self.config.num_hidden_layers, self.config.num_nextn_predict_layers
        counts = f": config.json says {layers} layers and {mtp} MTP layers" if layer and int(layer[1]) >= layers else ""
        raise ValueError(f"{entry.file}: the tensor {key} belongs to no part of this model{counts}")

    def read(self, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
        """The rectangle of a canonical tensor, in its dtype in `shapes`; the next `read` overwrites it.

        All rectangles are copied into one buffer: fresh memory for each, and writing a file straight from the memory of
        a mapped one, both take longer than the copy.
        """
        end = [offset + size for offset, size in zip(offsets, sizes, strict=True)]
        tensors = self.tensors[name]
        if len(tensors) > 1:  # in the order of experts, equally many of each
            each = len(tensors) // self.shapes[name][0][0]
            tensors = tensors[offsets[0] * each : end[0] * each]
        dtype = self.shapes[name][1]
        nbytes = math.prod(sizes) * dtype.itemsize
        if len(self._buffer) < nbytes:
            self._buffer = torch.empty(nbytes, dtype=torch.uint8)
        result = self._buffer[:nbytes].view(dtype).view(sizes)
        for tensor in tensors:
            low = [max(a, b) for a, b in zip(offsets, tensor.offsets, strict=True)]
            high = [min(a, b + c) for a, b, c in zip(end, tensor.offsets, tensor.sizes, strict=True)]
            if all(a < b for a, b in zip(low, high, strict=True)):
                index = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offsets, strict=True))
                result[index] = self._piece(tensor, low, high)
        return result

    def fill(self, rectangles: list[Rectangle]) -> None:
        """Fills rectangles of canonical tensors in place, converting dtypes; reads only what is in them.

        Raises: ValueError that lists the first tensors which the folder lacks or has in another shape.
        """
        wanted = {rectangle.name: rectangle.global_shape for rectangle in rectangles}
        require(self.shapes, wanted, self.folder)
        for rectangle in rectangles:
            for offsets, data in pieces_of(rectangle):
                data.copy_(self.read(rectangle.name, offsets, tuple(data.shape)))
                heartbeat.beat()

    def stored_blocks(self, name: str, expert: int, part: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(values, scales) of one matrix of an expert as the files hold them: in e4m3, in blocks of 128 x 128.

        None where they hold another precision or other blocks. part: 0, or 1 of the second of two stacked matrices.
        """
        tensors, parameter = self.tensors[name], model_parameters(self.config)[name]
        parts = len(parameter.expert_matrices)
        tensor = tensors[0] if len(tensors) == 1 else tensors[expert * parts + part]
        scale = self.source.entries.get(tensor.key + SCALE_SUFFIX)
        data = self.source.entries[tensor.key]
        if scale is None or data.dtype != FP8 or tuple(self.block) != BLOCK:
            return None
        values, scales = data.tensor(), scale.tensor()
        if len(tensors) == 1:  # all experts, with the matrices of each stacked
            rows = values.shape[1] // parts
            if rows % BLOCK[0]:
                return None
            values = values[expert, part * rows : (part + 1) * rows]
            scales = scales[expert].unflatten(0, (parts, -1))[part]
        return values, scales.float()

    def _piece(self, tensor: HFTensor, low: list[int], high: list[int]) -> torch.Tensor:
        """Canonical rows and columns [low, high) of one Hugging Face tensor."""
        data = self.source.entries[tensor.key].tensor().view(tensor.sizes)
        index = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, tensor.offsets, strict=True))
        scale_key = tensor.key + SCALE_SUFFIX
        if scale_key not in self.source.entries:
            return self._cast(tensor, data[index])
        scales = self.source.entries[scale_key].tensor()
        *rows, columns = index  # a row of scales is for whole rows
        if data.dim() == 2:
            return dequantize(data[rows[0]], scales, self.block, tensor.dtype, rows[0].start)[:, columns]
        scales = scales.view(data.shape[0], *scales.shape[-2:])
        experts = [
            dequantize(data[e, rows[1]], scales[e], self.block, tensor.dtype, rows[1].start)[:, columns]
            for e in range(rows[0].start, rows[0].stop)
        ]
        return experts[0].unsqueeze(0) if len(experts) == 1 else torch.stack(experts)

    def _cast(self, tensor: HFTensor, data: torch.Tensor) -> torch.Tensor:
        if data.dtype == tensor.dtype:
            return data
        result = data.to(tensor.dtype)
        if not torch.equal(result.to(data.dtype), data):
            self.rounded[tensor.key] = data.dtype
        return result


def quantization_config(config: ModelConfig) -> dict[str, Any]:
    """`quantization_config` of an export in FP8, as in the releases.

    They call the indexer's weights_proj `indexers_proj` there, which serving engines translate; both names are given.
    """
    keys = [tensor.key for tensor in all_hf_tensors(config) if not tensor.fp8]
    kept = [key.removesuffix(".weight").removesuffix(".bias") for key in keys]
    alias = [name.replace("indexer.weights_proj", "indexers_proj") for name in kept]
    return {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": sorted({*kept, *alias}),
        "quant_method": "fp8",
        "weight_block_size": list(EXPORT_BLOCK),
    }


def all_hf_tensors(config: ModelConfig) -> Iterator[HFTensor]:
    """The Hugging Face tensors of a whole model, in the order of the declaration."""
    for name, (_, dtype) in parameter_shapes(config).items():
        yield from hf_tensors(model_parameters(config)[name], dtype)
