"""Files of rows: which of them a path means, and their rows, undecoded."""

from __future__ import annotations

import codecs
import glob
import gzip
import io
import json
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_glm.config.source import download_hint, unique

from .report import RowReport, some

LINES, COLUMNS = (".jsonl", ".ndjson", ".json"), (".parquet", ".arrow")
SUFFIXES = (*LINES, *COLUMNS)
COMPRESSIONS = (".gz", ".zst")  # of files with lines
KNOWN = ".jsonl, .ndjson, .json, each also as .gz or .zst, .parquet, .arrow"
# what `datasets` writes beside the rows
NOT_ROWS = ("state.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json")

CACHE_FOLDER = "index_cache"  # what a run has made of the data, beside them

RawRow = Any  # bytes: a line of JSON, not yet decoded


def file_format(path: Path) -> tuple[str, str]:
    """(suffix, compression) in lower case, as (".jsonl", ".gz"); the compression may be empty."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    compression = suffixes.pop() if suffixes and suffixes[-1] in COMPRESSIONS else ""
    return suffixes[-1] if suffixes else "", compression


def is_readable(path: Path, suffixes: tuple[str, ...] = SUFFIXES) -> bool:
    suffix, compression = file_format(path)
    return suffix in suffixes and (not compression or suffix in LINES) and path.name not in NOT_ROWS


def find_files(
    data_path: Iterable[str], suffixes: tuple[str, ...] = SUFFIXES, report: RowReport | None = None
) -> list[Path]:
    """Files of data-path entries (files, folders, globs) in the order given, sorted inside a folder or glob.

    Dot files are no data. The other files of a folder or glob that are not read are listed in `report`. In a folder
    that `Dataset.save_to_disk` wrote, the files have the order that its state.json gives.

    Raises: ValueError for an entry without files, for a named file of another format, and for a folder of several
        splits.
    """
    files: list[Path] = []
    for entry in data_path:
        if not entry:
            raise ValueError("a data path is empty")  # an unset shell variable, not the working directory
        path = Path(entry)
        if path.is_file() and not is_readable(path, suffixes):
            raise ValueError(f"{path} is of no format that is read ({KNOWN})")
        candidates = [path] if path.is_file() else _in_folder(path) if path.is_dir() else _of_glob(entry)
        found = [file for file in candidates if is_readable(file, suffixes)]
        left = [str(file) for file in candidates if not is_readable(file, suffixes)]
        if not found:
            there = f"; there: {some(left)}" if left else ""
            hub = "" if path.exists() or path.suffix in (*suffixes, *COMPRESSIONS) else download_hint(entry, data=True)
            raise ValueError(f"{entry} holds or matches no file ({KNOWN}){there}: correct the path{hub}")
        if report is not None:
            report.files_left_out += left
        files += found
    return files


def _in_folder(folder: Path) -> list[Path]:
    """All files below a folder, sorted; of a saved data set the rows, in its order."""
    if (folder / "dataset_dict.json").is_file():
        splits = json.loads((folder / "dataset_dict.json").read_text())["splits"]
        raise ValueError(f"{folder} holds the splits {', '.join(splits)}: name one, as {folder / splits[0]}")
    files: list[Path] = []
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name == CACHE_FOLDER:
            continue
        if not path.is_dir():
            files.append(path)
        elif not folder.resolve().is_relative_to(path.resolve()):  # a link to a folder above would go round for ever
            files += _in_folder(path)
    state = folder / "state.json"
    saved = json.loads(state.read_text()) if state.is_file() else {}
    if isinstance(saved, dict) and "_data_files" in saved:
        if saved.get("_indices_files"):
            raise ValueError(f"{folder} was saved with an index over its rows: save it again after flatten_indices()")
        rows = [folder / file["filename"] for file in saved["_data_files"]]
        files = rows + [file for file in files if file not in rows and file.name not in NOT_ROWS]
    return files


def _of_glob(pattern: str) -> list[Path]:
    """The files that match, and all files of a matching folder, unless some of them match themselves (DIR/**)."""
    matches = sorted(map(Path, glob.glob(pattern, recursive=True)))
    files = [path for path in matches if not path.is_dir() and CACHE_FOLDER not in path.parts]
    for folder in (path for path in matches if path.is_dir()):
        if not any(file.is_relative_to(folder) for file in files):
            files += _in_folder(folder)
    return files


def read_rows(path: Path) -> Iterator[tuple[str, RawRow]]:
    """Yields (place in words, row) in file order: an undecoded JSON line, or a row as a dict; both count from 1.

    Nulls are where the file has them: a Parquet struct has the keys of all rows.
    """
    if file_format(path)[0] in COLUMNS:
        rows = enumerate(_column_rows(path), 1)
        yield from ((f"{path} row {number}", row) for number, row in rows)
        return
    with _opened(path) as file:
        if file_format(path)[0] == ".json" and (whole := _json_rows(file, path)) is not None:
            yield from ((f"{path} row {number}", row) for number, row in enumerate(whole, 1))
            return
        for number, line in enumerate(file, 1):
            if line.strip():
                yield f"{path}:{number}", line


@contextmanager
def _opened(path: Path) -> Iterator[io.BufferedReader[Any]]:
    """The bytes of a file of lines, decompressed; the first ones can be looked at (`peek`) before they are read."""
    compression = file_format(path)[1]
    try:
        if compression == ".gz":
            file = gzip.open(path)
        elif compression == ".zst":
            file = _pyarrow(path).input_stream(str(path), compression="zstd")
        else:
            file = path.open("rb", buffering=0)
        with io.BufferedReader(file, 2**20) as buffered:
            yield buffered
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    except OSError as error:
        if compression != ".zst" or error.errno:
            raise
        raise ValueError(f"cannot read {path}: {error}") from error


def _json_rows(file: io.BufferedReader, path: Path) -> list[RawRow] | None:
    """The rows of a .json file that is one array; None if it is none: each line is a row then, and nothing was read."""
    start = file.peek(2**16).removeprefix(codecs.BOM_UTF8).lstrip()
    if not start.startswith(b"["):
        return None
    try:
        return json.load(file, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"cannot read {path}: it begins as an array of rows, but {error}") from error


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(f"{path} needs pyarrow: pip install -e '.[data]'") from error
    return pyarrow


@contextmanager
def _columns(path: Path) -> Iterator[Any]:
    """The open file: a pyarrow ParquetFile, or a reader of Arrow batches; what fails inside names it."""
    pyarrow = _pyarrow(path)
    try:
        if file_format(path)[0] == ".parquet":
            with pyarrow.parquet.ParquetFile(path) as file:
                yield file
        else:
            with pyarrow.memory_map(str(path)) as file:
                try:
                    reader = pyarrow.ipc.open_stream(file)  # what save_to_disk writes
                except pyarrow.ArrowInvalid:
                    file.seek(0)
                    reader = pyarrow.ipc.open_file(file)
                yield reader
    except FileNotFoundError:
        raise
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error


def count_parquet_rows(path: Path) -> int:
    with _columns(path) as file:
        return file.metadata.num_rows


def _column_rows(path: Path) -> Iterator[dict]:
    with _columns(path) as file:
        if hasattr(file, "iter_batches"):
            batches = file.iter_batches(batch_size=512)
        elif hasattr(file, "num_record_batches"):
            batches = (file.get_batch(i) for i in range(file.num_record_batches))
        else:
            batches = file
        for batch in batches:
            for start in range(0, len(batch), 512):
                yield from batch.slice(start, 512).to_pylist()


def decode_row(raw: RawRow) -> dict:
    """A row that read_rows yields, without the keys that are null; raises ValueError if it is no JSON object."""
    try:
        row = json.loads(raw.decode("utf-8-sig"), object_pairs_hook=unique) if isinstance(raw, bytes) else raw
    except RecursionError as error:
        raise ValueError("the line is nested too deep for JSON") from error
    if not isinstance(row, dict):
        raise ValueError(f"the line must be a JSON object, got {row!r:.80}")
    return {key: value for key, value in row.items() if value is not None}


def check_unicode(text: str) -> None:
    """Raises ValueError for half a surrogate pair: JSON can spell it, tokenizers cannot take it."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"the text is not valid Unicode: {error.reason} at character {error.start}") from error
