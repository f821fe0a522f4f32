"""A folder written file by file, by one process or by many, that gets its name only when it is whole.

While it grows it is `NAME.tmp`, and `NAME.tmp/.conversion/` keeps what an interrupted run needs to go on: the settings
it was begun with, and one record for each file that is written and synced. Both are gone when the folder gets its name.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed import ProcessGroup

from .files import UNFINISHED, BackgroundSync, sync, write_durably
from .sharded import on_first_rank, together

RECORDS = ".conversion"
SETTINGS, FAILED = "settings.json", "failed"

T = TypeVar("T")


@dataclass(frozen=True)
class Run:
    """How a conversion runs.

    resume: go on with what an interrupted run left; an error then keeps the finished files, too.
    verify: read everything written back and compare it with the source before the folder gets its name.
    group: gloo group of the processes that share the work; they see the same file system. None: this one alone.
    progress: gets the bytes of each piece written, or found written.
    """

    resume: bool = False
    verify: bool = False
    group: ProcessGroup | None = None
    progress: Callable[[int], object] = lambda nbytes: None

    @property
    def rank(self) -> int:
        return 0 if self.group is None else self.group.rank()

    def share(self, work: list[T]) -> list[T]:
        """The files or other items of this process, whatever an interrupted run has left of them."""
        return work[self.rank :: 1 if self.group is None else self.group.size()]


@dataclass(frozen=True)
class OutputFile:
    """A file to write: a function of the source and the settings alone, whichever process writes it.

    nbytes: of its tensors; keys: their names.
    write: writes the file in the folder it gets; returns what `produce` hands to `complete`, JSON.
    check: compares the file in the folder it gets with the source; raises ValueError where they differ.
    """

    name: str
    nbytes: int
    keys: list[str]
    write: Callable[[Path], Any]
    check: Callable[[Path], None]


def produce(
    target: Path,
    settings: dict[str, Any],
    files: list[OutputFile],
    run: Run,
    complete: Callable[[Path, list[Any]], None],
) -> None:
    """Writes `files` into a new folder `target`; every process of `run.group` calls it with the same files.

    Args:
        settings: JSON; what the content of the files depends on. Rank 0's count.
        complete: called on rank 0 with the folder and the results of all `files`, in their order; writes the rest.
    Raises: ValueError or OSError on every process if any of them fails; `target` does not exist then.
    """
    path = target.absolute()
    staging = path.parent / (path.name + UNFINISHED)
    on_first_rank(run.group, lambda: _begin(target, staging, settings, run.resume))
    try:
        together(
            run.group,
            lambda: _write_share(staging, files, run),
            lambda parts: complete(staging, [{k: v for p in parts for k, v in p.items()}[f.name] for f in files]),
        )
        if run.verify:
            together(run.group, lambda: [file.check(staging) for file in run.share(files)] and None)
        on_first_rank(run.group, lambda: _publish(staging, target))
    except Exception:  # an interrupt keeps the finished files for --resume
        if run.rank == 0 and not run.resume:
            shutil.rmtree(staging, ignore_errors=True)
        raise


def _begin(target: Path, staging: Path, settings: dict[str, Any], resume: bool) -> None:
    if target.exists():
        raise ValueError(f"{target} already exists and is not overwritten: remove it or choose another folder")
    records = staging / RECORDS
    if resume and (records / SETTINGS).is_file():
        _require_same(records / SETTINGS, json.loads((records / SETTINGS).read_text()), settings)
        (records / FAILED).unlink(missing_ok=True)
        return
    if staging.exists():
        if not records.is_dir() and (staging.is_file() or any(staging.iterdir())):
            raise ValueError(f"{staging} is needed, but is not what an interrupted run left: move it away")
        shutil.rmtree(staging)
    records.mkdir(parents=True)
    try:
        write_durably(records / SETTINGS, json.dumps(settings).encode())
    except OSError:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _require_same(file: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    for key in old | new:
        before, now = (json.dumps(values.get(key)) for values in (old, new))
        if before != now:
            raise ValueError(f"{file}: the interrupted run had {key} {before}, this one has {now}: it cannot go on")


def _write_share(staging: Path, files: list[OutputFile], run: Run) -> dict[str, Any]:
    """{file name: result} of this process's files; stops early, without an error, if another process has failed."""
    results = {}
    failed = staging / RECORDS / FAILED
    try:
        with BackgroundSync() as background:
            for file in run.share(files):
                if failed.exists():
                    break
                record = staging / RECORDS / f"{file.name}.json"
                finished = json.loads(record.read_text()) if record.is_file() else None
                if finished is not None and (staging / file.name).is_file():
                    if (staging / file.name).stat().st_size == finished["size"]:
                        results[file.name] = finished["result"]
                        run.progress(file.nbytes)
                        continue
                for path in (staging / file.name, record):  # a name may have a folder in it
                    path.parent.mkdir(parents=True, exist_ok=True)
                results[file.name] = file.write(staging)
                content = {"size": (staging / file.name).stat().st_size, "result": results[file.name]}
                background.sync(staging / file.name, partial(write_durably, record, json.dumps(content).encode()))
    except Exception:
        with suppress(OSError):  # the disk may be full; the error itself is raised
            failed.touch()
        raise
    return results


def _publish(staging: Path, target: Path) -> None:
    for folder, _, _ in os.walk(staging):
        sync(Path(folder))
    shutil.rmtree(staging / RECORDS)  # last, as they tell whose folder this is
    os.rename(staging, target)
    sync(target)
    sync(target.parent)


def identity(paths: list[Path]) -> dict[str, str]:
    """{path: its size and time of change}: other files, or changed ones, differ in it."""
    stats = [(path, path.stat()) for path in sorted(paths)]
    return {str(path.resolve()): f"{stat.st_size} bytes of {stat.st_mtime_ns} ns" for path, stat in stats}
