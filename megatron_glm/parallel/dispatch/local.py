"""The interface of all dispatchers, and the one for experts that all live on this rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron_glm.ops.permute import RowMap, permute, unpermute


@dataclass(frozen=True)
class LocalHandle:
    """What `combine` needs: the map from slots to rows and the weights [t, K] fp32."""

    rows: RowMap
    weights: Tensor


class Dispatcher:
    """Moves tokens to the ranks of their experts and the weighted sum of the experts' outputs back.

    Rank i of the expert group owns experts [i * n_local, (i + 1) * n_local).
    """

    def __init__(self, n_local: int) -> None:
        self.n_local = n_local

    def dispatch(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Any]:
        """x [t, D], expert_ids [t, K] int64 (global; -1 = no expert), weights [t, K] fp32 -> (rows, counts, handle).

        rows [n, D]: one for each token of each local expert, grouped by expert ascending, then by source rank and
        token; counts [n_local] int64 on x's device. n may exceed counts.sum(): tail rows, never read back.
        """
        raise NotImplementedError

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        """Expert outputs [n, D] in the order of `dispatch` -> [t, D], y_t = sum_k weight * expert_k(x_t)."""
        raise NotImplementedError


class LocalDispatcher(Dispatcher):
    """All experts are here: a permutation that never waits for the device (n = t * K, so -1 ids leave a tail)."""

    def dispatch(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, LocalHandle]:
        rows = RowMap.build(expert_ids, self.n_local)
        return permute(x, rows), rows.counts, LocalHandle(rows, weights)

    def combine(self, rows: Tensor, handle: LocalHandle) -> Tensor:
        return unpermute(rows, handle.weights, handle.rows)
