"""200 steps with FP8 products learn what bf16 learns; a run with them resumes bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_glm.config import Fp8Config, ModelConfig, ParallelConfig
from megatron_glm.data.packing import PackedBatch
from megatron_glm.training.engine import Engine
from megatron_glm.training.initialize import build_chunks
from megatron_glm.training.optimizer import build_optimizer
from megatron_glm.training.step import train_step
from tests.helpers.finetune import assert_same, finetune, json_log, records, tensors, write_rows
from tests.helpers.reference import single_groups
from tests.parity.layouts import SEQ_LENGTH, parity_model, run_config

STEPS, PACKS = 200, 2


def chain(model: ModelConfig, seed: int) -> PackedBatch:
    """One document in which each token has four successors, by chance: the loss can fall to log 4 = 1.39."""
    random = torch.Generator().manual_seed(seed)
    tokens = [int(torch.randint(0, model.vocab_size, (), generator=random))]
    for choice in torch.randint(0, 4, (SEQ_LENGTH - 1,), generator=random).tolist():
        tokens.append((5 * tokens[-1] + 7 * choice + 1) % model.vocab_size)
    labels = torch.tensor([*tokens[1:], -100])
    return PackedBatch(torch.tensor(tokens), labels, labels >= 0, torch.arange(SEQ_LENGTH), (SEQ_LENGTH,), 0)


def trained(fp8: Fp8Config) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of each step, in bf16.

    The learning rate falls in the second half, which leaves less to chance.
    """
    model = parity_model(2, index_topk=64, n_routed_experts=4, hidden_size=64, initializer_range=0.1)
    parallel = ParallelConfig(reshard_after_forward=False, reshard_experts_after_forward=False)
    config = run_config(replace(model, num_nextn_predict_layers=0), parallel, PACKS, seed=1)
    config = replace(config, fp8=fp8, train=replace(config.train, bf16=True))
    groups = single_groups()
    chunks = build_chunks(config, groups)
    engine, optimizer = Engine(config, groups, chunks), build_optimizer(config.optimizer, chunks)
    losses, norms = [], []
    for step in range(STEPS):
        batches = [chain(config.model, step * PACKS + number) for number in range(PACKS)]
        rate = 6e-3 * min(1, 2 * (STEPS - step) / STEPS)
        result = train_step(engine, optimizer, batches, rate)
        losses.append(result.losses["lm"])
        norms.append(result.grad_norm)
    return losses, norms


def test_the_loss_is_within_half_a_percent_of_bf16():
    """And the gradient norm within five."""
    (plain, plain_norms), (ours, norms) = trained(Fp8Config()), trained(Fp8Config(fp8="blockwise"))
    ends = [sum(each[-20:]) / 20 for each in (plain, ours)]
    assert plain[0] > 4.5 and 1.39 < ends[0] < 1.6 and plain != ours
    assert ends[1] == pytest.approx(ends[0], rel=5e-3)
    for part in (slice(0, 20), slice(20, 180), slice(180, 200)):
        assert sum(norms[part]) == pytest.approx(sum(plain_norms[part]), rel=5e-2)


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path)
    flags = {"fp8": "blockwise", "bf16": True, "reshard_after_forward": "false", "lr_decay_iters": 4}
    finetune(train_iters=4, save="whole", log_file="whole.jsonl", **flags)
    assert torch.cuda.is_available() or ", FP8 by plain torch\n" in capsys.readouterr().out
    finetune(train_iters=2, save="parts", log_file="parts.jsonl", **flags)
    finetune(train_iters=4, save="parts", load="parts", log_file="parts.jsonl", **flags)
    assert_same(tensors("parts", 4), tensors("whole", 4))
    assert records("parts.jsonl") == records("whole.jsonl")
    assert all(0 < record["fp8_share"] < 1 for record in json_log("whole.jsonl"))
    finetune(train_iters=5, load="whole", save="plain", bf16=True, lr_decay_iters=4)  # and goes on in bf16
