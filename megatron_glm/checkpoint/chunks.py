"""What a checkpoint stores: chunks of global tensors, described by torch's checkpoint metadata; and how one is found.

torch's own planners insist on full-size tensors or DTensors; here any rectangles become chunks, and any are filled.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from ..parallel.shard import Rectangle

CHUNK_BYTES = 256 << 20  # small enough that many processes share the work of one tensor


@dataclass(frozen=True)
class Piece:
    """A stored piece of the global tensor `name`."""

    name: str
    global_shape: tuple[int, ...]
    dtype: torch.dtype
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.sizes) * self.dtype.itemsize


@dataclass(frozen=True)
class Chunk:
    """A piece to write; `read` is called when its turn comes, its result is used before the next chunk is read."""

    piece: Piece
    read: Callable[[], torch.Tensor]


def cut(shape: tuple[int, ...], itemsize: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(offsets, sizes) of the chunks of a tensor or rectangle: one an expert ([E, …, …]) and row blocks of the rest."""
    if 0 in shape:
        return
    if len(shape) == 3:
        for expert in range(shape[0]):
            yield from (((expert, *offsets), (1, *sizes)) for offsets, sizes in cut(shape[1:], itemsize))
        return
    rows = max(1, CHUNK_BYTES // (math.prod(shape[1:]) * itemsize))
    for start in range(0, shape[0], rows):
        yield (start, *(0 for _ in shape[1:])), (min(rows, shape[0] - start), *shape[1:])


def pieces_of(rectangle: Rectangle) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """(offsets in the global tensor, the data there) of the chunks of a rectangle; the data share its memory."""
    data = rectangle.tensor.detach()
    for offsets, sizes in cut(data.shape, data.dtype.itemsize):
        place = tuple(a + b for a, b in zip(rectangle.offsets, offsets, strict=True))
        yield place, data[span(offsets, sizes)]


def span(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    """What selects the elements from `offsets` on."""
    return tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))


def describe(pieces: Iterable[Piece]) -> Metadata:
    """The metadata of tensors that consist of these pieces.

    Raises ValueError unless they fill every tensor exactly once.
    """
    tensors: dict[str, TensorStorageMetadata] = {}
    for piece in pieces:
        described = TensorStorageMetadata(TensorProperties(piece.dtype), torch.Size(piece.global_shape), [])
        known = tensors.setdefault(piece.name, described)
        if (tuple(known.size), known.properties.dtype) != (tuple(piece.global_shape), piece.dtype):
            raise ValueError(
                f"ranks disagree on {piece.name}: {known.properties.dtype} {list(known.size)} "
                f"and {piece.dtype} {list(piece.global_shape)}"
            )
        known.chunks.append(ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes)))
    for name, tensor in tensors.items():
        filled, wanted = sum(math.prod(chunk.sizes) for chunk in tensor.chunks), math.prod(tensor.size)
        distinct = len({chunk.offsets for chunk in tensor.chunks})
        if filled != wanted or distinct != len(tensor.chunks):
            raise ValueError(f"the owners of {name} write {filled} elements of {wanted}; each must be written once")
    return Metadata(tensors)


def require(stored: dict[str, tuple[int, ...]], wanted: dict[str, tuple[int, ...]], source: Path) -> None:
    """Raises one ValueError that lists the first tensors which `source` lacks or has in another global shape."""
    faults = []
    for name, shape in wanted.items():
        if name not in stored:
            faults.append(f"{name} {list(shape)} is not in the checkpoint")
        elif tuple(stored[name]) != tuple(shape):
            faults.append(f"{name} is {list(stored[name])} in the checkpoint, {list(shape)} in the model")
    if faults:
        more = f"; and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise ValueError(f"{source} is of another model: {'; '.join(faults[:5])}{more}")


class StoredChunks:
    """The chunks of a checkpoint, found by their rows: one expert of many costs no look at those of the others."""

    def __init__(self, metadata: Metadata) -> None:
        self.metadata = metadata
        self._sorted: dict[str, tuple[list[int], int, list[ChunkStorageMetadata]]] = {}

    def near(self, name: str, start: int, stop: int) -> TensorStorageMetadata:
        """The tensor with only those of its chunks that may hold rows (of dim 0) in [start, stop)."""
        stored = self.metadata.state_dict_metadata[name]
        if name not in self._sorted:
            chunks = sorted(stored.chunks, key=lambda chunk: chunk.offsets[0])
            longest = max(chunk.sizes[0] for chunk in chunks)
            self._sorted[name] = [chunk.offsets[0] for chunk in chunks], longest, chunks
        starts, longest, chunks = self._sorted[name]
        found = chunks[bisect_left(starts, start - longest + 1) : bisect_left(starts, stop)]
        return TensorStorageMetadata(stored.properties, stored.size, found)

    def sizes(self, name: str, offsets: torch.Size) -> torch.Size:
        """The shape of the chunk at `offsets`."""
        near = self.near(name, offsets[0], offsets[0] + 1).chunks
        return next(chunk.sizes for chunk in near if chunk.offsets == offsets)

    def parts(self, rectangle: Rectangle) -> list[ReadItem]:
        """Which parts of which chunks fill the rectangle. Raises ValueError where none does."""
        wanted = ChunkStorageMetadata(torch.Size(rectangle.offsets), rectangle.tensor.shape)
        first = rectangle.offsets[0]
        stored = self.near(rectangle.name, first, first + rectangle.tensor.shape[0])
        found = create_read_items_for_chunk_list(rectangle.name, stored, [wanted])
        filled = sum(math.prod(item.lengths) for item in found)
        if filled != rectangle.tensor.numel():
            raise ValueError(
                f"{rectangle.name} {list(rectangle.tensor.shape)} at {list(rectangle.offsets)}: the checkpoint "
                f"has {filled} of its {rectangle.tensor.numel()} elements"
            )
        return found
