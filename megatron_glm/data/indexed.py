"""Tokenised documents on disk in Megatron's format: PREFIX.bin holds the token ids, PREFIX.idx says where they are.

The index, little-endian: b"MMIDIDX\\0\\0", version 1 (uint64), the code of the ids' dtype (uint8), the number of
sequences n and of document bounds d (uint64 each), then the sequences' lengths (int32 [n]), their byte positions in
the .bin (int64 [n]) and the document bounds (int64 [d]): document i is sequences [bounds[i], bounds[i + 1]).
"""

from __future__ import annotations

import mmap
import os
import shutil
import struct
from array import array
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

import numpy as np

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
LONGEST = np.iinfo(np.int32).max  # tokens of a sequence


def idx_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.idx")


def bin_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.bin")


def smallest_dtype(vocab_size: int) -> np.dtype:
    """The dtype that Megatron stores ids of such a vocabulary in: uint16 below 65500, else int32."""
    return np.dtype(np.uint16 if vocab_size < 65500 else np.int32)


class IndexedDataset:
    """The documents of PREFIX.bin and PREFIX.idx, memory-mapped: opening reads a few bytes, whatever the size.

    sequence_lengths, sequence_pointers, document_bounds: as the top of this module describes them.
    tokens [N]: the ids of all documents, of `dtype`.

    Raises: ValueError if a file is missing, the index is none, of another version or dtype, or describes another .bin.
        Checks that read every entry of the index are made by `document_lengths`, before samples are cut.
    """

    def __init__(self, prefix: str | Path):
        self.prefix = str(prefix)
        if not self.prefix:
            raise ValueError("the prefix of a .bin and .idx is empty")  # an unset shell variable
        self._idx, self._bin = idx_path(prefix), bin_path(prefix)
        for path in (self._idx, self._bin):
            if not path.is_file():
                end = Path(prefix).suffix
                hint = f"give the prefix of both files without {end}"
                if end not in (".bin", ".idx"):
                    hint = "tools/preprocess_data.py makes the two files of a prefix"
                raise ValueError(f"{path} does not exist; {hint}")
        size = self._idx.stat().st_size
        with self._idx.open("rb") as file:
            header = file.read(HEADER.size)
        if len(header) < HEADER.size or not header.startswith(MAGIC):
            raise ValueError(f"{self._idx} is no index: it begins with {header[:9]!r}, expected {MAGIC!r}")
        _, version, code, sequences, bounds = HEADER.unpack(header)
        if version != VERSION:
            raise ValueError(f"{self._idx} is of version {version}, expected {VERSION}")
        if code not in DTYPES:
            raise ValueError(f"{self._idx} has the dtype code {code}, expected one of {sorted(DTYPES)}")
        self.dtype = np.dtype(DTYPES[code])
        if self.dtype.kind == "f":
            raise ValueError(f"{self._idx} has the dtype code {code} ({self.dtype}), but token ids are integers")
        described = HEADER.size + 12 * sequences + 8 * bounds
        if size != described:
            raise ValueError(f"{self._idx} holds {size} bytes, but {described} by its header ({sequences} sequences)")
        if bounds < 2 or not sequences:
            raise ValueError(f"{self._idx} has no documents: {max(bounds, 1) - 1} of them, {sequences} sequences")
        raw = np.memmap(self._idx, np.uint8, "r").view(np.ndarray)[HEADER.size :]
        self.sequence_lengths = raw[: 4 * sequences].view(np.int32)  # [n]
        self.sequence_pointers = raw[4 * sequences : 12 * sequences].view(np.int64)  # [n], bytes
        self.document_bounds = raw[12 * sequences :].view(np.int64)  # [documents + 1]
        self._open_bin()

    def _open_bin(self) -> None:
        tokens = int(self._positions(len(self.sequence_lengths)))
        size, described = self._bin.stat().st_size, tokens * self.dtype.itemsize
        if size != described:
            what = "truncated" if size < described else "of another index"
            raise ValueError(f"{self._bin} is {what}: it holds {size} bytes, but {described} by {self._idx}")
        if not tokens:
            raise ValueError(f"{self._bin} is empty: its {len(self)} documents hold no token")
        with self._bin.open("rb") as file:
            self._mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._mapped.madvise(mmap.MADV_RANDOM)  # documents are read in a random order: nothing to read ahead
        self.tokens = np.frombuffer(self._mapped, self.dtype)  # [N]

    def __len__(self) -> int:
        return len(self.document_bounds) - 1

    def __getitem__(self, document: int) -> np.ndarray:
        """The token ids [n] of a document, all its sequences joined."""
        start, end = (int(self._positions(bound)) for bound in self.document_bounds[document : document + 2].tolist())
        return self.tokens[start:end]

    def release(self) -> None:
        """Takes the tokens read so far out of this process's memory; arrays of them stay valid, and read them again.

        The operating system keeps the file in its cache as it sees fit, but a process that reads a data set through
        would in the end count all of it as its own memory.
        """
        self._mapped.madvise(mmap.MADV_DONTNEED)

    def count_tokens(self, begin: int, end: int) -> int:
        """Tokens of the documents [begin, end), without a look at those between."""
        return int(self._positions(self.document_bounds[end]) - self._positions(self.document_bounds[begin]))

    def document_lengths(self) -> np.ndarray:
        """Tokens of each document, int64 [documents]; raises ValueError if entries of the index contradict others."""
        bounds, lengths = self.document_bounds, self.sequence_lengths
        if bounds[0] != 0 or bounds[-1] != len(lengths) or np.any(bounds[1:] < bounds[:-1]):
            raise ValueError(f"{self._idx} is damaged: its document bounds do not rise from 0 to {len(lengths)}")
        ends = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=ends[1:])
        wrong = np.flatnonzero((lengths < 0) | (self.sequence_pointers != ends[:-1] * self.dtype.itemsize))
        if len(wrong):
            at = int(wrong[0])
            raise ValueError(
                f"{self._idx} is damaged: sequence {at} is at byte {self.sequence_pointers[at]} with"
                f" {lengths[at]} tokens, but the sequences before it end at byte {ends[at] * self.dtype.itemsize}"
            )
        return np.diff(ends[bounds])

    def fingerprint(self) -> list[int]:
        """Changes with the files: the size and the time of the last change, in nanoseconds, of each."""
        stats = [path.stat() for path in (self._idx, self._bin)]
        return [number for stat in stats for number in (stat.st_size, stat.st_mtime_ns)]

    def _positions(self, sequence: int) -> int:
        """Where a sequence begins in the .bin, in tokens; for the number of sequences, the end of the last one."""
        if sequence < len(self.sequence_pointers):
            return self.sequence_pointers[sequence] // self.dtype.itemsize
        return self.sequence_pointers[-1] // self.dtype.itemsize + self.sequence_lengths[-1]


class IndexedWriter:
    """Writes PREFIX.bin and PREFIX.idx. Both have their names only when all is written, the .idx last.

    As a context manager it finishes on success; after an exception, its own included, it leaves neither.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype | type):
        self.prefix, self.dtype = str(prefix), np.dtype(dtype)
        self._code = {name: code for code, name in DTYPES.items()}[self.dtype.name]
        self._lengths, self._bounds = array("i"), array("q", [0])
        self.tokens = 0
        self._bin = self._temporary(bin_path(prefix)).open("wb")

    def add_document(self, ids: np.ndarray, lengths: list[int] | None = None) -> None:
        """Appends a document of `ids` [n]; `lengths` are those of its sequences, if it has more than one.

        Raises ValueError for ids that the dtype cannot hold, and for more tokens than an index can count.
        """
        ids = np.asarray(ids)
        limits = np.iinfo(self.dtype)
        if len(ids) and (ids.min() < limits.min or ids.max() > limits.max):
            raise ValueError(f"{self.prefix}: token ids {ids.min()} to {ids.max()} do not fit into {self.dtype}")
        self.add_bytes(
            ids.astype(self.dtype, copy=False).tobytes(), [len(ids)] if lengths is None else lengths, joined=True
        )

    def add_bytes(self, raw: bytes, lengths: list[int] | np.ndarray, joined: bool = False) -> None:
        """Appends sequences of `lengths` tokens, whose ids are `raw`: a document each, or one of them all (`joined`).

        Raises: ValueError for a sequence above LONGEST, or if `raw` does not hold as many ids as `lengths` says.
        """
        total, longest = int(np.sum(lengths, dtype=np.int64)), max(lengths, default=0)
        if longest > LONGEST:
            raise ValueError(f"{self.prefix}: a document of {longest} tokens is above the format's limit of {LONGEST}")
        if total * self.dtype.itemsize != len(raw):
            raise ValueError(f"{self.prefix}: {len(raw)} bytes for {total} tokens of {self.dtype}")
        first = len(self._lengths)
        with named_errors(self._bin.name):
            self._bin.write(raw)
        self._lengths.extend(map(int, lengths))
        self._bounds.extend([len(self._lengths)] if joined else range(first + 1, len(self._lengths) + 1))
        self.tokens += total

    def add_dataset(self, dataset: IndexedDataset) -> None:
        """Appends all documents of another dataset of the same dtype."""
        if dataset.dtype != self.dtype:
            raise ValueError(f"{dataset.prefix} holds {dataset.dtype}, {self.prefix} {self.dtype}")
        first = len(self._lengths)
        with bin_path(dataset.prefix).open("rb") as file, named_errors(self._bin.name):
            shutil.copyfileobj(file, self._bin, 2**24)
        self._lengths.frombytes(dataset.sequence_lengths.tobytes())
        self._bounds.frombytes((dataset.document_bounds[1:] + first).tobytes())
        self.tokens += len(dataset.tokens)

    def close(self) -> None:
        """Writes the index and gives both files their names."""
        lengths = np.frombuffer(self._lengths, np.int32)
        pointers = np.zeros(len(lengths), np.int64)
        np.cumsum(lengths[:-1], out=pointers[1:], dtype=np.int64)
        index = self._temporary(idx_path(self.prefix))
        with named_errors(index), index.open("wb") as file:
            file.write(HEADER.pack(MAGIC, VERSION, self._code, len(lengths), len(self._bounds)))
            for part in (lengths, pointers * self.dtype.itemsize, np.frombuffer(self._bounds, np.int64)):
                file.write(part.tobytes())
            to_disk(file)
        with named_errors(self._bin.name), self._bin as file:
            to_disk(file)
        for path in (bin_path(self.prefix), idx_path(self.prefix)):
            os.replace(self._temporary(path), path)

    def discard(self) -> None:
        """Removes what is written so far."""
        with suppress(OSError):  # the disk may have no room for what is still in the buffer
            self._bin.close()
        for path in (bin_path(self.prefix), idx_path(self.prefix)):
            self._temporary(path).unlink(missing_ok=True)

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        try:
            if kind is None:
                self.close()
        finally:
            self.discard()  # nothing, after a close

    def _temporary(self, path: Path) -> Path:
        return path.with_name(path.name + ".tmp")


@contextmanager
def named_errors(path: str | Path) -> Iterator[None]:
    """Adds the name of the file to an OSError inside that has none, as the one of a full disk."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def to_disk(file) -> None:
    file.flush()
    os.fsync(file.fileno())
