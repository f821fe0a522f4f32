"""Messages between neighbouring pipeline stages. No tags, which NCCL ignores: messages match by order.

A channel is one kind of message between two ranks: "F" carries activations, "B" gradients. A receiver needs the
messages of a channel in the order of the sender, which `check_schedule` checks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from megatron_glm.parallel.groups import Edges, ParallelGroups
from megatron_glm.parallel.pipeline.carry import Carry, CarryField
from megatron_glm.parallel.pipeline.schedule import BACKWARD, FORWARD, Action, Schedule


class Pending(Protocol):
    """An operation that was started. The buffer belongs to it until it is completed."""

    def wait(self) -> object: ...

    def is_completed(self) -> bool: ...


Receipts = tuple[Carry, list[Pending]]  # buffers, and what fills them


class Transport(Protocol):
    """Both start an operation and return at once. `kind` is "F" or "B"; `peer` the pipeline rank at the other end."""

    def send(self, kind: str, peer: int, tensor: Tensor) -> Pending: ...

    def receive(self, kind: str, peer: int, buffer: Tensor) -> Pending: ...


class GroupTransport:
    """Transport over the two-rank groups of `ParallelGroups`: "F" to the next rank of the ring, "B" to the previous."""

    def __init__(self, groups: ParallelGroups) -> None:
        self._edges: dict[str, Edges] = {FORWARD: groups.pp_forward, BACKWARD: groups.pp_backward}
        self._rank, self._pp = groups.pp.rank(), groups.pp.size()

    def send(self, kind: str, peer: int, tensor: Tensor) -> Pending:
        self._require(peer, self._rank + (1 if kind == FORWARD else -1))
        group = self._edges[kind].outbound
        return group.send([tensor], 1 - group.rank(), 0)

    def receive(self, kind: str, peer: int, buffer: Tensor) -> Pending:
        self._require(peer, self._rank - (1 if kind == FORWARD else -1))
        group = self._edges[kind].inbound
        return group.recv([buffer], 1 - group.rank(), 0)

    def _require(self, peer: int, neighbour: int) -> None:
        if peer != neighbour % self._pp:
            raise ValueError(f"pipeline ranks {self._rank} and {peer} have no group for this message: see groups.py")


class Mailbox:
    """The messages of one rank during one run of a schedule.

    Args:
        fields: all that can cross between stages.
        sparse: per micro-batch, whether it has the fields that are `sparse_only`; the same on every rank.
        early: receive each message while the action before the one that needs it computes.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        transport: Transport,
        fields: Sequence[CarryField],
        device: torch.device,
        sparse: Sequence[bool],
        early: bool = False,
    ) -> None:
        self._schedule, self._rank, self._transport = schedule, rank, transport
        self._fields, self._device, self._sparse = fields, device, sparse
        self._early = deque(filter(self._comes, schedule.actions[rank])) if early else deque()
        self._posted: dict[Action, Receipts] = {}
        self._local: dict[Action, Carry] = {}  # from this rank to itself
        self._sent: list[tuple[Pending, Tensor]] = []

    def take(self, action: Action) -> Carry:
        """What `action` needs, once it is here: the input of a forward, or the gradients of a forward's output.

        It is empty at both ends of the pipeline: before the first stage's forward, and before the last one's backward.

        By themselves they are received now, behind the computing that was started before, and not while that goes on:
        an NCCL receive holds multiprocessors until its message comes, and a grouped product that has planned with all
        of them then takes up to 1.8 times as long (docs/performance.md). Sends overlap what follows them.
        """
        if self._early and self._early[0] == action:
            self._early.popleft()
        if not self._comes(action):
            self._post_next()
            return self._local.pop(action, {})
        tensors, works = self._posted.pop(action, None) or self._post(action)
        for work in works:
            work.wait()
        self._post_next()
        return tensors

    def _comes(self, action: Action) -> bool:
        """Whether `action` needs what another rank has made."""
        cause = self._schedule.cause(self._rank, action)
        return cause is not None and cause[0] != self._rank

    def _post(self, action: Action) -> Receipts:
        """Starts to receive what `action` needs. The messages of a channel are due in the order of the actions."""
        cause = self._schedule.cause(self._rank, action)
        assert cause is not None
        expected = self.expected(self._rank, action)
        tensors = {f.name: torch.empty(f.shape, dtype=f.dtype, device=self._device) for f in expected}
        return tensors, [self._transport.receive(action.kind, cause[0], tensor) for tensor in tensors.values()]

    def _post_next(self) -> None:
        if self._early and self._early[0] not in self._posted:
            self._posted[self._early[0]] = self._post(self._early[0])

    def put(self, action: Action, carry: Carry) -> None:
        """Send what `action` made to the rank that needs it; does not wait. Nothing at the ends of the pipeline.

        Raises:
            ValueError: a tensor is not what the receiver expects, which would hang or corrupt it.
        """
        self._sent = [(work, tensor) for work, tensor in self._sent if not work.is_completed()]
        effect = self._schedule.effect(self._rank, action)
        if effect is None:
            return
        fields = self.expected(*effect)
        for field in fields:
            tensor = carry.get(field.name)
            made = None if tensor is None else (tuple(tensor.shape), tensor.dtype)
            if made != (field.shape, field.dtype):
                raise ValueError(
                    f"{action} of pipeline rank {self._rank} made {field.name} {made}, the next stage expects "
                    f"{(field.shape, field.dtype)}"
                )
        if effect[0] == self._rank:  # a pipeline of one rank
            self._local[effect[1]] = {field.name: carry[field.name] for field in fields}
            return
        for field in fields:
            tensor = carry[field.name].contiguous()
            # The pair keeps the memory alive until it has left.
            self._sent.append((self._transport.send(action.kind, effect[0], tensor), tensor))

    def close(self) -> None:
        """Wait until every message has left."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

    def expected(self, rank: int, action: Action) -> list[CarryField]:
        """What the message for `action` of `rank` holds, in this order.

        For a forward the inputs of its stage; for a backward the gradients of its outputs, the next stage's inputs.
        """
        kind, _, micro_batch = action
        stage = self._schedule.stage(rank, action) + (kind == BACKWARD)
        return [
            field
            for field in self._fields
            if field.stages[stage]
            and (field.differentiable or kind == FORWARD)
            and (self._sparse[micro_batch] or not field.sparse_only)
        ]
