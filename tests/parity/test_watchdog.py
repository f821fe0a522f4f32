"""A run that hangs ends by itself: the rank that is behind is named, every stack is on disk; a slow one goes on."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_glm import heartbeat
from megatron_glm.training.watchdog import describe, report_folder

MINUTES = 0.05  # 3 s


def watched(work, folder: str) -> None:
    """Runs in a process of its own, as the watchdog ends it: work(rank) under a watchdog."""
    from megatron_glm.training import watchdog

    rank = dist.get_rank()
    watchdog.start(dist.distributed_c10d._get_default_store(), rank, dist.get_world_size(), MINUTES, Path(folder))
    work(rank)
    watchdog.stop()


def sleeps_in_step_2(rank: int) -> None:
    for step in range(1, 4):
        if rank == 1 and step == 3:
            time.sleep(600)
        heartbeat.begin_step(step)
        dist.all_reduce(torch.zeros(1))


def is_slow_but_alive(rank: int) -> None:
    """One rank works for longer than the limit, and the others wait for it."""
    for _ in range(14 if rank == 1 else 0):
        time.sleep(0.5)
        heartbeat.beat()
    dist.barrier()


def test_work_in_one_call_beats_only_while_it_computes(monkeypatch):
    monkeypatch.setattr(heartbeat, "EVERY", 0.05)
    before = heartbeat.beats
    with heartbeat.working():
        time.sleep(0.4)
    assert heartbeat.beats - before <= 1
    before, end = heartbeat.beats, time.process_time() + 0.5
    with heartbeat.working():
        while time.process_time() < end:
            pass
    assert heartbeat.beats - before >= 2


def ended(tmp_path: Path, work: str, ranks: int = 3) -> list[tuple[int, str]]:
    """Exit code and errors of each rank."""
    code = "import sys; from tests.parity import test_watchdog as t; t.rank_process(*sys.argv[1:])"
    root = Path(__file__).parents[2]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(rank), str(ranks), str(tmp_path), work],
            cwd=root,
            env=os.environ | {"PYTHONPATH": str(root)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    with contextlib.ExitStack() as stack:
        for process in processes:
            stack.callback(process.kill)
        errors = [process.communicate(timeout=120)[1] for process in processes]
    return [(process.returncode, text) for process, text in zip(processes, errors, strict=True)]


def rank_process(rank: str, ranks: str, folder: str, work: str) -> None:
    store = dist.FileStore(f"{folder}/store", int(ranks))
    dist.init_process_group("gloo", store=store, rank=int(rank), world_size=int(ranks))
    watched(globals()[work], f"{folder}/hang")


def test_the_rank_that_sleeps_is_named_and_every_stack_is_there(tmp_path):
    results = ended(tmp_path, "sleeps_in_step_2")
    assert [code for code, _ in results] == [1, 1, 1]
    expected = "error: no rank has moved for 0.05 minutes (--distributed-timeout-minutes): rank 1 is at step 2 ("
    for rank in (0, 1):
        [line] = [line for line in results[rank][1].splitlines() if line.startswith("error")]
        assert line.startswith(expected) and "ranks 0, 2 are at step 3 (" in line and f"{tmp_path}/hang" in line
    assert not [line for line in results[2][1].splitlines() if line.startswith("error")]
    stacks = [(tmp_path / f"hang/rank-{rank:05d}.txt").read_text() for rank in range(3)]
    assert "sleeps_in_step_2" in stacks[1] and "all_reduce" not in stacks[1] and "all_reduce" in stacks[2]
    assert stacks[1].startswith("rank 1 of 3, process ") and ", at step 2\n" in stacks[1]


def test_one_rank_that_works_keeps_all_alive(tmp_path):
    assert [code for code, _ in ended(tmp_path, "is_slow_but_alive", 2)] == [0, 0]
    assert not (tmp_path / "hang").exists()


def test_places_in_words():
    here = (13, 4, "training/step.py:88 in count")
    text, behind = describe([here, here, None, (12, 9, "data/loader.py:20 in batch"), here])
    assert text == (
        "rank 2: no answer (stopped or ended); rank 3 is at step 12 (data/loader.py:20 in batch); "
        "ranks 0-1, 4 are at step 13 (training/step.py:88 in count)"
    )
    assert behind == [2, 3]
    text, behind = describe([(0, 2, "a"), (0, 1, "b"), (0, 1, "b")])
    assert text == "ranks 1-2 are before the first step (b); rank 0 is before the first step (a)" and behind == [1, 2]
    assert describe([(step, 0, "x") for step in range(20)])[0].endswith("; 12 more places")


def test_the_report_lies_with_the_logs(monkeypatch):
    monkeypatch.delenv("LOGS", raising=False)
    assert report_folder(None, None, "7") == Path("hang-7")
    assert report_folder(None, "run", "7") == Path("run/hang-7")
    assert report_folder("logs/a.jsonl", "run", "7") == Path("logs/hang-7")
    monkeypatch.setenv("LOGS", "there")
    assert report_folder("logs/a.jsonl", "run", "7") == Path("there/hang-7")
