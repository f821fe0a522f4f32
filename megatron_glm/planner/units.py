"""The parameters of a virtual stage by FSDP unit, from their declaration; and what a rank holds of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

from megatron_glm.config import ModelConfig
from megatron_glm.config.lora import NO_ADAPTERS, LoraConfig
from megatron_glm.config.parameters import Parameter, adapter_parameters, model_parameters
from megatron_glm.model.trained import TRUNK, is_trained
from megatron_glm.parallel.grid import Grid
from megatron_glm.parallel.pipeline.layout import Stage
from megatron_glm.parallel.shard import shard_dim


@dataclass(frozen=True)
class FsdpUnit:
    """Parameters that FSDP gathers together: shapes after the tensor and expert cut, before FSDP's.

    kind: "experts", "layer", "embedding", "head" or "root": the last norm.
    runs: False in an MTP layer that is held and never gathered; mtp: of an MTP layer, which runs once a step.
    """

    kind: str
    runs: bool
    mtp: bool
    trained: tuple[tuple[int, ...], ...]
    frozen: tuple[tuple[int, ...], ...]

    @property
    def expert(self) -> bool:
        return self.kind == "experts"

    @property
    def vocabulary(self) -> bool:
        """Whether it is a matrix of the vocabulary, which no backward gathers."""
        return self.kind in ("embedding", "head")

    @cached_property
    def trained_elements(self) -> int:
        return sum(map(math.prod, self.trained))

    @cached_property
    def elements(self) -> int:
        return self.trained_elements + sum(map(math.prod, self.frozen))

    def calls(self, stage: Stage, mtp_steps: int) -> int:
        """How often a forward of its stage runs it: an MTP layer once a step, the embedding again for all of them."""
        if self.mtp:
            return mtp_steps
        return 2 if self.kind == "embedding" and stage.embedding and stage.mtp and mtp_steps else 1

    def shard(self, index: int, size: int) -> tuple[int, int]:
        """(trained, frozen) elements that rank `index` of `size` holds: chunks of ceil(rows / size) along one dim."""
        return _shards(self.trained, index, size), _shards(self.frozen, index, size)


@dataclass(frozen=True)
class BytesHeld:
    """Bytes that one rank holds between steps and at a step's end: exact."""

    masters: int  # of the trained parameters, fp32
    frozen: int
    gradients: int
    moments: int

    @property
    def parameters(self) -> int:
        return self.masters + self.frozen


@lru_cache(maxsize=8192)
def _shards(shapes: tuple[tuple[int, ...], ...], index: int, size: int) -> int:
    return sum(_shard(shape, index, size) for shape in shapes)


def _shard(shape: tuple[int, ...], index: int, size: int) -> int:
    dim = shard_dim(shape, size)
    rows = -(-shape[dim] // size)
    return max(0, min(rows, shape[dim] - index * rows)) * (math.prod(shape) // shape[dim])


def stage_units(
    model: ModelConfig, grid: Grid, stage: Stage, parts: frozenset[str] = TRUNK, lora: LoraConfig = NO_ADAPTERS
) -> tuple[FsdpUnit, ...]:
    """The FSDP units of one virtual stage where these parts are trained; see `fsdp.shard_chunk`."""
    layers = (*stage.layers, *(model.mtp_layer_ids if stage.mtp else ()))
    units = [unit for layer in layers for unit in _units(model, grid.tp, grid.ep, layer, parts, lora)]
    predicts = "mtp" in parts  # then the MTP layer's stage has the embedding, too, and the last norm
    held = {"embedding": stage.embedding or (stage.mtp and predicts), "head": stage.head}
    held["root"] = stage.mtp if predicts else stage.head
    ends = _units(model, grid.tp, grid.ep, None, parts, lora)
    return (*units, *(unit for unit in ends if held[unit.kind]))


@lru_cache(maxsize=8192)
def _units(
    model: ModelConfig, tp: int, ep: int, layer: int | None, parts: frozenset[str], lora: LoraConfig
) -> tuple[FsdpUnit, ...]:
    """Those of a layer, or of what is in none."""
    members: dict[str, list[Parameter]] = {}
    for parameter in _parameters(model, layer, lora):
        members.setdefault(parameter.fsdp_unit, []).append(parameter)
    return tuple(_unit(model, tp, ep, kind, each, parts) for kind, each in members.items())


@lru_cache(maxsize=1024)
def _parameters(model: ModelConfig, layer: int | None, lora: LoraConfig) -> tuple[Parameter, ...]:
    every = (*model_parameters(model).values(), *adapter_parameters(model, lora).values())
    return tuple(p for p in every if p.layer == layer and p.kind != "buffer")


def _unit(model: ModelConfig, tp: int, ep: int, kind: str, members: list[Parameter], parts: frozenset[str]) -> FsdpUnit:
    shapes: dict[bool, list[tuple[int, ...]]] = {True: [], False: []}
    for parameter in members:
        shapes[is_trained(model, parameter.name, parts)].append(_local_shape(parameter, tp, ep))
    mtp = members[0].mtp
    return FsdpUnit(kind, not mtp or "mtp" in parts, mtp, tuple(shapes[True]), tuple(shapes[False]))


def _local_shape(parameter: Parameter, tp: int, ep: int) -> tuple[int, ...]:
    """What tensor and expert parallelism leave to a rank, padding of the vocabulary included."""
    shape = parameter.shape
    dim, ranks = (0, ep) if parameter.fsdp_unit == "experts" else (parameter.tp_dim, tp)
    return shape if dim is None else (*shape[:dim], -(-shape[dim] // ranks), *shape[dim + 1 :])
