"""What a checkpoint stores, as torch distributed checkpoint plans: chunks out, rectangles in.

torch's own planners insist on full-size tensors or DTensors; these take any rectangles of the global tensors.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from ..parallel.shard import Rectangle

CHUNK_BYTES = 256 << 20  # a reader reads whole chunks, so this bounds the memory of a reader


@dataclass(frozen=True)
class Chunk:
    """A stored piece of the global tensor `name`: read is called when its turn to be written comes."""

    name: str
    global_shape: tuple[int, ...]
    dtype: torch.dtype
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    read: Callable[[], torch.Tensor]

    @property
    def nbytes(self) -> int:
        return math.prod(self.sizes) * self.dtype.itemsize


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


class ChunkPlanner(SavePlanner):
    """Writes exactly the given chunks; `progress` gets the bytes of each when its turn comes."""

    def __init__(self, chunks: list[Chunk], progress: Callable[[int], object]) -> None:
        self.indexed = [(MetadataIndex(chunk.name, chunk.offsets), chunk) for chunk in chunks]
        self.chunks = dict(self.indexed)
        self.progress = progress

    def set_up_planner(self, state_dict: dict, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Nothing to do: the chunks came with the constructor."""

    def create_local_plan(self) -> SavePlan:
        items = []
        for index, chunk in self.indexed:
            place = ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
            data = TensorWriteData(place, TensorProperties(chunk.dtype), torch.Size(chunk.global_shape))
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        return SavePlan(items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Raises ValueError unless the chunks of all ranks fill every tensor exactly once."""
        tensors: dict[str, TensorStorageMetadata] = {}
        for item in (item for plan in all_plans for item in plan.items):
            name, data = item.index.fqn, item.tensor_data
            known = tensors.setdefault(name, TensorStorageMetadata(data.properties, data.size, []))
            if (known.size, known.properties.dtype) != (data.size, data.properties.dtype):
                raise ValueError(
                    f"ranks disagree on {name}: {known.properties.dtype} {list(known.size)} "
                    f"and {data.properties.dtype} {list(data.size)}"
                )
            known.chunks.append(data.chunk)
        for name, tensor in tensors.items():
            filled, wanted = sum(math.prod(chunk.sizes) for chunk in tensor.chunks), math.prod(tensor.size)
            distinct = len({chunk.offsets for chunk in tensor.chunks})
            if filled != wanted or distinct != len(tensor.chunks):
                raise ValueError(f"the owners of {name} write {filled} elements of {wanted}; each must be written once")
        return all_plans, Metadata(tensors)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        chunk = self.chunks[write_item.index]
        self.progress(chunk.nbytes)
        return chunk.read()


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


class RectanglePlanner(LoadPlanner):
    """Fills rectangles from whatever chunks are stored."""

    def __init__(self, rectangles: list[Rectangle], stored: StoredChunks) -> None:
        self.stored = stored
        wanted = [rectangle for rectangle in rectangles if rectangle.tensor.numel()]
        self.rectangles = {MetadataIndex(r.name, r.offsets): r for r in wanted}
        if len(self.rectangles) < len(wanted):
            raise ValueError("a rectangle is asked for twice: one load fills each once")

    def set_up_planner(self, state_dict: dict, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Nothing to do: the rectangles came with the constructor."""

    def create_local_plan(self) -> LoadPlan:
        items = []
        for index, rectangle in self.rectangles.items():
            wanted = ChunkStorageMetadata(torch.Size(rectangle.offsets), rectangle.tensor.shape)
            first = rectangle.offsets[0]
            stored = self.stored.near(rectangle.name, first, first + rectangle.tensor.shape[0])
            found = create_read_items_for_chunk_list(rectangle.name, stored, [wanted])
            filled = sum(math.prod(item.lengths) for item in found)
            if filled != rectangle.tensor.numel():
                raise ValueError(
                    f"{rectangle.name} {list(rectangle.tensor.shape)} at {list(rectangle.offsets)}: the checkpoint "
                    f"has {filled} of its {rectangle.tensor.numel()} elements"
                )
            items += [replace(item, dest_index=index) for item in found]
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise ValueError(f"{read_item.storage_index.fqn} is no tensor")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        index = tuple(slice(a, a + b) for a, b in zip(read_item.dest_offsets, read_item.lengths, strict=True))
        return self.rectangles[read_item.dest_index].tensor.detach()[index]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing to do: `resolve_tensor` gave a view of the destination."""
