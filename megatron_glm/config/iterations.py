"""Checkpoint folders by their names: which iterations one holds, which is the last, and which a run starts from.

    DIR/latest_checkpointed_iteration.txt     the pointer: the number of the last complete iteration
    DIR/iter_0000100/                         one iteration; complete if it has an index of its tensors

A save first names its folder and then moves the pointer. `iter_…/.pending` says that the pointer has not been moved
yet: what a kill between the two leaves counts as not saved. Any other complete iteration above the pointer was saved,
and the pointer is lost or stale: a run that would pass over it is refused.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from .source import describe

LATEST_NAME = "latest_checkpointed_iteration.txt"
ITERATIONS = "iter_" + "[0-9]" * 7
INDEX_NAMES = ("tensors.index", ".metadata")  # the second one in earlier versions
PENDING = ".pending"


def iteration_folder(folder: Path, iteration: int) -> Path:
    return folder / f"iter_{iteration:07d}"


def latest(folder: Path) -> int | None:
    """What the pointer says; None without one. Raises ValueError if it holds no number."""
    file = folder / LATEST_NAME
    if not file.is_file():
        return None
    text = file.read_bytes().strip().decode(errors="backslashreplace")
    if not re.fullmatch("[0-9]+", text):
        raise ValueError(f"{file} holds {text!r}, it should hold an iteration number")
    return int(text)


def is_complete(folder: Path) -> bool:
    """Whether one `iter_…` folder has its index, which is written last."""
    return any((folder / name).is_file() for name in INDEX_NAMES)


def saved(folder: Path) -> list[int]:
    """The iterations whose saves were completed, ascending, whatever the pointer says."""
    try:
        reached = latest(folder)
    except ValueError:
        reached = None
    found = []
    for path in folder.glob(ITERATIONS):
        iteration = int(path.name.removeprefix("iter_"))
        pending = (path / PENDING).exists() and (reached is None or iteration > reached)
        if is_complete(path) and not pending:
            found.append(iteration)
    return sorted(found)


def any_saved(folder: Path) -> bool:
    """Whether `folder` holds checkpoints or is one, in whatever state."""
    return is_complete(folder) or (folder / LATEST_NAME).exists() or bool(saved(folder))


def pointer_fault(folder: Path) -> str | None:
    """What is wrong with the pointer of `folder`, None if it names the last complete iteration or nothing is there."""
    there = saved(folder)
    names = f"complete iterations there: {', '.join(map(str, there)) or 'none'}"
    file = folder / LATEST_NAME
    try:
        iteration = latest(folder)
    except ValueError as error:
        return f"{error}; {names}"
    if iteration is None:
        return f"{file} is missing; {names}" if there else None
    named = iteration_folder(folder, iteration)
    if not named.is_dir():
        return f"{file} names {named.name}, which is missing; {names}"
    if not is_complete(named):
        return f"{file} names {named.name}, which is incomplete: it has no {' or '.join(INDEX_NAMES)}; {names}"
    if there and there[-1] > iteration:
        return f"{file} names iteration {iteration}, but later ones are there; {names}"
    return None


def start(load: str | Path, ckpt_step: int | None = None) -> tuple[Path, int]:
    """(folder, iteration) that --load names: a folder, with its last iteration or --ckpt-step; or one `iter_…` in it.

    Raises: ValueError if it holds no such iteration, or if its pointer does not say which is the last.
    """
    folder = Path(load)
    real = folder if re.fullmatch(ITERATIONS, folder.name) else folder.resolve()  # a link, or `.`
    if re.fullmatch(ITERATIONS, real.name) and real.is_dir():
        return _single(folder, real, ckpt_step)
    if is_complete(folder):
        raise ValueError(f"--load {load} is a single checkpoint, but its name is not iter_ and seven digits: rename it")
    if ckpt_step is not None:
        if not is_complete(iteration_folder(folder, ckpt_step)):
            there = ", ".join(map(str, saved(folder))) or "none"
            raise ValueError(f"--ckpt-step {ckpt_step}: --load {load} has no such complete iteration; there: {there}")
        return folder, ckpt_step
    if (fault := pointer_fault(folder)) is not None:
        remedy = f": choose one with --ckpt-step, for example {there[-1]}" if (there := saved(folder)) else ""
        raise ValueError(f"--load {load}: {fault}{remedy}")
    if (iteration := latest(folder)) is None:
        raise ValueError(f"--load {load}: the folder holds no checkpoint ({LATEST_NAME} is missing){_instead(folder)}")
    return folder, iteration


def _instead(folder: Path) -> str:
    """What a folder without checkpoints is, or how to make one, as the end of a message."""
    if (folder / "config.json").exists():
        return "; it is a Hugging Face folder: --load-hf trains from it, tools/convert_hf.py --from-hf converts it"
    what = describe(folder)
    if not what or (not folder.exists() and "glm" not in str(folder).lower()):  # run/base is seldom a name of the hub
        return "; tools/convert_hf.py makes one of a Hugging Face folder"
    return what


def _single(given: Path, folder: Path, ckpt_step: int | None) -> tuple[Path, int]:
    iteration = int(folder.name.removeprefix("iter_"))
    if ckpt_step not in (None, iteration):
        raise ValueError(f"--load {given} is iteration {iteration}, --ckpt-step is {ckpt_step}: give one of them")
    if not is_complete(folder):
        raise ValueError(f"--load {given} is no complete checkpoint: it has no {' or '.join(INDEX_NAMES)}")
    return folder.parent, iteration


def check_save(save: Path, begins: int, source: tuple[Path, int] | None) -> None:
    """Refuses a --save folder with iterations behind the one that the run starts from, or with a faulty pointer.

    Args:
        begins: iterations that are done when the run starts.
        source: the (folder, iteration) that it loads. Where that is the last iteration in `save`, a faulty pointer is
            allowed: the run writes a new one.
    Raises: ValueError naming the iterations and what to do.
    """
    there, fault = saved(save), pointer_fault(save)
    last = there[-1] if there else None
    lost = f" ({fault})" if fault else ""
    resume = f"--load {save}{f' --ckpt-step {last}' if fault else ''}"
    if last is not None and last > begins:
        raise ValueError(
            f"--save {save} already holds iteration {last}, this run starts after {begins}{lost}: resume with "
            f"{resume}, or choose another folder"
        )
    if fault is None or (source is not None and source[1] == last and source[0].resolve() == save.resolve()):
        return
    remedy = f"resume with {resume}" if there else f"remove {LATEST_NAME}"
    raise ValueError(f"--save {save}: {fault}: {remedy}, or choose another folder")


def print_start(load: str, ckpt_step: str | None = None) -> None:
    """For the recipes: prints the folder of `start`, or why there is none, with exit code 2."""
    try:
        print(iteration_folder(*start(load, None if ckpt_step is None else int(ckpt_step))))
    except ValueError as error:
        print(error)
        sys.exit(2)
