"""Adapters to PEFT and back, and merged into their model, against the model that computes with them."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_glm.checkpoint import convert, hf, merged, report
from megatron_glm.checkpoint.adapters import AdapterCheckpoint, Base
from megatron_glm.checkpoint.output import Run
from megatron_glm.config import LoraConfig
from megatron_glm.config.lora import ADAPTABLE
from megatron_glm.config.parameters import model_parameters
from megatron_glm.model.pack import PackRows
from megatron_glm.ops.fp8 import dequantize, quantize
from tests.helpers import hf_folder
from tests.helpers.adapter_folder import (
    ATTENTION,
    LORA,
    MODEL,
    TOKENS,
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
from tests.helpers.reference import canonical, run_chunk, single_chunk


@pytest.fixture(autouse=True)
def no_sync(monkeypatch: pytest.MonkeyPatch):
    """Waiting for the disk shows nothing here and takes most of the time."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


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


def test_a_merge_that_was_killed_leaves_nothing_of_that_name_and_goes_on(tmp_path: Path, monkeypatch, capfd):
    folder = random_model(tmp_path / "hf")
    random_adapters(tmp_path / "c", folder)
    words = ("--load", tmp_path / "c", "--merge", "--to-hf")
    assert tool(*words, tmp_path / "whole") == 0
    merge, seen = merged._merged, []

    def killed(adapters, name, *rest):
        seen.append(name)
        if len(seen) == 60:
            raise OSError("no room")
        return merge(adapters, name, *rest)

    monkeypatch.setattr(merged, "_merged", killed)
    assert tool(*words, tmp_path / "out") == 1 and not (tmp_path / "out").exists()
    assert "no room" in capfd.readouterr().err
    assert tool(*words, tmp_path / "out", "--resume") == 0
    assert len(seen) - 60 < len(deltas(stored_tensors(tmp_path / "c/iter_0000003"), LORA)), "finished files are kept"
    hf_folder.assert_same_tensors(hf_folder.read_folder(tmp_path / "out"), hf_folder.read_folder(tmp_path / "whole"))


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


@pytest.mark.parametrize(("expert_rank", "attention"), [(8, ATTENTION), (24, ("q_b_proj", "kv_b_proj"))])
def test_peft_computes_what_the_merged_model_does(tmp_path: Path, expert_rank: int, attention: tuple[str, ...]):
    """On attention and routed experts: the others it leaves out (its issue 3711)."""
    peft = pytest.importorskip("peft")
    base = random_model(tmp_path / "hf")
    lora = replace(LORA, lora_expert_rank=expert_rank, lora_target_modules=(*attention, "experts"))
    random_adapters(tmp_path / "c", base, lora)
    assert tool("--load", tmp_path / "c", "--to-peft", tmp_path / "peft") == 0
    assert tool("--load", tmp_path / "c", "--merge", "--to-hf", tmp_path / "out") == 0
    plain, merged = (hf_logits(hf_model(folder)) for folder in (base, tmp_path / "out"))
    adapted = hf_logits(peft.PeftModel.from_pretrained(hf_model(base), str(tmp_path / "peft")))
    assert_near(adapted, merged)
    assert (plain - merged).abs().max() > 0.1


def test_the_merged_model_computes_what_the_adapted_one_does(tmp_path: Path):
    """All adapters, those of shared experts and dense MLPs too, against Hugging Face's class on the merged folder."""
    pytest.importorskip("transformers")
    model, lora = replace(MODEL, num_nextn_predict_layers=0), replace(LORA, lora_target_modules=ADAPTABLE)
    base = random_model(tmp_path / "hf", model)
    tensors = random_adapters(tmp_path / "c", base, lora, model)
    assert tool("--load", tmp_path / "c", "--merge", "--to-hf", tmp_path / "out") == 0
    chunk = single_chunk(model, lora=lora)
    weights = {canonical(name): value for name, value in hf_model(base).state_dict().items()}
    chunk.load_state_dict(weights | tensors)
    pack = PackRows.build(model, (len(TOKENS),), len(TOKENS))
    ours = run_chunk(chunk, TOKENS, TOKENS.roll(-1), pack)
    assert ours.selections.gap > 1e-6
    assert_near(ours.logits, hf_logits(hf_model(tmp_path / "out")))


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


def test_nothing_is_written_into_the_folder_of_the_model(tmp_path: Path, capfd):
    """transformers and this trainer read every safetensors file that they find there."""
    base = random_model(tmp_path / "hf")
    random_adapters(tmp_path / "c", base)
    for words in (("--to-peft",), ("--merge", "--to-hf")):
        assert tool("--load", tmp_path / "c", *words, base / "adapter") == 1
        assert f"{words[-1]} {base / 'adapter'} is in {base}" in capfd.readouterr().err
        assert not (base / "adapter").exists()


def test_notes_say_what_engines_leave_out(tmp_path: Path, capfd):
    base = random_model(tmp_path / "hf")
    random_adapters(tmp_path / "c", base, LoraConfig(8, lora_target_modules=("q_a_proj", "down_proj", "kv_b_proj")))
    assert tool("--load", tmp_path / "c", "--to-peft", tmp_path / "p") == 0
    notes = capfd.readouterr().err
    assert "leaves its adapter out: --merge for it" in notes
    assert "down_proj as the routed experts' alone" in notes and "SGLang stacks q_a_proj and kv_a_proj" in notes
    random_adapters(tmp_path / "d", base, LoraConfig(lora_rank=8, lora_target_modules=(*ATTENTION, "experts")))
    assert tool("--load", tmp_path / "d", "--to-peft", tmp_path / "q") == 0
    assert "note:" not in capfd.readouterr().err
