"""The process groups of a run: the only place that creates any. Modules receive the groups that they use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_glm.config import ParallelConfig
from megatron_glm.parallel import mirror
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
    embedding: ProcessGroup | None = None  # two pipeline ranks that hold copies of the embedding; None on the others
    ep_node: ProcessGroup | None = None  # the ep ranks of one node; only with --expert-node-size
    ep_inter: ProcessGroup | None = None  # the ep ranks of equal index in their node; only with --expert-node-size

    @classmethod
    def create(
        cls, parallel: ParallelConfig, host: ProcessGroup | None = None, embedding: Sequence[int] = ()
    ) -> ParallelGroups:
        """Collective over all ranks of the initialised default group, whatever its size.

        host: `host_group()`, if there is one already; embedding: the pipeline ranks that hold it, one or two.
        """
        world, rank, timeout = default_group(), dist.get_rank(), time_limit(parallel)
        grid = Grid.create(parallel, dist.get_world_size())
        known = {tuple(range(world.size())): world}

        def mine(name: str) -> ProcessGroup:
            all_ranks = [tuple(ranks) for ranks in grid.groups(name)]
            for ranks in all_ranks:  # every rank creates every group, in the same order
                if ranks not in known:
                    known[ranks] = _new_group(ranks, timeout)
            return known[next(ranks for ranks in all_ranks if rank in ranks)]

        nodes = ("ep_node", "ep_inter")
        names = [name for name in GROUP_AXES if name not in nodes or parallel.expert_node_size is not None]
        return cls(
            world=world,
            gloo_world=host or host_group(parallel),
            checkpoint=_new_group(None, NO_LIMIT, "gloo"),
            embedding=_copies(grid, embedding, rank, known, timeout),
            pp_forward=_edges(grid.ring_edges(), rank, timeout),
            pp_backward=_edges([(after, before) for before, after in grid.ring_edges()], rank, timeout),
            **{name: mine(name) for name in names},
        )

    @classmethod
    def of_sizes(cls, grid: Grid, rank: int = 0) -> ParallelGroups:
        """What `rank` would have, without processes: the groups know size and rank, and every collective fails."""
        groups, store = {}, dist.HashStore()
        for name in GROUP_AXES:
            ranks = next(ranks for ranks in grid.groups(name) if rank in ranks) if rank else grid.first(name)
            groups[name] = ProcessGroup(store, ranks.index(rank), len(ranks))
        world = ProcessGroup(store, rank, grid.pp * grid.dp * grid.cp * grid.tp)
        edges = Edges(world, world)
        return cls(world, gloo_world=world, checkpoint=world, pp_forward=edges, pp_backward=edges, **groups)


def host_group(parallel: ParallelConfig) -> ProcessGroup:
    """All ranks, for values in host memory. Collective; independent of the layout."""
    return default_group() if dist.get_backend() == "gloo" else _new_group(None, time_limit(parallel), "gloo")


def default_group() -> ProcessGroup:
    world = dist.group.WORLD
    assert world is not None, "torch.distributed is not initialised"
    return world


def _new_group(ranks: Sequence[int] | None, timeout: timedelta, backend: str | None = None) -> ProcessGroup:
    """Collective over all ranks. For a group of others, torch returns a stand-in without methods."""
    backend = mirror.NAME if dist.get_backend() == mirror.NAME else backend  # all of a rehearsal's
    return cast(ProcessGroup, dist.new_group(ranks, timeout=timeout, backend=backend))


def time_limit(parallel: ParallelConfig) -> timedelta:
    """What a collective may take. The hang watchdog, which says more, comes a minute before."""
    return timedelta(minutes=parallel.distributed_timeout_minutes + 1)


def _copies(
    grid: Grid, at: Sequence[int], rank: int, known: dict[tuple[int, ...], ProcessGroup], timeout: timedelta
) -> ProcessGroup | None:
    """The ranks at these places of the pipeline of `rank`, if they are several and it is one of them."""
    mine = None
    for ranks in grid.groups("pp") if len(at) > 1 else ():
        copies = tuple(ranks[place] for place in at)
        if copies not in known:
            known[copies] = _new_group(copies, timeout)
        mine = known[copies] if rank in copies else mine
    return mine


def _edges(sender_receiver: list[tuple[int, int]], rank: int, timeout: timedelta) -> Edges:
    inbound: ProcessGroup | None = None
    outbound: ProcessGroup | None = None
    for sender, receiver in sender_receiver:
        group = _new_group(sorted({sender, receiver}), timeout)
        inbound = group if receiver == rank else inbound
        outbound = group if sender == rank else outbound
        if sender != receiver and rank in (sender, receiver):
            _connect(group, sends=rank == sender)
    assert inbound is not None and outbound is not None, "each rank is in the ring"
    return Edges(inbound, outbound)


def _connect(group: ProcessGroup, sends: bool) -> None:
    """Exchange a message, because NCCL makes a communicator at the first one and holds both hosts until it is there.

    In a schedule, where each rank comes to its edges in an order of its own, two would hold each other for ever.
    """
    message = torch.zeros(1, device="cuda" if dist.get_backend() == "nccl" else "cpu")
    (group.send if sends else group.recv)([message], 1 - group.rank(), 0).wait()
