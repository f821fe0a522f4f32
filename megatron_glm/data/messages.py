"""Conversations as they come, in the spellings of several trainers, to the one form that chat templates render.

Every key of a message, a content part and a tool call is understood, metadata, or an error that names it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from megatron_glm.config.source import without_null

from .chat import THINK_TAGS, ChatTemplate
from .keys import Notes, is_switch, switched_on

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
PLAIN_ROLES = frozenset(("system", "user", "assistant"))
THINKING = ("reasoning_content", "reasoning", "thinking")
CALL = ("type", "function", "name", "arguments")
TEXT_PARTS = ("text", "input_text", "output_text")
# no part of the text: it says which call a result answers, which its place says, too
METADATA = {"assistant": ("id",), "tool": ("id", "tool_call_id", "name"), "system": ("id",), "user": ("id",)}
AS_TEXT = 'for a value that is no text, row["messages"][i]["content"] = json.dumps(value)'
NULLS = "null members of tool arguments and of tools are left out, as those that Arrow and Parquet write"


@dataclass
class Conversation:
    """What a template renders, and which messages loss is on."""

    messages: list[dict]  # role, content, reasoning_content, tool_calls, and keys that only this template reads
    trained: list[bool]  # one a message: is loss on it
    tools: list[dict] | None


def read_conversation(
    messages: Any, tools: Any, notes: Notes, template: ChatTemplate, what: str = "messages"
) -> Conversation:
    """The messages and tools of a row in the one form that templates render.

    Args:
        messages, tools: as the row has them; a system message may bring the tools instead.
        what: the row's name for its messages, as errors say it.
    Raises: ValueError, naming the message and the key, for what the template would drop or change.
    """
    messages = parsed(messages, what)
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{what} must be a list that is not empty, got {messages!r:.80}")
    read, trained = [], []
    for i, message in enumerate(messages):
        if type(message) is dict and message.keys() == {"role", "content"}:  # most messages
            role, content = message["role"], message["content"]
            if type(content) is str and role in PLAIN_ROLES and template.renders(role, "content"):
                read.append(message)
                trained.append(role == "assistant")
                continue
        message, wanted, own_tools = _Message(message, f"{what}[{i}]", notes, template).read()
        if own_tools is not None:
            if tools is not None or i:
                raise ValueError(f"{what}[{i}] has tools: only the row, or else its first message, can have them")
            tools = own_tools
        read.append(message)
        trained.append(wanted)
    if notes.ignored.isdisjoint(("tool_calls", "tool_call_id", "id")):
        _check_order(messages)
    found = read_tools(tools, notes)
    if found and not template.renders("tools", ""):
        raise ValueError(f"the chat template {template.name} renders no tools: they would be lost")
    return Conversation(read, trained, found)


def _check_order(messages: list[dict]) -> None:
    """Templates render no ids, and results in their order: it must be that of the calls."""
    waiting: list[Any] = []
    for i, message in enumerate(messages):
        if isinstance(calls := message.get("tool_calls"), list):
            waiting = [call.get("id") for call in calls]
        elif (answered := message.get("tool_call_id")) in waiting and answered is not None:
            if answered != waiting[0]:
                raise ValueError(
                    f"messages[{i}] answers the call {answered!r}, but {waiting[0]!r} was called before it"
                )
            waiting.pop(0)


def parsed(value: Any, what: str) -> Any:
    """Nested values may come as JSON text, as the OpenAI format has arguments and Parquet columns have tools."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{what} is not valid JSON: {error}") from error


def read_tools(tools: Any, notes: Notes) -> list[dict] | None:
    """The tools of a row: a list of objects, whole or each as JSON text; "" is none, as tables of text have it."""
    tools = parsed(tools, "tools") if tools != "" else None
    if tools is None:
        return None
    found = [parsed(tool, f"tools[{i}]") for i, tool in enumerate(tools)] if isinstance(tools, list) else None
    if found is None or not all(isinstance(tool, dict) for tool in found):
        raise ValueError(f"tools must be a list of objects, got {tools!r:.80}")
    return [_without_nulls(tool, notes) for tool in found]


def functions_as_tools(functions: Any) -> list:
    """OpenAI's old `functions` as `tools`."""
    functions = parsed(functions, "functions")
    if not isinstance(functions, list):
        raise ValueError(f"functions must be a list of objects, got {functions!r:.80}")
    return [{"type": "function", "function": function} for function in functions]


def _without_nulls(value: Any, notes: Notes) -> Any:
    """Arrow gives every struct the keys of all rows: in one row, a null member of an object is a key not there."""
    cleaned = without_null(value)
    if cleaned != value:
        notes.warnings.add(NULLS)
    return cleaned


class _Message:
    """One message while it is read: each key that is understood leaves `fields`; one that is left is unknown."""

    def __init__(self, message: Any, where: str, notes: Notes, template: ChatTemplate):
        self.where, self.notes, self.template = where, notes, template
        fields = notes.without_ignored(message) if isinstance(message, dict) else {}
        if "role" not in fields and "from" in fields:  # ShareGPT
            fields["role"] = fields.pop("from")
        if "content" not in fields and "value" in fields:
            fields["content"] = fields.pop("value")
        self.fields = fields
        role = fields.pop("role", None)
        if role == "function_call":  # ShareGPT: an assistant message whose text is the call
            calls = parsed(fields.pop("content", None), f"{where}.content")
            role, fields["tool_calls"] = "assistant", calls if isinstance(calls, list) else [calls]
        if not isinstance(role, str) or role not in ROLES:
            raise ValueError(f"{where} must be an object with a role of {', '.join(ROLES)}, got {message!r:.80}")
        self.role = ROLES[role]

    def read(self) -> tuple[dict, bool, Any]:
        """(the message for the template, is loss on it, the tools that a system message brings)."""
        message = {"role": self.role}
        trained = self._trained()
        if self.role == "assistant":
            message |= self._thinking() | self._calls()
        tools = self._own_tools() if self.role == "system" else None
        message["content"] = self._content(empty=len(message) > 1 or tools is not None)
        for key in METADATA[self.role]:
            if self.fields.pop(key, None) is not None:
                self.notes.unused.add(key)
        for key in [key for key, value in self.fields.items() if isinstance(value, str)]:
            if key in self.template.keys and self.template.renders(self.role, key):
                message[key] = self.fields.pop(key)
        self.notes.refuse_unknown(self.fields, self.where)
        lost = [key for key in message if key != "role" and not self.template.renders(self.role, key)]
        if lost:
            raise ValueError(f"{self.where}.{lost[0]}: the chat template {self.template.name} does not render it")
        return message, trained, tools

    def _trained(self) -> bool:
        switches = [key for key in self.fields if is_switch(key)]
        wanted = {key: switched_on(key, self.fields.pop(key), f"{self.where}.{key}") for key in switches}
        if len(set(wanted.values())) > 1:
            raise ValueError(f"{self.where}: {' and '.join(wanted)} contradict each other")
        if self.role != "assistant" and any(wanted.values()):
            raise ValueError(f"{self.where}.{next(iter(wanted))} wants loss on a message of the role {self.role}")
        return self.role == "assistant" and all(wanted.values())

    def _thinking(self) -> dict:
        given = {key: self.fields.pop(key) for key in THINKING if key in self.fields}
        given = {key: value for key, value in given.items() if value != ""}
        for key, value in given.items():
            if not isinstance(value, str):
                raise ValueError(f"{self.where}.{key} must be a string, got {value!r:.80}")
            if THINK_TAGS.search(value) or "</think>" in str(self.fields.get("content")):
                raise ValueError(
                    f"{self.where} has thinking as {key}, and <think> tags: leave these out, or keep all in content"
                )
        if len(set(given.values())) > 1:
            raise ValueError(f"{self.where} has {' and '.join(given)}, which differ: keep one")
        return {"reasoning_content": next(iter(given.values()))} if given else {}

    def _calls(self) -> dict:
        calls = parsed(self.fields.pop("tool_calls", None), f"{self.where}.tool_calls")
        old = self.fields.pop("function_call", None)  # OpenAI's old spelling of one call
        if old is not None:
            if calls:
                raise ValueError(f"{self.where} has both function_call and tool_calls: keep one")
            calls = [parsed(old, f"{self.where}.function_call")]
        if calls is None:
            return {}
        if not isinstance(calls, list):
            raise ValueError(f"{self.where}.tool_calls must be a list, got {calls!r:.80}")
        return {"tool_calls": [self._call(call) for call in calls]} if calls else {}

    def _call(self, call: Any) -> dict:
        """{"type": "function", "function": {"name": …, "arguments": {…}}}, or the inner object where it came alone."""
        where = f"{self.where}.tool_calls"
        fields = self.notes.without_ignored(call, CALL) if isinstance(call, dict) else {}
        function, outer = fields, {}
        if "function" in fields:
            inner = fields.pop("function")
            function = self.notes.without_ignored(inner, CALL) if isinstance(inner, dict) else {}
            outer = {"type": fields.pop("type", "function")}
        elif fields.get("type") == "function":
            fields.pop("type")
        if not isinstance(function.get("name"), str) or outer.get("type", "function") != "function":
            raise ValueError(f"{where} holds {call!r:.80}, which names no function")
        given = function.pop("arguments", None) or {}
        arguments = parsed(given, f"{where} arguments")
        if not isinstance(arguments, dict):
            raise ValueError(f"{where} arguments must be an object, got {arguments!r:.80}")
        if given is arguments:  # in JSON text, a null is meant
            arguments = _without_nulls(arguments, self.notes)
        result = {"name": function.pop("name"), "arguments": arguments}
        for left in (fields, function):
            for key in ("id", "index"):
                if left.pop(key, None) is not None:
                    self.notes.unused.add(key)
            self.notes.refuse_unknown(left, where)
        return outer | {"function": result} if outer else result

    def _own_tools(self) -> Any:
        tools, functions = self.fields.pop("tools", None), self.fields.pop("functions", None)
        if tools is not None and functions is not None:
            raise ValueError(f"{self.where} has both tools and functions: keep one")
        return functions_as_tools(functions) if functions is not None else tools

    def _content(self, empty: bool) -> Any:
        """The text, whose parts are joined as templates join them; or the list of several tool results.

        empty: a message without content is an empty one: it has tool calls, thinking or tools.
        """
        content = self.fields.pop("content", "" if empty else None)
        where = f"{self.where}.content"
        if isinstance(content, str):
            return content
        if content is None:
            raise ValueError(f"{self.where} has no content: say content = '' if it is meant to be empty")
        if not isinstance(content, list):
            raise ValueError(f"{where} must be a string or a list of parts, got {content!r:.80}; {AS_TEXT}")
        if self.role == "tool" and "output" in self.template.keys and (results := self._results(content)):
            return results
        return "".join(self._part(part, f"{where}[{j}]") for j, part in enumerate(content))

    def _results(self, content: list) -> list | None:
        """Several tool results in one message, each a string or {"output": string}, which such templates render."""
        results = [self.notes.without_ignored(item) if isinstance(item, dict) else item for item in content]
        outputs = [item["output"] if isinstance(item, dict) and item.keys() == {"output"} else item for item in results]
        return results if all(isinstance(output, str) for output in outputs) else None

    def _part(self, part: Any, where: str) -> str:
        if isinstance(part, str):
            return part
        fields = self.notes.without_ignored(part, ("type", "text")) if isinstance(part, dict) else {}
        kind, text = fields.pop("type", None), fields.pop("text", None)
        if kind not in TEXT_PARTS or not isinstance(text, str):
            raise ValueError(f"{where} is {part!r:.80}: only parts of text can be rendered ({', '.join(TEXT_PARTS)})")
        self.notes.refuse_unknown(fields, where)
        return text
