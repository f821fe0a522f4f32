"""What the first run of a recomputed layer keeps, so that the recomputation takes it instead of computing it again.

The layer's code marks what may be kept; `model/recompute.py` decides which of it is. Without recomputation a mark does
nothing. What is kept must not be changed in place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from megatron_glm.torch_private import private

tree_leaves, tree_map_only, without_key, view_key, _ = private(
    __name__,
    "torch.utils._pytree.tree_leaves",
    "torch.utils._pytree.tree_map_only",
    "torch._C._SetExcludeDispatchKeyGuard",
    "torch._C.DispatchKey.ADInplaceOrView",
    "torch.Tensor._version",
)


class RecomputeCache:
    """The kept results of one layer, in the order in which the forward and the recomputation need them.

    Args:
        products: keep products, too, not only decisions.
    """

    def __init__(self, products: bool) -> None:
        self.products, self.second = products, False
        self.results: deque[tuple[Any, list[int]]] = deque()

    @contextmanager
    def running(self, second: bool) -> Iterator[None]:
        """The layer runs: for the first time, or again."""
        self.second = second
        token = _kept.set(self)
        try:
            yield
        finally:
            _kept.reset(token)

    def take(self, compute: Callable[[], Any]) -> Any:
        if not self.second:
            result = compute()
            alias = tree_map_only(Tensor, _alias, result)  # the result itself becomes part of the graph
            self.results.append((alias, _versions(alias)))
            return result
        result, versions = self.results.popleft()
        if _versions(result) != versions:
            raise RuntimeError("a result that recomputation keeps was changed in place after the forward")
        return result


_kept: ContextVar[RecomputeCache | None] = ContextVar("kept", default=None)


def _alias(tensor: Tensor) -> Tensor:
    """Another handle of the same memory, outside any graph, with the same counter of changes in place."""
    with without_key(view_key, False):  # off in a dispatch mode
        return tensor.detach()


def _versions(result: Any) -> list[int]:
    return [leaf._version for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]


def keep_choice(compute: Callable[[], Any]) -> Any:
    """Runs `compute`, outside autograd, in the first forward, and returns the stored result in the recomputation.

    Rounding could make a second top-k pick other keys.
    """
    kept = _kept.get()
    return compute() if kept is None else kept.take(compute)


def keep_product(compute: Callable[[], Any]) -> Any:
    """The same for a result that is expensive to compute and small to keep: selective recomputation keeps it.

    It must be no view, which would hold on to a weight that FSDP has gathered.
    """
    kept = _kept.get()
    return compute() if kept is None or not kept.products else kept.take(compute)
