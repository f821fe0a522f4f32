"""Every rank sees every token of the expert group: all-gather there, reduce-scatter back."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_glm.ops.permute import RowMap
from megatron_glm.parallel.collectives import gather_rows, gather_values, scatter_sum_rows
from megatron_glm.parallel.dispatch.hop import count, within
from megatron_glm.parallel.dispatch.local import DispatchContext, Dispatcher, LocalDispatcher


class AllGatherDispatcher(Dispatcher):
    """No routing of rows at all: right for small groups, where most tokens go to most ranks."""

    def __init__(self, context: DispatchContext) -> None:
        self.context, self.ep, self.n_local = context, context.groups.ep, context.n_local
        self.local = LocalDispatcher(self.n_local, context.row_multiple)

    def dispatch(
        self, x: Tensor, expert_ids: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, tuple[int, RowMap]]:
        rank, t = self.ep.rank(), x.shape[0]
        slots = count(expert_ids // self.n_local, self.ep.size())
        # [rank, 1 + rank]: the tokens of each rank, and how many of its slots go to each rank
        table = gather_values(torch.cat([slots.new_tensor([t]), slots])[None], self.ep).cpu()
        padding = int(table[:, 0].max()) - t  # all ranks give the same number of tokens to the collectives
        x, weights = (gather_rows(F.pad(part, (0, 0, 0, padding)), self.ep) for part in (x, weights))
        expert_ids = gather_values(F.pad(expert_ids, (0, 0, 0, padding), value=-1), self.ep)
        expert_ids = within(expert_ids, rank * self.n_local, self.n_local)
        rows, row_weights, counts, handle = self.local.dispatch(x, expert_ids, weights, n=int(table[:, 1 + rank].sum()))
        return rows, row_weights, counts, (t, handle)

    def combine(self, rows: Tensor, handle: tuple[int, RowMap]) -> Tensor:
        t, local = handle
        return scatter_sum_rows(self.local.combine(rows, local), self.ep)[:t]

    def traffic(self) -> dict[str, float]:
        return {"ep": self.context.most_tokens * (self.ep.size() - 1) * self.context.round_trip}

    def buffer_bytes(self) -> int:
        """All tokens of the group, and the sums of this rank's experts for each of them."""
        return 2 * self.context.most_tokens * self.ep.size() * self.context.row_bytes
