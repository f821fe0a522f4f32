"""The two kinds of data that a script trains on, as sections of the configuration."""

from __future__ import annotations

import functools
import glob
import math
import operator
import re
from dataclasses import dataclass
from typing import Literal

from .section import Section, flag_name, option

CACHE_HELP = (
    "folder for what is made of the data once: tokens and the order of samples (default: index_cache beside the first "
    "file, or ~/.cache/megatron_glm if that cannot be written)"
)
NEEDED_KEYS = frozenset("input_ids messages conversations role content from value text".split())
PARTS = ("train", "valid", "test")  # of --split
NAMED_SET = re.compile(r"([\w.-]+)=(.+)")
UNNAMED_SET = "valid"


def parse_split(split: str) -> list[float]:
    """Where the parts of `969,30,1` end, as shares of all documents, by Megatron's arithmetic; what is missing is 0."""
    try:
        shares = [float(share) for share in split.split(",")]
    except ValueError as error:
        raise ValueError(f"--split {split} is not of numbers, such as 969,30,1") from error
    if not 1 <= len(shares) <= len(PARTS) or min(shares) < 0 or not 0 < sum(shares) < math.inf:
        raise ValueError(f"--split {split} must be one to three finite numbers from 0 on, not all of them 0")
    total = functools.reduce(operator.add, shares)  # in this order in every Python; 3.12's sum() rounds less
    ends = [0.0]
    for share in shares + [0.0] * (len(PARTS) - len(shares)):
        ends.append(ends[-1] + share / total)
    return ends


def validation_sets(words: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """The paths of each validation set: of `code=A math=B math=C`, or of UNNAMED_SET without names.

    A path that exists may itself hold a "=". Raises ValueError if some paths have a name and some have none.
    """
    sets: dict[str, tuple[str, ...]] = {}
    for word in words:
        named = NAMED_SET.fullmatch(word)
        name, path = named.groups() if named and not glob.glob(word) else ("", word)
        sets[name] = (*sets.get(name, ()), path)
    if "" in sets and len(sets) > 1:
        raise ValueError(
            f"--valid-data-path {' '.join(words)}: give every path the name of its set, as code=PATH math=PATH, or none"
        )
    return {name or UNNAMED_SET: paths for name, paths in sets.items()}


@dataclass(frozen=True)
class DataConfig(Section):
    data_path: tuple[str, ...] = option(
        (),
        "training data: JSON, Parquet or Arrow files, folders or globs; or a mix of them, each after its weight "
        "(0.7 A 0.3 B), which shares out the packs",
    )
    valid_data_path: tuple[str, ...] = option(
        (), "validation data, as --data-path; or several sets with their names (code=A math=B)"
    )
    split: str | None = option(
        None,
        "shares of the rows of --data-path for training, validation and test, as 969,30,1: drawn at random, the same "
        "for every --seed (default: all for training)",
    )
    data_cache_path: str | None = option(None, CACHE_HELP)
    tokenizer_model: str | None = option(
        None, "tokenizer.json, .model or their folder (default: the checkpoint's hf/ folder)"
    )
    seq_length: int = option(4096, "tokens of one pack")
    packing: Literal["best-fit", "none"] = option("best-fit", "fill packs with several documents, or one each")
    overlong: Literal["truncate", "split", "refuse"] = option(
        "truncate", "what happens to documents above --seq-length; refuse: they end the run"
    )
    skip_bad_rows: bool = option(False, "count and skip malformed rows instead of stopping")
    ignore_keys: tuple[str, ...] = option((), "keys of rows and messages that are only metadata, as id,timestamp")
    train_on_last_turn_only: bool = option(False, "in chats, loss on the assistant's last turn only")
    special_tokens_in_text: bool = option(False, "text may hold special tokens, which become tokens of their own")
    check_data: bool = option(False, "read, render and pack the data, say what is in it, and exit; needs no weights")

    def check(self) -> None:
        """Refuses a run without data, and a data set without its own keys."""
        if not self.data_path:
            raise ValueError("--data-path is required")
        validation_sets(self.valid_data_path)
        if self.holds_out and self.valid_data_path:
            raise ValueError(f"--split {self.split} and --valid-data-path both name validation data: give one")
        if needed := NEEDED_KEYS & set(self.ignored_keys):
            raise ValueError(f"--ignore-keys {min(needed)}: that is what a row is made of, not metadata")

    @property
    def holds_out(self) -> bool:
        """Whether --split leaves rows for validation or test."""
        return self.split is not None and parse_split(self.split)[1] < 1

    @property
    def ignored_keys(self) -> tuple[str, ...]:
        """--ignore-keys, which may be separated by commas or spaces."""
        return tuple(dict.fromkeys(key for word in self.ignore_keys for key in word.split(",") if key))


@dataclass(frozen=True)
class PretrainDataConfig(Section):
    data_path: tuple[str, ...] = option(
        (), "prefixes of .bin/.idx files, each maybe after its weight (0.7 A 0.3 B), shared out by --split"
    )
    train_data_path: tuple[str, ...] = option((), "training data instead of --data-path, in the same form")
    valid_data_path: tuple[str, ...] = option(
        (), "validation data, with --train-data-path; or several sets with their names (code=A math=B)"
    )
    test_data_path: tuple[str, ...] = option((), "test data, with --train-data-path")
    split: str = option("969,30,1", "shares of --data-path for training, validation and test")
    data_cache_path: str | None = option(None, CACHE_HELP)
    no_document_mask: bool = option(False, "let tokens see the documents before their own in the same sample")
    seq_length: int = option(4096, "tokens of one sample")
    mock_data: bool = option(False, "train on made-up tokens, without files")

    def check(self) -> None:
        """Refuses no source of data, and more than one."""
        sources = {"data_path": self.data_path, "train_data_path": self.train_data_path, "mock_data": self.mock_data}
        given = [flag_name(name) for name, value in sources.items() if value]
        if len(given) != 1:
            raise ValueError(
                f"give one of --data-path, --train-data-path and --mock-data, not {' and '.join(given) or 'none'}"
            )
        for name in ("valid_data_path", "test_data_path"):
            if getattr(self, name) and not self.train_data_path:
                raise ValueError(f"{flag_name(name)} goes with --train-data-path; {given[0]} is split by itself")
        parse_split(self.split)
        validation_sets(self.valid_data_path)
