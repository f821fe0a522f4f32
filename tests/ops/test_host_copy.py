"""The host memory of --async-save: there before the first step, planned, and part of --save-failure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_glm.config import CheckpointConfig, DataConfig, ModelConfig, RunConfig, TrainConfig, iterations
from megatron_glm.planner import report as plan_report
from megatron_glm.planner.machine import H100
from megatron_glm.planner.plan import GIB, Plan
from megatron_glm.training import checkpointing, host_copy
from megatron_glm.training.initialize import build_chunks
from megatron_glm.training.optimizer import build_optimizer
from tests.helpers.finetune import finetune, write_rows
from tests.helpers.reference import single_groups

FLAGS = {"train_iters": 3, "save": "out", "save_interval": 1, "async_save": True}


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path)
    return finetune


def no_step(*_):
    raise AssertionError("a step was done")


def test_a_node_without_room_is_named_before_the_first_step(run, monkeypatch):
    monkeypatch.setattr(checkpointing.HostCopy, "take", no_step)
    monkeypatch.setattr(host_copy, "available", lambda: 1000)
    with pytest.raises(
        OSError, match=r"--async-save needs 0\.\d\d GiB of host memory on \S+ for its 1 ranks, 0\.00 GiB"
    ):
        run(**FLAGS)
    assert iterations.saved(Path("out")) == []
    run(**FLAGS | {"async_save": False})  # needs none


def test_the_ranks_of_a_node_share_its_memory():
    ranks = [("a", 6 * GIB, 20 * GIB)] * 3 + [("b", 6 * GIB, 20 * GIB)] * 4
    host_copy._require_room(ranks[:6])
    with pytest.raises(OSError, match=r"needs 24\.00 GiB of host memory on b for its 4 ranks, 20\.00 GiB are free"):
        host_copy._require_room(ranks)


def test_memory_that_cannot_be_had_is_one_line_with_sizes(run, monkeypatch):
    def refuse(*args, **kwargs):
        raise RuntimeError("DefaultCPUAllocator: not enough memory")

    monkeypatch.setattr(checkpointing.HostCopy, "take", no_step)
    monkeypatch.setattr(host_copy.torch, "empty", refuse)
    with pytest.raises(OSError, match=r"--async-save cannot have 0\.\d\d GiB of host memory, \d+\.\d\d GiB are free"):
        host_copy.HostCopy([], None)


@pytest.mark.parametrize("policy", ["stop", "continue"])
def test_a_copy_that_fails_is_a_save_that_fails(run, monkeypatch, capsys, policy):
    take, done = host_copy.HostCopy.take, []

    def failing(self, rectangles):
        done.append(1)
        if len(done) == 2:
            raise RuntimeError("CUDA error: an illegal memory access")
        return take(self, rectangles)

    monkeypatch.setattr(host_copy.HostCopy, "take", failing)
    if policy == "stop":
        with pytest.raises(OSError, match="iteration 2 is not saved: CUDA error"):
            run(**FLAGS, save_failure=policy)
        assert iterations.saved(Path("out")) == [1]
    else:
        run(**FLAGS, save_failure=policy)
        assert iterations.saved(Path("out")) == [1, 3]
        assert "iteration 2 is not saved: CUDA error" in capsys.readouterr().out


@pytest.mark.parametrize("without", [False, True], ids=["optimizer", "weights only"])
def test_the_plan_has_the_size(without):
    config = RunConfig(
        model=ModelConfig.from_hf("glm5.2-tiny"),
        data=DataConfig(data_path=("none",), seq_length=64),
        checkpoint=CheckpointConfig(save="out", async_save=True, no_save_optim=without),
        train=TrainConfig(global_batch_size=1, train_iters=1),
    )
    chunks = build_chunks(config, single_groups())
    optimizer = build_optimizer(config.optimizer, chunks)
    rectangles = checkpointing.model_rectangles(chunks)
    rectangles += [] if without else checkpointing.optimizer_rectangles(chunks, optimizer)
    buffers = sum(tensor.nbytes for chunk in chunks for tensor in chunk.buffers())
    plan = Plan.create(config, 1, 1)
    allocated = host_copy.HostCopy(rectangles, None).nbytes
    assert allocated - buffers - 16 * len(rectangles) <= plan_report.host_copy(plan, 0) <= allocated
    [line] = [line for line in plan_report.report(plan, H100) if line.startswith("host memory")]
    assert f"{plan_report.host_copy(plan, 0) / GIB:.2f} GiB a rank" in line
    without_copy = Plan.create(replace(config, checkpoint=CheckpointConfig(save="out")), 1, 1)
    assert plan_report.host_copy(without_copy, 0) == 0


def test_what_is_free_is_bounded_by_the_machine(tmp_path, monkeypatch):
    machine = host_copy.available()
    assert 0 < machine < 1 << 50
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("4000\n")
    (tmp_path / "memory.stat").write_text("anon 1000\ninactive_file 500\n")
    monkeypatch.setattr(host_copy, "CGROUP", tmp_path)
    assert host_copy.available() == 1500
    (tmp_path / "memory.max").write_text("max\n")
    assert host_copy.available() > 1500
