"""Work on the chunks of an input in several processes, with the results in the order of the input."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

Chunk = TypeVar("Chunk")
Tag = TypeVar("Tag")
Result = TypeVar("Result")

AHEAD = 4  # chunks a worker that are read before their turn, so that no worker waits for the reader

_work: Callable  # of a worker


def in_order(
    work: Callable[[Chunk], Result], chunks: Iterable[tuple[Tag, Chunk]], workers: int
) -> Iterator[tuple[Tag, Result]]:
    """Yields (tag, work(chunk)) for each (tag, chunk), in order, reading at most AHEAD x workers chunks ahead.

    `work` is pickled once for each worker. A worker is a fresh Python process that imports the module of `work` and the
    main script, so neither may import torch at its top (0.4 GB a process). With one worker all happens here.

    Raises:
        the exception of the first chunk that has one, whichever worker was first in time.
        OSError: if a worker is killed.
    """
    if workers == 1:
        yield from ((tag, work(chunk)) for tag, chunk in chunks)
        return
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start, (work,))
    pending: deque[tuple[Tag, Future]] = deque()
    try:
        for tag, chunk in chunks:
            pending.append((tag, pool.submit(_run, chunk)))
            if len(pending) == AHEAD * workers:
                yield _first(pending)
        while pending:
            yield _first(pending)
    except BrokenProcessPool as error:
        raise OSError(f"one of {workers} workers died, maybe for want of memory: fewer need less of it") from error
    finally:
        pool.shutdown(cancel_futures=True)


def _first(pending: deque) -> tuple:
    tag, future = pending.popleft()
    return tag, future.result()


def _start(work: Callable) -> None:
    global _work
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism: each computes in one thread
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()  # nobody is left behind
    _work = work


def _run(chunk: Chunk) -> Result:
    return _work(chunk)
