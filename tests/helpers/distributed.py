"""Runs a function on several gloo ranks of this machine, each in a process of its own.

    results = run(8, function, arg, ...)    # function(arg, ...) on every rank; results[r] is what rank r returned

The function and its arguments are pickled: a function of a module (not nested), which every rank imports. It finds the
default process group initialised and runs with one thread. Imports that take seconds belong inside the functions that
need them. Loop over many cases in one call where cases share a world size.

Processes are forked from a server that has imported torch and has done nothing else (a fork of the test process would
inherit its threads and locks): 8 ranks start in 0.4 s, where 8 new interpreters take 15 s on two cores.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from multiprocessing import connection
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PRELOAD = ["pytest", "torch.distributed.fsdp", "torch.distributed.checkpoint", "tests.helpers.distributed"]


def run(world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
    """What `function(*args)` returned on each rank.

    Raises RuntimeError with the traceback of the rank that failed first, or TimeoutError with the stacks of the ranks
    that had not returned after `timeout` seconds. No process outlives the call.
    """
    job = pickle.dumps((function, args))
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryDirectory() as folder:
        processes, pipes = [], []
        try:
            for rank in range(world_size):
                receiver, sender = _server().Pipe(duplex=False)
                process = _server().Process(target=_work, args=(rank, world_size, folder, job, sender), daemon=True)
                process.start()
                sender.close()
                processes.append(process)
                pipes.append(receiver)
            return _collect(processes, pipes, deadline, folder)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()


@cache
def _server() -> BaseContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def close_groups(groups: Any) -> None:
    """End the process groups in a `ParallelGroups`. A case that made some calls it when it is done: each group has
    threads that poll a hundred times a second, and those of dozens of cases starve two cores."""
    fields = [value if isinstance(value, tuple) else (value,) for value in vars(groups).values()]
    made = {group for field in fields for group in field} - {None, dist.group.WORLD}
    # In the order in which they were made: NCCL waits for the other ranks of a communicator, which end theirs so, too.
    for group in sorted(made, key=lambda group: int(group.group_name)):
        dist.destroy_process_group(group)


def _stack_file(folder: str, rank: int) -> Path:
    return Path(folder, f"stack{rank}")


def _work(rank: int, world_size: int, folder: str, job: bytes, sender: connection.Connection) -> None:
    """One rank: sends (time, value, traceback or None) and keeps its connections open until all have sent."""
    with open(_stack_file(folder, rank), "w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
        try:
            torch.set_num_threads(1)
            # The caller's limit is the one that counts; gloo's own would end in a less telling error.
            store, limit = dist.FileStore(f"{folder}/store", world_size), timedelta(hours=1)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
            function, args = pickle.loads(job)
            report = pickle.dumps((time.monotonic(), function(*args), None))
        except BaseException:  # pytest's outcomes are no Exceptions
            sender.send_bytes(pickle.dumps((time.monotonic(), None, traceback.format_exc())))
            return
        sender.send_bytes(report)
        with contextlib.suppress(RuntimeError):  # another rank's failure, which that rank reports
            dist.barrier()


def _collect(processes: list, pipes: list, deadline: float, folder: str) -> list[Any]:
    reports: dict[int, tuple[float, Any, str | None]] = {}

    def receive(seconds: float) -> bool:
        ready = connection.wait([pipe for r, pipe in enumerate(pipes) if r not in reports], timeout=max(0.0, seconds))
        for rank in map(pipes.index, ready):
            try:
                reports[rank] = pickle.loads(pipes[rank].recv_bytes())
            except EOFError:  # before every error that its end causes elsewhere
                processes[rank].join(1)
                reports[rank] = 0.0, None, f"the process ended with exit code {processes[rank].exitcode}\n"
        return bool(ready)

    while len(reports) < len(pipes):
        if not receive(deadline - time.monotonic()):
            raise TimeoutError(_describe_hang(processes, sorted(set(range(len(pipes))) - set(reports)), folder))
        if any(error for _, _, error in reports.values()):
            time.sleep(0.2)
            receive(0)  # an earlier failure may arrive later
            _, rank, error = min((when, r, error) for r, (when, _, error) in reports.items() if error)
            raise RuntimeError(f"rank {rank} of {len(pipes)} failed:\n{error}")
    return [reports[rank][1] for rank in range(len(pipes))]


def _describe_hang(processes: list, ranks: list[int], folder: str) -> str:
    with contextlib.suppress(ProcessLookupError):
        for rank in ranks:
            os.kill(processes[rank].pid, signal.SIGUSR1)
    time.sleep(0.5)
    files = {r: _stack_file(folder, r) for r in ranks}
    stacks = "\n".join(f"rank {r}: {file.read_text() if file.exists() else 'not started'}" for r, file in files.items())
    return f"ranks {ranks} of {len(processes)} had not returned at the time limit; they are at\n{stacks}"
