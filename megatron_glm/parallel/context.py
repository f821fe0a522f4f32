"""Context parallelism: the zigzag split of a pack.

A pack of T rows is cut into 2·CP chunks; rank r holds chunks r and 2·CP-1-r, so that early queries
(few keys) and late ones (many keys) add up to the same work on every rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_glm.parallel.collectives import PackOrder


def zigzag_ranges(total: int, rank: int, size: int) -> tuple[tuple[int, int], ...]:
    """Pack row ranges [begin, end) that a context-parallel rank holds, in its local order.

    Raises:
        ValueError: if `total` is not a multiple of 2·size.
    """
    if size == 1:
        return ((0, total),)
    if total % (2 * size):
        raise ValueError(
            f"a pack of {total} tokens does not split over --context-parallel-size {size}: "
            f"micro-batch-size x seq-length must be a multiple of {2 * size}"
        )
    chunk = total // (2 * size)
    mirror = 2 * size - 1 - rank
    return ((rank * chunk, (rank + 1) * chunk), (mirror * chunk, (mirror + 1) * chunk))


def zigzag_rows(total: int, rank: int, size: int) -> Tensor:
    """Pack positions of a rank's local rows: int64 [total / size]."""
    return torch.cat([torch.arange(begin, end) for begin, end in zigzag_ranges(total, rank, size)])


def pack_order(total: int, size: int) -> PackOrder | None:
    """How the rank-ordered all-gather of all shards is put back into pack order; None = it already is."""
    if size == 1:
        return None
    pack = torch.cat([zigzag_rows(total, rank, size) for rank in range(size)])
    return PackOrder(gathered=pack.argsort(), pack=pack)
