"""Weights, documents and routing that a run without files takes: random ones, of the shapes of real ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megatron_glm.config import RunConfig
from megatron_glm.data.packing import PackedBatch, Piece, build_batch
from megatron_glm.model import router
from megatron_glm.model.glm import GLMChunk
from megatron_glm.ops.fp8 import FP8
from megatron_glm.parallel.fsdp import local
from megatron_glm.training.initialize import current_device


def balance(experts: int) -> None:
    """Makes every router choose each expert equally often, and all sets of K experts as often as the planner says.

    All experts in random order are dealt out to E // K tokens, in another order to the next ones.
    """

    def select(choice: Tensor, chosen: int, groups: int, kept_groups: int) -> Tensor:
        tokens, hand = len(choice), experts // chosen
        random = torch.Generator(choice.device).manual_seed(0)
        order = torch.rand(-(-tokens // hand), experts, generator=random, device=choice.device).argsort(1)
        return order[:, : hand * chosen].reshape(-1, chosen)[:tokens]

    router.select_experts = select


@torch.no_grad()
def draw(chunk: GLMChunk, seed: int) -> None:
    """Random weights made on the device; those of a training run are made on the host, which takes a minute."""
    random = torch.Generator(current_device()).manual_seed(seed)
    for name, tensor in [*chunk.named_parameters(), *chunk.named_buffers()]:
        part = local(tensor)
        if part.dtype == FP8:
            part.view(torch.uint8).random_(0, 64, generator=random)  # the positive e4m3 numbers below 2
        elif name.endswith("_scale"):
            part.fill_(chunk.config.initializer_range)
        elif part.dim() > 1:
            part.normal_(0.0, chunk.config.initializer_range, generator=random)
        else:
            part.fill_(1 if name.endswith("weight") else 0)


def packs(config: RunConfig, dp_rank: int, count: int, lengths: Sequence[int]) -> list[PackedBatch]:
    """`count` micro-batches of a data rank, whose packs all have documents of these lengths.

    Where a run reads log-probabilities of a reference model, each document has some.
    """
    known = -1.0 if config.preference.reference_logprobs else None
    random = np.random.default_rng((config.train.seed, dp_rank))
    size, found = config.train.micro_batch_size, []
    for _ in range(count):
        texts = [random.integers(0, config.model.vocab_size, length) for length in [*lengths] * size]
        documents = [Piece(ids, np.ones(len(ids), bool), reference=known) for ids in texts]
        found.append(build_batch(documents, size * config.data.seq_length))
    return found
