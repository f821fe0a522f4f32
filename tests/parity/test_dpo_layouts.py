"""DPO in every kind of layout trains as one process does: pairs cut by CP, and other numbers of pairs a rank."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest
import torch

from megatron_glm.config import LoraConfig, ModelConfig, OptimizerConfig, ParallelConfig, PreferenceConfig, RunConfig
from megatron_glm.data.packing import PackedBatch, Piece, build_batch
from tests.helpers import distributed
from tests.parity.layouts import SEQ_LENGTH, Result, clear_reference, parity_model, run_config, train_layouts
from tests.parity.test_layouts import FULL, KEPT, ZERO_BUBBLE, compare, layout

pytestmark = pytest.mark.timeout(900)  # the first case of a world size runs all of them

# Tokens of the prompt and of both answers: of four packs, one without a pair. Ranks' rows are multiples of 16, so that
# both answers of some pairs are cut.
PACKS = ((3, 15, 9), (2, 4, 12)), ((8, 20, 25),), (), ((1, 2, 3), (2, 3, 1), (5, 9, 14))
GRID = {
    2: {
        "dp2": layout(),
        "tp2": layout(tp=2),
        "cp2": layout(cp=2),
        "ep2 kept weights": layout(ep=2, **KEPT),
        "pp2 full recompute": layout(pp=2, **FULL),
        "pp2 zero bubble": layout(pp=2, **ZERO_BUBBLE),
    },
    4: {
        "tp2 cp2": layout(tp=2, cp=2),
        "dp2 cp2": layout(cp=2),
        "cp2 pp2 vp2": layout(cp=2, pp=2, vp=2),
        "tp2 pp2 ep2": layout(tp=2, pp=2, ep=2),
    },
}
PREFERENCE = PreferenceConfig(
    "dpo", ("a file",), dpo_beta=0.4, dpo_label_smoothing=0.1, dpo_average_log_probs=True, dpo_sft_loss_weight=0.2
)


ADAPTED = {2: {"cp2": layout(cp=2), "pp2 vp2": layout(pp=2, vp=2)}, 4: {"tp2 cp2": layout(tp=2, cp=2)}}


def pack(model: ModelConfig, seed: int, step: int, index: int) -> PackedBatch:
    generator = torch.Generator().manual_seed(seed * 100003 + step * 101 + index)
    pieces = []
    for prompt, *answers in PACKS[index % 4]:
        ids = torch.randint(0, model.vocab_size, (prompt + sum(answers),), generator=generator)
        for part in ids[prompt:].split(answers):
            reference = -3.0 * len(part) * torch.rand((), generator=generator).item()
            targets = torch.arange(prompt + len(part)).numpy() >= prompt
            pieces.append(Piece(torch.cat([ids[:prompt], part]).numpy(), targets, reference=reference))
    return build_batch(pieces, SEQ_LENGTH)


def unknown(model: ModelConfig, seed: int, step: int, index: int) -> PackedBatch:
    """The same without a reference: it is the model without its adapters."""
    return replace(pack(model, seed, step, index), reference=None)


def configured(parallel: ParallelConfig, seed: int) -> RunConfig:
    run = run_config(parity_model(4), parallel, 4, seed)
    return replace(run, preference=PREFERENCE, optimizer=OptimizerConfig(lr=1e-3, adam_eps=1e-3, clip_grad=0.5))


@cache
def reference() -> tuple[int, Result]:
    return clear_reference(lambda seed: configured(ParallelConfig(), seed), pack)


@cache
def outcome(world_size: int) -> dict[str, Result]:
    cases = [(name, configured(parallel, reference()[0])) for name, (_, parallel) in GRID[world_size].items()]
    return distributed.run(world_size, train_layouts, cases, pack, timeout=600)[0]


@pytest.mark.parametrize(("world_size", "name"), [(size, name) for size, cases in GRID.items() for name in cases])
def test_layout_trains_pairs_as_one_process(world_size, name):
    result, expected = outcome(world_size)[name], reference()[1]
    compare(result, expected)
    for ours, one in zip(result.others, expected.others, strict=True):
        assert ours == pytest.approx(one, abs=1e-5)
    assert {"dpo", "rewards/margins", "logps/chosen"} < expected.others[0].keys()
    assert expected.others[-1]["dpo"] != expected.others[0]["dpo"]


def adapted(parallel: ParallelConfig, seed: int) -> RunConfig:
    optimizer = OptimizerConfig(lr=1e-2, adam_eps=1e-3, clip_grad=0.0)
    plain = PreferenceConfig("dpo", dpo_beta=0.4)
    return replace(configured(parallel, seed), preference=plain, lora=LoraConfig(lora_rank=8), optimizer=optimizer)


@cache
def adapted_reference() -> tuple[int, Result]:
    return clear_reference(lambda seed: adapted(ParallelConfig(), seed), unknown)


@pytest.mark.parametrize("world_size", ADAPTED)
def test_the_model_without_adapters_is_the_reference_in_every_layout(world_size):
    seed, expected = adapted_reference()
    cases = [(name, adapted(parallel, seed)) for name, (_, parallel) in ADAPTED[world_size].items()]
    for result in distributed.run(world_size, train_layouts, cases, unknown, timeout=300)[0].values():
        compare(result, expected)
        assert [found["dpo"] for found in result.others] == pytest.approx([o["dpo"] for o in expected.others], abs=1e-5)
    assert expected.others[0]["dpo"] == pytest.approx(math.log(2), abs=1e-6)
    assert expected.others[2]["dpo"] < expected.others[0]["dpo"] - 1e-4  # it has moved from the reference
