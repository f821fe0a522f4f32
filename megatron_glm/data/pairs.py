"""Rows with two answers to one prompt, the chosen and the rejected one, in the forms of several trainers.

Each becomes two rows of a kind that is trained on anyway: a prompt and its completion, or token ids and labels.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .ids import TokenRow, integers
from .kinds import COMPLETION, TOKENS
from .messages import parsed

NO_LOSS = -100  # label of a token of the prompt
SIDES = ("chosen", "rejected")
# columns of the two answers, in the order of SIDES; those with what is before them come first
ANSWERS = (SIDES, ("preferred_output", "non_preferred_output"))
SWIFT = ("rejected_response", "rejected_messages")  # beside messages, whose last turn is the chosen answer
IDS = (("prompt_input_ids", "chosen_input_ids", "rejected_input_ids"), ("prompt_ids", "chosen_ids", "rejected_ids"))
HISTORY = ("messages", "conversations")
QUESTIONS = ("question", "instruction")
KNOWN = (
    "prompt+chosen+rejected, chosen+rejected, messages+rejected_response, messages+chosen+rejected, "
    "instruction+chosen+rejected, question+chosen+rejected, context+completions with ranks, "
    "input+preferred_output+non_preferred_output, prompt_ids+chosen_ids+rejected_ids"
)

Sides = tuple[dict, dict]


def is_pair(row: dict) -> bool:
    """Whether a row has two answers to one prompt."""
    both = [{*columns[1:]} for columns in IDS] + [{*columns} for columns in ANSWERS] + [{"context", "completions"}]
    return any(columns <= row.keys() for columns in [*both, *({name} for name in SWIFT)])


def split_pair(row: dict) -> tuple[Sides, tuple[str, ...], tuple[str, ...]]:
    """(the row with the chosen answer and that with the rejected one, their kind, the columns that were read).

    Other columns stay in both. Raises ValueError for a row that is no pair, or one whose answers are the same.
    """
    for columns in IDS:
        if {*columns[1:]} <= row.keys():
            sides, used = _of_ids(row, columns)
            kind = TOKENS
            break
    else:
        prompt, answers, used = _prompt_and_answers(row)
        if answers[0] == answers[1]:
            raise ValueError("the chosen and the rejected answer are the same")
        sides, kind = tuple({"prompt": prompt, "completion": answer} for answer in answers), COMPLETION
    rest = {key: value for key, value in row.items() if key not in used}
    return (rest | sides[0], rest | sides[1]), kind, used


def _prompt_and_answers(row: dict) -> tuple[Any, tuple[Any, Any], tuple[str, ...]]:
    """Of two strings, or of two lists of messages each; the prompt is of the same type."""
    for names in ANSWERS:
        if {*names} <= row.keys():
            answers = _typed(row[names[0]], names[0]), _typed(row[names[1]], names[1])
            if type(answers[0]) is not type(answers[1]):
                raise ValueError(f"{names[0]} and {names[1]} must be two strings or two lists of messages")
            return _with_prompt(row, names, answers)
    if rejected := [name for name in SWIFT if name in row]:
        if (name := next((name for name in HISTORY if name in row), None)) is None:
            raise ValueError(
                f"{rejected[0]} needs messages, the last of which is the chosen answer; the row has {sorted(row)}"
            )
        turns = _messages(row[name], name)
        answer = _as_messages(_typed(row[rejected[0]], rejected[0]))
        if len(turns) < 2 or _role(turns[-1]) not in ("assistant", "gpt"):
            raise ValueError(f"{name} beside {rejected[0]} must be a prompt and end with the assistant's chosen answer")
        if answer[: len(turns) - 1] == turns[:-1]:
            answer = answer[len(turns) - 1 :]
        return turns[:-1], (turns[-1:], answer), (name, rejected[0])
    if {"context", "completions"} <= row.keys():
        return _messages(row["context"], "context"), _ranked(row["completions"]), ("context", "completions")
    raise ValueError(f"the row has the keys {sorted(row)} and is no pair of answers ({KNOWN})")


def _with_prompt(
    row: dict, names: tuple[str, str], answers: tuple[Any, Any]
) -> tuple[Any, tuple[Any, Any], tuple[str, ...]]:
    """The prompt of these answers: a column, or what both answers begin with."""
    history = next((name for name in HISTORY if name in row), None)
    question = next((name for name in QUESTIONS if isinstance(row.get(name), str)), None)
    if "prompt" in row:
        prompt, used = _typed(row["prompt"], "prompt"), ("prompt",)
    elif history is not None:
        prompt, used = _messages(row[history], history), (history,)
    elif isinstance(row.get("input"), dict) and "messages" in row["input"]:
        inside = {key: value for key, value in row["input"].items() if value is not None and key != "messages"}
        if unread := sorted(inside.keys() - {"parallel_tool_calls"}):
            raise ValueError(f"input.{unread[0]} is not read: make it a column of the row")
        prompt, used = _messages(row["input"]["messages"], "input.messages"), ("input",)
    elif question is not None:
        parts = [row[name] for name in (question, "input") if isinstance(row.get(name), str) and row[name]]
        prompt, used = [{"role": "user", "content": "\n".join(parts)}], (question, "input")
    else:
        prompt, answers = _common(*answers)
        return prompt, answers, names
    used += names
    if isinstance(prompt, str) and isinstance(answers[0], str):
        return prompt, answers, used
    both = _as_messages(answers[0]), _as_messages(answers[1])
    if isinstance(prompt, str):
        if _role(both[0][0]) in ("assistant", "gpt"):
            return [{"role": "user", "content": prompt}], both, used
        found, both = _common(*both)
        if prompt not in [message.get("content", message.get("value")) for message in found]:
            raise ValueError(f"prompt ({prompt!r:.60}) is no message of the conversation that both answers go on from")
        return found, both, used
    if all(side[: len(prompt)] == prompt for side in both):  # the answers repeat the prompt
        both = both[0][len(prompt) :], both[1][len(prompt) :]
    return prompt, both, used


def _common(chosen: Any, rejected: Any) -> tuple[Any, tuple[Any, Any]]:
    """(what both begin with, the rest of each); of strings it ends before a space, which begins the answers."""
    n = 0
    while n < min(len(chosen), len(rejected)) and chosen[n] == rejected[n]:
        n += 1
    if isinstance(chosen, str) and n and chosen[n - 1] == " ":
        n -= 1
    if n == 0:
        raise ValueError("chosen and rejected begin with different messages, and there is no prompt beside them")
    return chosen[:n], (chosen[n:], rejected[n:])


def _ranked(completions: Any) -> tuple[list, list]:
    """The answers of two completions, the one of the lower rank first."""
    found = parsed(completions, "completions")
    if not isinstance(found, list) or len(found) != 2 or not all(isinstance(each, dict) for each in found):
        raise ValueError(f"completions must be a list of two objects with rank and completion, got {found!r:.80}")
    for each in found:
        if type(each.get("rank")) not in (int, float) or "completion" not in each:
            raise ValueError(f"each of completions needs a rank, a number, and a completion, got {each!r:.80}")
    if found[0]["rank"] == found[1]["rank"]:
        raise ValueError(f"both completions have the rank {found[0]['rank']}: neither is the chosen one")
    found.sort(key=lambda each: each["rank"])
    chosen, rejected = (_as_messages(_typed(each["completion"], "completion")) for each in found)
    return chosen, rejected


def _of_ids(row: dict, columns: tuple[str, str, str]) -> tuple[Sides, tuple[str, ...]]:
    """Both answers as token ids with labels: behind the prompt's ids, or whole with a column of labels each."""
    prompt, *names = columns
    answers = [integers(row[name], name) for name in names]
    if np.array_equal(answers[0], answers[1]):
        raise ValueError(f"{names[0]} and {names[1]} are the same")
    labels = [f"{side}_labels" for side in SIDES]
    if prompt in row:
        before = integers(row[prompt], prompt)
        ids = [np.concatenate([before, answer]) for answer in answers]
        made = [np.concatenate([np.full(len(before), NO_LOSS), answer]) for answer in answers]
        used = columns
    elif {*labels} <= row.keys():
        ids, made, used = answers, [integers(row[name], name) for name in labels], (*names, *labels)
    else:
        raise ValueError(f"{names[0]} needs {prompt}, the tokens before it, or {' and '.join(labels)}")
    sides = [{"input_ids": i.tolist(), "labels": label.tolist()} for i, label in zip(ids, made, strict=True)]
    return (sides[0], sides[1]), tuple(used)


def check_pair(chosen: TokenRow, rejected: TokenRow) -> None:
    """Raises ValueError if the tokens are no pair: another prompt, the same answer, or one without a target."""
    if np.array_equal(chosen.ids, rejected.ids):
        raise ValueError("the chosen and the rejected answer have the same tokens")
    for side, row in zip(SIDES, (chosen, rejected), strict=True):
        if len(row.lengths) != 1:
            raise ValueError(f"the {side} answer has {len(row.lengths)} documents, it must be one")
        if not row.targets[1:].any():
            raise ValueError(f"the {side} answer has no token that counts")
    first, second = (row.ids[: row.targets.argmax()] for row in (chosen, rejected))
    if not np.array_equal(first, second):
        n = min(len(first), len(second))
        at = int(np.append(first[:n] != second[:n], True).argmax())
        raise ValueError(
            f"the prompts of the chosen and the rejected answer differ after templating: at token {at} of {len(first)} "
            f"and {len(second)}"
        )


def _typed(value: Any, name: str) -> str | list:
    """A string, or a list of messages, of which a single one may be alone."""
    value = [value] if isinstance(value, dict) else value
    if not isinstance(value, str | list) or not value:
        raise ValueError(f"{name} must be a string or a list of messages that is not empty, got {value!r:.80}")
    return value


def _messages(value: Any, name: str) -> list:
    value = parsed(value, name)
    if not isinstance(value, list) or not value:
        raise ValueError(f"{name} must be a list of messages that is not empty, got {value!r:.80}")
    return value


def _as_messages(answer: str | list) -> list:
    return [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer


def _role(message: Any) -> Any:
    return message.get("role", message.get("from")) if isinstance(message, dict) else None
