"""What part of a global tensor a rank holds: the one description read by gradient sync, grad norm and checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class ShardInfo:
    """One parameter or persistent buffer of this rank, before FSDP cuts it again.

    global_shape: shape of the whole tensor; offsets: where this rank's rectangle starts in it;
    replica_groups: groups whose ranks hold a copy of the same rectangle;
    sum_groups: groups over which this rank's gradient is only a partial sum;
    expert: belongs to the routed experts (reduced over the expert-data group, not over all data ranks);
    copy: a chunk of this rank that comes before holds the same rectangle, which counts: in norm and checkpoints.
    """

    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    replica_groups: tuple[ProcessGroup, ...]
    sum_groups: tuple[ProcessGroup, ...]
    expert: bool
    copy: bool = False


@dataclass(frozen=True)
class Rectangle:
    """A rectangle of the global tensor `name` held by this rank, as checkpoints write and read it.

    tensor: the local data (CPU or CUDA; its shape may have a zero), filled in place by a load;
    owner: True on exactly one of the ranks that hold this same rectangle; only owners write.
    """

    name: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: torch.Tensor
    owner: bool


class ModelChunk(nn.Module):
    """What sharding, norm and checkpoints know of a chunk of the model."""

    layers: nn.ModuleDict
    embed_tokens: nn.Module | None
    lm_head: nn.Module | None
    shards: dict[str, ShardInfo]  # of every parameter and persistent buffer, by its canonical name


def collect_shards(module: nn.Module) -> dict[str, ShardInfo]:
    """ShardInfo of every parameter and persistent buffer under its canonical name.

    Each module that creates a parameter or buffer says how it is cut in its attribute `shards`.

    Raises:
        ValueError: if a parameter or buffer was created without.
    """
    infos = {}
    for prefix, child in module.named_modules():
        for name, info in getattr(child, "shards", {}).items():
            infos[f"{prefix}.{name}" if prefix else name] = info
    for name in module.state_dict():
        if name not in infos:
            raise ValueError(f"{name} has no ShardInfo: its module must list it in `shards`")
    return infos


def shard_dim(shape: Sequence[int], ranks: int) -> int:
    """The dimension along which `ranks` data ranks share a parameter of this shape.

    Dim 0, unless that leaves ranks without a row: 4 experts on 16 ranks. Then it is the first dim that the ranks divide
    (FSDP2 cuts no other dim unevenly), and dim 0 if they divide none.
    """
    rows = -(-shape[0] // ranks)
    if rows * (ranks - 1) < shape[0]:
        return 0
    return next((dim for dim, size in enumerate(shape) if size % ranks == 0), 0)
