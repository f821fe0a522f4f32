"""Log-probabilities of answers under a reference model, as tools/score.py prints them, found again by their tokens."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from .. import heartbeat
from .files import decode_row, find_files, read_rows
from .finetuning import PackedDataset
from .pairs import SIDES


def digest_of(ids: np.ndarray, targets: np.ndarray) -> str:
    """What a document is known by: its tokens and which of them count. The first one has nothing before it."""
    counted = targets.astype(bool)
    counted[:1] = False
    return hashlib.blake2b(ids.astype(np.int32).tobytes() + counted.tobytes(), digest_size=16).hexdigest()


def read_reference(paths: Iterable[str]) -> dict[str, float]:
    """Log-probability of each answer by its digest.

    Raises: ValueError, with file and line, for what tools/score.py did not write, for an answer with two values, and
        for rows of two models.
    """
    found: dict[str, float] = {}
    model = None
    for path in find_files(paths):
        for place, raw in read_rows(path):
            try:
                row = decode_row(raw)
                if (named := row.get("model")) is None or named != (model := model or named):
                    raise ValueError(f"it is of the model {named}, rows before it of {model}")
                for digest, value in _answers(row):
                    if found.setdefault(digest, value) != value:
                        raise ValueError(f"the answer {digest} has the log-probabilities {found[digest]} and {value}")
            except ValueError as error:
                raise ValueError(f"--reference-logprobs: {place}: {error}") from error
    return found


def _answers(row: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for answer in [row[side] for side in SIDES if side in row] or [row]:
        digest, value = (answer.get(key) if isinstance(answer, dict) else None for key in ("digest", "sum_logprob"))
        if not isinstance(digest, str) or type(value) is not float or not math.isfinite(value):
            raise ValueError(f"a line of tools/score.py has a digest and a sum_logprob, got {row!r:.80}")
        yield digest, value


def reference_of(dataset: PackedDataset, known: dict[str, float]) -> np.ndarray:
    """The log-probabilities of the pieces of a data set of pairs: fp64 [pieces].

    Raises: ValueError for the first one that has none, with the text of the number of its pair.
    """
    values = np.empty(len(dataset.packing.starts), np.float64)
    for i in range(len(values)):
        if (value := known.get(digest_of(*dataset.piece(i)))) is None:
            raise ValueError(
                f"--reference-logprobs have no {SIDES[i % 2]} answer of pair {i // 2 + 1} of {len(values) // 2}: score "
                "the same rows (tools/score.py) with the same tokenizer, --overlong and --seq-length"
            )
        values[i] = value
        if i % 10000 == 0:
            heartbeat.beat()
            dataset.documents.release()
    return values
