"""Files that are either whole or not there: written, synced, and only then given their name."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf")


@contextmanager
def staged_folder(target: Path) -> Iterator[Path]:
    """Yields an empty folder beside `target` that becomes `target` at the end, or vanishes on an error.

    A process killed in between leaves `NAME.tmp`, which nothing reads and the next attempt replaces.
    Files must be synced by whoever writes them; the folder entries are synced here.
    Raises: ValueError if `target` exists.
    """
    if target.exists():
        raise ValueError(f"{target} already exists and is not overwritten: remove it or choose another folder")
    staging = target.with_name(target.name + ".tmp")
    if staging.exists():
        shutil.rmtree(staging)
    staging.mkdir(parents=True)
    try:
        yield staging
        for folder, _, _ in os.walk(staging):
            sync_folder(Path(folder))
        os.rename(staging, target)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    sync_folder(target.parent)


def write_durably(path: Path, content: bytes) -> None:
    """Replaces `path` by `content` in one step: after a crash it holds the old bytes or the new ones."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes the names in `folder` survive a power cut, not only the contents of its files."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def side_files(folder: Path) -> list[Path]:
    """Every file of a Hugging Face folder, relative to it, but weights and hidden files (such as a download cache)."""
    found = (path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file())
    return [p for p in found if not p.name.endswith(WEIGHT_SUFFIXES) and not any(s.startswith(".") for s in p.parts)]


def copy_side_files(source: Path, target: Path) -> None:
    """Copies the files of `side_files` byte for byte into `target`."""
    for name in side_files(source):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        write_durably(target / name, (source / name).read_bytes())
