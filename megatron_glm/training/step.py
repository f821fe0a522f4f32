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
from megatron_glm.data.packing import IGNORE, PackedBatch
from megatron_glm.flops import training_flops
from megatron_glm.model.glm import ChunkOutput, GLMChunk
from megatron_glm.model.plan import AttentionPlan, has_sparse_rows
from megatron_glm.model.router import update_router_biases
from megatron_glm.ops.upload import upload
from megatron_glm.parallel.fsdp import (
    gather_ahead,
    local,
    record_change,
    reduce_partial_gradients,
    set_gradient_sync,
)
from megatron_glm.parallel.groups import ParallelGroups
from megatron_glm.parallel.pipeline.p2p import Boundary, GroupTransport
from megatron_glm.parallel.pipeline.runner import Runner
from megatron_glm.parallel.pipeline.schedule import build_schedule
from megatron_glm.training.initialize import current_device, pipeline_layout
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

    loss_tokens: int
    tokens: int
    flops: int
    requests: Requests = NO_REQUESTS


@dataclass(frozen=True)
class StepResult:
    """loss: mean over the step's loss tokens; grad_norm: before clipping; fault: why the step was skipped, or None."""

    loss: float
    grad_norm: float
    counts: StepCounts
    fault: str | None = None
    statistics: dict[str, Any] = field(default_factory=dict)


def train_step(
    chunks: Sequence[GLMChunk],
    batches: Sequence[PackedBatch],
    optimizer: AdamW,
    groups: ParallelGroups,
    config: RunConfig,
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
    counts = counts or count(batches, groups, config)
    losses = run_micro_batches(chunks, batches, groups, config, divisor=max(counts.loss_tokens, 1))
    reduce_partial_gradients(chunks)
    names, squares = gradient_squares(chunks)  # before the host waits for the loss
    mean_loss = sum_over_ranks(losses, groups)
    grad_norm = gradient_norm(squares, groups.world)
    routers = [router for chunk in chunks for router in chunk.routers()]
    if not (math.isfinite(mean_loss) and math.isfinite(grad_norm)):
        fault = f"lm loss is {mean_loss} and grad norm {grad_norm}: {first_not_finite(chunks, losses, groups)}"
        if config.train.on_nan == "stop":
            raise FloatingPointError(fault)
        optimizer.zero_grad()
        for router in routers:
            router.counts.zero_()
        return StepResult(mean_loss, grad_norm, counts, fault)
    router_counts = update_router_biases(routers, config.optimizer.moe_router_bias_update_rate)
    # Before the optimizer, for which the host then need not wait: it goes on to the next step.
    observed = observe(chunks, names, squares, router_counts, groups) if with_statistics else None
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step(clipping(grad_norm, config.optimizer.clip_grad))
    optimizer.zero_grad()
    more = {} if observed is None else statistics(observed, config.model, groups)
    return StepResult(mean_loss, grad_norm, counts, statistics=more)


def run_micro_batches(
    chunks: Sequence[GLMChunk],
    batches: Sequence[PackedBatch],
    groups: ParallelGroups,
    config: RunConfig,
    divisor: int = 1,
    training: bool = True,
) -> list[Tensor]:
    """Forward, and backward if `training`, of all micro-batches through the pipeline.

    Returns:
        the loss sum over `divisor` of each micro-batch, on the ranks of the last stage; elsewhere nothing.
    """
    layout, device = pipeline_layout(config, groups.dp.size()), current_device()
    schedule = build_schedule(
        layout.pp, layout.chunks, len(batches), config.parallel.microbatch_group_size_per_vp_stage, not training
    )
    total = len(batches[0].tokens)
    boundary = Boundary(
        tokens=total // (groups.cp.size() * groups.tp.size()),
        hidden_size=config.model.hidden_size,
        dtype=torch.bfloat16 if config.train.bf16 else torch.float32,
        device=device,
        topk=min(config.model.index_topk, total),
        topk_stages=tuple(stage.needs_topk(config.model) for stage in layout.stages),
    )
    changed = record_change()
    inputs: dict[int, MicroBatch] = {}  # of the micro-batches that are between this rank's first and last chunk

    def forward(chunk: int, i: int, hidden: Tensor | None, topk: Tensor | None) -> ChunkOutput:
        if i not in inputs:
            inputs[i] = MicroBatch.build(batches[i], groups, config, device)
        tokens, labels, plan = inputs[i]
        if chunk == len(chunks) - 1:
            del inputs[i]
        gather_ahead(chunks[chunk], changed)
        return chunks[chunk](tokens if hidden is None else hidden, plan, topk, labels, 1 / divisor)

    for chunk in chunks if training else ():
        set_gradient_sync(chunk, sync=config.parallel.grad_sync == "every", last=False)
    runner = Runner(schedule, groups.pp.rank(), GroupTransport(groups), boundary)
    selects = [has_sparse_rows(config.model, batch.doc_lengths, config.dense_rows) for batch in batches]
    return runner.run(forward, lambda chunk: set_gradient_sync(chunks[chunk], sync=True, last=True), selects)


class MicroBatch(NamedTuple):
    """What a chunk is given: tokens and labels [T] int64 on the device, and the attention plan."""

    tokens: Tensor
    labels: Tensor
    plan: AttentionPlan

    @classmethod
    def build(cls, batch: PackedBatch, groups: ParallelGroups, config: RunConfig, device: torch.device) -> MicroBatch:
        plan = AttentionPlan.build(
            config.model,
            batch.doc_lengths,
            len(batch.tokens),
            cp_rank=groups.cp.rank(),
            cp_size=groups.cp.size(),
            tp_rank=groups.tp.rank(),
            tp_size=groups.tp.size(),
            dense_rows=config.dense_rows,
            device=device,
        )
        labels = batch.labels.masked_fill(~batch.loss_mask, IGNORE)
        return cls(upload(batch.tokens, device), upload(labels, device), plan)


def first_not_finite(chunks: Sequence[GLMChunk], losses: Sequence[Tensor], groups: ParallelGroups) -> str:
    """Where a NaN or an infinity is: weight, loss of a micro-batch, gradient, each with the first rank that has it.

    A gradient is the rank's share of what the data ranks have summed. Every rank gets the same sentence.
    """

    def first(tensors: Iterable[tuple[str, Tensor]]) -> str | None:
        return next((name for name, tensor in tensors if not local(tensor).isfinite().all()), None)

    trained = [(name, parameter) for name, parameter, _ in trained_parameters(chunks)]
    mine = (
        first(trained),
        first((f"of micro-batch {i}", loss) for i, loss in enumerate(losses)),
        first((name, parameter.grad) for name, parameter in trained if parameter.grad is not None),
    )
    found = [None] * groups.gloo_world.size()
    dist.all_gather_object(found, mine, group=groups.gloo_world)
    places = []
    for kind, names in zip(("weight", "loss", "gradient"), zip(*found, strict=True), strict=True):
        rank = next((rank for rank, name in enumerate(names) if name is not None), None)
        if rank is not None:
            places.append(f"the first {kind} that is not finite is {names[rank]} of rank {rank}")
    return ", ".join(places)


def count(
    batches: Sequence[PackedBatch], groups: ParallelGroups, config: RunConfig, requests: Requests = NO_REQUESTS
) -> StepCounts:
    """Counts of the whole step, and what any rank requests: one all-reduce on the host."""
    lengths = [length for batch in batches for length in batch.doc_lengths]
    mine = [sum(batch.loss_tokens for batch in batches), sum(lengths), training_flops(config.model, lengths)]
    speaks = groups.tp_cp.rank() == 0 and groups.pp.rank() == 0  # the ranks of one replica have the same batches
    # fp64, because FLOPs pass 2^63 from 248 packs of 131,072 tokens on; they are rounded. Tokens are exact up to 2^53.
    totals = torch.tensor([*(mine if speaks else [0, 0, 0]), *requests], dtype=torch.float64)
    dist.all_reduce(totals, group=groups.gloo_world)
    loss_tokens, tokens, flops, *asked = map(int, totals.tolist())
    return StepCounts(loss_tokens, tokens, flops, Requests(*asked))


def sum_over_ranks(losses: Sequence[Tensor], groups: ParallelGroups) -> float:
    """Sum of the losses of all ranks, each token once; a loss is the same on all tensor-parallel ranks."""
    total = sum((loss.double() for loss in losses), torch.zeros((), dtype=torch.float64, device=current_device()))
    total = total / groups.tp.size()
    dist.all_reduce(total, group=groups.world)
    return total.item()
