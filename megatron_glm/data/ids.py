"""Rows of ready token ids: their masks and where their documents start, under the names that trainers write."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np

from .keys import Notes

# 1: token j is to be predicted (not shifted: the flag of a token is at the token). All that are given must want it.
MASKS = tuple(
    "loss_mask assistant_masks assistant_mask assistant_tokens_mask completion_mask response_mask loss_weights"
    " loss_scale target_mask".split()
)
STARTS = ("seq_start_id", "seq_start_ids")  # [0, 4]
BOUNDS = ("cu_seqlens", "cu_seq_lens")  # [0, 4, n]
LENGTHS = ("seq_lens", "seq_lengths", "seq_len", "doc_lengths")  # [4, n - 4]
# a number for each token, the same in a document
NUMBERS = tuple("document_ids doc_ids segment_ids sequence_ids seq_idx sample_ids".split())
COLUMNS = frozenset(
    ("input_ids", "labels", "attention_mask", "position_ids", "token_type_ids")
    + (*MASKS, *STARTS, *BOUNDS, *LENGTHS, *NUMBERS)
)
_BORDER = re.compile(
    "(prompt|prefix|context|source|input|query|question|response|completion|answer).*"
    "(len|tokens|start|end|idx|index|offset)"
)
SHIFTED = (
    "loss_mask is 0 at the end of every document of a pack: a mask that was shifted to the labels, as NeMo packs it, "
    "must be shifted back (here the flag of a token is at the token)"
)


class TokenRow(NamedTuple):
    """One or more documents, one behind the other."""

    ids: np.ndarray  # [n] int64
    targets: np.ndarray  # [n] bool: is token j to be predicted
    lengths: tuple[int, ...]  # of the documents; their sum is n


def read_ids(row: dict, notes: Notes) -> TokenRow:
    """The tokens of a row of input_ids, without padding. Other columns name targets and document starts.

    Raises: ValueError naming the column, and both lengths or values where two disagree.
    """
    ids = integers(row["input_ids"], "input_ids")
    n = len(ids)
    targets = _labelled(row, ids)
    for name in MASKS:
        if name in row:
            targets &= _mask(row[name], name, n)
    if "token_type_ids" in row and len(np.unique(_column(row["token_type_ids"], "token_type_ids", n))) > 1:
        raise ValueError("token_type_ids has more than one value, which GLM has no use for: leave the column out")
    starts = _starts(row, n)
    kept = np.ones(n, bool)
    if "attention_mask" in row:
        kept = _attended(_column(row["attention_mask"], "attention_mask", n, booleans=True), starts)
    if "position_ids" in row:
        _check_positions(_column(row["position_ids"], "position_ids", n), starts, kept)
    starts[kept.argmax()] = True
    lengths = np.diff(np.append(np.flatnonzero(starts[kept]), kept.sum()))
    ends = np.append(np.flatnonzero(starts[kept])[1:], kept.sum()) - 1
    if "loss_mask" in row and len(lengths) > 1 and targets.any() and not targets[kept][ends].any():
        notes.warnings.add(SHIFTED)
    return TokenRow(ids[kept], targets[kept], tuple(lengths.tolist()))


def refuse_unread(columns: dict[str, Any], n: int) -> None:
    """Numbers beside n ids that nothing reads may be flags of the tokens, or say where a prompt or a document ends."""
    for name, value in columns.items():
        numbers = isinstance(value, list) and all(isinstance(item, int | float) for item in value)
        if (numbers and value) or (isinstance(value, int) and value != n and _BORDER.search(name.lower())):
            raise ValueError(
                f"the row has the key {name} = {value!r:.60}, which is not read beside input_ids; name it in "
                "--ignore-keys if it is only metadata"
            )


def integers(values: Any, what: str) -> np.ndarray:
    """A list of integers, which bools and floats are not, as [n] int64."""
    plain = isinstance(values, list) and bool(values) and set(map(type, values)) == {int}
    array = np.array(values) if plain else np.empty(0)
    if array.dtype.kind not in "iu":
        raise ValueError(f"{what} must be a list of integers that is not empty, got {values!r:.80}")
    return array.astype(np.int64)


def _column(values: Any, name: str, n: int, booleans: bool = False) -> np.ndarray:
    """A column of one integer a token."""
    if booleans and isinstance(values, list):
        values = [int(value) if value in (0, 1) else value for value in values]
    array = integers(values, name)
    if len(array) != n:
        raise ValueError(f"{name} has {len(array)} entries but input_ids has {n}")
    return array


def _mask(values: Any, name: str, n: int) -> np.ndarray:
    """[n] bool of 0 and 1, as numbers or bools."""
    if not isinstance(values, list):
        raise ValueError(f"{name} must be a list of 0 and 1, got {values!r:.80}")
    if len(values) != n:
        raise ValueError(f"{name} has {len(values)} entries but input_ids has {n}")
    wrong = [value for value in values if not isinstance(value, int | float) or value not in (0, 1)]
    if wrong:
        raise ValueError(f"{name} holds {wrong[0]!r:.80}: only 0 and 1 can be honoured")
    return np.array(values, bool)


def _labelled(row: dict, ids: np.ndarray) -> np.ndarray:
    """[n] bool: where labels are the ids, not -100."""
    if "labels" not in row:
        return np.ones(len(ids), bool)
    labels = _column(row["labels"], "labels", len(ids))
    targets = labels != -100
    wrong = np.flatnonzero(targets & (labels != ids))
    if len(wrong):
        j = wrong[0]
        raise ValueError(
            f"labels[{j}] is {labels[j]} but input_ids[{j}] is {ids[j]}: labels must be input_ids or -100, not shifted"
        )
    return targets


def _starts(row: dict, n: int) -> np.ndarray:
    """[n] bool: where documents start, by each column that says it; they must agree."""
    found: dict[str, np.ndarray] = {}
    for name in (*STARTS, *BOUNDS, *LENGTHS):
        if name not in row:
            continue
        if name == "seq_len" and isinstance(row[name], int):  # how long the row is
            row = row | {name: [row[name]]}
        values = integers(row[name], name)
        bounds = np.append(0, np.cumsum(values)) if name in LENGTHS else values
        bounds = np.append(bounds, n) if name in STARTS else bounds
        if bounds[0] != 0 or bounds[-1] != n or (np.diff(bounds) <= 0).any():
            raise ValueError(f"{name} is {row[name]!r:.80}, which does not cut the {n} input_ids into documents from 0")
        found[name] = np.zeros(n, bool)
        found[name][bounds[:-1]] = True
    for name in NUMBERS:
        if name in row:
            numbers = _column(row[name], name, n)
            found[name] = np.append(True, numbers[1:] != numbers[:-1])
            if "attention_mask" not in row and len(np.unique(numbers)) < found[name].sum():
                raise ValueError(f"{name} comes back to a number that it has left: a document must be in one piece")
    if "position_ids" in row and not found:
        found["position_ids"] = _column(row["position_ids"], "position_ids", n) == 0
    if "attention_mask" in row:
        numbers = _column(row["attention_mask"], "attention_mask", n, booleans=True)
        if numbers.max() > 1:  # a number for each document, 0 for padding
            found["attention_mask"] = np.append(True, numbers[1:] != numbers[:-1]) & (numbers > 0)
            for name, starts in found.items():
                found[name] = starts & (numbers > 0)
    names = list(found)
    for name in names[1:]:
        if (found[name] != found[names[0]]).any():
            j = int((found[name] != found[names[0]]).argmax())
            raise ValueError(f"{names[0]} and {name} disagree whether a document starts at input_ids[{j}]")
    return found[names[0]].copy() if names else np.zeros(n, bool)


def _attended(mask: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """[n] bool: what is not padding, which must lie at the ends."""
    kept = mask > 0
    if (mask < 0).any() or not kept.any():
        raise ValueError(
            f"attention_mask holds {mask.min()}: 1 is a token, 0 padding, and one token at least is needed"
        )
    inside = np.flatnonzero(kept)
    if not kept[inside[0] : inside[-1] + 1].all():
        j = inside[0] + int((~kept[inside[0] :]).argmax())
        raise ValueError(f"attention_mask[{j}] is 0 between tokens: only padding at the ends can be left out")
    starts &= kept
    return kept


def _check_positions(positions: np.ndarray, starts: np.ndarray, kept: np.ndarray) -> None:
    """Positions must count from 0 in each document, as the model's do."""
    first = starts.copy()
    first[kept.argmax()] = True
    places = np.arange(len(positions))
    expected = places - np.maximum.accumulate(np.where(first, places, 0))
    wrong = np.flatnonzero((positions != expected) & kept)
    if len(wrong):
        j = wrong[0]
        raise ValueError(f"position_ids[{j}] is {positions[j]}, expected {expected[j]}: each document counts from 0")
