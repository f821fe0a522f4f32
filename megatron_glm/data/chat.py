"""Chat rows: the checkpoint's own template, and which characters of its text the assistant must produce."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

ASSISTANT = "<|assistant|>"
ROLE_TOKENS = ("<|system|>", "<|user|>", ASSISTANT, "<|observation|>")
ROLES = ("system", "user", "assistant", "tool")
_ROLE_TOKEN = re.compile("|".join(map(re.escape, ROLE_TOKENS)))


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
    """A jinja chat template in the environment that `transformers` gives it."""

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

    @classmethod
    def load(cls, folder: str | Path) -> ChatTemplate:
        """From `chat_template.jinja`, else from the string in `tokenizer_config.json`, of the tokenizer's folder."""
        file, config = Path(folder) / "chat_template.jinja", Path(folder) / "tokenizer_config.json"
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

    def render_targets(self, messages: list[dict], tools: Any = None) -> tuple[str, list[tuple[int, int]]]:
        """The text of a conversation and the character ranges that the assistant must produce, one a turn.

        The target of a turn starts behind its generation prompt and ends behind the next role token, which is what
        ends a turn. Behind a last assistant turn that token is appended: <|observation|> if it calls tools, else
        <|user|>. The text may differ from what was rendered when a turn was generated (templates drop the thinking of
        turns before the last user message), so turns are found in it by their role tokens. These must therefore come
        from the template alone: raises ValueError if the row contains one, or if the turns cannot be told apart.
        """
        messages, tools = _checked_messages(messages), _parsed(tools, "tools")
        if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
            raise ValueError(f"tools must be a list of objects, got {tools!r:.80}")
        for what, value in (*((f"messages[{i}]", m) for i, m in enumerate(messages)), ("tools", tools)):
            if found := _ROLE_TOKEN.search(json.dumps(value, ensure_ascii=False, default=str)):
                raise ValueError(f"{what} contains the role token {found.group()}, which would end or begin a turn")
        text = self.render(messages, tools)
        if messages[-1]["role"] == "assistant":
            text += "<|observation|>" if messages[-1].get("tool_calls") else "<|user|>"
        tokens = list(_ROLE_TOKEN.finditer(text))
        opening = [k for k, token in enumerate(tokens) if token.group() == ASSISTANT]
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if len(opening) != len(turns):
            raise ValueError(f"the chat template renders {len(turns)} assistant turns with {len(opening)} {ASSISTANT}")
        targets = []
        for number, (turn, k) in enumerate(zip(turns, opening, strict=True)):
            if k + 1 == len(tokens):
                raise ValueError(f"the chat template renders no role token behind the assistant's messages[{turn}]")
            start = self._target_start(text, tokens[k].end(), messages[:turn], tools, number)
            targets.append((start, tokens[k + 1].end()))
        return text, targets

    def _target_start(self, text: str, opened: int, earlier: list[dict], tools: list | None, number: int) -> int:
        """Where the target of assistant turn `number` starts, its role token ending at `opened`.

        What the generation prompt holds behind the role token (as `<think>`) is given, not produced. A turn without
        thinking may instead have been generated from the prompt of enable_thinking=False (as `</think>`).
        """
        for variables in ({}, {"enable_thinking": False}):
            parts = self.render(earlier, tools, add_generation_prompt=True, **variables).split(ASSISTANT)
            if len(parts) != number + 2:
                raise ValueError(
                    f"the generation prompt of messages[{len(earlier)}] has {len(parts) - 1} {ASSISTANT},"
                    f" expected {number + 1}"
                )
            if text.startswith(parts[-1], opened):
                return opened + len(parts[-1])
        raise ValueError(f"the chat template renders messages[{len(earlier)}] unlike any of its generation prompts")


def _parsed(value: Any, what: str) -> Any:
    """Nested values may come as JSON text, as the OpenAI format has arguments and Parquet columns have tools."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{what} is not valid JSON: {error}") from error


def _checked_messages(messages: Any) -> list[dict]:
    """The messages without null fields and with tool arguments as objects; raises ValueError if malformed."""
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"messages must be a list that is not empty, got {messages!r:.80}")
    checked = []
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise ValueError(f"messages[{i}] must be an object with a role of {ROLES}, got {message!r:.80}")
        message = {key: value for key, value in message.items() if value is not None}
        _check_content(message, i)
        if "tool_calls" in message:
            if not isinstance(message["tool_calls"], list):
                raise ValueError(f"messages[{i}].tool_calls must be a list, got {message['tool_calls']!r:.80}")
            message["tool_calls"] = [_checked_call(call, i) for call in message["tool_calls"]]
        checked.append(message)
    return checked


def _check_content(message: dict, i: int) -> None:
    """Templates render or drop a number or an object in silence: text is text, or a list of text and parts."""
    for key in ("content", "reasoning_content"):
        value = message.get(key, "")
        parts = value if isinstance(value, list) and key == "content" else [value]
        kinds = (str, dict) if parts is value else (str,)
        if not all(isinstance(part, kinds) for part in parts):
            what = "a string or a list of parts" if key == "content" else "a string"
            raise ValueError(f"messages[{i}].{key} must be {what}, got {value!r:.80}")


def _checked_call(call: Any, i: int) -> dict:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"messages[{i}].tool_calls holds {call!r:.80}, which names no function")
    arguments = _parsed(function.get("arguments") or {}, f"messages[{i}].tool_calls arguments")
    if not isinstance(arguments, dict):
        raise ValueError(f"messages[{i}].tool_calls arguments must be an object, got {arguments!r:.80}")
    function = {**function, "arguments": arguments}
    return {**call, "function": function} if "function" in call else function
