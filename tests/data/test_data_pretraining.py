"""Samples of .bin/.idx files: what each holds, what it depends on, splits, index files, and what is refused."""

from __future__ import annotations

import errno
import fcntl
import os
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_glm.config import PretrainDataConfig
from megatron_glm.config.data import parse_split
from megatron_glm.data.indexed import HEADER, MAGIC, IndexedWriter
from megatron_glm.data.loader import MicroBatches
from megatron_glm.data.pretraining import MockDataset, build_datasets

VOCAB = 100_000
ALL_TRAIN = "1,0,0"


def write(prefix: Path, lengths: list[int], first: int = 0) -> str:
    """Documents of these lengths; every token is another id, so that each tells its place."""
    with IndexedWriter(prefix, np.int32) as writer:
        for length in lengths:
            writer.add_document(np.arange(first, first + length))
            first += length
    return str(prefix)


def lengths_of(count: int, longest: int = 40, seed: int = 0) -> list[int]:
    """With documents of no token and of one, and some that are longer than several samples."""
    return np.random.default_rng(seed).integers(0, longest, count).tolist()


def build(data: PretrainDataConfig, samples=(None, 0, 0), seed: int = 1, vocab_size: int = VOCAB):
    calls = []

    def once(build) -> None:
        calls.append(build())

    datasets = build_datasets(data, vocab_size, seed, *samples, once)
    assert len(calls) == 1
    return datasets


def train(*entries: str, samples: int | None = None, seed: int = 1, **changes):
    data = PretrainDataConfig(data_path=entries, **{"split": ALL_TRAIN, "seq_length": 16} | changes)
    return build(data, (samples, 0, 0), seed)[0]


def inputs(dataset, index: int) -> list[int]:
    return [int(i) for ids, _, cut, *_ in dataset.pack(index) for i in (ids[:-1] if cut else ids)]


@pytest.mark.parametrize("longest", [3, 40, 200])
def test_an_epoch_holds_every_token_once_and_documents_in_one_piece_or_cut(tmp_path: Path, longest: int):
    lengths = lengths_of(150, longest)
    dataset = train(write(tmp_path / "data", lengths))
    document_of = np.repeat(np.arange(len(lengths)), lengths)
    ends = set((np.cumsum(lengths) - 1).tolist())
    assert dataset.packs_per_epoch == (sum(lengths) - 1) // 16
    seen = []
    for batch in (MicroBatches(dataset).batch(i, 1, 1)[0] for i in range(dataset.packs_per_epoch)):
        assert batch.padding == 0 and len(batch.tokens) == 16
        tokens, labels = batch.tokens.tolist(), batch.labels.tolist()
        # the next token of the same document, whether the sample holds it or not; nothing at the document's end
        assert labels == [-100 if token in ends else token + 1 for token in tokens]
        assert batch.loss_mask.tolist() == [label != -100 for label in labels]
        starts = np.flatnonzero(np.diff(document_of[tokens], prepend=-1))
        assert batch.doc_lengths == tuple(np.diff([*starts, 16]))
        assert batch.position_ids.tolist() == [i for length in batch.doc_lengths for i in range(length)]
        seen += tokens
    assert len(set(seen)) == len(seen) == 16 * dataset.packs_per_epoch


def test_samples_follow_each_other_in_the_epochs_order(tmp_path: Path):
    """Every sample but one begins where another ends: documents are joined, not each cut by itself."""
    dataset = train(write(tmp_path / "data", lengths_of(100)), no_document_mask=True)
    pieces = [dataset.pack(i)[0].ids.tolist() for i in range(dataset.packs_per_epoch)]
    heads, tails = {ids[0] for ids in pieces}, {ids[-1] for ids in pieces}
    assert len(heads - tails) <= 1 and len(heads) == len(pieces)


def test_without_document_mask_a_sample_is_one_document_with_a_label_everywhere(tmp_path: Path):
    prefix = write(tmp_path / "data", lengths_of(100))
    masked, joined = train(prefix), train(prefix, no_document_mask=True)
    for i in range(masked.packs_per_epoch):
        apart, batch = MicroBatches(masked).batch(i, 1, 1)[0], MicroBatches(joined).batch(i, 1, 1)[0]
        assert batch.tokens.tolist() == apart.tokens.tolist()
        assert batch.doc_lengths == (16,) and batch.loss_tokens == 16
        assert batch.position_ids.tolist() == list(range(16))
        assert batch.labels[:-1].tolist() == batch.tokens[1:].tolist()
        same = apart.loss_mask
        assert batch.labels[same].tolist() == apart.labels[same].tolist()


def test_a_cut_document_keeps_its_label_inside_a_micro_batch(tmp_path: Path):
    dataset = train(write(tmp_path / "data", [200]))
    [batch] = MicroBatches(dataset).batch(0, 3, 3)
    assert batch.doc_lengths == (16, 16, 16) and batch.loss_tokens == 48
    assert batch.labels.tolist() == (batch.tokens + 1).tolist()


def test_a_sample_depends_on_seed_and_number_alone(tmp_path: Path):
    prefix = write(tmp_path / "data", lengths_of(100))
    longer, shorter = train(prefix, samples=500), train(prefix, samples=130)
    packs = longer.packs_per_epoch
    samples = [inputs(longer, i) for i in range(3 * packs)]
    assert samples[:130] == [inputs(shorter, i) for i in range(130)]
    epochs = [samples[e * packs : (e + 1) * packs] for e in range(3)]
    assert not set(map(tuple, epochs[0])) & set(map(tuple, epochs[1])) & set(map(tuple, epochs[2]))
    assert [inputs(train(prefix, seed=2), i) for i in range(packs)] != epochs[0]


def test_a_step_and_its_ids_are_the_same_for_every_layout_and_after_a_resume(tmp_path: Path):
    prefix = write(tmp_path / "data", lengths_of(300))
    data = MicroBatches(train(prefix, samples=400))

    def tokens(dp: int, micro: int) -> list[list[int]]:
        ranks = [data.batch(96, 24, micro, rank, dp) for rank in range(dp)]
        merged = [batches[m] for m in range(len(ranks[0])) for batches in ranks]
        return [row.tolist() for batch in merged for row in batch.tokens.view(-1, 16)]

    assert tokens(1, 1) == tokens(2, 3) == tokens(4, 2) == tokens(1, 24)
    assert data.sample_ids(96, 24) == MicroBatches(train(prefix, samples=400)).sample_ids(96, 24)
    firsts = [row[0] for row in tokens(1, 1)]
    starts = np.cumsum([0, *lengths_of(300)])
    named = [id.removeprefix("data:").split("+") for id in data.sample_ids(96, 24)]
    assert [starts[int(document)] + int(token) for document, token in named] == firsts


def test_split_is_by_documents_with_megatrons_rounding(tmp_path: Path):
    lengths = lengths_of(205)
    prefix = write(tmp_path / "data", lengths)
    data = PretrainDataConfig(data_path=(prefix,), split="90,7.5,2.5", seq_length=4)
    parts = build(data, (None, None, None))
    bounds = [(part.begin, part.end) for part in parts]
    assert bounds == [(0, 184), (184, 200), (200, 205)]  # int(round(184.5)) is 184: halves go to the even number
    starts = np.cumsum([0, *lengths])
    for part, (begin, end) in zip(parts, bounds, strict=True):
        for i in range(part.packs_per_epoch):
            assert starts[begin] <= min(inputs(part, i)) and max(inputs(part, i)) < starts[end]
    assert build(replace(data, split="1"), (None, None, 5))[1:] == (None, None)
    assert build(data, (None, 0, 0))[1:] == (None, None)


def test_one_blend_for_each_part(tmp_path: Path):
    first, second = write(tmp_path / "a", [60] * 4), write(tmp_path / "b", [50] * 4, first=1000)
    data = PretrainDataConfig(train_data_path=(first,), valid_data_path=("1", second), seq_length=16)
    training, validation, test = build(data, (None, None, None))
    assert (training.packs_per_epoch, validation.packs_per_epoch, test) == (14, 12, None)
    assert min(inputs(validation, 0)) >= 1000 > max(inputs(training, 0))
    steps = [batches for batches in MicroBatches(validation).evaluation(8, 8)]
    assert [batch.padding for [batch] in steps] == [0, 64]


def test_index_files_are_built_once_and_again_when_the_data_change(tmp_path: Path):
    prefix = write(tmp_path / "data", lengths_of(100))
    before = inputs(train(prefix), 0)
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "index_cache").iterdir()}
    assert len(files) == 2 and all(path.suffix == ".npy" for path in files)
    assert inputs(train(prefix), 0) == before
    assert files == {path: path.stat().st_mtime_ns for path in (tmp_path / "index_cache").iterdir()}
    for change in ({"seq_length": 17}, {"seed": 2}, {"split": "1,1,0"}):
        known = set((tmp_path / "index_cache").iterdir())
        train(prefix, **change)
        assert len(set((tmp_path / "index_cache").iterdir()) - known) == 2
    shuffled = lengths_of(100)[::-1]  # as many documents and tokens, in files of the same size
    write(tmp_path / "data", shuffled)
    assert set(inputs(train(prefix), 0)) != set(before)
    train(prefix, data_cache_path=str(tmp_path / "x" / "y"))
    assert len(list((tmp_path / "x" / "y").iterdir())) == 2


def test_index_files_that_are_missing_damaged_or_cannot_be_written(tmp_path: Path):
    prefix = write(tmp_path / "data", lengths_of(100))
    data = PretrainDataConfig(data_path=(prefix,), seq_length=16, split=ALL_TRAIN)
    with pytest.raises(ValueError, match=r"index .*data-\w+-epoch0-documents.npy is not there: one rank built it"):
        build_datasets(data, VOCAB, 1, 10, 0, 0, lambda build: None)
    train(prefix)
    for path in (tmp_path / "index_cache").iterdir():
        path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ValueError, match="epoch0-documents.npy is damaged, remove it"):
        train(prefix)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot write the index .*; give another --data-cache-path"):
        train(prefix, data_cache_path=str(tmp_path / "file" / "folder"))


@pytest.mark.parametrize("array, value", [("documents", -1), ("documents", 10**6), ("samples", -1), ("samples", 10**6)])
def test_an_index_file_with_impossible_entries_is_named(tmp_path: Path, array: str, value: int):
    prefix = write(tmp_path / "data", lengths_of(100))
    train(prefix)
    [path] = (tmp_path / "index_cache").glob(f"*{array}.npy")
    found = np.load(path)
    found[...] = np.array(value).astype(found.dtype)
    np.save(path, found)
    with pytest.raises(ValueError, match=f"the index is damaged, remove .*{array}.npy"):
        train(prefix).pack(0)
    np.save(path, found.astype(float))
    with pytest.raises(ValueError, match="damaged, remove it: it holds float64"):
        train(prefix)


def test_runs_that_build_the_same_index_at_once_do_not_mix(tmp_path: Path, monkeypatch, capsys):
    """On a file system without locks."""
    prefix, replace_file = write(tmp_path / "data", lengths_of(100)), os.replace

    def no_lock(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    def meanwhile(source, target):
        monkeypatch.setattr(os, "replace", replace_file)
        train(prefix)  # the other run
        replace_file(source, target)

    monkeypatch.setattr(fcntl, "flock", no_lock)
    monkeypatch.setattr(os, "replace", meanwhile)
    assert inputs(train(prefix), 0) == inputs(train(prefix), 0)
    assert len(list((tmp_path / "index_cache").glob("*.npy"))) == 2
    assert "cannot be locked (No locks available): each node makes its files for itself" in capsys.readouterr().out


def test_opening_and_reading_take_no_memory_that_grows_with_the_data(tmp_path: Path):
    """10^9 tokens in 10^6 documents, their .bin a hole in the file."""
    count, length = 1_000_000, 1000
    with (tmp_path / "big.idx").open("wb") as file:
        file.write(HEADER.pack(MAGIC, 1, 4, count, count + 1) + np.full(count, length, np.int32).tobytes())
        file.write((np.arange(count) * length * 4).tobytes() + np.arange(count + 1).tobytes())
    with (tmp_path / "big.bin").open("wb") as file:
        os.truncate(file.fileno(), count * length * 4)
    train(str(tmp_path / "big"), seq_length=4096)
    tracemalloc.start()
    dataset = train(str(tmp_path / "big"), seq_length=4096)
    assert dataset.packs_per_epoch == 244140
    for index in range(0, 244140, 10_000):
        assert sum(len(ids) - cut for ids, _, cut, *_ in dataset.pack(index)) == 4096
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2_000_000


@pytest.mark.parametrize("split", ["", "a,b", "1,2,3,4", "-1,2", "0,0,0", "nan", "inf,1", "1e308,1e308", "1,,2"])
def test_a_split_that_does_not_parse(split: str):
    with pytest.raises(ValueError, match=f"--split {split} "):
        parse_split(split)


def test_parts_without_a_sample_are_refused(tmp_path: Path):
    prefix = write(tmp_path / "data", [10] * 20)
    data = PretrainDataConfig(data_path=(prefix,), seq_length=16)
    with pytest.raises(ValueError, match="the valid part of --split 100,1,0 has 0, in 0 of the 20 documents of .*data"):
        build(replace(data, split="100,1,0"), (None, None, 0))
    with pytest.raises(ValueError, match="--seq-length 16 takes 17 tokens, but the valid part of .* has 10, in 1 of"):
        build(replace(data, split="95,5,0"), (None, 8, 0))
    assert build(replace(data, split="95,5,0"), (None, 0, 0))[1] is None
    with pytest.raises(ValueError, match="the train part of --split 0,1,0 has 0"):
        build(replace(data, split="0,1,0"))
    with pytest.raises(ValueError, match="--seq-length 200 takes 201 tokens, but --train-data-path has 200, in 20 of"):
        build(PretrainDataConfig(train_data_path=(prefix,), seq_length=200))
    assert train(prefix, seq_length=199).packs_per_epoch == 1


def test_ids_outside_the_vocabulary_are_named(tmp_path: Path):
    with IndexedWriter(tmp_path / "data", np.int32) as writer:
        writer.add_document(np.arange(20))
        writer.add_document(np.array([3, 4, -1, *range(20)]))
    data = PretrainDataConfig(data_path=(str(tmp_path / "data"),), seq_length=42, split=ALL_TRAIN)
    with pytest.raises(ValueError, match="data: token 2 of document 1 is -1, outside the model's vocabulary of 20"):
        build(data, vocab_size=20)[0].pack(0)
    write(tmp_path / "other", [50])
    dataset = build(replace(data, data_path=(str(tmp_path / "other"),), seq_length=7), vocab_size=49)[0]
    with pytest.raises(ValueError, match="other: token 49 of document 0 is 49, outside the model's vocabulary of 49"):
        for i in range(dataset.packs_per_epoch):
            dataset.pack(i)


def test_samples_that_nobody_asked_for_are_refused(tmp_path: Path):
    prefix = write(tmp_path / "data", [10] * 20)
    with pytest.raises(ValueError, match="sample 24 of .*data is none of the 20 asked for"):
        train(prefix, samples=20).pack(24)
    with pytest.raises(ValueError, match="sample -1 "):
        train(prefix, samples=20).pack(-1)


@pytest.mark.parametrize("joined", [False, True])
def test_made_up_data(joined: bool):
    data = PretrainDataConfig(mock_data=True, seq_length=64, no_document_mask=joined)
    training, validation, test = build(data, (20, None, 0), vocab_size=50)
    assert isinstance(training, MockDataset) and training.packs_per_epoch == 20 and test is None
    batches = [MicroBatches(training).batch(i, 1, 1)[0] for i in range(20)]
    assert all(batch.padding == 0 and 0 <= batch.tokens.min() and batch.tokens.max() < 50 for batch in batches)
    assert len({tuple(batch.tokens.tolist()) for batch in batches}) == 20
    assert max(len(batch.doc_lengths) for batch in batches) > 1 or joined
    if not joined:  # what comes next can be learnt
        assert all(((b.labels - b.tokens) % 50)[b.loss_mask].tolist() == [1] * b.loss_tokens for b in batches)
    assert inputs(training, 3) == inputs(build(data, (20, 0, 0), vocab_size=50)[0], 3) != inputs(validation, 3)
