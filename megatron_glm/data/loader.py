"""The micro-batches of a step: which packs of the data a rank computes, and when they are built."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from .packing import Document, PackedBatch, build_batch

T = TypeVar("T")


def one_ahead(items: Iterator[T]) -> Generator[T]:
    """The same items, each made in a thread while the one before it is used; an error comes where its item would.

    Reading the packs of a step takes hundreds of page reads in a row, which a step of the model hides. Close the
    iterator to end the thread early.
    """
    end: Any = object()
    with ThreadPoolExecutor(1, "packs") as thread:
        following = thread.submit(next, items, end)
        while (item := following.result()) is not end:
            following = thread.submit(next, items, end)
            yield item


class Packs(Protocol):
    """What micro-batches are made of: packs that depend on their number alone."""

    seq_length: int

    @property
    def packs_per_epoch(self) -> int: ...

    def pack(self, index: int) -> Sequence[Document]: ...

    def sample_id(self, index: int) -> str: ...

    def summary(self) -> str: ...


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
    ) -> Generator[list[PackedBatch]]:
        """The micro-batches of a rank for each global batch of the first epoch, or of its first `max_batches`.

        Empty packs fill up the last global batch.
        """
        packs = self.dataset.packs_per_epoch
        starts = range(0, packs, global_batch_size)[:max_batches]
        steps = ([i if i < packs else None for i in range(start, start + global_batch_size)] for start in starts)
        return one_ahead(self._build(indices, micro_batch_size, dp_rank, dp_size) for indices in steps)

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
