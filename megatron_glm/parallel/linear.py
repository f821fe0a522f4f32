"""Linear layers of tensor parallelism with sequence parallelism.

Between layers a tensor-parallel rank holds its sequence shard [t/TP, D]. A block gathers the rows
(`collectives.gather_rows`), multiplies by its columns, then by its rows, and the sum over the ranks is
scattered back to sequence shards. No layer has a bias. Selective recomputation keeps a product that is `kept`;
`products` is the precision.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_glm.ops.grad_sum import AS_THEY_ARE, linear
from megatron_glm.parallel.collectives import scatter_sum_rows
from megatron_glm.parallel.shard import ShardInfo


def replicated(shape: tuple[int, ...], tp: ProcessGroup) -> ShardInfo:
    """A parameter that every TP rank holds whole and applies to its sequence shard: its gradient is a partial sum."""
    return ShardInfo(tuple(shape), (0,) * len(shape), replica_groups=(tp,), sum_groups=(tp,), expert=False)


def split(shape: tuple[int, ...], dim: int, tp: ProcessGroup) -> tuple[tuple[int, ...], ShardInfo]:
    """Local shape and ShardInfo of a parameter cut along one dim over the TP ranks.

    Raises:
        ValueError: if the dim is not divisible by the group's size.
    """
    if shape[dim] % tp.size():
        raise ValueError(f"dim {dim} of {shape} is not divisible by --tensor-model-parallel-size {tp.size()}")
    local = list(shape)
    local[dim] //= tp.size()
    offsets = [0] * len(shape)
    offsets[dim] = tp.rank() * local[dim]
    return tuple(local), ShardInfo(tuple(shape), tuple(offsets), replica_groups=(), sum_groups=(), expert=False)


class ReplicatedLinear(nn.Module):
    """x [t/TP, in] -> [t/TP, out] on the sequence shard, with the whole weight [out, in] on every rank."""

    def __init__(self, in_features: int, out_features: int, tp: ProcessGroup, kept: bool = False) -> None:
        super().__init__()
        self.kept, self.products = kept, AS_THEY_ARE
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.shards = {"weight": replicated((out_features, in_features), tp)}

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.kept, self.products)


class ColumnParallelLinear(nn.Module):
    """Gathered x [t, in] -> this rank's output features [t, out/TP]; weight rows are split."""

    def __init__(self, in_features: int, out_features: int, tp: ProcessGroup, kept: bool = False) -> None:
        super().__init__()
        self.kept, self.products = kept, AS_THEY_ARE
        shape, info = split((out_features, in_features), 0, tp)
        self.weight = nn.Parameter(torch.empty(shape))
        self.shards = {"weight": info}

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.kept, self.products)


class RowParallelLinear(nn.Module):
    """This rank's input features [t, in/TP] -> summed sequence shard [t/TP, out]; weight columns are split."""

    def __init__(self, in_features: int, out_features: int, tp: ProcessGroup, kept: bool = False) -> None:
        super().__init__()
        self.kept, self.products = kept, AS_THEY_ARE
        shape, info = split((out_features, in_features), 1, tp)
        self.weight = nn.Parameter(torch.empty(shape))
        self.shards = {"weight": info}
        self.tp = tp

    def forward(self, x: Tensor) -> Tensor:
        return scatter_sum_rows(linear(x, self.weight, self.kept, self.products), self.tp)
