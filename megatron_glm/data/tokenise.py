"""Rows of files to tokenised documents on disk: read here, tokenised by workers, written here in the rows' order."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from .. import heartbeat
from .files import RawRow, count_parquet_rows, file_format, read_rows
from .indexed import IndexedWriter, named_errors, to_disk
from .report import RowReport
from .rows import RowReader, RowSettings
from .workers import in_order

DOCUMENTS, TARGETS, REPORT = "documents", "targets", "report"  # the files of a folder of tokenised documents
CHUNK_ROWS, CHUNK_BYTES = 256, 2**18  # a worker takes rows until either is reached: 50 to 500 ms of work
BYTES_A_WORKER = 2**23  # of input: below, starting another worker takes longer than it saves
MOST_WORKERS = 64  # reading and writing, which one process does, takes about a fiftieth of the work
PROGRESS_SECONDS = 10

Rows = list[tuple[str, RawRow]]  # with the place of each


def read_chunks(path: Path) -> Iterator[tuple[int, Rows]]:
    """(bytes of the file that they take, rows) in the order of the file.

    The bytes are known for plain lines, and Parquet's rows count alike; other files count when they end.
    """
    left, (suffix, compression) = path.stat().st_size, file_format(path)
    row_bytes = left / max(1, count_parquet_rows(path)) if suffix == ".parquet" else 0
    rows, size = [], 0
    for place, raw in read_rows(path):
        rows.append((place, raw))
        size += len(raw) if isinstance(raw, bytes) else row_bytes
        if size >= CHUNK_BYTES or len(rows) == CHUNK_ROWS:
            taken = 0 if compression or suffix == ".arrow" else min(left, int(size))
            left -= taken
            yield taken, rows
            rows, size = [], 0
    yield left, rows


def write_documents(
    folder: Path, files: Sequence[Path], settings: RowSettings, workers: int | None, say: Callable[[str], None]
) -> RowReport:
    """Tokenises all rows of the files into `folder`: documents.bin and .idx, their targets, and the report.

    Args:
        workers: processes; None for one on each core, at most MOST_WORKERS, fewer where the files are small.
        say: takes a line on the progress every PROGRESS_SECONDS.
    Raises:
        ValueError: naming file and row, for the first bad row in the order of the files, unless bad rows are skipped;
            if there is no usable row.
    """
    size = sum(path.stat().st_size for path in files)
    if workers is None:
        workers = max(1, min(len(os.sched_getaffinity(0)), size // BYTES_A_WORKER, MOST_WORKERS))
    chunks = (chunk for path in files for chunk in read_chunks(path))
    report, progress = RowReport(), Progress(size, say)
    targets = folder / TARGETS
    with IndexedWriter(folder / DOCUMENTS, np.int32) as writer, targets.open("wb") as file:
        for done, rows in in_order(RowReader(settings).tokenise, chunks, workers):
            writer.add_bytes(rows.ids.tobytes(), rows.lengths)
            with named_errors(targets):
                file.write(rows.targets.tobytes())
            report.merge(rows.report)
            progress.update(done, len(rows.lengths))
            heartbeat.beat()
        if not writer.tokens:
            why = ": there is nothing in it, name another file"
            if report.skipped:
                why = f"; {report.skipped} bad rows, the first is {report.first_skipped}"
            raise ValueError(f"{' '.join(map(str, files[:3]))} has no usable row{why}")
        with named_errors(targets):
            to_disk(file)
    with (folder / REPORT).open("w", encoding="utf-8") as file, named_errors(folder / REPORT):
        json.dump(dataclasses.asdict(report), file)
        to_disk(file)
    return report


class Progress:
    """Reports every PROGRESS_SECONDS how far the tokenising is, and the time that is left."""

    def __init__(self, size: int, say: Callable[[str], None]):
        self.size, self.say = size, say
        self.done, self.rows = 0, 0
        self.start = self.last = time.monotonic()

    def update(self, done: int, rows: int) -> None:
        """done: bytes of the input, rows: their rows, that were tokenised since the last call."""
        self.done, self.rows, now = self.done + done, self.rows + rows, time.monotonic()
        if now - self.last < PROGRESS_SECONDS or not self.done:
            return
        self.last, seconds = now, now - self.start
        left = max(0, self.size - self.done) * seconds / self.done
        self.say(
            f"tokenised {self.rows:,} rows, {min(1, self.done / max(1, self.size)):.0%} of {self.size / 2**20:,.0f}"
            f" MiB, {self.rows / seconds:,.0f} rows/s, {left // 60:.0f} min {left % 60:.0f} s left"
        )
