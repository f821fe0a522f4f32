"""Rows of every kind to tokens: what a row must have to be of a kind, and which of its tokens are to be predicted."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from megatron_glm.config import DataConfig, RunConfig

from . import ids
from .chat import ROLE_TOKENS, THINK_TAGS, ChatTemplate, inner_strings
from .files import RawRow, check_unicode, decode_row
from .ids import TokenRow
from .keys import HARMLESS, Notes, is_switch, switched_on
from .kinds import ALPACA, HELLASWAG, TEXT, TOKENS, is_chat, parse_row
from .messages import Conversation, functions_as_tools, parsed, read_conversation
from .pairs import check_pair, split_pair
from .report import RowReport
from .tokenizer import END_OF_TEXT, Tokenizer

CHAT_COLUMNS = {"system", "tools", "functions", "chat_template_kwargs", "extra_body"}
# columns that some trainers make the prompt of: here only a copy of what is trained anyway
PROMPT_COLUMNS = frozenset(
    "prompt instruction instructions input inputs context query question document passage background knowledge"
    " preamble developer sys apis plugins".split()
)
NO_BOOLEANS = frozenset(("true", "false", "yes", "no", "on", "off", "0", "1"))


@dataclass(frozen=True)
class RowSettings:
    """What the tokens of a row depend on beside the files: with the contents of the tokenizer's folder, a cache key."""

    tokenizer_path: str | None  # a tokenizer file, or a folder with one; the chat template lies beside it
    vocab_size: int  # of the model
    skip_bad_rows: bool = False
    ignore_keys: tuple[str, ...] = ()  # keys of rows and messages that are only metadata
    train_on_last_turn_only: bool = False
    special_tokens_in_text: bool = False  # text may hold special tokens, which become ids of their own
    pairs: bool = False  # a row is a chosen and a rejected answer: two documents, one behind the other

    @classmethod
    def of(cls, config: RunConfig) -> RowSettings:
        """Those of a fine-tuning run; the tokenizer is the checkpoint's unless --tokenizer-model names one."""
        data = config.data
        assert isinstance(data, DataConfig), "pre-training reads no rows"
        return cls(
            data.tokenizer_model or config.hf_folder,
            config.model.vocab_size,
            data.skip_bad_rows,
            data.ignored_keys,
            data.train_on_last_turn_only,
            data.special_tokens_in_text,
            pairs=config.preference.is_dpo,
        )


class TextRow(NamedTuple):
    text: str
    targets: Sequence[tuple[int, int]]  # character ranges to be predicted
    end_of_text: bool  # append <|endoftext|>, as the last target if there are others


@dataclass(frozen=True)
class TokenisedRows:
    """The documents of a chunk of rows, one after the other."""

    ids: np.ndarray  # [N] int32
    targets: np.ndarray  # [N] bool: is token j to be predicted
    lengths: np.ndarray  # [n] int64: tokens of each document
    report: RowReport


class RowReader:
    """Turns rows into tokens. Tokenizer and template are loaded by the first row that needs them.

    It can be pickled before it is used, for worker processes.
    """

    def __init__(self, settings: RowSettings):
        self.settings = settings
        self.ignored = frozenset(settings.ignore_keys)

    def tokenise(self, rows: Iterable[tuple[str, RawRow]]) -> TokenisedRows:
        """The documents of rows as read_rows yields them, in their order; texts are tokenised in one call.

        Raises ValueError with the place of the first bad row, unless skip_bad_rows counts them.
        """
        report, documents = RowReport(), []
        converted = list(self._convert(rows, report))
        texts = [
            part.text for _, row, _ in converted if isinstance(row, list) for part in row if isinstance(part, TextRow)
        ]
        encodings = iter(self.tokenizer.encode_batch(texts) if texts else ())
        for place, row, kind in converted:
            if isinstance(row, ValueError):
                self._bad(place, row, report)
                continue
            found = [part if isinstance(part, TokenRow) else self._marked(part, *next(encodings)) for part in row]
            try:
                self._check(found)
            except ValueError as error:
                self._bad(place, error, report)
                continue
            report.count("+".join(kind))
            documents += found
        return TokenisedRows(
            np.concatenate([np.empty(0, np.int32), *(row.ids.astype(np.int32) for row in documents)]),
            np.concatenate([np.empty(0, bool), *(row.targets for row in documents)]),
            np.array([length for row in documents for length in row.lengths], np.int64),
            report,
        )

    def _check(self, parts: Sequence[TokenRow]) -> None:
        size = self.settings.vocab_size
        for part in parts:
            if len(wrong := part.ids[(part.ids < 0) | (part.ids >= size)]):
                raise ValueError(f"token id {wrong[0]} is outside the model's vocabulary of {size}")
        if self.settings.pairs:
            check_pair(*parts)

    def _convert(
        self, rows: Iterable[tuple[str, RawRow]], report: RowReport
    ) -> Iterator[tuple[str, list[TextRow | TokenRow] | ValueError, tuple[str, ...]]]:
        """(place, parts of the row or what is wrong with it, kind) of each row; ends with a bad one if that stops."""
        for place, raw in rows:
            kind, notes = (), Notes(self.ignored)
            try:
                if self.settings.pairs:
                    parts, of_parts, kind = split_pair(decode_row(raw))
                else:
                    row, kind = parse_row(raw, self.ignored)
                    parts, of_parts = (row,), kind
            except ValueError as error:
                yield place, error, ()
            else:
                try:
                    self.prepare(parts[0], of_parts)
                except ValueError as error:  # a missing tokenizer is no fault of the row
                    raise ValueError(f"{place}: {error}") from error
                try:
                    yield place, [self.convert(part, of_parts, notes) for part in parts], kind
                except ValueError as error:
                    yield place, error, ()
                    kind = ()
            if not kind and not self.settings.skip_bad_rows:
                return
            report.not_used(notes.unused)
            for warning in notes.warnings:
                report.warn(warning, place)

    def _bad(self, place: str, why: ValueError | str, report: RowReport) -> None:
        if not self.settings.skip_bad_rows:
            raise ValueError(f"{place}: {why}")
        report.skip(place, why)

    def _marked(self, row: TextRow, tokens: np.ndarray, ends: np.ndarray) -> TokenRow:
        """The row with its targets: the tokens that end inside a character range of `row.targets`.

        Where a token starts is not asked: for " answer" some tokenizers report the place behind the space.

        Args:
            tokens: [n] int64; ends: [n] int64, the character behind each token.
        """
        targets = np.zeros(len(tokens), bool)
        for start, end in np.searchsorted(ends, np.array(row.targets, np.int64).reshape(-1, 2), side="right").tolist():
            targets[start:end] = True
        if row.end_of_text:
            tokens, targets = np.append(tokens, self.end_of_text), np.append(targets, bool(row.targets))
        return TokenRow(tokens, targets, (len(tokens),))

    @cached_property
    def tokenizer(self) -> Tokenizer:
        if self.settings.tokenizer_path is None:
            raise ValueError("rows of text need a tokenizer, rows of input_ids do not: give --tokenizer-model")
        return Tokenizer.load(self.settings.tokenizer_path)

    @cached_property
    def end_of_text(self) -> int:
        return self.tokenizer.require(END_OF_TEXT)

    @cached_property
    def template(self) -> ChatTemplate:
        for token in ROLE_TOKENS:
            self.tokenizer.require(token)
        template = ChatTemplate.load(self.tokenizer.path.parent)
        template.generation_prompts()
        return template

    @cached_property
    def special_tokens(self) -> re.Pattern:
        return special_token_pattern(self.tokenizer)

    def prepare(self, row: dict, kind: tuple[str, ...]) -> None:
        """Loads the files that a row of this kind needs: a missing one stops the run, it is no bad row to skip."""
        if is_chat(row, kind):
            _ = self.template
        elif kind != TOKENS:
            _ = self.end_of_text

    def convert(self, row: dict, kind: tuple[str, ...], notes: Notes) -> TextRow | TokenRow:
        """Raises ValueError with what is wrong about the row, without its place."""
        switches = {key for key in row if is_switch(key) and key not in self.ignored and not isinstance(row[key], list)}
        wanted = all([switched_on(key, row[key], f"the row's {key}") for key in switches])
        used = {*kind, *switches}
        if kind == TOKENS:
            columns = {key: value for key, value in row.items() if key not in self.ignored | switches}
            result = ids.read_ids(columns, notes)
            used |= ids.COLUMNS - self.ignored
            ids.refuse_unread(
                {key: value for key, value in columns.items() if key not in used | HARMLESS}, len(row["input_ids"])
            )
        elif is_chat(row, kind):
            result = self._chat(row, kind, notes, used)
        elif kind == HELLASWAG:
            result = self._completion(*_hellaswag(row))
        elif kind == TEXT:
            result = self._completion(("", ""), ("text", _string(row, "text")))
        else:
            result = self._completion(*((key, _string(row, key)) for key in kind))
        notes.columns_not_used(row, used)
        if isinstance(result, TextRow):
            check_unicode(result.text)
            _check_prompts({key: row[key] for key in PROMPT_COLUMNS & row.keys() - used - self.ignored}, kind, result)
            return result if wanted else TextRow(result.text, (), result.end_of_text)
        return result if wanted else result._replace(targets=np.zeros_like(result.targets))

    def _completion(self, prompt: tuple[str, str], completion: tuple[str, str]) -> TextRow:
        """(key, text) of both. They are tokenised as one; a token that straddles the border is a target."""
        text = prompt[1] + completion[1]
        if not self.settings.special_tokens_in_text and (found := self.special_tokens.search(text)):
            key = prompt[0] if found.end() <= len(prompt[1]) else completion[0]
            raise ValueError(special_token_error(key, found.group()))
        return TextRow(text, [(len(prompt[1]), len(text))], end_of_text=not text.endswith(END_OF_TEXT))

    def _chat(self, row: dict, kind: tuple[str, ...], notes: Notes, used: set[str]) -> TextRow:
        """Adds to `used` the columns that it read."""
        chat, settings, first_trained = self.conversation(row, kind, notes, used)
        text, targets = self.template.render_targets(chat.messages, chat.tools, **settings)
        turns = [i for i, message in enumerate(chat.messages) if message["role"] == "assistant"]
        if self.settings.train_on_last_turn_only:
            first_trained = max(first_trained, *turns[-1:], 0)
        wanted = [span for i, span in zip(turns, targets, strict=True) if chat.trained[i] and i >= first_trained]
        return TextRow(text, wanted, end_of_text=False)

    def conversation(
        self, row: dict, kind: tuple[str, ...], notes: Notes, used: set[str]
    ) -> tuple[Conversation, dict[str, Any], int]:
        """(what the template renders, the variables that the row sets of it, the number of the first message with loss)

        Adds to `used` the columns that it read.
        """
        row = {key: value for key, value in row.items() if key not in self.ignored or key in kind}
        messages, first_trained = self._messages(row, kind, used)
        settings = self._settings(row, used)
        used.update(CHAT_COLUMNS - self.ignored)
        tools = row.get("tools")
        if "functions" in row:
            if tools is not None:
                raise ValueError("the row has both tools and functions: keep one")
            tools = functions_as_tools(row["functions"])
        if row.get("system"):
            roles = [each.get("role", each.get("from")) for each in messages if isinstance(each, dict)]
            if "system" in roles or "developer" in roles:
                raise ValueError("the row has a column system and a message of the role system: keep one")
            messages = [{"role": "system", "content": _string(row, "system")}, *messages]
            first_trained += 1
        chat = read_conversation(messages, tools, notes, self.template)
        self._refuse_special(chat.messages, {"tools": chat.tools} | settings)
        return chat, settings, first_trained

    def _messages(self, row: dict, kind: tuple[str, ...], used: set[str]) -> tuple[list, int]:
        """(the messages of a row, the number of the first with loss)."""
        if kind == ALPACA:
            used.add("input")
            texts = [_string(row, key) for key in ("instruction", "input") if row.get(key, "") != ""]
            prompt = [{"role": "user", "content": "\n".join(texts)}]
            return [*prompt, {"role": "assistant", "content": _string(row, "output")}], 0
        lists = [parsed(row[key], key) if len(kind) == 1 else row[key] for key in kind]
        for key, messages in zip(kind, lists, strict=True):
            if not isinstance(messages, list) or not messages:
                hint = ": prompt and completion are two strings or two lists of messages" if len(kind) > 1 else ""
                raise ValueError(f"{key} must be a list of messages that is not empty, got {messages!r:.80}{hint}")
        return sum(lists, []), len(lists[0]) if len(kind) > 1 else 0

    def _settings(self, row: dict, used: set[str]) -> dict[str, Any]:
        """What a row sets of the template's variables; a setting that the template does not read is refused."""
        settings = {key: row[key] for key in self.template.settings & row.keys()}
        used.update(settings)
        extra = _object(row.get("extra_body"), "extra_body")
        for name, values in [("chat_template_kwargs", row.get("chat_template_kwargs")), *extra.items()]:
            if name != "chat_template_kwargs":
                raise ValueError(f"extra_body.{name} is not read: only chat_template_kwargs can be honoured")
            for key, value in _object(values, name).items():
                if key not in self.template.settings:
                    can = ", ".join(sorted(self.template.settings)) or "nothing"
                    raise ValueError(f"chat_template_kwargs.{key}: {self.template.name} does not read it, only {can}")
                if settings.setdefault(key, value) != value:
                    raise ValueError(f"the row sets {key} to {settings[key]!r} and to {value!r}")
        for key, value in settings.items():
            if isinstance(value, str) and value.lower() in NO_BOOLEANS:
                raise ValueError(f"{key} is the string {value!r}, which templates take for true: make it a boolean")
        return settings

    def _refuse_special(self, messages: list[dict], others: dict[str, Any]) -> None:
        """Special tokens may only come from the template. Thinking may be written in an answer, with its tags."""
        for i, fields in enumerate([*messages, others]):
            for key, value in fields.items():
                for text in inner_strings(value):
                    if key == "content" and "think>" in text and fields["role"] == "assistant":
                        text = THINK_TAGS.sub(" ", text)
                    for found in self.special_tokens.finditer(text):
                        where = key if fields is others else f"messages[{i}].{key}"
                        if found.group() in ROLE_TOKENS:
                            raise ValueError(f"{where} contains {found.group()}, which would end or begin a turn")
                        if not self.settings.special_tokens_in_text:
                            raise ValueError(special_token_error(where, found.group()))


def special_token_pattern(tokenizer: Tokenizer) -> re.Pattern:
    """Finds what a text must not hold unless it means it: special tokens of the tokenizer, role tokens, the end."""
    ours = {token for token in (*ROLE_TOKENS, END_OF_TEXT) if tokenizer.token_id(token) is not None}
    tokens = sorted(tokenizer.special_tokens | ours, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, tokens)) or "(?!)")


def special_token_error(where: str, token: str) -> str:
    return (
        f"{where} contains the special token {token}, which would become a token of its own: take it out, or give "
        "--special-tokens-in-text if it is meant"
    )


def _check_prompts(columns: dict[str, Any], kind: tuple[str, ...], row: TextRow) -> None:
    """Columns that were not read may be a part of the prompt. Of a text it must not be inside: loss is on all of it."""
    for key, value in columns.items():
        texts = [text.strip() for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)]
        if any(texts) and (kind == TEXT) == all(text in row.text for text in texts):
            what = "is not read; name it in --ignore-keys if it is only metadata"
            if kind == TEXT:
                what = (
                    'is in the text, too: convert each to {"prompt": …, "completion": …}, or name it in --ignore-keys '
                    "to train on all of the text"
                )
            raise ValueError(f"the row has the key {key} = {value!r:.60}, which {what}")


def _object(value: Any, what: str) -> dict:
    """An object, maybe as JSON text, without the members that are null; {} for null."""
    value = parsed(value, what)
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"{what} must be an object, got {value!r:.80}")
    return {key: item for key, item in (value or {}).items() if item is not None}


def _string(row: dict, key: str) -> str:
    if not isinstance(row[key], str):
        raise ValueError(f"{key} must be a string, got {row[key]!r:.80}")
    return row[key]


def _hellaswag(row: dict) -> tuple[tuple[str, str], tuple[str, str]]:
    """The context, a space, and the right ending, which is the target."""
    endings, label = row["endings"], row["label"]
    if not isinstance(endings, list) or not all(isinstance(ending, str) for ending in endings):
        raise ValueError(f"endings must be a list of strings, got {endings!r:.80}")
    if str(label) not in map(str, range(len(endings))):
        raise ValueError(f"label is {label!r:.80}, but there are {len(endings)} endings, numbered from 0")
    return ("ctx", _string(row, "ctx").rstrip()), ("endings", " " + endings[int(label)].lstrip())
