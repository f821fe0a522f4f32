"""Messages between neighbouring pipeline stages. No tags, which NCCL ignores: messages match by order.

A channel is one direction between one rank and its neighbour ("F": activations to the next rank, "B": gradients to the
previous one; the ring closes). A receiver needs its messages in the order of the sender: `check_schedule` sees to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron_glm.parallel.groups import Edges, ParallelGroups
from megatron_glm.parallel.pipeline.schedule import Action, Schedule


class Pending(Protocol):
    """An operation on its way. The buffer belongs to it until it is completed."""

    def wait(self) -> object: ...

    def is_completed(self) -> bool: ...


class Transport(Protocol):
    """Both start an operation and return at once. `kind` is the direction, "F" or "B"."""

    def send(self, kind: str, tensor: Tensor) -> Pending: ...

    def receive(self, kind: str, buffer: Tensor) -> Pending: ...


class GroupTransport:
    """Transport over the two-rank groups of `ParallelGroups`."""

    def __init__(self, groups: ParallelGroups) -> None:
        self._edges: dict[str, Edges] = {"F": groups.pp_forward, "B": groups.pp_backward}

    def send(self, kind: str, tensor: Tensor) -> Pending:
        group = self._edges[kind].outbound
        return group.send([tensor], 1 - group.rank(), 0)

    def receive(self, kind: str, buffer: Tensor) -> Pending:
        group = self._edges[kind].inbound
        return group.recv([buffer], 1 - group.rank(), 0)


@dataclass(frozen=True)
class Boundary:
    """What crosses the boundary between two stages: shapes that never change, so none is ever sent."""

    tokens: int  # t, of this rank's sequence shard
    hidden_size: int  # D
    dtype: torch.dtype  # of hidden states and their gradients
    device: torch.device
    topk: int  # K
    topk_stages: tuple[bool, ...]  # per stage: whether its input comes with the selection [t, K] int32


class Mailbox:
    """The messages of one rank during one run of a schedule.

    Args:
        selects: per micro-batch, whether it has a selection at all; the same on every rank.
    """

    def __init__(
        self, schedule: Schedule, rank: int, transport: Transport, boundary: Boundary, selects: Sequence[bool]
    ) -> None:
        self._schedule, self._rank, self._transport = schedule, rank, transport
        self._boundary, self._selects = boundary, selects
        self._local: dict[Action, list[Tensor]] = {}  # from this rank to itself
        self._sent: list[tuple[Pending, Tensor]] = []

    def take(self, action: Action) -> list[Tensor]:
        """The tensors that `action` needs, once they are here; none where the pipeline begins or turns round.

        They are received now, behind the computing that was started before, and not while that goes on: an NCCL
        receive holds multiprocessors until its message comes, and a matrix product that has planned with all of them
        then takes up to twice as long (docs/performance.md has the measurement). Sends overlap what follows them.
        """
        cause = self._schedule.cause(self._rank, action)
        if cause is not None and cause[0] != self._rank:
            shapes = self._shapes(self._rank, action)
            tensors = [torch.empty(shape, dtype=dtype, device=self._boundary.device) for shape, dtype in shapes]
            for work in [self._transport.receive(action.kind, tensor) for tensor in tensors]:
                work.wait()
            return tensors
        return self._local.pop(action, [])

    def put(self, action: Action, tensors: list[Tensor | None]) -> None:
        """Send what `action` made to the rank that needs it; does not wait.

        Raises:
            ValueError: the tensors are not what the receiver expects, which would hang or corrupt it.
        """
        self._sent = [(work, tensor) for work, tensor in self._sent if not work.is_completed()]
        rank, effect = self._schedule.effect(self._rank, action)
        expected = self._shapes(rank, effect)
        made = [None if tensor is None else (tuple(tensor.shape), tensor.dtype) for tensor in tensors]
        if made != expected:
            raise ValueError(f"{action} of pipeline rank {self._rank} made {made}, the next stage expects {expected}")
        if rank == self._rank:  # a pipeline of one rank
            self._local[effect] = tensors
            return
        for tensor in tensors:
            tensor = tensor.contiguous()
            # The pair keeps the memory alive until it has left.
            self._sent.append((self._transport.send(action.kind, tensor), tensor))

    def close(self) -> None:
        """Wait until every message has left."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

    def _shapes(self, rank: int, action: Action) -> list[tuple[tuple[int, int], torch.dtype]]:
        """The message for `action` of `rank`: hidden [t, D], and top-k [t, K] where a forward needs one."""
        boundary, (kind, chunk, micro_batch) = self._boundary, action
        shapes = [((boundary.tokens, boundary.hidden_size), boundary.dtype)]
        if kind == "F" and boundary.topk_stages[chunk * self._schedule.pp + rank] and self._selects[micro_batch]:
            shapes.append(((boundary.tokens, boundary.topk), torch.int32))
        return shapes

    def expects_topk(self, action: Action) -> bool:
        """Whether the stage after `action`, a forward, needs the selection."""
        return len(self._shapes(*self._schedule.effect(self._rank, action))) > 1
