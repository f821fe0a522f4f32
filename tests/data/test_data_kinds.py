"""What rows say beyond their text: switches, masks, other trainers' spellings. Each is honoured, or refused by name."""

from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path

import numpy as np
import pytest

from megatron_glm.data.report import RowReport
from megatron_glm.data.rows import RowReader, RowSettings
from tests.helpers.rows import chat_folder, text_and_target, tokenise

HI, GOOD, BAD = (
    {"role": role, "content": text} for role, text in zip(("user", *["assistant"] * 2), "hgb", strict=True)
)
CALL = {"type": "function", "function": {"name": "look", "arguments": {"x": 1}}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
TWO_CALLS = CALLING | {"tool_calls": [CALL | {"id": "a"}, CALL | {"id": "b"}]}
CALL_TEXT = "\n<think></think>\n<tool_call>look\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}
START, ANSWER = "[gMASK]<sop>", "\n<think></think>\ng<|user|>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return chat_folder(tmp_path_factory.mktemp("hf"))


def chat(*messages: dict, **columns) -> dict:
    return {"messages": list(messages), **columns}


def result(content, *before: dict) -> dict:
    """A chat in which a tool answers with `content`."""
    return chat(HI, CALLING, *before, {"role": "tool", "content": content}, GOOD)


@pytest.mark.parametrize(
    "off, on",
    [
        ({"weight": 0}, {"weight": 1}),
        ({"weight": 0.0}, {"weight": 1.0}),
        ({"train": False}, {"train": True}),
        ({"training": False}, {}),
        ({"loss": False}, {"loss": None}),
        ({"loss_scale": 0.0}, {"loss_scale": 1.0}),
        ({"loss_mask": 0}, {"loss_mask": 1}),
        ({"loss_weight": 0}, {}),
        ({"masked": True}, {"masked": False}),
    ],
)
def test_a_switch_of_a_message(folder: Path, off: dict, on: dict):
    row = chat(HI, off | BAD, HI | off if "masked" in off or "weight" in off else HI, GOOD | on)
    whole, target = text_and_target(folder, row)
    assert "b<|user|>" in whole and target == ANSWER


@pytest.mark.parametrize("key", ["weight", "loss_mask", "train"])
def test_a_switch_of_a_row(folder: Path, key: str):
    for row in (chat(HI, GOOD), {"text": "a"}, {"prompt": "a", "completion": "b"}, {"input_ids": [1, 2]}):
        assert tokenise(folder, row | {key: True}).targets.any()
        assert not tokenise(folder, row | {key: 0}).targets.any()


CHATS = [
    (chat({"role": "developer", "content": "s"}, HI, GOOD), "<|system|>\ns<|user|>\nh<|assistant|>", ANSWER),
    (chat(HI, GOOD, system="s"), "<|system|>\ns<|user|>\nh<|assistant|>", ANSWER),
    (chat(HI, GOOD, chat_template_kwargs={"enable_thinking": False}), "/nothink<|assistant|>", "\ng<|user|>"),
    (chat(HI, GOOD, chat_template_kwargs='{"enable_thinking": false}'), "/nothink<|assistant|>", "\ng<|user|>"),
    (chat(HI, GOOD, extra_body={"chat_template_kwargs": {"enable_thinking": False}}), "/nothink<", "\ng<|user|>"),
    (chat(HI, GOOD, enable_thinking=False), "/nothink<|assistant|>", "\ng<|user|>"),
    (chat(HI, GOOD, functions=[TOOL["function"]]), f"<tools>\n{json.dumps(TOOL)}\n</tools>", ANSWER),
    (chat(HI, GOOD, tools=""), "<|user|>", ANSWER),
    (chat(HI, GOOD, tools=[json.dumps(TOOL)]), f"<tools>\n{json.dumps(TOOL)}\n</tools>", ANSWER),
    (chat({"role": "system", "content": "s", "tools": [TOOL]}, HI, GOOD), json.dumps(TOOL), ANSWER),
    (result([{"type": "text", "text": "10"}, {"type": "text", "text": "525"}]), "\n10525\n", CALL_TEXT),
    (result([{"output": "10525"}, {"output": "7"}]), "\n10525\n</tool_response>\n<tool_response>\n7\n", CALL_TEXT),
    (chat(HI, {"role": "assistant", "content": [{"type": "output_text", "text": "g", "logprobs": []}]}), "h", ANSWER),
    (chat(HI, GOOD | {"reasoning": "why"}), "h", "\n<think>why</think>\ng<|user|>"),
    (chat(HI, GOOD | {"thinking": "why"}), "h", "\n<think>why</think>\ng<|user|>"),
    (chat(HI, {"content": "<think>why</think>g", "role": "assistant"}), "h", "\n<think>why</think>\ng<|user|>"),
    (
        chat(
            HI,
            {"role": "assistant", "content": None, "function_call": {"name": "look", "arguments": '{"x": 1}'}},
            {"role": "function", "name": "look", "content": "r"},
        ),
        "<tool_response>\nr\n",
        CALL_TEXT + "<|observation|>",
    ),
    ({"conversations": [{"from": "human", "value": "h"}, {"from": "gpt", "value": "g"}], "system": "s"}, "s<", ANSWER),
    (
        {"conversations": [{"from": "human", "value": "h"}, {"from": "function_call", "value": '{"name": "look"}'}]},
        "h",
        "\n<think></think>\n<tool_call>look\n</tool_call><|observation|>",
    ),
    ({"instruction": "do", "input": "it", "output": "g", "text": "do it: g"}, "<|user|>\ndo\nit<|assistant|>", ANSWER),
    ({"prompt": [HI, BAD, HI], "completion": [GOOD]}, "b<|user|>\nh<|assistant|>", ANSWER),
    ({"prompt": [HI, BAD], "completion": [HI, GOOD], "system": "s"}, "<|system|>\ns<|user|>", ANSWER),
    ({"prompt": "a", "response": "b"}, "ab", "b<|endoftext|>"),
    ({"prompt": "read a", "completion": "b", "question": " a ", "input": 5}, "read ab", "b<|endoftext|>"),
    (
        {"conversations": [{"role": "user", "value": "h"}, {"role": "assistant", "value": "g"}]},
        "\nh<",
        ANSWER,
    ),
    (
        {"conversations": [{"from": "human", "value": "h"}, {"from": "function_call", "value": '[{"name": "look"}]'}]},
        "h",
        "\n<think></think>\n<tool_call>look\n</tool_call><|observation|>",
    ),
    (
        chat(HI, GOOD | {"content": "<think>why</think>g", "reasoning_content": ""}),
        "h",
        "\n<think>why</think>\ng<|user|>",
    ),
    (
        chat(HI, GOOD | {"function_call": {"name": None, "arguments": None}, "extra": {"a": None}}),
        "h",
        ANSWER,
    ),
]
HELLASWAG_ROW = {
    "ind": 4,
    "activity_label": "Fishing",
    "ctx_a": "c",
    "ctx_b": "",
    "ctx": "c",
    "endings": ["d", "e"],
    "label": "1",
}


@pytest.mark.parametrize("row, part, target", CHATS)
def test_spellings(folder: Path, row: dict, part: str, target: str):
    whole, trained = text_and_target(folder, row)
    assert part in whole and "{'" not in whole
    assert trained == target or (target == CALL_TEXT and trained == CALL_TEXT + "<|observation|>" + ANSWER)


def test_a_row_of_hellaswag_as_it_is_published(folder: Path):
    assert text_and_target(folder, HELLASWAG_ROW) == ("c e<|endoftext|>", " e<|endoftext|>")


METADATA = "name it in --ignore-keys if it is only metadata"
REFUSED = [
    (chat(HI, BAD | {"weight": 0.5}), rf"messages\[1\].weight is 0.5, and only 0, 1.*{METADATA}"),
    (chat(HI, BAD | {"weight": "0"}), r"messages\[1\].weight is '0'"),
    (chat(HI, BAD | {"loss_mask": [0, 1]}), r"messages\[1\].loss_mask is \[0, 1\]"),
    (chat(HI, BAD | {"weight": 0, "train": True}), "weight and train contradict each other"),
    (chat(HI | {"train": True}, GOOD), r"messages\[0\].train wants loss on a message of the role user"),
    (chat(HI, BAD | {"mask": 1}), rf"messages\[1\] has the unknown key 'mask' \(1\); {METADATA}"),
    (chat(HI, BAD | {"train_detail": [{"train": False}]}), "unknown key 'train_detail'"),
    (chat(HI, BAD | {"metadata": {"weight": 0}}), "unknown key 'metadata'"),
    (chat(HI, GOOD, metadata={"weight": 0}), rf"the row has the key metadata.weight = 0, .*{METADATA}"),
    (chat(HI, GOOD, extra=[{"info": {"lossMask": [0]}}]), "the row has the key extra.info.lossMask"),
    (chat(HI, GOOD, weight=0.5), "the row's weight is 0.5"),
    (chat(HI, GOOD, loss_mask=[0, 1]), "the row has the key loss_mask"),
    (chat(HI, GOOD, mask_history=True), "the row has the key mask_history"),
    (chat(HI, GOOD, sample_weight=1), "the row has the key sample_weight"),
    (chat(HI, GOOD, position_ids=[0]), "the row has the key position_ids"),
    (chat(HI, GOOD, images=["a.png"]), "the row has the key images"),
    (chat(HI, GOOD, label=False), "the row has the key label"),
    (chat(HI, GOOD, thinking=False), "the row has the key thinking"),
    (
        chat(HI, GOOD, chat_template_kwargs={"clear_thinking": 0}),
        "clear_thinking: .* not read it, only enable_thinking",
    ),
    (chat(HI, GOOD, chat_template_kwargs={"add_generation_prompt": 1}), "chat_template_kwargs.add_generation_prompt"),
    (chat(HI, GOOD, chat_template_kwargs={"enable_thinking": "false"}), "enable_thinking is the string 'false'"),
    (chat(HI, GOOD, extra_body={"top_k": 1}), "extra_body.top_k is not read"),
    (
        chat(HI, GOOD, enable_thinking=True, extra_body={"chat_template_kwargs": {"enable_thinking": False}}),
        "the row sets enable_thinking to True and to False",
    ),
    (chat({"role": "system", "content": "t"}, HI, GOOD, system="s"), "a column system and a message of the role sys"),
    (chat(HI, GOOD, tools=[TOOL], functions=[TOOL]), "both tools and functions"),
    (chat(HI | {"tools": [TOOL]}, GOOD), "unknown key 'tools'"),
    (chat({"role": "system", "content": "s", "tools": [TOOL]}, HI, GOOD, tools=[TOOL]), r"messages\[0\] has tools"),
    (result([{"type": "image_url", "image_url": {"url": "u"}}]), r"content\[0\] is .* only parts of text"),
    (result([{"text": "no type"}]), r"content\[0\] is .*only parts of text"),
    (result([{"type": "text", "text": "a", "weight": 0}]), "unknown key 'weight'"),
    (result({"a": 1}), r'must be a string or a list of parts.*\["content"\] = json.dumps\(value\)'),
    (result(None), "has no content"),
    (chat(HI, {"role": "assistant"}), r"messages\[1\] has no content"),
    (chat(HI, GOOD | {"thought": "t"}), "unknown key 'thought'"),
    (chat(HI, GOOD | {"reasoning": "a", "thinking": "b"}), "reasoning and thinking, which differ"),
    (chat(HI | {"reasoning_content": "a"}, GOOD), "unknown key 'reasoning_content'"),
    (chat(HI, GOOD | {"refusal": "no"}), "unknown key 'refusal'"),
    (chat(HI | {"name": "user"}, GOOD), "unknown key 'name'"),
    (chat(HI | {"tool_calls": [CALL]}, GOOD), "unknown key 'tool_calls'"),
    (chat(HI, CALLING | {"tool_calls": [{"name": "f", "parameters": {}, "x": 1}]}), "unknown key 'x'"),
    (chat(HI, CALLING | {"tool_calls": [{"type": "custom", "function": CALL["function"]}]}), "names no function"),
    (chat(HI, CALLING | {"function_call": {"name": "f"}}), "both function_call and tool_calls"),
    (chat(HI, {"role": "assistant", "content": "lost <think>t</think>g"}, HI, GOOD), r"render messages\[1\].content"),
    ({"prompt": "a", "completion": "b", "system": "s"}, "the row has the key system"),
    ({"prompt": [HI], "completion": "b"}, "two strings or two lists of messages"),
    ({"instruction": "a", "output": "b", "history": [["c", "d"]]}, "the row has the key history"),
    ({"question": "a", "answer": "b"}, r'convert each with row = {"prompt": row\["question"\], "completion"'),
    ({"conversation": [{"human": "a", "assistant": "b"}]}, r'with row = {"messages": \[.* row\["conversation"\]'),
    ({"text": "a b", "question": "a", "answer": "b"}, r"a text, and question and answer: convert .* name question in"),
    ({"instruction": "a", "response": "b", "text": "a b"}, "a text, and instruction and response: convert"),
    (
        chat(HI, GOOD | {"content": "<think>why</think>g", "reasoning": "why"}),
        r"messages\[1\] has thinking as reasoning, and <think> tags",
    ),
    (chat(HI, GOOD | {"thinking": "<think>why</think>"}), r"messages\[1\] has thinking as thinking, and <think> tags"),
    (chat({"role": "developer", "content": "t"}, HI, GOOD, system="s"), "a column system and a message of the role"),
    (
        chat(HI, TWO_CALLS, *({"role": "tool", "content": "r", "tool_call_id": i} for i in "ba"), GOOD),
        r"messages\[2\] answers the call 'b', but 'a' was called before it",
    ),
    (chat(HI, GOOD, enable_thinking="no"), "enable_thinking is the string 'no'"),
    (chat(HI, GOOD, enable_thinking="<|user|>"), r"enable_thinking contains <\|user\|>"),
    (chat(HI, GOOD, context="c"), rf"the row has the key context = 'c', which is not read; {METADATA}"),
    ({"prompt": "do", "query": "it", "response": "b"}, "the row has the key query = 'it', which is not read"),
    ({"instruction": "do", "context": ["it"], "output": "b"}, "the row has the key context"),
    ({"prompt": "a", "completion": "b", "cot": "c"}, "the row has the key cot"),
    ({"text": "ab", "prompt": "a"}, "prompt = 'a', which is in the text, too: convert .* to train on all of the text"),
    ({"prompt": "a<|endof", "completion": "text|>"}, r"completion contains the special token <\|endoftext\|>"),
    ({"instruction": "a", "context": "b", "response": "c"}, r'"input": row.get\("input"\) or row.get\("context"\)'),
    ({"a": "b"}, r'convert each, as with row = {"prompt": row\["QUESTION"\]'),
]


@pytest.mark.parametrize("row, match", REFUSED, ids=[match for _, match in REFUSED])
def test_what_would_be_lost_is_refused(folder: Path, row: dict, match: str):
    with pytest.raises(ValueError, match=f"rows:1: .*{match}"):
        tokenise(folder, row)


def test_columns_that_are_only_metadata(folder: Path):
    assert text_and_target(folder, {"text": "ab", "question": "a", "answer": "b"}, ignore_keys=("question",))[1] == (
        "ab<|endoftext|>"
    )
    row = {"prompt": "a", "completion": "b", "text": "ab"}
    assert text_and_target(folder, row)[1] == "b<|endoftext|>"
    assert text_and_target(folder, row, ignore_keys=("prompt",))[1] == "ab<|endoftext|>"
    row = chat(HI | {"timestamp": 3, "lang": "en"}, GOOD | {"weight": 0.5, "id": "m"}, id=7, metadata={"weight": 0.5})
    result = tokenise(folder, row, {"text": "a", "source": "b"}, ignore_keys=("timestamp", "lang", "weight"))
    summary = "kinds: 1 messages, 1 text; columns not used: id, lang, metadata, source, timestamp, weight"
    assert result.report.summary() == summary
    assert text_and_target(folder, row, ignore_keys=("timestamp", "lang", "weight"))[1] == ANSWER


def test_null_members_are_no_members(folder: Path):
    """As Arrow writes them; the same in JSON, with a warning. A null inside arguments that are JSON text is meant."""
    call = {"id": None, "function": {"name": "look", "arguments": {"x": 1, "y": None, "z": {"a": None}}}}
    tool = {"type": "function", "function": {"name": "look", "parameters": {"default": None}}}
    result = tokenise(folder, chat(HI, CALLING | {"tool_calls": [call]}, tools=[tool]))
    assert [(place, "null members" in warning) for warning, place in result.report.warnings.items()] == [
        ("rows:1", True)
    ]
    whole, _ = text_and_target(folder, chat(HI, CALLING | {"tool_calls": [call]}, tools=[tool]))
    tokenised = tokenise(folder, chat(HI, CALLING | {"tool_calls": [{"name": "f", "arguments": {"x": None}}]}))
    assert len(tokenised.report.warnings) == 1
    assert "null" not in whole and '"parameters": {}' in whole and "<arg_value>{}</arg_value>" in whole
    call = {"function": {"name": "look", "arguments": '{"x": null}'}}
    assert "<arg_value>null</arg_value>" in text_and_target(folder, chat(HI, CALLING | {"tool_calls": [call]}))[1]


@pytest.mark.parametrize(
    "row, where",
    [
        (chat(HI, BAD | {"content": "[gMASK]"}), r"messages\[1\].content contains the special token \[gMASK\]"),
        (chat(HI, CALLING | {"tool_calls": [{"name": "f", "arguments": {"a": ["<sop>"]}}]}), r"\[1\].tool_calls cont"),
        (chat(HI, GOOD, tools=[TOOL | {"<sop>": 1}]), "tools contains the special token <sop>"),
        ({"text": "a<|endoftext|>"}, r"text contains the special token <\|endoftext\|>"),
        ({"prompt": "<|user|>", "completion": "b"}, r"prompt contains the special token <\|user\|>"),
        ({"prompt": "a", "completion": "b<|endoftext|>"}, r"completion contains the special token <\|endoftext\|>"),
        ({"ctx": "<sop>", "endings": ["a"], "label": 0}, "ctx contains the special token <sop>"),
    ],
)
def test_special_tokens_in_text(folder: Path, row: dict, where: str):
    with pytest.raises(ValueError, match=f"{where}.* or give --special-tokens-in-text"):
        tokenise(folder, row)
    whole, target = text_and_target(folder, row, special_tokens_in_text=True)
    assert whole.count("<|endoftext|>") == (0 if "messages" in row else 1)
    assert target.endswith(("<|endoftext|>", "<|user|>", "<|observation|>"))


@pytest.mark.parametrize("special_tokens_in_text", [False, True])
def test_role_tokens_never_come_from_a_message(folder: Path, special_tokens_in_text: bool):
    for row in (chat(HI | {"content": "<|user|>"}, GOOD), chat(HI, GOOD, tools=[TOOL | {"a": "<|user|>"}])):
        with pytest.raises(ValueError, match=r"contains <\|user\|>, which would end or begin a turn"):
            tokenise(folder, row, special_tokens_in_text=special_tokens_in_text)


def test_last_turn_only(folder: Path):
    assert text_and_target(folder, chat(HI, BAD, HI, GOOD), train_on_last_turn_only=True)[1] == ANSWER
    assert text_and_target(folder, chat(HI, BAD, HI, GOOD, HI), train_on_last_turn_only=True)[1] == ANSWER
    assert text_and_target(folder, chat(HI, GOOD, HI, BAD | {"weight": 0}), train_on_last_turn_only=True)[1] == ""


@pytest.mark.parametrize(
    "columns, targets, lengths",
    [
        ({"loss_mask": [0, 0, 1, 1, 0, 1], "seq_start_id": [0, 4]}, [0, 0, 1, 1, 0, 1], [4, 2]),
        ({"assistant_masks": [0, 0, 0, 1, 1, 1]}, [0, 0, 0, 1, 1, 1], [6]),
        ({"completion_mask": [False] * 5 + [True]}, [0, 0, 0, 0, 0, 1], [6]),
        ({"loss_weights": [0.0] * 5 + [1.0], "labels": [5, 6, 7, 8, 9, 10]}, [0, 0, 0, 0, 0, 1], [6]),
        ({"labels": [-100, 6, 7, 8, 9, 10], "loss_mask": [1, 1, 0, 1, 1, 1]}, [0, 1, 0, 1, 1, 1], [6]),
        ({"attention_mask": [0, 1, 1, 1, 1, 0]}, [1, 1, 1, 1], [4]),
        ({"attention_mask": [1, 1, 2, 2, 2, 0]}, [1, 1, 1, 1, 1], [2, 3]),
        ({"position_ids": [0, 1, 2, 0, 1, 0]}, [1] * 6, [3, 2, 1]),
        ({"position_ids": [0, 1, 2, 0, 1, 2], "seq_start_id": [0, 3]}, [1] * 6, [3, 3]),
        ({"cu_seqlens": [0, 2, 6], "max_seqlen": 4}, [1] * 6, [2, 4]),
        ({"seq_lens": [2, 4]}, [1] * 6, [2, 4]),
        ({"seq_len": 6, "input_length": 6, "special_tokens_mask": [0] * 6}, [1] * 6, [6]),
        ({"document_ids": [7, 7, 8, 8, 8, 8]}, [1] * 6, [2, 4]),
        ({"token_type_ids": [0] * 6}, [1] * 6, [6]),
        ({"position_ids": [0, 1, 2, 3, 0, 0], "attention_mask": [1, 1, 1, 1, 0, 0]}, [1] * 4, [4]),
    ],
)
def test_masks_and_documents_of_ready_ids(columns: dict, targets: list[int], lengths: list[int]):
    result = tokenise(None, {"input_ids": [5, 6, 7, 8, 9, 10]} | columns)
    assert result.targets.tolist() == [bool(target) for target in targets] and result.lengths.tolist() == lengths
    assert len(result.ids) == sum(lengths) and result.ids.dtype == np.int32


@pytest.mark.parametrize(
    "columns, match",
    [
        ({"loss_mask": [0, 1]}, "loss_mask has 2 entries but input_ids has 4"),
        ({"attention_mask": [1] * 5}, "attention_mask has 5 entries but input_ids has 4"),
        ({"loss_mask": [0, 1, 0.5, 1]}, "loss_mask holds 0.5: only 0 and 1"),
        ({"loss_mask": [0, 1, -1, 1]}, "loss_mask holds -1: only 0 and 1"),
        ({"attention_mask": [1, 0, 1, 1]}, r"attention_mask\[1\] is 0 between tokens"),
        ({"attention_mask": [0] * 4}, "attention_mask holds 0"),
        ({"position_ids": [1, 2, 3, 4]}, r"position_ids\[0\] is 1, expected 0"),
        ({"position_ids": [0, 1, 0, 1], "seq_start_id": [0, 3]}, r"position_ids\[2\] is 0, expected 2"),
        ({"seq_lens": [2, 2], "cu_seqlens": [0, 3, 4]}, r"cu_seqlens and seq_lens disagree .* input_ids\[2\]"),
        ({"seq_lens": [2, 3]}, "seq_lens is .* does not cut the 4 input_ids"),
        ({"seq_start_id": [1]}, "seq_start_id is .* does not cut the 4 input_ids"),
        ({"token_type_ids": [0, 0, 1, 1]}, "token_type_ids has more than one value"),
        ({"prompt_mask": [1, 1, 0, 0]}, "the row has the key prompt_mask"),
        ({"weights": [1, 1, 1, 1]}, "the row has the key weights"),
        ({"answer_start_idx": 2}, "the row has the key answer_start_idx"),
        ({"num_prompt_tokens": 2}, f"num_prompt_tokens = 2, which is not read beside input_ids; {METADATA}"),
        ({"is_response": [0, 0, 1, 1]}, "the row has the key is_response"),
        ({"lengths": [2, 2]}, "the row has the key lengths"),
        ({"document_ids": [1, 2, 2, 1]}, "document_ids comes back to a number that it has left"),
        ({"input_ids": [True, 6, 7]}, "input_ids must be a list of integers"),
        ({"labels": [True, 6, 7, 8]}, "labels must be a list of integers"),
    ],
)
def test_columns_of_ready_ids_that_do_not_fit(columns: dict, match: str):
    with pytest.raises(ValueError, match=match):
        tokenise(None, {"input_ids": [5, 6, 7, 8]} | columns)


def test_a_mask_that_seems_shifted_is_named():
    result = tokenise(None, {"input_ids": [5, 6, 7, 8, 9], "loss_mask": [0, 1, 0, 1, 0], "seq_start_id": [0, 3]})
    assert "loss_mask is 0 at the end of every document" in next(iter(result.report.warnings))


def test_a_report_is_json_and_merges_in_order(folder: Path):
    reports = [tokenise(folder, row, skip_bad_rows=True).report for row in (chat(HI, GOOD, a=1), {}, chat(HI, b=2), {})]
    total = RowReport()
    for report in reports:
        total.merge(RowReport(**json.loads(json.dumps(dataclasses.asdict(report)))))
    assert total.kinds == {"messages": 2} and total.unused == {"a": 1, "b": 1}
    assert total.skipped == 2 and total.first_skipped == reports[1].first_skipped


def test_a_reader_can_be_sent_to_a_worker(folder: Path):
    reader = pickle.loads(pickle.dumps(RowReader(RowSettings(str(folder), 10**6))))
    assert reader.tokenise([("a", b'{"text": "ab"}')]).lengths.tolist() == [3]
    pickle.dumps(tokenise(folder, chat(HI, GOOD)))


def test_the_first_bad_row_is_named_whatever_is_wrong_with_a_later_one():
    with pytest.raises(ValueError, match="rows:1: token id 10000000"):
        tokenise(None, {"input_ids": [10**7]}, {"a": 1})
