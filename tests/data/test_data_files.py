"""Which files a path means, and their rows: every format, compressed or not, and what is passed over."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from megatron_glm.data.files import decode_row, find_files, read_rows
from megatron_glm.data.report import RowReport

ROWS = [{"text": "a", "n": 1}, {"text": "b", "n": None}]
LINES = "\n".join(map(json.dumps, ROWS)).encode()


def saved_to_disk(folder: Path, rows: list[dict] = ROWS, **state) -> Path:
    """What Dataset.save_to_disk writes, in two files whose order is that of the state."""
    folder.mkdir(parents=True)
    names = ["data-b.arrow", "data-a.arrow"]
    for name, row in zip(names, rows, strict=True):
        table = pyarrow.Table.from_pylist([row], schema=pyarrow.schema({"text": "string", "n": "int64"}))
        with pyarrow.ipc.new_stream(folder / name, table.schema) as stream:
            stream.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]} | state))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def written(folder: Path, name: str) -> Path:
    path = folder / name
    if name.endswith(".zst"):
        with pyarrow.CompressedOutputStream(str(path), "zstd") as out:
            out.write(LINES)
    elif name.endswith((".gz", ".GZ")):
        path.write_bytes(gzip.compress(LINES))
    elif name.endswith(".parquet"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    elif name.endswith(".arrow"):
        table = pyarrow.Table.from_pylist(ROWS)
        with pyarrow.ipc.new_file(path, table.schema) as file:
            file.write_table(table)
    elif name == "array.json":
        path.write_text("\n " + json.dumps(ROWS, indent=1))
    elif name.startswith("bom"):  # as Windows programs write
        text = json.dumps(ROWS) if name == "bom-array.json" else LINES.decode().replace("\n", "\r\n")
        path.write_text(text, encoding="utf-8-sig", newline="")
    else:
        path.write_bytes(LINES)
    return path


NAMES = ["a.jsonl", "lines.json", "array.json", "a.ndjson", "A.JSONL", "a.jsonl.gz", "a.json.zst", "A.Jsonl.GZ"]
NAMES += ["a.parquet", "a.arrow", "bom.jsonl", "bom-array.json"]


@pytest.mark.parametrize("name", NAMES)
def test_every_format_has_the_same_rows(tmp_path: Path, name: str):
    path = written(tmp_path, name)
    assert find_files([str(tmp_path)]) == find_files([str(path)]) == [path]
    rows = list(read_rows(path))
    assert [decode_row(raw) for _, raw in rows] == [{"text": "a", "n": 1}, {"text": "b"}]
    assert rows[1][0] == (f"{path} row 2" if name.endswith((".parquet", ".arrow", "array.json")) else f"{path}:2")


def test_a_key_that_stands_twice():
    with pytest.raises(ValueError, match="the key content is there twice"):
        decode_row(b'{"messages": [{"role": "user", "content": "a", "content": "b"}]}')


def test_a_folder_that_save_to_disk_wrote(tmp_path: Path):
    folder = saved_to_disk(tmp_path / "set")
    report = RowReport()
    files = find_files([str(tmp_path)], report=report)
    assert [decode_row(raw)["text"] for file in files for _, raw in read_rows(file)] == ["a", "b"]
    assert report.files_left_out == []
    saved_to_disk(tmp_path / "other", _indices_files=[{"filename": "indices.arrow"}])
    with pytest.raises(ValueError, match="other was saved with an index over its rows"):
        find_files([str(tmp_path / "other")])
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["set", "other"]}')
    with pytest.raises(ValueError, match=f"holds the splits set, other: name one, as {folder}"):
        find_files([str(tmp_path)])


def test_a_link_to_a_folder_is_followed(tmp_path: Path):
    written(tmp_path, "a.jsonl")
    (tmp_path / "data").mkdir()
    (tmp_path / "data/more").symlink_to(tmp_path)
    (tmp_path / "other").symlink_to(saved_to_disk(tmp_path.parent / "elsewhere"))
    assert [file.name for file in find_files([str(tmp_path)])] == ["a.jsonl", "data-b.arrow", "data-a.arrow"]
    assert [file.name for file in find_files([str(tmp_path / "other")])] == ["data-b.arrow", "data-a.arrow"]


def test_what_is_passed_over_is_named(tmp_path: Path):
    for name in ("b.jsonl", ".hidden.jsonl", "c.txt", "d.csv", ".cache/x.jsonl", "deep/e.json", "deep/f.parquet.gz"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(LINES)
    report = RowReport()
    assert find_files([str(tmp_path)], report=report) == [tmp_path / "b.jsonl", tmp_path / "deep/e.json"]
    left = [tmp_path / name for name in ("c.txt", "d.csv", "deep/f.parquet.gz")]
    assert report.summary().splitlines()[1] == f"files not read: {', '.join(map(str, left))}"
    assert find_files([f"{tmp_path}/*"]) == [tmp_path / "b.jsonl", tmp_path / "deep/e.json"]
    assert find_files([f"{tmp_path}/**"]) == [tmp_path / "b.jsonl", tmp_path / "deep/e.json"]
    with pytest.raises(ValueError, match="c.txt is of no format that is read"):
        find_files([str(left[0])])
    (tmp_path / "only").mkdir()
    (tmp_path / "only/x.csv").touch()
    with pytest.raises(ValueError, match=r"only holds or matches no file .*; there: .*only/x.csv: correct the path"):
        find_files([str(tmp_path / "only")])
    for name in ("tatsu-lab/alpaca", "https://huggingface.co/datasets/tatsu-lab/alpaca"):
        hint = "hf download tatsu-lab/alpaca --repo-type dataset --local-dir data/alpaca$"
        with pytest.raises(ValueError, match=hint):
            find_files([name])
    with pytest.raises(ValueError, match="correct the path$"):
        find_files(["data/tulu3.jsonl"])


@pytest.mark.parametrize(
    "name, content, match",
    [
        ("a.jsonl.gz", b"no gzip", "cannot read .*a.jsonl.gz"),
        ("a.jsonl.gz", gzip.compress(LINES)[:-9], "cannot read .*a.jsonl.gz"),
        ("a.jsonl.zst", b"no zstd", "cannot read .*a.jsonl.zst"),
        (
            "a.json",
            b'[{"text": "a", "text": "b"}]',
            "cannot read .*a.json: .* the key text is there twice",
        ),
        ("a.json", b'[{"text": "a"}', "cannot read .*a.json: it begins as an array of rows, but"),
        ("a.arrow", b"no arrow", "cannot read .*a.arrow"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: bytes, match: str):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=match):
        list(read_rows(tmp_path / name))
