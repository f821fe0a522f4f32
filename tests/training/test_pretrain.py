"""pretrain_glm.py from flags to checkpoint: ramp-up, exact resume, evaluation, refusals, the plan."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from megatron_glm.checkpoint import sharded
from megatron_glm.config.data import PretrainDataConfig
from megatron_glm.data.loader import MicroBatches
from megatron_glm.data.pretraining import build_datasets
from megatron_glm.launch import one_line_errors
from megatron_glm.training.checkpointing import fingerprint
from tests.helpers.finetune import assert_same, finetune, records, tensors, write_rows
from tests.helpers.pretrain import pretrain, write_corpus


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return pretrain


def refusal(run, capsys, **flags) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop, one_line_errors():
        run(**flags)
    message = capsys.readouterr().err
    assert stop.value.code == 2 and message.startswith("error: ") and message.count("\n") == 1
    return message


def test_a_run_resumed_in_its_ramp_up_equals_an_uninterrupted_one(run):
    """Weights, moments, batch sizes, samples and log, with WSD and validation."""
    ramp = {"global_batch_size": 6, "rampup_batch_size": [2, 2, 8], "log_samples": True, "eval_interval": 4}
    wsd = {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 2, "lr_warmup_iters": 1, "train_iters": 6}
    run(**ramp, **wsd, save="whole", save_interval=3, log_file="whole.jsonl")
    shutil.copytree("whole/iter_0000003", "broken/iter_0000003")
    Path("broken/latest_checkpointed_iteration.txt").write_text("3")
    shutil.copy("whole.jsonl", "broken.jsonl")  # all of it: what came after the checkpoint is done again
    run(preset=None, **ramp, **wsd, load="broken", save="broken", log_file="broken.jsonl")
    assert_same(tensors("whole", 6), tensors("broken", 6))
    log = records("whole.jsonl")
    assert log == records("broken.jsonl")
    assert [record["global_batch_size"] for record in log] == [2, 2, 4, 6, 6, 6]
    assert [record["consumed_samples"] for record in log] == [2, 4, 8, 14, 20, 26]
    assert [name for record in log for name in record["samples"]] == [f"mock:{i}" for i in range(26)]
    assert [record["learning_rate"] for record in log] == pytest.approx([0.01] * 5 + [0.01 * (2 * 0.5**0.5 - 1)])
    assert sharded.state_of(Path("whole/iter_0000006")) == sharded.state_of(Path("broken/iter_0000006"))


def test_files_are_split_into_training_validation_and_test(run, capsys):
    """The test loss comes at the end of a run, and --eval-only says validation and test loss of a checkpoint."""
    write_corpus("corpus")
    flags = {"mock_data": None, "data_path": "corpus", "split": "80,10,10", "eval_iters": 2}
    run(**flags, train_iters=1, save="out", log_file="log.jsonl")
    text = capsys.readouterr().out
    assert all(f"\n{part}: corpus: " in text for part in ("train", "valid", "test"))
    test_line = next(line for line in text.splitlines() if line.startswith("test | lm loss: "))
    run(preset=None, load="out", **flags, eval_only=True)
    lines = [line for line in capsys.readouterr().out.splitlines() if " | lm loss: " in line]
    assert lines[0].startswith(f"valid | lm loss: {records('log.jsonl')[0]['valid_lm_loss']:.6f} | tokens: ")
    assert lines[1:] == [test_line]
    words = "--eval-only needs a validation or test part"
    assert words in refusal(run, capsys, **flags | {"split": "1"}, load="out", eval_only=True)
    run(**flags | {"split": "1", "eval_interval": 1}, train_iters=1)  # nothing left to evaluate
    assert "lm loss: " not in capsys.readouterr().out.replace("lm loss: 4", "", 1)


def test_a_run_that_leaves_early_says_no_test_loss(run, capsys):
    run(train_iters=3, exit_interval=1)
    assert "test | lm loss" not in capsys.readouterr().out


def test_other_data_is_refused(run, capsys):
    write_corpus("corpus")
    write_corpus("other", documents=61)
    files = {"mock_data": None, "data_path": "corpus", "split": "90,10"}
    run(**files, train_iters=1, save="out")
    again = {"preset": None, "load": "out", "train_iters": 2}
    assert "out was trained on other data" in refusal(run, capsys, **again, **files | {"data_path": "other"})
    assert "out was trained on other data" in refusal(run, capsys, **again, split="90,10")
    words = "out was trained with --split 90,10, this run has 95,5"
    assert words in refusal(run, capsys, **again, **files | {"split": "95,5"})
    assert "--no-document-mask False" in refusal(run, capsys, **again, **files, no_document_mask=True)
    Path("moved").mkdir()
    for ending in ("bin", "idx"):
        shutil.move(f"corpus.{ending}", f"moved/corpus.{ending}")
    run(**again, **files | {"data_path": "moved/corpus"})  # the same data in another place


def test_a_resumed_run_may_have_smaller_steps(run):
    """Its samples go on where the larger steps ended, here in the third epoch."""
    write_corpus("corpus", documents=1)
    files = {"mock_data": None, "data_path": "corpus", "split": "1", "seq_length": 128}
    run(**files, train_iters=1, global_batch_size=20, micro_batch_size=20, save="out")
    run(**files, train_iters=2, load="out", log_file="log.jsonl")
    assert records("log.jsonl")[0]["consumed_samples"] == 22


def test_a_blend_is_known_by_its_weights_and_its_rare_parts(tmp_path):
    for name, documents in (("a", 2), ("b", 2), ("c", 1)):
        write_corpus(str(tmp_path / name), documents)

    def print_of(*entries: str) -> str:
        paths = tuple(entry if entry[0] == "0" else str(tmp_path / entry) for entry in entries)
        data = PretrainDataConfig(data_path=paths, split="1", seq_length=32)
        return fingerprint(MicroBatches(build_datasets(data, 64, 1, 16, 0, 0, lambda build: build())[0]))

    one = print_of("0.999", "a", "0.001", "b")
    assert print_of("0.9990", "a", "0.0010", "b") == one
    assert print_of("0.998", "a", "0.002", "b") != one
    assert print_of("0.999", "a", "0.001", "c") != one


def test_a_fine_tuned_checkpoint_is_no_beginning_of_a_pretraining(run, capsys):
    write_rows(Path())
    finetune(train_iters=1, save="out")
    given = {"preset": None, "load": "out", "train_iters": 2, "seq_length": 24}
    assert "trained trunk; this run trains mtp and trunk" in refusal(run, capsys, **given)
    message = refusal(run, capsys, **given, mtp_num_steps="0")
    assert "out was trained with --split None, this run has 969,30,1; --finetune" in message
    run(preset=None, load="out", train_iters=1, seq_length=24, finetune=True)


def test_epochs_are_for_fine_tuning(run, capsys):
    assert "--train-epochs (2) is for fine-tuning" in refusal(run, capsys, train_epochs=2)


def dry_run(capsys, *flags: str) -> str:
    import pretrain_glm

    with patch.object(sys, "argv", ["pretrain_glm.py", "--hf-config", "glm5.2-tiny", "--dry-run", *flags]):
        pretrain_glm.main()
    return capsys.readouterr().out


def test_a_dry_run_names_what_is_missing(run, capsys):
    text = dry_run(capsys)
    assert "warning: --data-path is not given\n" in text and "warning: --train-iters is not given\n" in text
    assert "tokenizer" not in text and "verdict: fits" in text
    write_corpus("corpus")
    text = dry_run(capsys, "--data-path", "0.5", "corpus", "0.5", "gone", "--train-iters", "9", "--split", "1,0,0")
    assert "warning: --data-path gone.bin does not exist\nwarning: --data-path gone.idx does not exist\n" in text
    assert text.count("warning") == 2
    assert "warning" not in dry_run(capsys, "--mock-data", "--train-iters", "9", "--rampup-batch-size", "4", "2", "80")
