"""What a loss or a gradient that is not finite does to a run, and to its checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_glm.checkpoint import sharded
from megatron_glm.parallel.fsdp import local
from megatron_glm.training import loop
from megatron_glm.training import step as step_module
from tests.helpers.finetune import assert_same, exit_code, finetune, records, saved, tensors, write_rows


@pytest.fixture
def run(tmp_path, monkeypatch):
    """finetune_glm.py in a folder with its data, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path)
    return finetune


def poison(monkeypatch, name: str, value: float) -> None:
    """Lets the gradient of `name` be `value` in the second step."""
    reduce, done = step_module.reduce_partial_gradients, [0]

    def reduce_and_poison(chunks, ends):
        reduce(chunks, ends)
        done[0] += 1
        if done[0] == 2:
            local(dict(chunks[0].named_parameters())[name].grad).view(-1)[1] = value

    monkeypatch.setattr(step_module, "reduce_partial_gradients", reduce_and_poison)


def test_a_gradient_that_is_not_finite_stops_by_name(run, monkeypatch, capsys):
    name = "layers.1.self_attn.o_proj.weight"
    poison(monkeypatch, name, float("inf"))
    assert exit_code(run, train_iters=4, save="out", save_interval=1) == 1
    message = capsys.readouterr().err
    assert "iteration 2: " in message and f"the first gradient that is not finite is {name} of rank 0" in message
    assert "loss that is not finite" not in message and "weight that is not finite" not in message
    assert saved("out") == [1]


def test_a_skipped_step_leaves_no_trace(run, monkeypatch):
    """The data moves on; weights, moments, their step count and the router's bias are as if it had not been."""
    flags = {"train_iters": 3, "save_interval": 1, "on_nan": "skip", "lr_decay_style": "constant"}
    poison(monkeypatch, "lm_head.weight", float("nan"))
    run(**flags, save="out", log_file="out.jsonl")
    log = records("out.jsonl")
    assert [record["iteration"] for record in log] == [1, 2, 3]
    assert log[1]["lm_loss"] is None and "lm_head.weight of rank 0" in log[1]["skipped"]
    assert_same(tensors("out", 1), tensors("out", 2))
    states = [sharded.state_of(sharded.iteration_folder(Path("out"), iteration)) for iteration in (1, 2, 3)]
    assert [state["consumed_samples"] for state in states] == [2, 4, 6]
    assert [state["optimizer_steps"] for state in states] == [1, 1, 2]
    run(preset=None, load="out", ckpt_step=2, **flags, save="resumed")
    assert_same(tensors("out", 3), tensors("resumed", 3))


def test_many_skipped_steps_in_a_row_end_the_run(run, monkeypatch, capsys):
    """The count begins anew after a good step."""
    reduce, steps = step_module.reduce_partial_gradients, []

    def poisoned(chunks, ends):
        reduce(chunks, ends)
        steps.append(1)
        if len(steps) != 3:
            local(dict(chunks[0].named_parameters())["lm_head.weight"].grad).view(-1)[1] = float("nan")

    monkeypatch.setattr(step_module, "reduce_partial_gradients", poisoned)
    assert exit_code(run, train_iters=20, on_nan="skip", on_nan_limit=3, log_file="log.jsonl") == 1
    message = capsys.readouterr().err
    assert message.startswith("error: iteration 6 is the last of 3 that were skipped in a row (--on-nan-limit): ")
    assert "lm_head.weight of rank 0" in message and message.count("\n") == 1
    assert ["skipped" in record for record in records("log.jsonl")] == [True, True, False, True, True, True]


def test_what_is_not_finite_never_enters_a_checkpoint(run, monkeypatch, capsys):
    """Here by a fault of the machine after a good step."""
    train_step, done = loop.train_step, []

    def faulty(engine, *args):
        result = train_step(engine, *args)
        done.append(1)
        if len(done) == 2:
            local(engine.chunks[0].norm.weight).detach()[3] = float("nan")
        return result

    monkeypatch.setattr(loop, "train_step", faulty)
    assert exit_code(run, train_iters=4, save="out", save_interval=1) == 1
    assert "iteration 2 is not saved: norm.weight is not finite" in capsys.readouterr().err
    assert saved("out") == [1]
