"""The .bin/.idx format: what is written reads back, here and in Megatron, and what is damaged is named."""

from __future__ import annotations

import struct
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_glm.data.indexed import HEADER, MAGIC, IndexedDataset, IndexedWriter, smallest_dtype

DOCUMENTS = [[5, 6, 7], [], [8], [9, 10, 11, 12], [65000, 0]]


def write(prefix: Path, documents=DOCUMENTS, dtype=np.uint16) -> str:
    with IndexedWriter(prefix, dtype) as writer:
        for ids in documents:
            writer.add_document(np.array(ids, np.int64))
    return str(prefix)


def read(prefix: str) -> list[list[int]]:
    dataset = IndexedDataset(prefix)
    return [dataset[i].tolist() for i in range(len(dataset))]


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64])
def test_documents_read_back(tmp_path: Path, dtype):
    prefix = write(tmp_path / "data", dtype=dtype)
    dataset = IndexedDataset(prefix)
    assert read(prefix) == DOCUMENTS
    assert dataset.dtype == dtype and dataset.document_lengths().tolist() == [3, 0, 1, 4, 2]
    assert [dataset.count_tokens(a, b) for a, b in ((0, 5), (1, 3), (2, 2), (3, 5))] == [10, 1, 0, 6]
    ids = dataset[3]
    dataset.release()
    assert ids.tolist() == DOCUMENTS[3]


def test_bytes_of_the_published_layout(tmp_path: Path):
    prefix = write(tmp_path / "data", [[1, 2, 3], [4]])
    expected = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 2, 3)
    expected += struct.pack("<2i", 3, 1) + struct.pack("<2q", 0, 6) + struct.pack("<3q", 0, 1, 2)
    assert Path(prefix + ".idx").read_bytes() == expected
    assert Path(prefix + ".bin").read_bytes() == struct.pack("<4H", 1, 2, 3, 4)


def test_a_document_of_several_sequences_is_one(tmp_path: Path):
    with IndexedWriter(tmp_path / "data", np.int32) as writer:
        writer.add_document(np.arange(7), lengths=[3, 4])
        writer.add_document(np.arange(2))
    assert read(str(tmp_path / "data")) == [[0, 1, 2, 3, 4, 5, 6], [0, 1]]
    assert IndexedDataset(tmp_path / "data").document_lengths().tolist() == [7, 2]


def test_data_sets_are_joined(tmp_path: Path):
    first, second = write(tmp_path / "a"), write(tmp_path / "b", [[1], [2, 3]])
    with IndexedWriter(tmp_path / "c", np.uint16) as writer:
        for prefix in (first, second):
            writer.add_dataset(IndexedDataset(prefix))
    assert read(str(tmp_path / "c")) == DOCUMENTS + [[1], [2, 3]]
    assert IndexedDataset(tmp_path / "c").document_lengths().tolist() == [3, 0, 1, 4, 2, 1, 2]
    with pytest.raises(ValueError, match="holds uint16, .* int32"), IndexedWriter(tmp_path / "d", np.int32) as writer:
        writer.add_dataset(IndexedDataset(first))


def test_nothing_has_its_name_before_all_is_written(tmp_path: Path):
    with pytest.raises(RuntimeError), IndexedWriter(tmp_path / "data", np.int32) as writer:
        writer.add_document(np.arange(3))
        assert [path.name for path in tmp_path.iterdir()] == ["data.bin.tmp"]
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("documents", [1, 100_000])
def test_a_full_disk_is_named_and_leaves_nothing(tmp_path: Path, documents: int):
    """/dev/full takes what is written, and fails when it is to reach the disk: at the end, or before."""
    (tmp_path / "data.bin.tmp").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device: '.*data.bin.tmp'"):
        with IndexedWriter(tmp_path / "data", np.int32) as writer:
            for _ in range(documents):
                writer.add_bytes(bytes(4), [1])
    assert not any(path.is_symlink() or path.exists() for path in tmp_path.iterdir())


def test_ids_that_do_not_fit_are_refused(tmp_path: Path):
    for ids in ([70000], [-1]):
        with pytest.raises(ValueError, match="do not fit into uint16"):
            write(tmp_path / "data", [ids])
    assert [smallest_dtype(size) for size in (65499, 65500)] == [np.uint16, np.int32]


def test_megatron_reads_what_is_written_here_and_the_other_way_round(tmp_path: Path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        megatron = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    for dtype in (np.uint16, np.int32):
        prefix = write(tmp_path / f"ours{dtype.__name__}", dtype=dtype)
        theirs = megatron.IndexedDataset(prefix)
        assert [theirs[i].tolist() for i in range(len(theirs))] == DOCUMENTS
        assert theirs.document_indices.tolist() == [0, 1, 2, 3, 4, 5] and theirs.index.dtype == dtype
        prefix = str(tmp_path / f"theirs{dtype.__name__}")
        builder = megatron.IndexedDatasetBuilder(prefix + ".bin", dtype)
        for ids in DOCUMENTS:
            builder.add_document(torch.tensor(ids, dtype=torch.int64).numpy(), [len(ids)])
        builder.add_item(torch.tensor([1, 2]))
        builder.add_item(torch.tensor([3]))
        builder.end_document()
        builder.finalize(prefix + ".idx")
        assert read(prefix) == DOCUMENTS + [[1, 2, 3]]
        assert IndexedDataset(prefix).document_lengths().sum() == 13


def header(**changes) -> bytes:
    values = {"magic": MAGIC, "version": 1, "code": 8, "sequences": 5, "bounds": 6} | changes
    return HEADER.pack(*values.values())


@pytest.mark.parametrize(
    "start, message",
    [
        (header(magic=b"MMIDIDX\0\1"), r"data.idx is no index: it begins with b'MMIDIDX\\x00\\x01'"),
        (b"MM", "data.idx is no index"),
        (header(version=2), "data.idx is of version 2, expected 1"),
        (header(code=9), r"data.idx has the dtype code 9, expected one of \[1, 2"),
        (header(code=7), r"dtype code 7 \(float32\), but token ids are integers"),
        (header(code=4), "data.bin is truncated: it holds 20 bytes, but 24 by .*data.idx"),
        (header(sequences=4), r"data.idx holds 142 bytes, but 130 by its header \(4 sequences\)"),
    ],
    ids=["magic", "short", "version", "code", "float", "other dtype", "count"],
)
def test_a_wrong_header_is_named(tmp_path: Path, start: bytes, message: str):
    prefix = write(tmp_path / "data")
    path = Path(prefix + ".idx")
    path.write_bytes(start + path.read_bytes()[HEADER.size :] if len(start) > 2 else start)
    with pytest.raises(ValueError, match=message):
        IndexedDataset(prefix).document_lengths()


def test_files_that_are_missing_or_of_another_size(tmp_path: Path):
    prefix = write(tmp_path / "data")
    tokens = Path(prefix + ".bin").read_bytes()
    Path(prefix + ".bin").write_bytes(tokens[:-1])
    with pytest.raises(ValueError, match="data.bin is truncated: it holds 19 bytes, but 20 by .*data.idx"):
        IndexedDataset(prefix)
    Path(prefix + ".bin").write_bytes(tokens + b"12")
    with pytest.raises(ValueError, match="data.bin is of another index: it holds 22 bytes, but 20 by .*data.idx"):
        IndexedDataset(prefix)
    with pytest.raises(ValueError, match="data.idx.idx does not exist; give the prefix of both files without .idx"):
        IndexedDataset(prefix + ".idx")
    with pytest.raises(ValueError, match="data.bin.idx does not exist; give the prefix of both files without .bin"):
        IndexedDataset(prefix + ".bin")
    with pytest.raises(ValueError, match="the prefix of a .bin and .idx is empty"):
        IndexedDataset("")
    Path(prefix + ".bin").unlink()
    with pytest.raises(ValueError, match="data.bin does not exist; tools/preprocess_data.py makes"):
        IndexedDataset(prefix)


def test_no_documents(tmp_path: Path):
    with pytest.raises(ValueError, match="none.idx has no documents: 0 of them, 0 sequences"):
        IndexedDataset(write(tmp_path / "none", []))
    with pytest.raises(ValueError, match="empty.bin is empty: its 2 documents hold no token"):
        IndexedDataset(write(tmp_path / "empty", [[], []]))


@pytest.mark.parametrize(
    "position, value, message",
    [
        (HEADER.size + 4, struct.pack("<i", 1), "sequence 2 is at byte 6 with 1 tokens, but .* end at byte 8"),
        (HEADER.size + 20 + 24, struct.pack("<q", 0), "sequence 3 is at byte 0 with 4 tokens"),
        (HEADER.size + 60 + 8, struct.pack("<q", 3), "its document bounds do not rise from 0 to 5"),
    ],
)
def test_entries_that_contradict_others(tmp_path: Path, position: int, value: bytes, message: str):
    prefix = write(tmp_path / "data")
    raw = bytearray(Path(prefix + ".idx").read_bytes())
    raw[position : position + len(value)] = value
    Path(prefix + ".idx").write_bytes(raw)
    with pytest.raises(ValueError, match=f"data.idx is damaged: {message}"):
        IndexedDataset(prefix).document_lengths()
