"""Signs of life. Work that may take minutes beats as it goes on; the hang watchdog reads what all ranks have done."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

EVERY = 5.0  # seconds between two beats of `working`
BUSY = 0.2  # share of a processor that counts as work: threads that only poll take less than 0.05

beats = 0
step = 0  # the training step that this rank is in; 0 before the first
before_step = 0  # beats when it began


def beat() -> None:
    global beats
    beats += 1


def begin_step(number: int) -> None:
    global step, before_step
    step, before_step = number, beats
    beat()


@contextmanager
def working() -> Iterator[None]:
    """Beats for work that has no loop to beat in, such as hashing a file or shuffling an index: while it computes."""
    done = threading.Event()

    def watch() -> None:
        spent = time.process_time()
        while not done.wait(EVERY):
            before, spent = spent, time.process_time()
            if spent - before > BUSY * EVERY:
                beat()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
