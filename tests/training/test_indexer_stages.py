"""From scratch in three runs: dense attention, warm-up of the indexer, sparse; what is refused, warned of, noted."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from megatron_glm.config import IndexerConfig
from tests.helpers.finetune import exit_code, finetune, json_log, tensors, write_rows
from tests.helpers.pretrain import pretrain

WARNING, MTP_WARNING = "the indexer was never trained", "the MTP layer's own indexer was never trained"
TRUNK_WARNING = "the trunk was never trained"


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def state(folder: str) -> dict:
    return json.loads(Path(folder, "iter_0000002/state.json").read_text())


def moved(before: str, after: str) -> set[str]:
    """Parts whose weights differ between two checkpoints."""
    left, right = tensors(before, 2), tensors(after, 2)
    names = [name for name in left if not name.startswith("optimizer.") and "e_score" not in name]
    parts = {name: "indexer" if ".indexer." in name else "trunk" for name in names}
    return {parts[name] for name in names if not torch.equal(left[name].float(), right[name].float())}


def test_three_stages(capsys):
    off = {"mtp_num_steps": "0"}
    pretrain(attention="dense", train_iters=2, save="dense", log_file="dense.jsonl", **off)
    assert WARNING not in capsys.readouterr().out
    assert state("dense")["never_trained"] == ["indexer", "mtp", "mtp indexer"]
    stage = dict(preset=None, train_iters=2, finetune=True)
    # warm-up holds the MTP layer, too, unasked
    pretrain(**stage, load="dense", indexer_training="warmup", save="warm", log_file="warm.jsonl")
    out = capsys.readouterr().out
    assert WARNING not in out and " indexer loss: " in out and re.search(r" grad norm: \d\.\d{3}E-0\d \|", out)
    assert state("warm")["never_trained"] == ["mtp", "mtp indexer"] and moved("dense", "warm") == {"indexer"}
    pretrain(**stage, **off, load="warm", indexer_training="sparse", save="sparse", log_file="sparse.jsonl")
    assert WARNING not in capsys.readouterr().out
    assert state("sparse")["never_trained"] == ["mtp", "mtp indexer"] and moved("warm", "sparse") == {
        "indexer",
        "trunk",
    }
    assert all("indexer_loss" not in line for line in json_log("dense.jsonl"))
    for log in ("warm.jsonl", "sparse.jsonl"):
        assert all(line["indexer_loss"] > 0 and line["lm_loss"] > 0 for line in json_log(log))
    assert all(0 < line["indexer_recall"] < 1 for line in json_log("warm.jsonl")) and "indexer recall: " in out
    assert all("indexer_recall" not in line for line in json_log("sparse.jsonl"))
    assert set(json_log("warm.jsonl")[-1]["grad_norms"]) == {"indexer"}
    pretrain(preset=None, load="sparse", train_iters=3, indexer_training="sparse", save="sparse", **off)  # goes on
    assert json.loads(Path("sparse/iter_0000003/state.json").read_text())["never_trained"] == ["mtp", "mtp indexer"]
    capsys.readouterr()
    code = exit_code(lambda: pretrain(preset=None, load="sparse", train_iters=4, **off))
    message = capsys.readouterr().err
    assert code == 2 and "trained indexer and trunk" in message and "--finetune" in message


def test_pre_training_trains_the_mtp_layer_and_says_so_in_the_checkpoint(capsys):
    pretrain(train_iters=2, save="out", log_file="log.jsonl", mtp_num_steps=2)
    out = capsys.readouterr().out
    assert state("out")["never_trained"] == ["indexer", "mtp indexer"] and " mtp losses: " in out
    log = json_log("log.jsonl")
    assert all(len(line["mtp_losses"]) == len(line["mtp_acceptance"]) == 2 for line in log)
    assert "valid_mtp_losses" not in log[0] and len(log[1]["valid_mtp_acceptance"]) == 2
    losses = " ".join(f"{loss:.6f}" for loss in log[1]["valid_mtp_losses"])
    assert f" | mtp losses: {losses}\n" in out[out.index(" validation at iteration 2 ") :]
    pretrain(preset=None, load="out", eval_only=True, mtp_num_steps=2)
    assert f" | mtp losses: {losses}\n" in capsys.readouterr().out
    pretrain(train_iters=2, log_file="means.jsonl", mtp_num_steps=2, log_interval=2)
    means = " ".join(f"{sum(two) / 2:.4f}" for two in zip(*(line["mtp_losses"] for line in log), strict=True))
    assert f" mtp losses: {means} |" in capsys.readouterr().out


def test_drafts_of_an_adapted_model_are_evaluated(tmp_path, capsys):
    """The adapters are of the trunk, and the MTP layer is held: its losses move with what it drafts from."""
    write_rows(tmp_path)
    finetune(train_iters=1, save="base")
    lora = {"preset": None, "lora_rank": 8, "moe_router_bias_update_rate": None}
    finetune(**lora, load="base", train_iters=2, save="adapters", lr=0.1)
    found = []
    for folder in ("base", "adapters"):
        capsys.readouterr()
        finetune(preset=None, load=folder, eval_only=True, mtp_num_steps=2)
        found.append(
            re.search(r"eval \| lm loss: (\S+) .* \| mtp losses: (\S+) (\S+)\n", capsys.readouterr().out).groups()
        )
    assert all(base != adapted for base, adapted in zip(*found, strict=True))


def test_training_around_an_untrained_indexer_is_warned_of_by_name(capsys):
    pretrain(train_iters=2, save="out", mtp_num_steps="0")
    out = capsys.readouterr().out
    assert WARNING in out and "--attention dense" in out
    assert state("out")["never_trained"] == ["indexer", "mtp", "mtp indexer"]
    pretrain(preset=None, load="out", train_iters=3, mtp_num_steps="0")
    assert WARNING in capsys.readouterr().out
    pretrain(train_iters=1, dsa_indexer_topk=32)
    out = capsys.readouterr().out
    assert WARNING not in out and MTP_WARNING not in out  # every row sees all of its keys
    pretrain(train_iters=1, mtp_num_steps=1)
    out = capsys.readouterr().out
    assert WARNING in out and MTP_WARNING in out
    pretrain(train_iters=2, mtp_num_steps=1, indexer_training="sparse", save="joint")
    assert MTP_WARNING not in capsys.readouterr().out and state("joint")["never_trained"] == []
    pretrain(train_iters=1, mtp_num_steps=1, attention="dense")
    assert MTP_WARNING not in capsys.readouterr().out


@pytest.mark.parametrize("only", [{"indexer_training": "warmup"}, {"train_only": "mtp"}])
def test_learning_from_a_trunk_that_was_never_trained_is_warned_of(only, capsys):
    pretrain(train_iters=1, save="out", **only)
    assert TRUNK_WARNING in capsys.readouterr().out
    noted = json.loads(Path("out/iter_0000001/state.json").read_text())["never_trained"]
    assert "trunk" in noted
    pretrain(preset=None, load="out", finetune=True, train_iters=1, **only)
    assert TRUNK_WARNING in capsys.readouterr().out
    pretrain(preset=None, load="out", finetune=True, train_iters=1, attention="dense")
    assert TRUNK_WARNING not in capsys.readouterr().out
    assert exit_code(lambda: pretrain(preset=None, load="out", train_iters=2, train_only=None)) == 2
    assert "no --train-only, no --lora-rank)" in capsys.readouterr().err


def test_a_factor_of_zero_teaches_nothing_and_the_checkpoint_says_so(capsys):
    pretrain(train_iters=2, save="out", indexer_training="sparse", dsa_indexer_loss_coeff="0")
    assert state("out")["never_trained"] == ["indexer", "mtp indexer"]
    assert MTP_WARNING in capsys.readouterr().out
    pretrain(train_iters=2, save="other", mtp_loss_scaling_factor="0")
    assert "the MTP layer was never trained, and this run does not train it: --mtp-loss-" in capsys.readouterr().out
    assert state("other")["never_trained"] == ["indexer", "mtp", "mtp indexer"]


REFUSED = {
    "needs --indexer-training warmup or sparse": {"dsa_indexer_loss_coeff": 0.1},
    "--indexer-teacher own needs": {"indexer_teacher": "own"},
    "--indexer-loss-rows sparse needs": {"indexer_training": "warmup", "indexer_loss_rows": "sparse"},
    "must not be negative": {"indexer_training": "sparse", "dsa_indexer_loss_coeff": -1},
    "--moe-router-bias-update-rate 0.1": {"indexer_training": "warmup", "moe_router_bias_update_rate": 0.1},
    "--indexer-training sparse with --attention dense": {"indexer_training": "sparse", "attention": "dense"},
    "--mtp-num-steps is 1, index_share_for_mtp_iteration true": {"mtp_unshifted_queries": True},
    "--mtp-num-steps 32 is not below --seq-length (32)": {"mtp_num_steps": 32},
    "--dsa-indexer-loss-coeff 0 with --indexer-training warmup": {
        "indexer_training": "warmup",
        "dsa_indexer_loss_coeff": "0",
    },
    "--mtp-loss-scaling-factor 0 with --train-only mtp": {"train_only": "mtp", "mtp_loss_scaling_factor": "0"},
    "--dense-rows off with dense attention": {"attention": "dense", "dense_rows": "off"},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_is_refused_with_its_flags(message, capsys):
    assert exit_code(lambda: pretrain(train_iters=1, **REFUSED[message])) == 2
    assert message in capsys.readouterr().err


def test_megatrons_zero_coefficient_still_means_no_loss():
    IndexerConfig(dsa_indexer_loss_coeff=0.0).check()
    assert IndexerConfig().coefficient == 1e-3 and IndexerConfig(dsa_indexer_loss_coeff=0.0).coefficient == 0
