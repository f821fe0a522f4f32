"""Executes a pipeline schedule on one rank: the same code for every schedule, one process included."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron_glm import heartbeat
from megatron_glm.parallel.pipeline.p2p import Boundary, Mailbox, Transport
from megatron_glm.parallel.pipeline.schedule import Action, Schedule, check_schedule


class Output(Protocol):
    hidden: Tensor | None  # [t, D], None on the last stage
    topk: Tensor | None  # [t, K] int32, the selection in force after the chunk
    loss: Tensor | None  # scalar to differentiate, already scaled; any stage may have one


# (chunk, micro-batch, hidden [t, D], top-k [t, K]) -> Output. Hidden is None on the first stage, top-k wherever the
# chunk does not begin with a shared layer or the micro-batch has no selection.
Forward = Callable[[int, int, Tensor | None, Tensor | None], Output]


class Runner:
    """Runs `schedule.actions[rank]`. The last stage must return a loss."""

    def __init__(self, schedule: Schedule, rank: int, transport: Transport, boundary: Boundary) -> None:
        check_schedule(schedule)
        stages = schedule.pp * schedule.chunks
        if len(boundary.topk_stages) != stages:
            raise ValueError(f"{len(boundary.topk_stages)} entries of topk_stages for {stages} stages")
        self.schedule, self.rank = schedule, rank
        self._transport, self._boundary = transport, boundary
        # A chunk's last backward, after which its gradients are complete.
        self._last = {action.chunk: action for action in schedule.actions[rank] if action.kind == "B"}

    def run(
        self,
        forward: Forward,
        before_last_backward: Callable[[int], None] | None = None,
        selects: Sequence[bool] | None = None,
    ) -> list[Tensor]:
        """One step; gradients accumulate in the parameters.

        Args:
            before_last_backward: called with a chunk's index before the backward of its last micro-batch, for example
                to switch the gradient synchronisation on.
            selects: per micro-batch, whether it has a top-k selection at all, the same on every rank (None: all have).
        Returns:
            The detached losses of the last stage in micro-batch order; empty on the ranks that do not hold it.
        """
        selects = [True] * self.schedule.micro_batches if selects is None else selects
        mailbox = Mailbox(self.schedule, self.rank, self._transport, self._boundary, selects)
        live: dict[tuple[int, int], tuple[Tensor | None, list[GradientEdge | Tensor]]] = {}
        losses: dict[int, Tensor] = {}
        for action in self.schedule.actions[self.rank]:
            heartbeat.beat()
            if action.kind == "F":
                self._forward(action, forward, mailbox, live, losses)
            else:
                if before_last_backward is not None and action == self._last[action.chunk]:
                    before_last_backward(action.chunk)
                self._backward(action, mailbox, *live.pop(action[1:]))
        mailbox.close()
        return [losses[micro_batch] for micro_batch in sorted(losses)]

    def _forward(self, action: Action, forward: Forward, mailbox: Mailbox, live: dict, losses: dict) -> None:
        _, chunk, micro_batch = action
        training = not self.schedule.forward_only
        hidden, topk = (*mailbox.take(action), None, None)[:2]
        if hidden is not None:
            hidden.requires_grad_(training)
        with torch.set_grad_enabled(training):
            output = forward(chunk, micro_batch, hidden, topk)
        roots = []  # what the backward starts from; a stage of frozen weights has nothing
        if self.schedule.effect(self.rank, action) is None:
            losses[micro_batch] = output.loss.detach()
        else:
            message = [output.hidden.detach()]
            mailbox.put(action, [*message, output.topk] if mailbox.expects_topk(action) else message)
            if output.hidden.requires_grad:
                # The edge holds the graph but not the values, so that they can go when they are sent.
                roots.append(get_gradient_edge(output.hidden))
        if output.loss is not None and output.loss.requires_grad:
            roots.append(output.loss)
        if training:
            live[chunk, micro_batch] = hidden, roots

    def _backward(self, action: Action, mailbox: Mailbox, hidden: Tensor | None, roots: list) -> None:
        received = mailbox.take(action)
        gradients = [received[0] if isinstance(root, GradientEdge) else None for root in roots]
        if roots:
            torch.autograd.backward(roots, gradients)
        if hidden is not None:
            mailbox.put(action, [hidden.grad])
