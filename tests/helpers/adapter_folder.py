"""Checkpoints of adapters on small Hugging Face folders, and tools/export_adapter.py on them."""

from __future__ import annotations

import runpy
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_glm.checkpoint import hf, sharded
from megatron_glm.checkpoint.adapters import Base, adapter_state
from megatron_glm.config import LoraConfig, ModelConfig
from megatron_glm.config.parameters import adapter_parameters
from megatron_glm.parallel.shard import Rectangle
from tests.helpers import hf_folder
from tests.helpers.reference import small_config

TOOLS = Path(__file__).resolve().parents[2] / "tools"
MODEL = small_config(dtype="float32", num_nextn_predict_layers=1)
LORA = LoraConfig(lora_rank=16, lora_alpha=32, lora_expert_rank=8)
ATTENTION = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj")
TOKENS = torch.randint(0, MODEL.vocab_size, (40,), generator=torch.Generator().manual_seed(2))
PEFT_PREFIX = "base_model.model.model."


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


def hf_logits(model: torch.nn.Module) -> Tensor:
    """[40, V], of TOKENS."""
    with torch.no_grad():
        return model.eval()(TOKENS.unsqueeze(0)).logits[0]


def assert_near(ours: Tensor, theirs: Tensor) -> None:
    """Within 1e-5 of the largest."""
    assert (ours - theirs).abs().max() < 1e-5 * theirs.abs().max()


def hf_model(folder: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", experts_implementation="eager")
