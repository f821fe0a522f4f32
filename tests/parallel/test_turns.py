"""Work of one rank a node: who does it, how long the others wait, and whose error all raise."""

from __future__ import annotations

import socket
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from megatron_glm.launch import is_shown_elsewhere
from megatron_glm.training import turns
from tests.helpers.distributed import run


def on_two_nodes() -> list:
    """What a rank of four, two a node, sees; the work takes longer than a collective of the group may."""
    rank = dist.get_rank()
    socket.gethostname = lambda: f"node{rank // 2}"
    turns.WAIT_SECONDS = 1
    said: list[str] = []
    turns.log = said.append  # which the first rank alone shows
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=2))
    once = turns.once_per_node(group)
    done, seen = [], []

    def work() -> str:
        done.append(rank)
        time.sleep(3 * (rank == 2))
        return f"by rank {rank}"

    def fail() -> None:
        if rank == 2:
            raise ValueError("row 7 is bad")

    seen.append(once(work))
    with pytest.raises(ValueError, match="row 7 is bad") as caught:
        once(fail)
    return [*seen, done, is_shown_elsewhere(caught.value), once(lambda: None), said]


def test_one_rank_of_each_node_works_while_the_others_wait():
    found = run(4, on_two_nodes)
    assert [result for result, *_ in found] == ["by rank 0"] * 2 + ["by rank 2"] * 2
    assert [done for _, done, *_ in found] == [[0], [], [2], []]
    assert [told for _, _, told, *_ in found] == [True, True, False, True]
    assert any("waiting for rank 2 on node1" in line for line in found[0][-1])
