"""PEFT folders of either form become checkpoints of adapters; what is not served is refused by name."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron_glm.checkpoint.adapters import AdapterCheckpoint
from megatron_glm.checkpoint.safetensors_io import read_header
from megatron_glm.config import LoraConfig
from tests.helpers.adapter_folder import (
    MODEL,
    PEFT_PREFIX,
    assert_near,
    deltas,
    hf_logits,
    hf_model,
    pairs,
    random_adapters,
    random_model,
    stored_tensors,
    tool,
)


@pytest.fixture(autouse=True)
def no_sync(monkeypatch: pytest.MonkeyPatch):
    """Waiting for the disk shows nothing here and takes most of the time."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def test_bf16_adapters_come_back_as_the_same_file(tmp_path: Path):
    config = replace(MODEL, dtype="bfloat16")
    random_adapters(tmp_path / "c", random_model(tmp_path / "hf", config), config=config)
    for source, between, out in (("c", "", "one"), ("back", "one", "two")):
        if between:
            assert tool("--from-peft", tmp_path / between, "--save", tmp_path / source) == 0
        assert tool("--load", tmp_path / source, "--to-peft", tmp_path / out) == 0
    one, two = ((tmp_path / name / "adapter_model.safetensors").read_bytes() for name in ("one", "two"))
    assert one == two
    entries = read_header(tmp_path / "one" / "adapter_model.safetensors")
    assert {entry.dtype for entry in entries.values()} == {torch.bfloat16}


def fused(tensors: dict[str, Tensor], split: bool) -> dict[str, Tensor]:
    """Adapters in PEFT's own form. split: gate and up have halves of the ranks; else they share gate's A."""
    found = {}
    for name, tensor in tensors.items():
        owner, _, last = name.rpartition(".")
        matrix, _, end = last.partition("_")
        if not owner.endswith(".experts"):
            found[f"{PEFT_PREFIX}{name}.weight"] = tensor
        elif matrix == "down":
            found[f"{PEFT_PREFIX}{owner}.{end}.weight"] = flat(tensor, end)
        elif matrix == "gate":
            other = tensors[f"{owner}.up_{end}"]
            if end == "lora_A":
                both = torch.cat([tensor, other], 1) if split else tensor
            elif split:
                both = torch.stack([torch.block_diag(*pair) for pair in zip(tensor, other, strict=True)])
            else:
                both = torch.cat([tensor, other], 1)
            found[f"{PEFT_PREFIX}{owner}.base_layer.{end}.weight"] = flat(both, end)
    return found


def flat(tensor: Tensor, end: str) -> Tensor:
    """A [E, r, in] -> [E * r, in], B [E, out, r] -> [out, r * E] with the experts innermost."""
    return (tensor.flatten(0, 1) if end == "lora_A" else tensor.permute(1, 2, 0).flatten(1)).contiguous()


def peft_folder(folder: Path, tensors: dict[str, Tensor], **settings) -> Path:
    folder.mkdir(parents=True)
    content = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "lora_dropout": 0.1, "target_modules": ["o_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(content | settings))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@pytest.mark.parametrize("split", [True, False])
def test_peft_s_own_form_of_the_experts_is_read(tmp_path: Path, split: bool):
    base, lora = random_model(tmp_path / "hf"), LoraConfig(lora_rank=8, lora_alpha=16)
    tensors = random_adapters(tmp_path / "c", base, lora)
    if not split:
        tensors |= {n.replace(".gate_", ".up_"): t for n, t in tensors.items() if n.endswith("experts.gate_lora_A")}
    patterns = {"alpha_pattern": {r".*\.gate_up_proj": 32}, "rank_pattern": {r".*\.gate_up_proj": 16}} if split else {}
    folder = peft_folder(tmp_path / "peft", fused(tensors, split), base_model_name_or_path=str(base), **patterns)
    assert tool("--from-peft", folder, "--save", tmp_path / "back") == 0
    back = AdapterCheckpoint(tmp_path / "back" / "iter_0000000")
    assert back.lora.rank_and_scale(True) == back.lora.rank_and_scale(False) == (8, 2.0)
    found = stored_tensors(back.folder)
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor), name


def test_ranks_and_scales_that_differ_become_one(tmp_path: Path):
    """Rank 3 of the experts is filled up to 8, o_proj has its own rank and scale: the function stays."""
    base = random_model(tmp_path / "hf")
    tensors = random_adapters(tmp_path / "c", base, LoraConfig(lora_rank=8, lora_target_modules=("o_proj", "experts")))
    cut = {}
    for name, (a, b) in pairs(tensors).items():
        rank = 3 if "experts" in name else 6 if ".2.self_attn" in name else 8
        cut[f"base_model.model.{name}.lora_A.weight"] = a[:rank].contiguous()
        cut[f"base_model.model.{name}.lora_B.weight"] = b[:, :rank].contiguous()
    patterns = {"alpha_pattern": {r"layers\.2\.self_attn\.o_proj": 5, "up_proj": 7}, "use_rslora": True}
    patterns["rank_pattern"] = {r".*\.experts\..*": 3, r"layers\.2\.self_attn\.o_proj": 6}
    folder = peft_folder(tmp_path / "peft", cut, **patterns)
    assert tool("--from-peft", folder, "--save", tmp_path / "back", "--base", base) == 0
    back = AdapterCheckpoint(tmp_path / "back" / "iter_0000000")
    assert back.lora.lora_target_modules == ("o_proj", "experts") and back.lora.lora_expert_rank is None
    found = deltas(stored_tensors(back.folder), back.lora)
    assert found.keys() == deltas(tensors, back.lora).keys()
    for name, (a, b) in pairs(tensors).items():
        rank = 3 if "experts" in name else 6 if ".2.self_attn" in name else 8
        alpha = 5 if ".2.self_attn.o_proj" in name else 7 if "up_proj" in name else 16
        expected = alpha * rank**-0.5 * b[:, :rank] @ a[:rank]
        torch.testing.assert_close(found[f"{name}.weight"], expected, rtol=1e-5, atol=1e-6)


REFUSED = {
    "use_dora": (dict(use_dora=True), "use_dora is True"),
    "bias": (dict(bias="all"), "bias is 'all'"),
    "another method": (dict(peft_type="IA3"), "peft_type is 'IA3'"),
    "start that changes the model": (dict(init_lora_weights="pissa_niter_4"), "init_lora_weights is 'pissa_niter_4'"),
    "alpha": (dict(lora_alpha=0), "lora_alpha is 0"),
    "alpha without end": (dict(lora_alpha=float("inf")), "lora_alpha is inf"),
    "alpha of a pattern": (dict(alpha_pattern={"o_proj": "8"}), "o_proj is '8'"),
    "patterns": (dict(alpha_pattern=["o_proj"]), "alpha_pattern is ['o_proj']"),
    "rank of a pattern": (dict(rank_pattern={"o_proj": 0}), "o_proj is 0"),
    "another rank": (dict(r=4), "r is 4 for layers."),
    "another rank of a module": (dict(rank_pattern={"o_proj": 4}), "r is 4 for layers."),
    "pattern": (dict(alpha_pattern={"o_proj(": 8}), "'o_proj(' is no regular expression"),
    "no base": (dict(base_model_name_or_path=None), "names no base model: give --base"),
    "base of the hub": (dict(base_model_name_or_path="zai-org/GLM-5.2"), "zai-org/GLM-5.2 is no folder here"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_of_another_function_are_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str], case: str):
    base = random_model(tmp_path / "hf")
    settings, message = REFUSED[case]
    tensors = {f"{PEFT_PREFIX}layers.0.self_attn.o_proj.lora_A.weight": torch.zeros(8, 40)}
    folder = peft_folder(tmp_path / "peft", tensors, **{"base_model_name_or_path": str(base)} | settings)
    assert tool("--from-peft", folder, "--save", tmp_path / "back") == 1
    error = capfd.readouterr().err
    assert message in error and str(folder / "adapter_config.json") in error
    assert not (tmp_path / "back").exists()


def o_proj(layer: int, rank: int = 8) -> dict[str, Tensor]:
    at = f"{PEFT_PREFIX}layers.{layer}.self_attn.o_proj"
    return {f"{at}.lora_A.weight": torch.ones(rank, 40), f"{at}.lora_B.weight": torch.ones(32, rank)}


ALL = {key: tensor for layer in range(4) for key, tensor in o_proj(layer).items()}
AT = f"{PEFT_PREFIX}layers.1.self_attn"
BAD = {
    "a layer without": ({k: v for k, v in ALL.items() if ".2." not in k}, "lacks layers.2.self_attn.o_proj.lora_A"),
    "A alone": ({k: v for k, v in ALL.items() if ".2.self_attn.o_proj.lora_B" not in k}, "lacks layers.2.self_attn.o_"),
    "MTP": (ALL | o_proj(4), "layers.4.self_attn.o_proj.lora_A.weight is of no weight"),
    "kv_b": (ALL | {f"{AT}.kv_b_proj.lora_A.weight": torch.ones(8, 16)}, "kv_b_proj"),
    "norm": (ALL | {f"{AT}.q_a_layernorm.weight": torch.ones(8)}, "is of no adapter of a linear layer"),
    "width": (ALL | {f"{AT}.o_proj.lora_A.weight": torch.ones(8, 41)}, "is [8, 41]"),
    "ranks": (ALL | {f"{AT}.o_proj.lora_B.weight": torch.ones(32, 4)}, "has the rank"),
    "rank 0": (ALL | o_proj(1, rank=0), "torch.float32 [0, 40]"),
    "FP8": (ALL | {k: v.to(torch.float8_e4m3fn) for k, v in o_proj(1).items()}, "torch.float8_e4m3fn [8, 40]"),
    "nothing": ({}, "holds no adapter"),
}


@pytest.mark.parametrize("case", BAD)
def test_tensors_that_do_not_fit_are_refused_by_name(tmp_path: Path, capfd: pytest.CaptureFixture[str], case: str):
    tensors, message = BAD[case]
    folder = peft_folder(tmp_path / "peft", tensors)
    assert tool("--from-peft", folder, "--save", tmp_path / "back", "--base", random_model(tmp_path / "hf")) == 1
    assert message in capfd.readouterr().err and not (tmp_path / "back").exists()


def test_a_pickle_is_refused_by_name(tmp_path: Path, capfd):
    folder = peft_folder(tmp_path / "peft", ALL)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    assert tool("--from-peft", folder, "--save", tmp_path / "back", "--base", random_model(tmp_path / "hf")) == 1
    assert "adapter_model.bin is a pickle" in capfd.readouterr().err


def test_a_folder_that_peft_saves_is_read(tmp_path: Path):
    """Its own form of the experts, B not zero; attention, too."""
    peft = pytest.importorskip("peft")
    base = random_model(tmp_path / "hf")
    targets = dict(target_modules=["o_proj"], target_parameters=["mlp.experts.down_proj", "mlp.experts.gate_up_proj"])
    model = peft.get_peft_model(hf_model(base), peft.LoraConfig(r=8, lora_alpha=24, init_lora_weights=False, **targets))
    model.save_pretrained(tmp_path / "peft")
    assert tool("--from-peft", tmp_path / "peft", "--save", tmp_path / "c", "--base", base) == 0
    assert tool("--load", tmp_path / "c", "--merge", "--to-hf", tmp_path / "out") == 0
    assert_near(hf_logits(hf_model(tmp_path / "out")), hf_logits(model))
