"""Documents into packs of one length, and packs into the tensors of a micro-batch, where labels are shifted."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

IGNORE = -100


class Piece(NamedTuple):
    """A document, or the part of one that a pack holds."""

    ids: np.ndarray  # [n] integers
    targets: np.ndarray  # [n] bool: is token j to be predicted
    cut: bool = False  # the last of ids is no part of the pack: it only is the label of the token before it
    reference: float | None = None  # its log-probability under a reference model


Document = Piece | tuple[np.ndarray, np.ndarray]  # (ids, targets) are a whole Piece


@dataclass(frozen=True)
class PackedBatch:
    """One micro-batch of T tokens: whole documents one after the other, then padding."""

    tokens: torch.Tensor  # [T] int64; 0 on padding, which only `padding` tells from a document's tokens
    labels: torch.Tensor  # [T] int64: the next token of the same document; -100 at a document's end and on padding
    loss_mask: torch.Tensor  # [T] bool: which labels count; False wherever the label is -100
    position_ids: torch.Tensor  # [T] int64: from 0 in each document; 0 on padding
    doc_lengths: tuple[int, ...]
    padding: int  # tokens of the tail; sum(doc_lengths) + padding == T
    reference: torch.Tensor | None = None  # [documents] fp64: their log-probabilities under a reference model

    @property
    def loss_tokens(self) -> int:
        """How many labels count."""
        return int(self.loss_mask.sum())

    @property
    def documents(self) -> torch.Tensor:
        """The number of each row's document: [T] int64, -1 on padding."""
        lengths = torch.tensor(self.doc_lengths, dtype=torch.int64)
        return torch.cat([torch.arange(len(lengths)).repeat_interleave(lengths), torch.full((self.padding,), -1)])

    @property
    def targets_by_document(self) -> torch.Tensor:
        """The labels that count in each document: [documents] int64."""
        counted = self.documents[self.loss_mask]  # none is on padding
        return torch.bincount(counted, minlength=len(self.doc_lengths))


def build_batch(documents: Sequence[Document], total: int) -> PackedBatch:
    """The documents, each a Piece or its (ids, targets), as one batch of `total` tokens.

    This is the only place that shifts: position j gets token j + 1 and its flag, if both are of the same document.
    """
    pieces = [document if isinstance(document, Piece) else Piece(*document) for document in documents]
    lengths = tuple(len(piece.ids) - piece.cut for piece in pieces)
    padding = total - sum(lengths)
    if padding < 0:
        raise ValueError(f"documents of {sum(lengths)} tokens do not fit into a batch of {total}")
    tokens, position_ids = np.zeros(total, np.int64), np.zeros(total, np.int64)
    labels, loss_mask = np.full(total, IGNORE, np.int64), np.zeros(total, bool)
    start = 0
    for (ids, targets, cut_off, _), length in zip(pieces, lengths, strict=True):
        end = start + length
        labelled = end if cut_off else end - 1
        tokens[start:end] = ids[:length]
        labels[start:labelled] = ids[1:]
        loss_mask[start:labelled] = targets[1:]
        position_ids[start:end] = np.arange(length)
        start = end
    arrays = (torch.from_numpy(array) for array in (tokens, labels, loss_mask, position_ids))
    known = [piece.reference for piece in pieces if piece.reference is not None]
    reference = torch.tensor(known, dtype=torch.float64) if len(known) == len(pieces) else None
    return PackedBatch(*arrays, doc_lengths=lengths, padding=padding, reference=reference)


def ahead(batch: PackedBatch, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What MTP step `step` (from 1) sees and predicts at each row: of the tokens that many further in its document.

    Returns: tokens [T] int64, 0 where the document has ended; labels [T] int64, -100 there and where the loss mask is
        not set; and which rows have such a token: [T] bool.
    """
    left = torch.full_like(batch.tokens, -1)  # rows of the same document behind each row
    start = 0
    for length in batch.doc_lengths:
        left[start : start + length] = torch.arange(length - 1, -1, -1)
        start += length
    there = left >= step
    labels = batch.labels.masked_fill(~batch.loss_mask, IGNORE)
    tokens, labels = batch.tokens.roll(-step), labels.roll(-step)
    return tokens.masked_fill(~there, 0), labels.masked_fill(~there, IGNORE), there


def best_fit(lengths: Sequence[int], capacity: int) -> np.ndarray:
    """Best-fit: each length in turn goes to the pack with the least room that still takes it, else to a new pack.

    Lengths are at most `capacity`; in descending order this is best-fit decreasing, at most 11/9 of the optimum.
    Returns the pack of each length [n] int64, packs numbered as they were opened.
    """
    rooms: list[int] = []  # sorted and distinct: the room left in open packs
    packs_by_room: dict[int, list[int]] = {}
    pack_of = np.empty(len(lengths), np.int64)
    opened = 0
    for slot, length in enumerate(lengths):
        at = bisect_left(rooms, length)
        if at == len(rooms):
            pack, room = opened, capacity
            opened += 1
        else:
            room = rooms[at]
            pack = packs_by_room[room].pop()
            if not packs_by_room[room]:
                del rooms[at], packs_by_room[room]
        pack_of[slot] = pack
        room -= length
        if room:
            if room not in packs_by_room:
                insort(rooms, room)
            packs_by_room.setdefault(room, []).append(pack)
    return pack_of


def cut_together(lengths: np.ndarray, most: int) -> np.ndarray:
    """Lengths [n, 2] of two documents that are to fit into `most` tokens together.

    Where they do not, each keeps half, or more if the other needs less: 100 and 10 become 40 and 10 of 50.
    """
    first, second = lengths.T
    first = np.minimum(first, np.maximum(most // 2, most - second))
    return np.stack([first, np.minimum(second, most - first)], 1)


def cut(lengths: np.ndarray, seq_length: int, overlong: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The pieces of documents of these lengths [n]: (number of the document, first token in it, length), each [pieces].

    "truncate" keeps the beginning of what is longer than seq_length. "split" makes pieces that overlap by one token: a
    token can only be predicted from one before it in the same piece, so the last token of a piece, predicted there,
    also begins the next piece. 20 tokens become [0, 8), [7, 15) and [14, 20) with a seq_length of 8.
    """
    if overlong == "truncate":
        return np.arange(len(lengths)), np.zeros(len(lengths), np.int64), np.minimum(lengths, seq_length)
    stride = seq_length - 1
    counts = np.maximum(1, -(-(lengths - 1) // stride))
    document = np.repeat(np.arange(len(lengths)), counts)
    number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    start = number * stride
    return document, start, np.minimum(lengths[document] - start, seq_length)
