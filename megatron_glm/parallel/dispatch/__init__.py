"""Expert dispatchers behind one interface (`--moe-token-dispatcher-type`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_glm.parallel.dispatch.allgather import AllGatherDispatcher
from megatron_glm.parallel.dispatch.alltoall import AllToAllDispatcher
from megatron_glm.parallel.dispatch.hybrid import HybridDispatcher
from megatron_glm.parallel.dispatch.local import Dispatcher, LocalDispatcher

if TYPE_CHECKING:
    from megatron_glm.parallel.groups import ParallelGroups

__all__ = ["Dispatcher", "make_dispatcher"]

NAMES = ("allgather", "alltoall", "hybrid")


def make_dispatcher(
    name: str, n_experts: int, groups: ParallelGroups, expert_node_size: int | None = None
) -> Dispatcher:
    """The dispatcher `name` for n_experts over `groups.ep`; a group of one rank needs no transport.

    Raises ValueError for an unknown name, experts that do not divide, or node groups that are not expert_node_size.
    """
    ranks = groups.ep.size()
    if name not in NAMES:
        raise ValueError(f"--moe-token-dispatcher-type is {name!r}, but must be one of {', '.join(NAMES)}")
    if n_experts % ranks:
        raise ValueError(f"{n_experts} experts do not divide by --expert-model-parallel-size {ranks}")
    if ranks == 1:
        return LocalDispatcher(n_experts)
    if name == "allgather":
        return AllGatherDispatcher(n_experts // ranks, groups.ep)
    if name == "alltoall":
        return AllToAllDispatcher(n_experts // ranks, groups.ep)
    node = groups.ep_node and groups.ep_node.size()
    if groups.ep_node is None or groups.ep_inter is None or node != expert_node_size:
        raise ValueError(f"--expert-node-size is {expert_node_size}, but the process groups have nodes of {node} ranks")
    return HybridDispatcher(n_experts // ranks, groups.ep, groups.ep_inter, groups.ep_node)
