"""The ways in which a run ends early or goes on in spite of something, and the checkpoint that it leaves."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from megatron_glm import heartbeat, signals
from megatron_glm.checkpoint import sharded
from megatron_glm.config.model import ModelConfig
from megatron_glm.parallel.shard import Rectangle
from megatron_glm.training import checkpointing, loop
from megatron_glm.training.engine import Engine
from megatron_glm.training.host_copy import HostCopy
from tests.helpers.finetune import assert_same, exit_code, finetune, records, saved, tensors, write_rows


@pytest.fixture
def run(tmp_path, monkeypatch):
    """finetune_glm.py in a folder with its data, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path)
    return finetune


@pytest.fixture
def before_step(monkeypatch):
    """before_step(n, action): runs action() at the start of the run's n-th step."""

    def install(number: int, action) -> None:
        requests, done = loop.requests, []

        def first_act(*args):
            done.append(1)
            if len(done) == number:
                action()
            return requests(*args)

        monkeypatch.setattr(loop, "requests", first_act)

    return install


@pytest.mark.parametrize("number, background", [(signal.SIGTERM, True), (signal.SIGUSR1, False)])
def test_a_signal_saves_at_the_next_boundary_and_exits_75(run, monkeypatch, number, background):
    """And the run that follows ends as the one that nobody interrupted."""
    forward, steps = Engine.forward_backward, []

    def interrupted(*args, **kwargs):
        steps.append(1)
        if len(steps) == 2:
            os.kill(os.getpid(), number)  # in the middle of a step
        return forward(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "forward_backward", interrupted)
        handlers = signal.getsignal(number)
        code = exit_code(run, train_iters=4, save="out", log_file="out.jsonl", async_save=background)
        assert code == signals.REQUEUE == 75 and signal.getsignal(number) == handlers
    assert sharded.latest(Path("out")) == 2 and saved("out") == [2]
    run(preset=None, load="out", save="out", train_iters=4, log_file="out.jsonl")
    run(train_iters=4, save="whole", log_file="whole.jsonl")
    assert_same(tensors("out", 4), tensors("whole", 4))
    assert records("out.jsonl") == records("whole.jsonl")


def test_an_interrupt_saves_and_exits_130(run, before_step, capfd):
    before_step(3, lambda: os.kill(os.getpid(), signal.SIGINT))
    assert exit_code(run, train_iters=4, save="out") == signals.INTERRUPTED == 130
    assert saved("out") == [2] and signal.getsignal(signal.SIGINT) == signal.default_int_handler
    lines = capfd.readouterr()
    assert lines.err == "interrupted: saving after this step; again stops at once\n"
    assert lines.out.endswith("leaving after iteration 2\nsaved iteration 2 to out\n")


def test_without_save_an_interrupt_leaves_in_the_middle_of_a_step(run, monkeypatch, capfd):
    monkeypatch.setattr(Engine, "forward_backward", lambda *_, **__: os.kill(os.getpid(), signal.SIGINT))
    assert exit_code(run, train_iters=4) == signals.INTERRUPTED
    assert capfd.readouterr().err == "interrupted\n"


@pytest.mark.parametrize("iterations, left_with", [(2, [1]), (1, [1])])
def test_a_signal_during_validation_ends_it_after_the_batch(run, monkeypatch, iterations, left_with):
    """Whether more steps were to follow or not; what was routed until then moves no bias."""
    forward, batches = Engine.evaluate, []

    def interrupted(engine, step):
        batches.append(1)
        os.kill(os.getpid(), signal.SIGTERM)
        return forward(engine, step)

    monkeypatch.setattr(Engine, "evaluate", interrupted)
    flags = {"train_iters": iterations, "valid_data_path": "valid.jsonl", "eval_interval": 1, "save": "out"}
    assert exit_code(run, **flags, log_file="log.jsonl") == signals.REQUEUE
    assert len(batches) == 1 and saved("out") == left_with
    assert [record.get("valid_lm_loss") for record in records("log.jsonl")] == [None]
    run(train_iters=1, save="plain")
    assert_same(tensors("out", 1), tensors("plain", 1))


@pytest.mark.parametrize("written", [True, False])
def test_a_signal_during_a_save_in_the_background_writes_no_second_one(run, before_step, monkeypatch, written):
    """But if the first one fails, the state of now is saved."""
    write, began, go_on = sharded.save, [], threading.Event()

    def slow(folder, iteration, *args):
        began.append(iteration)
        if len(began) == 1:
            go_on.wait(60)
            if not written:
                raise OSError("full")
        write(folder, iteration, *args)

    def signal_comes():
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Timer(0.2, go_on.set).start()

    monkeypatch.setattr(sharded, "save", slow)
    before_step(3, signal_comes)
    flags = {"save_interval": 1, "async_save": True, "save_failure": "continue", "exit_interval": 9}
    monkeypatch.setattr(loop, "divides", lambda interval, iteration: interval == 1 and iteration == 1)
    assert exit_code(run, train_iters=9, save="out", **flags) == signals.REQUEUE
    assert began == ([1] if written else [1, 2]) and sharded.latest(Path("out")) == began[-1]


def test_a_file_asks_for_a_save_without_leaving(run, before_step):
    Path("out").mkdir()
    before_step(3, lambda: Path("out/save-now").touch())
    run(train_iters=4, save="out", log_file="log.jsonl")
    assert saved("out") == [2, 4] and not Path("out/save-now").exists()
    assert [record["iteration"] for record in records("log.jsonl")] == [1, 2, 3, 4]


def test_a_save_that_was_asked_for_before_the_first_step_comes_after_it(run):
    Path("out").mkdir()
    Path("out/save-now").touch()
    run(train_iters=3, save="out")
    assert saved("out") == [1, 3] and not Path("out/save-now").exists()


def test_a_folder_of_that_name_ends_no_run(run):
    Path("out/save-now").mkdir(parents=True)
    run(train_iters=2, save="out")
    assert saved("out") == [2]


def test_garbage_is_collected_between_steps_only(run, monkeypatch):
    collected = []
    monkeypatch.setattr(loop.gc, "collect", lambda: collected.append(loop.gc.isenabled()))
    run(train_iters=5, manual_gc=True, manual_gc_interval=2)
    assert collected == [False] * 3 and loop.gc.isenabled()
    run(train_iters=2)
    assert len(collected) == 3


def test_train_samples_are_never_exceeded(run):
    """11 packs are 5 steps of 2; a resumed run of other steps takes what is left of them."""
    run(train_samples=5, save="out")
    assert saved("out") == [2]
    run(preset=None, load="out", train_samples=11, save="out", global_batch_size=3, log_file="log.jsonl")
    assert [record["consumed_samples"] for record in records("log.jsonl")] == [7, 10]
    assert saved("out") == [2, 4]


def test_a_signal_before_anything_new_saves_nothing(run, before_step):
    run(train_iters=1, save="out")
    before_step(1, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert exit_code(run, preset=None, load="out", save="out", train_iters=2) == signals.REQUEUE
    assert saved("out") == [1]


def test_exit_interval_and_duration_save_and_leave(run, monkeypatch):
    run(train_iters=9, save="out", exit_interval=2)
    assert saved("out") == [2]
    run(preset=None, load="out", save="out", train_iters=9, exit_interval=3)
    assert saved("out") == [2, 3]
    monkeypatch.setattr(loop, "START", loop.START - 61)
    run(train_iters=9, save="late", exit_duration_in_mins=1)
    assert saved("late") == []  # not a step done
    run(train_iters=2, save="early", exit_duration_in_mins=1000)
    assert saved("early") == [2]


def test_keep_last_keeps_the_newest(run):
    run(train_iters=6, save="out", save_interval=1, keep_last=2, async_save=True)
    assert saved("out") == [5, 6] and sharded.latest(Path("out")) == 6


def test_old_checkpoints_that_cannot_be_removed_are_no_failed_save(run, monkeypatch, capsys):
    def refuse(folder, keep, retain):
        raise OSError("read-only")

    monkeypatch.setattr(sharded, "remove_old", refuse)
    run(train_iters=2, save="out", save_interval=1, keep_last=1)
    assert saved("out") == [1, 2] and sharded.latest(Path("out")) == 2
    text = capsys.readouterr().out
    assert "warning: checkpoints older than the last 1 are not removed: read-only\n" in text
    assert "is not saved" not in text


def test_files_of_the_model_outlive_the_checkpoint_that_they_came_from(run):
    """--keep-last removes the folder from which this run was loaded."""
    Path("files").mkdir()
    run(train_iters=1, save="out")
    shape = json.loads(Path("out/iter_0000001/config.json").read_text())
    Path("files/config.json").write_text(json.dumps(shape))
    run(preset="files", train_iters=1, save="tuned")
    run(preset=None, load="tuned", train_iters=4, save="tuned", save_interval=1, keep_last=1)
    assert saved("tuned") == [4] and Path("tuned/iter_0000004/hf/config.json").is_file()


def test_what_killed_saves_left_does_not_stop_a_restart(run):
    """A half-written folder goes; a whole one that the pointer never reached is overwritten."""
    run(train_iters=3, save="out", save_interval=1)
    whole = tensors("out", 3)
    Path("out/iter_0000004.tmp").mkdir()
    Path("out/iter_0000004.tmp/rank00000_00000.distcp").write_text("half")
    Path("out/latest_checkpointed_iteration.txt").write_text("2")
    Path("out/iter_0000003/.pending").touch()
    run(preset=None, load="out", save="out", train_iters=3, log_file="log.jsonl")
    assert [record["iteration"] for record in records("log.jsonl")] == [3]
    assert saved("out") == [1, 2, 3] and sharded.latest(Path("out")) == 3
    assert_same(tensors("out", 3), whole)


@pytest.mark.parametrize("background", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("policy", ["stop", "continue"])
def test_a_full_disk_keeps_the_old_checkpoint(run, before_step, capsys, policy, background):
    """The kernel refuses to write files above a limit that is set before the second save.

    A run that goes on has failed, too, if its last checkpoint is not written.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill() -> None:
        while sharded.latest(Path("out")) != 1:
            time.sleep(0.01)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10000, hard))

    before_step(2, fill)
    flags = {"train_iters": 4, "save": "out", "save_interval": 1, "save_failure": policy, "async_save": background}
    try:
        assert exit_code(run, **flags) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert saved("out") == [1] and sharded.latest(Path("out")) == 1 and not list(Path("out").rglob("*.tmp"))
    output = capsys.readouterr()
    assert "iteration 2 is not saved: " in (output.err if policy == "stop" else output.out)
    assert output.err.startswith("error: ") and output.err.count("\n") == 1
    assert (" iteration        4/       4 |" in output.out) == (policy == "continue")
    run(preset=None, load="out", save="out", train_iters=2)
    assert saved("out") == [1, 2]


def test_an_unwritable_folder_is_an_error_before_the_first_step(run, capsys):
    Path("file").write_text("")
    assert exit_code(run, train_iters=1, save="file/out") == 1
    assert "file/out" in capsys.readouterr().err


def test_no_load_optim_goes_on_with_fresh_moments(run):
    run(train_iters=2, save="out")
    run(preset=None, load="out", no_load_optim=True, train_iters=3, save="out", log_file="log.jsonl")
    assert [record["iteration"] for record in records("log.jsonl")] == [3]
    state = sharded.state_of(sharded.iteration_folder(Path("out"), 3))
    assert (state["consumed_samples"], state["optimizer_steps"]) == (6, 1)
    # after one step from zero, exp_avg = (1 - beta1) g and exp_avg_sq = (1 - beta2) g²
    after = tensors("out", 3)
    first, second = (after[f"optimizer.{moment}.lm_head.weight"] for moment in checkpointing.MOMENTS)
    torch.testing.assert_close((first / 0.1).square() * 0.001, second)


def test_a_rank_that_has_its_data_is_ahead_of_one_that_waits(run, monkeypatch):
    """The watchdog calls those behind that have fewest beats in the step; one that waits has that of its begin."""
    requests, beats = loop.requests, []

    def noted(*args):
        beats.append(heartbeat.beats - heartbeat.before_step)
        return requests(*args)

    monkeypatch.setattr(loop, "requests", noted)
    run(train_iters=2)
    assert beats == [2, 2]


def test_a_state_that_no_run_has_written_is_named(tmp_path):
    state = {"consumed_samples": 4, "run_id": "0", "optimizer_steps": 2}
    (tmp_path / "iter_0000002").mkdir()
    for damaged in (state | {"consumed_samples": "4"}, {"run_id": "0", "optimizer_steps": 2}):
        (tmp_path / "iter_0000002" / "state.json").write_text(json.dumps(damaged))
        with pytest.raises(ValueError, match="iter_0000002/state.json is damaged: its consumed_samples is "):
            checkpointing.run_state(tmp_path, 2)
    (tmp_path / "iter_0000002" / "state.json").write_text(json.dumps(state | {"iteration": 3}))
    with pytest.raises(ValueError, match="iter_0000002 was renamed: it holds iteration 3"):
        checkpointing.run_state(tmp_path, 2)


def test_weights_stay_fp32_in_a_bf16_run(run):
    """The gate, its correction bias and the masters of everything else."""
    run(train_iters=1, bf16=True, save="out")
    stored = tensors("out", 1)
    assert any("mlp.gate.weight" in name for name in stored) and any("correction_bias" in name for name in stored)
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}


@pytest.mark.parametrize("mtp_layers", [0, 1])
def test_the_mtp_layer_is_kept_and_may_be_absent(run, mtp_layers):
    """It is not trained: after a save, a load and another save it has the bits of the start."""
    extra = {"mtp-num-layers": str(mtp_layers)}
    run(train_iters=1, save="out", **extra)
    run(preset=None, load="out", train_iters=2, save="out")
    first, second = tensors("out", 1), tensors("out", 2)
    mtp = [name for name in first if name.startswith("layers.3.")]
    assert bool(mtp) == bool(mtp_layers) and first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in mtp)


def test_host_memory_is_flat_over_twenty_background_saves(tmp_path, monkeypatch):
    """One buffer, whatever the number of saves; and what is written is the state at the time of the copy."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    weight, size = torch.zeros(1 << 20), 4 << 20
    rectangles = [Rectangle("weight", (1 << 20,), (0,), weight, True), Rectangle("copy", (9,), (0,), weight[:9], False)]
    copy = HostCopy(rectangles, None)
    config, used = ModelConfig.from_hf("glm5.2-tiny"), []
    with ThreadPoolExecutor(max_workers=1) as thread:
        for iteration in range(1, 21):
            weight.fill_(iteration)
            taken = copy.take(rectangles)
            save = thread.submit(sharded.save, tmp_path, iteration, taken, {}, config, None, None)
            weight.fill_(-1)
            save.result()
            sharded.remove_old(tmp_path, 1)
            used.append(int(re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) << 10)
            assert (tensors(tmp_path, iteration)["weight"] == iteration).all()
    assert used[-1] - used[4] < 4 * size  # a copy left by each save would be 15 of them
