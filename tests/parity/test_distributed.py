"""The harness of all tests of several ranks: results, and what is said when a rank fails, dies or hangs."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.helpers.distributed import run


def total(value):
    x = torch.full((3,), float(value + dist.get_rank()))
    dist.all_reduce(x)
    return dist.get_rank(), torch.get_num_threads(), x


def misbehave(how):
    if dist.get_rank() == 1:
        if how == "fail":
            raise KeyError("the cause")
        if how == "die":
            os._exit(7)
        time.sleep(1000)
    dist.barrier()


def test_results_come_in_rank_order():
    for rank, (seen, threads, x) in enumerate(run(3, total, 10)):
        assert (seen, threads, x.tolist()) == (rank, 1, [33.0] * 3)


FAILURES = [("fail", "rank 1 of 3 failed(.|\n)*KeyError: 'the cause'"), ("die", "rank 1 of 3 failed.*\n.*exit code 7")]


@pytest.mark.parametrize("how, said", FAILURES)
def test_the_first_failure_is_shown(how, said):
    with pytest.raises(RuntimeError, match=said):
        run(3, misbehave, how)


def test_a_hang_names_the_ranks_and_their_lines():
    with pytest.raises(TimeoutError, match=r"ranks \[0, 1, 2\] of 3(.|\n)*line \d+ in misbehave"):
        run(3, misbehave, "hang", timeout=5)
