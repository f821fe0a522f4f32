"""Sharded checkpoints: torch distributed checkpoints in which every tensor is its global self.

    DIR/latest_checkpointed_iteration.txt           written last
    DIR/iter_0000100/{.metadata, *.distcp}          the tensors
    DIR/iter_0000100/{config.json, state.json}      the model that they are; the scalars of the training run
    DIR/iter_0000100/hf/                            config.json, tokenizer, template … as they came

Parameters and buffers have canonical names, AdamW moments `optimizer.exp_avg.NAME` and `optimizer.exp_avg_sq.NAME`.
Each rank writes rectangles of them and reads other rectangles, so that any layout loads any other. `group` is a gloo
group of all ranks that take part (the training groups stay free), or None for this process alone.

What a crash leaves: `iter_….tmp` is half written (or half removed), is never read and goes at the next start; an
`iter_…` above latest_checkpointed_iteration.txt is whole, but counts as not saved and is replaced when its turn comes.
"""

from __future__ import annotations

import json
import operator
import pickle
import re
import shutil
import zipfile
import zlib
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from ..model_config import ModelConfig
from ..parallel.shard import Rectangle
from .files import UNFINISHED, archive_checksum, copy_side_files, remove_folder, staged_folder, write_durably
from .planners import Chunk, ChunkPlanner, RectanglePlanner, StoredChunks, cut

FILE_BYTES = 512 << 20  # torch keeps every tensor of a file until the file is closed: this bounds that of a writer
LATEST_NAME = "latest_checkpointed_iteration.txt"
CHECKSUM_BYTES = 4  # behind the pickle of .metadata, where torch does not look

T = TypeVar("T")


def iteration_folder(folder: Path, iteration: int) -> Path:
    return folder / f"iter_{iteration:07d}"


def latest(folder: Path) -> int | None:
    """The iteration of the last complete checkpoint in `folder`; None without any."""
    file = folder / LATEST_NAME
    if not file.is_file():
        return None
    text = file.read_text().strip()
    if not re.fullmatch(r"\d+", text):
        raise ValueError(f"{file} holds {text!r}, it should hold an iteration number")
    return int(text)


def read_state(folder: Path, iteration: int) -> dict[str, Any]:
    """The scalars that `save` was given. Raises ValueError naming the file if it is missing or damaged."""
    file = iteration_folder(folder, iteration) / "state.json"
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} is missing or damaged: {error}") from error


def remove_unfinished(folder: Path) -> None:
    """Removes what killed saves left in `folder`; nothing may be saving there."""
    for left in folder.glob("iter_*" + UNFINISHED):
        shutil.rmtree(left)


def remove_old(folder: Path, keep: int) -> None:
    """Removes all but the last `keep` checkpoints up to the latest; a converted one (iteration 0) stays."""
    iterations = sorted(int(path.name[5:]) for path in folder.glob("iter_" + "[0-9]" * 7))
    for iteration in [i for i in iterations if 0 < i <= latest(folder)][:-keep]:
        remove_folder(iteration_folder(folder, iteration))


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
    chunks = []
    for rectangle in (r for r in rectangles if r.owner):
        data = rectangle.tensor.detach()
        for offsets, sizes in cut(data.shape, data.dtype.itemsize):
            index = tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
            place = tuple(a + b for a, b in zip(rectangle.offsets, offsets, strict=True))
            read = partial(operator.getitem, data, index)
            chunks.append(Chunk(rectangle.name, rectangle.global_shape, data.dtype, place, sizes, read))
    write_chunks(folder, iteration, chunks, state, config, hf_files, group)


def write_chunks(
    folder: Path,
    iteration: int,
    chunks: list[Chunk],
    state: dict[str, Any],
    config: ModelConfig,
    hf_files: Path | None,
    group: ProcessGroup | None,
    progress: Callable[[int], object] = lambda nbytes: None,
) -> None:
    """`save` for data that is produced chunk by chunk; `progress` gets the bytes of each chunk when its turn comes."""
    target = iteration_folder(folder, iteration)
    rank = 0 if group is None else group.rank()
    planner = ChunkPlanner(chunks, progress)
    # no copy-ahead: it would wait for the training's kernels, and on the first device
    writer = FileSystemWriter(target.with_name(target.name + UNFINISHED), per_thread_copy_ahead=0)
    with ExitStack() as stack:
        metadata = None

        def begin(plans: list[SavePlan]) -> None:
            nonlocal metadata
            metadata = planner.create_global_plan(plans)[1]
            saved = latest(folder)
            stack.enter_context(staged_folder(target, replace=saved is None or saved < iteration))

        def write() -> list[tuple[WriteResult, int]]:
            files = enumerate(split(chunks))
            named = [(f"rank{rank:05d}_{number:05d}_", ChunkPlanner(file, progress)) for number, file in files]
            return [pair for prefix, file in named for pair in write_file(writer, file, prefix)]

        def finish(parts: list[list[tuple[WriteResult, int]]]) -> None:
            write_metadata(writer, metadata, [pair for part in parts for pair in part], state, config, hf_files)
            stack.close()
            write_durably(folder / LATEST_NAME, str(iteration).encode())

        together(group, planner.create_local_plan, begin)
        together(group, write, finish)


def write_metadata(
    writer: FileSystemWriter,
    metadata: Metadata,
    written: list[tuple[WriteResult, int]],
    state: dict[str, Any],
    config: ModelConfig,
    hf_files: Path | None,
) -> None:
    """Writes all that makes the data files in the writer's folder a checkpoint: where each chunk is, and of what."""
    metadata.planner_data = {result.index: checksum for result, checksum in written}
    writer.finish(metadata, [[result for result, _ in written]])
    content = (writer.path / ".metadata").read_bytes()
    checksum = zlib.crc32(content).to_bytes(CHECKSUM_BYTES)
    write_durably(writer.path / ".metadata", content + checksum)
    write_durably(writer.path / "config.json", json.dumps(config.to_hf(), indent=2).encode())
    write_durably(writer.path / "state.json", json.dumps(state, indent=2).encode())
    if hf_files is not None:
        copy_side_files(hf_files, writer.path / "hf")


def split(chunks: list[Chunk]) -> list[list[Chunk]]:
    """Consecutive chunks together in files of at most FILE_BYTES, but at least a chunk each."""
    files: list[list[Chunk]] = []
    size = FILE_BYTES
    for chunk in chunks:
        if size + chunk.nbytes > FILE_BYTES:
            files.append([])
            size = 0
        files[-1].append(chunk)
        size += chunk.nbytes
    return files


def write_file(writer: FileSystemWriter, planner: ChunkPlanner, prefix: str) -> list[tuple[WriteResult, int]]:
    """Writes the planner's chunks as one synced file `PREFIX0.distcp`; returns where each is, and its checksum."""
    plan = SavePlan(planner.create_local_plan().items, storage_data=SimpleNamespace(prefix=prefix))
    results = writer.write_data(plan, planner).wait()
    places = [result.storage_data for result in results]
    with (writer.path / places[0].relative_path).open("rb") as file:
        checksums = [archive_checksum(file, place.offset, place.length) for place in places]
    return list(zip(results, checksums, strict=True))


def load(folder: Path, iteration: int, rectangles: list[Rectangle], group: ProcessGroup | None) -> None:
    """Fills the tensors of `rectangles` (this rank's) in place, converting dtypes; every rank of `group` calls it.

    What is not asked for is not read: without the `optimizer.*` rectangles this is an optimizer-free load.
    Raises: ValueError on every rank if the checkpoint lacks or differs from what any of them asks for.
    """
    together(group, lambda: Reader(iteration_folder(folder, iteration)).read(rectangles))


class Reader:
    """A complete checkpoint folder (`iter_…`).

    shapes: {name: (global shape, dtype)} of everything stored.
    Raises ValueError naming the file that is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._storage = FileSystemReader(folder)
        if not (folder / ".metadata").is_file():
            raise ValueError(f"{folder} is no complete checkpoint: it has no .metadata")
        content = (folder / ".metadata").read_bytes()
        if zlib.crc32(content[:-CHECKSUM_BYTES]) != int.from_bytes(content[-CHECKSUM_BYTES:]):
            raise ValueError(f"{folder / '.metadata'} is damaged: its checksum does not match")
        try:
            self._metadata = self._storage.read_metadata()
        except Exception as error:  # whatever unpickling damaged bytes may raise
            raise ValueError(f"{folder / '.metadata'} is damaged: {error!r}") from error
        self._storage.set_up_storage_reader(self._metadata, is_coordinator=True)
        self._chunks = StoredChunks(self._metadata)
        tensors = self._metadata.state_dict_metadata
        self.shapes = {name: (tuple(tensor.size), tensor.properties.dtype) for name, tensor in tensors.items()}

    def require(self, wanted: dict[str, tuple[int, ...]]) -> None:
        """Raises one ValueError that lists the first tensors which are missing or have another global shape."""
        faults = []
        for name, shape in wanted.items():
            stored = self.shapes[name][0] if name in self.shapes else None
            if stored is None:
                faults.append(f"{name} {list(shape)} is not in the checkpoint")
            elif stored != tuple(shape):
                faults.append(f"{name} is {list(stored)} in the checkpoint, {list(shape)} in the model")
        if faults:
            more = f"; and {len(faults) - 5} more" if len(faults) > 5 else ""
            raise ValueError(f"{self.folder} is of another model: {'; '.join(faults[:5])}{more}")

    def read(self, rectangles: list[Rectangle]) -> None:
        """Fills the tensors of `rectangles` in place, converting dtypes."""
        self.require({rectangle.name: rectangle.global_shape for rectangle in rectangles})
        planner = RectanglePlanner(rectangles, self._chunks)
        by_file: dict[str, list[ReadItem]] = {}
        for item in planner.create_local_plan().items:
            by_file.setdefault(self._metadata.storage_data[item.storage_index].relative_path, []).append(item)
        for file, items in by_file.items():
            self._check_file(self.folder / file, {item.storage_index for item in items})
            try:
                self._storage.read_data(LoadPlan(items), planner)
            except (RuntimeError, ValueError, AssertionError, EOFError, pickle.UnpicklingError) as error:
                raise ValueError(f"{self.folder / file}: cannot read {items[0].storage_index.fqn}: {error}") from error

    def tensor(self, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """One rectangle as a new tensor of `dtype`."""
        result = torch.empty(sizes, dtype=dtype)
        self.read([Rectangle(name, self.shapes[name][0], offsets, result, owner=False)])
        return result

    def files(self) -> dict[str, list[MetadataIndex]]:
        """{file: the stored chunks in it}, in the order of the files' names."""
        found: dict[str, list[MetadataIndex]] = {}
        for index, place in self._metadata.storage_data.items():
            found.setdefault(place.relative_path, []).append(index)
        return dict(sorted(found.items()))

    def check_file(self, file: str, indices: list[MetadataIndex]) -> None:
        """Raises ValueError if a file of `files` is missing, truncated or another one; reads none of the data."""
        self._check_file(self.folder / file, indices)

    def check_data(self, file: str, indices: list[MetadataIndex]) -> None:
        """Raises ValueError if a byte of the chunks in a file of `files` is not the one saved; reads all of them."""
        for index in indices:
            dtype, row = self.shapes[index.fqn][1], index.offset[0]
            near = self._chunks.near(index.fqn, row, row + 1).chunks
            sizes = next(tuple(chunk.sizes) for chunk in near if chunk.offsets == index.offset)
            data = self.tensor(index.fqn, tuple(index.offset), sizes, dtype)
            found, saved = zlib.crc32(data.view(torch.uint8).numpy()), self._metadata.planner_data[index]
            if found != saved:
                what = f"{index.fqn} at {list(index.offset)} has the checksum {found:#x}, saved was {saved:#x}"
                raise ValueError(f"{self.folder / file} is damaged: {what}")

    def _check_file(self, file: Path, indices: Iterable[MetadataIndex]) -> None:
        """Refuses a file that is missing, truncated, or another one under this name; reads none of the data."""
        places = {index: self._metadata.storage_data[index] for index in indices}
        if not file.is_file():
            raise ValueError(f"{file} is missing: it holds {next(iter(places)).fqn}")
        size = file.stat().st_size
        with file.open("rb") as stream:
            for index, place in places.items():
                if (end := place.offset + place.length) > size:
                    raise ValueError(f"{file} is truncated: {index.fqn} ends at byte {end}, the file at byte {size}")
                try:
                    found = archive_checksum(stream, place.offset, place.length)
                except (zipfile.BadZipFile, ValueError) as error:
                    raise ValueError(f"{file}: cannot read {index.fqn}: {error}") from error
                if found != self._metadata.planner_data[index]:
                    raise ValueError(f"{file} is not the file that was saved: it holds other data as {index.fqn}")


def together(
    group: ProcessGroup | None, local: Callable[[], T], combine: Callable[[list[T]], object] = lambda results: None
) -> None:
    """Runs `local` on every rank, then `combine` on rank 0 with all results; an error of any is raised on all."""
    if group is None or group.size() == 1:
        combine([local()])
        return
    result, error = None, None
    try:
        result = local()
    except Exception as caught:
        error = caught
    outcomes = [None] * group.size() if group.rank() == 0 else None
    failure = None if error is None else f"rank {group.rank()}: {error}"
    dist.gather_object((result, failure), outcomes, group=group, group_dst=0)
    verdict = [None]
    if group.rank() == 0:
        failures = [failure for _, failure in outcomes if failure is not None]
        try:
            if not failures:
                combine([result for result, _ in outcomes])
        except Exception as caught:
            error = caught
            failures = [f"rank 0: {caught}"]
        verdict = ["; ".join(failures[:3]) if failures else None]
    dist.broadcast_object_list(verdict, group=group, group_src=0)
    if error is not None:
        raise error
    if verdict[0] is not None:
        raise ValueError(verdict[0])
