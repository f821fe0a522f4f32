"""Rows of JSONL and Parquet files, and what each kind of row becomes: a text with targets, or ready tokens."""

from __future__ import annotations

import glob
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from .chat import ROLE_TOKENS, ChatTemplate
from .report import RowReport
from .tokenizer import END_OF_TEXT, Tokenizer

SUFFIXES = (".jsonl", ".parquet")
# the keys that make a row of a kind; the first kind that a row has all keys of is taken
KINDS = (("input_ids",), ("messages",), ("prompt", "completion"), ("ctx", "endings", "label"), ("text",))


@dataclass(frozen=True)
class TokenRow:
    ids: np.ndarray  # [n] int64
    targets: np.ndarray  # [n] bool: is token j to be predicted


@dataclass(frozen=True)
class TextRow:
    text: str
    targets: list[tuple[int, int]]  # character ranges to be predicted
    end_of_text: bool  # append <|endoftext|> as the last target


def find_files(data_path: Iterable[str], suffixes: tuple[str, ...] = SUFFIXES) -> list[Path]:
    """Files of data-path entries (files, folders, globs) in the order given, sorted inside a folder or glob."""
    files: list[Path] = []
    for entry in data_path:
        if not entry:
            raise ValueError("a data path is empty")  # an unset shell variable, not the working directory
        path = Path(entry)
        if path.is_dir():
            found = sorted(file for file in path.rglob("*") if file.suffix in suffixes and not file.is_dir())
        else:
            matches = [path] if path.is_file() else sorted(map(Path, glob.glob(entry, recursive=True)))
            found = [file for file in matches if not file.is_dir()]
        if not found:
            raise ValueError(f"{entry} holds or matches no file ({' or '.join(suffixes)}): correct the path")
        for file in found:
            if file.suffix not in suffixes:
                raise ValueError(f"{file} is neither of {suffixes}")
        files += found
    return files


def read_rows(path: Path) -> Iterator[tuple[str, bytes | dict]]:
    """Yields (place in words, row) in file order: an undecoded JSON line, or a Parquet row; both count from 1."""
    if path.suffix == ".parquet":
        for number, row in enumerate(_parquet_rows(path), 1):
            yield f"{path} row {number}", row
    else:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield f"{path}:{number}", line


@contextmanager
def _parquet(path: Path) -> Iterator[Any]:
    """The open file, a pyarrow.parquet.ParquetFile; what fails inside names it."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(f"{path} needs pyarrow: pip install -e '.[data]'") from error
    try:
        yield pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error


def count_parquet_rows(path: Path) -> int:
    with _parquet(path) as file:
        return file.metadata.num_rows


def _parquet_rows(path: Path) -> Iterator[dict]:
    with _parquet(path) as file:
        for batch in file.iter_batches(batch_size=512):
            yield from map(_without_nulls, batch.to_pylist())


def _without_nulls(value: Any) -> Any:
    """A Parquet struct has the keys of all rows: in one row, a null is a key that is not there."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


@dataclass(frozen=True)
class RowSettings:
    """What the tokens of a row depend on beside the files: with the contents of the tokenizer's folder, a cache key."""

    tokenizer_path: str | None  # a tokenizer file, or a folder with one; the chat template lies beside it
    vocab_size: int  # of the model
    skip_bad_rows: bool = False
    ignore_keys: tuple[str, ...] = ()  # keys of rows and messages that are only metadata
    train_on_last_turn_only: bool = False
    special_tokens_in_text: bool = False  # text may hold special tokens, which become ids of their own


@dataclass(frozen=True)
class TokenisedRows:
    """The documents of a chunk of rows, one after the other."""

    ids: np.ndarray  # [N] int32
    targets: np.ndarray  # [N] bool: is token j to be predicted
    lengths: np.ndarray  # [n] int64: tokens of each document
    report: RowReport


class RowReader:
    """Turns rows into tokens. Tokenizer and template are loaded by the first row that needs them.

    It can be pickled before it is used, for worker processes.
    """

    def __init__(self, settings: RowSettings):
        self.settings = settings
        self._path = settings.tokenizer_path

    def tokenise(self, rows: Iterable[tuple[str, bytes | dict]]) -> TokenisedRows:
        """The documents of rows as read_rows yields them, in their order; texts are tokenised in one call.

        Raises ValueError with the place of the first bad row, unless skip_bad_rows counts them.
        """
        report = RowReport()
        converted = [(place, row) for place, raw in rows if (row := self._converted(place, raw, report)) is not None]
        texts = [row.text for _, row in converted if isinstance(row, TextRow)]
        encodings = iter(self.tokenizer.encode_batch(texts) if texts else ())
        documents = []
        for place, row in converted:
            tokens = row if isinstance(row, TokenRow) else self._token_row(row, *next(encodings))
            wrong = tokens.ids[(tokens.ids < 0) | (tokens.ids >= self.settings.vocab_size)]
            if len(wrong):
                why = f"token id {wrong[0]} is outside the model's vocabulary of {self.settings.vocab_size}"
                self._bad(place, ValueError(why), report)
            else:
                documents.append(tokens)
        ids = [document.ids.astype(np.int32) for document in documents]
        targets = [document.targets for document in documents]
        return TokenisedRows(
            np.concatenate(ids) if ids else np.empty(0, np.int32),
            np.concatenate(targets) if targets else np.empty(0, bool),
            np.array(list(map(len, ids)), np.int64),
            report,
        )

    def _converted(self, place: str, raw: bytes | dict, report: RowReport) -> TextRow | TokenRow | None:
        try:
            row, kind = parse_row(raw)
        except ValueError as error:
            return self._bad(place, error, report)
        try:
            self.prepare(kind)
        except ValueError as error:  # not about the row
            raise ValueError(f"{place}: {error}") from error
        try:
            result = self.convert(row, kind)
        except ValueError as error:
            return self._bad(place, error, report)
        report.count(kind)
        return result

    def _bad(self, place: str, error: ValueError, report: RowReport) -> None:
        if not self.settings.skip_bad_rows:
            raise ValueError(f"{place}: {error}") from error
        report.skip(place, error)

    def _token_row(self, row: TextRow, ids: np.ndarray, ends: np.ndarray) -> TokenRow:
        """Marks each token that ends inside a target: tokenizers may report its start behind its white space."""
        targets = np.zeros(len(ids), bool)
        for start, end in np.searchsorted(ends, np.array(row.targets, np.int64).reshape(-1, 2), side="right").tolist():
            targets[start:end] = True
        if row.end_of_text:
            ids, targets = np.append(ids, self.end_of_text), np.append(targets, True)
        return TokenRow(ids, targets)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        if self._path is None:
            raise ValueError("rows of text need a tokenizer, rows of input_ids do not: give --tokenizer-model")
        return Tokenizer.load(self._path)

    @cached_property
    def end_of_text(self) -> int:
        return self.tokenizer.require(END_OF_TEXT)

    @cached_property
    def template(self) -> ChatTemplate:
        for token in ROLE_TOKENS:
            self.tokenizer.require(token)
        return ChatTemplate.load(self.tokenizer.path.parent)

    def prepare(self, kind: str) -> None:
        """Loads what a kind of row needs, so that a missing file never passes for a malformed row."""
        if kind == "messages":
            _ = self.template
        elif kind != "input_ids":
            _ = self.end_of_text

    def convert(self, row: dict, kind: str) -> TextRow | TokenRow:
        """Raises ValueError with what is wrong about the row, without its place."""
        if kind == "input_ids":
            return _token_row(row["input_ids"], row.get("labels"))
        if kind == "messages":
            text, targets = self.template.render_targets(row["messages"], row.get("tools"))
            result = TextRow(text, targets, end_of_text=False)
        elif kind == "prompt":
            result = _completion_row(_string(row, "prompt"), _string(row, "completion"))
        elif kind == "ctx":
            result = _hellaswag_row(row)
        else:
            result = _completion_row("", _string(row, "text"))
        check_unicode(result.text)
        return result


def check_unicode(text: str) -> None:
    """Raises ValueError for half a surrogate pair: JSON can spell it, tokenizers cannot take it."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"the text is not valid Unicode: {error.reason} at character {error.start}") from error


def decode_row(raw: bytes | dict) -> dict:
    """A row that read_rows yields; raises ValueError if it is no JSON object."""
    try:
        row = raw if isinstance(raw, dict) else json.loads(raw.decode("utf-8"))
    except RecursionError as error:
        raise ValueError("the line is nested too deep for JSON") from error
    if not isinstance(row, dict):
        raise ValueError(f"the line must be a JSON object, got {row!r:.80}")
    return row


def parse_row(raw: bytes | dict) -> tuple[dict, str]:
    """The row and its kind; raises ValueError if it is no JSON object or of no known kind."""
    row = decode_row(raw)
    for keys in KINDS:
        if all(row.get(key) is not None for key in keys):
            return row, keys[0]
    kinds = ", ".join("+".join(keys) for keys in KINDS)
    raise ValueError(f"the row has the keys {sorted(row)} and is of no known kind ({kinds})")


def _string(row: dict, key: str) -> str:
    if not isinstance(row[key], str):
        raise ValueError(f"{key} must be a string, got {row[key]!r:.80}")
    return row[key]


def _completion_row(prompt: str, completion: str) -> TextRow:
    """The text is tokenised as one; a token that straddles the border is a target."""
    text = prompt + completion
    return TextRow(text, [(len(prompt), len(text))], end_of_text=True)


def _hellaswag_row(row: dict) -> TextRow:
    """The context, a space, and the right ending, which is the target."""
    endings, label = row["endings"], row["label"]
    if not isinstance(endings, list) or not all(isinstance(ending, str) for ending in endings):
        raise ValueError(f"endings must be a list of strings, got {endings!r:.80}")
    if str(label) not in map(str, range(len(endings))):
        raise ValueError(f"label is {label!r:.80}, but there are {len(endings)} endings, numbered from 0")
    return _completion_row(_string(row, "ctx").rstrip(), " " + endings[int(label)].lstrip())


def _token_row(input_ids: Any, labels: Any) -> TokenRow:
    ids = _integers(input_ids, "input_ids")
    if labels is None:
        return TokenRow(ids, np.ones(len(ids), bool))
    wanted = _integers(labels, "labels")
    if len(wanted) != len(ids):
        raise ValueError(f"labels has {len(wanted)} entries but input_ids has {len(ids)}")
    targets = wanted != -100
    wrong = np.flatnonzero(targets & (wanted != ids))
    if len(wrong):
        j = wrong[0]
        raise ValueError(
            f"labels[{j}] is {wanted[j]} but input_ids[{j}] is {ids[j]}: labels must be input_ids or -100, not shifted"
        )
    return TokenRow(ids, targets)


def _integers(values: Any, what: str) -> np.ndarray:
    try:
        array = np.asarray(values)
    except ValueError:  # nested lists of unequal lengths
        array = np.asarray(None)
    if array.ndim != 1 or array.dtype.kind not in "iu" or not len(array):
        raise ValueError(f"{what} must be a list of integers that is not empty, got {values!r:.80}")
    return array.astype(np.int64)
