"""Sharded checkpoints, in which every tensor is its global self.

    DIR/latest_checkpointed_iteration.txt           written last
    DIR/iter_0000100/{tensors.index, *.distcp}      the tensors
    DIR/iter_0000100/{config.json, state.json}      the model that they are; the scalars of the training run
    DIR/iter_0000100/hf/                            config.json, tokenizer, template … as they came

Parameters and buffers have canonical names, AdamW moments `optimizer.exp_avg.NAME` and `optimizer.exp_avg_sq.NAME`.
Each rank writes rectangles of them and reads other rectangles, so that any layout loads any other. `group` is a gloo
group of all ranks that take part (the training groups stay free), or None for this process alone.

What a crash leaves: `iter_….tmp` is half written (or half removed), is never read and goes at the next start; an
`iter_…` with the mark `.pending` is whole, but its name never reached latest_checkpointed_iteration.txt: it counts as
not saved and is replaced when its turn comes.
"""

from __future__ import annotations

import json
import math
import shutil
import zipfile
import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from .. import heartbeat, launch
from ..config.iterations import ITERATIONS, LATEST_NAME, PENDING, iteration_folder, latest
from ..config.model import ModelConfig
from ..parallel.shard import Rectangle
from . import archives, index, merge
from .chunks import Chunk, ChunkTable, chunks_of, require, span
from .files import (
    UNFINISHED,
    BackgroundSync,
    copy_side_files,
    naming,
    remove_folder,
    staged_folder,
    sync,
    write_durably,
)
from .index import Places
from .merge import Moves

FILE_BYTES = 512 << 20  # one file of a writer is synced while the next is written
CHECKSUM = "crc32"  # in state.json, of all the rest
CHECKED_BYTES = 16 << 20  # a chunk of which a part is read is read whole up to here, so that its checksum shows

T = TypeVar("T")
R = TypeVar("R")


def state_of(folder: Path) -> dict[str, Any]:
    """The scalars that `save` was given, of one `iter_…` folder. Raises ValueError naming a missing or damaged file."""
    file = folder / "state.json"
    try:
        state = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} is missing or damaged: {error}") from error
    if not isinstance(state, dict):
        raise ValueError(f"{file} is damaged: it holds a JSON {type(state).__name__}, not an object")
    if state.pop(CHECKSUM, None) not in (None, _checksum(state)):  # earlier versions wrote none
        raise ValueError(f"{file} is damaged: its checksum does not match")
    return state


def _checksum(state: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(state, sort_keys=True).encode())


def remove_unfinished(folder: Path) -> None:
    """Removes what killed saves left in `folder`; nothing may be saving there."""
    for left in folder.glob("iter_*" + UNFINISHED):
        shutil.rmtree(left)
    for mark in folder.glob(f"{ITERATIONS}/{PENDING}"):
        if int(mark.parent.name.removeprefix("iter_")) <= (latest(folder) or 0):
            mark.unlink()


def remove_old(folder: Path, keep: int, retain: int | None = None) -> None:
    """Removes all but the last `keep` checkpoints up to the latest; a converted one (iteration 0) stays.

    retain: iterations that this divides stay, too.
    Raises: OSError naming the first that could not be removed; the others are.
    """
    iterations = sorted(int(path.name[5:]) for path in folder.glob(ITERATIONS))
    errors = []
    for iteration in [i for i in iterations if 0 < i <= (latest(folder) or 0)][:-keep]:
        if retain is not None and iteration % retain == 0:
            continue
        try:
            remove_folder(iteration_folder(folder, iteration))
        except OSError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def save(
    folder: Path,
    iteration: int,
    rectangles: list[Rectangle],
    state: dict[str, Any],
    config: ModelConfig,
    hf_files: Path | None,
    group: ProcessGroup | None,
) -> None:
    """Writes the checkpoint of one iteration; every rank of `group` calls it with its own rectangles.

    Args:
        state: JSON scalars of the run (data position, optimizer steps …); rank 0's counts.
        hf_files: the `hf/` folder of the checkpoint that this run started from, carried along.
    Raises: ValueError or OSError on every rank if any of them fails; the target then does not exist.
    """
    chunks, exchange = chunks_of(rectangles), None
    target = iteration_folder(folder, iteration)
    staging = target.with_name(target.name + UNFINISHED)
    rank = 0 if group is None else group.rank()
    with ExitStack() as stack:

        def begin(tables: list[ChunkTable]) -> list[Moves] | None:
            ChunkTable.joined(tables).require_whole()
            saved = latest(folder)
            stack.enter_context(staged_folder(target, replace=saved is None or saved < iteration))
            return merge.moves_of_ranks(tables) if len(tables) > 1 else None

        def prepare() -> None:
            nonlocal exchange
            exchange = None if moves is None or group is None else merge.Exchange(chunks, moves, group)

        def write() -> tuple[ChunkTable, Places]:
            mine = chunks if exchange is None else exchange.run()
            written = []
            with BackgroundSync() as background:
                for number, file_chunks in enumerate(split(mine)):
                    file = staging / f"rank{rank:05d}_{number:05d}.distcp"
                    written += write_file(file, file_chunks)
                    background.sync(file)
            return ChunkTable.of([chunk.piece for chunk in mine]), places_of(written)

        def finish(parts: list[tuple[ChunkTable, Places]]) -> None:
            tables, places = zip(*parts, strict=True)
            write_metadata(staging, ChunkTable.joined(tables), Places.joined(places), state, config, hf_files)
            (staging / PENDING).touch()
            stack.close()
            write_durably(folder / LATEST_NAME, str(iteration).encode())
            (target / PENDING).unlink()
            sync(target)

        moves = together(group, lambda: ChunkTable.of([chunk.piece for chunk in chunks]), begin)
        together(group, prepare)
        together(group, write, finish)


class Written(NamedTuple):
    """Where a chunk is: its archive in `file`, and the CRC-32 of its data. JSON can hold it."""

    name: str
    offsets: list[int]
    file: str
    start: int
    length: int
    checksum: int


def write_file(
    file: Path, chunks: list[Chunk], progress: Callable[[int], object] = lambda nbytes: None
) -> list[Written]:
    """Writes the chunks one after the other, without syncing them; `progress` gets the bytes of each."""
    with naming(file), file.open("wb") as stream:
        places = []
        for chunk in chunks:
            places.append(archives.append(stream, chunk.read()))
            progress(chunk.piece.nbytes)
            heartbeat.beat()
    written = []
    with file.open("rb") as stream:
        for chunk, place in zip(chunks, places, strict=True):
            checksum = archives.find(stream, *place).checksum
            start, length = place
            written.append(Written(chunk.piece.name, list(chunk.piece.offsets), file.name, start, length, checksum))
    return written


def places_of(written: list[Written]) -> Places:
    """The same in columns."""
    files: dict[str, int] = {}
    rows = [(files.setdefault(w.file, len(files)), w.start, w.length, w.checksum) for w in written]
    return Places(list(files), *np.array(rows, dtype=np.int64).reshape(-1, 4).T)


def write_metadata(
    folder: Path,
    chunks: ChunkTable,
    places: Places,
    state: dict[str, Any],
    config: ModelConfig,
    hf_files: Path | None,
) -> None:
    """Writes all that makes the data files in `folder` a checkpoint: where each chunk is, and of what.

    Raises: ValueError unless the chunks fill their tensors.
    """
    chunks.require_whole()
    write_durably(folder / index.NAME, index.Index(chunks, places).to_bytes())
    write_durably(folder / "config.json", json.dumps(config.to_hf(), indent=2).encode())
    write_durably(folder / "state.json", json.dumps(state | {CHECKSUM: _checksum(state)}, indent=2).encode())
    if hf_files is not None:
        copy_side_files(hf_files, folder / "hf")


def split(chunks: list[Chunk]) -> list[list[Chunk]]:
    """Consecutive chunks together in files of at most FILE_BYTES, but at least a chunk each."""
    files: list[list[Chunk]] = []
    size = FILE_BYTES
    for chunk in chunks:
        if size + chunk.piece.nbytes > FILE_BYTES:
            files.append([])
            size = 0
        files[-1].append(chunk)
        size += chunk.piece.nbytes
    return files


def load(folder: Path, iteration: int, rectangles: list[Rectangle], group: ProcessGroup | None) -> None:
    """Fills the tensors of `rectangles` (this rank's) in place, converting dtypes; every rank of `group` calls it.

    What is not asked for is not read: without the `optimizer.*` rectangles this is an optimizer-free load.
    Raises: ValueError on every rank if the checkpoint lacks or differs from what any of them asks for.
    """
    together(group, lambda: Reader(iteration_folder(folder, iteration)).read(rectangles))


class Reader:
    """A complete checkpoint folder (`iter_…`). Its chunks are known by their rows in the index.

    shapes: {name: (global shape, dtype)} of everything stored.
    Raises ValueError naming the file that is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.index_file = index.file_of(folder)
        self.index = index.read(self.index_file)
        self.shapes = self.index.tensors
        self._last: tuple[Path | None, Any] = None, b""  # one file, else they could be too many

    def require(self, wanted: dict[str, tuple[int, ...]]) -> None:
        """Raises one ValueError that lists the first tensors which are missing or have another global shape."""
        require(self.shapes, wanted, self.folder)

    def read(self, rectangles: list[Rectangle]) -> None:
        """Fills the tensors of `rectangles` in place, converting dtypes; file by file, whatever their order.

        Raises: ValueError if the checkpoint lacks or differs from them, or a chunk is damaged that is read whole or
            small enough to be.
        """
        self.require({rectangle.name: rectangle.global_shape for rectangle in rectangles})
        found = [(part, r.tensor.detach()) for r in rectangles if r.tensor.numel() for part in self.index.parts(r)]
        file, start, checked = self.index.file, self.index.start, None
        for part, tensor in sorted(found, key=lambda item: (file[item[0].chunk], start[item[0].chunk])):
            heartbeat.beat()
            chunk = self._chunk(part.chunk)
            if part.chunk != checked and (chunk.numel() == math.prod(part.lengths) or chunk.nbytes <= CHECKED_BYTES):
                self._check_data(part.chunk, chunk)
                checked = part.chunk
            tensor[span(part.wanted, part.lengths)].copy_(chunk[span(part.stored, part.lengths)])

    def tensor(self, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """One rectangle in `dtype`: where it lies in one chunk and has that dtype, a view of the mapped file."""
        shape, stored_dtype = self.shapes[name]
        wanted = Rectangle(name, shape, offsets, torch.empty(sizes, dtype=dtype, device="meta"), owner=False)
        parts = self.index.parts(wanted)
        if len(parts) == 1 and stored_dtype == dtype:
            return self._chunk(parts[0].chunk)[span(parts[0].stored, parts[0].lengths)]
        result = torch.empty(sizes, dtype=dtype)
        self.read([replace(wanted, tensor=result)])
        return result

    def check_file(self, chunks: list[int]) -> None:
        """Raises ValueError if the file of these chunks is missing, truncated or another; reads none of the data."""
        for chunk in chunks:
            self._chunk(chunk)

    def check_data(self, chunks: list[int]) -> None:
        """Raises ValueError if a byte of these chunks is not the one saved; reads all of them."""
        for chunk in chunks:
            self._check_data(chunk, self._chunk(chunk))

    def _file(self, chunk: int) -> Path:
        return self.folder / self.index.files[self.index.file[chunk]]

    def _check_data(self, chunk: int, data: torch.Tensor) -> None:
        found, saved = zlib.crc32(data.view(-1).view(torch.uint8).numpy().data), int(self.index.checksum[chunk])
        if found != saved:
            piece = self.index.piece(chunk)
            what = f"{piece.name} at {list(piece.offsets)} has the checksum {found:#x}"
            raise ValueError(f"{self._file(chunk)} is damaged: {what}, saved was {saved:#x}")

    def _chunk(self, chunk: int) -> torch.Tensor:
        """A stored chunk in the mapped file; refuses a file that is missing, truncated, or another under this name."""
        file, piece = self._file(chunk), self.index.piece(chunk)
        start, length = int(self.index.start[chunk]), int(self.index.length[chunk])
        if file != self._last[0]:
            if not file.is_file():
                raise ValueError(f"{file} is missing: it holds {piece.name}")
            self._last = file, archives.mapping(file, 0, 0) if file.stat().st_size else b""
        content: Any = self._last[1]
        if (end := start + length) > len(content):
            raise ValueError(f"{file} is truncated: {piece.name} ends at byte {end}, the file at byte {len(content)}")
        try:
            archive = archives.find(content, start, length)
        except (zipfile.BadZipFile, ValueError, NotImplementedError, OverflowError) as error:
            raise ValueError(f"{file}: cannot read {piece.name}: {error}") from error
        if (archive.nbytes, archive.checksum) != (piece.nbytes, self.index.checksum[chunk]):
            raise ValueError(f"{file} is not the file that was saved: it holds other data as {piece.name}")
        return archives.view(content, archive.start, piece.dtype, piece.sizes)


def on_first_rank(group: ProcessGroup | None, work: Callable[[], None]) -> None:
    """Runs `work` on rank 0 while the others wait; an error is raised on all, as `together` does."""
    together(group, lambda: None, lambda _: work())


def together(
    group: ProcessGroup | None,
    local: Callable[[], T],
    combine: Callable[[list[T]], Sequence[R] | None] = lambda _: None,
) -> R | None:
    """Runs `local` on every rank, then `combine` on rank 0 with all results; an error of any is raised on all.

    The error of the first rank that has one is the one to show: on the others it is `shown_elsewhere`. Returns this
    rank's item of the list that `combine` returns, which has one for each rank; None if it returns None.
    """
    if group is None or group.size() == 1:
        given = combine([local()])
        return None if given is None else given[0]
    result: T | None = None
    error: Exception | None = None
    given: Sequence[R] | None = None
    try:
        result = local()
    except Exception as caught:
        error = caught
    outcomes: list[Any] = [None] * group.size()
    failure = None if error is None else (group.rank(), str(error), isinstance(error, OSError))
    dist.gather_object((result, failure), outcomes if group.rank() == 0 else None, group=group, group_dst=0)
    verdict: list[Any] = [None, False]
    if group.rank() == 0:
        failures = [failure for _, failure in outcomes if failure is not None]
        try:
            if not failures:
                given = combine([result for result, _ in outcomes])
        except Exception as caught:
            error = caught
            failures = [(0, str(caught), isinstance(caught, OSError))]
        verdict = [failures[:3], given is not None]
    dist.broadcast_object_list(verdict, group=group, group_src=0)
    if failures := verdict[0]:
        first, _, of_system = failures[0]
        text = "; ".join(f"rank {rank}: {what}" for rank, what, _ in failures)
        error = error or (OSError if of_system else ValueError)(text)
        raise launch.shown_elsewhere(error, group.rank() != first)
    received: list[Any] = [None]
    if verdict[1]:
        dist.scatter_object_list(received, None if given is None else list(given), group=group, group_src=0)
    return received[0]
