"""What a checkpoint stores: chunks, which are rectangles of global tensors; alone, and by the hundred thousand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ..parallel.shard import Rectangle

CHUNK_BYTES = 256 << 20  # small enough that many processes share the work of one tensor
DIMS = 3  # of a tensor at most: [experts, out, in]


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


def chunks_of(rectangles: Iterable[Rectangle]) -> list[Chunk]:
    """The chunks of what a rank owns of `rectangles`."""
    chunks = []
    for rectangle in (r for r in rectangles if r.owner):
        for offsets, data in pieces_of(rectangle):
            piece = Piece(rectangle.name, tuple(rectangle.global_shape), data.dtype, offsets, tuple(data.shape))
            chunks.append(Chunk(piece, lambda data=data: data))
    return chunks


def span(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    """What selects the elements from `offsets` on."""
    return tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))


Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]  # of tensors by name, with their dtypes


def require(stored: Shapes, wanted: dict[str, tuple[int, ...]], source: Path) -> None:
    """Raises one ValueError that lists the first tensors which `source` lacks or has in another global shape."""
    faults = []
    for name, shape in wanted.items():
        if name not in stored:
            faults.append(f"{name} {list(shape)} is not in the checkpoint")
        elif stored[name][0] != tuple(shape):
            faults.append(f"{name} is {list(stored[name][0])} in the checkpoint, {list(shape)} in the model")
    if faults:
        more = f"; and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise ValueError(f"{source} is of another model: {'; '.join(faults[:5])}{more}")


@dataclass(frozen=True)
class ChunkTable:
    """n chunks of several tensors, as columns: 512 ranks have half a million, too many to be Python objects.

    tensors: {name: (global shape, dtype)}; tensor [n] int64: the number of a chunk's tensor in `tensors`;
    offsets, sizes [n, DIMS] int64: where the chunk is; dims that its tensor has not are 0 and 1.
    """

    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]]
    tensor: np.ndarray
    offsets: np.ndarray
    sizes: np.ndarray

    @classmethod
    def of(cls, pieces: Sequence[Piece]) -> ChunkTable:
        """Raises ValueError where two pieces of one name differ in shape or dtype, or have more than DIMS dims."""
        tensors: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        numbers: dict[str, int] = {}
        for piece in pieces:
            if len(piece.sizes) > DIMS:
                raise ValueError(f"{piece.name} has {len(piece.sizes)} dimensions; a checkpoint holds {DIMS} at most")
            numbers.setdefault(piece.name, len(numbers))
            _add_tensor(tensors, piece.name, (tuple(piece.global_shape), piece.dtype))
        tensor = np.array([numbers[piece.name] for piece in pieces], dtype=np.int64)
        offsets = np.array([(*piece.offsets, 0, 0, 0)[:DIMS] for piece in pieces], dtype=np.int64)
        sizes = np.array([(*piece.sizes, 1, 1, 1)[:DIMS] for piece in pieces], dtype=np.int64)
        return cls(tensors, tensor, offsets.reshape(-1, DIMS), sizes.reshape(-1, DIMS))

    @classmethod
    def joined(cls, tables: Sequence[ChunkTable]) -> ChunkTable:
        """The chunks of all tables, one after the other. Raises ValueError where they disagree on a tensor."""
        tensors: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        numbers: dict[str, int] = {}
        columns = []
        for table in tables:
            for name, described in table.tensors.items():
                numbers.setdefault(name, len(numbers))
                _add_tensor(tensors, name, described)
            here = np.array([numbers[name] for name in table.tensors], dtype=np.int64)
            columns.append(here[table.tensor])
        offsets, sizes = (np.concatenate([getattr(table, name) for table in tables]) for name in ("offsets", "sizes"))
        return cls(tensors, np.concatenate(columns), offsets, sizes)

    def __len__(self) -> int:
        return len(self.tensor)

    @property
    def nbytes(self) -> np.ndarray:
        """Bytes of each chunk's data [n] int64."""
        itemsize = np.array([dtype.itemsize for _, dtype in self.tensors.values()], dtype=np.int64)
        return self.sizes.prod(axis=1) * itemsize[self.tensor]

    def require_whole(self) -> None:
        """Raises ValueError unless every element of every tensor is in exactly one chunk.

        Counting elements would miss a gap that an overlap makes up for. So each coordinate x of a dim gets a random
        F(x), and a rectangle has the mass of the product of F(end) - F(start) over its dims, modulo 2^64: as for
        lengths, which are F(x) = x, the masses of parts sum to that of the whole, and with random numbers no other set
        of rectangles has that sum.
        """
        shapes = np.array([(*shape, 1, 1, 1)[:DIMS] for shape, _ in self.tensors.values()], dtype=np.int64)
        whole = _mass(np.zeros_like(shapes), shapes)
        parts, elements = np.zeros(len(shapes), dtype=np.uint64), np.zeros(len(shapes), dtype=np.int64)
        np.add.at(parts, self.tensor, _mass(self.offsets, self.sizes))
        np.add.at(elements, self.tensor, self.sizes.prod(axis=1))
        if len(wrong := np.flatnonzero(parts != whole)):
            name = list(self.tensors)[wrong[0]]
            filled, wanted = elements[wrong[0]], shapes[wrong[0]].prod()
            raise ValueError(f"the owners of {name} write {filled} elements of {wanted}; each must be written once")


def _add_tensor(tensors: dict, name: str, described: tuple[tuple[int, ...], torch.dtype]) -> None:
    known = tensors.setdefault(name, described)
    if known != described:
        (shape, dtype), (other, other_dtype) = known, described
        raise ValueError(f"ranks disagree on {name}: {dtype} {list(shape)} and {other_dtype} {list(other)}")


def _mass(offsets: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """offsets, sizes [n, DIMS] -> the mass of each rectangle, see `require_whole`: [n] uint64."""
    dims = np.arange(DIMS, dtype=np.uint64) << np.uint64(60)  # each dim has an F of its own
    starts = offsets.astype(np.uint64) | dims
    ends = (offsets + sizes).astype(np.uint64) | dims
    return (_random(ends) - _random(starts)).prod(axis=1)


def _random(x: np.ndarray) -> np.ndarray:
    """The mixing function of the SplitMix64 generator: uint64 -> uint64, one to one."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
