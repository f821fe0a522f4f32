"""Context parallelism: the zigzag split of a pack.

A pack of T rows is cut into 2·CP chunks; rank r holds chunks r and 2·CP-1-r, so that early queries
(few keys) and late ones (many keys) add up to the same work on every rank.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_glm.parallel.collectives import PackOrder, gather_values


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


def with_following(rows: Tensor, count: int, cp: ProcessGroup) -> tuple[Tensor, ...]:
    """Each run of a rank's local rows with the `count` rows that follow it in the pack, zeros behind the pack's end.

    Only the first rows of each chunk are exchanged. Not differentiable.

    Args:
        rows: [t, ...], as `zigzag_ranges` orders them.
    Returns:
        [n + count, ...] of each of these ranges, n rows long.
    """
    end = rows.new_zeros(count, *rows.shape[1:])
    if cp.size() == 1:
        return (torch.cat([rows, end]),)
    runs = rows.chunk(2)
    first = min(count, len(runs[0]))  # of a chunk that is shorter than `count`, all: several of them follow then
    early, late = gather_values(torch.stack([run[:first] for run in runs])[None], cp).unbind(1)  # [CP, first, ...] each
    firsts = torch.cat([*early, *late.flip(0), end])  # in the order of the chunks
    places = cp.rank(), 2 * cp.size() - 1 - cp.rank()
    following = (firsts[(place + 1) * first :][:count] for place in places)
    return tuple(torch.cat(pair) for pair in zip(runs, following, strict=True))
