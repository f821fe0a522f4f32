"""Small random Hugging Face folders, laid out as the released ones are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from megatron_glm.checkpoint import hf
from megatron_glm.config.model import ModelConfig

SIDE_FILES = {
    "generation_config.json": b'{"eos_token_id": [4080],\r\n "top_p":0.95}',
    "tokenizer.json": '{"model": "ü"}'.encode(),
    "chat_template.jinja": b"[gMASK]<sop>{% for m in messages %}{% endfor %}\n\n",
    "additional/other.jinja": b"x",
}


def tiny_config(**changes: Any) -> dict[str, Any]:
    """Content of a `config.json`: glm5.2-tiny (6 layers, MoE, IndexShare, MTP) with odd sizes."""
    raw = ModelConfig.from_hf("glm5.2-tiny").to_hf()
    return raw | {"vocab_size": 131, "hidden_size": 72, "moe_intermediate_size": 20, "head_dim": 7} | changes


def random_tensors(config: ModelConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """Every tensor of the model by Hugging Face key, in key order."""
    generator = torch.Generator().manual_seed(seed)
    return {
        tensor.key: torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        for tensor in hf.all_hf_tensors(config)
    }


def write_folder(
    folder: Path, raw: dict[str, Any], tensors: dict[str, torch.Tensor], place: dict[str, int] | None = None
) -> None:
    """Writes config.json, side files and three shards with an index; `place` puts single tensors into a shard."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw, indent=3))
    for name, content in SIDE_FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    (folder / ".cache").mkdir()
    (folder / ".cache" / "download.lock").write_text("")
    shards: list[dict[str, torch.Tensor]] = [{}, {}, {}]
    for number, (key, tensor) in enumerate(tensors.items()):
        shards[(place or {}).get(key, number * 3 // len(tensors))][key] = tensor
    weight_map = {}
    for number, shard in enumerate(shards):
        file = f"model-{number + 1:05d}-of-00003.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def make_folder(folder: Path, seed: int = 0, **changes: Any) -> dict[str, torch.Tensor]:
    """A complete random folder; returns its tensors by key."""
    raw = tiny_config(**changes)
    folder.parent.mkdir(parents=True, exist_ok=True)
    (folder.parent / "shape.json").write_text(json.dumps(raw))
    tensors = random_tensors(ModelConfig.from_hf(folder.parent / "shape.json"), seed)
    write_folder(folder, raw, tensors)
    return tensors


def read_folder(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a Hugging Face folder, read by the safetensors package through the index."""
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    tensors = {}
    for file in sorted(set(weight_map.values())):
        shard = load_file(folder / file)
        assert {key for key, name in weight_map.items() if name == file} == shard.keys()
        tensors |= shard
    return tensors


def assert_same_tensors(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    """Same keys, dtypes, shapes and bits."""
    assert left.keys() == right.keys()
    for key, tensor in left.items():
        assert tensor.dtype == right[key].dtype and tensor.shape == right[key].shape, key
        assert torch.equal(tensor.view(torch.uint8), right[key].view(torch.uint8)), key
