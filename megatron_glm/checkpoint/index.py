"""The index of a checkpoint: which chunk is where, in columns that 512 ranks write and read in a second.

`tensors.index` is a safetensors file of the columns, one of which is a JSON text with the version and the names, and
behind it the SHA-256 of all before. Earlier versions pickled torch's checkpoint metadata to `.metadata`, with a CRC-32
behind it; they are read, too.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

import numpy as np
import safetensors.numpy
import torch

from ..config.iterations import INDEX_NAMES
from ..parallel.shard import Rectangle
from .chunks import DIMS, ChunkTable, Piece

NAME = INDEX_NAMES[0]
VERSION = 2
DIGEST_BYTES = hashlib.sha256().digest_size
OLD_CHECKSUM_BYTES = 4


@dataclass(frozen=True)
class Places:
    """Where chunks are, one row each: in `files`[file] an archive of `length` bytes from `start` on.

    checksum: CRC-32 of the data. All columns [n] int64.
    """

    files: list[str]
    file: np.ndarray
    start: np.ndarray
    length: np.ndarray
    checksum: np.ndarray

    @classmethod
    def joined(cls, parts: Sequence[Places]) -> Places:
        firsts = np.cumsum([0, *(len(part.files) for part in parts)])
        files = [name for part in parts for name in part.files]
        file = np.concatenate([part.file + first for part, first in zip(parts, firsts, strict=False)])
        rest = (np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(cls)[2:])
        return cls(files, file, *rest)


class Part(NamedTuple):
    """`lengths` elements of a stored chunk, from `stored` on in it, are those from `wanted` on in a rectangle."""

    chunk: int
    stored: tuple[int, ...]
    wanted: tuple[int, ...]
    lengths: tuple[int, ...]


class Index:
    """Chunks in the order of their tensors and offsets, and their places. A chunk's number is its row in all columns.

    tensors, tensor, offsets, sizes: as in `ChunkTable`; files, file, start, length, checksum: as in `Places`.
    names, numbers: of the tensors, both ways; first [tensors + 1]: the first chunk of each.
    """

    def __init__(self, chunks: ChunkTable, places: Places) -> None:
        order = np.lexsort((*chunks.offsets.T[::-1], chunks.tensor))
        self.tensors, self.files = chunks.tensors, places.files
        self.names = list(chunks.tensors)
        self.numbers = {name: number for number, name in enumerate(self.names)}
        self.tensor, self.offsets, self.sizes = (c[order] for c in (chunks.tensor, chunks.offsets, chunks.sizes))
        self.file, self.start, self.length, self.checksum = (
            column[order] for column in (places.file, places.start, places.length, places.checksum)
        )
        self.first = np.searchsorted(self.tensor, np.arange(len(self.names) + 1))

    def piece(self, chunk: int) -> Piece:
        """Of which tensor a chunk is, and where in it."""
        name = self.names[self.tensor[chunk]]
        shape, dtype = self.tensors[name]
        offsets, sizes = (tuple(column[chunk, : len(shape)].tolist()) for column in (self.offsets, self.sizes))
        return Piece(name, shape, dtype, offsets, sizes)

    def by_file(self) -> dict[str, list[int]]:
        """{file: the chunks in it, in the order of their places}, in the order of the files' names."""
        order = np.lexsort((self.start, self.file))
        bounds = np.searchsorted(self.file[order], np.arange(len(self.files) + 1))
        found = {name: order[bounds[i] : bounds[i + 1]].tolist() for i, name in enumerate(self.files)}
        return {name: chunks for name, chunks in sorted(found.items()) if chunks}

    def parts(self, rectangle: Rectangle) -> list[Part]:
        """Which parts of which chunks fill the rectangle. Raises ValueError if they do not fill all of it."""
        shape = tuple(rectangle.tensor.shape)
        start = np.array((*rectangle.offsets, 0, 0, 0)[:DIMS])
        stop = start + np.array((*shape, 1, 1, 1)[:DIMS])
        number = self.numbers[rectangle.name]
        rows = slice(self.first[number], self.first[number + 1])
        starts, longest = self.offsets[rows, 0], self.sizes[rows, 0].max(initial=0)
        near = self.first[number] + np.arange(*np.searchsorted(starts, (start[0] - longest + 1, stop[0])))
        low = np.maximum(self.offsets[near], start)
        lengths = np.minimum(self.offsets[near] + self.sizes[near], stop) - low
        found = (lengths > 0).all(axis=1)
        near, low, lengths = near[found], low[found], lengths[found]
        if (filled := int(lengths.prod(axis=1).sum())) != rectangle.tensor.numel():
            raise ValueError(
                f"{rectangle.name} {list(shape)} at {list(rectangle.offsets)}: the checkpoint "
                f"has {filled} of its {rectangle.tensor.numel()} elements"
            )
        d = len(shape)
        columns = (low - self.offsets[near])[:, :d], (low - start)[:, :d], lengths[:, :d]
        rows = zip(near.tolist(), *(map(tuple, column.tolist()) for column in columns), strict=True)
        return [Part(*row) for row in rows]

    def to_bytes(self) -> bytes:
        """The content of its file, as the top of this module describes it."""
        tensors = [[name, str(dtype).removeprefix("torch."), shape] for name, (shape, dtype) in self.tensors.items()]
        text = json.dumps({"version": VERSION, "tensors": tensors, "files": self.files})
        columns = {"json": np.frombuffer(text.encode(), dtype=np.uint8)}
        columns |= {name: np.ascontiguousarray(getattr(self, name)) for name in COLUMNS}
        content = safetensors.numpy.save(columns)
        return content + hashlib.sha256(content).digest()


COLUMNS = ("tensor", "offsets", "sizes", "file", "start", "length", "checksum")


def file_of(folder: Path) -> Path:
    """The index file of an `iter_…` folder. Raises ValueError if it has none."""
    for name in INDEX_NAMES:
        if (folder / name).is_file():
            return folder / name
    raise ValueError(f"{folder} is no complete checkpoint: it has no {' or '.join(INDEX_NAMES)}")


def read(file: Path) -> Index:
    """Raises ValueError naming the file if it is damaged."""
    content = memoryview(file.read_bytes())
    new = file.name == NAME
    digest = DIGEST_BYTES if new else OLD_CHECKSUM_BYTES
    body, saved = content[:-digest], content[-digest:]
    found = hashlib.sha256(body).digest() if new else zlib.crc32(body).to_bytes(digest)
    if found != saved:
        raise ValueError(f"{file} is damaged: its checksum does not match")
    try:
        return _parse(body) if new else _unpickle(body)
    except Exception as error:  # whatever a file of another program may raise
        raise ValueError(f"{file} is damaged: {error!r}") from error


def _parse(content: memoryview) -> Index:
    columns = safetensors.numpy.load(bytes(content))
    head = json.loads(columns["json"].tobytes())
    if head["version"] != VERSION:
        raise ValueError(f"it has version {head['version']}, this program reads {VERSION}")
    tensors = {name: (tuple(shape), getattr(torch, dtype)) for name, dtype, shape in head["tensors"]}
    chunks = ChunkTable(tensors, *(columns[name] for name in COLUMNS[:3]))
    return Index(chunks, Places(head["files"], *(columns[name] for name in COLUMNS[3:])))


def _unpickle(content: memoryview) -> Index:
    """The index of a checkpoint of version 1: torch's metadata, the archives' places and their checksums."""
    metadata = pickle.loads(content)
    pieces, rows = [], []
    files: dict[str, int] = {}
    sizes = {
        (name, chunk.offsets): chunk.sizes
        for name, tensor in metadata.state_dict_metadata.items()
        for chunk in tensor.chunks
    }
    for index, place in metadata.storage_data.items():
        tensor = metadata.state_dict_metadata[index.fqn]
        shape, dtype = tuple(tensor.size), tensor.properties.dtype
        pieces.append(Piece(index.fqn, shape, dtype, tuple(index.offset), tuple(sizes[index.fqn, index.offset])))
        number = files.setdefault(place.relative_path, len(files))
        rows.append((number, place.offset, place.length, metadata.planner_data[index]))
    return Index(ChunkTable.of(pieces), Places(list(files), *np.array(rows, dtype=np.int64).reshape(-1, 4).T))
