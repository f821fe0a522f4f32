"""Files and rows to tokenised documents: every kind of row, both file formats, both tokenizers, and bad rows."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from megatron_glm.data.files import find_files
from megatron_glm.data.finetuning import Documents, load_documents
from megatron_glm.data.rows import RowSettings
from megatron_glm.data.tokenizer import END_OF_TEXT, Tokenizer

FIXTURE = Path(__file__).resolve().parents[1] / "fixtures" / "glm-4.6-chat_template.jinja"
SPECIALS = [END_OF_TEXT, "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]
SPECIALS += ["<think>", "</think>"]
TEXTS = ["The quick brown fox jumps over the lazy dog. A man sits on a roof. He is pulling up roofing, slowly."] * 5
VOCAB = 400

MESSAGES = [
    {"role": "user", "content": "The fox?"},
    {"role": "assistant", "content": "jumps ☃", "reasoning_content": "A dog\n\n"},
    {"role": "user", "content": "and then"},
    {"role": "assistant", "content": "over the dog. ", "reasoning_content": "lazy"},
]
HELLASWAG = {"ctx": "A man sits on a roof. He", "endings": ["jumps.", "is pulling up roofing.", "x", "y"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder as a checkpoint has it: a byte-level BPE that trims its offsets, and the template beside it."""
    path = tmp_path_factory.mktemp("hf")
    model = tokenizers.Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    model.post_processor = processors.ByteLevel(trim_offsets=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    model.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=SPECIALS, initial_alphabet=alphabet)
    )
    model.enable_truncation(3)  # tokenizer files carry such settings: they must not act
    model.save(str(path / "tokenizer.json"))
    shutil.copy(FIXTURE, path / "chat_template.jinja")
    return path


def write_jsonl(path: Path, rows: list) -> str:
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return str(path)


def load(tmp_path: Path, rows: list, tokenizer: Path | None, vocab_size: int = VOCAB, **options) -> Documents:
    return read([write_jsonl(tmp_path / "rows.jsonl", rows)], tokenizer, vocab_size, **options)


def read(paths: list[str], tokenizer: Path | None, vocab_size: int = VOCAB, **options) -> Documents:
    return load_documents(paths, RowSettings(tokenizer and str(tokenizer), vocab_size, **options))


def texts(folder: Path, documents: Documents) -> list[tuple[str, str]]:
    """(whole text, text of the targets) of each document."""
    model = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [
        (model.decode(ids, skip_special_tokens=False), model.decode(ids[targets], skip_special_tokens=False))
        for ids, targets in (documents[i] for i in range(len(documents)))
    ]


def same(a: Documents, b: Documents) -> bool:
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in ("tokens", "targets", "offsets"))


def test_chat_rows(tmp_path: Path, folder: Path):
    [(whole, wanted)] = texts(folder, load(tmp_path, [{"messages": MESSAGES}], folder))
    turns = ["\n<think></think>\njumps ☃<|user|>", "\n<think>lazy</think>\nover the dog.<|user|>"]
    assert whole == f"[gMASK]<sop><|user|>\nThe fox?<|assistant|>{turns[0]}\nand then<|assistant|>{turns[1]}"
    assert wanted == "".join(turns)


def test_the_token_that_ends_a_turn_is_a_target(tmp_path: Path, folder: Path):
    tokenizer = Tokenizer.load(folder)
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {}}]}
    rows = [{"messages": MESSAGES[:2]}, {"messages": [MESSAGES[0], call]}, {"prompt": "a", "completion": "b"}]
    documents = load(tmp_path, rows, folder)
    for i, token in enumerate(("<|user|>", "<|observation|>", END_OF_TEXT)):
        ids, targets = documents[i]
        assert ids[-1] == tokenizer.token_id(token) and targets[-1]


@pytest.mark.parametrize(
    "row, whole, wanted",
    [
        ({"prompt": "The fox", "completion": " jumps ☃\n\n"}, "The fox jumps ☃\n\n", " jumps ☃\n\n"),
        ({"prompt": "The fox\n\n", "completion": "jumps"}, "The fox\n\njumps", "jumps"),
        ({"prompt": "", "completion": "jumps"}, "jumps", "jumps"),
        ({"text": "The fox\n"}, "The fox\n", "The fox\n"),
        (HELLASWAG | {"label": 1}, f"{HELLASWAG['ctx']} is pulling up roofing.", " is pulling up roofing."),
        (HELLASWAG | {"label": "0", "ctx_a": "z"}, f"{HELLASWAG['ctx']} jumps.", " jumps."),
        ({"text": "unused", "prompt": "a", "completion": "b"}, "ab", "b"),
        ({"text": "used", "messages": None}, "used", "used"),
    ],
)
def test_text_rows(tmp_path: Path, folder: Path, row: dict, whole: str, wanted: str):
    [result] = texts(folder, load(tmp_path, [row], folder))
    assert result == (whole + END_OF_TEXT, wanted + END_OF_TEXT)


def test_a_token_across_the_border_is_a_target(tmp_path: Path, folder: Path):
    ids, targets = load(tmp_path, [{"prompt": "Th", "completion": "e"}], folder)[0]
    assert len(ids) == 2 and targets.tolist() == [True, True]


def test_token_rows_need_no_tokenizer(tmp_path: Path):
    rows = [{"input_ids": [5, 6, 7]}, {"input_ids": [0, 399, 2], "labels": [-100, 399, -100], "text": "unused"}]
    documents = load(tmp_path, rows, None)
    assert documents.tokens.tolist() == [5, 6, 7, 0, 399, 2] and documents.tokens.dtype == np.int32
    assert documents.targets.tolist() == [True] * 3 + [False, True, False]
    assert documents.offsets.tolist() == [0, 3, 6]


def mixed_rows() -> list[dict]:
    call = {"name": "f", "arguments": json.dumps({"x": 1})}
    kinds = [
        {"messages": MESSAGES},
        {"prompt": "The fox", "completion": " jumps"},
        {"input_ids": [1, 2, 3], "labels": [-100, 2, 3]},
        {"text": "lazy dog"},
        HELLASWAG | {"label": "1"},
        {"messages": [MESSAGES[0], {"role": "assistant", "content": "", "tool_calls": [call]}], "tools": "[]"},
    ]
    return kinds * 60  # several chunks of tokenisation


def test_kinds_mix_in_order_and_parquet_equals_jsonl(tmp_path: Path, folder: Path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = mixed_rows()
    documents = load(tmp_path, rows, folder)
    assert len(documents) == len(rows) and documents.offsets.dtype == np.int64
    for i in (0, 1, 2, 3, 4, 5, 359):
        alone = load(tmp_path, [rows[i]], folder)
        assert [part.tolist() for part in documents[i]] == [part.tolist() for part in alone[0]]
    columns = {key: [row.get(key) for row in rows] for key in dict.fromkeys(key for row in rows for key in row)}
    parquet.write_table(pyarrow.table(columns), tmp_path / "rows.parquet", row_group_size=100)
    assert same(read([str(tmp_path / "rows.parquet")], folder), documents)


def test_bad_parquet_names_file_and_row(tmp_path: Path, monkeypatch):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"input_ids": [[1], [2], [400]]}), path)
    with pytest.raises(ValueError, match=r"rows.parquet row 3: token id 400 is outside .* of 400"):
        read([str(path)], None)
    path.write_bytes(b"PAR1 not really")
    with pytest.raises(ValueError, match=r"cannot read .*rows.parquet"):
        read([str(path)], None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"rows.parquet needs pyarrow: pip install -e '\.\[data\]'"):
        read([str(path)], None)


def test_files_folders_and_globs(tmp_path: Path):
    for name in ("b/2.jsonl", "b/1.jsonl", "b/deep/3.jsonl", "a.jsonl", "b/notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        write_jsonl(tmp_path / name, [])
    (tmp_path / "b/folder.jsonl").mkdir()

    def found(*entries: str) -> list[str]:
        return [str(file.relative_to(tmp_path)) for file in find_files([str(tmp_path / entry) for entry in entries])]

    assert found("b", "a.jsonl") == ["b/1.jsonl", "b/2.jsonl", "b/deep/3.jsonl", "a.jsonl"]
    assert found("b/*.jsonl") == ["b/1.jsonl", "b/2.jsonl"]
    assert found("**/?.jsonl") == ["a.jsonl", "b/1.jsonl", "b/2.jsonl", "b/deep/3.jsonl"]
    for entry, match in (
        ("none", "matches no file"),
        ("*.csv", "matches no file"),
        ("b/notes.txt", "notes.txt is of no format"),
    ):
        with pytest.raises(ValueError, match=match):
            found(entry)
    with pytest.raises(ValueError, match="a data path is empty"):
        find_files([""])


BAD_ROWS = [
    (b"{not json", "Expecting property name"),
    (b"\xff\xfe", "can't decode byte 0xff"),
    (b"[" * 100_000, "nested too deep"),
    ([1], "must be a JSON object"),
    ({"txt": "x"}, r"has the keys \['txt'\] and is of no known kind"),
    ({"text": 7}, "text must be a string, got 7"),
    ({"text": "\ud800"}, "not valid Unicode"),
    (
        {"prompt": [], "completion": "x"},
        "prompt must be a list of messages that is not empty, got .*two strings or two",
    ),
    ({"messages": [{"role": "robot"}]}, r"messages\[0\] must be an object with a role"),
    (HELLASWAG | {"label": 4}, "label is 4, but there are 4 endings"),
    (HELLASWAG | {"label": ""}, "label is '', but there are 4 endings"),
    ({"ctx": "c", "endings": "abc", "label": 0}, "endings must be a list of strings"),
    ({"input_ids": []}, "input_ids must be a list of integers that is not empty"),
    ({"input_ids": [1.5]}, "input_ids must be a list of integers"),
    ({"input_ids": [[1], [2, 3]]}, "input_ids must be a list of integers"),
    ({"input_ids": [2**70]}, "input_ids must be a list of integers"),
    ({"input_ids": [1, 400]}, "token id 400 is outside the model's vocabulary of 400"),
    ({"input_ids": [-1]}, "token id -1 is outside the model's vocabulary of 400"),
    ({"input_ids": [1, 2], "labels": [1]}, "labels has 1 entries but input_ids has 2"),
    ({"input_ids": [1, 2, 3], "labels": [2, 3, -100]}, r"labels\[0\] is 2 but input_ids\[0\] is 1"),
]


@pytest.mark.parametrize("bad, match", BAD_ROWS, ids=[match for _, match in BAD_ROWS])
def test_bad_rows(tmp_path: Path, folder: Path, bad, match: str):
    good = {"input_ids": [1, 2]}
    rows = [good, b"", bad, {"text": "fox"}]
    with pytest.raises(ValueError, match=r"rows.jsonl:3: .*" + match):
        load(tmp_path, rows, folder)
    documents = load(tmp_path, rows, folder, skip_bad_rows=True)
    assert len(documents) == 2 and documents.report.skipped == 1 and "rows.jsonl:3: " in documents.report.first_skipped
    assert same(documents, load(tmp_path, [good, {"text": "fox"}], folder))


def test_a_text_token_outside_the_models_vocabulary(tmp_path: Path, folder: Path):
    with pytest.raises(ValueError, match=r"rows.jsonl:2: token id \d+ is outside the model's vocabulary of 100"):
        load(tmp_path, [{"input_ids": [1]}, {"text": "fox"}], folder, vocab_size=100)


def test_no_usable_row(tmp_path: Path):
    with pytest.raises(ValueError, match="rows.jsonl has no usable row: there is nothing in it, name another file$"):
        load(tmp_path, [], None)
    with pytest.raises(
        ValueError, match="has no usable row; 2 bad rows, the first is .*rows.jsonl:1: the line must be"
    ):
        load(tmp_path, [[], []], None, skip_bad_rows=True)


def test_a_missing_tokenizer_or_template_is_no_bad_row(tmp_path: Path, folder: Path):
    with pytest.raises(ValueError, match="rows.jsonl:1: .* give --tokenizer-model"):
        load(tmp_path, [{"text": "x"}], None, skip_bad_rows=True)
    with pytest.raises(ValueError, match="holds neither tokenizer.json nor a .model file"):
        load(tmp_path, [{"text": "x"}], tmp_path, skip_bad_rows=True)
    shutil.copy(folder / "tokenizer.json", tmp_path)
    with pytest.raises(ValueError, match="need a chat template"):
        load(tmp_path, [{"messages": MESSAGES}], tmp_path, skip_bad_rows=True)
    tokenizers.Tokenizer(models.BPE()).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"has no token '<\|system\|>'"):
        load(tmp_path, [{"messages": MESSAGES}], tmp_path, skip_bad_rows=True)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="cannot read .*tokenizer.json"):
        load(tmp_path, [{"text": "x"}], tmp_path, skip_bad_rows=True)


@pytest.fixture(scope="module")
def sentencepiece_file(tmp_path_factory) -> Path:
    sentencepiece = pytest.importorskip("sentencepiece")
    path = tmp_path_factory.mktemp("sp") / "tokenizer.model"
    with path.open("wb") as out:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(TEXTS * 20),
            model_writer=out,
            vocab_size=350,
            byte_fallback=True,
            hard_vocab_limit=False,
            user_defined_symbols=SPECIALS[1:],
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            minloglevel=2,
        )
    shutil.copy(FIXTURE, path.parent / "chat_template.jinja")
    return path


def test_sentencepiece_rows(tmp_path: Path, sentencepiece_file: Path):
    """The end token is </s>, and every byte of a character outside the vocabulary has its character's flag."""
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_file))
    rows = [{"messages": MESSAGES}, {"prompt": "The fox☃", "completion": "☃ jumps"}, {"text": "fox"}]
    documents = load(tmp_path, rows, sentencepiece_file.parent)
    ids, targets = documents[0]
    turns = ["\n<think></think>\njumps ☃<|user|>", "\n<think>lazy</think>\nover the dog.<|user|>"]
    assert model.decode(ids[targets].tolist()) == "".join(turns)
    ids, targets = documents[1]
    assert ids[-1] == model.eos_id() and targets[-1]
    assert model.decode(ids[targets].tolist()) == "☃ jumps" and model.decode(ids[~targets].tolist()) == "The fox☃"
    ids, targets = documents[2]
    assert targets.all() and model.decode(ids.tolist()) == "fox"


def test_sentencepiece_is_optional(tmp_path: Path, monkeypatch):
    (tmp_path / "x.model").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(ValueError, match=r"x.model needs sentencepiece: pip install -e '\.\[data\]'"):
        Tokenizer.load(tmp_path / "x.model")
