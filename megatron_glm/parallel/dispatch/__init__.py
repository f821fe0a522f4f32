"""Expert dispatchers behind one interface (`--moe-token-dispatcher-type`)."""

from __future__ import annotations

from megatron_glm.parallel.dispatch.local import Dispatcher, LocalDispatcher

__all__ = ["Dispatcher", "LocalDispatcher", "make_dispatcher"]

NAMES = ("allgather", "alltoall", "hybrid", "hybridep")


def make_dispatcher(name: str, n_experts: int, groups, expert_node_size: int | None = None) -> Dispatcher:
    """The dispatcher `name` for n_experts over `groups.ep`; a group of one rank needs no transport."""
    if name not in NAMES:
        raise ValueError(f"--moe-token-dispatcher-type is {name!r}, but must be one of {', '.join(NAMES)}")
    if groups.ep.size() == 1:
        return LocalDispatcher(n_experts)
    raise ValueError(f"--moe-token-dispatcher-type {name} with {groups.ep.size()} expert ranks is not there yet")
