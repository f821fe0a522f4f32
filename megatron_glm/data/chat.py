"""Chat rows: the checkpoint's own template, and which characters of its text the assistant must produce."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megatron_glm.config.source import require_content

ASSISTANT = "<|assistant|>"
ROLE_TOKENS = ("<|system|>", "<|user|>", ASSISTANT, "<|observation|>")
THINK_TAGS = re.compile("(</?think>)")
_ROLE_TOKEN = re.compile("|".join(map(re.escape, ROLE_TOKENS)))
# what a template reads that is no setting of a row
_NOT_SETTINGS = {"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token", "raise_exception"}

_USER, _ANSWER = {"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}
_CALL = {"type": "function", "function": {"name": "look", "arguments": {}}}
# conversations in which the turns of a template are looked for, once
_PROBES = (
    [_USER],
    [{"role": "system", "content": "text"}, _USER],
    [_USER, _ANSWER, _USER],
    [_USER, {"role": "assistant", "content": "", "tool_calls": [_CALL]}, {"role": "tool", "content": "result"}],
)

Span = tuple[int, int]


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja's own filter escapes HTML, which models never saw."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


class ChatTemplate:
    """A jinja chat template in the environment that `transformers` gives it.

    `keys`: the names of members that it reads, as content, name, output. `settings`: the variables that a row may set,
    as enable_thinking.
    """

    def __init__(self, source: str, name: str):
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(
                f"the chat template {name} is malformed at line {error.lineno}: {error.message}"
            ) from error
        tree = environment.parse(source)
        members = [node.attr for node in tree.find_all(jinja2.nodes.Getattr)]
        members += [getattr(node.arg, "value", None) for node in tree.find_all(jinja2.nodes.Getitem)]
        self.keys = frozenset(key for key in members if isinstance(key, str))
        own = {node.name for node in tree.find_all(jinja2.nodes.Name) if node.ctx != "load"}
        self.settings = frozenset(jinja2.meta.find_undeclared_variables(tree)) - own - _NOT_SETTINGS
        self.name = name
        self._prompts: dict[str, tuple[str, ...]] = {}
        self._rendered: dict[tuple[str, str], bool] = {}

    @classmethod
    def load(cls, folder: str | Path) -> ChatTemplate:
        """From `chat_template.jinja`, else from the string in `tokenizer_config.json`, of the tokenizer's folder."""
        file, config = Path(folder) / "chat_template.jinja", Path(folder) / "tokenizer_config.json"
        for path in (file, config):
            if path.exists() or path.is_symlink():
                require_content(path)
        try:
            if file.is_file():
                return cls(file.read_text(encoding="utf-8"), str(file))
            settings = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else None
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(f"cannot read {file if file.is_file() else config}: {error}") from error
        source = settings.get("chat_template") if isinstance(settings, dict) else None
        if not isinstance(source, str):
            raise ValueError(f"rows with messages need a chat template: {file}, or a string in {config}")
        return cls(source, str(config))

    def render(
        self, messages: list[dict], tools: list | None = None, add_generation_prompt: bool = False, **variables: Any
    ) -> str:
        """The text of a conversation; raises ValueError with the template's or jinja's reason if it cannot be made."""
        try:
            return self._template.render(
                messages=messages, tools=tools, add_generation_prompt=add_generation_prompt, **variables
            )
        except Exception as error:  # a template is a program: whatever it raises is about this row
            raise ValueError(f"the chat template refuses the messages: {error}") from error

    def renders(self, role: str, key: str) -> bool:
        """Does it render this key of a message of this role; "tools" is a role, too. Tried once, with a rare word."""
        if (role, key) not in self._rendered:
            word, tools = "Zq7Xv", None
            value = [{"type": "function", "function": {"name": word, "arguments": {}}}] if key == "tool_calls" else word
            message = {"role": role, "content": "text"} | {key: value}
            messages = [message, _USER] if role == "system" else [*_PROBES[3][:-1], message]
            if role == "tools":
                messages, tools = [_USER], [{"type": "function", "function": {"name": word, "parameters": {}}}]
            try:
                self._rendered[role, key] = word in self.render(messages, tools)
            except ValueError:
                self._rendered[role, key] = False
        return self._rendered[role, key]

    def generation_prompts(self, **variables: Any) -> tuple[str, ...]:
        """What follows the role token in the generation prompt, as `<think>`: given to the model, not produced by it.

        Two prompts where enable_thinking=False has another one: a turn without thinking may have been generated from
        it. They are found once for each set of `variables`, in four short conversations, so that no row needs to be
        rendered once a turn.

        Raises: ValueError naming the template if a conversation with its generation prompt does not begin as it does
            without, or if the prompt is not the same in all four.
        """
        key = json.dumps(variables, sort_keys=True, default=repr)
        if key not in self._prompts:
            prompts = [self._prompt(variables), self._prompt({"enable_thinking": False} | variables)]
            self._prompts[key] = tuple(dict.fromkeys(prompts))
        return self._prompts[key]

    def _prompt(self, variables: dict) -> str:
        found: str | None = None
        for messages in _PROBES:
            try:
                closed, opened = (self.render(messages, None, prompt, **variables) for prompt in (False, True))
            except ValueError:
                if found is None:
                    raise
                continue  # a template may know no system text, or no tools
            before, token, behind = opened[len(closed) :].partition(ASSISTANT)
            if not opened.startswith(closed) or not token or _ROLE_TOKEN.search(before + behind):
                raise ValueError(
                    f"turns cannot be found in the text of the chat template {self.name}: with add_generation_prompt "
                    f"it does not append {ASSISTANT} to the text that it renders without"
                )
            if found not in (None, behind):
                raise ValueError(
                    f"turns cannot be found in the text of the chat template {self.name}: behind {ASSISTANT} its "
                    f"generation prompt is {found!r} in one conversation and {behind!r} in another"
                )
            found = behind
        assert found is not None, "the first probe renders, or raises"
        return found

    def render_prompt(self, messages: list[dict], tools: list | None = None, **variables: Any) -> str:
        """The text of a conversation and the beginning of the assistant's next turn.

        Raises ValueError if a turn cannot be found, or a string of a message is not in its part of the text.
        """
        text = self.render(messages, tools, add_generation_prompt=True, **variables)
        tokens = list(_ROLE_TOKEN.finditer(text))
        opening = [k for k, token in enumerate(tokens) if token.group() == ASSISTANT]
        turns = sum(message["role"] == "assistant" for message in messages)
        if len(opening) != turns + 1:
            raise ValueError(f"the chat template renders {turns} assistant turns with {len(opening) - 1} {ASSISTANT}")
        _check_rendered(text, messages, [(tokens[k].end(), tokens[k + 1].start()) for k in opening[:-1]])
        return text

    def render_targets(
        self, messages: list[dict], tools: list | None = None, **variables: Any
    ) -> tuple[str, list[Span]]:
        """The text of a conversation and the character ranges that the assistant must produce, one a turn.

        The target of a turn starts behind its generation prompt and ends behind the next role token, which is what
        ends a turn. Behind a last assistant turn that token is appended: <|observation|> if it calls tools, else
        <|user|>. The text may differ from what was rendered when a turn was generated (templates drop the thinking of
        turns before the last user message), so turns are found in it by their role tokens, which the messages must not
        contain. Raises ValueError if a turn cannot be found, or a string of a message is not in its part of the text.
        """
        prompts = self.generation_prompts(**variables)
        text = self.render(messages, tools, **variables)
        if messages[-1]["role"] == "assistant":
            text += "<|observation|>" if messages[-1].get("tool_calls") else "<|user|>"
        tokens = list(_ROLE_TOKEN.finditer(text))
        opening = [k for k, token in enumerate(tokens) if token.group() == ASSISTANT]
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if len(opening) != len(turns):
            raise ValueError(f"the chat template renders {len(turns)} assistant turns with {len(opening)} {ASSISTANT}")
        targets, parts = [], []
        for turn, k in zip(turns, opening, strict=True):
            if k + 1 == len(tokens):
                raise ValueError(f"the chat template renders no role token behind the assistant's messages[{turn}]")
            opened, end = tokens[k].end(), tokens[k + 1].end()
            prompt = next((prompt for prompt in prompts if text.startswith(prompt, opened)), None)
            if prompt is None:
                raise ValueError(f"the chat template renders messages[{turn}] unlike any of its generation prompts")
            targets.append((opened + len(prompt), end))
            parts.append((opened, tokens[k + 1].start()))
        _check_rendered(text, messages, parts)
        return text, targets


def _check_rendered(text: str, messages: list[dict], turns: list[Span]) -> None:
    """Raises ValueError if a string of a message is missing in the text: the template drops, or changes, it.

    A turn's strings are looked for in the turn, those of the other messages between the turns, in their order. Only
    thinking before the last user message may be missing: templates drop it from the history.
    """
    last_user = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)
    starts = [start for start, _ in turns] + [len(text)]
    cursor, turn = 0, 0
    for i, message in enumerate(messages):
        spoken = message["role"] == "assistant"
        start, end = turns[turn] if spoken else (cursor, starts[turn])
        turn += spoken
        reached = start
        for key, string, thought in _strings(message):
            string = string.strip()
            at = text.find(string, start, end)
            if at < 0 and not (thought and i < last_user) and not _found_as_json(string, text, start, end):
                raise ValueError(
                    f"the chat template does not render messages[{i}].{key} ({string!r:.60}): it would be lost"
                )
            reached = max(reached, at + len(string))
        cursor = end if spoken else reached


def _strings(message: dict[str, Any]) -> Iterator[tuple[str, str, bool]]:
    """(key, string, is it thinking) of a message; thinking may be written in the content, too."""
    for key, value in message.items():
        if key == "content" and isinstance(value, str) and message["role"] == "assistant":
            pieces = [*THINK_TAGS.split(value), ""]  # text and tags in turn
            yield from ((key, pieces[j], pieces[j + 1] == "</think>") for j in range(0, len(pieces), 2))
        elif key == "tool_calls":
            functions = (call.get("function", call) for call in message[key])
            strings = inner_strings([[function["name"], function["arguments"]] for function in functions])
            yield from ((key, string, False) for string in strings)
        elif key == "content" and isinstance(value, list):  # tool results
            yield from ((key, item["output"] if isinstance(item, dict) else item, False) for item in value)
        elif key != "role":
            yield key, value, key == "reasoning_content"


def inner_strings(value: Any) -> Iterator[str]:
    """All strings in a nested value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in [*value, *value.values()] if isinstance(value, dict) else value:
            yield from inner_strings(item)


def _found_as_json(string: str, text: str, start: int, end: int) -> bool:
    """Members of nested arguments are rendered as JSON, with their escapes."""
    return any(text.find(json.dumps(string, ensure_ascii=ascii)[1:-1], start, end) >= 0 for ascii in (False, True))
