"""A folder of files that are made once from the data: what they are named by, and who makes them."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from .. import heartbeat
from .blend import cache_key
from .files import CACHE_FOLDER

WAIT_SECONDS = 30  # between two messages of a process that waits
SETTLED_SECONDS = 2  # a file that changed later than that may change again within the same tick of its clock

Say = Callable[[str], None]  # takes a line for the user
T = TypeVar("T")
# once(work) runs work() on one process of each node while the others wait; it returns the result of the own node's
# process on all, or raises the error of any on all. The result must be of JSON's types.
Once = Callable[[Callable[[], T]], T]


def cache_folder(given: str | None, beside: Path) -> Path:
    """The folder for what is made of the data once.

    It is --data-cache-path (`given`); else `index_cache` in the folder of the data file `beside`, or a folder in
    ~/.cache where that cannot be written.
    """
    if given is not None:
        return Path(given)
    folder = beside.absolute().parent / CACHE_FOLDER
    if os.access(folder if folder.exists() else folder.parent, os.W_OK | os.X_OK):
        return folder
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron_glm"


def digests(paths: Iterable[Path], cache: Path) -> list[str]:
    """A digest of the content of each file.

    The files are read once: a list in the cache keeps the digests, and holds for a file as long as its size, inode and
    times of change (mtime and ctime, in nanoseconds) do. The ctime also moves when the mtime is set back.
    """
    paths = [path.resolve() for path in paths]
    memo = cache / f"digests-{cache_key(paths=list(map(str, paths)))}"
    try:
        known = json.loads(memo.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        known = {}
    before = {str(path): file_state(path) for path in paths}
    missing = [path for path in before if known.get(path, {}).get("state") != before[path]]
    with ThreadPoolExecutor(min(8, len(missing) or 1)) as pool:  # hashing and reading release the GIL
        found = dict(zip(missing, pool.map(_digest, missing), strict=True))
    for path in missing:
        if file_state(Path(path)) != before[path]:
            raise ValueError(f"{path} changed while it was read: let what writes it end first")
    known = {path: {"state": before[path], "digest": found.get(path) or known[path]["digest"]} for path in before}
    result = [known[str(path)]["digest"] for path in paths]
    settled = {path: each for path, each in known.items() if time.time() - each["state"][-1] / 1e9 > SETTLED_SECONDS}
    if missing and settled:
        with suppress(OSError):  # only costs reading again; where files must be written, the error will be shown
            write_whole(memo, json.dumps(settled))
    return result


def file_state(path: Path) -> list[int]:
    """What changes with the content of a file, as a rule."""
    stat = path.stat()
    return [stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns]


def _digest(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, hashlib.blake2b).hexdigest()[:32]


def write_whole(path: Path, text: str) -> None:
    """Writes a small file that has its name only when it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def make_folder(target: Path, make: Callable[[Path, Say], None], say: Say) -> None:
    """Has `make(folder, say)` fill a folder that gets the name `target` when it is whole, unless it is there.

    Of several processes and nodes that share the file system one makes it and the others wait. Where one is killed the
    next takes its place; what the killed one left is removed.

    Raises: ValueError if the cache cannot be written.
    """
    if target.is_dir():
        return
    with writing(target.parent), locked(target, target.is_dir, say) as note:
        if target.is_dir():
            return
        for left in target.parent.glob(f"{target.name}.*.tmp"):
            shutil.rmtree(left, ignore_errors=True)
        temporary = target.with_name(f"{target.name}.{uuid.uuid4().hex}.tmp")
        temporary.mkdir()
        try:
            make(temporary, note)
            os.rename(temporary, target)
        except OSError:
            if not target.is_dir():  # without locks, two may have made it at once: either is right
                raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def writing(cache: Path) -> Iterator[None]:
    """An error of writing into the cache becomes a ValueError that names the flag."""

    def unwritable(error: OSError) -> ValueError:
        what = f"{error.strerror}: {error.filename}"
        return ValueError(f"cannot write the index cache {cache} ({what}); give another --data-cache-path")

    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(error) from error
    try:
        yield
    except OSError as error:
        if str(error.filename).startswith(str(cache)):
            raise unwritable(error) from error
        raise


@contextmanager
def locked(target: Path, ready: Callable[[], bool], say: Say) -> Iterator[Say]:
    """Waits for the lock of TARGET.lock, or until `ready()`, when another process has made the target.

    Yields a function to use instead of `say`: it also writes the message into the lock file, and the processes that
    wait show it. The system releases the lock of a process that ends, however it ends. On a file system without locks
    each node makes the files for itself, which is slower and gives the same.
    """
    path, waited = target.with_name(f"{target.name}.lock"), time.monotonic()
    while True:
        file = path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            holder = file.read() or "another process"
            file.close()
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                path.unlink(missing_ok=True)
                say(f"{target.parent} cannot be locked ({error.strerror}): each node makes its files for itself")
                yield say
                return
            if ready():
                yield say
                return
            if time.monotonic() - waited > WAIT_SECONDS:
                waited = time.monotonic()
                heartbeat.beat()
                say(f"waiting for {holder}, which makes {target}")
            time.sleep(0.2)
            continue
        with suppress(FileNotFoundError):
            if os.fstat(file.fileno()).st_ino == path.stat().st_ino:
                break
        file.close()  # the process that held the lock has removed this file: open the new one

    def note(message: str) -> None:
        heartbeat.beat()
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()} {message and f'({message})'}")
        file.flush()
        if message:
            say(message)

    try:
        note("")
        yield note
    finally:
        path.unlink(missing_ok=True)
        file.close()
