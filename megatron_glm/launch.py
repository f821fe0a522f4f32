"""The start and the end of a process: its rank from torchrun's or SLURM's variables, errors as one line.

Nothing here imports torch.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple, NoReturn, TypeVar

E = TypeVar("E", bound=BaseException)
SHOWN = "megatron_glm_shown_elsewhere"  # attribute of an error
STEP_VARIABLES = ("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS")
ALL_OF_TORCHRUN = (
    "torchrun sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT together; start with torchrun or srun"
)
FIRST_SPECIAL_STEP = 0xFFFFFFF0  # from here on: the shells of sbatch and salloc, not what srun starts


class Place(NamedTuple):
    """One process among those of its run."""

    rank: int
    world_size: int
    local_rank: int | None
    address: str  # where rank 0 listens
    port: int
    run: str  # what the launcher calls the run, in words; empty if it gives no name


def ranks_from_slurm() -> None:
    """What torchrun would have set in the environment, from SLURM's variables, for a process that srun has started.

    The first node of the step is the meeting point, on a port that follows from the numbers of job and step, unless
    MASTER_ADDR and MASTER_PORT say otherwise. Nothing changes under torchrun, outside SLURM and for a single task.

    Raises: ValueError, naming the variable, for one that is missing or no number, or if scontrol cannot be run.
    """
    env = os.environ
    if "RANK" in env or not _started_by_srun() or (tasks := _slurm_tasks()) == 1:
        return
    if (given := _number("WORLD_SIZE", tasks)) != tasks:
        raise ValueError(f"WORLD_SIZE is {given}, srun started {tasks} tasks (SLURM_NTASKS): unset WORLD_SIZE")
    rank, local_rank = _number("SLURM_PROCID"), _number("SLURM_LOCALID")
    if "MASTER_ADDR" not in env:
        env["MASTER_ADDR"] = _first_node()
    # Steps of a job and jobs on a node meet on ports of their own, below those that the system gives to clients.
    port = 20000 + (_number("SLURM_JOB_ID", 0) * 97 + _step()) % 10000
    env.setdefault("MASTER_PORT", str(port))
    env |= {"WORLD_SIZE": str(tasks), "RANK": str(rank), "LOCAL_RANK": str(local_rank)}


def world_size() -> int:
    """Ranks of the run that this process belongs to; 1 for a process on its own.

    Raises: ValueError for a WORLD_SIZE that is no number, and where SLURM has many tasks and this process is none.
    """
    if "WORLD_SIZE" in os.environ:
        return _number("WORLD_SIZE", least=1)
    if "RANK" in os.environ:
        raise ValueError(f"RANK is {os.environ['RANK']}, WORLD_SIZE is not set: {ALL_OF_TORCHRUN}")
    if (tasks := _slurm_tasks()) > 1:
        raise ValueError(
            f"SLURM_NTASKS is {tasks}, but srun did not start this process: start it with srun or torchrun "
            "(srun --ntasks=1 for a single process)"
        )
    return 1


def place() -> Place | None:
    """This process among those of its run; None for a process on its own.

    Raises: ValueError, naming the variable, if torchrun's variables are set in part or hold no numbers.
    """
    size = world_size()
    if "RANK" not in os.environ:
        if size > 1:
            raise ValueError(f"WORLD_SIZE is {size}, RANK is not set: {ALL_OF_TORCHRUN}")
        return None
    rank, port = _number("RANK"), _number("MASTER_PORT", least=1)
    if rank >= size:
        raise ValueError(f"RANK is {rank}, WORLD_SIZE is {size}: ranks are 0 to {size - 1}")
    if port > 65535:
        raise ValueError(f"MASTER_PORT is {port}: ports are 1 to 65535")
    if not (address := os.environ.get("MASTER_ADDR")):
        raise ValueError(f"RANK is {rank}, MASTER_ADDR is not set: {ALL_OF_TORCHRUN}")
    local_rank = _number("LOCAL_RANK") if "LOCAL_RANK" in os.environ else None
    return Place(rank, size, local_rank, address, port, _run_name(rank, size))


def local_rank(gpus: int) -> int:
    """The GPU of this process, of those that it sees: srun may show each process its own only.

    Raises: ValueError if there are several and LOCAL_RANK is not set: all processes of a node would take the first.
    """
    if gpus > 1 and world_size() > 1 and "LOCAL_RANK" not in os.environ:
        raise ValueError(f"LOCAL_RANK is not set, and this process sees {gpus} GPUs: {ALL_OF_TORCHRUN}")
    return _number("LOCAL_RANK", 0) % gpus


def _run_name(rank: int, size: int) -> str:
    """The same on all ranks of a run and, if it is not empty, another one for another run."""
    env = os.environ
    if "TORCHELASTIC_RUN_ID" in env:
        return f"torchrun's --rdzv-id {env['TORCHELASTIC_RUN_ID']}"
    if _started_by_srun() and (_number("SLURM_PROCID"), _slurm_tasks()) == (rank, size):
        return f"SLURM step {env.get('SLURM_JOB_ID', '?')}.{_step()}"
    return ""


def _number(name: str, default: int | None = None, least: int = 0) -> int:
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    if text is None:
        launcher = "srun" if name.startswith("SLURM_") else "torchrun"
        raise ValueError(f"{name} is not set: start with srun or torchrun ({launcher} sets it for each process)")
    if not (text.isascii() and text.isdecimal()) or int(text) < least:
        raise ValueError(f"{name} is {text!r}: it should be a whole number from {least} on")
    return int(text)


def _slurm_tasks() -> int:
    name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in os.environ else "SLURM_NTASKS"
    return _number(name, None if _started_by_srun() else 1, least=1)  # else each task would be a run of its own


def _step() -> int:
    return _number("SLURM_STEP_ID" if "SLURM_STEP_ID" in os.environ else "SLURM_STEPID", 0)


def _started_by_srun() -> bool:
    """False in the shells of sbatch and salloc: they have SLURM_NTASKS, maybe SLURM_PROCID, and one process."""
    env = os.environ
    return "SLURM_PROCID" in env and any(name in env for name in STEP_VARIABLES) and _step() < FIRST_SPECIAL_STEP


def _first_node() -> str:
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST")
    remedy = "set MASTER_ADDR to the name of the first node"
    if not nodes:
        raise ValueError(f"neither SLURM_STEP_NODELIST nor SLURM_JOB_NODELIST is set: {remedy}")
    try:
        command = ["scontrol", "show", "hostnames", nodes]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError(f"`scontrol show hostnames {nodes}` cannot be run ({error}): {remedy}") from error
    if done.returncode != 0 or not done.stdout.split():
        said = " ".join(done.stderr.split()) or "it names no node"
        raise ValueError(f"`scontrol show hostnames {nodes}` ended with {done.returncode} ({said}): {remedy}")
    return done.stdout.split()[0]


def is_first_rank() -> bool:
    """By the launcher's variables: there may be no process group yet."""
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"


def say(message: str) -> None:
    """A message of the first rank, before torch is there."""
    if is_first_rank():
        print(message, flush=True)


def one_thread_on_a_cpu() -> None:
    """OMP_NUM_THREADS=1 where there is no GPU, unless it is given; before torch is imported.

    With the default, all cores, small models lose most of their time on a machine that others use too: the quickstart
    took 55 minutes instead of 4 on two shared cores.
    """
    if not any(os.path.exists(device) for device in ("/dev/nvidiactl", "/dev/dxg")):
        os.environ.setdefault("OMP_NUM_THREADS", "1")


def run_program(main: Callable[[], int | None]) -> NoReturn:
    """Ends the process with what `main` returns (None: 0), or as `one_line_errors` says.

    A rank of many leaves by os._exit, after all other exit functions. Python's own end would stop the threads that ask
    the store of the run (signals, watchdog) inside torch's C++ code, which aborts the process: exit code -6.
    """
    code: object = 1

    def leave() -> None:
        if os.environ.get("WORLD_SIZE", "1") != "1":
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code if isinstance(code, int) else 1)

    atexit.register(leave)  # before slow imports: the exit functions of what they import run first
    try:
        with one_line_errors():
            code = main() or 0
    except SystemExit as stop:
        code = 0 if stop.code is None else stop.code
        raise
    sys.exit(code)


@cache
def one_line_warnings() -> None:
    """Warnings of this package become `warning: …`, of the first rank alone; those of others say where they come from.

    Once a process.
    """
    package, with_place = Path(__file__).parent, warnings.formatwarning

    def formatted(message: Warning | str, category: type[Warning], filename: str, line: int, *rest: str | None) -> str:
        if package not in Path(filename).parents:
            return with_place(message, category, filename, line, *rest)
        return f"warning: {message}\n" if is_first_rank() else ""

    warnings.formatwarning = formatted


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Errors a user can fix become `error: …` and an exit code: 2 for settings and data, 1 for a failed run."""
    one_line_warnings()
    try:
        yield
    except (ValueError, FloatingPointError, OSError) as error:
        if not any(map(is_shown_elsewhere, (error, error.__cause__))):
            print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(2 if isinstance(error, ValueError) else 1)
    except RuntimeError as error:
        if not _lost_connection(error):
            raise
        what = f"rank {os.environ.get('RANK', 0)} has lost another rank, whose own output says why"
        print(f"error: {what}: {str(error).split(' This is')[0]}", file=sys.stderr, flush=True)
        sys.exit(1)
    finally:
        if (watchdog := sys.modules.get("megatron_glm.training.watchdog")) is not None:
            watchdog.stop()
        dist = sys.modules.get("torch.distributed")  # not imported where the flags were wrong
        if dist is not None and dist.is_initialized():
            dist.destroy_process_group()


def shown_elsewhere(error: E, yes: bool = True) -> E:
    """The same error, marked on the ranks that need not show it, as another rank does."""
    setattr(error, SHOWN, yes)
    return error


def is_shown_elsewhere(error: BaseException | None) -> bool:
    return getattr(error, SHOWN, False)


def _lost_connection(error: RuntimeError) -> bool:
    """Whether a collective failed since a process at the other end is gone; gloo raises no class of its own."""
    dist = sys.modules.get("torch.distributed")
    return (dist is not None and isinstance(error, dist.DistError)) or "gloo/transport" in str(error)
