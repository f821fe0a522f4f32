"""Two-level all-to-all: between nodes among ranks of equal index, then inside the node."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from megatron_glm.ops.permute import RowMap
from megatron_glm.parallel.collectives import gather_values
from megatron_glm.parallel.dispatch.hop import Hop, count, once, spread, sum_back, within
from megatron_glm.parallel.dispatch.local import DispatchContext, Dispatcher, LocalDispatcher


class HybridDispatcher(Dispatcher):
    """A token crosses to each other node once, to the rank of equal index there, which spreads it inside the node.

    On the way back the node's shares are summed first, so that one row a token and node crosses again. Rank r of the
    expert group is rank r % node.size() of node r // node.size().
    """

    def __init__(self, context: DispatchContext) -> None:
        inter, node = context.groups.ep_inter, context.groups.ep_node
        if inter is None or node is None:
            raise ValueError("--moe-token-dispatcher-type hybrid needs --expert-node-size, which is None")
        self.context, self.ep, self.inter, self.node = context, context.groups.ep, inter, node
        self.n_local, self.local = context.n_local, LocalDispatcher(context.n_local, context.row_multiple)
        self.bytes_sent: Counter[str] = Counter()  # by group; left this rank, both directions and both passes

    def dispatch(
        self, x: Tensor, expert_ids: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, tuple[Hop, Hop, RowMap]]:
        n_node, fp8 = self.n_local * self.node.size(), self.context.fp8
        across = RowMap.build(once(expert_ids // n_node), self.inter.size())
        (send, receive), (send_inside, receive_inside), n = self._splits(expert_ids // self.n_local, across.counts)

        outer = Hop(self.inter, across.head(sum(send)), send, receive, "ep_inter", self.bytes_sent, fp8)
        x, weights, expert_ids = spread(x, weights, expert_ids, outer)
        expert_ids = within(expert_ids, self.inter.rank() * n_node, n_node)

        inside = RowMap.build(once(expert_ids // self.n_local), self.node.size()).head(sum(send_inside))
        inner = Hop(self.node, inside, send_inside, receive_inside, "ep_node", self.bytes_sent, fp8)
        x, weights, expert_ids = spread(x, weights, expert_ids, inner)
        expert_ids = within(expert_ids, self.node.rank() * self.n_local, self.n_local)

        rows, row_weights, counts, handle = self.local.dispatch(x, expert_ids, weights, n)
        return rows, row_weights, counts, (outer, inner, handle)

    def _splits(self, owner: Tensor, crossing: Tensor) -> tuple[tuple, tuple, int]:
        """(send, receive) of both levels and the number of rows here, with one wait for the device.

        owner [t, K]: the rank of each slot; crossing [nodes]: the tokens that go to each node.
        """
        nodes, size, ranks = self.inter.size(), self.node.size(), self.ep.size()
        mine = torch.cat([crossing, count(once(owner), ranks), count(owner, ranks)])
        table = gather_values(mine[None], self.ep).cpu().unflatten(0, (nodes, size))  # [source node, source index, ..]
        crossing, tokens, slots = table.split([nodes, ranks, ranks], dim=-1)
        tokens, slots = tokens.unflatten(-1, (nodes, size)), slots.unflatten(-1, (nodes, size))
        here, index = self.inter.rank(), self.node.rank()
        across = crossing[here, index].tolist(), crossing[:, index, here].tolist()
        # A relay forwards what ranks of its own index sent from every node.
        inside = tokens[:, index, here].sum(0).tolist(), tokens[:, :, here, index].sum(0).tolist()
        return across, inside, int(slots[:, :, here, index].sum())

    def combine(self, rows: Tensor, handle: tuple[Hop, Hop, RowMap]) -> Tensor:
        outer, inner, local = handle
        return sum_back(sum_back(self.local.combine(rows, local), inner), outer)

    def traffic(self) -> dict[str, float]:
        return {group: rows * self.context.round_trip for group, rows in self.context.rows_sent().items()}

    def buffer_bytes(self) -> int:
        c = self.context
        return round(2 * c.most_tokens * c.copies(self.ep.size()) * c.row_bytes)
