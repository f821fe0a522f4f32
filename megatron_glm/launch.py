"""The start and the end of a process: ranks from SLURM, errors as one line. Nothing here imports torch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def ranks_from_slurm() -> None:
    """What torchrun would have set in the environment, from SLURM's variables, for a process that srun started.

    The first node of the step is the meeting point, on a port that follows from the job's number, unless MASTER_ADDR
    and MASTER_PORT say otherwise. Nothing changes under torchrun, outside SLURM and for a single task.
    """
    env = os.environ
    if "RANK" in env or "SLURM_PROCID" not in env or env.get("SLURM_NTASKS", "1") == "1":
        return
    if "MASTER_ADDR" not in env:
        nodes = env.get("SLURM_STEP_NODELIST") or env["SLURM_JOB_NODELIST"]
        names = subprocess.run(["scontrol", "show", "hostnames", nodes], check=True, capture_output=True, text=True)
        env["MASTER_ADDR"] = names.stdout.split()[0]
    env.setdefault("MASTER_PORT", str(20000 + int(env.get("SLURM_JOB_ID", "0")) % 10000))
    env |= {"WORLD_SIZE": env["SLURM_NTASKS"], "RANK": env["SLURM_PROCID"], "LOCAL_RANK": env["SLURM_LOCALID"]}


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


@contextmanager
def one_line_errors() -> Iterator[None]:
    """What a user can mend ends the process with `error: …`: code 2 for settings and data, 1 for a failed run."""
    try:
        yield
    except (ValueError, FloatingPointError, OSError) as error:
        if not any(getattr(each, "told", False) for each in (error, error.__cause__)):  # by another rank
            print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(2 if isinstance(error, ValueError) else 1)
    finally:
        dist = sys.modules.get("torch.distributed")  # not imported where the flags were wrong
        if dist is not None and dist.is_initialized():
            dist.destroy_process_group()
