"""Ends a run that hangs: says which ranks are behind, and leaves every rank's stack and NCCL's flight recorder.

All ranks add their beats (megatron_glm/heartbeat.py) to one counter in the store. A run hangs when the counter stands
still for --distributed-timeout-minutes: no rank has begun a micro-batch, read or written a tensor, tokenised rows. A
load of hours is no hang as long as one rank reads; a rank that waits in a collective does not count as alive.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import torch.distributed as dist

from megatron_glm import heartbeat
from megatron_glm.parallel.rendezvous import some
from megatron_glm.torch_private import private

c10d = private(__name__, "torch._C._distributed_c10d")

REPORT_WITHIN = 20.0  # seconds for the ranks to say where they are
BACKSTOP = 120.0  # seconds after the limit: this thread itself did not run, as when C code holds Python's lock
STDERR = sys.__stderr__ or sys.stderr  # that of the process: what replaces sys.stderr may have no descriptor
PACKAGE = str(Path(__file__).parents[1])

_running: Watchdog | None = None


def start(store: Any, rank: int, ranks: int, minutes: float, folder: Path) -> None:
    """Watch this process until `stop`. folder: made when the run hangs."""
    global _running
    _running = Watchdog(store, rank, ranks, minutes, folder)
    _running.start()


def stop() -> None:
    global _running
    if _running is not None:
        _running.stopped.set()
        _running.join(5)
        faulthandler.cancel_dump_traceback_later()
        _running = None


def report_folder(log_file: str | None, save: str | None, run: str) -> Path:
    """hang-RUN in the folder of logs: LOGS (of the SLURM jobs), else that of --log-file, else --save, else here."""
    beside = None if log_file is None else str(Path(log_file).parent)
    return Path(os.environ.get("LOGS") or beside or save or ".") / f"hang-{run}"


class Watchdog(threading.Thread):
    def __init__(self, store: Any, rank: int, ranks: int, minutes: float, folder: Path) -> None:
        super().__init__(name="watchdog", daemon=True)
        self.store = dist.PrefixStore("watchdog", store.clone())  # another thread may wait in the connection of `store`
        self.rank, self.ranks, self.folder = rank, ranks, folder
        self.minutes, self.limit = minutes, minutes * 60
        self.interval = min(10.0, self.limit / 20)
        self.main = threading.main_thread().ident
        self.stopped = threading.Event()

    def run(self) -> None:
        sent, last, moved = 0, -1, time.monotonic()
        while not self.stopped.wait(self.interval):
            if self.limit >= 60:
                faulthandler.dump_traceback_later(self.limit + BACKSTOP, exit=True, file=STDERR)
            beats = heartbeat.beats
            try:
                total = self.store.add("beats", beats - sent)
                hangs = self.store.check(["hangs"])
            except RuntimeError:  # rank 0 has ended and the store with it: what is left to watch is this rank
                total, hangs = beats, False
            sent = beats
            if total != last:
                last, moved = total, time.monotonic()
            if hangs or time.monotonic() - moved > self.limit:
                self.end()

    def end(self) -> None:
        """Report and leave the process; the main thread may be anywhere."""
        faulthandler.dump_traceback_later(4 * REPORT_WITHIN, exit=True, file=STDERR)  # if even that hangs
        file = self.folder / f"rank-{self.rank:05d}.txt"
        with suppress(RuntimeError):  # rank 0 has ended, as `verdict` will find
            self.store.set("hangs", "1")
            place = (heartbeat.step, heartbeat.beats - heartbeat.before_step, self.where())
            self.store.set(f"rank{self.rank}", json.dumps(place))
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with file.open("w") as stream:
                self.dump(stream)
            self.dump_nccl()
            where = f"the stacks of every rank: {self.folder}"
        except OSError as error:
            self.dump(STDERR)
            where = f"{file} cannot be written ({error}), the stacks are above"
        try:
            verdict, behind = self.verdict()
        except RuntimeError:
            verdict, behind = f"rank {self.rank} is {_at(heartbeat.step)} ({self.where()}), rank 0 has ended", None
        if self.rank == 0 or behind is None or self.rank in behind:
            limit = f"no rank has moved for {self.minutes:g} minutes (--distributed-timeout-minutes)"
            print(f"error: {limit}: {verdict}; {where}", file=STDERR, flush=True)
        # Together: a rank that leaves ends the collectives of the others, whose errors would hide what this says.
        self._wait(lambda: self.store.add("read", 0) >= self.ranks, 5)
        os._exit(1)

    def dump(self, stream: TextIO) -> None:
        stream.write(f"rank {self.rank} of {self.ranks}, process {os.getpid()}, {_at(heartbeat.step)}\n")
        stream.flush()
        faulthandler.dump_traceback(stream)

    def dump_nccl(self) -> None:
        """What NCCL's communicators did last, for torchfrtrace."""
        recorder = getattr(c10d, "_dump_nccl_trace", None)  # of CUDA builds only
        if recorder is not None and dist.is_initialized() and dist.get_backend() == "nccl":
            (self.folder / f"nccl_trace_rank_{self.rank}").write_bytes(recorder())

    def where(self) -> str:
        """Where the main thread is: its innermost line in this package; in other code if it is in none of ours."""
        innermost: FrameType | None = sys._current_frames().get(self.main or 0)
        frame = innermost
        while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
            frame = frame.f_back
        if (frame := frame or innermost) is None:
            return "its main thread has ended"
        file = frame.f_code.co_filename.removeprefix(f"{PACKAGE}{os.sep}")
        return f"{file}:{frame.f_lineno} in {frame.f_code.co_name}"

    def verdict(self) -> tuple[str, list[int]]:
        """Where all ranks are, in words, and those that are behind; rank 0 collects it, the others wait."""
        if self.rank == 0:
            keys = [f"rank{rank}" for rank in range(self.ranks)]
            self._wait(lambda: all(self.store.check([key]) for key in keys), REPORT_WITHIN)
            found = [json.loads(self.store.get(key)) if self.store.check([key]) else None for key in keys]
            self.store.set("verdict", json.dumps(describe(found)))
        elif not self._wait(lambda: self.store.check(["verdict"]), 2 * REPORT_WITHIN):
            return f"rank {self.rank} is {_at(heartbeat.step)} ({self.where()}), rank 0 does not answer", [self.rank]
        verdict = json.loads(self.store.get("verdict"))
        self.store.add("read", 1)
        text, behind = verdict
        return text, behind

    def _wait(self, done: Callable[[], bool], seconds: float) -> bool:
        end = time.monotonic() + seconds
        try:
            while not (found := done()) and time.monotonic() < end:
                time.sleep(0.1)
            return found
        except RuntimeError:
            return False


def describe(places: list[tuple[int, int, str] | None]) -> tuple[str, list[int]]:
    """Step, beats in it and line of code of every rank (None: no answer) -> in words, and the ranks that are behind."""
    groups: dict[tuple[int, int, str], list[int]] = {}
    for rank, place in enumerate(places):
        if place is not None:
            step, beats, line = place
            groups.setdefault((step, beats, line), []).append(rank)
    ordered = sorted(groups.items(), key=lambda group: (*group[0][:2], len(group[1])))
    texts = [f"{_ranks(ranks)} {_at(step)} ({line})" for (step, _, line), ranks in ordered]
    silent = [rank for rank, place in enumerate(places) if place is None]
    if silent:
        texts.insert(0, f"{'rank' if len(silent) == 1 else 'ranks'} {some(silent)}: no answer (stopped or ended)")
    left = f"; {len(texts) - 8} more places" if len(texts) > 8 else ""
    return "; ".join(texts[:8]) + left, silent + (ordered[0][1] if ordered else [])


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]} is" if len(ranks) == 1 else f"ranks {some(ranks)} are"


def _at(step: int) -> str:
    return f"at step {step}" if step else "before the first step"
