"""Weights from (seed, name): every layout starts from the same model."""

from __future__ import annotations

import hashlib

import torch

from megatron_glm.model.glm import GLMChunk
from megatron_glm.parallel.fsdp import local, rectangle
from megatron_glm.parallel.shard import Rectangle

ROWS = 256  # rows that are drawn together; a rank draws only the blocks that it holds a part of


@torch.no_grad()
def initialize_weights(chunk: GLMChunk, seed: int, only: str | None = None) -> None:
    """Fill all parameters and buffers: norms 1, biases 0, matrices normal with std `initializer_range`.

    An adapter's A [r, in] is uniform up to 1 / sqrt(in), its B 0 (as Hugging Face's PEFT draws them).

    only: the part of the model to fill.

    Drawn on the CPU in fp32 and cast, so that the device does not matter and no rounding piles up in the tails.
    """
    std = chunk.config.initializer_range
    for name, tensor in [*chunk.named_parameters(), *chunk.named_buffers()]:
        if only is not None and (name not in chunk.declared or chunk.declared[name].part != only):
            continue
        local(tensor).zero_()  # vocabulary padding and buffers stay zero
        if name.endswith("_scale"):
            tensor.fill_(1.0)  # of experts that are held in FP8
        if name not in chunk.declared:
            continue
        part = rectangle(name, tensor, chunk.shards[name])
        kind = chunk.declared[name].kind
        if kind == "norm":
            part.tensor.fill_(1.0)
        elif kind in ("matrix", "vocabulary", "lora_A") and part.tensor.numel():
            _draw(part, seed, None if kind == "lora_A" else std)


def _draw(part: Rectangle, seed: int, std: float | None) -> None:
    """Fill a rectangle from blocks of the global tensor: an expert each, or ROWS rows.

    std: of the normal distribution; None: uniform up to 1 / sqrt(columns).
    """
    rows = 1 if len(part.global_shape) == 3 else ROWS
    first, last = part.offsets[0], part.offsets[0] + part.tensor.shape[0]
    columns = [slice(o, o + n) for o, n in zip(part.offsets[1:], part.tensor.shape[1:], strict=True)]
    for block in range(first // rows, -(-last // rows)):
        begin, end = block * rows, min((block + 1) * rows, part.global_shape[0])
        drawn = torch.empty(end - begin, *part.global_shape[1:])
        random = _generator(seed, part.name, block)
        if std is None:
            bound = part.global_shape[-1] ** -0.5
            drawn.uniform_(-bound, bound, generator=random)
        else:
            drawn.normal_(0.0, std, generator=random)
        lower, upper = max(begin, first), min(end, last)
        part.tensor[lower - first : upper - first] = drawn[lower - begin : upper - begin, *columns].to(part.tensor)


def _generator(seed: int, name: str, block: int) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{name}/{block}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
