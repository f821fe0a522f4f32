"""finetune_glm.py --loss dpo from end to end: with a reference that tools/score.py made, and with adapters off."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.helpers import small_model
from tests.helpers.finetune import exit_code, finetune, json_log
from tests.helpers.tools import call

LN_2 = math.log(2)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return small_model.make(tmp_path_factory.mktemp("model") / "hf")


def write_pairs() -> None:
    for name, count in (("train", 6), ("valid", 3)):
        rows = [
            {
                "prompt": [{"role": "user", "content": f"What is {name} {i}?"}],
                "chosen": [{"role": "assistant", "content": f"It is {i}."}],
                "rejected": [{"role": "assistant", "content": f"No idea, not {i + 1}."}],
            }
            for i in range(count)
        ]
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def dpo(model: Path, **given) -> None:
    flags = {
        "load_hf": str(model),
        "loss": "dpo",
        "seq_length": 256,
        "packing": "best-fit",
        "train_iters": 3,
        "lr": 1e-2,
    }
    flags |= {"moe_router_bias_update_rate": None, "weight_decay": None, "dpo_beta": 1.0, "log_file": "log.jsonl"}
    finetune(None, **flags | given)


def score(model: Path, *words: str) -> None:
    code, out, err = call("score", "--load-hf", str(model), "--data-path", "train.jsonl", "valid.jsonl", *words)
    assert code == 0, err
    Path("scores.jsonl").write_text(out)


def test_a_scored_reference(model, capfd):
    write_pairs()
    score(model)
    given = {"reference_logprobs": "scores.jsonl", "valid_data_path": "valid.jsonl", "eval_interval": 3}
    dpo(model, save="out", **given)
    first, *_, last = json_log("log.jsonl")
    assert first["dpo_loss"] == pytest.approx(LN_2, abs=1e-5)
    assert first["rewards"]["margins"] == pytest.approx(0.0, abs=1e-4)
    assert last["dpo_loss"] < 0.9 * first["dpo_loss"] and last["rewards"]["margins"] > 0.1
    assert last["rewards"].keys() == {"chosen", "rejected", "accuracies", "margins"}
    rewards = last["rewards"]
    assert rewards["margins"] == pytest.approx(rewards["chosen"] - rewards["rejected"], rel=1e-6)
    assert last["logps"]["chosen"] < 0 and 0 < last["lm_loss"] < 20
    assert last["valid_rewards"]["accuracies"] in (0.0, 1 / 3, 2 / 3, 1.0) and last["valid_dpo_loss"] > 0
    lines = capfd.readouterr().out
    assert "6 pairs (0 overlong" in lines and "6 prompt+chosen+rejected" in lines
    assert "| dpo loss: " in lines and "| rewards/accuracies: " in lines
    (step,) = [line for line in lines.splitlines() if " validation at iteration 3" in line]
    assert f"dpo loss: {last['valid_dpo_loss']:.6E}" in step
    dpo(model, load="out", load_hf=None, data_path="valid.jsonl", eval_only=True, reference_logprobs="scores.jsonl")
    assert f"dpo loss: {last['valid_dpo_loss']:.6f}" in capfd.readouterr().out


def test_adapters_off_are_the_reference(model):
    """The loss starts at ln 2 to the last bit of a float, and is that with the frozen model's scores."""
    write_pairs()
    lora = {"lora_rank": 8, "lora_alpha": 16}
    dpo(model, log_file="off.jsonl", save="out", **lora)
    off = json_log("off.jsonl")
    assert off[0]["dpo_loss"] == pytest.approx(LN_2, abs=1e-7) and abs(off[0]["rewards"]["margins"]) < 1e-9
    assert off[-1]["dpo_loss"] < off[0]["dpo_loss"]
    score(model)
    dpo(model, log_file="scored.jsonl", reference_logprobs="scores.jsonl", **lora)
    for left, right in zip(off, json_log("scored.jsonl"), strict=True):
        assert left["dpo_loss"] == pytest.approx(right["dpo_loss"], abs=2e-5)
    Path("p.jsonl").write_text('{"prompt": "Why"}\n')
    words = ("--load", "out", "--prompt-file", "p.jsonl", "--max-new-tokens", "3")
    code, out, err = call("generate", *words)
    assert code == 0 and len(json.loads(out)["tokens"]) == 3, err


def test_a_resumed_run_is_the_same_run_and_another_reference_is_refused(model, capfd):
    write_pairs()
    score(model)
    given = {"reference_logprobs": "scores.jsonl", "lr_decay_style": "constant"}
    dpo(model, log_file="whole.jsonl", **given)
    dpo(model, train_iters=2, save="out", **given)
    dpo(model, load="out", load_hf=None, log_file="rest.jsonl", **given)
    whole, rest = json_log("whole.jsonl")[-1], json_log("rest.jsonl")[-1]
    assert whole["dpo_loss"] == rest["dpo_loss"]
    lines = [json.loads(line) for line in Path("scores.jsonl").read_text().splitlines()]
    for line in lines:
        line["chosen"]["sum_logprob"] -= 1.0
    Path("other.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = given | {"load": "out", "load_hf": None, "reference_logprobs": "other.jsonl"}
    assert exit_code(lambda: dpo(model, **flags)) == 2
    assert "was trained on other data" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({}, "--loss dpo needs a reference: --reference-logprobs"),
        ({"loss": None}, "--dpo-beta 1.0 needs --loss dpo"),
        ({"overlong": "split", "lora_rank": 8}, "--overlong split with --loss dpo"),
        ({"lora_rank": 8, "dpo_label_smoothing": 0.5}, "--dpo-label-smoothing is 0.5; it must be below 0.5"),
        (
            {"lora_rank": 8, "dpo_loss_type": "ipo", "dpo_label_smoothing": 0.1},
            "--dpo-label-smoothing 0.1 is of the",
        ),
        ({"lora_rank": 8, "dpo_beta": -1}, "--dpo-beta is -1.0; it must not be negative"),
        (
            {"reference_logprobs": "x", "moe_router_bias_update_rate": 0.1},
            "--moe-router-bias-update-rate 0.1 with",
        ),
        ({"reference_logprobs": "x", "moe_aux_loss_coeff": 0.1}, "--moe-aux-loss-coeff 0.1 with --loss dpo"),
        ({"reference_logprobs": "nowhere.jsonl"}, "nowhere.jsonl holds or matches no file"),
        ({"reference_logprobs": "train.jsonl"}, "--reference-logprobs: train.jsonl:1: it is of the model None"),
    ],
)
def test_wrong_flags(model, capfd, flags, message):
    write_pairs()
    assert exit_code(lambda: dpo(model, **flags)) == 2
    assert message in capfd.readouterr().err


def test_rows_that_are_no_pairs_and_pairs_without_reference_are_named(model, capfd):
    write_pairs()
    score(model)
    with open("train.jsonl", "a") as file:
        file.write(json.dumps({"prompt": "a", "completion": "b"}) + "\n")
    given = {"reference_logprobs": "scores.jsonl"}
    assert exit_code(lambda: dpo(model, **given)) == 2
    assert "train.jsonl:7: the row has the keys ['completion', 'prompt'] and is no pair" in capfd.readouterr().err
    write_pairs()
    with open("train.jsonl", "a") as file:
        file.write(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}) + "\n")
    assert exit_code(lambda: dpo(model, **given)) == 2
    assert "have no chosen answer of pair 7 of 7" in capfd.readouterr().err


def test_pretraining_refuses_it(capsys):
    from megatron_glm.config import PretrainDataConfig
    from megatron_glm.config.flags import parse

    words = "--hf-config glm5.2-tiny --data-path a --train-iters 1 --loss dpo --reference-logprobs x".split()
    with pytest.raises(SystemExit):
        parse(words, data=PretrainDataConfig)
    assert "--loss dpo is for fine-tuning" in capsys.readouterr().err
