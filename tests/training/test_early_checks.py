"""What can be known before the model is built and its weights are loaded is said before: loading 750 B takes long."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megatron_glm.launch import one_line_errors
from tests.helpers.finetune import finetune, write_rows
from tests.helpers.pretrain import pretrain


def no_model(*arguments: object) -> None:
    raise AssertionError("the model is built")


@pytest.fixture
def folder(tmp_path, monkeypatch, capsys) -> Path:
    """Data, a checkpoint of iteration 2 and a file that is no folder, here; from now on no model can be built."""
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path)
    finetune(train_iters=2, save="tuned")
    Path("file").write_text("a text\n")
    monkeypatch.setattr("megatron_glm.training.run.build_chunks", no_model)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    capsys.readouterr()
    return tmp_path


@pytest.mark.parametrize(
    "code, flags, words",
    [
        (1, {"log_file": "file/log.jsonl"}, "--log-file file cannot be written"),
        (1, {"log_file": "tuned"}, "--log-file tuned cannot be written"),
        (2, {"log_file": "file"}, "--log-file file exists, but its line 1 is no record of an iteration"),
        (1, {"tensorboard_dir": "file/board"}, "--tensorboard-dir file/board cannot be written"),
        (1, {"profile": True, "profile_step_start": 1, "profile_dir": "file"}, "--profile-dir file cannot be written"),
        (2, {"profile": True}, "--profile-step-start (10) is not below --train-iters (9)"),
        (1, {"save": "file/run"}, "--save file/run cannot be written"),
        (2, {"save": "tuned"}, "--save tuned already holds iteration 2"),
        (2, {"load": "tuned", "seq_length": 32}, "tuned was trained with --seq-length 24, this run has 32"),
        (2, {"load": "tuned", "data_path": "valid.jsonl"}, "tuned was trained on other data"),
        (2, {"load": "tuned", "preset": None, "num_layers": 2}, "--num-layers 2 with a 3-layer checkpoint"),
        (
            2,
            {"load": "tuned", "preset": None, "mtp_num_layers": 2},
            "--mtp-num-layers 2 with a checkpoint of 1 MTP lay",
        ),
        (2, {"moe_token_dispatcher_type": "deepep"}, "--moe-token-dispatcher-type"),
        (2, {"moe_token_dispatcher_type": "hybrid"}, "hybrid with --expert-node-size None: hybrid needs it"),
        (2, {"valid_data_path": "gone.jsonl"}, "gone.jsonl holds or matches no file"),
    ],
)
def test_refused_before_the_model_is_built(folder, capsys, code, flags, words):
    with pytest.raises(SystemExit) as stop, one_line_errors():
        finetune(train_iters=9, **flags)
    error = capsys.readouterr().err
    assert stop.value.code == code and error.startswith("error: ") and words in error


def test_weights_and_biases_without_a_login_is_refused(folder, capsys, monkeypatch):
    class Package:
        Error = RuntimeError

        @staticmethod
        def login():
            raise RuntimeError("No API key configured.")

    monkeypatch.setitem(sys.modules, "wandb", Package)
    monkeypatch.setattr("megatron_glm.training.initialize.require_packages", lambda logging: None)
    with pytest.raises(SystemExit) as stop, one_line_errors():
        finetune(train_iters=9, wandb_project="glm")
    assert stop.value.code == 2 and "error: --wandb-project glm: No API key configured" in capsys.readouterr().err


def test_a_finished_run_ends_at_once(folder, capsys, monkeypatch):
    finetune(preset=None, load="tuned", save="tuned", train_iters=2)
    finetune(preset=None, load="tuned", train_samples=4)
    assert capsys.readouterr().out.count("nothing to train: iteration 2 of ") == 2
    with pytest.raises(AssertionError, match="the model is built"):
        finetune(preset=None, load="tuned", finetune=True, train_iters=2)


def test_a_finished_pretraining_run_loads_its_weights_for_the_test_data_alone(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pretrain(train_iters=1, save="out")
    first = [line for line in capsys.readouterr().out.splitlines() if line.startswith("test | ")]
    pretrain(preset=None, load="out", train_iters=1)
    out = capsys.readouterr().out
    assert "nothing to train: iteration 1 of 1 is reached" in out and "(weights only)" in out
    assert first and [line for line in out.splitlines() if line.startswith("test | ")] == first
