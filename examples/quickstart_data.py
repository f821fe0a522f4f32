"""Makes the quickstart's input from what is on the machine: a small random GLM-5.2 in the Hugging Face layout and a
chat dataset from the documentation strings of Python's standard library.

    python examples/quickstart_data.py --save DIR [--kernel-sizes]      -> DIR/hf, DIR/train.jsonl, DIR/valid.jsonl
"""

from __future__ import annotations

import signal

from megatron_glm import signals

if __name__ == "__main__":
    signals.install(signal.SIGINT)  # Ctrl-C: one line and exit code 130

import argparse
import ast
import json
import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from megatron_glm.checkpoint.hf import all_hf_tensors
from megatron_glm.config.model import ModelConfig
from megatron_glm.config.source import PRESET_FOLDER

PRESET = PRESET_FOLDER / "glm5.2-tiny.json"
TEMPLATE = Path(__file__).resolve().parents[1] / "tests" / "fixtures" / "glm-4.6-chat_template.jinja"

# In the order of the released tokenizers, where they follow the text tokens too.
SPECIAL_TOKENS = (
    "<|endoftext|> [MASK] [gMASK] [sMASK] <sop> <eop> <|system|> <|user|> <|assistant|> <|observation|> "
    "<think> </think> <tool_call> </tool_call> <tool_response> </tool_response>"
).split()

NOT_DOCUMENTATION = {"site-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip", "pydoc_data"}
# Attention sizes that the GPU kernels serve, those of the released models except heads and top-k.
KERNEL_SIZES = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 192, "v_head_dim": 256}
KERNEL_SIZES |= {"index_head_dim": 128, "index_n_heads": 32, "index_topk": 128, "num_attention_heads": 8}
KERNEL_SIZES |= {"num_key_value_heads": 8}
LONGEST_ANSWER = 500  # characters
VALIDATION_EVERY = 50  # rows


def documented(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    """(dotted name, documentation string) of a module, class or function and of its public members."""
    text = ast.get_docstring(node)
    if text:
        yield name, text
    for child in node.body:
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not child.name.startswith("_"):
            yield from documented(child, f"{name}.{child.name}")


def standard_library() -> dict[str, str]:
    """Documentation strings of the standard library by dotted name, read from its sources without importing them."""
    library = Path(sysconfig.get_paths()["stdlib"])
    found: dict[str, str] = {}
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        private = any(part.startswith(("_", "config-")) for part in parts)
        if parts and not private and not NOT_DOCUMENTATION & set(parts):
            for name, text in documented(ast.parse(path.read_bytes()), ".".join(parts)):
                found.setdefault(name, text)
    return found


def answer(text: str) -> str:
    """The leading paragraphs of a documentation string that fit in `LONGEST_ANSWER`, at least (part of) the first."""
    kept = ""
    for paragraph in text.split("\n\n"):
        if kept and len(kept) + len(paragraph) > LONGEST_ANSWER:
            break
        kept += ("\n\n" if kept else "") + paragraph
    return kept[:LONGEST_ANSWER].strip()


def make_dataset(folder: Path) -> list[str]:
    """Write train.jsonl and valid.jsonl, one conversation a line; return all their texts."""
    pairs = [(f"What does {name} do?", answer(text)) for name, text in standard_library().items()]
    for file, held_out in (("train.jsonl", False), ("valid.jsonl", True)):
        chosen = [pair for i, pair in enumerate(pairs) if (i % VALIDATION_EVERY == 0) == held_out]
        with (folder / file).open("w", encoding="utf-8") as lines:
            for question, reply in chosen:
                messages = [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]
                lines.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
        print(f"{folder / file}: {len(chosen)} conversations")
    return [text for pair in pairs for text in pair]


def make_tokenizer(folder: Path, texts: list[str], vocab_size: int) -> None:
    """A byte-level BPE of exactly `vocab_size` tokens, the special tokens last, with GLM's chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"the texts gave {tokenizer.get_vocab_size()} tokens, {PRESET.name} has {vocab_size}")
    tokenizer.save(str(folder / "tokenizer.json"))
    shutil.copyfile(TEMPLATE, folder / "chat_template.jinja")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "additional_special_tokens": SPECIAL_TOKENS,
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def make_model(folder: Path, sizes: dict[str, int]) -> ModelConfig:
    """Config and weights: norm weights 1, all else, biases too, normal with std `initializer_range`."""
    (folder / "config.json").write_text(json.dumps(json.loads(PRESET.read_text()) | sizes, indent=2) + "\n")
    config = ModelConfig.from_hf(folder)
    generation = {"eos_token_id": list(config.eos_token_id), "pad_token_id": config.pad_token_id, "temperature": 1.0}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    generator = torch.Generator().manual_seed(1234)
    tensors = {}
    for tensor in all_hf_tensors(config):
        if tensor.key.endswith("norm.weight"):
            value = torch.ones(tensor.shape)
        else:
            value = torch.empty(tensor.shape).normal_(0.0, config.initializer_range, generator=generator)
        tensors[tensor.key] = value.to(tensor.dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    print(f"{folder}: {sum(value.numel() for value in tensors.values()):,} random parameters")
    return config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--save", type=Path, required=True, metavar="DIR", help="folder to write to")
    parser.add_argument("--kernel-sizes", action="store_true", help="attention sizes that the GPU kernels serve")
    arguments = parser.parse_args()
    folder = arguments.save
    hf = folder / "hf"
    hf.mkdir(parents=True, exist_ok=True)
    config = make_model(hf, KERNEL_SIZES if arguments.kernel_sizes else {})
    make_tokenizer(hf, make_dataset(folder), config.vocab_size)


if __name__ == "__main__":
    main()
