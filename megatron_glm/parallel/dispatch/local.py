"""The interface of all dispatchers, and the one for experts that all live on this rank."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_glm.ops.fp8 import ROW
from megatron_glm.ops.permute import RowMap, permute, unpermute
from megatron_glm.parallel.groups import ParallelGroups


@dataclass(frozen=True)
class DispatchContext:
    """What a dispatcher between ranks is built from.

    groups: a constructor may ask them for sizes and ranks, and not communicate: a plan has no processes;
    most_tokens: t/TP, what one micro-batch gives this rank; dtype: of the rows;
    row_multiple: of which every expert gets rows, see `RowMap`; fp8: rows go to their experts in FP8, see `Hop`.
    """

    groups: ParallelGroups
    n_experts: int  # E, of the whole model
    top_k: int  # K, experts of a token
    hidden_size: int  # D
    most_tokens: int
    dtype: torch.dtype
    row_multiple: int = 1
    fp8: bool = False
    communication_sms: int = 0  # multiprocessors that products leave free; 0: the dispatcher takes what it likes

    @property
    def n_local(self) -> int:
        """Experts of one rank."""
        return self.n_experts // self.groups.ep.size()

    @property
    def row_bytes(self) -> int:
        """Bytes of a token's hidden state."""
        return self.hidden_size * self.dtype.itemsize

    @property
    def round_trip(self) -> int:
        """Bytes of a token that goes to a rank, with its fp32 weights and ids, and of the output that comes back."""
        there = self.hidden_size + 4 * math.ceil(self.hidden_size / ROW[1]) if self.fp8 else self.row_bytes
        return there + self.row_bytes + 8 * self.top_k

    def copies(self, parts: int) -> float:
        """To how many of `parts` equal parts of the experts a token goes on average, if routing is uniform."""
        rest = self.n_experts - self.n_experts // parts
        return parts * (1 - math.comb(rest, self.top_k) / math.comb(self.n_experts, self.top_k))

    def rows_sent(self) -> dict[str, float]:
        """Tokens that a rank sends in one layer's dispatch, by group (a name of `GROUP_AXES`), if routing is uniform.

        Where nodes are known a token crosses to each node once, then goes on inside it.
        """
        ep, inter, node = self.groups.ep.size(), self.groups.ep_inter, self.groups.ep_node
        if inter is None or node is None or inter.size() == 1:
            return {"ep": self.most_tokens * self.copies(ep) * (ep - 1) / ep}
        nodes, size = inter.size(), node.size()
        across = self.most_tokens * self.copies(nodes) * (nodes - 1) / nodes
        inside = self.most_tokens * self.copies(ep) * (size - 1) / size
        return {"ep_inter": across} | ({"ep_node": inside} if inside else {})


class Dispatcher:
    """Moves tokens to the ranks of their experts, and the sum of the experts' outputs back.

    One object, built with a `DispatchContext`, serves all layers of a rank for the whole run: buffers that it keeps are
    shared. It allocates them in its first `dispatch`, because a plan builds it without a GPU.

    Rank i of the expert group owns experts [i * n_local, (i + 1) * n_local). The routing weight goes with the row: the
    expert multiplies its gated product by it, before the down projection (`ops.experts.grouped_mlp`), which is
    transformers' product after it up to rounding.
    """

    context: DispatchContext  # of those between ranks

    def in_own_dtype(self) -> Dispatcher:
        """The same for layers without products in FP8, whose rows travel as they are."""
        other = copy.copy(self)
        other.context = replace(self.context, fp8=False)
        return other

    def dispatch(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor, Any]:
        """x [t, D], expert_ids [t, K] int64 (global; -1 = none), weights [t, K] fp32 ->
        (rows, row_weights, counts, handle).

        rows [n, D]: a copy of its token for each slot whose expert is local, grouped by expert ascending, then in
        order of arrival; row_weights [n] fp32: the slots' weights, differentiable too (a -1 id's weight has gradient
        zero); counts [n_local] int64 on x's device. Rows past counts.sum() are tail: undefined, never read back. Where
        counts are multiples of a number, an expert's last rows may be zero, with weight zero, and no token's.
        """
        raise NotImplementedError

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        """Expert outputs [n, D] in the order of `dispatch` -> [t, D], the sum of each token's rows.

        A rank's share of the sum runs in slot order in fp32 and is rounded once to the rows' type, in which shares
        travel. They are added in fp32 too, but by the reduce-scatter of allgather, which adds in the rows' type.
        """
        raise NotImplementedError

    def traffic(self) -> dict[str, float]:
        """Bytes that a rank sends in one layer's forward, by group (a name of `GROUP_AXES`), if routing is uniform."""
        raise NotImplementedError

    def buffer_bytes(self) -> int:
        """Bytes of this rank's buffers for the rows of one layer, those sent and those received."""
        raise NotImplementedError


class LocalDispatcher(Dispatcher):
    """All experts are here. It never waits for the device: n = t * K, so that -1 ids leave a tail.

    row_multiple: of which every expert gets rows, see `RowMap`.
    """

    def __init__(self, n_local: int, row_multiple: int = 1) -> None:
        self.n_local, self.row_multiple = n_local, row_multiple

    def dispatch(
        self, x: Tensor, expert_ids: Tensor, weights: Tensor, n: int | None = None
    ) -> tuple[Tensor, Tensor, Tensor, RowMap]:
        """n: the number of ids that are not -1, from a caller that knows it; see `RowMap.head`."""
        rows = RowMap.build(expert_ids, self.n_local, self.row_multiple)
        if n is not None:
            rows = rows.head(n)
        return *permute(x, weights, rows), rows.counts, rows

    def combine(self, rows: Tensor, handle: RowMap) -> Tensor:
        return unpermute(rows, handle)

    def traffic(self) -> dict[str, float]:
        return {}

    def buffer_bytes(self) -> int:
        return 0
