"""One optimizer step: everything is a sum divided by a count that is known before the first forward."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_glm import signals
from megatron_glm.config import RunConfig
from megatron_glm.config.flops import training_flops
from megatron_glm.data.packing import PackedBatch
from megatron_glm.model.router import update_router_biases
from megatron_glm.parallel.fsdp import local, reduce_partial_gradients
from megatron_glm.parallel.groups import ParallelGroups
from megatron_glm.parallel.pipeline.runner import Losses
from megatron_glm.training.engine import LM, Engine, losses_of
from megatron_glm.training.optimizer import AdamW, clipping, gradient_norm, gradient_squares, trained_parameters
from megatron_glm.training.statistics import observe, statistics


class Requests(NamedTuple):
    """What this rank asks of all before a step: 0 or 1 each; summed over the ranks, what any of them asks."""

    preempted: int = 0  # save and leave: SIGTERM or SIGUSR1 has come
    interrupted: int = 0  # the same, for SIGINT
    saving: int = 0  # a save in the background is being written
    save_now: int = 0  # save and go on: there is a file save-now
    time_up: int = 0  # save and leave: --exit-duration-in-mins is over
    save_failed: int = 0  # look at the save in the background

    @classmethod
    def of_signals(cls, **others: int) -> Requests:
        """What the signals ask that this rank has received, and `others`."""
        interrupted = signal.SIGINT in signals.received
        return cls(preempted=len(signals.received) > interrupted, interrupted=interrupted, **others)

    @property
    def exit_code(self) -> int:
        """Of the signals; 0: none has come."""
        return signals.INTERRUPTED if self.interrupted else signals.REQUEUE if self.preempted else 0


NO_REQUESTS = Requests()


@dataclass(frozen=True)
class StepCounts:
    """Whole numbers of a step, summed over the data-parallel ranks (padding is in none), and requests of all ranks."""

    losses: dict[str, int]  # what each loss is divided by
    tokens: int
    flops: int
    requests: Requests = NO_REQUESTS

    @property
    def loss_tokens(self) -> int:
        return self.losses[LM]


@dataclass(frozen=True)
class StepResult:
    """losses: each over its count; grad_norm: before clipping; fault: why the step was skipped, or None."""

    losses: dict[str, float]
    grad_norm: float
    counts: StepCounts
    fault: str | None = None
    statistics: dict[str, Any] = field(default_factory=dict)


def train_step(
    engine: Engine,
    optimizer: AdamW,
    batches: Sequence[PackedBatch],
    learning_rate: float,
    counts: StepCounts | None = None,
    with_statistics: bool = False,
) -> StepResult:
    """Gradients of all micro-batches of this rank, clipped, applied; the router's biases follow.

    If the loss or the gradient is not finite, everything stays as it was before the step, with --on-nan skip.

    Args:
        counts: what `count` said of these batches; without it, it is asked here.
        with_statistics: collect `statistics`, which costs a reduction more.
    Raises:
        FloatingPointError: if the loss or the gradient is not finite, with --on-nan stop.
    """
    config, groups, chunks = engine.config, engine.groups, engine.chunks
    counts = counts or count(config, groups, batches)
    found = engine.forward_backward(batches, counts.losses)
    reduce_partial_gradients(chunks, groups.embedding)
    names, squares = gradient_squares(chunks)  # before the host waits for the loss
    losses = sum_over_ranks(engine, found)
    grad_norm = gradient_norm(squares, groups.world)
    routers = [router for chunk in chunks for router in chunk.routers()]
    if not all(map(math.isfinite, (*losses.values(), grad_norm))):
        values = " and ".join(f"{name} loss is {loss}" for name, loss in losses.items())
        fault = f"{values} and grad norm {grad_norm}: {first_not_finite(engine, found)}"
        if config.train.on_nan == "stop":
            raise FloatingPointError(fault)
        optimizer.zero_grad()
        for router in routers:
            router.counts.zero_()
        return StepResult(losses, grad_norm, counts, fault)
    router_counts = update_router_biases(routers, config.optimizer.moe_router_bias_update_rate)
    # Before the optimizer, for which the host then need not wait: it goes on to the next step.
    observed = observe(groups, chunks, names, squares, router_counts) if with_statistics else None
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step(clipping(grad_norm, config.optimizer.clip_grad))
    optimizer.zero_grad()
    more = {} if observed is None else statistics(config, groups, observed)
    return StepResult(losses, grad_norm, counts, statistics=more)


def first_not_finite(engine: Engine, losses: Sequence[Losses]) -> str:
    """Where a NaN or an infinity is: weight, loss of a micro-batch, gradient, each with the first rank that has it.

    A gradient is the rank's share of what the data ranks have summed. Every rank gets the same sentence.
    """

    def first(tensors: Iterable[tuple[str, Tensor]]) -> str | None:
        return next((name for name, tensor in tensors if not local(tensor).isfinite().all()), None)

    gloo = engine.groups.gloo_world
    trained = [(name, parameter) for name, parameter, _ in trained_parameters(engine.chunks)]
    mine = (
        first(trained),
        first((f"{name} of micro-batch {i}", loss) for i, found in enumerate(losses) for name, loss in found.items()),
        first((name, parameter.grad) for name, parameter in trained if parameter.grad is not None),
    )
    found = [None] * gloo.size()
    dist.all_gather_object(found, mine, group=gloo)
    places = []
    for kind, names in zip(("weight", "loss", "gradient"), zip(*found, strict=True), strict=True):
        rank = next((rank for rank, name in enumerate(names) if name is not None), None)
        if rank is not None:
            places.append(f"the first {kind} that is not finite is {names[rank]} of rank {rank}")
    return ", ".join(places)


def count(
    config: RunConfig, groups: ParallelGroups, batches: Sequence[PackedBatch], requests: Requests = NO_REQUESTS
) -> StepCounts:
    """Counts of the whole step, and what any rank requests: one all-reduce on the host."""
    lengths = [length for batch in batches for length in batch.doc_lengths]
    mine = [sum(map(of_pack, batches)) for of_pack in losses_of(config).values()]
    dense = config.attends_densely
    mine += [sum(lengths), training_flops(config.model, lengths, config.losses, config.indexer, dense, config.lora)]
    counts_here = groups.tp_cp.rank() == 0 and groups.pp.rank() == 0  # the ranks of one replica have the same batches
    # fp64, because FLOPs pass 2^63 from 248 packs of 131,072 tokens on; they are rounded. Tokens are exact up to 2^53.
    totals = torch.tensor([*(mine if counts_here else [0] * len(mine)), *requests], dtype=torch.float64)
    dist.all_reduce(totals, group=groups.gloo_world)
    numbers = list(map(int, totals.tolist()))
    *of_losses, tokens, flops = numbers[: len(mine)]
    return StepCounts(
        dict(zip(losses_of(config), of_losses, strict=True)), tokens, flops, Requests(*numbers[len(mine) :])
    )


def sum_over_ranks(engine: Engine, found: Sequence[Losses]) -> dict[str, float]:
    """Each loss, summed over micro-batches and ranks. It is the same on all tensor-parallel ranks, and counts once."""
    names = list(losses_of(engine.config))
    totals = torch.zeros(len(names), dtype=torch.float64, device=engine.device)
    for i, name in enumerate(names):
        for losses in found:
            if name in losses:
                totals[i] += losses[name].double()
    totals /= engine.groups.tp.size()
    dist.all_reduce(totals, group=engine.groups.world)
    return dict(zip(names, totals.tolist(), strict=True))
