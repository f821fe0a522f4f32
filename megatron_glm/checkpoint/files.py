"""Files that are either whole or not there: written, synced, and only then given their name."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..config.source import require_whole

UNFINISHED = ".tmp"  # the ending of a folder or file that is not yet, or no longer, whole
WEIGHT_SUFFIXES = (
    ".safetensors",
    ".safetensors.index.json",
    ".bin",
    ".bin.index.json",
    ".pt",
    ".pth",
    ".gguf",
    ".distcp",
)


@contextmanager
def staged_folder(target: Path, replace: bool = False) -> Iterator[Path]:
    """Yields an empty folder beside `target` that becomes `target` at the end, or vanishes on an error.

    A process killed in between leaves `NAME.tmp`, which nothing reads and the next attempt replaces.
    Files must be synced by whoever writes them; the folder entries are synced here.
    Raises: ValueError if `target` exists, unless it is to be replaced.
    """
    if target.exists() and not replace:
        raise ValueError(f"{target} already exists and is not overwritten: remove it or choose another folder")
    staging = target.with_name(target.name + UNFINISHED)
    if staging.exists():
        shutil.rmtree(staging)
    staging.mkdir(parents=True)
    held = os.open(staging, os.O_RDONLY)
    try:
        yield staging
        for folder, _, _ in os.walk(staging):
            sync(Path(folder))
        if not _is(staging, held):
            raise OSError(f"another process has replaced {staging}: two runs must not save to the same folder")
        if target.exists():
            shutil.rmtree(target)
        os.rename(staging, target)
    except BaseException:
        if _is(staging, held):
            shutil.rmtree(staging, ignore_errors=True)
        raise
    finally:
        os.close(held)
    sync(target.parent)


def _is(path: Path, descriptor: int) -> bool:
    """Whether `path` is what was opened as `descriptor`; while that is open nothing else gets its number."""
    return path.exists() and os.path.samestat(path.stat(), os.fstat(descriptor))


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """An OSError inside that names no file is one of `path`, which is written there: a full disk, for example."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_durably(path: Path, content: bytes) -> None:
    """Replaces `path` by `content` in one step: after a crash it holds the old bytes or the new ones."""
    temporary = path.with_name(path.name + UNFINISHED)
    with naming(path), temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync(path.parent)


class BackgroundSync:
    """Makes finished files durable while the next one is written: the disk then works all the time.

    At most one file is being synced. Leaving the context waits for it; an error shows at the next `sync` or there.
    """

    def __enter__(self) -> BackgroundSync:
        self._pool, self._pending = ThreadPoolExecutor(max_workers=1), None
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        with self._pool:
            if error is None:
                self._wait()

    def sync(self, file: Path, then: Callable[[], object] = lambda: None) -> None:
        """Starts to sync `file`, with `then()` to follow."""
        self._wait()
        self._pending = self._pool.submit(lambda: (sync(file), then()))

    def _wait(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()


def sync(path: Path) -> None:
    """Makes a file survive a power cut, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_folder(folder: Path) -> None:
    """Removes a folder that may be killed halfway: what is left of it then is named as unfinished."""
    doomed = folder.with_name(folder.name + UNFINISHED)
    os.rename(folder, doomed)
    shutil.rmtree(doomed)


def visible_files(folder: Path) -> list[Path]:
    """Every file and link under a folder, relative to it, in order; hidden ones (such as a download cache) aside.

    Links to folders are followed, each folder once.
    """
    found, seen = [], set()
    for root, folders, names in os.walk(folder, followlinks=True):
        if (real := os.path.realpath(root)) in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [Path(root, name).relative_to(folder) for name in names if not name.startswith(".")]
    return sorted(found)


def side_files(folder: Path) -> list[Path]:
    """The files of a Hugging Face folder that hold no weights, relative to it."""
    return [path for path in visible_files(folder) if not path.name.endswith(WEIGHT_SUFFIXES)]


def check_side_files(folder: Path) -> None:
    """Raises ValueError naming a file of `side_files` that is a link to nothing, a Git LFS pointer or no JSON."""
    for path in side_files(folder):
        require_whole(folder / path)


def copy_side_files(source: Path, target: Path) -> None:
    """Copies the files of `side_files` byte for byte into `target`."""
    for name in side_files(source):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        write_durably(target / name, (source / name).read_bytes())
