"""Ranks from the variables of torchrun and SLURM: taken over whole, refused by name where a part is missing."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest
import torch

from megatron_glm import launch
from megatron_glm.launch import Place, place, ranks_from_slurm, world_size

SRUN = {"SLURM_STEP_ID": "2", "SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}
MASTER = {"MASTER_ADDR": "node0", "MASTER_PORT": "4000"}


@pytest.fixture
def start(monkeypatch):
    """start(environment): what a process with these variables, and none else of a launcher, finds its place to be."""
    for name in [*os.environ]:
        if name.startswith(("SLURM_", "MASTER_", "TORCHELASTIC_")) or name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            monkeypatch.delenv(name)

    def start(environment: dict[str, str]) -> Place | None:
        monkeypatch.setattr(os, "environ", os.environ | environment)
        ranks_from_slurm()
        return place()

    return start


def scontrol(folder: Path, monkeypatch, body: str) -> None:
    (folder / "scontrol").write_text(f"#!/bin/sh\n{body}\n")
    (folder / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_a_process_on_its_own_has_no_place(start):
    assert start({}) is None
    assert start({"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0"}) is None
    assert world_size() == 1


def test_torchrun_and_srun_give_the_place(start):
    torchrun = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "a"}
    assert start(SRUN | torchrun | MASTER) == Place(5, 8, 1, "node0", 4000, "torchrun's --rdzv-id a")


def test_srun_gives_the_place(start):
    assert start(SRUN | MASTER) == Place(3, 8, 1, "node0", 4000, "SLURM step 7.2")


def test_steps_of_one_job_meet_on_ports_of_their_own(start, monkeypatch):
    ports = set()
    for step in range(50):
        monkeypatch.delenv("MASTER_PORT", raising=False)
        with monkeypatch.context() as patch:
            patch.setattr(os, "environ", dict(os.environ))
            ports.add(start(SRUN | {"SLURM_STEP_ID": str(step), "MASTER_ADDR": "node0"}).port)
    assert len(ports) == 50 and min(ports) >= 20000 and max(ports) < 30000


def test_scontrol_names_the_first_node(start, tmp_path, monkeypatch):
    scontrol(tmp_path, monkeypatch, '[ "$*" = "show hostnames node[4-6]" ] && echo node4 && echo node5')
    assert start(SRUN | {"SLURM_STEP_NODELIST": "node[4-6]"}).address == "node4"


NOT_BY_SRUN = ["SLURM_NTASKS is 8, but srun did not start this process", "start it with srun or torchrun"]


@pytest.mark.parametrize(
    "environment, words",
    [
        ({"SLURM_NTASKS": "8"}, NOT_BY_SRUN),  # the shell of salloc
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, NOT_BY_SRUN),  # the shell of sbatch
        (SRUN | {"SLURM_STEP_ID": "4294967291", "SLURM_PROCID": "0"}, NOT_BY_SRUN),  # the same, newer SLURM
        (SRUN | {"WORLD_SIZE": "4"}, ["WORLD_SIZE is 4", "srun started 8 tasks"]),
        ({**SRUN, "SLURM_LOCALID": ""}, ["SLURM_LOCALID is ''", "whole number"]),
        ({**SRUN, "SLURM_NTASKS": "8(x2)"}, ["SLURM_NTASKS is '8(x2)'"]),
        ({**SRUN, "SLURM_PROCID": "-1"}, ["SLURM_PROCID is '-1'"]),
        ({**SRUN, "SLURM_PROCID": "8", **MASTER}, ["RANK is 8, WORLD_SIZE is 8"]),
        ({**SRUN, "SLURM_JOB_ID": "7_1", "MASTER_ADDR": "node0"}, ["SLURM_JOB_ID is '7_1'"]),
        (SRUN, ["neither SLURM_STEP_NODELIST nor SLURM_JOB_NODELIST", "set MASTER_ADDR"]),
        (SRUN | {"SLURM_STEP_NODELIST": "node[0-1]", "PATH": "/none"}, ["scontrol", "node[0-1]", "set MASTER_ADDR"]),
        ({"RANK": "1"}, ["RANK is 1, WORLD_SIZE is not set"]),
        ({"WORLD_SIZE": "2"}, ["WORLD_SIZE is 2, RANK is not set"]),
        ({"RANK": "1", "WORLD_SIZE": "2"}, ["MASTER_PORT is not set"]),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "4000"}, ["MASTER_ADDR is not set"]),
        ({"RANK": "2", "WORLD_SIZE": "2", **MASTER}, ["RANK is 2, WORLD_SIZE is 2"]),
        ({"RANK": "one", "WORLD_SIZE": "2", **MASTER}, ["RANK is 'one'"]),
        ({"RANK": "1", "WORLD_SIZE": "0", **MASTER}, ["WORLD_SIZE is '0'", "from 1 on"]),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node0", "MASTER_PORT": "70000"}, ["MASTER_PORT is 70000"]),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "x", **MASTER}, ["LOCAL_RANK is 'x'"]),
    ],
)
def test_what_is_missing_or_wrong_is_named_with_the_remedy(start, environment, words):
    with pytest.raises(ValueError) as error:
        start(environment)
    assert all(word in str(error.value) for word in words), error.value
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("missing", ["SLURM_LOCALID", "SLURM_NTASKS"])
def test_a_missing_slurm_variable_is_named(start, missing):
    """Without the number of tasks each would be a run of its own, all with one --save."""
    without = {name: value for name, value in SRUN.items() if name != missing}
    with pytest.raises(ValueError, match=f"{missing} is not set: start with srun"):
        start(without | MASTER)


def test_a_failing_scontrol_is_named(start, tmp_path, monkeypatch):
    scontrol(tmp_path, monkeypatch, "echo no such node >&2; exit 1")
    with pytest.raises(ValueError, match=r"ended with 1 \(no such node\): set MASTER_ADDR"):
        start(SRUN | {"SLURM_STEP_NODELIST": "node[0-1]"})


def test_flags_are_refused_where_srun_is_missing(start, capsys):
    from megatron_glm.config.flags import parse

    with pytest.raises(ValueError):
        start({"SLURM_NTASKS": "8"})
    with pytest.raises(SystemExit) as stop:
        parse(["--hf-config", "glm5.2-tiny", "--data-path", "rows.jsonl", "--train-iters", "1"])
    assert stop.value.code == 2 and "start it with srun or torchrun" in capsys.readouterr().err
    assert launch.FIRST_SPECIAL_STEP < 2**32 - 6  # SLURM_INTERACTIVE_STEP, the lowest that shells have


def test_a_process_without_a_local_rank_does_not_take_the_first_gpu(start, monkeypatch):
    start({"RANK": "1", "WORLD_SIZE": "2", **MASTER})
    assert launch.local_rank(1) == 0
    with pytest.raises(ValueError, match="LOCAL_RANK is not set, and this process sees 8 GPUs"):
        launch.local_rank(8)
    monkeypatch.setitem(os.environ, "LOCAL_RANK", "3")
    assert (launch.local_rank(8), launch.local_rank(1)) == (3, 0)


def test_a_lost_rank_is_one_line_and_a_bug_keeps_its_traceback(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "3")
    lost = RuntimeError("[/src/gloo/transport/tcp/pair.cc:553] Connection closed by peer")
    for error in (lost, torch.distributed.DistNetworkError("the server has gone")):
        with pytest.raises(SystemExit) as stop, launch.one_line_errors():
            raise error
        assert stop.value.code == 1
        assert capsys.readouterr().err.startswith("error: rank 3 has lost another rank, whose own output says why: ")
    with pytest.raises(RuntimeError, match="shapes"), launch.one_line_errors():
        raise RuntimeError("shapes differ")


def test_warnings_of_this_package_are_one_line_of_the_first_rank(monkeypatch):
    monkeypatch.setattr(warnings, "formatwarning", plain := warnings.formatwarning)
    launch.one_line_warnings.cache_clear()
    launch.one_line_warnings()
    here = str(Path(launch.__file__).parent / "checkpoint/hf.py")
    assert warnings.formatwarning("no MTP layer", UserWarning, here, 94, "x = 1") == "warning: no MTP layer\n"
    others = "slow", UserWarning, "/site-packages/torch/nn.py", 7, "y = 2"
    assert warnings.formatwarning(*others) == plain(*others)
    monkeypatch.setenv("RANK", "1")
    assert warnings.formatwarning("no MTP layer", UserWarning, here, 94) == ""
