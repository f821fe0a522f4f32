"""Tokenises JSON, Parquet, Arrow and text files into PREFIX_KEY_document.bin and .idx, for pretrain_glm.py.

The output is that of Megatron's tool of the same name. A row of JSON (.jsonl or .json, also .gz or .zst), Parquet or
Arrow is a document, as is a whole text file (.txt, .md, .py). An interrupted run continues when it is started again:
what it had done of the input files is kept.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a checkout that is not installed, too

from megatron_glm import signals  # noqa: E402

if __name__ == "__main__":
    signals.install(signal.SIGINT)  # Ctrl-C: one line and exit code 130

import numpy as np  # noqa: E402
from tqdm import tqdm  # noqa: E402

from megatron_glm.data.blend import cache_key  # noqa: E402
from megatron_glm.data.files import (  # noqa: E402
    SUFFIXES,
    check_unicode,
    count_parquet_rows,
    decode_row,
    file_format,
    find_files,
    read_rows,
)
from megatron_glm.data.indexed import IndexedDataset, IndexedWriter, bin_path, idx_path, smallest_dtype  # noqa: E402
from megatron_glm.data.report import RowReport  # noqa: E402
from megatron_glm.data.rows import special_token_error, special_token_pattern  # noqa: E402
from megatron_glm.data.tokenizer import END_OF_TEXT, Tokenizer  # noqa: E402

TEXT_SUFFIXES = (".txt", ".md", ".py")
CHUNK_BYTES = 2**19  # text that a worker tokenises at a time
Rows = list[tuple[str, bytes | dict]]  # with the place of each


@dataclass(frozen=True)
class Settings:
    """What the ids of a text depend on."""

    tokenizer_model: str
    json_keys: tuple[str, ...]
    append_eod: bool
    special_tokens_in_text: bool = False


class Encoder:
    """Rows to token ids."""

    def __init__(self, settings: Settings):
        self.tokenizer = Tokenizer.load(settings.tokenizer_model)
        self.keys = settings.json_keys
        self.end = self.tokenizer.require(END_OF_TEXT) if settings.append_eod else None
        self.special = None if settings.special_tokens_in_text else special_token_pattern(self.tokenizer)
        self.dtype = smallest_dtype(self.tokenizer.vocab_size)

    def encode(self, rows: Rows) -> list[tuple[bytes, list[int]]]:
        """(the ids of all documents, their lengths) under each key; empty texts make no document."""
        texts = [self._texts(place, raw) for place, raw in rows]
        results = []
        for column in zip(*texts, strict=True):
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


_encoder: Encoder  # of a worker


def start_worker(settings: Settings) -> None:
    global _encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent meets it
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()  # nobody is left behind
    _encoder = Encoder(settings)


def encode(rows: Rows) -> list[tuple[bytes, list[int]]]:
    return _encoder.encode(rows)


def read_chunks(path: Path) -> Iterator[tuple[Rows, int]]:
    """(rows, how much of the file they are in bytes) in the order of the file."""
    if path.suffix.lower() in TEXT_SUFFIXES:
        try:
            yield [(str(path), {"text": path.read_text("utf-8")})], path.stat().st_size
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: {error}") from error
        return
    suffix, compression = file_format(path)
    row_bytes = path.stat().st_size // max(1, count_parquet_rows(path)) if suffix == ".parquet" else 0
    rows, nbytes, text = [], 0, 0
    for place, raw in read_rows(path):
        rows.append((place, raw))
        size = len(raw) if isinstance(raw, bytes) else sum(len(text) for text in raw.values() if isinstance(text, str))
        nbytes += 0 if compression else row_bytes or size
        text += size
        if text >= CHUNK_BYTES:
            yield rows, nbytes
            rows, nbytes, text = [], 0, 0
    if rows:
        yield rows, nbytes


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
        stat = path.stat()
        name = cache_key(
            source=[str(path.resolve()), stat.st_size, stat.st_mtime_ns, len(parts)],
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
    """Writes the parts that are not done, in order; the workers run ahead of the writing by a few chunks each."""
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, start_worker, (settings,))
    pending: deque[tuple[Part, Future, int]] = deque()
    chunks = ((part, rows, nbytes) for part in parts for rows, nbytes in read_chunks(part.source))
    try:
        ahead = next(chunks, None)
        for part in parts:
            with ExitStack() as stack:
                writers = [stack.enter_context(IndexedWriter(prefix, dtype)) for prefix in part.prefixes]
                while (ahead and ahead[0] is part) or (pending and pending[0][0] is part):
                    while ahead and len(pending) < 4 * workers:
                        pending.append((ahead[0], pool.submit(encode, ahead[1]), ahead[2]))
                        ahead = next(chunks, None)
                    _, future, nbytes = pending.popleft()
                    for writer, (raw, lengths) in zip(writers, future.result(), strict=True):
                        writer.add_bytes(raw, lengths)
                        progress.update(0, len(raw) // dtype.itemsize)
                    progress.update(nbytes, 0)
    finally:
        pool.shutdown(cancel_futures=True)


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
    except BrokenProcessPool:
        print("error: a worker died, maybe for want of memory: give fewer --workers", file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1 if isinstance(error, OSError) else 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
