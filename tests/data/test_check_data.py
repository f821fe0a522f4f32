"""--check-data: what a run would train on, without weights, GPU or process group."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

import finetune_glm
from megatron_glm.launch import one_line_errors
from tests.helpers.rows import chat_folder

GOOD = {"messages": [{"role": "user", "content": "h"}, {"role": "assistant", "content": "g"}], "source": "s"}
FLAGS = "--hf-config glm5.2-tiny --tokenizer-model . --vocab-size 512 --seq-length 64 --check-data".split()


def check(monkeypatch, *flags: str) -> int:
    monkeypatch.setattr(sys, "argv", ["finetune_glm.py", *FLAGS, *flags])
    monkeypatch.setattr(dist, "init_process_group", None)  # it needs no other rank
    with pytest.raises(SystemExit) as stop, one_line_errors():
        finetune_glm.main()
        sys.exit(0)
    return stop.value.code


def write(name: str, *rows: dict) -> None:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(chat_folder(tmp_path))


def test_kinds_columns_and_packs(monkeypatch, capsys):
    write("train.jsonl", GOOD, {"text": "ab"})
    write("valid.jsonl", {"text": "ab", "id": 1})
    assert check(monkeypatch, "--data-path", "train.jsonl", "--valid-data-path", "valid.jsonl") == 0
    out = capsys.readouterr().out
    assert "train.jsonl: 2 documents" in out and "in 1 packs of 64 tokens" in out
    assert "kinds: 1 messages, 1 text; columns not used: source\n" in out
    assert "kinds: 1 text; columns not used: id\n" in out


def test_flags_of_rows_and_the_first_bad_row(monkeypatch, capsys):
    write("train.jsonl", GOOD, GOOD | {"loss_mask": [1], "text": "<sop>"}, {"text": "a<sop>"})
    write("valid.jsonl", GOOD)
    flags = ["--data-path", "valid.jsonl", "--valid-data-path", "train.jsonl"]
    assert check(monkeypatch, *flags) == 2
    assert "error: train.jsonl:2: the row has the key loss_mask" in capsys.readouterr().err
    assert check(monkeypatch, *flags, "--ignore-keys", "loss_mask,source") == 2
    assert "error: train.jsonl:3: text contains the special token <sop>" in capsys.readouterr().err
    assert check(monkeypatch, *flags, "--ignore-keys", "loss_mask", "source", "--special-tokens-in-text") == 0
    assert check(monkeypatch, *flags, "--skip-bad-rows") == 0
    assert "2 bad rows skipped" in capsys.readouterr().out


def test_what_a_row_is_made_of_is_no_metadata(monkeypatch, capsys):
    assert check(monkeypatch, "--data-path", "train.jsonl", "--ignore-keys", "id,messages") == 2
    assert capsys.readouterr().err == "error: --ignore-keys messages: that is what a row is made of, not metadata\n"


def test_the_last_turn(monkeypatch, capsys):
    write("train.jsonl", {"messages": GOOD["messages"] * 2})
    assert check(monkeypatch, "--data-path", "train.jsonl") == 0
    twice = capsys.readouterr().out
    assert check(monkeypatch, "--data-path", "train.jsonl", "--train-on-last-turn-only") == 0
    once = capsys.readouterr().out
    loss = [int(text.split(" loss tokens")[0].split(", ")[-1]) for text in (twice, once)]
    assert loss[0] == 2 * loss[1] > 0
