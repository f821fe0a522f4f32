"""Checkpoints that earlier versions of this program wrote."""

from __future__ import annotations

import pickle
import zlib
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_glm.checkpoint import sharded
from megatron_glm.config import iterations
from tests.checkpoint.test_checkpoint_sharded import SHAPES, gathered, layout, save, tensors


def as_version_1(folder: Path) -> None:
    """Replaces the index of an `iter_…` folder by what earlier versions wrote: torch's metadata and a CRC-32."""
    reader = sharded.Reader(folder)
    stored, found = reader.index, {}
    for name in reader.shapes:
        rows = range(stored.first[stored.numbers[name]], stored.first[stored.numbers[name] + 1])
        found[name] = {torch.Size(stored.piece(row).offsets): row for row in rows}
    described = {
        name: TensorStorageMetadata(
            TensorProperties(reader.shapes[name][1]),
            torch.Size(reader.shapes[name][0]),
            [ChunkStorageMetadata(offsets, torch.Size(stored.piece(row).sizes)) for offsets, row in chunks.items()],
        )
        for name, chunks in found.items()
    }
    rows = {MetadataIndex(name, offsets): row for name, chunks in found.items() for offsets, row in chunks.items()}
    places = {
        key: _StorageInfo(stored.files[stored.file[row]], int(stored.start[row]), int(stored.length[row]))
        for key, row in rows.items()
    }
    checksums = {key: int(stored.checksum[row]) for key, row in rows.items()}
    content = pickle.dumps(Metadata(described, checksums, places, storage_meta=StorageMeta()))
    (folder / ".metadata").write_bytes(content + zlib.crc32(content).to_bytes(4))
    reader.index_file.unlink()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_checkpoints_of_earlier_versions_are_read_and_resharded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """They were torch's own format, which shows that the fixture is one."""
    monkeypatch.setattr(sharded, "FILE_BYTES", 500)
    save(tmp_path, layout(1, [0.5], tensors()))
    folder = tmp_path / "iter_0000004"
    as_version_1(folder)
    state = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    assert all(torch.equal(state[name], tensor) for name, tensor in tensors().items())

    assert iterations.start(tmp_path) == (tmp_path, 4)
    wanted = layout(0, [0.3], None)
    sharded.load(tmp_path, 4, wanted, None)
    assert all(torch.equal(tensor, tensors()[name]) for name, tensor in gathered(wanted).items())
    reader = sharded.Reader(folder)
    for part in reader.index.by_file().values():
        reader.check_data(part)
    content = (folder / ".metadata").read_bytes()
    for place in range(0, len(content), 97):
        (folder / ".metadata").write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(ValueError, match=r"\.metadata is damaged"):
            sharded.Reader(folder)
