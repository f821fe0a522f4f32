"""Tokenised once: what the cache is named by, who makes it, and what a kill or a bad row leaves behind."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from megatron_glm.data import cache, tokenise
from megatron_glm.data.cache import cache_folder, make_folder
from megatron_glm.data.finetuning import Documents, PackedDataset, Packing, load_documents
from megatron_glm.data.rows import RowSettings
from megatron_glm.data.workers import in_order

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 60


def make_tokenizer(folder: Path) -> str:
    """The words w0 to w98, and the end of a text."""
    words = {f"w{i}": i for i in range(99)} | {"<|endoftext|>": 99}
    model = Tokenizer(models.WordLevel(words, unk_token="w0"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder.mkdir(exist_ok=True)
    model.save(str(folder / "tokenizer.json"))
    return str(folder)


def write_rows(path: Path, rows: int = 700, bad: tuple[int, ...] = ()) -> Path:
    """Rows of text and of ids; `bad` ones, counted from 1, have an id outside the vocabulary."""
    random = np.random.default_rng(0)
    path.parent.mkdir(exist_ok=True)
    with path.open("w") as out:
        for i, ids in enumerate((random.integers(0, 99, n).tolist() for n in random.integers(2, 60, rows)), 1):
            text = {"text": " ".join(f"w{j}" for j in ids)}
            out.write(json.dumps({"input_ids": [1000]} if i in bad else text if i % 3 else {"input_ids": ids}) + "\n")
    return path


@pytest.fixture
def data(tmp_path: Path) -> tuple[Path, RowSettings]:
    return write_rows(tmp_path / "rows" / "a.jsonl"), RowSettings(make_tokenizer(tmp_path / "hf"), 100)


def entries(folder: Path) -> list[str]:
    """The tokenised folders in a cache."""
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


def same(a: Documents, b: Documents) -> bool:
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in ("tokens", "targets", "offsets"))


def test_documents_are_the_same_for_any_number_of_workers(data, tmp_path: Path):
    path, settings = data
    one, three = (load_documents([str(path)], settings, str(tmp_path / str(n)), workers=n) for n in (1, 3))
    assert same(one, three) and len(one) == 700
    assert one.report == three.report and one.report.kinds == {"text": 467, "input_ids": 233}


def test_workers_do_not_import_torch(tmp_path: Path):
    """A worker imports the main script: those of the project and what rows need must be free of it."""
    script = tmp_path / "main.py"
    script.write_text("""
import sys
import finetune_glm, pretrain_glm
from megatron_glm.data.rows import RowReader
from megatron_glm.data.workers import in_order

def torch_is_there(chunk):
    return "torch" in sys.modules

if __name__ == "__main__":
    import torch
    print(torch_is_there(0), *in_order(torch_is_there, [("a", 0), ("b", 1)], 2))
""")
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.stdout == "True ('a', False) ('b', False)\n", done.stderr


@pytest.mark.parametrize("workers", [1, 2])
def test_the_first_bad_row_of_the_files_is_named_and_leaves_nothing(tmp_path: Path, workers: int):
    """Row 690 is in a later chunk, which another worker has sooner."""
    path = write_rows(tmp_path / "rows" / "a.jsonl", bad=(300, 690))
    settings = RowSettings(make_tokenizer(tmp_path / "hf"), 100)
    with pytest.raises(ValueError, match=r"^\S*a.jsonl:300: token id 1000 is outside the model's vocabulary of 100$"):
        load_documents([str(path)], settings, workers=workers)
    assert entries(path.parent / "index_cache") == [] and not list((path.parent / "index_cache").glob("*.lock"))
    skipping = RowSettings(settings.tokenizer_path, 100, skip_bad_rows=True)
    documents = load_documents([str(path)], skipping, workers=workers)
    assert documents.report.skipped == 2 and "a.jsonl:300: token id" in documents.report.first_skipped
    again = load_documents([str(path)], skipping)  # from the cache
    assert again.report == documents.report and same(again, documents)


def test_a_later_start_tokenises_nothing(data, monkeypatch):
    path, settings = data
    first = load_documents([str(path)], settings)
    [entry] = entries(path.parent / "index_cache")
    monkeypatch.setattr(tokenise, "read_chunks", lambda path: pytest.fail("the rows are read again"))
    assert same(load_documents([str(path)], settings), first)
    os.utime(path)  # another time, the same content
    moved = path.rename(path.parent / "b.jsonl").rename(path)
    assert same(load_documents([str(moved)], settings), first) and entries(path.parent / "index_cache") == [entry]


def test_what_changes_the_tokens_is_tokenised_anew(data, tmp_path: Path):
    path, settings = data
    folder, known = path.parent / "index_cache", set()

    def is_new(settings: RowSettings) -> bool:
        load_documents([str(path)], settings)
        found = set(entries(folder))
        new = found - known
        known.update(found)
        return bool(new)

    assert is_new(settings) and not is_new(settings)
    text, stat = path.read_text(), path.stat()
    path.write_text(text.replace("w12 ", "w21 "))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # the same size and time: the ctime tells
    assert is_new(settings)
    path.write_text(text)
    assert not is_new(settings)
    for change in ({"vocab_size": 101}, {"skip_bad_rows": True}, {"train_on_last_turn_only": True}):
        assert is_new(RowSettings(**vars(settings) | change))
    (tmp_path / "hf" / "chat_template.jinja").write_text("{{ messages }}")
    assert is_new(settings)
    tokenizer = tmp_path / "hf" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"w98"', '"x98"'))
    assert is_new(settings)


def test_the_digest_of_a_file_that_may_still_change_is_not_kept(tmp_path: Path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    path.write_text("a")
    [before] = cache.digests([path], tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
    monkeypatch.setattr(cache, "SETTLED_SECONDS", -1)
    assert cache.digests([path], tmp_path / "cache") == [before]
    monkeypatch.setattr(cache, "_digest", lambda path: pytest.fail("the file is read again"))
    assert cache.digests([path], tmp_path / "cache") == [before]


def test_what_cannot_be_written_whole_leaves_nothing(tmp_path: Path):
    with pytest.raises(UnicodeEncodeError):
        cache.write_whole(tmp_path / "a", "\ud800")
    assert not list(tmp_path.iterdir())


def test_default_folder(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    beside = tmp_path / "data" / "a.jsonl"
    beside.parent.mkdir()
    assert cache_folder("x", beside) == Path("x") and cache_folder(None, beside) == tmp_path / "data" / "index_cache"
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    assert cache_folder(None, beside) == tmp_path / ".cache" / "megatron_glm"


def test_a_folder_that_cannot_be_written(data, tmp_path: Path):
    path, settings = data
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot write the index cache .*file/x .*; give another --data-cache-path"):
        load_documents([str(path)], settings, str(tmp_path / "file" / "x"))


def test_a_damaged_entry_is_named(data):
    path, settings = data
    documents = load_documents([str(path)], settings)
    os.truncate(documents.folder / "targets", 10)
    with pytest.raises(ValueError, match=f"damaged, remove {documents.folder}: 10 targets for"):
        load_documents([str(path)], settings)


def test_of_two_at_once_one_makes_the_folder_and_shows_the_other_how_far_it_is(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(cache, "WAIT_SECONDS", 0)
    made, said, working = [], [], threading.Event()

    def make(folder: Path, note) -> None:
        made.append(folder)
        note("half of it")
        working.set()
        time.sleep(0.5)

    first = threading.Thread(target=make_folder, args=(tmp_path / "x", make, said.append))
    first.start()
    working.wait(TIMEOUT)
    make_folder(tmp_path / "x", make, said.append)
    first.join()
    assert len(made) == 1 and os.listdir(tmp_path) == ["x"]
    assert said[0] == "half of it"
    assert f"waiting for process {os.getpid()} on " in said[1] and said[1].endswith(
        f"(half of it), which makes {tmp_path}/x"
    )


def make_for_ever(target: Path) -> None:
    def make(folder: Path, note) -> None:
        (folder / "part").write_text("half")
        note("half")
        time.sleep(1000)

    make_folder(target, make, print)


def test_the_next_one_takes_over_from_a_killed_one(tmp_path: Path):
    target = tmp_path / "x"
    process = multiprocessing.get_context("spawn").Process(target=make_for_ever, args=(target,))
    process.start()
    end = time.monotonic() + TIMEOUT
    while not (lock := target.with_name("x.lock")).exists() or "half" not in lock.read_text():
        assert time.monotonic() < end
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert not target.exists() and list(tmp_path.glob("x.*.tmp"))
    make_folder(target, lambda folder, note: (folder / "part").write_text("whole"), print)
    assert (target / "part").read_text() == "whole" and os.listdir(tmp_path) == ["x"]


def die(chunk: int) -> int:
    if chunk == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return chunk


def test_a_killed_worker_is_an_error():
    with pytest.raises(OSError, match="one of 2 workers died"):
        list(in_order(die, ((i, i) for i in range(100)), 2))


def test_workers_read_a_bounded_part_ahead():
    read = []
    results = in_order(abs, ((i, -i) for i in range(1000) if read.append(i) is None), 2)
    assert next(results) == (0, 0) and len(read) == 8
    results.close()


def test_packs_are_planned_once_and_equal_those_in_memory(data, monkeypatch):
    path, settings = data
    documents = load_documents([str(path)], settings)
    once, how = (lambda work: work()), (64, "best-fit", "split")
    first = Packing.cached(documents, once, print, *how)
    plan = Packing.plan
    monkeypatch.setattr(Packing, "plan", lambda *given: pytest.fail("planned again"))
    second = Packing.cached(documents, once, print, *how)
    monkeypatch.setattr(Packing, "plan", plan)
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    mapped, plain = PackedDataset(documents, *how, 3, second), PackedDataset(documents, *how, 3)
    assert [mapped.sample_id(i) for i in range(100)] == [plain.sample_id(i) for i in range(100)]
    assert len(set(mapped.sample_id(i) for i in range(100))) > 50
