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


class ParallelLinear(nn.Module):
    """A weight [out, in], of which this rank has a part, and the adapter that it may have.

    Args:
        info: how the weight is cut.
    """

    lora_A: nn.Parameter
    lora_B: nn.Parameter

    def __init__(self, shape: tuple[int, ...], info: ShardInfo, tp: ProcessGroup, kept: bool) -> None:
        super().__init__()
        self.tp, self.kept, self.products = tp, kept, AS_THEY_ARE
        self.weight = nn.Parameter(torch.empty(shape))
        self.shards = {"weight": info}
        self.adapter_scale = 0.0  # 0: without adapter

    def adapt(self, rank: int, scale: float) -> None:
        """Adds scale * B(A x), with A cut as the weight's columns and B as its rows.

        What is not cut is whole on every TP rank, and its gradient a partial sum there: of the rows of the sequence
        shard, or of the part of the features that the rank has.
        """
        out, width = self.shards["weight"].global_shape
        by_rows, by_columns = (n < whole for n, whole in zip(self.weight.shape, (out, width), strict=True))
        shapes = {"lora_A": ((rank, width), 1, by_columns), "lora_B": ((out, rank), 0, by_rows)}
        for name, (shape, dim, cut) in shapes.items():
            local, info = split(shape, dim, self.tp) if cut else (shape, replicated(shape, self.tp))
            setattr(self, name, nn.Parameter(torch.empty(local)))
            self.shards[name] = info
        self.adapter_scale = scale

    def forward(self, x: Tensor) -> Tensor:
        """x [t, this rank's in] -> [t, this rank's out], the product of this rank's part alone."""
        out = linear(x, self.weight, self.kept, self.products)
        if self.adapter_scale:
            out = out + linear(linear(x, self.lora_A) * self.adapter_scale, self.lora_B)
        return out


class ReplicatedLinear(ParallelLinear):
    """x [t/TP, in] -> [t/TP, out] on the sequence shard, with the whole weight [out, in] on every rank."""

    def __init__(self, in_features: int, out_features: int, tp: ProcessGroup, kept: bool = False) -> None:
        shape = out_features, in_features
        super().__init__(shape, replicated(shape, tp), tp, kept)


class ColumnParallelLinear(ParallelLinear):
    """Gathered x [t, in] -> this rank's output features [t, out/TP]; weight rows are split."""

    def __init__(self, in_features: int, out_features: int, tp: ProcessGroup, kept: bool = False) -> None:
        super().__init__(*split((out_features, in_features), 0, tp), tp, kept)


class RowParallelLinear(ParallelLinear):
    """This rank's input features [t, in/TP] -> summed sequence shard [t/TP, out]; weight columns are split."""

    def __init__(self, in_features: int, out_features: int, tp: ProcessGroup, kept: bool = False) -> None:
        super().__init__(*split((out_features, in_features), 1, tp), tp, kept)

    def forward(self, x: Tensor) -> Tensor:
        return scatter_sum_rows(super().forward(x), self.tp)
