"""Tensors as archives one after the other in a file."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest
import torch

from megatron_glm.checkpoint import archives


def test_an_archive_is_read_as_a_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Python 3.12.12 and others of its time refuse one whose zip64 record is not where its locator says."""

    class Strict(zipfile.ZipFile):
        def __init__(self, file) -> None:
            assert file.seek(0, 2) == file.tell() > 42
            file.seek(-42, 2)
            locator = file.read(20)
            file.seek(int.from_bytes(locator[8:16], "little"))
            assert (locator[:4], file.read(4)) == (b"PK\x06\x07", b"PK\x06\x06")
            super().__init__(file)

    monkeypatch.setattr(archives.zipfile, "ZipFile", Strict)
    with (tmp_path / "two").open("w+b") as stream:
        places = [archives.append(stream, torch.arange(n, dtype=torch.int16)) for n in (3000, 7)]
        found = [archives.find(stream, *place) for place in places]
    assert [archive.nbytes for archive in found] == [6000, 14]
    for archive, n in zip(found, (3000, 7), strict=True):
        assert torch.equal(archives.mapped(tmp_path / "two", archive.start, torch.int16, (n,)), torch.arange(n).short())


def test_a_changed_bit_beside_the_data_never_moves_them():
    stream = io.BytesIO()
    place = archives.append(stream, torch.arange(7, dtype=torch.int16))
    start, nbytes, _ = archives.find(stream, *place)
    whole, refused = stream.getvalue(), 0
    for byte in {*range(place[0], start), *range(start + nbytes, len(whole))}:
        for bit in range(8):
            changed = bytearray(whole)
            changed[byte] ^= 1 << bit
            try:
                found = archives.find(io.BytesIO(changed), *place)
            except (zipfile.BadZipFile, ValueError, OverflowError, NotImplementedError):
                refused += 1
            else:  # another size is no tensor of the chunk's shape
                assert found.start == start or found.nbytes != nbytes, (byte, bit)
    assert refused > 1000
