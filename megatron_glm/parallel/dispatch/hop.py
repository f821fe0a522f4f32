"""One all-to-all inside a group: each token goes once to each rank that holds some of its experts, and one sum back."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_glm.ops.fp8 import FP8
from megatron_glm.ops.fp8_casts import cast_rows, uncast_rows
from megatron_glm.ops.linear_map import linear_map
from megatron_glm.ops.permute import RowMap, accumulate, gather


@dataclass(frozen=True)
class Hop:
    """The rows that move between the ranks of `group`.

    rows: map from the slots of this rank's tokens to sent rows, keyed by group rank (each rank at most once a token);
    send, receive: rows to and from each rank; sent: counts, under the group's name, the bytes that leave this rank;
    fp8: rows go `there` in FP8, values and scales in one message, and come out in their own dtype. A product that casts
        them again gets the same bits.
    """

    group: ProcessGroup
    rows: RowMap
    send: list[int]
    receive: list[int]
    name: str
    sent: Counter[str]
    fp8: bool = False

    def rows_there(self, x: Tensor) -> Tensor:
        """`there` for rows [sum(send), D], which may be rounded on the way."""
        if not self.fp8 or self.group.size() == 1:
            return self.there(x)
        values, scales = (part.contiguous().view(torch.uint8) for part in cast_rows(x))
        values, scales = self.there(torch.cat([values, scales], dim=1)).split([x.shape[1], scales.shape[1]], dim=1)
        return uncast_rows(values.clone().view(FP8), scales.clone().view(torch.float32), x.dtype)

    def there(self, x: Tensor) -> Tensor:
        """[sum(send), ...] -> [sum(receive), ...] by source rank. Outside autograd."""
        return self._exchange(x, self.send, self.receive)

    def back(self, x: Tensor) -> Tensor:
        """The reverse of `there`, and its transpose."""
        return self._exchange(x, self.receive, self.send)

    def _exchange(self, x: Tensor, send: list[int], receive: list[int]) -> Tensor:
        if self.group.size() == 1:
            return x
        output = x.new_empty(sum(receive), *x.shape[1:])
        dist.all_to_all_single(output, x.contiguous(), receive, send, group=self.group)
        away = sum(send) - send[self.group.rank()]
        self.sent[self.name] += away * x.shape[1] * x.element_size()
        return output


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weights: Tensor, expert_ids: Tensor, hop: Hop):
        ctx.hop = hop
        # One message for both: fp32 holds every expert id below 2^24.
        slots = torch.cat([weights, expert_ids.to(weights.dtype)], dim=1)
        x, slots = hop.rows_there(gather(x, hop.rows)), hop.there(gather(slots, hop.rows))
        weights, expert_ids = slots.chunk(2, dim=1)
        expert_ids = expert_ids.long()
        ctx.mark_non_differentiable(expert_ids)
        return x, weights.contiguous(), expert_ids

    @staticmethod
    def backward(ctx, grad_x: Tensor, grad_weights: Tensor, _):
        # Both gradients in one node, so that no rank can order the two collectives differently.
        hop = ctx.hop
        return *(accumulate(hop.back(grad), hop.rows) for grad in (grad_x, grad_weights)), None, None


def spread(x: Tensor, weights: Tensor, expert_ids: Tensor, hop: Hop) -> tuple[Tensor, Tensor, Tensor]:
    """x [t, D], weights [t, K] fp32, expert_ids [t, K] -> those of the m = sum(receive) tokens that arrive here."""
    return _Spread.apply(x, weights, expert_ids, hop)


def sum_back(y: Tensor, hop: Hop) -> Tensor:
    """y [m, D], one row for each token that arrived here -> [t, D], the sum over the ranks it was sent to."""
    return linear_map(
        y, lambda y: accumulate(hop.back(y), hop.rows), lambda grad: hop.rows_there(gather(grad, hop.rows))
    )


def once(key: Tensor) -> Tensor:
    """key [t, K] with every repetition within a token replaced by -1."""
    return key.masked_fill((key[:, :, None] == key[:, None, :]).tril(-1).any(-1), -1)


def count(key: Tensor, groups: int) -> Tensor:
    """[groups] int64: how often each of 0 .. groups-1 occurs in key."""
    return (key.flatten() == torch.arange(groups, device=key.device)[:, None]).sum(1)


def within(expert_ids: Tensor, start: int, size: int) -> Tensor:
    """Ids counted from `start`, -1 for those outside [start, start + size)."""
    local = expert_ids - start
    return torch.where((local >= 0) & (local < size), local, -1)
