"""Kinds of rows: the keys that make a row of each, and what can be made of rows of other shapes."""

from __future__ import annotations

from collections.abc import Collection

from .files import RawRow, decode_row

# the keys that make a row of a kind; the first kind that a row has all keys of is taken
TOKENS, CHAT, SHAREGPT = ("input_ids",), ("messages",), ("conversations",)
COMPLETION, RESPONSE, ALPACA = ("prompt", "completion"), ("prompt", "response"), ("instruction", "output")
HELLASWAG, TEXT = ("ctx", "endings", "label"), ("text",)
KINDS = (TOKENS, CHAT, SHAREGPT, COMPLETION, RESPONSE, ALPACA, HELLASWAG, TEXT)
CONVERSATIONS = (CHAT, SHAREGPT, ALPACA)  # rendered by the chat template
PAIRS = (COMPLETION, RESPONSE)  # of two strings, or two lists of messages for the chat template

# other shapes that are common, and the line that makes a kind above of each
CONVERSIONS = {
    ("question", "context", "answer"): 'row = {"prompt": row["context"] + "\\n" + row["question"], "completion": '
    'row["answer"]}',
    ("question", "answer"): 'row = {"prompt": row["question"], "completion": row["answer"]}',
    ("query", "response"): 'row = {"prompt": row["query"], "completion": row["response"]}',
    ("instruction", "response"): 'row = {"instruction": row["instruction"], "input": row.get("input") or '
    'row.get("context"), "output": row["response"]}',
    ("problem", "solution"): 'row = {"prompt": row["problem"], "completion": row["solution"]}',
    ("input", "output"): 'row = {"prompt": row["input"], "completion": row["output"]}',
    ("inputs", "targets"): 'row = {"prompt": row["inputs"], "completion": row["targets"]}',
    ("source", "target"): 'row = {"prompt": row["source"], "completion": row["target"]}',
    ("prompt", "chosen"): 'row = {"prompt": row["prompt"], "completion": row["chosen"]}',
    ("chosen",): 'row = {"messages": row["chosen"]}',
    ("conversation",): 'row = {"messages": [{"role": role, "content": turn[role]} for turn in row["conversation"]'
    ' for role in ("human", "assistant") if turn.get(role)]}',
    ("dialogue",): 'row = {"messages": row["dialogue"]}',
    ("content",): 'row = {"text": row["content"]}',
    ("tokens",): 'row = {"input_ids": row["tokens"]}',
    ("token_ids",): 'row = {"input_ids": row["token_ids"]}',
}


def parse_row(raw: RawRow, ignored: Collection[str] = ()) -> tuple[dict, tuple[str, ...]]:
    """The row and its kind; raises ValueError if it is no JSON object or of no known kind.

    A row with a prompt and its answer under other names is refused with the line that converts it. So is one that has a
    text, too: that may hold both, and loss would be on the prompt. `ignored`: keys that say nothing, and make no kind.
    """
    row = decode_row(raw)
    known = row.keys() - ignored
    found = next((keys for keys in KINDS if known.issuperset(keys)), None)
    shapes = ((keys, line) for keys, line in CONVERSIONS.items() if found is None or len(keys) > 1)
    shape = next((each for each in shapes if known.issuperset(each[0])), None)
    if found and (found != TEXT or shape is None):
        return row, found
    kinds = ", ".join("+".join(keys) for keys in KINDS)
    if found and shape is not None:
        keys, line = shape
        raise ValueError(
            f"the row has a text, and {' and '.join(keys)}: convert each with {line}, or name {keys[0]} in "
            "--ignore-keys to train on all of the text"
        )
    if shape:
        pairs = ", or train on pairs of answers with --loss dpo" if "chosen" in shape[0] else ""
        raise ValueError(
            f"{'+'.join(shape[0])} is no kind of row that is read ({kinds}); convert each with {shape[1]}{pairs}"
        )
    raise ValueError(
        f"the row has the keys {sorted(row)} and is of no known kind ({kinds}); convert each, as with row = "
        '{"prompt": row["QUESTION"], "completion": row["ANSWER"]}'
    )


def is_chat(row: dict, kind: tuple[str, ...]) -> bool:
    """Is the row rendered by the chat template?"""
    return kind in CONVERSATIONS or (kind in PAIRS and any(isinstance(row[key], list) for key in kind))
