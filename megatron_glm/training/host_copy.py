"""The host memory in which --async-save keeps what a rank writes, while training goes on."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroup

from megatron_glm.checkpoint import sharded
from megatron_glm.parallel.shard import Rectangle
from megatron_glm.training.logging import log

ALIGNMENT = 16  # bytes
GIB = 2**30
CGROUP = Path("/sys/fs/cgroup")


class HostCopy:
    """One buffer, allocated and registered with CUDA at the start of a run, that every save uses again.

    Args:
        rectangles: what this rank writes; every `take` gets the same shapes and dtypes.
    Raises: OSError on every rank, naming the node and its sizes, if a node has less memory than its ranks need.
    """

    def __init__(self, rectangles: Sequence[Rectangle], group: ProcessGroup) -> None:
        self.ends = _ends(rectangles)
        sharded.together(group, lambda: (socket.gethostname(), self.nbytes, available()), _require_room)
        sharded.together(group, self._allocate)
        log(f"host memory for --async-save: {self.nbytes / GIB:.2f} GiB on the first rank, allocated")

    @property
    def nbytes(self) -> int:
        return self.ends[-1]

    def _allocate(self) -> None:
        try:
            self.buffer = torch.empty(self.nbytes, dtype=torch.uint8)
            if self.nbytes and torch.cuda.is_available():  # torch's own pinned memory is rounded to a power of two
                runtime: Any = torch.cuda.cudart()
                torch.cuda.check_error(runtime.cudaHostRegister(self.buffer.data_ptr(), self.nbytes, 0))
            self.buffer.zero_()  # the pages exist from here on
        except (RuntimeError, MemoryError) as error:
            size = f"{self.nbytes / GIB:.2f} GiB of host memory, {available() / GIB:.2f} GiB are free"
            raise OSError(f"--async-save cannot have {size} on {socket.gethostname()}: {error}") from error

    def take(self, rectangles: Sequence[Rectangle]) -> list[Rectangle]:
        """The rectangles that this rank owns, with a copy of their data as it is now; the next `take` overwrites it."""
        copies = []
        for r, start in zip((r for r in rectangles if r.owner), self.ends, strict=False):
            place = self.buffer[start : start + r.tensor.nbytes].view(r.tensor.dtype).view(r.tensor.shape)
            copies.append(replace(r, tensor=place.copy_(r.tensor, non_blocking=True)))
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        return copies


def _ends(rectangles: Sequence[Rectangle]) -> list[int]:
    """Where each owned rectangle begins in the buffer, and the size of all."""
    ends = [0]
    for r in rectangles:
        if r.owner:
            ends.append(ends[-1] + -(-r.tensor.nbytes // ALIGNMENT) * ALIGNMENT)
    return ends


def _require_room(ranks: list[tuple[str, int, int]]) -> None:
    """Raises OSError for the first node whose ranks, (node, bytes wanted, bytes available), do not fit in together."""
    wanted, count = Counter(), Counter()
    for node, nbytes, _ in ranks:
        wanted[node] += nbytes
        count[node] += 1
    for node, _, free in ranks:
        if wanted[node] > free:
            raise OSError(
                f"--async-save needs {wanted[node] / GIB:.2f} GiB of host memory on {node} for its {count[node]} "
                f"ranks, {free / GIB:.2f} GiB are free there: leave --async-save out, or put fewer ranks on a node"
            )


def available() -> int:
    """Bytes of host memory that this process and others of its node may still use, page cache counted as free."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) << 10
    own = Path("/proc/self/cgroup").read_text().splitlines()[-1].split(":")[-1].lstrip("/")
    for folder in (CGROUP, CGROUP / own):  # in a container the second is the first; SLURM's limit is in the second
        try:
            limit = (folder / "memory.max").read_text().strip()
            if limit != "max":
                used = int((folder / "memory.current").read_text())
                cache = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                free = min(free, int(limit) - used + int(cache["inactive_file"]))
        except (OSError, KeyError):  # no cgroup of version 2 with a memory controller here: no limit of it
            continue
    return free
