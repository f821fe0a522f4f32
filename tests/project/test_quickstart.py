"""A short quickstart from end to end, and what it made."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from megatron_glm.checkpoint.hf_folder import SafetensorsFolder
from megatron_glm.config.flags import build_parser
from megatron_glm.config.model import ModelConfig
from megatron_glm.data.finetuning import load_documents
from megatron_glm.data.rows import RowSettings
from tests.helpers.finetune import json_log

ROOT = Path(__file__).resolve().parents[2]
SIDE_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def quickstart(folder: Path, iterations: int) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "QUICKSTART_ITERS": str(iterations)}
    command = ["bash", str(ROOT / "examples" / "quickstart.sh"), str(folder)]
    return subprocess.run(command, env=environment, text=True, capture_output=True, stdin=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def result(tmp_path_factory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("quickstart") / "my quick's start"
    done = quickstart(folder, iterations=4)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done.stdout


@pytest.mark.timeout(1200)  # the first one to ask for `result` runs it
def test_the_exported_model_has_the_same_loss_in_transformers(result):
    agreed = re.search(r"^agree: lm loss (\S+) here, (\S+) in transformers \((\d+) tokens\)$", result[1], re.M)
    evaluated = re.search(r"^eval \| lm loss: (\S+) \| tokens: (\d+)$", result[1], re.M)
    assert agreed and evaluated
    assert evaluated.groups() == (agreed[1], agreed[3])
    assert abs(float(agreed[1]) - float(agreed[2])) <= 1e-4


def test_the_command_to_go_on_can_be_copied(result):
    change, command = (line.strip() for line in result[1].split("Next, go on where it stopped:\n")[1].splitlines())
    assert change == f"cd {shlex.quote(str(ROOT))}"
    words = shlex.split(command)
    assert words[:2] == [sys.executable, "finetune_glm.py"] and words[-4:-2] == ["--load", str(result[0] / "trained")]
    assert build_parser().parse_args(words[2:]).data_path == (str(result[0] / "train.jsonl"),)


def test_the_screen_says_what_goes_on(result):
    lines = result[1].splitlines()
    assert any(re.match(r" iteration +4/ +4 \|.* [MG]FLOP/s/GPU: (?!0.000)", line) for line in lines)
    assert f"saved iteration 4 to {result[0] / 'trained'}" in lines
    assert not re.search(r"\b0\.0+ [TGM]FLOP/s", result[1]) and not re.search(r"FLOP/s/GPU: 0\.000", result[1])


def test_the_loss_falls(result):
    losses = [record["lm_loss"] for record in json_log(result[0] / "train.log.jsonl")]
    assert len(losses) == 4
    assert losses[-1] < losses[0] - 0.1


def test_the_export_has_every_tensor_and_the_side_files_as_they_were(result):
    before, after = result[0] / "hf", result[0] / "hf_trained"
    assert SafetensorsFolder(after).entries.keys() == SafetensorsFolder(before).entries.keys()
    assert any(key.startswith("model.layers.6.eh_proj") for key in SafetensorsFolder(after).entries)
    for file in SIDE_FILES:
        assert (after / file).read_bytes() == (before / file).read_bytes()


def test_the_tokenizer_fits_the_config(result):
    tokenizer = Tokenizer.from_file(str(result[0] / "hf" / "tokenizer.json"))
    config = ModelConfig.from_hf("glm5.2-tiny")
    assert tokenizer.get_vocab_size() == config.vocab_size
    ends = [tokenizer.token_to_id(token) for token in ("<|endoftext|>", "<|user|>", "<|observation|>")]
    assert tuple(ends) == config.eos_token_id


def test_the_dataset_is_large_held_out_and_selects_keys(result):
    train, valid = ((result[0] / name).read_text().splitlines() for name in ("train.jsonl", "valid.jsonl"))
    assert len(train) > 2000 and len(valid) > 50
    assert not set(train) & set(valid)
    config = ModelConfig.from_hf("glm5.2-tiny")
    documents = load_documents([str(result[0] / "valid.jsonl")], RowSettings(result[0] / "hf", config.vocab_size))
    assert max(documents.offsets[1:] - documents.offsets[:-1]) > 2 * config.index_topk  # some rows are sparse


def test_a_folder_of_the_user_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    done = quickstart(tmp_path, iterations=1)
    assert done.returncode == 2
    assert "holds something else" in done.stderr
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize("script", ["quickstart", "glm5.2_32k_cp8", "pretrain_glm5.2"])
def test_help_says_what_a_script_does_and_starts_nothing(script, tmp_path):
    command = ["bash", str(ROOT / "examples" / f"{script}.sh"), "--help"]
    done = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0 and done.stderr == "" and not list(tmp_path.iterdir())
    assert f"bash examples/{script}.sh" in done.stdout and "#" not in done.stdout
