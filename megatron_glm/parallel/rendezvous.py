"""How the processes of one run meet: over a store at rank 0, each rank once, no rank of another run.

    rank 0:   listens at MASTER_ADDR:MASTER_PORT (under torchrun its agent does), writes the run's name, waits for all
    others:   connect, compare the name, write their own rank, wait for rank 0's word

A start that waits says for what, every 30 seconds.
"""

from __future__ import annotations

import json
import math
import os
import resource
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple, NoReturn

import torch.distributed as dist

from megatron_glm.launch import Place, place, shown_elsewhere

SAY_EVERY = 30.0  # seconds between two lines of a start that waits
READ_WITHIN = 10.0  # seconds that rank 0 stays for the others to read why the start is refused
ANSWER_WITHIN = 30.0  # seconds for the store to answer a connection
SPARE_FILES = 512  # descriptors beside connections between ranks: NCCL's sockets, data and checkpoint files


class Meeting(NamedTuple):
    store: dist.Store  # of this run alone
    rank: int
    world_size: int


def meet(timeout: timedelta) -> Meeting:
    """Wait until all ranks of the run are here, each once; a process on its own returns at once.

    Raises:
        ValueError: if the variables of the launcher are incomplete, the port is in use, a process is of another run, or
            two have the same rank. A rank that is here twice ends the start of all.
        OSError: if the others did not come within `timeout`, or rank 0 left before.
    """
    here = place()
    if here is None:
        return Meeting(dist.HashStore(), 0, 1)
    raise_file_limit(here.world_size)
    return Start(here, timeout).meet()


def raise_file_limit(world_size: int) -> None:
    """Raise the soft limit of file descriptors to the hard one. Raises ValueError if that is too low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    hard = 2**20 if hard == resource.RLIM_INFINITY else hard
    if soft == resource.RLIM_INFINITY or soft >= hard:
        hard = soft
    else:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    lazy = os.environ.get("TORCH_GLOO_LAZY_INIT", "1") == "1"
    needed = files_of_start(world_size, 0, eager=not lazy) + SPARE_FILES
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ValueError(
            f"{world_size} ranks need {needed} file descriptors a process, the hard limit here is {hard} (ulimit -Hn): "
            "raise it in limits.conf, or in LimitNOFILE of the service that starts the processes"
        )


def files_of_start(world_size: int, rank: int, eager: bool) -> int:
    """Descriptors of the store and of the two gloo groups of all ranks, as measured on 4 to 16 ranks.

    A gloo group has three of its own. An eager one connects all pairs; a lazy one what its collectives use: rank 0
    gathers from all, any other rank has a ring, a tree and rank 0. Rank 0 also serves the store to all.
    """
    peers = world_size - 1 if eager or rank == 0 else min(world_size - 1, math.ceil(math.log2(world_size)) + 3)
    return 2 * (peers + 3) + (world_size + 1 if rank == 0 else 2)


class Start:
    """How one rank meets the others."""

    def __init__(self, here: Place, timeout: timedelta) -> None:
        self.here, self.timeout = here, timeout
        self.where = f"{here.address}:{here.port}"
        self.deadline = time.monotonic() + timeout.total_seconds()
        # torchrun's agent keeps the store, so that a restarted attempt finds the keys of the one before.
        self.attempt = f"start{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"

    def meet(self) -> Meeting:
        root = self._connect()
        self.store = dist.PrefixStore(self.attempt, root)
        try:
            run = self._agree()
        except dist.DistError as error:
            raise OSError(f"rank 0 has left the start at {self.where}: {str(error).splitlines()[0]}") from error
        return Meeting(dist.PrefixStore(run, root), self.here.rank, self.here.world_size)

    def _connect(self) -> dist.TCPStore:
        here, by_agent = self.here, os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        serves = here.rank == 0 and not by_agent
        if serves:
            self._require_address()
        else:
            self._wait_for_port()
        limit = timedelta(seconds=max(1.0, min(ANSWER_WITHIN, self.deadline - time.monotonic())))
        try:
            if serves:
                store = dist.TCPStore(here.address, here.port, here.world_size, True, limit, wait_for_workers=False)
            else:
                store = _client(here, limit)
        except dist.DistError as error:
            if serves:
                why = "is in use, by another run or a second process with RANK 0" if _in_use(here.port) else str(error)
                raise ValueError(f"port {here.port} of {here.address} {why}: set MASTER_PORT to a free one") from error
            raise ValueError(
                f"what listens at {self.where} does not answer as rank 0 does ({str(error).splitlines()[0]}): "
                "set MASTER_PORT to a free port, the same on all nodes"
            ) from error
        store.set_timeout(self.timeout)
        return store

    def _require_address(self) -> None:
        """Of rank 0, which would try for 30 s and say little."""
        try:
            socket.getaddrinfo(self.here.address, self.here.port)
        except OSError as error:
            raise ValueError(
                f"MASTER_ADDR {self.here.address} is no known host ({error.strerror}): set it to the name or address "
                f"of rank 0's node, which is {socket.gethostname()}"
            ) from error

    def _wait_for_port(self) -> None:
        reason = ""

        def listens() -> bool:
            nonlocal reason
            try:
                socket.create_connection((self.here.address, self.here.port), timeout=5).close()
            except OSError as error:
                reason = error.strerror or str(error)
                return False
            return True

        self._until(
            listens, lambda: f"rank 0 at {self.where} (MASTER_ADDR, MASTER_PORT), which does not answer: {reason}"
        )

    def _agree(self) -> str:
        """Returns the name of the run's own keys."""
        here, store = self.here, self.store
        if here.rank == 0:
            self._take_rank()
            store.set("run", json.dumps([here.run, here.world_size, uuid.uuid4().hex]))
            return self._gather()
        self._until(lambda: store.check(["run"]), lambda: f"rank 0 at {self.where}, which listens but is not ready")
        run, size, key = json.loads(store.get("run"))
        me = f"rank {here.rank} on {socket.gethostname()}"
        if run != here.run:
            raise ValueError(
                f"{me} is of {here.run or 'a run without a name'}, the run that meets at {self.where} is "
                f"{run or 'one without a name'}: set MASTER_PORT to another port for one of them"
            )
        if size != here.world_size:
            self._refuse(f"WORLD_SIZE is {size} on rank 0 at {self.where} and {here.world_size} on {me}")
        self._take_rank()
        self.deadline += READ_WITHIN  # rank 0 gives up first, and says which ranks are missing
        self._until(lambda: store.check(["word"]), lambda: f"the ranks that rank 0 at {self.where} waits for", True)
        fault, late = json.loads(store.get("word"))
        store.add("heard", 1)
        if fault:
            raise shown_elsewhere(OSError(fault) if late else ValueError(fault))  # by rank 0
        return key

    def _take_rank(self) -> None:
        rank, me = self.here.rank, f"process {os.getpid()} on {socket.gethostname()}"
        first = self.store.compare_set(f"rank{rank}", "", me).decode()
        if first != me:
            self._refuse(f"rank {rank} is here twice: {first}, and {me}; every process needs a RANK of its own")
        self.store.add("here", 1)

    def _refuse(self, fault: str) -> NoReturn:
        """End the start of all ranks, if it is not over."""
        self.store.set("fault", fault)
        raise ValueError(fault)

    def _gather(self) -> str:
        """Rank 0: wait for all, then give the word: empty, or why the start is refused."""
        store, size = self.store, self.here.world_size
        fault = ""

        def all_here() -> bool:
            nonlocal fault
            fault = store.get("fault").decode() if store.check(["fault"]) else ""
            return bool(fault) or store.add("here", 0) == size

        def missing() -> str:
            ranks = [rank for rank in range(size) if not store.check([f"rank{rank}"])]
            return f"{len(ranks)} of {size} ranks at {self.where}: {some(ranks)}"

        late = None
        try:
            self._until(all_here, missing)
        except TimeoutError as error:
            fault, late = str(error), error
        store.set("word", json.dumps([fault, late is not None]))
        if fault:
            end = time.monotonic() + READ_WITHIN
            while store.add("heard", 0) < store.add("here", 0) - 1 and time.monotonic() < end:
                time.sleep(0.05)
            raise late or ValueError(fault)
        return json.loads(store.get("run"))[2]

    def _until(self, done: Callable[[], bool], what: Callable[[], str], once_a_node: bool = False) -> None:
        """Wait for `done`, saying `what` is waited for. Raises TimeoutError at the deadline."""
        start, pause = time.monotonic(), 0.02
        said = start
        while not done():
            now = time.monotonic()
            waited = f"rank {self.here.rank} has waited {now - start:.0f} s for"
            if now >= self.deadline:
                raise TimeoutError(f"{waited} {what()}; --distributed-timeout-minutes is over")
            if now - said >= SAY_EVERY:
                said = now
                if not once_a_node or not self.here.local_rank:
                    print(f"{waited} {what()}", file=sys.stderr, flush=True)
            time.sleep(pause)
            pause = min(1.0, 1.5 * pause)


def some(ranks: list[int]) -> str:
    """Ranks in words, at most 16 of them: 0-3, 7, 9 and 12 more."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    shown = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs[:16]]
    left = sum(map(len, runs[16:]))
    return ", ".join(shown) + (f" and {left} more" if left else "")


def _client(here: Place, limit: timedelta) -> dist.TCPStore:
    """Raises DistStoreError if no store answers. torch's own client waits for ever for another service's answer."""
    result: list[dist.TCPStore | Exception] = []

    def connect() -> None:
        try:
            result.append(dist.TCPStore(here.address, here.port, here.world_size, False, limit, wait_for_workers=False))
        except dist.DistError as error:
            result.append(error)

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(limit.total_seconds() + 1)
    [answer] = result or [dist.DistStoreError("no answer")]
    if isinstance(answer, Exception):
        raise answer
    return answer


def _in_use(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return True
    return False
