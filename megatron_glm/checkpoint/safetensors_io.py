"""Reading and writing safetensors with memory bounded by one tensor.

The format: 8 bytes little-endian header length, a JSON header {key: {dtype, shape, data_offsets}}, the data.
The `safetensors` package writes a file from tensors that are all in memory; here a file is written tensor after
tensor. Reading maps the file, so that only the pages in use are in memory and none of them is anonymous.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .archives import mapped
from .files import naming

BUFFER_BYTES = 16 << 20  # writing from memory of its own is twice as fast as from that of a mapped file
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies: bytes [start, end) of `file`."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int

    def tensor(self) -> torch.Tensor:
        """The tensor as a view of the mapped file."""
        return mapped(self.file, self.start, self.dtype, self.shape)


class SafetensorsFolder:
    """The tensors of a Hugging Face folder by key, found through its index or in its single file.

    Only headers are read here; `headers_only` allows files that end behind them.
    Raises ValueError naming tensor and file for whatever does not fit together: an index that names a missing file or
    tensor, a tensor that the index does not know, truncated files.
    """

    def __init__(self, folder: Path, headers_only: bool = False) -> None:
        self.entries: dict[str, Entry] = {}
        index = folder / INDEX_NAME
        if not index.is_file():
            if not (folder / SINGLE_NAME).is_file():
                what = f"holds neither {INDEX_NAME} nor {SINGLE_NAME}" if folder.is_dir() else "does not exist"
                raise ValueError(f"{folder} {what}")
            self.entries = read_header(folder / SINGLE_NAME, headers_only)
            return
        weight_map = _weight_map(index)
        for name in sorted(set(weight_map.values())):
            if not (folder / name).is_file():
                key = next(key for key, file in weight_map.items() if file == name)
                raise ValueError(f"{folder / name} is missing; {INDEX_NAME} places {key} in it")
            for key, entry in read_header(folder / name, headers_only).items():
                if weight_map.get(key) != name:
                    raise ValueError(f"{folder / name} holds {key}, which {INDEX_NAME} places in {weight_map.get(key)}")
                self.entries[key] = entry
        for key in weight_map.keys() - self.entries.keys():
            raise ValueError(f"{folder / weight_map[key]} lacks {key}, which {INDEX_NAME} places in it")

    def tensor(self, key: str) -> torch.Tensor:
        """The whole tensor as a view of the mapped file."""
        return self.entries[key].tensor()


def read_header(file: Path, headers_only: bool = False) -> dict[str, Entry]:
    """The tensors of one safetensors file. Raises ValueError if it is truncated or no such file.

    headers_only: the data may be missing.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError(f"{file} is truncated: {size} bytes, its header alone needs {length + 8}")
        try:
            header = json.loads(stream.read(length))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file} has no safetensors header: {error}") from error
    if not isinstance(header, dict):
        raise ValueError(f"{file} has no safetensors header: it is a JSON {type(header).__name__}, not an object")
    first = 8 + length
    entries = {key: _entry(file, key, fields, first) for key, fields in header.items() if key != "__metadata__"}
    end = first
    for key, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != end:  # an overlap or a gap, neither of which the format allows
            raise ValueError(f"{file} is damaged: {key} starts at byte {entry.start}, the data before it ends at {end}")
        if (end := entry.end) > size and not headers_only:
            raise ValueError(f"{file} is truncated: {key} ends at byte {end}, the file at byte {size}")
    if end < size:
        raise ValueError(f"{file} is damaged: its tensors end at byte {end}, the file at byte {size}")
    return entries


def _weight_map(index: Path) -> dict[str, str]:
    """{key: file name} of an index; the files lie beside it."""
    try:
        content = json.loads(index.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{index} is not a safetensors index: {error}") from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ValueError(f"{index} is not a safetensors index: it has no weight_map from tensors to files")
    return weight_map


def _entry(file: Path, key: str, fields: Any, first: int) -> Entry:
    """A tensor as the header describes it; the data begin at byte `first` of the file."""
    try:
        name, shape, (start, end) = fields["dtype"], tuple(fields["shape"]), fields["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file} has a damaged header: {key} is described as {fields!r}") from error
    if not all(isinstance(number, int) and number >= 0 for number in (*shape, start, end)):
        raise ValueError(f"{file} has a damaged header: {key} is described as {fields!r}")
    if not isinstance(name, str) or name not in DTYPES:
        raise ValueError(f"{file}: {key} has the unknown dtype {name}")
    nbytes = math.prod(shape) * DTYPES[name].itemsize
    if end - start != nbytes:
        raise ValueError(f"{file}: {key} has {end - start} bytes, {list(shape)} of {DTYPES[name]} needs {nbytes}")
    return Entry(file, DTYPES[name], shape, first + start, first + end)


@dataclass(frozen=True)
class Outgoing:
    """A tensor to write; `blocks()` yields its data in order, as consecutive pieces of its dim 0 or of its bytes."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    blocks: Callable[[], Iterable[torch.Tensor]]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_safetensors(file: Path, tensors: list[Outgoing]) -> Iterator[int]:
    """Writes one file, block after block; yields the bytes of each block when it is written."""
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        ends = [offset, offset + tensor.nbytes]
        header[tensor.key] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": ends}
        offset += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # keeps the data aligned, so that it can be mapped
    buffer = torch.empty(BUFFER_BYTES, dtype=torch.uint8)
    with naming(file), file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            for block in tensor.blocks():
                assert block.dtype == tensor.dtype, (tensor.key, block.dtype)
                for piece in block.contiguous().view(-1).view(torch.uint8).split(BUFFER_BYTES):
                    yield stream.write(buffer[: len(piece)].copy_(piece).numpy().data)
        assert stream.tell() == 8 + len(text) + offset, file
