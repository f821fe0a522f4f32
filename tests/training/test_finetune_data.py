"""What a fine-tuning run trains and is evaluated on: mixes, named validation sets, parts of --split."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from megatron_glm.config import DataConfig, ModelConfig, PretrainDataConfig, RunConfig, TrainConfig
from megatron_glm.config.data import validation_sets
from megatron_glm.training.checkpointing import fingerprint
from megatron_glm.training.datasets import DataSets, finetuning_data, pretraining_data
from tests.helpers.finetune import assert_same, finetune, json_log, tensors, write_rows
from tests.helpers.pretrain import write_corpus


def write_ids(path: str, first: int, rows: int = 20) -> None:
    """Rows of four ids, the first of which is the row's own."""
    lines = (json.dumps({"input_ids": [first + i, 900, 901, 902]}) + "\n" for i in range(rows))
    Path(path).write_text("".join(lines))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_ids("a.jsonl", 0)
    write_ids("b.jsonl", 100)


def load(*, train_iters: int | None = 20, train_epochs: int | None = None, kind=DataConfig, **data) -> DataSets:
    """With one row in a pack, and four packs a step."""
    config = RunConfig(
        ModelConfig.from_hf("glm5.2-tiny", vocab_size=1000),
        data=kind(**{"seq_length": 8} | ({"packing": "none"} if kind is DataConfig else {}) | data),
        train=TrainConfig(global_batch_size=4, train_iters=train_iters, train_epochs=train_epochs),
    )
    config.data.check()
    return (finetuning_data if kind is DataConfig else pretraining_data)(config, lambda work: work(), print)


def rows(batches, count: int) -> list[int]:
    """The first ids of the packs 0 to count - 1."""
    return [int(batches.dataset.pack(i)[0][0][0]) for i in range(count)]


def test_a_mix_takes_its_shares_in_every_stretch_and_deals_each_part_anew():
    mix = load(data_path=("0.7", "a.jsonl", "0.3", "b.jsonl")).train
    taken = rows(mix, 80)
    for n in range(1, 81):
        assert abs(sum(row >= 100 for row in taken[:n]) - 0.3 * n) < 1
    from_a = [row for row in taken if row < 100]
    assert sorted(from_a[:20]) == sorted(from_a[20:40]) == list(range(20)) and from_a[:20] != from_a[20:40]
    alone = load(data_path=("a.jsonl",)).train
    assert from_a == rows(alone, len(from_a))


def test_a_longer_run_or_epochs_begin_with_the_same_packs():
    words = ("2", "a.jsonl", "1", "b.jsonl")
    short, longer = load(data_path=words).train, load(data_path=words, train_iters=200).train
    epochs = load(data_path=words, train_iters=None, train_epochs=3).train
    assert rows(short, 80) == rows(longer, 80) == rows(epochs, 80)
    assert epochs.dataset.packs_per_epoch == 40 and len(rows(epochs, 124)) == 124
    assert fingerprint(short) == fingerprint(longer) != fingerprint(load(data_path=("1", *words[1:])).train)
    assert rows(load(data_path=("0", "a.jsonl", "1", "b.jsonl")).train, 20) == rows(
        load(data_path=("b.jsonl",)).train, 20
    )


def test_paths_without_weights_are_one_data_set():
    together = load(data_path=("a.jsonl", "b.jsonl")).train
    assert sorted(rows(together, 40)) == [*range(20), *range(100, 120)]


def test_the_parts_of_a_split_hold_every_row_once_whatever_the_seed():
    parts = load(data_path=("a.jsonl", "b.jsonl"), split="70,20,10")
    found = [rows(part, part.dataset.packs_per_epoch) for part in (parts.train, parts.valid["valid"], parts.test)]
    assert list(map(len, found)) == [28, 8, 4]
    assert sorted(itertools.chain(*found)) == [*range(20), *range(100, 120)]
    assert any(row < 100 for row in found[1]) and any(row >= 100 for row in found[1])
    mixed = load(data_path=("1", "a.jsonl", "3", "b.jsonl"), split="50,50")
    valid = mixed.valid["valid"]
    assert set(rows(mixed.train, 80)).isdisjoint(rows(valid, valid.dataset.packs_per_epoch)) and mixed.test is None
    assert load(data_path=("a.jsonl",), split="1").valid == {}
    with pytest.raises(ValueError, match="--split: 0.100% of 40 rows is less than one"):
        load(data_path=("a.jsonl", "b.jsonl"), split="969,30,1")
    with pytest.raises(ValueError, match="--split 0,1 leaves no rows for training"):
        load(data_path=("a.jsonl",), split="0,1")
    with pytest.raises(ValueError, match="--split 9,1 and --valid-data-path both name validation data"):
        load(data_path=("a.jsonl",), split="9,1", valid_data_path=("b.jsonl",))


def test_names_of_validation_sets():
    assert validation_sets(()) == {} and validation_sets(("a.jsonl", "b.jsonl")) == {"valid": ("a.jsonl", "b.jsonl")}
    assert validation_sets(("code=x/a", "math=b", "code=c=d")) == {"code": ("x/a", "c=d"), "math": ("b",)}
    assert validation_sets(("./code=x",)) == {"valid": ("./code=x",)}
    Path("year=2024").mkdir()
    Path("year=2024/a.jsonl").touch()
    assert validation_sets(("year=2024/a.jsonl", "year=*/*.jsonl")) == {
        "valid": ("year=2024/a.jsonl", "year=*/*.jsonl")
    }
    with pytest.raises(ValueError, match="--valid-data-path code=a b: give every path the name of its set"):
        load(data_path=("a.jsonl",), valid_data_path=("code=a", "b"))


def test_named_validation_sets_of_prefixes():
    write_corpus("corpus")
    write_corpus("other", 20)
    data = load(kind=PretrainDataConfig, train_data_path=("corpus",), valid_data_path=("x=other", "y=corpus"))
    assert list(data.valid) == ["x", "y"] and data.test is None
    assert data.valid["x"].dataset.packs_per_epoch < data.valid["y"].dataset.packs_per_epoch
    split = load(kind=PretrainDataConfig, data_path=("corpus",), split="8,1,1")
    assert list(split.valid) == ["valid"] and split.test is not None


def test_each_named_set_is_evaluated_logged_and_in_the_record(tmp_path, capsys):
    write_rows(tmp_path)
    common = {"valid_data_path": ["one=valid.jsonl", "two=train.jsonl"], "log_file": "log.jsonl"}
    finetune(train_iters=2, eval_interval=1, save="out", data_path=["2", "train.jsonl", "1", "valid.jsonl"], **common)
    printed = capsys.readouterr().out
    assert " validation one at iteration 1 | lm loss: " in printed and " validation two at iteration 2 |" in printed
    losses = json_log("log.jsonl")[-1]["valid_lm_loss"]
    assert list(losses) == ["one", "two"] and losses["one"] != losses["two"]
    finetune(preset=None, load="out", eval_only=True, **common | {"log_file": None})
    printed = capsys.readouterr().out
    assert f"\none | lm loss: {losses['one']:.6f} |" in printed and f"\neval | lm loss: {losses['two']:.6f}" in printed


def test_a_resumed_mix_equals_an_uninterrupted_one_and_the_test_part_comes_last(tmp_path, capsys):
    write_rows(tmp_path)
    mix = {"data_path": ["0.5", "train.jsonl", "0.5", "valid.jsonl"], "split": "8,2,2", "lr_decay_style": "constant"}
    finetune(**mix, train_iters=4, save="whole")
    assert "\ntest | lm loss: " in capsys.readouterr().out
    finetune(**mix, train_iters=2, save="part")
    finetune(**mix, preset=None, train_iters=4, load="part", save="part")
    assert_same(tensors("whole", 4), tensors("part", 4))
