"""Collectives over one process group, with their backward.

| function             | forward                                 | backward                       |
|----------------------|-----------------------------------------|--------------------------------|
| gather_rows          | all-gather along dim 0                  | reduce-scatter (sum)           |
| scatter_sum_rows     | reduce-scatter (sum) along dim 0        | all-gather                     |
| gather_pack          | all-gather, then rows into pack order   | inverse order, reduce-scatter  |
| gather_values        | all-gather along dim 0, not differentiable                               |
| sum_over             | all-reduce (sum) in place, not differentiable                            |

All ranks of a group hold the same number of rows. A group of one rank moves nothing.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_glm.ops.linear_map import linear_map

# torch 2.13 renamed both and warns of the old names
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class PackOrder(NamedTuple):
    """A permutation of gathered rows, both ways: int64 [rows] each."""

    gathered: Tensor  # row of the all-gather that stands at each pack position
    pack: Tensor  # pack position of each row of the all-gather


def gather_rows(x: Tensor, group: ProcessGroup) -> Tensor:
    """[n, ...] on every rank -> [size * n, ...], the ranks' rows in rank order."""
    if group.size() == 1:
        return x
    return linear_map(x, partial(_all_gather, group=group), partial(_reduce_scatter, group=group))


def scatter_sum_rows(x: Tensor, group: ProcessGroup) -> Tensor:
    """Partial sums [size * n, ...] on every rank -> this rank's rows [n, ...] of their sum."""
    if group.size() == 1:
        return x
    return linear_map(x, partial(_reduce_scatter, group=group), partial(_all_gather, group=group))


def gather_pack(x: Tensor, group: ProcessGroup, order: PackOrder | None) -> Tensor:
    """[n, ...] on every rank -> [size * n, ...] in pack order.

    Args:
        order: where each row of the pack stands in the plain all-gather; None = the ranks' order is the pack's.
    """
    if order is None:
        return gather_rows(x, group)

    def gather(x: Tensor) -> Tensor:
        return gather_values(x, group).index_select(0, order.gathered)

    def scatter_sum(grad: Tensor) -> Tensor:
        # A permutation is undone by its inverse: no scatter-add, so the gradient is the same in every run.
        return scatter_sum_rows(grad.index_select(0, order.pack), group)

    return linear_map(x, gather, scatter_sum)


def gather_values(x: Tensor, group: ProcessGroup) -> Tensor:
    """All-gather along dim 0 outside autograd (integers, selections)."""
    return x if group.size() == 1 else _all_gather(x, group)


def sum_over(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sum of a tensor over a group, in place, outside autograd."""
    if group.size() > 1:
        dist.all_reduce(x, group=group)
    return x


def _all_gather(x: Tensor, group: ProcessGroup) -> Tensor:
    output = x.new_empty((group.size() * x.shape[0], *x.shape[1:]))
    all_gather_single(output, x.contiguous(), group=group)
    return output


def _reduce_scatter(x: Tensor, group: ProcessGroup) -> Tensor:
    if x.shape[0] % group.size():
        raise ValueError(f"reduce-scatter of {x.shape[0]} rows over {group.size()} ranks: not divisible")
    output = x.new_empty((x.shape[0] // group.size(), *x.shape[1:]))
    reduce_scatter_single(output, x.contiguous(), group=group)
    return output
