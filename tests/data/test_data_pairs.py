"""Rows of a chosen and a rejected answer, in the forms of several trainers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megatron_glm.data.finetuning import Documents, PackedDataset
from megatron_glm.data.packing import cut_together
from megatron_glm.data.pairs import is_pair
from megatron_glm.data.reference import digest_of, read_reference, reference_of
from tests.helpers.rows import chat_folder, tokenise, tokenizer

USER = {"role": "user", "content": "Why?"}
YES, NO = {"role": "assistant", "content": "Because."}, {"role": "assistant", "content": "No."}
HISTORY = [USER, {"role": "assistant", "content": "Why not?"}, {"role": "user", "content": "Go on."}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return chat_folder(tmp_path_factory.mktemp("tokenizer"))


def documents(folder: Path, row: dict) -> list[tuple[str, str]]:
    """(text, its targets) of both answers."""
    made = tokenise(folder, row, pairs=True)
    ends = made.lengths.cumsum().tolist()
    spans = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    parts = [(made.ids[span], made.ids[span][made.targets[span]]) for span in spans]
    return [tuple(tokenizer().decode(ids.tolist(), skip_special_tokens=False) for ids in part) for part in parts]


def chat(folder: Path, messages: list[dict], **more) -> tuple[str, str]:
    """The same of a conversation whose last turn alone counts."""
    made = tokenise(folder, {"messages": messages} | more, train_on_last_turn_only=True)
    parts = made.ids, made.ids[made.targets]
    return tuple(tokenizer().decode(ids.tolist(), skip_special_tokens=False) for ids in parts)


CHATS = {
    "TRL": {"prompt": [USER], "chosen": [YES], "rejected": [NO]},
    "TRL without a prompt": {"chosen": [USER, YES], "rejected": [USER, NO]},
    "answers that repeat the prompt": {"prompt": [USER], "chosen": [USER, YES], "rejected": [USER, NO]},
    "UltraFeedback": {"prompt": "Why?", "chosen": [USER, YES], "rejected": [USER, NO], "score_chosen": 8.0},
    "a text and turns": {"prompt": "Why?", "chosen": [YES], "rejected": [NO]},
    "turns and texts": {"prompt": [USER], "chosen": "Because.", "rejected": "No."},
    "ms-swift": {"messages": [USER, YES], "rejected_response": "No."},
    "ms-swift with messages": {"messages": [USER, YES], "rejected_messages": [USER, NO]},
    "NeMo-RL": {
        "context": [USER],
        "completions": [{"rank": 1, "completion": [NO]}, {"rank": 0, "completion": [YES]}],
    },
    "OpenAI": {"input": {"messages": [USER]}, "preferred_output": [YES], "non_preferred_output": [NO]},
    "LLaMA-Factory": {
        "conversations": [{"from": "human", "value": "Why?"}],
        "chosen": {"from": "gpt", "value": "Because."},
        "rejected": {"from": "gpt", "value": "No."},
    },
    "Alpaca": {"instruction": "Why?", "input": "", "chosen": "Because.", "rejected": "No."},
    "a question": {"question": "Why?", "chosen": "Because.", "rejected": "No."},
}


@pytest.mark.parametrize("name", CHATS)
def test_chats_of_every_form_are_the_same_two_documents(folder, name):
    row = json.loads(json.dumps(CHATS[name]))
    assert is_pair(row)
    assert documents(folder, row) == [chat(folder, [USER, YES]), chat(folder, [USER, NO])]
    assert documents(folder, row)[0][1].endswith("Because.<|user|>")


def test_only_the_answer_counts_and_columns_of_chats_are_read(folder):
    row = {"prompt": HISTORY, "chosen": [YES], "rejected": [NO], "system": "Be brief."}
    both = [chat(folder, [*HISTORY, turn], system="Be brief.") for turn in (YES, NO)]
    assert documents(folder, row) == both
    quiet = {"chat_template_kwargs": {"enable_thinking": False}}
    row = {"prompt": [USER], "chosen": [YES], "rejected": [NO]} | quiet
    assert documents(folder, row) == [chat(folder, [USER, turn], **quiet) for turn in (YES, NO)]


def test_texts(folder):
    end = "<|endoftext|>"
    wanted = [("1 + 1 = 2" + end, "2" + end), ("1 + 1 = 3" + end, "3" + end)]
    assert documents(folder, {"prompt": "1 + 1 = ", "chosen": "2", "rejected": "3"}) == wanted
    found = documents(folder, {"chosen": "1 + 1 = 2", "rejected": "1 + 1 = 3"})
    assert [text for text, _ in found] == [text for text, _ in wanted]
    assert [target for _, target in found] == [" 2" + end, " 3" + end]  # a space begins the answer


@pytest.mark.parametrize(
    "row",
    [
        {"prompt_input_ids": [5, 6], "chosen_input_ids": [7, 8], "rejected_input_ids": [9]},
        {"prompt_ids": [5, 6], "chosen_ids": [7, 8], "rejected_ids": [9]},
        {
            "chosen_input_ids": [5, 6, 7, 8],
            "rejected_input_ids": [5, 6, 9],
            "chosen_labels": [-100, -100, 7, 8],
            "rejected_labels": [-100, -100, 9],
        },
    ],
    ids=["TRL before", "TRL", "labels"],
)
def test_token_ids(row):
    made = tokenise(None, row, pairs=True)
    assert made.ids.tolist() == [5, 6, 7, 8, 5, 6, 9] and made.lengths.tolist() == [4, 3]
    assert made.targets.tolist() == [False, False, True, True, False, False, True]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [USER, YES]}, "the row has the keys ['messages'] and is no pair of answers"),
        ({"prompt": "a", "chosen": "b"}, "is no pair of answers"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "the chosen and the rejected answer are the same"),
        ({"prompt": [USER], "chosen": [YES], "rejected": [YES]}, "the chosen and the rejected answer are the same"),
        ({"chosen": [USER, YES], "rejected": [{"role": "user", "content": "?"}, NO]}, "begin with different messages"),
        ({"prompt": "Who?", "chosen": [USER, YES], "rejected": [USER, NO]}, "prompt ('Who?') is no message"),
        ({"prompt": "a", "chosen": "b", "rejected": [NO]}, "chosen and rejected must be two strings or two lists"),
        ({"prompt": "a", "chosen": 3, "rejected": "b"}, "chosen must be a string or a list of messages"),
        ({"messages": [USER], "rejected_response": "No."}, "end with the assistant's chosen answer"),
        ({"rejected_response": "No.", "chosen_response": "Y"}, "rejected_response needs messages, the last of which"),
        ({"context": [USER], "completions": [{"rank": 0, "completion": [YES]}]}, "completions must be a list of two"),
        (
            {"context": [USER], "completions": [{"rank": 1, "completion": [YES]}, {"rank": 1, "completion": [NO]}]},
            "both completions have the rank 1",
        ),
        ({"context": [USER], "completions": [{"completion": [YES]}, {"completion": [NO]}]}, "needs a rank"),
        ({"prompt": [USER], "chosen": [USER], "rejected": [NO]}, "the chosen answer has no token that counts"),
        ({"prompt_ids": [1], "chosen_ids": [2], "rejected_ids": [2]}, "chosen_ids and rejected_ids are the same"),
        ({"chosen_ids": [2], "rejected_ids": [3]}, "chosen_ids needs prompt_ids"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "loss_mask": [1]}, "the row has the key loss_mask"),
        (
            {
                "chosen_input_ids": [1, 2, 3],
                "rejected_input_ids": [1, 4, 5],
                "chosen_labels": [-100, -100, 3],
                "rejected_labels": [-100, -100, 5],
            },
            "the prompts of the chosen and the rejected answer differ after templating: at token 1 of 2 and 2",
        ),
    ],
)
def test_what_is_no_pair_is_named(folder, row, message):
    with pytest.raises(ValueError) as error:
        tokenise(folder, row, pairs=True)
    assert str(error.value).startswith("rows:1: ") and message in str(error.value)


def test_a_bad_pair_can_be_skipped(folder):
    made = tokenise(folder, {"prompt": "a", "chosen": "b"}, pairs=True, skip_bad_rows=True)
    assert len(made.lengths) == 0 and made.report.skipped == 1


def test_two_lengths_share_the_room():
    lengths = np.array([[100, 10], [10, 100], [100, 100], [20, 30], [49, 2]])
    assert cut_together(lengths, 50).tolist() == [[40, 10], [10, 40], [25, 25], [20, 30], [48, 2]]


def dataset(seq_length: int, overlong: str = "truncate", **how) -> PackedDataset:
    """Pairs of 4 + 6, 20 + 2, 3 + 3 and 30 + 30 tokens; all but the first two of each document count."""
    lengths = np.array([4, 6, 20, 2, 3, 3, 30, 30])
    offsets = np.concatenate([[0], lengths.cumsum()])
    tokens = np.arange(offsets[-1], dtype=np.int32)
    targets = np.concatenate([np.arange(n) >= 1 for n in lengths])
    return PackedDataset(Documents(tokens, targets, offsets), seq_length, "best-fit", overlong, together=2, **how)


def test_pairs_stay_together_in_every_epoch():
    data = dataset(24)
    assert "4 pairs (1 overlong, 0 without loss dropped" in data.summary()
    starts = {0: 4, 10: 30, 32: 35, 38: 68}  # of chosen documents, and of the rejected ones
    for index in range(3 * data.packs_per_epoch):
        pack = data.pack(index)
        assert sum(len(ids) for ids, _ in pack) <= 24 and len(pack) % 2 == 0
        first = [int(ids[0]) for ids, _ in pack]
        assert all(starts[chosen] == rejected for chosen, rejected in zip(first[0::2], first[1::2], strict=True))
    epoch = [int(ids[0]) for index in range(data.packs_per_epoch) for ids, _ in data.pack(index)]
    assert sorted(epoch) == sorted([*starts, *starts.values()])


def test_pairs_that_are_too_long_can_be_refused():
    with pytest.raises(ValueError, match="1 of 4 pairs are above --seq-length 24, the longest has 60 tokens"):
        dataset(24, "refuse")


def test_the_reference_is_found_by_tokens_and_named_where_it_is_missing(tmp_path):
    data = dataset(64)
    values = {digest_of(*data.piece(i)): -float(i) - 0.5 for i in range(8)}
    assert len(values) == 8
    digests = list(values)
    lines = [{"digest": digest, "sum_logprob": value} for digest, value in values.items()]
    rows = [
        {"chosen": chosen, "rejected": rejected, "model": "m"}
        for chosen, rejected in zip(lines[0::2], lines[1::2], strict=True)
    ]
    file = tmp_path / "scores.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows[::-1]))
    assert reference_of(data, read_reference([str(file)])).tolist() == list(values.values())
    file.write_text("".join(json.dumps(row) + "\n" for row in rows[:2]))
    with pytest.raises(ValueError, match="have no chosen answer of pair 3 of 4"):
        reference_of(data, read_reference([str(file)]))
    for wrong, message in (
        ({"prompt": "a"}, "it is of the model None"),
        ({"model": "other", **rows[2]} | {"model": "other"}, "it is of the model other, rows before it of m"),
        ({"model": "m", "sum_logprob": -1.0}, "has a digest and a sum_logprob"),
        (rows[0] | {"chosen": {"digest": digests[0], "sum_logprob": -9.0}}, f"the answer {digests[0]} has the log-pr"),
    ):
        file.write_text(json.dumps(rows[0]) + "\n" + json.dumps(wrong) + "\n")
        with pytest.raises(ValueError) as error:
            read_reference([str(file)])
        assert f"--reference-logprobs: {file}:2: " in str(error.value) and message in str(error.value)
