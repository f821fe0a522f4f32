"""Text to token ids with character positions, from a `tokenizer.json` or a sentencepiece `.model`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tokenizers

from megatron_glm.config.source import describe, download_hint, require_content

END_OF_TEXT = "<|endoftext|>"

_BRACKETS = re.compile(r"<.+>|\[.+\]")

# texts -> (ids [n] int64, ends [n] int64) of each; ends[j] is the character position behind token j
EncodeBatch = Callable[[list[str]], list[tuple[np.ndarray, np.ndarray]]]


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer that adds nothing of its own: no prefix, no end token, no padding, no truncation."""

    path: Path
    encode_batch: EncodeBatch
    token_id: Callable[[str], int | None]  # None unless the text is one token of the vocabulary
    vocab_size: int  # above every id
    decode: Callable[[list[int]], str]  # the text of tokens, special ones left out
    special_tokens: frozenset[str] = frozenset()  # texts that become one token wherever they stand, and mean control

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Loads a `tokenizer.json`, a `.model` file, or the one that a folder holds (tokenizer.json first)."""
        path = Path(path)
        if path.is_dir():
            found = [path / "tokenizer.json", *sorted(path.glob("*.model"))]
            found = [file for file in found if file.exists() or file.is_symlink()]
            if not found:
                inside = sorted(file for depth in ("*", "*/*") for file in path.glob(f"{depth}/tokenizer.json"))
                where = f"; there is one in {inside[-1].parent}" if inside else describe(path)
                what = f"neither tokenizer.json nor a .model file{where}"
                raise ValueError(f"--tokenizer-model: the folder {path} holds {what}")
            path = found[0]
        if not path.exists() and not path.is_symlink():
            wanted = "a tokenizer.json, a .model file or the folder of one"
            raise ValueError(f"--tokenizer-model: {path} does not exist; name {wanted}{download_hint(path)}")
        if path.suffix not in (".json", ".model"):
            raise ValueError(f"--tokenizer-model: {path} is neither a .json nor a .model file")
        try:
            require_content(path)
        except ValueError as error:
            raise ValueError(f"--tokenizer-model: {error}") from error
        return _from_json(path) if path.suffix == ".json" else _from_sentencepiece(path)

    def require(self, token: str) -> int:
        """The id of a special token; raises ValueError if the vocabulary lacks it."""
        found = self.token_id(token)
        if found is None:
            raise ValueError(f"the tokenizer {self.path} has no token {token!r}")
        return found


def _from_json(path: Path) -> Tokenizer:
    try:
        model = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"--tokenizer-model: cannot read {path}: {error}") from error
    model.no_padding()
    model.no_truncation()

    def encode_batch(texts: list[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        encodings = model.encode_batch(texts, add_special_tokens=False)
        return [(np.array(e.ids, np.int64), np.array([end for _, end in e.offsets], np.int64)) for e in encodings]

    special = frozenset(token.content for token in model.get_added_tokens_decoder().values() if token.special)
    size = 1 + max(model.get_vocab().values(), default=-1)
    return Tokenizer(path, encode_batch, model.token_to_id, size, model.decode, special)


def _from_sentencepiece(path: Path) -> Tokenizer:
    try:
        import sentencepiece
    except ImportError as error:
        raise ValueError(f"--tokenizer-model: {path} needs sentencepiece: pip install -e '.[data]'") from error
    try:
        model = sentencepiece.SentencePieceProcessor(model_file=str(path))
    except (RuntimeError, OSError) as error:
        raise ValueError(f"--tokenizer-model: cannot read {path}: {error}") from error

    def encode_batch(texts: list[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        encodings = model.encode(texts, return_type="offset_mapping")
        return [(np.array(e["ids"], np.int64), _ends_of_pieces(e["offsets"])) for e in encodings]

    def token_id(token: str) -> int | None:
        found = model.piece_to_id(token)
        if found != model.unk_id():
            return found
        # the end token of a sentencepiece vocabulary has a name of its own, as a rule </s>
        return model.eos_id() if token == END_OF_TEXT and model.eos_id() >= 0 else None

    pieces = [(i, model.id_to_piece(i)) for i in range(model.vocab_size())]
    # <…> and […] that are matched whole; control pieces as </s> never are, and <0x0A> is a byte
    special = frozenset(
        p for i, p in pieces if _BRACKETS.fullmatch(p) and not (model.is_control(i) or model.is_byte(i))
    )
    ids = {token: model.piece_to_id(token) for token in special}

    def decode(tokens: list[int]) -> str:
        return model.decode([token for token in tokens if token not in ids.values()])

    return Tokenizer(path, encode_batch, token_id, model.vocab_size(), decode, special)


def _ends_of_pieces(offsets: list[tuple[int, int]]) -> np.ndarray:
    """Ends of pieces. All but the last byte of a character come with an empty range: give them the character's end."""
    ends = [end for _, end in offsets]
    for j in reversed(range(len(ends) - 1)):
        if offsets[j][0] == offsets[j][1]:
            ends[j] = ends[j + 1]
    return np.array(ends, np.int64)
