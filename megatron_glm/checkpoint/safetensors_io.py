"""Reading and writing safetensors with memory bounded by one tensor.

The format: 8 bytes little-endian header length, a JSON header {key: {dtype, shape, data_offsets}}, the data.
The `safetensors` package writes a file from tensors that are all in memory; here a file is written tensor after
tensor. Reading maps the file, so that only the pages in use are in memory and none of them is anonymous.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..config.source import require_content, unique
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
NO_METADATA: Mapping[str, str] = {}
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


def read_header(file: Path, headers_only: bool = False) -> dict[str, Entry]:
    """The tensors of one safetensors file. Raises ValueError if it is truncated or no such file.

    headers_only: the data may be missing.
    """
    size = require_content(file).stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError(f"{file} is truncated: {size} bytes, its header alone needs {length + 8}")
        try:
            header = json.loads(stream.read(length), object_pairs_hook=unique)
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


def _entry(file: Path, key: str, fields: Any, first: int) -> Entry:
    """A tensor as the header describes it; the data begin at byte `first` of the file."""
    try:
        name, shape, (start, end) = fields["dtype"], tuple(fields["shape"]), fields["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file} has a damaged header: {key} is described as {fields!r}") from error
    if not all(isinstance(number, int) and number >= 0 for number in (*shape, start, end)):
        raise ValueError(f"{file} has a damaged header: {key} is described as {fields!r}")
    if not isinstance(name, str) or name not in DTYPES:
        quantised = " of quantised weights" if str(name).startswith(("F4", "F6", "F8")) else ""
        raise ValueError(f"{file}: {key} has the unknown dtype {name}{quantised}")
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


def read_metadata(file: Path) -> dict[str, str]:
    """The texts that a safetensors file, whose header `read_header` has accepted, has beside its tensors."""
    with file.open("rb") as stream:
        return json.loads(stream.read(int.from_bytes(stream.read(8), "little"))).get("__metadata__", {})


def write_safetensors(file: Path, tensors: list[Outgoing], metadata: Mapping[str, str] = NO_METADATA) -> Iterator[int]:
    """Writes one file, block after block; yields the bytes of each block when it is written."""
    header: dict[str, dict] = {"__metadata__": {"format": "pt", **metadata}}
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
