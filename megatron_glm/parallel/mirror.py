"""Process groups whose other members are mirrors of this rank, so that one process runs its part of any run.

| collective     | what arrives                                                                            |
|----------------|-----------------------------------------------------------------------------------------|
| all-gather     | the own piece, from each rank                                                           |
| all-reduce     | a sum: the own values times the ranks; else the own values                              |
| reduce-scatter | the own piece of the input, times the ranks for a sum                                   |
| all-to-all     | from each rank what a mirror sends to this one: the part of the input for this rank,    |
|                | its rows over and over where more are due (what comes back from the experts)            |
| receive        | what `plausible` makes                                                                  |

Nothing leaves the process, and nothing waits. Shapes and bytes are those of the run; the numbers only have their sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

NAME = "mirror"  # of the backend


class Done(dist.Work):
    """A collective that has ended."""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class MirrorGroup(dist.ProcessGroup):
    """The methods that torch.distributed's functions call, with their arguments."""

    plausible: Callable[[Tensor], object]  # fills what arrives from another stage, in place

    def __init__(self, rank: int, ranks: list[int], name: str) -> None:
        super().__init__(rank, len(ranks))  # pyright: ignore[reportCallIssue]
        self.ranks, self._name = tuple(ranks), name  # of the run; what torch knows the group by

    @property
    def group_name(self) -> str:
        return self._name

    def getBackendName(self) -> str:  # noqa: N802
        return NAME

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Done:
        for tensor in tensors:
            self._summed(tensor, opts)
        return Done()

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Done:
        for received, tensor in zip(outputs, inputs, strict=True):
            for output in received:
                output.copy_(tensor)
        return Done()

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Done:  # noqa: A002
        output.view(self.size(), -1).copy_(input.reshape(1, -1).expand(self.size(), -1))
        return Done()

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Done:  # noqa: A002
        output.copy_(input.view(self.size(), *output.shape)[self.rank()])
        self._summed(output, opts)
        return Done()

    def alltoall_base(
        self, output: Tensor, tensor: Tensor, received: list[int], sent: list[int], opts: Any = None
    ) -> Done:
        """received, sent: rows of each rank; empty where all are equal."""
        equal = [len(tensor) // self.size()] * self.size()
        received, sent = received or equal, sent or equal
        mine = tensor.split(sent)[self.rank()]
        if all(rows == len(mine) for rows in received):
            output.view(self.size(), *mine.shape).copy_(mine.expand(self.size(), *mine.shape))
        elif len(mine) == 0:
            output.zero_()
        else:
            begins = torch.tensor(received).cumsum(0) - torch.tensor(received)
            rows = torch.arange(len(output)) - begins.repeat_interleave(torch.tensor(received))
            torch.index_select(mine, 0, (rows % len(mine)).to(mine.device), out=output)
        return Done()

    def send(self, tensors: list[Tensor], rank: int, tag: int = 0) -> Done:
        return Done()

    def recv(self, tensors: list[Tensor], rank: int, tag: int = 0) -> Done:
        for tensor in tensors:
            self.plausible(tensor)
        return Done()

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Done:
        return Done()

    def barrier(self, opts: Any = None) -> Done:
        return Done()

    def _summed(self, tensor: Tensor, opts: Any) -> None:
        kind = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        if kind == dist.ReduceOp.SUM:
            tensor.mul_(self.size())
        elif not any(kind == same for same in (dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.MIN)):
            raise NotImplementedError(f"mirrors do not know the reduction {kind}")


for _name, _newer in (  # torch 2.13's names
    ("_allgather_base", "all_gather_single"),
    ("_reduce_scatter_base", "reduce_scatter_single"),
    ("alltoall_base", "all_to_all_single"),
):
    setattr(MirrorGroup, _newer, getattr(MirrorGroup, _name))


def start(rank: int, world_size: int, plausible: Callable[[Tensor], object]) -> None:
    """Makes this process `rank` among its mirrors: in the default group, and in all that `groups.py` makes."""
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _group, extended_api=True, devices=["cpu", "cuda"])
    MirrorGroup.plausible = staticmethod(plausible)
    dist.init_process_group(NAME, store=dist.HashStore(), rank=rank, world_size=world_size)


def _group(options: Any, _: Any) -> MirrorGroup:
    ranks = options.global_ranks_in_group or list(range(options.group_size))
    return MirrorGroup(options.group_rank, ranks, options.group_id)
