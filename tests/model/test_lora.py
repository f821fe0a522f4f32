"""Adapters against a model whose weights they are merged into, by output and by gradients made by hand."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_glm.checkpoint.adapters import Base, adapter_state, read_adapter_state
from megatron_glm.config import LoraConfig, OptimizerConfig, RunConfig
from megatron_glm.config.lora import ADAPTABLE, TARGETS, with_stored
from megatron_glm.config.parameters import adapter_parameters
from megatron_glm.model.adapters import without_adapters
from megatron_glm.model.init import initialize_weights
from megatron_glm.model.pack import PackRows
from megatron_glm.model.trained import is_trained
from megatron_glm.ops.grad_sum import Products
from megatron_glm.training.optimizer import build_optimizer
from tests.helpers.reference import gradient_errors, run_chunk, single_chunk, small_config

LENGTHS = 11, 1, 18
ROWS = 32


def adapted(lora: LoraConfig, recompute: str = "none", **changes):
    torch.manual_seed(0)
    chunk = single_chunk(small_config(**changes), recompute, lora)
    initialize_weights(chunk, 0)
    with torch.no_grad():
        for name, parameter in chunk.named_parameters():
            if name.endswith("lora_B"):
                parameter.normal_(0.0, 0.1)
    return chunk


def work(chunk) -> tuple[Tensor, Tensor, PackRows]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, chunk.config.vocab_size, (ROWS,), generator=generator)
    labels = tokens.roll(-1)
    labels[torch.tensor(LENGTHS).cumsum(0) - 1] = -100
    labels[sum(LENGTHS) :] = -100
    return tokens, labels, PackRows.build(chunk.config, LENGTHS, ROWS)


def merged(chunk, lora: LoraConfig):
    """A model without adapters that computes the same, all of whose trunk is trained; and the pairs of matrices.

    Pairs: {name of A without its end: (name of the weight, its rows, A, B, scale)}.
    """
    plain, pairs = single_chunk(chunk.config), {}
    ours = dict(chunk.named_parameters())
    weights = {name: value.clone() for name, value in chunk.state_dict().items() if not name.endswith(("_A", "_B"))}
    for name in adapter_parameters(chunk.config, lora):
        if not name.endswith("lora_A"):
            continue
        stem = name.removesuffix("lora_A")
        a, b = ours[name].detach(), ours[f"{stem}lora_B"].detach()
        _, scale = lora.rank_and_scale(expert=a.dim() == 3)
        weight, rows = f"{stem}weight", slice(None)
        if a.dim() == 3:
            matrix = stem.rpartition(".")[2].rstrip("_")
            half = chunk.config.moe_intermediate_size
            weight = f"{stem.rpartition('.')[0]}.{'down' if matrix == 'down' else 'gate_up'}"
            rows = {"gate": slice(half), "up": slice(half, None), "down": slice(None)}[matrix]
        at = weights[weight][:, rows] if a.dim() == 3 else weights[weight]
        at += scale * (b @ a)
        pairs[stem] = weight, rows, a, b, scale
    plain.load_state_dict(weights)
    return plain, pairs


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_outputs_and_gradients_are_those_of_merged_weights(recompute):
    lora = LoraConfig(4, 12, 8, lora_target_modules=ADAPTABLE, lora_rslora=recompute == "full")
    chunk = adapted(lora, recompute)
    plain, pairs = merged(chunk, lora)
    ours, truth = run_chunk(chunk, *work(chunk)), run_chunk(plain, *work(plain))
    assert truth.selections.gap > 1e-6
    torch.testing.assert_close(ours.logits, truth.logits, rtol=1e-5, atol=3e-5)
    expected = {}
    for stem, (weight, rows, a, b, scale) in pairs.items():
        gradient = truth.gradients[weight]
        gradient = gradient[:, rows] if a.dim() == 3 else gradient
        expected[f"{stem}lora_A"], expected[f"{stem}lora_B"] = scale * b.mT @ gradient, scale * gradient @ a.mT
    assert len(expected) == 4 * 10 + 6 + 3 * 12
    errors = gradient_errors(ours.gradients, expected)
    assert max(errors.values()) < 1e-5, sorted(errors.items(), key=lambda item: -item[1])[:3]


def test_an_adapter_begins_as_the_frozen_model_bit_for_bit():
    lora = LoraConfig(lora_rank=8)
    chunk, plain = single_chunk(small_config(), lora=lora), single_chunk(small_config())
    initialize_weights(chunk, 0)
    initialize_weights(plain, 0)
    ours, truth = run_chunk(chunk, *work(chunk)), run_chunk(plain, *work(plain))
    assert torch.equal(ours.logits, truth.logits) and torch.equal(ours.loss, truth.loss)
    first = chunk.layers["1"].self_attn.q_a_proj.lora_A
    assert 0.9 * 32**-0.5 < first.abs().max() < 32**-0.5, "uniform up to 1 / sqrt(in)"


def test_without_adapters_the_model_is_the_frozen_one_and_then_again_the_adapted():
    chunk, plain = adapted(LoraConfig(lora_rank=8)), single_chunk(small_config())
    initialize_weights(plain, 0)
    before = run_chunk(chunk, *work(chunk)).logits
    with without_adapters([chunk]), torch.no_grad():
        hidden, *_ = chunk_forward(chunk)
        assert torch.equal(hidden, chunk_forward(plain)[0])
    assert torch.equal(run_chunk(chunk, *work(chunk)).logits, before)


def chunk_forward(chunk):
    from tests.helpers.reference import forward

    tokens, _, pack = work(chunk)
    return forward(chunk, tokens, pack)


def test_no_product_makes_a_gradient_of_a_frozen_weight(monkeypatch):
    lora, shapes = LoraConfig(lora_rank=8), []
    chunk = adapted(lora)
    for name in ("weight_gradient", "add_weight_gradient"):
        own = getattr(Products, name)
        monkeypatch.setattr(Products, name, lambda *args, own=own: shapes.append(own(*args).shape) or own(*args))
    run_chunk(chunk, *work(chunk))
    assert shapes and all(8 in shape[-2:] for shape in shapes), "one of the two dims is the rank"
    optimizer = build_optimizer(OptimizerConfig(), [chunk])
    held = {id(parameter) for parameter in optimizer.state}
    assert held == {id(p) for name, p in chunk.named_parameters() if name.endswith(("lora_A", "lora_B"))}


def test_an_expert_without_rows_has_gradients_of_zero():
    chunk = adapted(LoraConfig(lora_rank=8))
    for router in chunk.routers():
        router.e_score_correction_bias[3] = -10.0  # nobody chooses expert 3
    gradients = run_chunk(chunk, *work(chunk)).gradients
    found = [gradient for name, gradient in gradients.items() if ".experts." in name and "_lora_" in name]
    assert len(found) == 18 and all(not gradient[3].any() and gradient[2].any() for gradient in found)


def test_which_weights_have_one():
    config = small_config(num_nextn_predict_layers=1)
    every = adapter_parameters(config, LoraConfig(lora_rank=8))
    assert not any(word in name for name in every for word in ("kv_b", "indexer", "gate.l", "layers.4", "norm", "head"))
    attention = adapter_parameters(config, LoraConfig(lora_rank=8, lora_target_modules=("q_a_proj", "o_proj")))
    assert {name.split(".", 2)[2] for name in attention} == {
        f"self_attn.{module}.lora_{end}" for module in ("q_a_proj", "o_proj") for end in "AB"
    }
    experts = adapter_parameters(config, LoraConfig(lora_rank=8, lora_target_modules=("experts",)))
    assert len(experts) == 3 * 6 and all(".mlp.experts." in name for name in experts)
    assert all(is_trained(config, name, {"adapters"}) and not is_trained(config, name) for name in every)


@pytest.mark.parametrize(
    ("lora", "changes", "words"),
    [
        ({"lora_alpha": 16.0}, {}, "--lora-alpha 16.0 needs --lora-rank"),
        ({"lora_rank": 8, "lora_target_modules": ("wk",)}, {}, "--lora-target-modules wk: the loss has no gradient"),
        ({"lora_rank": 8, "lora_target_modules": ("q_proj",)}, {}, "q_proj is none of q_a_proj"),
        ({"lora_rank": 4}, {}, r"--lora-rank \(4\) must be a multiple of 8.*; --lora-expert-rank gives them"),
        ({"base": "b"}, {}, "--base b is the model under the adapters of --load, which holds none"),
        ({"base_precision": "fp8"}, {}, "--base-precision fp8 is of the model under adapters: --load holds none"),
        ({"lora_rank": 8, "lora_expert_rank": 12}, {}, r"--lora-expert-rank \(12\) must be a multiple of 8"),
        ({"lora_rank": 4, "lora_expert_rank": 8, "lora_target_modules": ("o_proj",)}, {}, "no routed expert"),
        ({"lora_rank": 8, "lora_alpha": 0.0}, {}, "--lora-alpha is 0"),
        ({"lora_rank": 8}, {"optimizer": OptimizerConfig(moe_router_bias_update_rate=1e-3)}, "trained alone"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(lora, changes, words):
    config = RunConfig(small_config(), lora=LoraConfig(**lora))
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(config, **changes)._check_adapters()


STORED = LoraConfig(lora_rank=8, lora_target_modules=("q_a_proj", "experts"))


def stored_with(tmp_path: Path, **given) -> LoraConfig:
    state = adapter_state(STORED, Base(tmp_path, "digest"))
    (tmp_path / "state.json").write_text(json.dumps(state))
    return with_stored(given, tmp_path)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"lora_rank": 8, "lora_alpha": 16.0, "lora_expert_rank": 8},  # the defaults, spelled out
        {"lora_target_modules": ("experts", "q_a_proj"), "lora_rslora": False},
    ],
)
def test_flags_may_say_again_what_the_adapters_are(tmp_path: Path, given: dict):
    assert stored_with(tmp_path, **given, base="moved") == dataclasses.replace(STORED, base="moved")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"lora_rank": 16}, "--lora-rank 16, and the adapters of .* have 8"),
        ({"lora_rank": 0}, "--lora-rank 0, and the adapters of .* have 8"),
        ({"lora_alpha": 8.0}, "--lora-alpha 8.0, and the adapters of .* have 16.0"),
        ({"lora_expert_rank": 16}, "--lora-expert-rank 16, and the adapters of .* have 8"),
        (
            {"lora_target_modules": TARGETS},
            "--lora-target-modules down_proj .*, and the adapters of .* experts q_a_proj",
        ),
        ({"lora_rslora": True}, "--lora-rslora True, and the adapters of .* have False"),
    ],
)
def test_flags_that_say_something_else_are_refused(tmp_path: Path, given: dict, words: str):
    with pytest.raises(ValueError, match=words):
        stored_with(tmp_path, **given)


def test_settings_of_a_later_version_are_named(tmp_path: Path):
    state = adapter_state(STORED, Base(tmp_path, "digest"))
    (tmp_path / "state.json").write_text(json.dumps(state | {"lora": state["lora"] | {"lora_new": 1}}))
    assert with_stored({}, tmp_path) == LoraConfig()
    with pytest.raises(ValueError, match=r"state\.json is damaged, or of a later version: .*lora_new"):
        read_adapter_state(tmp_path)
