"""The training data of a run: files to tokenised documents, documents to the packs of a step."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

import numpy as np

from .files import find_files, read_rows
from .packing import PackedBatch, Piece, best_fit, build_batch, cut
from .report import RowReport
from .rows import RowReader, RowSettings

ROWS_PER_CHUNK = 128  # rows of text that are tokenised together


@dataclass(frozen=True)
class Documents:
    """Tokenised documents in flat arrays: 5 bytes a token, whatever the number of documents."""

    tokens: np.ndarray  # [N] int32
    targets: np.ndarray  # [N] bool: is this token to be predicted
    offsets: np.ndarray  # [n + 1] int64: document i is [offsets[i], offsets[i + 1])
    report: RowReport = field(default_factory=RowReport)  # what became of the rows

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        span = slice(self.offsets[i], self.offsets[i + 1])
        return self.tokens[span], self.targets[span]


def load_documents(data_path: Iterable[str], settings: RowSettings) -> Documents:
    """Reads and tokenises all rows of files, folders and globs, kinds mixed at will, keeping no text.

    A malformed row, or one with ids outside the vocabulary, raises ValueError with its file and line, or is counted in
    the report.
    """
    data_path = list(data_path)
    reader, report = RowReader(settings), RowReport()
    tokens, targets, lengths = array("i"), bytearray(), array("q", [0])
    for file in find_files(data_path, report=report):
        rows = read_rows(file)
        while chunk := list(islice(rows, ROWS_PER_CHUNK)):
            tokenised = reader.tokenise(chunk)
            tokens.frombytes(tokenised.ids.tobytes())
            targets += tokenised.targets.tobytes()
            lengths.frombytes(tokenised.lengths.tobytes())
            report.merge(tokenised.report)
    if len(lengths) == 1:
        why = ": there is nothing in it, name another file"
        if report.skipped:
            why = f"; {report.skipped} bad rows, the first is {report.first_skipped}"
        raise ValueError(f"{' '.join(map(str, data_path))} has no usable row{why}")
    offsets = np.cumsum(np.frombuffer(lengths, np.int64))
    return Documents(np.frombuffer(tokens, np.int32), np.frombuffer(targets, bool), offsets, report)


class PackedDataset:
    """An endless sequence of packs: pack i is a function of (documents, seq_length, packing, overlong, seed, i).

    Each epoch deals the documents anew. With best-fit they are dealt by falling length, ties shuffled, and the packs
    are shuffled, so an epoch's lengths fall into the same packs every time: all epochs have the same number of packs,
    and only the documents and the order change. Documents, or pieces of them, without a token to predict are dropped.
    """

    def __init__(
        self,
        documents: Documents,
        seq_length: int,
        packing: str = "best-fit",
        overlong: str = "truncate",
        seed: int = 0,
    ):
        if seq_length < 2:
            raise ValueError(f"--seq-length is {seq_length}, but to predict a token takes at least 2")
        if packing not in ("best-fit", "none"):
            raise ValueError(f"--packing is {packing!r}, expected 'best-fit' or 'none'")
        if overlong not in ("truncate", "split"):
            raise ValueError(f"--overlong is {overlong!r}, expected 'truncate' or 'split'")
        self.documents, self.seq_length, self.seed = documents, seq_length, seed
        lengths = np.diff(documents.offsets)
        self.overlong = int((lengths > seq_length).sum())
        pieces = np.array(
            [
                (offset + start, offset + end)
                for offset, length in zip(documents.offsets.tolist(), lengths.tolist(), strict=False)
                for start, end in cut(length, seq_length, overlong)
            ],
            np.int64,
        )
        # a piece's first token is not predicted: nothing comes before it
        losses = np.array([np.count_nonzero(documents.targets[a + 1 : b]) for a, b in pieces.tolist()], np.int64)
        self.dropped = int((losses == 0).sum())
        self._pieces, self._losses = pieces[losses > 0], losses[losses > 0]
        if not len(self._pieces):
            raise ValueError(
                f"none of the {len(documents)} documents has a loss token within --seq-length {seq_length}"
            )
        self._lengths = self._pieces[:, 1] - self._pieces[:, 0]
        descending = -np.sort(-self._lengths)
        pack_of = best_fit(descending.tolist(), seq_length) if packing == "best-fit" else np.arange(len(descending))
        self._slots = np.argsort(pack_of, kind="stable")  # places in the falling order of lengths, pack after pack
        self._starts = np.concatenate(([0], np.cumsum(np.bincount(pack_of))))  # pack p: _slots[starts[p]:starts[p + 1]]
        self._epochs: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    @property
    def packs_per_epoch(self) -> int:
        return len(self._starts) - 1

    def summary(self) -> str:
        """What became of the documents, in one line."""
        filled = self._lengths.sum() / (self.packs_per_epoch * self.seq_length)
        return (
            f"{len(self.documents)} documents ({self.overlong} overlong, {self.dropped} without loss dropped,"
            f" {self.documents.report.skipped} bad rows skipped) in {self.packs_per_epoch} packs of {self.seq_length}"
            f" tokens, {filled:.1%} full, {self._losses.sum()} loss tokens"
        )

    def pack(self, index: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """The documents of pack `index` (of epoch index // packs_per_epoch): (ids [n] int32, is a target [n] bool)."""
        pieces = self._pieces[self._piece_numbers(index)].tolist()
        return [(self.documents.tokens[a:b], self.documents.targets[a:b]) for a, b in pieces]

    def sample_id(self, index: int) -> str:
        """Where the first document of pack `index` begins: "token+" its place among all tokens of the data."""
        return f"token+{self._pieces[self._piece_numbers(index)[0]][0]}"

    def loss_tokens(self, indices: Iterable[int]) -> int:
        """Loss tokens of these packs together, counted without building them."""
        return int(sum(self._losses[self._piece_numbers(index)].sum() for index in indices))

    def _piece_numbers(self, index: int) -> np.ndarray:
        epoch, place = divmod(index, self.packs_per_epoch)
        if epoch not in self._epochs:
            # a step may straddle two epochs, and evaluation returns to the first
            self._epochs = dict([*self._epochs.items()][-2:]) | {epoch: self._deal(epoch)}
        dealt, order = self._epochs[epoch]
        pack = order[place]
        return dealt[self._starts[pack] : self._starts[pack + 1]]

    def _deal(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """(numbers of the pieces, pack after pack [n]; the order of the packs [packs_per_epoch]) of an epoch."""
        random = np.random.Generator(np.random.PCG64([self.seed, epoch]))
        shuffled = random.permutation(len(self._lengths))
        descending = shuffled[np.argsort(-self._lengths[shuffled], kind="stable")]
        return descending[self._slots], random.permutation(self.packs_per_epoch)


class Packs(Protocol):
    """What micro-batches are made of: packs that depend on their number alone."""

    seq_length: int

    @property
    def packs_per_epoch(self) -> int: ...

    def pack(self, index: int) -> Sequence[Piece | tuple[np.ndarray, np.ndarray]]: ...

    def sample_id(self, index: int) -> str: ...


@dataclass(frozen=True)
class MicroBatches:
    """Cuts the packs of a step into the micro-batches of one data-parallel rank.

    The global batch is packs [consumed_samples, consumed_samples + global_batch_size) of the dataset, whatever the
    layout: nothing else is needed to resume.
    """

    dataset: Packs

    def batch(
        self,
        consumed_samples: int,
        global_batch_size: int,
        micro_batch_size: int,
        dp_rank: int = 0,
        dp_size: int = 1,
    ) -> list[PackedBatch]:
        """The micro-batches of a rank, each of micro_batch_size packs, T = micro_batch_size * seq_length."""
        indices = range(consumed_samples, consumed_samples + global_batch_size)
        return self._build(indices, micro_batch_size, dp_rank, dp_size)

    def sample_ids(self, consumed_samples: int, global_batch_size: int) -> list[str]:
        """What the packs of a step are, whatever the layout: equal runs have equal ids, step for step."""
        return [self.dataset.sample_id(i) for i in range(consumed_samples, consumed_samples + global_batch_size)]

    def evaluation(
        self,
        global_batch_size: int,
        micro_batch_size: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        max_batches: int | None = None,
    ) -> Iterator[list[PackedBatch]]:
        """One pass over the first epoch, at most `max_batches` of it; empty packs fill up the last global batch."""
        packs = self.dataset.packs_per_epoch
        starts = range(0, packs, global_batch_size)[:max_batches]
        for start in starts:
            indices = [i if i < packs else None for i in range(start, start + global_batch_size)]
            yield self._build(indices, micro_batch_size, dp_rank, dp_size)

    def _build(
        self, indices: Sequence[int | None], micro_batch_size: int, dp_rank: int, dp_size: int
    ) -> list[PackedBatch]:
        """Micro-batch m of rank r holds packs (m * dp_size + r) * micro_batch_size onwards of the global batch."""
        stride = micro_batch_size * dp_size
        if len(indices) % stride:
            raise ValueError(
                f"--global-batch-size ({len(indices)}) must be a multiple of"
                f" --micro-batch-size x data-parallel size ({micro_batch_size} x {dp_size})"
            )
        batches = []
        for start in range(dp_rank * micro_batch_size, len(indices), stride):
            chosen = [i for i in indices[start : start + micro_batch_size] if i is not None]
            documents = [document for i in chosen for document in self.dataset.pack(i)]
            batches.append(build_batch(documents, micro_batch_size * self.dataset.seq_length))
        return batches
