"""One optimizer step: everything is a sum divided by a count that is known before the first forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_glm.config import RunConfig
from megatron_glm.data.packing import IGNORE, PackedBatch
from megatron_glm.model.glm import GLMChunk
from megatron_glm.model.plan import AttentionPlan
from megatron_glm.model.router import update_router_biases
from megatron_glm.parallel.fsdp import reduce_partial_gradients, set_gradient_sync
from megatron_glm.parallel.groups import ParallelGroups
from megatron_glm.training.flops import training_flops
from megatron_glm.training.initialize import current_device
from megatron_glm.training.optimizer import clip_gradients, gradient_norm


@dataclass(frozen=True)
class StepCounts:
    """Whole numbers of a step, summed over the data-parallel ranks; padding is in none of them."""

    loss_tokens: int
    tokens: int
    flops: int


@dataclass(frozen=True)
class StepResult:
    """loss: mean over the step's loss tokens; grad_norm: before clipping."""

    loss: float
    grad_norm: float
    counts: StepCounts


def train_step(
    chunks: Sequence[GLMChunk],
    batches: Sequence[PackedBatch],
    optimizer: torch.optim.Optimizer,
    groups: ParallelGroups,
    config: RunConfig,
    learning_rate: float,
) -> StepResult:
    """Gradients of all micro-batches of this rank, clipped, applied; the router's biases follow.

    Raises:
        FloatingPointError: if the loss or the gradient is not finite; the weights are then as before the step.
    """
    counts = count(batches, groups, config)
    loss_sum = torch.zeros((), dtype=torch.float64, device=current_device())
    for i, batch in enumerate(batches):
        for chunk in chunks:
            set_gradient_sync(chunk, i == len(batches) - 1 or config.parallel.grad_sync == "every")
            for layer_id in set(map(int, chunk.layers)) - set(chunk.layer_ids):
                # A layer that never runs has nothing to accumulate, and FSDP2 fails if it is told to.
                chunk.layers[str(layer_id)].set_requires_gradient_sync(True)
        loss = forward(chunks, batch, groups, config)
        (loss / max(counts.loss_tokens, 1)).backward()
        loss_sum += loss.detach()
    reduce_partial_gradients(chunks)
    mean_loss = sum_losses(loss_sum, groups) / max(counts.loss_tokens, 1)
    grad_norm = gradient_norm(chunks, groups.world)
    if not torch.isfinite(torch.tensor([mean_loss, grad_norm])).all():
        raise FloatingPointError(f"lm loss is {mean_loss} and grad norm {grad_norm}: the step is not taken")
    if config.optimizer.clip_grad > 0:
        clip_gradients(chunks, grad_norm, config.optimizer.clip_grad)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step()
    optimizer.zero_grad()
    routers = [router for chunk in chunks for router in chunk.routers()]
    update_router_biases(routers, config.optimizer.moe_router_bias_update_rate)
    return StepResult(mean_loss, grad_norm, counts)


def forward(chunks: Sequence[GLMChunk], batch: PackedBatch, groups: ParallelGroups, config: RunConfig) -> Tensor:
    """Sum of the token losses of a micro-batch on this rank: fp32 scalar."""
    device = current_device()
    plan = AttentionPlan.build(
        config.model,
        batch.doc_lengths,
        len(batch.tokens),
        cp_rank=groups.cp.rank(),
        cp_size=groups.cp.size(),
        tp_rank=groups.tp.rank(),
        tp_size=groups.tp.size(),
        dense_rows=config.kernels.dense_rows,
        device=device,
    )
    labels = batch.labels.masked_fill(~batch.loss_mask, IGNORE).to(device)
    hidden, topk, loss = batch.tokens.to(device), None, None
    for chunk in chunks:
        hidden, topk, loss = chunk(hidden, plan, topk, labels)
    return loss


def count(batches: Sequence[PackedBatch], groups: ParallelGroups, config: RunConfig) -> StepCounts:
    """Counts of the whole step: one all-reduce of host integers."""
    lengths = [length for batch in batches for length in batch.doc_lengths]
    mine = [sum(batch.loss_tokens for batch in batches), sum(lengths), training_flops(config.model, lengths)]
    totals = torch.tensor(mine, dtype=torch.int64)
    dist.all_reduce(totals, group=groups.gloo_world)
    totals //= groups.world.size() // groups.dp.size()  # the other ranks of a replica count the same batches
    return StepCounts(*totals.tolist())


def sum_losses(loss_sum: Tensor, groups: ParallelGroups) -> float:
    """Loss sum of all ranks, each token once; a loss is the same on all tensor-parallel ranks."""
    total = loss_sum / groups.tp.size()
    dist.all_reduce(total, group=groups.world)
    return total.item()
