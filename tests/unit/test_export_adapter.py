"""Adapters to PEFT and back, and merged into their model, against the model that computes with them."""

from __future__ import annotations

import json
import os
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_glm.checkpoint import convert, hf, report, sharded
from megatron_glm.checkpoint.adapters import AdapterCheckpoint, Base, adapter_state
from megatron_glm.checkpoint.output import Run
from megatron_glm.checkpoint.safetensors_io import read_header
from megatron_glm.config import LoraConfig, ModelConfig
from megatron_glm.config.parameters import adapter_parameters, model_parameters
from megatron_glm.ops.fp8 import dequantize, quantize
from megatron_glm.parallel.shard import Rectangle
from tests import hf_folder
from tests.reference import small_config

TOOLS = Path(__file__).resolve().parents[2] / "tools"
MODEL = small_config(dtype="float32", num_nextn_predict_layers=1)
LORA = LoraConfig(lora_rank=16, lora_alpha=32, lora_expert_rank=8)
ATTENTION = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj")
PEFT_PREFIX = "base_model.model.model."


@pytest.fixture(autouse=True)
def no_sync(monkeypatch: pytest.MonkeyPatch):
    """Waiting for the disk shows nothing here and takes most of the time."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def tool(*words: object) -> int:
    """tools/export_adapter.py in this process: its exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(TOOLS))
        patch.setattr(sys, "argv", ["export_adapter.py", *map(str, words)])
        return runpy.run_path(str(TOOLS / "export_adapter.py"))["main"]()


def random_model(folder: Path, config: ModelConfig = MODEL) -> Path:
    """A Hugging Face folder with weights of the size at which a model computes something."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for tensor in hf.all_hf_tensors(config):
        noise = torch.randn(tensor.shape, generator=generator)
        values = 1 + 0.1 * noise if len(tensor.shape) == 1 else noise * tensor.shape[-1] ** -0.5
        tensors[tensor.key] = values.to(tensor.dtype)
    folder.parent.mkdir(parents=True, exist_ok=True)
    hf_folder.write_folder(folder, config.to_hf(), tensors)
    return folder


def random_adapters(
    folder: Path, base: Path, lora: LoraConfig = LORA, config: ModelConfig = MODEL
) -> dict[str, Tensor]:
    """A checkpoint of iteration 3 in `folder`; returns its tensors by canonical name."""
    generator = torch.Generator().manual_seed(1)
    tensors = {
        name: torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5
        for name, parameter in adapter_parameters(config, lora).items()
    }
    rectangles = [Rectangle(n, tuple(t.shape), (0,) * t.dim(), t, owner=True) for n, t in tensors.items()]
    rectangles += [replace(r, name=f"optimizer.exp_avg.{r.name}") for r in rectangles]
    sharded.save(folder, 3, rectangles, adapter_state(lora, Base.of(base)), config, base, None)
    return tensors


def pairs(tensors: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """(A, B) by the Hugging Face name of their matrix, "model.layers.1.mlp.experts.0.gate_proj"."""
    found = {}
    for name, first in tensors.items():
        if not name.endswith("lora_A"):
            continue
        second = tensors[f"{name[:-1]}B"]
        if first.dim() == 2:
            found[f"model.{name.removesuffix('.lora_A')}"] = first, second
        else:
            owner, _, matrix = name.removesuffix("_lora_A").rpartition(".")
            halves = zip(first, second, strict=True)
            found |= {f"model.{owner}.{e}.{matrix}_proj": pair for e, pair in enumerate(halves)}
    return found


def deltas(tensors: dict[str, Tensor], lora: LoraConfig) -> dict[str, Tensor]:
    """What is added to each weight, by its Hugging Face key."""
    scales = {expert: lora.rank_and_scale(expert)[1] for expert in (False, True)}
    return {f"{name}.weight": scales[".experts." in name] * b @ a for name, (a, b) in pairs(tensors).items()}


def stored_tensors(folder: Path) -> dict[str, Tensor]:
    """All that an `iter_…` folder holds."""
    reader, found = sharded.Reader(folder), {}
    for name, (shape, dtype) in reader.shapes.items():
        found[name] = torch.empty(shape, dtype=dtype)
        reader.read([Rectangle(name, shape, (0,) * len(shape), found[name], owner=True)])
    return found


EXPORTED = {
    "smaller rank of the experts": LORA,
    "larger": replace(LORA, lora_expert_rank=32),
    "the same, rsLoRA": replace(LORA, lora_expert_rank=None, lora_rslora=True),
    "ratio that is rounded": replace(LORA, lora_expert_rank=24),
    "another ratio, rsLoRA": replace(LORA, lora_rslora=True),
    "attention": LoraConfig(lora_rank=5, lora_target_modules=ATTENTION),
    "experts": LoraConfig(lora_rank=8, lora_target_modules=("experts",)),
}


@pytest.mark.parametrize("case", EXPORTED)
def test_a_peft_folder_has_one_rank_and_scale_and_comes_back(tmp_path: Path, case: str):
    base, lora = random_model(tmp_path / "hf"), EXPORTED[case]
    tensors = random_adapters(tmp_path / "c", base, lora)
    assert tool("--load", tmp_path / "c", "--to-peft", tmp_path / "peft", "--verify") == 0
    settings = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(base)
    assert "rank_pattern" not in settings and "use_rslora" not in settings
    scale, stored = settings["lora_alpha"] / settings["r"], load_file(tmp_path / "peft" / "adapter_model.safetensors")
    ours = {f"base_model.model.{name}": pair for name, pair in pairs(tensors).items()}
    assert {f"{name}.lora_{end}.weight" for name in ours for end in "AB"} == stored.keys()
    assert settings["target_modules"] == sorted({name.rpartition(".")[2] for name in ours})
    for name, (a, b) in ours.items():
        first, second = stored[f"{name}.lora_A.weight"], stored[f"{name}.lora_B.weight"]
        assert first.shape[0] == second.shape[1] == settings["r"]
        expected = lora.rank_and_scale(".experts." in name)[1] * b @ a
        torch.testing.assert_close(scale * second @ first, expected, rtol=1e-5, atol=1e-5)
    assert tool("--from-peft", tmp_path / "peft", "--save", tmp_path / "back") == 0
    back = AdapterCheckpoint(tmp_path / "back" / "iter_0000000")
    assert back.lora == lora and back.base == Base.of(base)
    assert (back.folder / "hf" / "tokenizer.json").is_file()
    found = stored_tensors(back.folder)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        tolerance = 1e-6 if "ratio" in case else 0.0
        torch.testing.assert_close(found[name], tensor, rtol=tolerance, atol=0)


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
    folder = peft_folder(tmp_path / "peft", cut, **patterns)
    assert tool("--from-peft", folder, "--save", tmp_path / "back", "--base", base) == 0
    back = AdapterCheckpoint(tmp_path / "back" / "iter_0000000")
    assert back.lora.lora_target_modules == ("o_proj", "experts") and back.lora.lora_expert_rank is None
    found = deltas(stored_tensors(back.folder), back.lora)
    assert found.keys() == deltas(tensors, LORA).keys()
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
    "ranks": (ALL | {f"{AT}.o_proj.lora_B.weight": torch.ones(32, 4)}, "has rank 8"),
    "nothing": ({}, "holds no adapter"),
}


@pytest.mark.parametrize("case", BAD)
def test_tensors_that_do_not_fit_are_refused_by_name(tmp_path: Path, capfd: pytest.CaptureFixture[str], case: str):
    tensors, message = BAD[case]
    folder = peft_folder(tmp_path / "peft", tensors)
    assert tool("--from-peft", folder, "--save", tmp_path / "back", "--base", random_model(tmp_path / "hf")) == 1
    assert message in capfd.readouterr().err and not (tmp_path / "back").exists()


def in_fp8(folder: Path, scales_first: bool = False) -> dict[str, Tensor]:
    """Rewrites a folder in the form of the FP8 releases, scales in another file than their weights if asked."""
    source = hf.HFCheckpoint(folder)
    fp8 = {tensor.key for tensor in hf.all_hf_tensors(source.config) if tensor.fp8}
    found: dict[str, Tensor] = {}
    for key, tensor in hf_folder.read_folder(folder).items():
        if key in fp8:
            found[key], found[f"{key}_scale_inv"] = quantize(tensor)
        else:
            found[key] = tensor
    raw = json.loads((folder / "config.json").read_text()) | {
        "quantization_config": hf.quantization_config(source.config)
    }
    place = {key: 0 if key.endswith("_scale_inv") else 2 for key in found} if scales_first else None
    new = folder.with_name("fp8")
    hf_folder.write_folder(new, raw, found, place)
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_merged_is_rounded_once_and_the_rest_keeps_its_bits(tmp_path: Path, dtype: str, checkpoint: bool):
    config = replace(MODEL, dtype=dtype)
    folder = base = random_model(tmp_path / "hf", config)
    if checkpoint:
        convert.Import(hf.HFCheckpoint(folder), tmp_path / "base").write(Run())
        base = tmp_path / "base"
    tensors = random_adapters(tmp_path / "c", base, config=config)
    assert tool("--load", tmp_path / "c", "--merge", "--to-hf", tmp_path / "out", "--verify") == 0
    expected = hf_folder.read_folder(folder)
    for key, delta in deltas(tensors, LORA).items():
        whole = expected[key].float() + delta
        expected[key] = whole.to(expected[key].dtype)
    found = hf_folder.read_folder(tmp_path / "out")
    adapted = deltas(tensors, LORA)
    assert found.keys() == expected.keys() and len(adapted) == 4 * 4 + 3 * 4 + 3 * 3 * 8
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype
        if key in adapted:  # one rounding may fall to the other side
            torch.testing.assert_close(found[key], tensor, rtol=1e-6 if dtype == "float32" else 2**-7, atol=1e-6)
        else:
            assert torch.equal(found[key], tensor), key
    for name in ("config.json", "tokenizer.json"):
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()


@pytest.mark.parametrize("scales_first", [False, True])
def test_merged_fp8_is_the_merged_bf16_quantised_by_the_export(tmp_path: Path, scales_first: bool):
    config = replace(MODEL, dtype="bfloat16", hidden_size=160, moe_intermediate_size=136)
    random_model(tmp_path / "hf", config)
    weights, folder = in_fp8(tmp_path / "hf", scales_first), tmp_path / "fp8"
    tensors = random_adapters(tmp_path / "c", folder, config=config)
    assert tool("--load", tmp_path / "c", "--merge", "--to-hf", tmp_path / "out", "--verify") == 0
    found, adapted = hf_folder.read_folder(tmp_path / "out"), deltas(tensors, LORA)
    assert found.keys() == weights.keys()
    for key, tensor in weights.items():
        weight = key.removesuffix("_scale_inv")
        if weight not in adapted:
            assert torch.equal(found[key].view(torch.uint8), tensor.view(torch.uint8)), key
        elif key == weight:
            whole = dequantize(tensor, weights[f"{key}_scale_inv"], dtype=torch.bfloat16).float() + adapted[key]
            values, scales = quantize(whole.bfloat16())
            torch.testing.assert_close(found[f"{key}_scale_inv"], scales, rtol=2**-7, atol=0)
            error = (dequantize(found[key], found[f"{key}_scale_inv"]) - dequantize(values, scales)).abs()
            assert (error > 0).float().mean() < 0.01, "only where a sum of products is rounded to the other side"
            assert found[key].dtype == torch.float8_e4m3fn
    hf.HFCheckpoint(tmp_path / "out")
    for name in ("config.json", "model.safetensors.index.json"):
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()


def test_experts_of_the_newer_form_stay_in_one_tensor(tmp_path: Path):
    folder = random_model(tmp_path / "hf")
    released, tensors = hf_folder.read_folder(folder), {}
    for key, tensor in released.items():
        if ".experts." not in key:
            tensors[key] = tensor
    for name, parameter in model_parameters(MODEL).items():
        if parameter.expert_matrices:
            owner = f"model.{name.rpartition('.')[0]}"
            matrices = [[released[f"{owner}.{e}.{m}.weight"] for m in parameter.expert_matrices] for e in range(8)]
            tensors[parameter.hf_key] = torch.stack([torch.cat(parts) for parts in matrices])
    hf_folder.write_folder(tmp_path / "fused", MODEL.to_hf(), tensors)
    adapters = random_adapters(tmp_path / "c", tmp_path / "fused")
    assert tool("--load", tmp_path / "c", "--merge", "--to-hf", tmp_path / "out") == 0
    found, added = hf_folder.read_folder(tmp_path / "out"), deltas(adapters, LORA)
    assert found.keys() == tensors.keys()
    gate_up = found["model.layers.2.mlp.experts.gate_up_proj"][5]
    for rows, matrix in ((slice(24), "gate_proj"), (slice(24, None), "up_proj")):
        key = f"model.layers.2.mlp.experts.5.{matrix}.weight"
        torch.testing.assert_close(gate_up[rows], released[key] + added[key], rtol=1e-6, atol=1e-6)
    mtp = "model.layers.4.mlp.experts.gate_up_proj"
    assert torch.equal(found[mtp], tensors[mtp])


def hf_logits(model: torch.nn.Module) -> Tensor:
    tokens = torch.randint(0, MODEL.vocab_size, (1, 40), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        return model.eval()(tokens).logits[0]


def assert_near(ours: Tensor, theirs: Tensor) -> None:
    """Within 1e-5 of the largest."""
    assert (ours - theirs).abs().max() < 1e-5 * theirs.abs().max()


def hf_model(folder: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", experts_implementation="eager")


@pytest.mark.parametrize("expert_rank", [8, 24])
def test_peft_computes_what_the_merged_model_does(tmp_path: Path, expert_rank: int):
    """On attention and routed experts: the others it leaves out (its issue 3711)."""
    peft = pytest.importorskip("peft")
    base = random_model(tmp_path / "hf")
    lora = replace(LORA, lora_expert_rank=expert_rank, lora_target_modules=(*ATTENTION, "experts"))
    random_adapters(tmp_path / "c", base, lora)
    assert tool("--load", tmp_path / "c", "--to-peft", tmp_path / "peft") == 0
    assert tool("--load", tmp_path / "c", "--merge", "--to-hf", tmp_path / "out") == 0
    plain, merged = (hf_logits(hf_model(folder)) for folder in (base, tmp_path / "out"))
    adapted = hf_logits(peft.PeftModel.from_pretrained(hf_model(base), str(tmp_path / "peft")))
    assert_near(adapted, merged)
    assert (plain - merged).abs().max() > 0.1


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


def test_a_base_that_moved_is_found_and_another_refused_with_both_digests(tmp_path: Path, capfd):
    base, other = random_model(tmp_path / "hf"), random_model(tmp_path / "other", replace(MODEL, rope_theta=5e5))
    random_adapters(tmp_path / "c", base)
    base.rename(tmp_path / "moved")
    merge = ["--load", tmp_path / "c", "--merge", "--to-hf", tmp_path / "out"]
    assert tool(*merge) == 1
    assert f"was {base}, which does not exist: --base DIR" in capfd.readouterr().err
    assert tool(*merge, "--base", other) == 1
    error = capfd.readouterr().err
    assert Base.of(other).digest in error and Base.of(tmp_path / "moved").digest in error
    assert not (tmp_path / "out").exists()
    assert tool(*merge, "--base", tmp_path / "moved") == 0
    (tmp_path / "moved" / "model-00002-of-00003.safetensors").write_bytes(b"shorter")
    assert tool("--load", tmp_path / "c", "--to-peft", tmp_path / "p", "--base", tmp_path / "moved") == 1
    assert "is not the model under the adapters" in capfd.readouterr().err


def test_a_whole_model_is_no_adapter_and_adapters_no_whole_model(tmp_path: Path, capfd):
    base = random_model(tmp_path / "hf")
    convert.Import(hf.HFCheckpoint(base), tmp_path / "base").write(Run())
    assert tool("--load", tmp_path / "base", "--to-peft", tmp_path / "p") == 1
    assert "holds a whole model, no adapters" in capfd.readouterr().err
    random_adapters(tmp_path / "c", base)
    shown: list[str] = []
    report.inspect(tmp_path / "c", data=True, show=shown.append)
    assert "good: every byte" in shown[-1] and Base.of(base).digest in "".join(shown)
    with pytest.raises(ValueError, match="holds adapters alone: tools/export_adapter.py --merge"):
        convert.Export(tmp_path / "c" / "iter_0000003")


def test_notes_say_what_engines_leave_out(tmp_path: Path, capfd):
    base = random_model(tmp_path / "hf")
    random_adapters(tmp_path / "c", base, LoraConfig(lora_rank=8, lora_target_modules=("q_a_proj", "down_proj")))
    assert tool("--load", tmp_path / "c", "--to-peft", tmp_path / "p") == 0
    notes = capfd.readouterr().err
    assert "down_proj as the routed experts' alone" in notes and "SGLang stacks q_a_proj and kv_a_proj" in notes
    random_adapters(tmp_path / "d", base, LoraConfig(lora_rank=8, lora_target_modules=(*ATTENTION, "experts")))
    assert tool("--load", tmp_path / "d", "--to-peft", tmp_path / "q") == 0
    assert "note:" not in capfd.readouterr().err
