"""The parameters of a virtual stage by FSDP unit, from the real modules on the meta device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn

from megatron_glm.config import KernelConfig, ModelConfig, ParallelConfig
from megatron_glm.model.glm import GLMChunk
from megatron_glm.parallel.fsdp import shard_dim
from megatron_glm.parallel.grid import GROUP_AXES, Grid
from megatron_glm.parallel.groups import ParallelGroups
from megatron_glm.parallel.pipeline.layout import Stage


@dataclass(frozen=True)
class SizeOnlyGroup:
    """A process group of which only the size matters; this rank is its first."""

    ranks: int

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return 0


@dataclass(frozen=True)
class Unit:
    """Parameters that FSDP gathers together: shapes after the tensor and expert cut, before FSDP's.

    kind: "experts", "layer", "embedding", "head" or "root", which is what these leave: the last norm, if anything.
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
        return tuple(sum(_shard(shape, index, size) for shape in shapes) for shapes in (self.trained, self.frozen))


def _shard(shape: tuple[int, ...], index: int, size: int) -> int:
    dim = shard_dim(shape, size)
    rows = -(-shape[dim] // size)
    return max(0, min(rows, shape[dim] - index * rows)) * (math.prod(shape) // shape[dim])


@cache
def stage_units(
    model: ModelConfig, parallel: ParallelConfig, kernels: KernelConfig, grid: Grid, stage: Stage
) -> tuple[Unit, ...]:
    """The FSDP units of one virtual stage; see `fsdp.shard_chunk`."""
    sizes = {name: math.prod(getattr(grid, axis) for axis in axes) for name, (_, axes) in GROUP_AXES.items()}
    axes = {name: SizeOnlyGroup(size) for name, size in sizes.items()}
    world = SizeOnlyGroup(grid.pp * grid.dp * grid.cp * grid.tp)
    groups = ParallelGroups(world, world, world, pp_forward=None, pp_backward=None, **axes)
    where = {"embedding": stage.embedding, "head": stage.head, "mtp": stage.mtp}
    with torch.device("meta"):
        chunk = GLMChunk(model, stage.layers, groups, parallel, kernels, **where)
    modules: list[tuple[str, nn.Module | None, bool]] = []
    for name, layer in chunk.layers.items():
        runs = int(name) < model.num_hidden_layers
        modules += [("experts", getattr(layer.mlp, "experts", None), runs), ("layer", layer, runs)]
    modules += [("embedding", chunk.embed_tokens, True), ("head", chunk.lm_head, True), ("root", chunk, True)]
    units, taken = [], set()
    for kind, module, runs in modules:
        if module is not None:
            mine = [parameter for parameter in module.parameters() if parameter not in taken]
            taken.update(mine)
            shapes = {
                trains: tuple(tuple(p.shape) for p in mine if p.requires_grad == trains) for trains in (True, False)
            }
            units.append(Unit(kind, runs, shapes[True], shapes[False]))
    return tuple(units)
