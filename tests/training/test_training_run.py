"""finetune_glm.py from flags to checkpoint: resume, validation, evaluation, log file, refusals."""

import io
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

from megatron_glm.checkpoint import sharded
from megatron_glm.config import ModelConfig
from megatron_glm.launch import one_line_errors
from megatron_glm.training.logging import unit_of
from tests.helpers.finetune import assert_same, finetune, json_log, records, tensors, write_rows


@pytest.fixture
def run(tmp_path, monkeypatch):
    """finetune_glm.py in a folder with train.jsonl and valid.jsonl, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path)
    return finetune


@pytest.mark.parametrize("moments", ["fp32", "bf16"])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(run, moments):
    """Weights, moments, router bias, log and validation, across the end of an epoch (11 packs, 2 a step)."""
    common = {"train_iters": 6, "lr_warmup_iters": 2, "valid_data_path": "valid.jsonl", "eval_interval": 3}
    common |= {"adam_moments_dtype": moments, "adam_beta2": 0.95}
    run(**common, save="whole", save_interval=3, log_file="whole.jsonl")
    shutil.copytree("whole/iter_0000003", "broken/iter_0000003")
    Path("broken/latest_checkpointed_iteration.txt").write_text("3")
    kept = Path("whole.jsonl").read_text().splitlines(keepends=True)[:4]  # the configuration, three iterations
    Path("broken.jsonl").write_text("".join(kept))
    run(preset=None, **common, load="broken", save="broken", log_file="broken.jsonl")

    assert_same(tensors("whole", 6), tensors("broken", 6))
    kinds = {str(t.dtype) for name, t in tensors("whole", 6).items() if name.startswith("optimizer.")}
    assert kinds == {{"fp32": "torch.float32", "bf16": "torch.bfloat16"}[moments]}
    assert records("whole.jsonl") == records("broken.jsonl")
    assert sharded.state_of(Path("whole/iter_0000006")) == sharded.state_of(Path("broken/iter_0000006"))
    log = records("whole.jsonl")
    assert [r["iteration"] for r in log] == list(range(1, 7))
    assert [r["iteration"] for r in log if "valid_lm_loss" in r] == [3, 6]
    step = {"iteration", "consumed_samples", "global_batch_size", "learning_rate", "loss_tokens", "lm_loss"}
    statistics = {"grad_norms", "router_load", "expert_bias_min", "expert_bias_max"}
    assert set(log[0]) == step | {"grad_norm"} | statistics
    assert log[5]["lm_loss"] < log[0]["lm_loss"]


def test_moments_may_change_their_type_and_a_line_says_so(run, capsys):
    run(train_iters=1, save="narrow", adam_moments_dtype="bf16", adam_beta2=0.95)
    run(preset=None, load="narrow", train_iters=2, save="wide")
    assert "(weights and optimizer, whose moments were bf16 and are fp32 from here on)" in capsys.readouterr().out
    moments = [t for name, t in tensors("wide", 2).items() if name.startswith("optimizer.")]
    assert {t.dtype for t in moments} == {torch.float32}


def test_validation_changes_nothing(run):
    """Even where it leaves the gathered weights in place."""
    run(train_iters=3, save="a", log_file="a.jsonl")
    validate = {"valid_data_path": "valid.jsonl", "eval_interval": 1, "eval_iters": 2}
    keep = {"reshard_after_forward": "false", "reshard_experts_after_forward": "false"}
    run(train_iters=3, save="b", log_file="b.jsonl", **validate, **keep)
    assert_same(tensors("a", 3), tensors("b", 3))
    validated = records("b.jsonl")
    assert len({r.pop("valid_lm_loss") for r in validated}) == 3
    assert validated == records("a.jsonl")


def test_the_checkpoint_holds_no_state_of_frozen_parameters(run):
    run(train_iters=1, save="out")
    names = set(tensors("out", 1))
    weights = {name for name in names if not name.startswith("optimizer.")}
    frozen = {name for name in weights if ".indexer." in name or name.startswith("layers.3.") or "correction" in name}
    assert frozen and names - weights == {
        f"optimizer.{moment}.{name}" for name in weights - frozen for moment in ("exp_avg", "exp_avg_sq")
    }


def test_eval_only_prints_one_line_and_trains_nothing(run, capsys):
    run(train_iters=2, save="out", valid_data_path="valid.jsonl", log_file="log.jsonl")
    capsys.readouterr()
    for size in (2, 8):  # the last global batch is filled with empty packs
        run(preset=None, load="out", eval_only=True, data_path="valid.jsonl", global_batch_size=size)
        tokens = sum(len(json.loads(line)["input_ids"]) - 1 for line in Path("valid.jsonl").read_text().splitlines())
        loss = records("log.jsonl")[-1]["valid_lm_loss"]
        assert f"\neval | lm loss: {loss:.6f} | tokens: {tokens}\n" in capsys.readouterr().out
    assert sorted(path.name for path in Path("out").iterdir()) == ["iter_0000002", "latest_checkpointed_iteration.txt"]


def test_the_log_line_is_megatrons(run, capsys):
    run(train_iters=2, log_interval=2, log_file="log.jsonl")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(" iteration")]
    assert len(lines) == 1
    parts = [part.split(":")[0].strip() for part in lines[0].split("|")[:-1]]
    assert parts[0] == "iteration        2/       2" and parts[1] == "consumed samples"
    assert parts.pop(4) in ("MFLOP/s/GPU", "GFLOP/s/GPU")  # what a small model computes; no TFLOP/s 0.000
    assert parts[2:] == [
        "elapsed time per iteration (ms)",
        "tokens/s/GPU",
        "learning rate",
        "global batch size",
        "lm loss",
        "grad norm",
        "peak memory (GiB)",
    ]
    losses = [record["lm_loss"] for record in json_log("log.jsonl")]
    assert len(losses) == 2 and f" lm loss: {sum(losses) / 2:.6E} |" in lines[0], "the mean since the last line"


def test_the_unit_of_the_log_line_fits_the_model():
    units = {4e14: "TFLOP/s", 1e11: "TFLOP/s", 9e10: "GFLOP/s", 1e7: "MFLOP/s", 0.0: "MFLOP/s"}
    assert {operations: unit_of(operations)[1] for operations in units} == units


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_a_bar_and_a_file_the_lines(run, monkeypatch, capsys):
    for stdout, lines in (("a file", 3), ("a terminal", 0)):
        screen = Terminal()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", screen)
            if stdout == "a terminal":
                patch.setattr(sys, "stdout", screen)
            run(train_iters=3, save=f"out{lines}")
        bar = screen.getvalue().split("\r")[-1]
        figures = r"loss \d.*, .* tokens/s, .* [MG]FLOP/s"
        assert re.search(rf"^training 3/3 \|[█#]+\| 00:\d\d<00:00, {figures}\s*$", bar), repr(bar)
        text = capsys.readouterr().out if lines else screen.getvalue()
        assert text.count(" iteration  ") == lines and f"saved iteration 3 to out{lines}\n" in text


def test_the_start_shows_what_was_given_and_all_of_it_on_demand(run, capsys):
    run(train_iters=1, save="a folder", data_path="train.jsonl")
    short = capsys.readouterr().out.split("\n1 rank on")[0].splitlines()
    assert len(short) < 20 and short[0] == "configuration (--verbose: all of it):"
    assert "  model       3 layers, hidden size 32, 2 heads, 8 experts, 2 a token, vocabulary 64" in short
    assert "  checkpoint  --save 'a folder'" in short and any("--attention-backend auto" in line for line in short)
    assert not any("clip-grad" in line for line in short)
    run(train_iters=1, verbose=True)
    text = capsys.readouterr().out
    assert "optimizer:\n" in text and "  clip_grad = 1.0\n" in text and "  routed_scaling_factor = " in text


def test_the_last_steps_have_a_line_wherever_a_run_leaves(run, capsys):
    run(train_iters=9, log_interval=2, exit_interval=5, log_file="log.jsonl")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(" iteration")]
    losses = [record["lm_loss"] for record in json_log("log.jsonl")]
    shown = [line.split(" lm loss: ")[1].split()[0] for line in lines]
    assert shown == [f"{sum(part) / len(part):.6E}" for part in (losses[:2], losses[2:4], losses[4:5])]


def test_a_converted_checkpoint_is_iteration_zero(run):
    """Weights alone, in bf16, as conversion leaves them; its files go along with every later save."""
    run(train_iters=1, save="first")
    weights = {name: t for name, t in tensors("first", 1).items() if not name.startswith("optimizer.")}
    stored = {n: t if n.endswith("_bias") else t.bfloat16() for n, t in weights.items()}
    rectangles = [sharded.Rectangle(n, tuple(t.shape), (0,) * t.dim(), t, True) for n, t in stored.items()]
    shape = ModelConfig.from_hf(Path("first/iter_0000001").resolve())
    Path("files").mkdir()
    Path("files/config.json").write_text(json.dumps(shape.to_hf()))
    Path("files/chat_template.jinja").write_text("{{ messages }}")
    sharded.save(Path("converted"), 0, rectangles, {}, shape, Path("files"), None)

    run(preset=None, load="converted", train_iters=1, lr=1e-30, weight_decay=0.0, save="out", log_file="log.jsonl")
    assert [r["iteration"] for r in records("log.jsonl")] == [1]
    after = tensors("out", 1)
    for name, tensor in stored.items():
        if not name.endswith("_bias"):  # the router's bias has moved
            assert torch.equal(after[name], tensor.float()), name
    assert Path("out/iter_0000001/hf/chat_template.jinja").read_text() == "{{ messages }}"


def test_finetune_starts_afresh_from_the_weights(run):
    run(train_iters=2, save="first")
    run(preset=None, load="first", finetune=True, train_iters=1, seed=7, log_file="log.jsonl", save="second")
    assert [r["iteration"] for r in records("log.jsonl")] == [1]
    moments = tensors("second", 1)["optimizer.exp_avg.lm_head.weight"]
    run(preset=None, load="first", finetune=True, train_iters=1, seed=7, save="third")
    assert torch.equal(moments, tensors("third", 1)["optimizer.exp_avg.lm_head.weight"])


def test_epochs_count_packs(run):
    run(train_epochs=2, global_batch_size=4, log_file="log.jsonl", lr_warmup_iters=1)
    assert len(records("log.jsonl")) == 6  # 22 packs, 4 a step


@pytest.mark.parametrize(
    "flags, words",
    [
        ({"load": "first", "seed": 2}, ["--seed 1234", "2"]),
        ({"load": "first", "seq_length": 32}, ["--seq-length 24", "32"]),
        ({"load": "first", "data_path": "valid.jsonl"}, ["first was trained on other data"]),
        ({"save": "first"}, ["--save first", "iteration 1"]),
        ({"load": "first", "hidden_size": 48}, ["32", "48"]),
        ({"data_path": "nothing.jsonl"}, ["nothing.jsonl"]),
        ({"pipeline_model_parallel_size": 2}, ["--pipeline-model-parallel-size", "(2)"]),
    ],
)
def test_what_cannot_continue_is_refused_in_one_line(run, capsys, flags, words):
    if "first" in flags.values():
        run(train_iters=1, save="first")
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop, one_line_errors():
        run(**{"train_iters": 2} | flags)
    message = capsys.readouterr().err
    assert stop.value.code == 2 and message.startswith("error: ") and message.count("\n") == 1
    assert all(word in message for word in words)
