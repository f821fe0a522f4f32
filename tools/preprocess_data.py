"""Tokenises JSON, Parquet, Arrow and text files into PREFIX_KEY_document.bin and .idx, for pretrain_glm.py.

The output is that of Megatron's tool of the same name. A row of JSON (.jsonl or .json, also .gz or .zst), Parquet or
Arrow is a document, as is a whole text file (.txt, .md, .py). An interrupted run continues when it is started again:
what it had done of the input files is kept.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a checkout that is not installed, too

from megatron_glm import signals  # noqa: E402

if __name__ == "__main__":
    signals.install(signal.SIGINT)  # Ctrl-C: one line and exit code 130

import numpy as np  # noqa: E402
from tqdm import tqdm  # noqa: E402

from megatron_glm.data.blend import cache_key  # noqa: E402
from megatron_glm.data.cache import file_state  # noqa: E402
from megatron_glm.data.files import SUFFIXES, check_unicode, decode_row, find_files  # noqa: E402
from megatron_glm.data.indexed import IndexedDataset, IndexedWriter, bin_path, idx_path, smallest_dtype  # noqa: E402
from megatron_glm.data.report import RowReport  # noqa: E402
from megatron_glm.data.rows import special_token_error, special_token_pattern  # noqa: E402
from megatron_glm.data.tokenise import Rows, read_chunks  # noqa: E402
from megatron_glm.data.tokenizer import END_OF_TEXT, Tokenizer  # noqa: E402
from megatron_glm.data.workers import in_order  # noqa: E402

TEXT_SUFFIXES = (".txt", ".md", ".py")


@dataclass(frozen=True)
class Settings:
    """What the ids of a text depend on."""

    tokenizer_model: str
    json_keys: tuple[str, ...]
    append_eod: bool
    special_tokens_in_text: bool = False


class Encoder:
    """Rows to token ids. It can be pickled before it is used, for worker processes."""

    def __init__(self, settings: Settings):
        self.settings, self.keys = settings, settings.json_keys

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.load(self.settings.tokenizer_model)

    @cached_property
    def end(self) -> int | None:
        return self.tokenizer.require(END_OF_TEXT) if self.settings.append_eod else None

    @cached_property
    def dtype(self) -> np.dtype:
        return smallest_dtype(self.tokenizer.vocab_size)

    @cached_property
    def special(self) -> re.Pattern | None:
        return None if self.settings.special_tokens_in_text else special_token_pattern(self.tokenizer)

    def encode(self, rows: Rows) -> list[tuple[bytes, list[int]]]:
        """(the ids of all documents, their lengths) under each key; empty texts make no document."""
        texts = [self._texts(place, raw) for place, raw in rows]
        results = []
        for column in zip(*texts, strict=True) if texts else [()] * len(self.keys):
            ids = [ids for ids, _ in self.tokenizer.encode_batch(list(column)) if len(ids)]
            documents = [self._ended(document).astype(self.dtype) for document in ids]
            results.append((b"".join(map(np.ndarray.tobytes, documents)), list(map(len, documents))))
        return results

    def _ended(self, document: np.ndarray) -> np.ndarray:
        """With one end token, if there is to be one: a text that means its special tokens may end with it."""
        return document if self.end is None or document[-1] == self.end else np.append(document, self.end)

    def _texts(self, place: str, raw: bytes | dict) -> list[str]:
        """The text of a row under each key."""
        try:
            row = decode_row(raw)
            for key in self.keys:
                if not isinstance(row.get(key), str):
                    what = f"{row[key]!r:.80} under {key!r}" if key in row else f"no {key!r}, only {sorted(row)}"
                    raise ValueError(f"the row has {what}; --json-keys must name strings")
                check_unicode(row[key])
                if self.special and (found := self.special.search(row[key])):
                    raise ValueError(special_token_error(key, found.group()))
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error
        return [row[key] for key in self.keys]


def read(path: Path) -> Iterator[tuple[int, Rows]]:
    """(bytes of the file that they take, rows) in the order of the file; a text file is one row."""
    if path.suffix.lower() not in TEXT_SUFFIXES:
        yield from read_chunks(path)
        return
    try:
        yield path.stat().st_size, [(str(path), {"text": path.read_text("utf-8-sig")})]
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: {error}") from error


@dataclass(frozen=True)
class Part:
    """An input file, and what its documents are kept in until all files are done: one .bin and .idx for each key."""

    source: Path
    prefixes: tuple[str, ...]

    @property
    def done(self) -> bool:
        return all(idx_path(prefix).is_file() and bin_path(prefix).is_file() for prefix in self.prefixes)


def plan(arguments: argparse.Namespace, encoder: Encoder) -> list[Part]:
    """The parts. Their names change with the input file, the tokenizer and the flags, so that no other is taken up."""
    digest = hashlib.sha256(encoder.tokenizer.path.read_bytes()).hexdigest()
    parts, report = [], RowReport()
    for path in find_files(arguments.input, (*SUFFIXES, *TEXT_SUFFIXES), report):
        name = cache_key(
            source=[str(path.resolve()), *file_state(path), len(parts)],
            tokenizer=digest,
            eod=arguments.append_eod,
            special=arguments.special_tokens_in_text,
        )
        prefixes = tuple(f"{arguments.output_prefix}.parts/{name}_{key}" for key in arguments.json_keys)
        parts.append(Part(path, prefixes))
    if report.files_left_out:
        print(report.files_not_read(), file=sys.stderr)
    return parts


class Progress:
    """The bar: MB/s of input, as tqdm shows it, and tokens/s."""

    def __init__(self, parts: list[Part]):
        sizes = [part.source.stat().st_size for part in parts]
        done = sum(size for size, part in zip(sizes, parts, strict=True) if part.done)
        self.tokens, self.start = 0, time.monotonic()
        self.bar = tqdm(
            total=sum(sizes), initial=done, unit="B", unit_scale=True, desc="tokenising", file=sys.stderr, smoothing=0
        )

    def update(self, nbytes: int, tokens: int) -> None:
        self.tokens += tokens
        self.bar.set_postfix_str(f"{self.tokens / (time.monotonic() - self.start):,.0f} tokens/s", refresh=False)
        self.bar.update(nbytes)


def tokenise(parts: list[Part], settings: Settings, dtype: np.dtype, workers: int, progress: Progress) -> None:
    """Writes the parts that are not done, in order."""

    def chunks() -> Iterator[tuple[tuple[int, bool], Rows]]:
        for part in parts:
            yield from (((size, False), rows) for size, rows in read(part.source))
            yield (0, True), []  # the file's last: it is closed before a bad row of the next one can stop all

    with closing(in_order(Encoder(settings).encode, chunks(), workers)) as results:
        for part in parts:
            with ExitStack() as stack:
                writers = [stack.enter_context(IndexedWriter(prefix, dtype)) for prefix in part.prefixes]
                for (size, last), encoded in results:
                    if last:
                        break
                    for writer, (raw, lengths) in zip(writers, encoded, strict=True):
                        writer.add_bytes(raw, lengths)
                        progress.update(0, len(raw) // dtype.itemsize)
                    progress.update(size, 0)


def merge(parts: list[Part], number: int, target: str, dtype: np.dtype) -> str:
    """Joins what the parts have under key `number` into the output, and says what it holds."""
    with IndexedWriter(target, dtype) as writer:
        for part in parts:
            if bin_path(part.prefixes[number]).stat().st_size:
                writer.add_dataset(IndexedDataset(part.prefixes[number]))
        if not writer.tokens:
            raise ValueError(f"none of the {len(parts)} input files has a document that is not empty")
    return f"wrote {target}.bin and .idx: {len(IndexedDataset(target))} documents, {writer.tokens} tokens of {dtype}"


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Raises ValueError if another process is in the folder, whose files would mix with ours."""
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"another run is writing {folder}: let it end, or give another --output-prefix") from error
        except OSError as error:  # some network file systems have no locks
            print(f"warning: {folder} cannot be locked ({error}): start no other run with it", file=sys.stderr)
        yield


def run(arguments: argparse.Namespace) -> None:
    settings = Settings(
        arguments.tokenizer_model, tuple(arguments.json_keys), arguments.append_eod, arguments.special_tokens_in_text
    )
    targets = [f"{arguments.output_prefix}_{key}_document" for key in settings.json_keys]
    for target in targets:
        for path in (bin_path(target), idx_path(target)):
            if path.exists():
                raise ValueError(f"{path} exists: remove it, or give another --output-prefix")
    encoder = Encoder(settings)
    _ = encoder.end  # a tokenizer without one is found before anything is written
    parts = plan(arguments, encoder)
    folder = Path(f"{arguments.output_prefix}.parts")
    folder.mkdir(parents=True, exist_ok=True)
    with alone_in(folder):
        progress = Progress(parts)
        with progress.bar:
            left = [part for part in parts if not part.done]
            if len(left) < len(parts):
                progress.bar.write(f"{len(parts) - len(left)} of {len(parts)} files are done already", file=sys.stderr)
            tokenise(left, settings, encoder.dtype, arguments.workers, progress)
        for number, target in enumerate(targets):
            print(merge(parts, number, target, encoder.dtype))
        shutil.rmtree(folder)


def positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number from 1 on")
    return int(text)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.error = lambda message: parser.exit(2, f"error: {message}\n")  # one line, as the trainer does
    parser.add_argument("--input", nargs="+", required=True, metavar="PATH", help="files, folders or globs")
    parser.add_argument(
        "--output-prefix", required=True, metavar="PREFIX", help="of the files to write, with its folder"
    )
    parser.add_argument("--json-keys", nargs="+", default=["text"], metavar="KEY", help="of the texts (default: text)")
    parser.add_argument(
        "--tokenizer-model", required=True, metavar="PATH", help="tokenizer.json, .model or the folder of one"
    )
    parser.add_argument("--append-eod", action="store_true", help=f"end every document with {END_OF_TEXT}")
    parser.add_argument(
        "--special-tokens-in-text", action="store_true", help="texts may hold special tokens, and mean them"
    )
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--workers", type=positive, default=cores, metavar="N", help=f"processes (default: {cores})")
    arguments = parser.parse_args()
    if len(set(arguments.json_keys)) < len(arguments.json_keys):
        parser.error(f"--json-keys {' '.join(arguments.json_keys)}: every key once")
    if not os.path.basename(arguments.output_prefix) or any("/" in key for key in arguments.json_keys):
        parser.error("the files are named PREFIX_KEY_document: --output-prefix must not end in /, nor a key hold one")
    return arguments


def main() -> int:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are the parallelism
    try:
        run(parse_arguments())
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1 if isinstance(error, OSError) else 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
