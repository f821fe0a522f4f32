"""SIGINT, SIGTERM and SIGUSR1 (SLURM's preemption) from a program's first line to its last; imports no torch.

Outside of training a signal ends the program at once: nothing is lost. During training `noted` collects the signals,
and the loop leaves where all ranks agree to. A second SIGINT ends the program at once, wherever it is. One that ends a
rank outside of training ends all of them (`share`).

Python runs a handler between two steps of the main thread only, and that thread may wait in C for minutes, in a
rendezvous for example. So a thread watches as well: it ends the program where the main thread does not.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from megatron_glm.launch import is_first_rank

REQUEUE = 75  # EX_TEMPFAIL: nothing is lost, start the same command again
INTERRUPTED = 130  # as a shell says it: 128 + SIGINT
HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
GRACE = 5.0  # seconds that the main thread has to leave
POLL = 1.0  # seconds between looks at what other ranks have received
KEY = "megatron_glm/signal"  # in the store: the signal that ended the start of some rank

received: list[int] = []  # in this training, or the one that ended the program
_collecting = ""  # what the loop does after the step; empty outside of it: a signal ends the program
_leaving = False  # the main thread was asked to leave
_store: Any = None  # of all ranks
_agreeing = False  # all ranks are in `noted`
_wake = -1  # what the thread reads the other end of


def install(*numbers: int) -> None:
    """Handles these signals (default: all three) from here on. Call it from the main thread, before slow imports."""
    global _wake
    reader, _wake = os.pipe()
    os.set_blocking(_wake, False)
    signal.set_wakeup_fd(_wake, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(reader,), daemon=True).start()
    os.register_at_fork(after_in_child=_forget)
    for number in numbers or HANDLED:
        signal.signal(number, _handle)


def share(store: Any) -> None:
    """A signal that ends one rank outside of training ends all of them: they find it in this `Store`."""
    global _store
    if _wake >= 0:
        _store = store.clone()  # the main thread may wait in the other
        os.write(_wake, b"\0")  # the thread begins to look


def all_train() -> None:
    """All ranks are in `noted`: as long as this one is, they agree in the loop."""
    global _agreeing
    _agreeing = True


@contextmanager
def noted(save: bool, ranks: int = 1) -> Iterator[list[int]]:
    """During training: yields `received`, to be acted on where all `ranks` agree.

    Without `save` there is nothing to do first: SIGTERM and SIGUSR1 act as ever, and SIGINT ends a single process at
    once.
    """
    global _collecting, _agreeing
    numbers = HANDLED if save else (signal.SIGINT,)
    before = {number: signal.getsignal(number) for number in HANDLED}
    received.clear()
    _collecting = "saving" if save else "leaving" if ranks > 1 else ""
    for number in HANDLED:
        signal.signal(number, _handle if number in numbers else signal.SIG_DFL)
    try:
        yield received
    except BaseException:
        received.clear()  # they have done what they can
        raise
    finally:
        _collecting, _agreeing = "", False
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: it was not set from Python


def _handle(number: int, frame: FrameType | None) -> None:
    global _leaving
    received.append(number)
    if _collecting:
        if number == signal.SIGINT and received.count(number) == 1:
            _say(f"interrupted: {_collecting} after this step; again stops at once")
    elif not _leaving:
        _leaving = True
        _say(_farewell(number))
        if _store is not None:
            # The others must see the signal before a connection ends; the first rank, which keeps the store, goes last.
            time.sleep((3 if is_first_rank() else 2) * POLL)
        sys.exit(_code(number))


def _watch(reader: int) -> None:
    """Runs in a thread of its own. For every signal of the process, one byte comes from `reader`: its number."""
    interrupts, ended = 0, False
    while True:
        looks = _store is not None and not ended
        if not select.select([reader], [], [], POLL if looks else None)[0]:
            ended = _look_at_other_ranks()
            continue
        number = os.read(reader, 1)[0]
        if number not in HANDLED:
            continue
        interrupts += number == signal.SIGINT
        if interrupts > 1:
            _say("interrupted again: stopped")
            os._exit(INTERRUPTED)
        if not _collecting:
            ended = True  # what is in the store from now on is this rank's own
            if _store is not None:
                with suppress(RuntimeError):  # the first rank has left, with its store
                    _store.set(KEY, str(number))
            timer = threading.Timer(GRACE, _end, [number])
            timer.daemon = True
            timer.start()


def _farewell(number: int) -> str:
    return "interrupted" if number == signal.SIGINT else f"{signal.Signals(number).name}: nothing is lost, start again"


def _code(number: int) -> int:
    return INTERRUPTED if number == signal.SIGINT else REQUEUE


def _look_at_other_ranks() -> bool:
    """Whether this rank ends, by the signal of another."""
    global _store, _collecting
    try:
        if _agreeing or not _store.check([KEY]):
            return False
        number = int(_store.get(KEY))
    except RuntimeError:  # the first rank has left, with its store
        _store = None
        return False
    _collecting = ""  # a rank that has left will never agree, and no step has been made
    os.kill(os.getpid(), number)
    return True


def _end(number: int) -> None:
    if not (_leaving or _collecting):  # the main thread has been in C all the time
        _say(_farewell(number))
    if _leaving or not _collecting:
        os._exit(_code(number))


def _forget() -> None:
    """In a forked child: its signals are its own."""
    signal.set_wakeup_fd(-1)
    for number in HANDLED:
        if signal.getsignal(number) is _handle:
            signal.signal(number, signal.SIG_DFL)


def _say(message: str) -> None:
    """One line of the first rank. By os.write: a handler may run in the middle of a print."""
    if is_first_rank():
        os.write(2, f"{chr(10) * os.isatty(2)}{message}\n".encode())
