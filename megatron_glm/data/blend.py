"""Which data set of a weighted blend each sample comes from, and the index files that ranks share."""

from __future__ import annotations

import hashlib
import heapq
import json
import math
import os
import uuid
from collections.abc import Sequence
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

ENTRY = np.dtype([("part", np.int32), ("number", np.int64)])


def parse_blend(entries: Sequence[str], flag: str) -> tuple[list[str], list[Fraction] | None]:
    """(prefixes, their weights) of `0.7 A 0.3 B`, or (prefixes, None) of `A B`. Weights are exact decimals.

    Raises ValueError, naming the flag, for weights in some places only, below 0, not finite, or all 0.
    """
    numbers = [_is_number(entry) for entry in entries]
    if not any(numbers):
        return list(entries), None
    if len(entries) % 2 or numbers != [True, False] * (len(entries) // 2):
        raise ValueError(
            f"{flag} {' '.join(entries)}: give every prefix a weight before it, or none"
            " (a prefix that looks like a number can be written ./NUMBER)"
        )
    weights = []
    for text in entries[::2]:
        number = float(text)
        if not 0 <= number < math.inf:
            what = "below 0" if number < 0 else "not a finite number"
            raise ValueError(f"{flag}: the weight {text} is {what}")
        weights.append(Fraction(text) if number else Fraction(0))  # 1e-9999999 would take forever
    if not sum(weights):
        raise ValueError(f"{flag} {' '.join(entries)}: the weights sum to 0")
    return list(entries[1::2]), weights


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def whole_weights(weights: Sequence[Fraction | int]) -> list[int]:
    """The smallest whole numbers in the same proportion; their sum is the period of the blend."""
    scale = math.lcm(*(Fraction(weight).denominator for weight in weights))
    whole = [int(weight * scale) for weight in weights]
    return [weight // math.gcd(*whole) for weight in whole]


def deal(weights: Sequence[int], slots: int) -> np.ndarray:
    """Which part each of the first `slots` samples is from, and which of the part's samples it is: ENTRY [slots].

    Of the first n samples, a part of weight w has more than n w / sum - 1 and fewer than n w / sum + 1, for every n.
    So its sample j has the first slot floor(j sum / w) and the last slot ceil((j + 1) sum / w) - 1, and a schedule of
    all exists (Tijdeman, The chairman assignment problem, 1980); taking the open sample with the earliest last slot
    finds one, as it finds any schedule of unit jobs. The largest deficit first, the usual rule, strays further: by
    up to 1.7 samples in trials with 4 to 12 random weights.
    """
    total = sum(weights)
    done = [0] * len(weights)
    ready: list[tuple[int, int]] = []  # (last slot, part)
    waiting = [(0, part) for part in range(len(weights))]  # (first slot, part)
    chosen = np.empty(slots, np.int32)
    for slot in range(slots):
        while waiting and waiting[0][0] <= slot:
            part = heapq.heappop(waiting)[1]
            heapq.heappush(ready, (-(-(done[part] + 1) * total // weights[part]) - 1, part))
        part = heapq.heappop(ready)[1]
        chosen[slot] = part
        done[part] += 1
        heapq.heappush(waiting, (done[part] * total // weights[part], part))
    table = np.empty(slots, ENTRY)
    table["part"] = chosen
    for part in range(len(weights)):
        mine = np.flatnonzero(chosen == part)
        table["number"][mine] = np.arange(len(mine))
    return table


def cache_key(**what: Any) -> str:
    """20 hex digits that change with everything that a cached array depends on; `what` must be of JSON's types."""
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:20]


def save_array(path: Path, array: np.ndarray) -> None:
    """Writes a .npy file that has its name only when it is whole."""
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")  # two runs may build the same at once
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            np.save(file, array, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise ValueError(f"cannot write the index {path}: {error.strerror}; give another --data-cache-path") from error


def open_array(path: Path, shape: tuple[int | None, ...], dtype: np.dtype | type) -> np.ndarray:
    """Memory-maps what save_array wrote; raises ValueError if it is missing or not of this shape and dtype.

    None in the shape allows any size.
    """
    if not path.is_file():
        raise ValueError(
            f"the index {path} is not there: one rank built it, and all must see it (and the data with the same times"
            " of change); give a --data-cache-path that all nodes share"
        )
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise ValueError(f"the index {path} is damaged, remove it: {error}") from error
    sizes = tuple(None if wanted is None else found for wanted, found in zip(shape, array.shape, strict=False))
    if sizes != shape or array.ndim != len(shape) or array.dtype != dtype:
        found, wanted = f"{array.dtype} {array.shape}", f"{np.dtype(dtype)} {shape}"
        raise ValueError(f"the index {path} is damaged, remove it: it holds {found}, expected {wanted}")
    return array.view(np.ndarray)
