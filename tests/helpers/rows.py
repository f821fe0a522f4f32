"""A folder with a tokenizer and a chat template, and what its rows become, in words."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from megatron_glm.data.rows import RowReader, RowSettings, TokenisedRows

TEMPLATE = Path(__file__).resolve().parents[1] / "fixtures" / "glm-4.6-chat_template.jinja"
SPECIAL = "<|endoftext|> [gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|>".split()
THINK = ["<think>", "</think>"]  # added, not special, as in the released tokenizers


@cache
def tokenizer() -> tokenizers.Tokenizer:
    """A token a byte, and the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    model.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    model.add_tokens([AddedToken(token, normalized=False) for token in THINK])
    return model


def chat_folder(folder: Path, template: str | None = None) -> Path:
    """`folder` with tokenizer.json and chat_template.jinja, by default that of GLM-4.6."""
    tokenizer().save(str(folder / "tokenizer.json"))
    if template is None:
        shutil.copy(TEMPLATE, folder / "chat_template.jinja")
    else:
        (folder / "chat_template.jinja").write_text(template)
    return folder


@cache
def _reader(settings: RowSettings) -> RowReader:
    return RowReader(settings)


def tokenise(folder: Path | None, *rows: dict, **settings) -> TokenisedRows:
    reader = _reader(RowSettings(folder and str(folder), 10**6, **settings))
    return reader.tokenise([(f"rows:{i}", json.dumps(row).encode()) for i, row in enumerate(rows, 1)])


def text_and_target(folder: Path, row: dict, **settings) -> tuple[str, str]:
    """The text of a row's tokens, and that of its targets."""
    result = tokenise(folder, row, **settings)
    both = (result.ids, result.ids[result.targets])
    return tuple(tokenizer().decode(ids.tolist(), skip_special_tokens=False) for ids in both)
