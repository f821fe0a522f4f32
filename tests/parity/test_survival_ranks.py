"""What one rank meets, all ranks act on: signals, failed saves, steps that are not finite; and ranks by srun."""

from __future__ import annotations

import os
import signal
import socket
import sys
import traceback
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_glm.checkpoint import sharded
from tests.helpers import distributed
from tests.helpers.finetune import finetune, keep_default_group, records, tensors, write_rows


def outcome(folder: Path, **flags) -> tuple[int, str]:
    """Exit code and errors of finetune_glm.py on the ranks of this process group."""
    from megatron_glm.launch import one_line_errors

    os.chdir(folder)
    os.environ["WORLD_SIZE"] = str(dist.get_world_size())
    errors = StringIO()
    try:
        with redirect_stderr(errors), keep_default_group(), one_line_errors():
            finetune(**flags)
    except SystemExit as stop:
        return stop.code, errors.getvalue()
    return 0, errors.getvalue()


def in_second_step(action) -> None:
    """On rank 1 only: runs action(chunks) when the gradients of the second step are complete."""
    from megatron_glm.training import step

    reduce, done = step.reduce_partial_gradients, []

    def acting(chunks, ends):
        reduce(chunks, ends)
        done.append(1)
        if len(done) == 2 and dist.get_rank() == 1:
            action(chunks)

    step.reduce_partial_gradients = acting


def signalled(folder: Path) -> tuple[int, str]:
    in_second_step(lambda chunks: os.kill(os.getpid(), signal.SIGTERM))
    return outcome(folder, train_iters=9, save="out", async_save=True, save_interval=1)


def not_finite(folder: Path) -> tuple[int, str]:
    from megatron_glm.parallel.fsdp import local

    def poison(chunks):
        local(dict(chunks[0].named_parameters())["layers.2.mlp.experts.down"].grad).fill_(float("nan"))

    in_second_step(poison)
    return outcome(folder, train_iters=4, save="out", save_interval=1)


def disk_full(folder: Path) -> tuple[int, str]:
    """Rank 1 cannot write the second of three checkpoints; the run goes on and writes the third."""
    write, done = sharded.write_file, []

    def write_or_fail(*args):
        done.append(1)
        if dist.get_rank() == 1 and len(done) == 2:
            raise OSError("no space left on device")
        return write(*args)

    sharded.write_file = write_or_fail
    flags = {"async_save": True, "save_interval": 1, "save_failure": "continue"}
    return outcome(folder, train_iters=3, save="out", **flags)


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("out/iter_*"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_rows(tmp_path)
    return tmp_path


def test_a_signal_to_one_rank_is_obeyed_by_all(folder):
    assert distributed.run(2, signalled, folder, timeout=280) == [(75, "")] * 2
    assert sharded.latest(folder / "out") == 2 and saved(folder) == ["iter_0000001", "iter_0000002"]


def test_the_rank_whose_gradient_is_not_finite_is_named(folder):
    codes, errors = zip(*distributed.run(2, not_finite, folder, timeout=280), strict=True)
    assert codes == (1, 1) and errors[0] == errors[1]
    assert "the first gradient that is not finite is layers.2.mlp.experts.down of rank 1\n" in errors[0]
    assert saved(folder) == ["iter_0000001"]


def test_a_disk_that_is_full_for_one_rank_fails_the_save_of_all(folder):
    assert distributed.run(2, disk_full, folder, timeout=280) == [(0, "")] * 2
    assert sharded.latest(folder / "out") == 3 and saved(folder) == ["iter_0000001", "iter_0000003"]


def under_srun(rank: int, folder: Path, port: int) -> None:
    """A process as srun starts it."""
    os.chdir(folder)
    os.environ |= {"SLURM_NTASKS": "2", "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "MASTER_PORT": str(port)}
    os.environ |= {"SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "node[1-2]", "PATH": f"{folder}:{os.environ['PATH']}"}
    try:
        finetune(train_iters=2, save="srun", log_file="srun.jsonl")
    except BaseException:
        Path(f"error{rank}").write_text(traceback.format_exc())
        sys.exit(1)


def test_srun_starts_the_ranks_and_scontrol_names_the_first_node(folder, monkeypatch):
    scontrol = folder / "scontrol"
    scontrol.write_text('#!/bin/sh\n[ "$*" = "show hostnames node[1-2]" ] && echo localhost && echo elsewhere\n')
    scontrol.chmod(0o755)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    ranks = [distributed._server().Process(target=under_srun, args=(rank, folder, port)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(280)
        process.kill()
    assert [process.exitcode for process in ranks] == [0, 0], [p.read_text() for p in folder.glob("error*")]
    monkeypatch.chdir(folder)
    finetune(train_iters=2, save="one", log_file="one.jsonl")
    for record, expected in zip(records("srun.jsonl"), records("one.jsonl"), strict=True):
        assert record["lm_loss"] == pytest.approx(expected["lm_loss"], rel=1e-5)
    assert tensors("srun", 2).keys() == tensors("one", 2).keys()
