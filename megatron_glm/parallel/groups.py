"""The process groups of a run: the only place that creates any. Modules receive the groups that they use."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_glm.config import ParallelConfig
from megatron_glm.parallel.grid import GROUP_AXES, Grid

# Of the group for checkpoints: a rank may wait for hours there, for one that reads or writes. The watchdog sees that
# nothing moves, and a process that has ended closes its connections at once.
NO_LIMIT = timedelta(days=30)


class Edges(NamedTuple):
    """Groups of two ranks for one direction of pipeline messages; each carries messages one way only.

    One communicator a neighbour and way, because NCCL runs the operations of a communicator one after another: a
    receive that is posted early would hold back every later send on it, and two ranks that do so hang.
    """

    inbound: ProcessGroup  # this rank receives
    outbound: ProcessGroup  # this rank sends


@dataclass(frozen=True)
class ParallelGroups:
    """Groups that this rank belongs to; sizes and ranks are `group.size()` and `group.rank()`.

    Groups of the same ranks are one object (and one communicator), but for `checkpoint` and the pipeline edges.
    """

    world: ProcessGroup
    gloo_world: ProcessGroup  # all ranks, host integers
    checkpoint: ProcessGroup  # all ranks, gloo of its own: an asynchronous save must not meet training collectives
    tp: ProcessGroup
    cp: ProcessGroup
    tp_cp: ProcessGroup
    dp: ProcessGroup
    dp_cp: ProcessGroup
    tp_cp_dp: ProcessGroup  # all ranks of one pipeline stage
    pp: ProcessGroup
    ep: ProcessGroup
    edp: ProcessGroup
    pp_forward: Edges  # activations: from the previous stage, to the next one
    pp_backward: Edges  # gradients: from the next stage, to the previous one
    ep_node: ProcessGroup | None = None  # the ep ranks of one node; only with --expert-node-size
    ep_inter: ProcessGroup | None = None  # the ep ranks of equal index in their node; only with --expert-node-size

    @classmethod
    def create(cls, parallel: ParallelConfig, host: ProcessGroup | None = None) -> ParallelGroups:
        """Collective over all ranks of the initialised default group, whatever its size.

        host: `host_group()`, if there is one already.
        """
        world, rank, timeout = dist.group.WORLD, dist.get_rank(), time_limit(parallel)
        grid = Grid.create(parallel, dist.get_world_size())
        known = {tuple(range(world.size())): world}

        def mine(name: str) -> ProcessGroup:
            all_ranks = [tuple(ranks) for ranks in grid.groups(name)]
            for ranks in all_ranks:  # every rank creates every group, in the same order
                if ranks not in known:
                    known[ranks] = dist.new_group(ranks, timeout=timeout)
            return known[next(ranks for ranks in all_ranks if rank in ranks)]

        nodes = ("ep_node", "ep_inter")
        names = [name for name in GROUP_AXES if name not in nodes or parallel.expert_node_size is not None]
        return cls(
            world=world,
            gloo_world=host or host_group(parallel),
            checkpoint=dist.new_group(backend="gloo", timeout=NO_LIMIT),
            pp_forward=_edges(grid.ring_edges(), rank, timeout),
            pp_backward=_edges([(after, before) for before, after in grid.ring_edges()], rank, timeout),
            **{name: mine(name) for name in names},
        )


def host_group(parallel: ParallelConfig) -> ProcessGroup:
    """All ranks, for values in host memory. Collective; independent of the layout."""
    world = dist.group.WORLD
    return world if dist.get_backend() == "gloo" else dist.new_group(backend="gloo", timeout=time_limit(parallel))


def time_limit(parallel: ParallelConfig) -> timedelta:
    """What a collective may take. The hang watchdog, which says more, comes a minute before."""
    return timedelta(minutes=parallel.distributed_timeout_minutes + 1)


def _edges(sender_receiver: list[tuple[int, int]], rank: int, timeout: timedelta) -> Edges:
    inbound = outbound = None
    for sender, receiver in sender_receiver:
        group = dist.new_group(sorted({sender, receiver}), timeout=timeout)
        inbound = group if receiver == rank else inbound
        outbound = group if sender == rank else outbound
        if sender != receiver and rank in (sender, receiver):
            _connect(group, sends=rank == sender)
    return Edges(inbound, outbound)


def _connect(group: ProcessGroup, sends: bool) -> None:
    """Exchange a message, because NCCL makes a communicator at the first one and holds both hosts until it is there.

    In a schedule, where each rank comes to its edges in an order of its own, two would hold each other for ever.
    """
    message = torch.zeros(1, device="cuda" if dist.get_backend() == "nccl" else "cpu")
    (group.send if sends else group.recv)([message], 1 - group.rank(), 0).wait()
