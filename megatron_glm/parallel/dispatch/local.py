"""The interface of all dispatchers, and the one for experts that all live on this rank."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megatron_glm.ops.permute import RowMap, permute, unpermute


class Dispatcher:
    """Moves tokens to the ranks of their experts, and the sum of the experts' outputs back.

    Rank i of the expert group owns experts [i * n_local, (i + 1) * n_local). The routing weight goes with the row: the
    expert multiplies its gated product by it, before the down projection (`ops.experts.grouped_mlp`), which is
    transformers' product after it up to rounding.
    """

    def dispatch(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor, Any]:
        """x [t, D], expert_ids [t, K] int64 (global; -1 = none), weights [t, K] fp32 ->
        (rows, row_weights, counts, handle).

        rows [n, D]: a copy of its token for each slot whose expert is local, grouped by expert ascending, then in
        order of arrival; row_weights [n] fp32: the slots' weights, differentiable too (a -1 id's weight has gradient
        zero); counts [n_local] int64 on x's device. Rows past counts.sum() are tail: undefined, never read back.
        """
        raise NotImplementedError

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        """Expert outputs [n, D] in the order of `dispatch` -> [t, D], the sum of each token's rows.

        A rank's share of the sum runs in slot order in fp32 and is rounded once to the rows' type, in which shares
        travel. They are added in fp32 too, but by the reduce-scatter of allgather, which adds in the rows' type.
        """
        raise NotImplementedError


class LocalDispatcher(Dispatcher):
    """All experts are here. It never waits for the device: n = t * K, so that -1 ids leave a tail."""

    def __init__(self, n_local: int) -> None:
        self.n_local = n_local

    def dispatch(
        self, x: Tensor, expert_ids: Tensor, weights: Tensor, n: int | None = None
    ) -> tuple[Tensor, Tensor, Tensor, RowMap]:
        """n: the number of ids that are not -1, from a caller that knows it; there is no tail then."""
        rows = RowMap.build(expert_ids, self.n_local)
        if n is not None:
            rows = rows.head(n)
        return *permute(x, weights, rows), rows.counts, rows

    def combine(self, rows: Tensor, handle: RowMap) -> Tensor:
        return unpermute(rows, handle)
