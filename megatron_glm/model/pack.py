"""What each query row of a micro-batch may attend to, worked out once on the host."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from megatron_glm.config.model import ModelConfig
from megatron_glm.ops.indexer import key_segments
from megatron_glm.ops.indexer_loss import Chunk, key_chunks
from megatron_glm.ops.rope import rope_tables
from megatron_glm.ops.rows import Rows, RowsByForm
from megatron_glm.ops.upload import upload
from megatron_glm.parallel.collectives import PackOrder
from megatron_glm.parallel.context import pack_order, zigzag_ranges, zigzag_rows


@dataclass(frozen=True)
class DenseRows:
    """The local rows that run as dense causal attention, and the keys that they see."""

    rows: Rows  # [n], local rows
    keys: Rows  # [m], pack positions
    segments: list[int]  # (row begin, row end, key begin, key end) in `rows` and `keys`, flattened


@dataclass(frozen=True)
class SparseRows:
    """The local rows that attend to a selection of keys."""

    rows: Rows  # [n], local rows
    length: Tensor  # int32 [n], keys that each of them selects
    shard_rows: Rows  # [m], those of the sequence shard, counted within the shard
    start: Tensor  # int32 [m], their range of pack positions
    end: Tensor  # int32 [m]
    segments: list[int]  # the same ranges on the host, as `ops.indexer.key_segments` describes them


@dataclass(frozen=True)
class PackRows:
    """One micro-batch on one rank. T rows in the pack, t = T/CP local rows, t/TP rows in the sequence shard.

    `dense` and `sparse` are None where no rank of this pack has such rows, so that all ranks take the same path
    through the collectives; where only this rank has none they are empty.
    """

    total: int
    doc_lengths: tuple[int, ...]
    slots: int  # width K of a selection: min(index_topk, T)
    local_rows: Tensor | None  # int64 [t], pack positions; None = all, in order
    order: PackOrder | None  # puts gathered rows into pack order
    shard: slice  # this TP rank's part of the local rows
    rope: tuple[Tensor, Tensor]  # cos, sin [t, R/2]
    host_start: Tensor  # int64 [t] on the host, the range of pack positions that a local row may see; empty for padding
    host_end: Tensor  # int64 [t] on the host
    chunks: list[Chunk]  # rows of the sequence shard and their keys, as `ops.indexer_loss.key_chunks` cuts them
    valid: Tensor | None  # bool [t/TP]: rows of the shard that are no padding; None = all
    dense: DenseRows | None
    sparse: SparseRows | None

    @cached_property
    def shard_rope(self) -> tuple[Tensor, Tensor]:
        cos, sin = self.rope
        return cos[self.shard], sin[self.shard]

    @cached_property
    def start(self) -> Tensor:
        """`host_start` as int32 on the device, copied where an indexer is trained."""
        return upload(self.host_start.int(), self.rope[0].device)

    @cached_property
    def end(self) -> Tensor:
        return upload(self.host_end.int(), self.rope[0].device)

    @cached_property
    def documents(self) -> tuple[Tensor, Tensor]:
        """The document of each row of the shard, int64 [t/TP], any for padding, and the lengths of all, int64 [n]."""
        lengths = torch.tensor(self.doc_lengths or (1,))
        number = torch.searchsorted(lengths.cumsum(0) - lengths, self.host_start[self.shard], right=True) - 1
        return upload(number, self.rope[0].device), upload(lengths.clamp(min=1), self.rope[0].device)

    @property
    def rows(self) -> RowsByForm:
        """The local rows that attend to expanded keys and those that attend absorbed."""
        return self.dense and self.dense.rows, self.sparse and self.sparse.rows

    def mtp_step(self, there: Tensor, rope: tuple[Tensor, Tensor] | None) -> PackRows:
        """The same rows as an MTP step has them.

        Args:
            there: [T] bool on the host, the rows with an input token: the others count as padding.
            rope: cos, sin of its queries' positions; None: those of the rows.
        """
        valid = self.local(upload(there, self.rope[0].device))[self.shard]
        return replace(self, valid=valid, rope=self.rope if rope is None else rope)

    def rope_at(self, config: ModelConfig, shift: int) -> tuple[Tensor, Tensor]:
        """cos, sin [t, R/2] of positions that are `shift` further than those of the rows."""
        position = (self.host_end - self.host_start - 1).clamp(min=0) + shift
        return _rope(position, int(position.max()) + 1, config, self.rope[0].device)

    def local(self, x: Tensor) -> Tensor:
        """The rows of a pack [T, ...] that this context-parallel rank holds: [t, ...]."""
        return x if self.local_rows is None else x.index_select(0, self.local_rows)

    @classmethod
    def build(
        cls,
        config: ModelConfig,
        doc_lengths: tuple[int, ...],
        total: int,
        *,
        cp_rank: int = 0,
        cp_size: int = 1,
        tp_rank: int = 0,
        tp_size: int = 1,
        dense_rows: str = "auto",
        device: torch.device | str = "cpu",
    ) -> PackRows:
        """Plan a pack of `total` rows that starts with documents of `doc_lengths`; the rest is padding.

        Args:
            dense_rows: "auto" lets rows that see at most index_topk keys run as dense attention where that is faster,
                "short" only where all documents are that short, "off" none; with "all" every row is dense.
        Raises:
            ValueError: if the rows do not split over the ranks, or the documents are longer than the pack.
        """
        if total % (cp_size * tp_size):
            raise ValueError(
                f"{total} tokens of a micro-batch do not split over --context-parallel-size {cp_size} x "
                f"--tensor-model-parallel-size {tp_size}"
            )
        if sum(doc_lengths) > total:
            raise ValueError(f"documents of {sum(doc_lengths)} tokens in a pack of {total}")
        start, position, valid = _describe(doc_lengths, total)
        ranges = zigzag_ranges(total, cp_rank, cp_size)
        shard_size = total // (cp_size * tp_size)
        shard = slice(tp_rank * shard_size, (tp_rank + 1) * shard_size)
        dense = sparse = None
        apart = _has_dense_rows(doc_lengths, config.index_topk, dense_rows)
        if apart:
            longest = total if dense_rows == "all" else config.index_topk
            dense = _dense_rows(doc_lengths, ranges, longest, device)
        start, position, local_valid = (torch.cat([x[slice(*r)] for r in ranges]) for x in (start, position, valid))
        if has_sparse_rows(config, doc_lengths, dense_rows):
            chosen = local_valid & (position >= config.index_topk) if apart else local_valid
            sparse = _sparse_rows(chosen, start, position, shard, config.index_topk, device)
        order = pack_order(total, cp_size)
        seen = start + (position + 1) * local_valid
        by_rank = [x.view(tp_size, -1) for x in (start, seen)]
        return cls(
            total=total,
            doc_lengths=doc_lengths,
            slots=min(config.index_topk, total),
            local_rows=None if cp_size == 1 else upload(zigzag_rows(total, cp_rank, cp_size), device),
            order=None if order is None else PackOrder(*upload(torch.stack(order), device)),
            shard=shard,
            rope=_rope(position, max(doc_lengths, default=0), config, device),
            host_start=start,
            host_end=seen,
            chunks=key_chunks(*by_rank) if dense_rows == "all" else [],
            valid=None if sum(doc_lengths) == total else upload(local_valid[shard], device),
            dense=dense,
            sparse=sparse,
        )


def has_sparse_rows(config: ModelConfig, doc_lengths: tuple[int, ...], dense_rows: str) -> bool:
    """Whether a pack is planned with a sparse part, so that its layers need a selection.

    A pack of nothing but padding has one too (an empty one): its gradients must join the collectives.
    """
    longest = max(doc_lengths, default=0)
    return dense_rows == "off" or longest == 0 or (dense_rows != "all" and longest > config.index_topk)


def _has_dense_rows(doc_lengths: tuple[int, ...], index_topk: int, dense_rows: str) -> bool:
    """Whether a pack is planned with a dense part: with "auto" only if it gains.

    A dense row saves about 0.36 us of a layer on an H200. The sparse rows of several documents have dense ones between
    them, so they are moved to be together, at 0.13 us a row (docs/performance.md).
    """
    long = [length - index_topk for length in doc_lengths if length > index_topk]
    dense = sum(doc_lengths) - sum(long)
    if dense_rows == "off" or dense == 0:
        return False
    if dense_rows == "all":
        return True
    if dense_rows == "short":
        return not long
    return len(long) < 2 or 0.13 * sum(long) <= 0.36 * dense


def work_per_rank(doc_lengths: tuple[int, ...], total: int, index_topk: int, cp_size: int) -> list[tuple[int, int]]:
    """(selected keys, causal keys) of each context-parallel rank's rows: its work in attention and in the indexer."""
    _, position, valid = _describe(doc_lengths, total)
    causal = (position + 1) * valid
    attended = causal.clamp(max=index_topk)
    ranks = [zigzag_rows(total, rank, cp_size) for rank in range(cp_size)]
    return [(int(attended[rows].sum()), int(causal[rows].sum())) for rows in ranks]


def _describe(doc_lengths: tuple[int, ...], total: int) -> tuple[Tensor, Tensor, Tensor]:
    """First pack position of each row's document, position within it, and whether the row is no padding: [T] each."""
    lengths = torch.tensor(doc_lengths, dtype=torch.int64)
    used = int(lengths.sum())
    start = torch.zeros(total, dtype=torch.int64)
    start[:used] = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    valid = torch.arange(total) < used
    position = (torch.arange(total) - start) * valid
    return start, position, valid


def _rope(position: Tensor, longest: int, config: ModelConfig, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """cos, sin [t, R/2] fp32 on the device, of positions [t] int64 on the host, all of them below `longest` or 0."""
    length = 1 << (longest - 1).bit_length() if longest else 1  # few lengths, so that few tables are ever made
    table = _rope_table(length, config.qk_rope_head_dim, config.rope_theta, torch.device(device))
    at = _rows(position, device)
    return table[0][at], table[1][at]


@lru_cache(maxsize=4)
def _rope_table(length: int, dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Kept, because cosines are most of a pack's time."""
    return rope_tables(torch.arange(length, device=device), dim, theta)


def _rows(index: Tensor, device: torch.device | str) -> Rows:
    """int64 [n] on the host as a slice, if it is one run, or on the device."""
    if bool((index.diff() == 1).all()):
        first = int(index[0]) if len(index) else 0
        return slice(first, first + len(index))
    return upload(index, device)


def _sparse_rows(
    sparse: Tensor, start: Tensor, position: Tensor, shard: slice, index_topk: int, device: torch.device | str
) -> SparseRows:
    rows = sparse.nonzero().flatten()
    shard_rows = sparse[shard].nonzero().flatten()
    first = start[shard][shard_rows]
    last = first + position[shard][shard_rows] + 1
    return SparseRows(
        rows=_rows(rows, device),
        length=upload((position[rows] + 1).clamp(max=index_topk).int(), device),
        shard_rows=_rows(shard_rows, device),
        start=upload(first.int(), device),
        end=upload(last.int(), device),
        segments=key_segments(first, last),
    )


def _dense_rows(
    doc_lengths: tuple[int, ...], ranges: tuple[tuple[int, int], ...], index_topk: int, device: torch.device | str
) -> DenseRows:
    rows, keys, segments = [], [], []
    n_rows = n_keys = doc_begin = 0
    for length in doc_lengths:
        seen = 0  # keys of this document that some local row sees
        for row_begin, first, last in _overlaps(ranges, doc_begin, doc_begin + min(length, index_topk)):
            seen = last - doc_begin
            rows.append(torch.arange(row_begin, row_begin + last - first))
            segments += [n_rows, n_rows + last - first, n_keys, n_keys + seen]
            n_rows += last - first
        keys.append(torch.arange(doc_begin, doc_begin + seen))
        n_keys += seen
        doc_begin += length
    empty = torch.empty(0, dtype=torch.int64)
    return DenseRows(_rows(torch.cat([empty, *rows]), device), _rows(torch.cat([empty, *keys]), device), segments)


def _overlaps(ranges: tuple[tuple[int, int], ...], begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """(local row, pack begin, pack end) of the parts of [begin, end) that lie in a rank's ranges."""
    local = 0
    for range_begin, range_end in ranges:
        first, last = max(begin, range_begin), min(end, range_end)
        if first < last:
            yield local + first - range_begin, first, last
        local += range_end - range_begin
