"""One uneven all-to-all over the expert group."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from megatron_glm.ops.permute import RowMap
from megatron_glm.parallel.collectives import gather_values
from megatron_glm.parallel.dispatch.hop import Hop, count, once, spread, sum_back, within
from megatron_glm.parallel.dispatch.local import DispatchContext, Dispatcher, LocalDispatcher


class AllToAllDispatcher(Dispatcher):
    """A token goes once to each rank that owns some of its experts; the sum of that rank's shares comes back."""

    def __init__(self, context: DispatchContext) -> None:
        self.context, self.ep, self.n_local = context, context.groups.ep, context.n_local
        self.local = LocalDispatcher(self.n_local, context.row_multiple)
        self.bytes_sent: Counter[str] = Counter()  # bytes that left this rank, both directions and both passes

    def dispatch(
        self, x: Tensor, expert_ids: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, tuple[Hop, RowMap]]:
        rank, size = self.ep.rank(), self.ep.size()
        owner = expert_ids // self.n_local
        rows = RowMap.build(once(owner), size)
        # Sent tokens and sent slots of every pair of ranks: the only wait for the device.
        tokens, slots = gather_values(torch.stack([rows.counts, count(owner, size)])[None], self.ep).cpu().unbind(1)
        send, receive = tokens[rank].tolist(), tokens[:, rank].tolist()
        hop = Hop(self.ep, rows.head(sum(send)), send, receive, "ep", self.bytes_sent, self.context.fp8)
        x, weights, expert_ids = spread(x, weights, expert_ids, hop)
        expert_ids = within(expert_ids, rank * self.n_local, self.n_local)
        rows, row_weights, counts, handle = self.local.dispatch(x, expert_ids, weights, n=int(slots[:, rank].sum()))
        return rows, row_weights, counts, (hop, handle)

    def combine(self, rows: Tensor, handle: tuple[Hop, RowMap]) -> Tensor:
        hop, local = handle
        return sum_back(self.local.combine(rows, local), hop)

    def traffic(self) -> dict[str, float]:
        return {group: rows * self.context.round_trip for group, rows in self.context.rows_sent().items()}

    def buffer_bytes(self) -> int:
        c = self.context
        return round(2 * c.most_tokens * c.copies(self.ep.size()) * c.row_bytes)
