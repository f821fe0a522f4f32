"""The interface of all dispatchers, and the one for experts that all live on this rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron_glm.parallel.dispatch.permute import RowMap, permute, unpermute


class Dispatcher:
    """Moves tokens to the ranks of their experts, and the weighted sum of the experts' outputs back.

    Rank i of the expert group owns experts [i * n_local, (i + 1) * n_local).
    """

    def dispatch(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Any]:
        """x [t, D], expert_ids [t, K] int64 (global; -1 = none), weights [t, K] fp32 -> (rows, counts, handle).

        rows [n, D]: a copy of its token for each slot whose expert is local, grouped by expert ascending, then in
        order of arrival; counts [n_local] int64 on x's device. Rows past counts.sum() are tail, never read back.
        """
        raise NotImplementedError

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        """Expert outputs [n, D] in the order of `dispatch` -> [t, D], y_t = sum_k weights_tk * expert_tk(x_t).

        A rank's share of the sum runs in slot order in fp32 and is rounded once to the rows' type, in which shares
        travel. They are added in fp32 too, but by the reduce-scatter of allgather, which adds in the rows' type.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class LocalHandle:
    rows: RowMap
    weights: Tensor  # [t, K] fp32


class LocalDispatcher(Dispatcher):
    """All experts are here. It never waits for the device: n = t * K, so that -1 ids leave a tail."""

    def __init__(self, n_local: int) -> None:
        self.n_local = n_local

    def dispatch(
        self, x: Tensor, expert_ids: Tensor, weights: Tensor, n: int | None = None
    ) -> tuple[Tensor, Tensor, LocalHandle]:
        """n: the number of ids that are not -1, from a caller that knows it; there is no tail then."""
        rows = RowMap.build(expert_ids, self.n_local)
        if n is not None:
            rows = rows.head(n)
        return permute(x, rows), rows.counts, LocalHandle(rows, weights)

    def combine(self, rows: Tensor, handle: LocalHandle) -> Tensor:
        return unpermute(rows, handle.weights, handle.rows)
