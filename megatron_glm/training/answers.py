"""What a model says of many packs, in any layout, known to all ranks: the ground of generation and scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_glm.data.packing import PackedBatch, best_fit
from megatron_glm.model.micro_batch import Asks
from megatron_glm.training.engine import Engine


def deal(lengths: Sequence[int], pack_length: int, dp_size: int) -> list[list[int]]:
    """Packs of documents, by their numbers; empty ones fill up what the data ranks run together."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    pack_of = best_fit([lengths[i] for i in order], pack_length)
    count = int(pack_of.max()) + 1
    packs: list[list[int]] = [[] for _ in range(-(-count // dp_size) * dp_size)]
    for i, pack in zip(order, pack_of.tolist(), strict=True):
        packs[pack].append(i)
    return packs


def answers_of(engine: Engine, build: Callable[[int], PackedBatch], packs: int, asks: Asks) -> tuple[Tensor, Tensor]:
    """tokens int64 and log_probs fp32, [packs, T] each, as `model.answers` says them, on the host of every rank.

    Args:
        build: makes a pack of its number; each data rank makes its own. Their number is a multiple of the ranks'.
    """
    groups, length = engine.groups, engine.config.data.seq_length
    mine = range(groups.dp.rank(), packs, groups.dp.size())
    found = engine.ask([build(pack) for pack in mine], asks)
    # The last stage knows them. Each fills its places of what is otherwise zero, and the sum is known to all.
    tokens, log_probs = torch.zeros(packs, length, dtype=torch.int64), torch.zeros(packs, length)
    if groups.tp_cp.rank() == 0:
        for pack, answers in zip(mine, found, strict=True):
            if answers:
                tokens[pack], log_probs[pack] = answers["tokens"].cpu(), answers["log_probs"].cpu()
    dist.all_reduce(tokens, group=groups.gloo_world)
    dist.all_reduce(log_probs, group=groups.gloo_world)
    return tokens, log_probs
