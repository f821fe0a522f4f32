"""Prompts for generation: rows with `messages`, `prompt` or `input_ids` to token ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from .cache import Say
from .files import RawRow, check_unicode, decode_row, find_files, read_rows
from .ids import integers
from .keys import Notes
from .kinds import CHAT, TOKENS
from .report import RowReport
from .rows import RowReader, special_token_error

PROMPT = ("prompt",)
KINDS = (CHAT, PROMPT, TOKENS)


class Prompt(NamedTuple):
    place: str  # file and line
    ids: np.ndarray  # [n] int64


class PromptReader(RowReader):
    """Turns rows into prompts; tokenizer and template are loaded by the first row that needs them."""

    def read(self, data_path: Sequence[str], say: Say) -> list[Prompt]:
        """The prompts of all rows of files, folders and globs, in their order.

        `say` is given the kinds of the rows and the columns that were not used.

        Raises: ValueError, with file and line, for a row that is no prompt; if there is none.
        """
        report = RowReport()
        files = find_files(data_path, report=report)
        prompts = [self.prompt(place, raw, report) for path in files for place, raw in read_rows(path)]
        if not prompts:
            raise ValueError(f"{' '.join(data_path)} has no row: there is nothing to generate from")
        say(report.summary())
        return prompts

    def decoder(self, required: bool, say: Say) -> Callable[[list[int]], str] | None:
        """Makes text of tokens. Without a tokenizer None, if neither a row nor a flag needed one, which `say` is given.

        Raises: ValueError if it is `required` and cannot be read.
        """
        if self.settings.tokenizer_path is None:
            return None
        try:
            return self.tokenizer.decode
        except ValueError as error:
            if required:
                raise
            say(f"warning: tokens without text: {error}")
            return None

    def prompt(self, place: str, raw: RawRow, report: RowReport) -> Prompt:
        notes = Notes(self.ignored)
        try:
            row = decode_row(raw)
            given = [kind for kind in KINDS if kind[0] in row]
            if len(given) != 1:
                names = " and ".join(kind[0] for kind in given) or f"none, but {sorted(row)}"
                raise ValueError(f"a prompt has exactly one of messages, prompt and input_ids; the row has {names}")
            ids = self._ids(row, given[0], notes)
            if not len(ids):
                raise ValueError(f"{given[0][0]} holds no token: there is nothing to go on from")
            size = self.settings.vocab_size
            if len(wrong := ids[(ids < 0) | (ids >= size)]):
                raise ValueError(f"token id {wrong[0]} is outside the model's vocabulary of {size}")
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error
        report.count(given[0][0])
        report.not_used(notes.unused)
        for warning in notes.warnings:
            report.warn(warning, place)
        return Prompt(place, ids)

    def _ids(self, row: dict, kind: tuple[str, ...], notes: Notes) -> np.ndarray:
        used = {*kind}
        if kind == TOKENS:
            notes.columns_not_used(row, used)
            return integers(row["input_ids"], "input_ids")
        if kind == CHAT or isinstance(row["prompt"], list):
            text = self._rendered(row, kind, notes, used)
        elif isinstance(text := row["prompt"], str):
            if not self.settings.special_tokens_in_text and (found := self.special_tokens.search(text)):
                raise ValueError(special_token_error("prompt", found.group()))
        else:
            raise ValueError(f"prompt must be a string or a list of messages, got {text!r:.80}")
        notes.columns_not_used(row, used)
        check_unicode(text)
        return self.tokenizer.encode_batch([text])[0][0]

    def _rendered(self, row: dict, kind: tuple[str, ...], notes: Notes, used: set[str]) -> str:
        """The conversation up to the assistant's next turn. Adds to `used` the columns that it read."""
        _ = self.template
        chat, settings, _ = self.conversation(row, kind, notes, used)
        if chat.messages[-1]["role"] == "assistant":
            raise ValueError(f"{kind[0]} end with an answer of the assistant: a prompt ends before it")
        return self.template.render_prompt(chat.messages, chat.tools, **settings)
