"""tools/preprocess_data.py as a user meets it: every kind of file, any number of workers, interruptions, errors."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from megatron_glm.data.indexed import IndexedDataset
from megatron_glm.data.tokenizer import END_OF_TEXT
from tools import preprocess_data

TOOL = Path(__file__).resolve().parents[2] / "tools" / "preprocess_data.py"


def make_tokenizer(folder: Path, size: int = 300, end: bool = True) -> Path:
    """The words w0, w1, ... and, as the last, the end of a text; w1 is token 1."""
    words = {f"w{i}": i for i in range(size - end)} | ({END_OF_TEXT: size - 1} if end else {})
    model = Tokenizer(models.WordLevel(words, unk_token="w0"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder.mkdir()
    model.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    return make_tokenizer(tmp_path / "hf")


def command(tmp_path: Path, tokenizer: Path, *inputs, flags=()) -> list[str]:
    prefix = str(tmp_path / "out" / "data")
    paths = ["--input", *map(str, inputs), "--output-prefix", prefix, "--tokenizer-model", str(tokenizer)]
    return [sys.executable, str(TOOL), *paths, "--workers", "2", *flags]


def run(*arguments, fails: int = 0, **options) -> subprocess.CompletedProcess:
    result = subprocess.run(command(*arguments, **options), capture_output=True, text=True, timeout=120)
    assert result.returncode == fails, result.stderr
    return result


def documents(tmp_path: Path, key: str = "text") -> list[list[int]]:
    dataset = IndexedDataset(tmp_path / "out" / f"data_{key}_document")
    return [dataset[i].tolist() for i in range(len(dataset))]


def outputs(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "out").iterdir())


def write_jsonl(path: Path, rows: list) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def random_rows(count: int, words: int = 200, seed: int = 0) -> list[dict]:
    ids = np.random.default_rng(seed).integers(0, 299, (count, words)).tolist()
    return [{"text": " ".join(f"w{i}" for i in row)} for row in ids]


def test_every_kind_of_file_in_the_order_given(tmp_path: Path, tokenizer: Path):
    lines = write_jsonl(tmp_path / "a.jsonl", [{"text": "w1 w2"}, "", {"text": ""}, {"text": "w3", "id": 7}])
    table = tmp_path / "b.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["w4 w5 w6", "w7"], "n": [1, 2]}), table)
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "z.txt").write_text("w8\n\nw9")
    (folder / "y.py").write_text("w10")
    write_jsonl(folder / "x.json", [{"text": "w11"}])
    (folder / "readme.rst").write_text("w12")
    result = run(tmp_path, tokenizer, table, lines, folder, flags=["--append-eod"])
    expected = [[4, 5, 6], [7], [1, 2], [3], [11], [10], [8, 9]]
    assert documents(tmp_path) == [ids + [299] for ids in expected]
    assert "7 documents, 18 tokens of uint16" in result.stdout
    assert f"files not read: {folder / 'readme.rst'}" in result.stderr
    assert "B/s" in result.stderr and "tokens/s" in result.stderr
    assert outputs(tmp_path) == ["data_text_document.bin", "data_text_document.idx"]


def test_several_keys_without_end_token_in_a_large_vocabulary(tmp_path: Path):
    tokenizer = make_tokenizer(tmp_path / "hf", 70_000, end=False)
    rows = write_jsonl(tmp_path / "a.jsonl", [{"title": "w1", "body": "w69999 w2"}, {"title": "", "body": "w3"}])
    run(tmp_path, tokenizer, rows, flags=["--json-keys", "title", "body"])
    assert documents(tmp_path, "title") == [[1]] and documents(tmp_path, "body") == [[69999, 2], [3]]
    assert IndexedDataset(tmp_path / "out" / "data_body_document").dtype == np.int32


def test_workers_do_not_change_the_order(tmp_path: Path, tokenizer: Path):
    rows = random_rows(1200)  # several chunks
    run(tmp_path, tokenizer, write_jsonl(tmp_path / "a.jsonl", rows), flags=["--workers", "3"])
    assert documents(tmp_path) == [[int(word[1:]) for word in row["text"].split()] for row in rows]


def test_an_error_names_file_and_line_and_files_done_before_are_kept(tmp_path: Path, tokenizer: Path):
    good = write_jsonl(tmp_path / "good.jsonl", [{"text": "w1"}])
    bad = write_jsonl(tmp_path / "bad.jsonl", [{"text": "w2"}, '{"text": '])
    result = run(tmp_path, tokenizer, good, bad, fails=2)
    assert f"error: {bad}:2: Expecting value" in result.stderr and "Traceback" not in result.stderr
    assert outputs(tmp_path) == ["data.parts"]
    kept = [path.suffix for path in (tmp_path / "out" / "data.parts").iterdir()]
    assert sorted(kept) == ["", ".bin", ".idx"]  # of the first file, and the lock

    write_jsonl(bad, [{"text": "w2"}, {"text": "w3"}])
    assert "1 of 2 files are done already" in run(tmp_path, tokenizer, good, bad).stderr
    assert documents(tmp_path) == [[1], [2], [3]]
    assert len(outputs(tmp_path)) == 2


def test_an_end_token_that_is_meant_is_not_doubled(tokenizer: Path):
    settings = preprocess_data.Settings(str(tokenizer), ("text",), append_eod=True, special_tokens_in_text=True)
    texts = [f"w1 {END_OF_TEXT}", "w2", f"w3 {END_OF_TEXT} w4"]
    [(ids, lengths)] = preprocess_data.Encoder(settings).encode([("", {"text": text}) for text in texts])
    assert np.frombuffer(ids, np.uint16).tolist() == [1, 299, 2, 299, 3, 299, 4, 299] and lengths == [2, 2, 4]


@pytest.mark.parametrize(
    "row, message",
    [
        (b'{"title": "w3"}', r"the row has no 'text', only \['title'\]; --json-keys must name strings"),
        (b'{"text": 3}', "the row has 3 under 'text'"),
        (b'{"text": "\\ud800"}', "the text is not valid Unicode"),
        (b"[1]", "the line must be a JSON object"),
        (b"\xff", "'utf-8' codec can't decode byte 0xff"),
        ({"text": None}, "the row has no 'text', only"),
        ({"text": f"w1 {END_OF_TEXT}"}, r"text contains the special token <\|endoftext\|>"),
    ],
)
def test_a_bad_row_is_named(tokenizer: Path, row: bytes | dict, message: str):
    encoder = preprocess_data.Encoder(preprocess_data.Settings(str(tokenizer), ("text",), False))
    with pytest.raises(ValueError, match=f"a.jsonl:7: {message}"):
        encoder.encode([("a.jsonl:6", b'{"text": "w1"}'), ("a.jsonl:7", row)])


def test_files_done_with_other_settings_are_not_taken_up(tmp_path: Path, tokenizer: Path):
    good = write_jsonl(tmp_path / "good.jsonl", [{"text": "w1"}])
    bad = write_jsonl(tmp_path / "bad.jsonl", ["{"])
    run(tmp_path, tokenizer, good, bad, fails=2)
    write_jsonl(bad, [{"text": "w2"}])
    assert "done already" not in run(tmp_path, tokenizer, good, bad, flags=["--append-eod"]).stderr
    assert documents(tmp_path) == [[1, 299], [2, 299]]


def test_a_part_of_a_file_that_changed_is_not_taken_up(tmp_path: Path, tokenizer: Path, monkeypatch):
    file = write_jsonl(tmp_path / "a.jsonl", [{"text": "w1"}])
    monkeypatch.setattr(sys, "argv", command(tmp_path, tokenizer, file)[1:])
    arguments = preprocess_data.parse_arguments()
    encoder = preprocess_data.Encoder(preprocess_data.Settings(str(tokenizer), ("text",), False))
    first, same = (preprocess_data.plan(arguments, encoder) for _ in range(2))
    mtime = file.stat().st_mtime_ns
    write_jsonl(file, [{"text": "w2"}])
    os.utime(file, ns=(mtime, mtime))
    assert first == same != preprocess_data.plan(arguments, encoder)


def test_the_byte_order_mark_of_a_text_file_is_no_text(tmp_path: Path):
    (tmp_path / "a.txt").write_text("w1", encoding="utf-8-sig")
    assert [rows for _, rows in preprocess_data.read(tmp_path / "a.txt")] == [[(f"{tmp_path}/a.txt", {"text": "w1"})]]


def test_a_killed_run_continues(tmp_path: Path, tokenizer: Path):
    rows = [random_rows(count, seed=count) for count in (20, 1200)]
    files = [write_jsonl(tmp_path / f"{len(part)}.jsonl", part) for part in rows]
    process = subprocess.Popen(command(tmp_path, tokenizer, *files), stderr=subprocess.DEVNULL)
    parts = tmp_path / "out" / "data.parts"
    deadline = time.monotonic() + 60
    while not list(parts.glob("*.idx")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert outputs(tmp_path) == ["data.parts"]
    assert len(list(parts.glob("*.idx"))) == 1
    assert "1 of 2 files are done already" in run(tmp_path, tokenizer, *files).stderr
    texts = [row["text"] for part in rows for row in part]
    assert documents(tmp_path) == [[int(word[1:]) for word in text.split()] for text in texts]
    assert len(outputs(tmp_path)) == 2


def test_what_is_refused(tmp_path: Path, tokenizer: Path, monkeypatch, capsys):
    rows = write_jsonl(tmp_path / "a.jsonl", [{"text": "w1"}])
    (tmp_path / "out").mkdir()

    def refused(code: int, *arguments, **options) -> str:
        monkeypatch.setattr(sys, "argv", command(tmp_path, *arguments, **options)[1:])
        try:
            assert preprocess_data.main() == code
        except SystemExit as stopped:
            assert stopped.code == code
        return capsys.readouterr().err

    assert "--workers: '0' must be a whole number" in refused(2, tokenizer, rows, flags=["--workers", "0"])
    assert refused(2, tokenizer, rows, flags=["--wrokers", "1"]) == "error: unrecognized arguments: --wrokers 1\n"
    assert "--json-keys a a: every key once" in refused(2, tokenizer, rows, flags=["--json-keys", "a", "a"])
    assert "--output-prefix must not end in /" in refused(2, tokenizer, rows, flags=["--output-prefix", ""])
    assert "nor a key hold one" in refused(2, tokenizer, rows, flags=["--json-keys", "a/b"])
    assert "no does not exist; name a tokenizer.json, a .model" in refused(2, tmp_path / "no", rows)
    assert "none.jsonl holds or matches no file" in refused(2, tokenizer, tmp_path / "none.jsonl")
    (tmp_path / "b.txt").write_bytes(b"\xff")
    assert "b.txt: 'utf-8' codec can't decode" in refused(2, tokenizer, tmp_path / "b.txt")
    no_end = make_tokenizer(tmp_path / "no_end", end=False)
    assert f"has no token '{END_OF_TEXT}'" in refused(2, no_end, rows, flags=["--append-eod"])
    assert "Not a directory: " in refused(1, tokenizer, rows, flags=["--output-prefix", str(rows / "x")])
    with preprocess_data.alone_in(tmp_path / "out" / "data.parts"):
        assert "another run is writing" in refused(2, tokenizer, rows)
    for end in ("idx", "bin"):
        kept = tmp_path / "out" / f"data_text_document.{end}"
        kept.write_text("kept")
        assert f"data_text_document.{end} exists: remove it" in refused(2, tokenizer, rows)
        assert kept.read_text() == "kept"
        kept.unlink()


def test_no_document_at_all(tmp_path: Path, tokenizer: Path):
    rows = write_jsonl(tmp_path / "a.jsonl", [{"text": ""}])
    assert "none of the 1 input files has a document" in run(tmp_path, tokenizer, rows, fails=2).stderr
    assert outputs(tmp_path) == ["data.parts"]
