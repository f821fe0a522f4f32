"""A small model as a Hugging Face folder, with tokenizer and chat template, that transformers loads, too."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from megatron_glm.config.model import ModelConfig
from tests.helpers import hf_folder
from tests.helpers.rows import chat_folder, tokenizer

SHAPE = {
    "num_hidden_layers": 3,
    "indexer_types": ["full", "shared", "full"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "vocab_size": 272,
    "hidden_size": 48,
    "num_attention_heads": 4,
    "num_nextn_predict_layers": 0,
    "index_topk": 8,
    "pad_token_id": 0,
    "eos_token_id": [tokenizer().token_to_id(token) for token in ("<|endoftext|>", "<|user|>", "<|observation|>")],
}


def make(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Random weights in bf16, each scaled by its width, so that logits are of the size of one."""
    raw = hf_folder.tiny_config(**SHAPE | changes)
    folder.parent.mkdir(parents=True, exist_ok=True)
    (folder.parent / "shape.json").write_text(json.dumps(raw))
    tensors = hf_folder.random_tensors(ModelConfig.from_hf(folder.parent / "shape.json"), seed)
    for key, tensor in tensors.items():
        tensor.mul_(2 * tensor.shape[-1] ** -0.5) if tensor.dim() > 1 else tensor.mul_(0.1).add_(key.endswith("weight"))
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    chat_folder(folder)
    ends = {"eos_token_id": raw["eos_token_id"], "pad_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps(ends))
    return folder


@cache
def in_transformers(folder: Path) -> torch.nn.Module:
    """The same model there, in fp32."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
