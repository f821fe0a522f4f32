"""Work that one process of each node does while all others wait, without a collective and its time limit."""

from __future__ import annotations

import itertools
import json
import socket
import time
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_glm import heartbeat
from megatron_glm.data.cache import WAIT_SECONDS, Once
from megatron_glm.launch import shown_elsewhere
from megatron_glm.torch_private import private
from megatron_glm.training.logging import log

get_default_store = private(__name__, "torch.distributed.distributed_c10d._get_default_store")

_turns = itertools.count()  # equal on all ranks: each turn has keys of its own in the store


def once_per_node(group: ProcessGroup) -> Once:
    """A function that runs work() on the first rank of each node and returns its result on all ranks of that node.

    An error of any node is raised on all ranks, as a ValueError or OSError; those whose text another rank shows are
    `shown_elsewhere`. The ranks wait on torch's store, which has no time limit as a collective has, and the first rank
    says every WAIT_SECONDS for whom.

    Args:
        group: all ranks, over gloo.
    """
    if group.size() == 1:
        return lambda work: work()
    hosts: list[Any] = [None] * group.size()
    dist.all_gather_object(hosts, socket.gethostname(), group=group)
    first_ranks = {host: hosts.index(host) for host in hosts}  # in the order of the ranks
    mine = first_ranks[hosts[group.rank()]]

    def once(work: Any) -> Any:
        store, turn = get_default_store(), next(_turns)
        keys = {rank: f"megatron_glm/turn-{turn}/rank-{rank}" for rank in first_ranks.values()}
        error = None
        if group.rank() == mine:
            outcome: dict[str, Any] = {}
            try:
                with heartbeat.working():
                    outcome["result"] = work()
            except BaseException as caught:
                error, outcome = caught, {"error": str(caught), "of_system": isinstance(caught, OSError)}
                if not isinstance(caught, Exception):  # leaves at once: the others need not wait for ever
                    raise
            finally:
                store.set(keys[mine], json.dumps(outcome))
        _wait(store, keys, {rank: host for host, rank in first_ranks.items()})
        outcomes = {rank: json.loads(store.get(key)) for rank, key in keys.items()}
        failed = [rank for rank, outcome in outcomes.items() if "error" in outcome]
        if failed:
            first = outcomes[failed[0]]
            error = error or (OSError if first["of_system"] else ValueError)(first["error"])
            raise shown_elsewhere(error, group.rank() != failed[0])
        return outcomes[mine]["result"]

    return once


def _wait(store: dist.Store, keys: dict[int, str], hosts: dict[int, str]) -> None:
    """Until all keys are set."""
    last = time.monotonic()
    missing = list(keys)
    while missing := [rank for rank in missing if not store.check([keys[rank]])]:
        if time.monotonic() - last > WAIT_SECONDS:
            last = time.monotonic()
            log(f"waiting for {', '.join(f'rank {rank} on {hosts[rank]}' for rank in missing[:4])} of {len(missing)}")
        time.sleep(0.1)
