"""Executes a pipeline schedule on one rank: the same code for every schedule, one process included."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron_glm import heartbeat
from megatron_glm.ops.grad_sum import deferring
from megatron_glm.parallel.pipeline.carry import Carry, CarryField
from megatron_glm.parallel.pipeline.p2p import Mailbox, Transport
from megatron_glm.parallel.pipeline.schedule import BACKWARD, FORWARD, WEIGHT, Action, Schedule, check_schedule

Losses = dict[str, Tensor]  # scalars to differentiate, already scaled; any stage may have some
# (chunk, micro-batch, input) -> (output, losses). The input is empty on the first stage.
Forward = Callable[[int, int, Carry], tuple[Carry, Losses]]


class _Live(NamedTuple):
    """A micro-batch between its forward and its backward in one chunk."""

    inputs: Carry  # those with a gradient
    outputs: dict[str, GradientEdge]  # their graph without their values, which may go once they are sent
    losses: Losses


class Runner:
    """Runs `schedule.actions[rank]`.

    Args:
        fields: all that can cross between stages.
        device: where received tensors are put.
        early: whether messages are received beside the action before; see `Mailbox`.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        transport: Transport,
        fields: Sequence[CarryField],
        device: torch.device,
        early: bool = False,
    ) -> None:
        check_schedule(schedule)
        for field in fields:
            if len(field.stages) != schedule.placement.count:
                raise ValueError(f"{field.name} says {len(field.stages)} stages of {schedule.placement.count}")
        self.schedule, self.rank = schedule, rank
        self._transport, self._fields, self._device, self._early = transport, fields, device, early
        self._differentiable = {field.name for field in fields if field.differentiable}
        self._defers = WEIGHT in schedule.kinds
        # The action of a chunk after which its gradients are complete.
        final = WEIGHT if self._defers else BACKWARD
        self._last = {action.chunk: action for action in schedule.actions[rank] if action.kind == final}

    def run(
        self,
        forward: Forward,
        before_last_backward: Callable[[int], None] = lambda chunk: None,
        after_weights: Callable[[int, bool], None] = lambda chunk, last: None,
        sparse: Sequence[bool] | None = None,
        around: Callable[[Action], AbstractContextManager] = lambda action: nullcontext(),
    ) -> list[Losses]:
        """One step; gradients accumulate in the parameters.

        Args:
            before_last_backward: called with a chunk's index before the backward that completes its gradients, for
                example to switch the gradient synchronisation on. A schedule with "W" has none.
            after_weights: called after each "W" with the chunk's index, and whether its gradients are complete.
            sparse: per micro-batch, whether it has the fields that are `sparse_only` (None: all have).
            around: a context for each action, its messages included.
        Returns:
            the detached losses of this rank's stages by name, one dict a micro-batch.
        """
        sparse = [True] * self.schedule.micro_batches if sparse is None else sparse
        mailbox = Mailbox(self.schedule, self.rank, self._transport, self._fields, self._device, sparse, self._early)
        live: dict[tuple[int, int], _Live] = {}
        put_off: dict[tuple[int, int], list[Callable[[], None]]] = {}  # gradients of weights, until their "W"
        found: list[Losses] = [{} for _ in range(self.schedule.micro_batches)]
        for action in self.schedule.actions[self.rank]:
            heartbeat.beat()
            with around(action):
                if action.kind == FORWARD:
                    made = self._forward(action, forward, mailbox)
                    losses = found[action.micro_batch]  # several stages of this rank may have a part of the same loss
                    for name, loss in made.losses.items():
                        losses[name] = losses[name] + loss.detach() if name in losses else loss.detach()
                    if not self.schedule.forward_only:
                        live[action[1:]] = made
                    del made  # the graph of a micro-batch ends with its backward
                elif action.kind == BACKWARD:
                    if action == self._last[action.chunk]:
                        before_last_backward(action.chunk)
                    with deferring(put_off.setdefault(action[1:], [])) if self._defers else nullcontext():
                        self._backward(action, mailbox, live.pop(action[1:]))
                else:
                    for make in put_off.pop(action[1:]):
                        make()
                    after_weights(action.chunk, action == self._last[action.chunk])
        mailbox.close()
        return found

    def _forward(self, action: Action, forward: Forward, mailbox: Mailbox) -> _Live:
        training = not self.schedule.forward_only
        inputs = mailbox.take(action)
        differentiable = {name: tensor for name, tensor in inputs.items() if name in self._differentiable}
        for tensor in differentiable.values():
            tensor.requires_grad_(training)
        with torch.set_grad_enabled(training):
            outputs, losses = forward(action.chunk, action.micro_batch, inputs)
        mailbox.put(action, {name: tensor.detach() for name, tensor in outputs.items()})
        effect = self.schedule.effect(self.rank, action)
        sent = [] if effect is None else [f.name for f in mailbox.expected(*effect) if f.differentiable]
        edges = {name: get_gradient_edge(outputs[name]) for name in sent if outputs[name].requires_grad}
        return _Live(differentiable, edges, losses)

    def _backward(self, action: Action, mailbox: Mailbox, live: _Live) -> None:
        received = mailbox.take(action)
        losses = [loss for loss in live.losses.values() if loss.requires_grad]
        roots = [*live.outputs.values(), *losses]
        gradients = [*(received[name] for name in live.outputs), *(None for _ in losses)]
        if roots:  # a stage of frozen weights may have nothing to differentiate
            torch.autograd.backward(roots, gradients)
        mailbox.put(action, {name: _gradient(tensor) for name, tensor in live.inputs.items()})


def _gradient(tensor: Tensor) -> Tensor:
    """The gradient of an input; zero where nothing that is differentiated depends on it."""
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
