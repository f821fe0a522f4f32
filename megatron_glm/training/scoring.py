"""Log-probabilities of documents, or of pairs of them, in the order of the data."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron_glm.config import DataConfig, RunConfig
from megatron_glm.data.files import decode_row, find_files, read_rows
from megatron_glm.data.finetuning import PackedDataset, Packing, load_documents
from megatron_glm.data.packing import PackedBatch, build_batch
from megatron_glm.data.pairs import SIDES, is_pair
from megatron_glm.data.reference import digest_of
from megatron_glm.data.rows import RowSettings
from megatron_glm.parallel.groups import ParallelGroups
from megatron_glm.training.answers import answers_of, deal
from megatron_glm.training.engine import Engine
from megatron_glm.training.logging import log
from megatron_glm.training.turns import once_per_node

PACKS_A_RANK = 4  # between two lines of output, at most: what is packed together stays in the order of the data


class Score(NamedTuple):
    """Of one document: what it is known by, and the log-probability of each token that counts, fp32 [n]."""

    digest: str
    log_probs: np.ndarray

    def record(self, with_tokens: bool) -> dict[str, Any]:
        """The sum over the tokens is in fp64."""
        total = float(self.log_probs.sum(dtype=np.float64))
        record = {"sum_logprob": total, "tokens": len(self.log_probs), "mean": total / len(self.log_probs)}
        if with_tokens:
            record["token_logprobs"] = self.log_probs.tolist()
        return record | {"digest": self.digest}


def scored_data(config: RunConfig, groups: ParallelGroups, length: int | None) -> tuple[PackedDataset, list[int]]:
    """The documents, or pairs, of --data-path in their order, and their numbers; the first row says which of the two.

    Those of which --overlong truncate leaves no token that counts are left out, as they are in training.

    Args:
        length: most tokens of one; None: as many as the longest has.
    Raises: ValueError for bad rows; with --overlong refuse for those without a token that counts, or too long.
    """
    data, settings = config.data, RowSettings.of(config)
    assert isinstance(data, DataConfig)
    rows = (raw for path in find_files(data.data_path) for _, raw in read_rows(path))
    with suppress(ValueError):  # a first row that is none is named where all are read
        settings = replace(settings, pairs=is_pair(decode_row(next(rows, b"{}"))))
    documents = load_documents(data.data_path, settings, data.data_cache_path, once_per_node(groups.gloo_world), log)
    together = 2 if settings.pairs else 1
    sizes = np.diff(documents.offsets).reshape(-1, together).sum(1)
    length = int(sizes.max()) if length is None else length
    planned = Packing.plan(documents, length, "none", data.overlong, together=together)
    count, _, dropped = planned.counts.tolist()
    kept = np.isin(documents.offsets[:-1:together], planned.starts[::together])
    if dropped:
        what = "pairs" if settings.pairs else "documents"
        found = f"{dropped} of {count} {what} have no token that counts, the first is number {kept.argmin() + 1}"
        if data.overlong == "refuse":
            raise ValueError(f"{found}: there is nothing to score")
        log(f"{found}: left out")
    dataset = PackedDataset(documents, length, "none", data.overlong, planned=planned, together=together)
    log(documents.report.summary())
    return dataset, np.flatnonzero(kept).tolist()


def scores(engine: Engine, dataset: PackedDataset) -> Iterator[tuple[Score, ...]]:
    """One of each document, or two of each pair, in the order of the data; on all ranks."""
    length, dp = engine.config.data.seq_length, engine.groups.dp.size()
    sizes, begin = dataset.sizes, 0
    while begin < len(sizes):
        most = dp * PACKS_A_RANK * length
        end = begin + max(1, int(np.searchsorted(sizes[begin:].cumsum(), most, side="right")))
        yield from _window(engine, dataset, range(begin, end), deal(sizes[begin:end].tolist(), length, dp))
        begin = end


def _window(
    engine: Engine, dataset: PackedDataset, units: range, packs: list[list[int]]
) -> Iterator[tuple[Score, ...]]:
    """Of some consecutive documents or pairs, which `packs` deal by their numbers among `units`."""
    together = dataset.together
    pieces = [[units[u] * together + k for u in pack for k in range(together)] for pack in packs]

    def build(pack: int) -> PackedBatch:
        return build_batch([dataset.piece(i) for i in pieces[pack]], engine.config.data.seq_length)

    _, log_probs = answers_of(engine, build, len(packs), "log-probs")
    found: dict[int, Score] = {}
    for pack, numbers in enumerate(pieces):
        start = 0
        for i in numbers:
            ids, targets = dataset.piece(i)
            rows = log_probs[pack, start : start + len(ids) - 1].numpy()
            found[i] = Score(digest_of(ids, targets), rows[targets[1:]])
            start += len(ids)
    yield from (tuple(found[unit * together + k] for k in range(together)) for unit in units)


def record(number: int, scores: tuple[Score, ...], model: str, with_tokens: bool) -> dict[str, Any]:
    """The line of a row: of one document, or of both answers of a pair."""
    if len(scores) == 1:
        return {"id": number, **scores[0].record(with_tokens), "model": model}
    sides = {side: score.record(with_tokens) for side, score in zip(SIDES, scores, strict=True)}
    return {"id": number, **sides, "model": model}


def model_name(folder: Path) -> str:
    """A checkpoint's name and a digest of what is in its folder: names and sizes of files, and its JSON files."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(folder)} {path.stat().st_size}\n".encode())
        if path.suffix == ".json":
            digest.update(path.read_bytes())
    return f"{folder.resolve().name}:{digest.hexdigest()[:12]}"
