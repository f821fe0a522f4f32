"""The samples of a pre-training run: sequences of one length cut from the documents of .bin/.idx files.

In an epoch, the documents of a prefix are shuffled and joined; with a --seq-length of S, sample k is the S tokens from
k S on, and the token behind them, which only is a label. The samples are shuffled in turn, and the next epoch shuffles
both anew; the fewer than S + 1 tokens at an epoch's end are left out. Sample i is thus a function of (documents, split,
seq_length, seed, i) alone: neither the length of the run nor the layout matters.

Documents stay apart in a sample: none sees another, positions begin anew, and a document's last token has no label.
With --no-document-mask a sample is one document instead: tokens see all before them in the sample, positions run
through, and every token has a label, a document's last token the first one of the next document.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import numpy as np

from megatron_glm.config import PretrainDataConfig
from megatron_glm.config.data import PARTS, parse_split

from .blend import ENTRY, cache_key, deal, open_array, parse_blend, save_array, whole_weights
from .cache import Once, Say, cache_folder, locked, writing
from .indexed import IndexedDataset
from .loader import Packs
from .packing import Document, Piece

FORMAT = 1  # part of every cache key: raise it when the same key should give another index
MOCK_EPOCH = 64  # made-up samples where a whole epoch is asked for


class PrefixSamples:
    """The samples of the documents [begin, end) of one prefix.

    Args:
        where: what the documents are, for errors, such as "the train part of --split 969,30,1".
        cache: folder of the index files.
        samples: how many of them are asked for, None for one epoch.

    Raises ValueError if the documents do not fill one sample.
    """

    def __init__(
        self,
        dataset: IndexedDataset,
        begin: int,
        end: int,
        where: str,
        data: PretrainDataConfig,
        vocab_size: int,
        seed: int,
        cache: Path,
        samples: int | None,
    ):
        self.dataset, self.begin, self.end = dataset, begin, end
        self.vocab_size, self.seed = vocab_size, seed
        self.seq_length = seq_length = data.seq_length
        self.document_mask = not data.no_document_mask
        self.token_count = dataset.count_tokens(begin, end)
        self.packs_per_epoch = (self.token_count - 1) // seq_length
        if self.packs_per_epoch < 1:
            raise ValueError(
                f"--seq-length {seq_length} takes {seq_length + 1} tokens, but {where} has {self.token_count}, in"
                f" {end - begin} of the {len(dataset)} documents of {dataset.prefix}: give it more, no share"
                " at all, or a smaller --seq-length"
            )
        self.require(self.packs_per_epoch if samples is None else samples)
        self._order_dtype = np.uint32 if end <= 2**32 else np.int64
        key = cache_key(
            format=FORMAT, files=dataset.fingerprint(), documents=[begin, end], length=seq_length, seed=seed
        )
        self._cache = cache / f"{Path(dataset.prefix).name}-{key}"
        self._opened = lru_cache(maxsize=3)(self._open)  # of the last epochs: a step may straddle two

    def require(self, samples: int) -> None:
        """Sets how many samples `build` prepares."""
        self.samples, self.epochs = samples, -(-samples // self.packs_per_epoch)

    def summary(self) -> str:
        """What the samples are, in one line."""
        return (
            f"{self.dataset.prefix}: {self.end - self.begin} documents, {self.token_count} tokens,"
            f" {self.packs_per_epoch} samples of {self.seq_length} in an epoch,"
            f" {self.samples / self.packs_per_epoch:.2f} epochs"
        )

    def build(self, say: Say) -> None:
        """Writes the indices of all epochs that are not there yet. Of several processes, one does."""
        if not self._missing():
            return
        with writing(self._cache.parent), locked(self._cache, lambda: not self._missing(), say):
            lengths = self.dataset.document_lengths()[self.begin : self.end]
            for epoch in self._missing():
                for path, array in zip(self._paths(epoch), self._deal(lengths, epoch), strict=True):
                    save_array(path, array)

    def _missing(self) -> list[int]:
        """The epochs without their files."""
        return [epoch for epoch in range(self.epochs) if not all(path.is_file() for path in self._paths(epoch))]

    def open(self) -> None:
        """Checks that this process sees what `build` wrote, maybe on another machine."""
        for epoch in range(self.epochs):
            self._opened(epoch)

    def pack(self, index: int) -> list[Piece]:
        """The documents of sample `index`, seq_length tokens together. Raises ValueError for ids outside the model's
        vocabulary."""
        self.dataset.release()
        documents, (_, offset, _) = self._locate(index)
        left, parts = self.seq_length + 1, []
        for document in documents:
            ids = self.dataset[document][offset : offset + left]
            self._check(ids, document, offset)
            if len(ids):
                parts.append(ids)
            left, offset = left - len(ids), 0
        if left:
            raise self._damaged(index, f"misses {left} of {self.seq_length + 1} tokens")
        if not self.document_mask:
            parts = [np.concatenate(parts)]
        elif len(parts[-1]) == 1:  # the token behind the sample begins another document: it is nobody's label
            parts.pop()
            return [Piece(ids, np.ones(len(ids), bool)) for ids in parts]
        return [Piece(ids, np.ones(len(ids), bool), cut=i == len(parts) - 1) for i, ids in enumerate(parts)]

    def sample_id(self, index: int) -> str:
        """Where sample `index` begins: "name of the prefix:document+token"."""
        documents, (_, offset, _) = self._locate(index)
        return f"{Path(self.dataset.prefix).name}:{documents[0]}+{offset}"

    def _locate(self, index: int) -> tuple[list[int], list[int]]:
        """(the documents of a sample, [place of the first in the epoch's order, token in it, place of the last])."""
        if not 0 <= index < self.epochs * self.packs_per_epoch:
            raise ValueError(f"sample {index} of {self.dataset.prefix} is none of the {self.samples} asked for")
        epoch, number = divmod(index, self.packs_per_epoch)
        order, samples = self._opened(epoch)
        first, _, last = sample = samples[number].tolist()
        documents = order[first : last + 1].tolist() if 0 <= first <= last else []
        if not documents or min(documents) < self.begin or max(documents) >= self.end:
            raise self._damaged(index, f"has no documents of {self.begin} to {self.end - 1}")
        return documents, sample

    def _damaged(self, index: int, what: str) -> ValueError:
        paths = " and ".join(map(str, self._paths(index // self.packs_per_epoch)))
        return ValueError(f"the index is damaged, remove {paths}: sample {index} {what}")

    def _check(self, ids: np.ndarray, document: int, offset: int) -> None:
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self.vocab_size:
            at = int(np.flatnonzero((ids < 0) | (ids >= self.vocab_size))[0])
            raise ValueError(
                f"{self.dataset.prefix}: token {offset + at} of document {document} is {ids[at]}, outside the model's"
                f" vocabulary of {self.vocab_size}"
            )

    def _deal(self, lengths: np.ndarray, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """(the documents in the order of this epoch [n]; its samples in theirs, int64 [samples, 3], see `_locate`).

        lengths: tokens of each document [n].
        """
        random = np.random.Generator(np.random.PCG64([self.seed, epoch]))
        order = random.permutation(len(lengths))
        ends = np.cumsum(lengths[order])
        tokens = np.arange(self.packs_per_epoch + 1) * self.seq_length
        places = np.searchsorted(ends, tokens, side="right")
        offsets = tokens - (ends - lengths[order])[places]
        samples = np.stack([places[:-1], offsets[:-1], places[1:]], axis=1)
        order += self.begin
        return order.astype(self._order_dtype), samples[random.permutation(len(samples))]

    def _paths(self, epoch: int) -> tuple[Path, Path]:
        base = f"{self._cache.name}-epoch{epoch}"
        return self._cache.with_name(f"{base}-documents.npy"), self._cache.with_name(f"{base}-samples.npy")

    def _open(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """What `_deal` returned for an epoch, mapped from its files."""
        shapes = (self.end - self.begin,), (self.packs_per_epoch, 3)
        order, samples = map(open_array, self._paths(epoch), shapes, (self._order_dtype, np.int64))
        return order, samples


class Part(Packs, Protocol):
    """What a blend is made of: samples that are asked for, built by one process and opened by all."""

    def require(self, samples: int) -> None: ...

    def build(self, say: Say) -> None: ...

    def open(self) -> None: ...


class Blend:
    """Samples of several data sets in proportion to weights: of the first n samples each has its share within one.

    An epoch is as many samples as the parts' epochs have together. Without weights, each part counts by its samples:
    an epoch is then one pass over every part.
    """

    def __init__(self, parts: Sequence[Part], weights: list[Fraction] | None, cache: Path, samples: int | None = None):
        self.parts, self.seq_length = parts, parts[0].seq_length
        self.packs_per_epoch = sum(part.packs_per_epoch for part in parts)
        self.samples = self.packs_per_epoch if samples is None else samples
        self.weights = whole_weights(weights or [part.packs_per_epoch for part in parts])
        self.period = sum(self.weights)
        for part, weight in zip(parts, self.weights, strict=True):
            part.require(-(-self.samples * weight // self.period))
        self._slots = min(self.period, self.samples)
        self._path = cache / f"blend-{cache_key(format=FORMAT, weights=self.weights, slots=self._slots)}.npy"

    def summary(self) -> str:
        weighted = zip(self.weights, self.parts, strict=True)
        return "; ".join(f"{weight / self.period:.2%} of {part.summary()}" for weight, part in weighted)

    def build(self, say: Say) -> None:
        """Writes the order of the parts over one period, or over the samples asked for, and the parts' indices."""
        if not self._path.is_file():
            save_array(self._path, deal(self.weights, self._slots))
        for part in self.parts:
            part.build(say)

    def open(self) -> None:
        self._table = open_array(self._path, (self._slots,), ENTRY)
        for part in self.parts:
            part.open()

    def pack(self, index: int) -> Sequence[Document]:
        part, number = self._part(index)
        return part.pack(number)

    def sample_id(self, index: int) -> str:
        part, number = self._part(index)
        return part.sample_id(number)

    def _part(self, index: int) -> tuple[Part, int]:
        if not 0 <= index < self.samples:
            raise ValueError(f"sample {index} of the blend is none of the {self.samples} asked for")
        periods, slot = divmod(index, self.period)
        part, number = self._table[slot].tolist()
        return self.parts[part], periods * self.weights[part] + number


class MockDataset:
    """Made-up samples, to try a run without data: documents of random lengths that count up from a random id."""

    def __init__(self, data: PretrainDataConfig, vocab_size: int, seed: list[int], samples: int | None = None):
        self.vocab_size, self.seq_length, self.seed = vocab_size, data.seq_length, seed
        self.document_mask = not data.no_document_mask
        self.packs_per_epoch = MOCK_EPOCH if samples is None else samples

    def summary(self) -> str:
        return f"made-up data: {self.packs_per_epoch} samples of {self.seq_length}"

    def pack(self, index: int) -> list[Piece]:
        random = np.random.Generator(np.random.PCG64([*self.seed, index]))
        bounds = np.flatnonzero(random.random(self.seq_length - 1) < 4 / self.seq_length) + 1
        lengths = np.diff([0, *bounds.tolist(), self.seq_length + 1])
        ids = [(random.integers(self.vocab_size) + np.arange(length)) % self.vocab_size for length in lengths]
        if not self.document_mask:
            ids = [np.concatenate(ids)]
        return [Piece(part, np.ones(len(part), bool), cut=i == len(ids) - 1) for i, part in enumerate(ids)]

    def sample_id(self, index: int) -> str:
        return f"mock:{index}"

    def build(self, say: Say) -> None:
        """There is nothing to index."""

    def open(self) -> None:
        """There is nothing to open."""


Samples = PrefixSamples | Blend | MockDataset


def build_datasets(
    data: PretrainDataConfig,
    vocab_size: int,
    seed: int,
    train_samples: int | None,
    valid_samples: int | None,
    test_samples: int | None,
    once: Once = lambda work: work(),
    say: Say = print,
) -> tuple[Samples | None, Samples | None, Samples | None]:
    """(training, validation, test) samples; None is one epoch of them, and 0 that a part is not wanted.

    A part without documents is None: one whose share of --split is 0, or which is not named beside --train-data-path.
    `once(build)` runs build() on one process of each node, see `Once`; `say` takes what the user may want to know.

    Raises:
        ValueError: naming the flag or file, for whatever cannot be read, parsed, or filled with one sample.
    """
    wanted = dict(zip(PARTS, (train_samples, valid_samples, test_samples), strict=True))
    opened: dict[str, IndexedDataset] = {}
    train, valid, test = datasets = [
        None if samples == 0 else _part(data, part, vocab_size, seed, samples, opened)
        for part, samples in wanted.items()
    ]

    def build() -> None:
        for dataset in filter(None, datasets):
            dataset.build(say)

    once(build)
    for dataset in filter(None, datasets):
        dataset.open()
    return train, valid, test


def _part(
    data: PretrainDataConfig, part: str, vocab_size: int, seed: int, samples: int | None, opened: dict
) -> Samples | None:
    """The samples of one part; writes nothing. `opened` are the prefixes that another part has opened."""
    number = PARTS.index(part)
    if data.mock_data:
        return MockDataset(data, vocab_size, [seed, number], samples)
    if data.data_path:
        entries, flag, ends = data.data_path, "--data-path", parse_split(data.split)
        share, where = (ends[number], ends[number + 1]), f"the {part} part of --split {data.split}"
    else:
        entries, flag = getattr(data, f"{part}_data_path"), f"--{part}-data-path"
        share, where = (0.0, 1.0), flag
    if part != "train" and (not entries or share[0] == share[1]):
        return None
    prefixes, weights = parse_blend(entries, flag)
    if weights is not None:
        prefixes = [prefix for prefix, weight in zip(prefixes, weights, strict=True) if weight]
        weights = [weight for weight in weights if weight]
    cache = cache_folder(data.data_cache_path, Path(prefixes[0]))
    members = []
    for prefix in prefixes:
        if prefix not in opened:
            opened[prefix] = IndexedDataset(prefix)
        begin, end = (int(round(bound * float(len(opened[prefix])))) for bound in share)
        members.append(PrefixSamples(opened[prefix], begin, end, where, data, vocab_size, seed, cache, samples))
    return members[0] if len(members) == 1 else Blend(members, weights, cache, samples)
