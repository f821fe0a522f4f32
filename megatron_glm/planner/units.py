"""The parameters of a virtual stage by FSDP unit, from their declaration."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from megatron_glm.config import ModelConfig
from megatron_glm.config.parameters import Parameter, model_parameters
from megatron_glm.model.trained import TRUNK, is_trained
from megatron_glm.parallel.fsdp import shard_dim
from megatron_glm.parallel.grid import Grid
from megatron_glm.parallel.pipeline.layout import Stage


@dataclass(frozen=True)
class FsdpUnit:
    """Parameters that FSDP gathers together: shapes after the tensor and expert cut, before FSDP's.

    kind: "experts", "layer", "embedding", "head" or "root": the last norm.
    runs: False in an MTP layer, which is held and never gathered.
    """

    kind: str
    runs: bool
    trained: tuple[tuple[int, ...], ...]
    frozen: tuple[tuple[int, ...], ...]

    @property
    def expert(self) -> bool:
        return self.kind == "experts"

    @property
    def vocabulary(self) -> bool:
        """Whether it is a matrix of the vocabulary, which no backward gathers."""
        return self.kind in ("embedding", "head")

    @property
    def trained_elements(self) -> int:
        return sum(map(math.prod, self.trained))

    @property
    def elements(self) -> int:
        return self.trained_elements + sum(map(math.prod, self.frozen))

    def shard(self, index: int, size: int) -> tuple[int, int]:
        """(trained, frozen) elements that rank `index` of `size` holds: chunks of ceil(rows / size) along one dim."""
        trained, frozen = (sum(_shard(s, index, size) for s in shapes) for shapes in (self.trained, self.frozen))
        return trained, frozen


def _shard(shape: tuple[int, ...], index: int, size: int) -> int:
    dim = shard_dim(shape, size)
    rows = -(-shape[dim] // size)
    return max(0, min(rows, shape[dim] - index * rows)) * (math.prod(shape) // shape[dim])


@cache
def stage_units(model: ModelConfig, grid: Grid, stage: Stage, parts: frozenset[str] = TRUNK) -> tuple[FsdpUnit, ...]:
    """The FSDP units of one virtual stage where these parts are trained; see `fsdp.shard_chunk`."""
    units: dict[tuple[int | None, str], list[Parameter]] = {}
    for parameter in model_parameters(model).values():
        if parameter.kind != "buffer" and _holds(stage, parameter, "mtp" in parts):
            units.setdefault((parameter.layer, parameter.fsdp_unit), []).append(parameter)
    return tuple(_unit(model, grid, kind, members, parts) for (_, kind), members in units.items())


def _holds(stage: Stage, parameter: Parameter, predicts: bool) -> bool:
    """predicts: the MTP layer is trained, so that its stage has a copy of the embedding."""
    if parameter.part == "embedding":
        return stage.embedding or (stage.mtp and predicts)
    if parameter.layer is None:
        return stage.head
    return stage.mtp if parameter.mtp else parameter.layer in stage.layers


def _unit(model: ModelConfig, grid: Grid, kind: str, members: list[Parameter], parts: frozenset[str]) -> FsdpUnit:
    shapes: dict[bool, list[tuple[int, ...]]] = {True: [], False: []}
    for parameter in members:
        shapes[is_trained(model, parameter.name, parts)].append(_local_shape(parameter, grid))
    runs = not members[0].mtp or "mtp" in parts
    return FsdpUnit(kind, runs, tuple(shapes[True]), tuple(shapes[False]))


def _local_shape(parameter: Parameter, grid: Grid) -> tuple[int, ...]:
    """What tensor and expert parallelism leave to a rank, padding of the vocabulary included."""
    shape = parameter.shape
    dim, ranks = (0, grid.ep) if parameter.part == "experts" else (parameter.tp_dim, grid.tp)
    return shape if dim is None else (*shape[:dim], -(-shape[dim] // ranks), *shape[dim + 1 :])
