"""Tensors in files: written as the archives that torch.save makes, one after the other, and read where they lie.

torch's checkpoint reader can read each archive. Here its bytes are used in the mapped file, so that only the rows that
are asked for are read, without a copy, and no memory is anonymous.
"""

from __future__ import annotations

import io
import math
import mmap
import zipfile
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch

HEADER = 30  # bytes of a file's header in an archive before its name
ALIGNMENT = 64  # bytes; torch aligns the data within an archive, here each archive is aligned in its file


class Archive(NamedTuple):
    """Where the bytes of the tensor in an archive lie in its file, and their CRC-32."""

    start: int
    nbytes: int
    checksum: int


def append(stream: BinaryIO, tensor: torch.Tensor) -> tuple[int, int]:
    """Writes the tensor at the end of `stream`; returns (start, length) of its archive."""
    stream.write(bytes(-stream.tell() % ALIGNMENT))
    start = stream.tell()
    try:
        torch.save(_in_own_storage(tensor), stream)
    except RuntimeError as error:  # from torch's clean-up after a write that failed, where the disk is full
        if isinstance(error.__context__, OSError):
            raise error.__context__ from error
        raise
    return start, stream.tell() - start


def _in_own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """On the host, contiguous, and without a neighbour in its storage: torch.save writes whole storages."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    raw = torch.frombuffer(tensor.view(-1).view(torch.uint8).numpy(), dtype=torch.uint8)
    return raw.view(tensor.dtype).view(tensor.shape)


class _Part(io.RawIOBase):
    """`length` bytes of a stream from `start` on, as a file; zipfile holds the offsets in an archive to its size."""

    def __init__(self, stream: BinaryIO | mmap.mmap, start: int, length: int) -> None:
        super().__init__()
        self.stream, self.start, self.length, self.position = stream, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.position = max(0, offset + (0, self.position, self.length)[whence])
        return self.position

    def readinto(self, buffer) -> int:
        self.stream.seek(self.start + self.position)
        data = self.stream.read(min(len(buffer), max(0, self.length - self.position)))
        buffer[: len(data)] = data
        self.position += len(data)
        return len(data)


def find(stream: BinaryIO | mmap.mmap, start: int, length: int) -> Archive:
    """The archive of one tensor at these bytes of `stream`, from its directory at its end; reads none of the data.

    Raises: zipfile.BadZipFile, ValueError, OverflowError, NotImplementedError (another version) if there is none.
    """
    with zipfile.ZipFile(_Part(stream, start, length)) as directory:
        [record] = [entry for entry in directory.infolist() if "/data/" in entry.filename]
    header = start + record.header_offset
    if record.header_offset + HEADER > length:
        raise ValueError(f"its directory has a header at byte {header}, it ends at byte {start + length}")
    stream.seek(header)
    fixed = stream.read(HEADER)  # the lengths of the name and of the extra field that follow it are its end
    name, extra = stream.read(int.from_bytes(fixed[26:28], "little")), int.from_bytes(fixed[28:30], "little")
    padding = stream.read(extra)  # torch's only extra field aligns the data; its length is its second word
    if not fixed.startswith(b"PK\3\4") or name != record.orig_filename.encode():
        raise ValueError(f"no header of {record.orig_filename} is at byte {header}")
    if padding and len(padding) != 4 + int.from_bytes(padding[2:4], "little"):
        raise ValueError(f"its header has an extra field of {len(padding)} bytes, which says otherwise")
    begin = header + HEADER + len(name) + extra
    if begin + record.file_size > start + length:
        raise ValueError(f"its data end at byte {begin + record.file_size}, its archive at byte {start + length}")
    return Archive(begin, record.file_size, record.CRC)


def mapped(file: Path, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor at byte `start` of the file, mapped: it takes memory only as pages of the file are read."""
    nbytes = math.prod(shape) * dtype.itemsize
    if not nbytes:
        return torch.empty(shape, dtype=dtype)
    page = start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    return view(mapping(file, page, start - page + nbytes), start - page, dtype, shape)


def mapping(file: Path, first: int, nbytes: int) -> mmap.mmap:
    """`nbytes` bytes of the file (0: all that follow) from `first` on, a multiple of the page size.

    The file stays open as long as they are used.
    """
    with file.open("rb") as stream:  # private: torch has no read-only tensors, and warns of read-only memory
        return mmap.mmap(stream.fileno(), nbytes, access=mmap.ACCESS_COPY, offset=first)


def view(content: mmap.mmap, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor at byte `start` of `content`, which is not empty and lives as long as the tensor."""
    raw = torch.frombuffer(content, dtype=torch.uint8, offset=start, count=math.prod(shape) * dtype.itemsize)
    if start % dtype.itemsize:  # legal in safetensors, but torch cannot view it in place
        raw = raw.clone()
    return raw.view(dtype).view(shape)
