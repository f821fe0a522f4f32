"""What does not fit is refused with the names of tensor and file, and nothing half-written stays behind."""

from __future__ import annotations

import json
import os
import resource
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_glm.checkpoint import convert, hf, sharded
from megatron_glm.checkpoint.output import Run
from megatron_glm.config.flags import parse
from tests.helpers import hf_folder

TOOL = Path(__file__).resolve().parents[2] / "tools" / "convert_hf.py"
KEY = "model.layers.3.mlp.experts.5.up_proj.weight"
FILES = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]


@pytest.fixture(autouse=True)
def no_sync(monkeypatch: pytest.MonkeyPatch):
    """Waiting for the disk shows nothing here and takes most of the time."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def tool(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """Exit status of the tool, run in this process."""
    monkeypatch.setattr(sys, "argv", ["convert_hf.py", *map(str, arguments)])
    with pytest.raises(SystemExit) as status:
        runpy.run_path(str(TOOL), run_name="__main__")
    return status.value.code


def refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, *words: str) -> None:
    """The tool fails on tmp_path/hf with one `error:` line holding `words`, and writes nothing."""
    assert tool(monkeypatch, "--from-hf", tmp_path / "hf", "--save", tmp_path / "ckpt") == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    for word in words:
        assert word in lines[0], lines[0]
    assert not (tmp_path / "ckpt").exists() or not any((tmp_path / "ckpt").iterdir())


def change(tmp_path: Path, changes: dict[str, torch.Tensor | None], **config: object) -> None:
    """Writes tmp_path/hf: a random folder in which some tensors are others, or gone."""
    tensors = hf_folder.make_folder(tmp_path / "plain") | changes
    kept = {key: tensor for key, tensor in tensors.items() if tensor is not None}
    hf_folder.write_folder(tmp_path / "hf", hf_folder.tiny_config(**config), kept, dict.fromkeys(changes, 1))


SCALE = KEY + "_scale_inv"
CHANGES = {
    "missing": ({KEY: None}, [KEY, "hf lacks", "[20, 72]"]),
    "missing from the MTP layer": ({"model.layers.6.enorm.weight": None}, ["model.layers.6.enorm.weight"]),
    "extra": ({"model.layers.2.self_attn.indexer.wk.weight": torch.zeros(2)}, ["indexer.wk.weight", FILES[1]]),
    "integers": ({KEY: torch.zeros(20, 72).int()}, [KEY, FILES[1], "torch.int32"]),
    "a scale without FP8": ({SCALE: torch.ones(1, 1)}, [KEY, "torch.bfloat16", SCALE]),
    "integer scale": (
        {KEY: torch.zeros(20, 72).to(torch.float8_e4m3fn), SCALE: torch.ones(1, 1).int()},
        [SCALE, FILES[1], "torch.int32"],
    ),
    "extra scale": ({"model.nothing_scale_inv": torch.zeros(2)}, ["model.nothing_scale_inv", FILES[1]]),
    "misshapen": ({KEY: torch.zeros(21, 72)}, [KEY, FILES[1], "[21, 72]", "[20, 72]"]),
    "FP8 without scale": ({KEY: torch.zeros(20, 72).to(torch.float8_e4m3fn)}, [KEY, FILES[1], KEY + "_scale_inv"]),
    "scale of other blocks": (
        {KEY: torch.zeros(20, 72).to(torch.float8_e4m3fn), KEY + "_scale_inv": torch.ones(2, 5)},
        [KEY + "_scale_inv", FILES[1], "[2, 5]", "[1, 1]", "[128, 128]"],
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_tensors_that_do_not_fit(case: str, tmp_path: Path, monkeypatch, capsys):
    changes, words = CHANGES[case]
    change(tmp_path, changes)
    refuse(tmp_path, monkeypatch, capsys, *words)


HEADERS = {
    "no offsets": ({"data_offsets": None}, "has a damaged header"),
    "three offsets": ({"data_offsets": [0, 1, 2]}, "has a damaged header"),
    "a shape below zero": ({"shape": [-131, -72]}, "has a damaged header"),
    "offsets below zero": ({"data_offsets": [-131 * 144, 0]}, "has a damaged header"),
    "a dtype that is no name": ({"dtype": ["BF16"]}, "has the unknown dtype ['BF16']"),
    "data of another tensor": ({"data_offsets": [0, 131 * 144]}, "the data before it ends at"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_damaged_headers(case: str, tmp_path: Path, monkeypatch, capsys):
    changes, words = HEADERS[case]
    hf_folder.make_folder(tmp_path / "hf")
    content = (tmp_path / "hf" / FILES[0]).read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    fields = header["model.embed_tokens.weight"] | changes
    header["model.embed_tokens.weight"] = {key: value for key, value in fields.items() if value is not None}
    text = json.dumps(header).encode()
    (tmp_path / "hf" / FILES[0]).write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    refuse(tmp_path, monkeypatch, capsys, FILES[0], words)


def test_what_is_json_but_no_header_index_or_quantization(tmp_path: Path, monkeypatch, capsys):
    hf_folder.make_folder(tmp_path / "hf")
    index, config = tmp_path / "hf" / "model.safetensors.index.json", tmp_path / "hf" / "config.json"
    before = index.read_text(), json.loads(config.read_text())
    for damaged in ("[]", '{"weight_map": []}', '{"weight_map": {"a": null}}', "[" * 100_000):
        index.write_text(damaged)
        refuse(tmp_path, monkeypatch, capsys, str(index), "is not a safetensors index")
    index.write_text(before[0])
    for damaged, words in (("fp8", "quantization_config"), ({"weight_block_size": [0, 128]}, "weight_block_size")):
        config.write_text(json.dumps(before[1] | {"quantization_config": damaged}))
        refuse(tmp_path, monkeypatch, capsys, str(config), words)
    (tmp_path / "hf" / FILES[0]).write_bytes((2).to_bytes(8, "little") + b"[]")
    config.write_text(json.dumps(before[1]))
    refuse(tmp_path, monkeypatch, capsys, FILES[0], "no safetensors header")


@pytest.mark.parametrize("room", [300, 5_000, 200_000])
def test_a_full_disk_is_one_line_naming_the_file(room: int, tmp_path: Path, monkeypatch, capsys):
    """A limit on the size of files acts as a full disk does, but in the middle of whatever is written then."""
    hf_folder.make_folder(tmp_path / "hf")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)  # Python ignores the signal that comes with the error
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
        refuse(tmp_path, monkeypatch, capsys, "File too large", "iter_0000000.tmp")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_folder_of_someone_else_is_not_replaced(tmp_path: Path, monkeypatch, capsys):
    hf_folder.make_folder(tmp_path / "hf")
    assert tool(monkeypatch, "--from-hf", tmp_path / "hf", "--save", tmp_path / "ckpt") == 0
    (tmp_path / "back.tmp").mkdir()
    (tmp_path / "back.tmp" / "notes").write_text("mine")
    assert tool(monkeypatch, "--load", tmp_path / "ckpt", "--to-hf", tmp_path / "back") == 1
    assert f"{tmp_path / 'back.tmp'} is needed" in capsys.readouterr().err
    assert (tmp_path / "back.tmp" / "notes").read_text() == "mine"
    monkeypatch.chdir(tmp_path / "back.tmp")
    assert tool(monkeypatch, "--load", tmp_path / "ckpt", "--to-hf", ".") == 1
    assert "already exists" in capsys.readouterr().err


def test_verify_reads_the_source_too(tmp_path: Path, monkeypatch, capsys):
    tensors = hf_folder.make_folder(tmp_path / "hf")
    assert tool(monkeypatch, "--from-hf", tmp_path / "hf", "--save", tmp_path / "ckpt") == 0
    [file] = (tmp_path / "ckpt").rglob("*.distcp")
    content = bytearray(file.read_bytes())
    content[content.index(tensors[KEY].view(torch.uint8).numpy().tobytes())] ^= 1
    file.write_bytes(content)
    assert tool(monkeypatch, "--load", tmp_path / "ckpt", "--to-hf", tmp_path / "back", "--verify") == 1
    assert f"{file} is damaged: layers.3.mlp.experts.gate_up at [5, 0, 0]" in capsys.readouterr().err
    assert not (tmp_path / "back").exists() and not (tmp_path / "back.tmp").exists()


def test_truncated_data(tmp_path: Path, monkeypatch, capsys):
    hf_folder.make_folder(tmp_path / "hf")
    file = tmp_path / "hf" / FILES[1]
    size = file.stat().st_size
    os.truncate(file, size - 3)
    last = max(json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())["weight_map"])
    assert last
    refuse(tmp_path, monkeypatch, capsys, str(file), "truncated", "model.layers.", f"byte {size - 3}")


def test_truncated_header(tmp_path: Path, monkeypatch, capsys):
    hf_folder.make_folder(tmp_path / "hf")
    os.truncate(tmp_path / "hf" / FILES[2], 100)
    refuse(tmp_path, monkeypatch, capsys, FILES[2], "truncated", "100 bytes")


def test_missing_file(tmp_path: Path, monkeypatch, capsys):
    hf_folder.make_folder(tmp_path / "hf")
    (tmp_path / "hf" / FILES[0]).unlink()
    refuse(tmp_path, monkeypatch, capsys, FILES[0], "missing", "model.embed_tokens.weight")


def test_index_and_files_disagree(tmp_path: Path, monkeypatch, capsys):
    hf_folder.make_folder(tmp_path / "hf")
    index = tmp_path / "hf" / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.ghost.weight"] = FILES[0]
    index.write_text(json.dumps(content))
    refuse(tmp_path, monkeypatch, capsys, FILES[0], "model.ghost.weight")
    del content["weight_map"]["model.ghost.weight"], content["weight_map"][KEY]
    index.write_text(json.dumps(content))
    refuse(tmp_path, monkeypatch, capsys, KEY, "safetensors")


def test_no_weights(tmp_path: Path, monkeypatch, capsys):
    hf_folder.make_folder(tmp_path / "hf")
    for file in (tmp_path / "hf").glob("model*"):
        file.unlink()
    refuse(tmp_path, monkeypatch, capsys, "neither model.safetensors.index.json nor model.safetensors")


def test_an_error_half_way_leaves_nothing(tmp_path: Path, monkeypatch, capsys):
    hf_folder.make_folder(tmp_path / "hf")
    opened, calls = hf.HFCheckpoint(tmp_path / "hf"), []

    def full_disk(*where):
        calls.append(where)
        if len(calls) == 20:
            raise OSError("no space left on device")
        return hf.HFCheckpoint.read(opened, *where)

    monkeypatch.setattr(opened, "read", full_disk)
    with pytest.raises(OSError, match="no space"):
        convert.Import(opened, tmp_path / "ckpt").write(Run())
    assert not any((tmp_path / "ckpt").iterdir())

    monkeypatch.undo()
    convert.Import(opened, tmp_path / "ckpt").write(Run())
    export = convert.Export(tmp_path / "ckpt" / "iter_0000000", 10**5)
    with pytest.raises(OSError, match="no space"):
        export.write(tmp_path / "back", Run(progress=full_disk_after(10)))
    assert not (tmp_path / "back").exists() and not list(tmp_path.glob("*.tmp"))


def full_disk_after(count: int):
    left = [count]

    def progress(nbytes: int) -> None:
        left[0] -= 1
        if not left[0]:
            raise OSError("no space left on device")

    return progress


def test_existing_targets_are_not_overwritten(tmp_path: Path, monkeypatch, capsys):
    hf_folder.make_folder(tmp_path / "hf")
    assert tool(monkeypatch, "--from-hf", tmp_path / "hf", "--save", tmp_path / "ckpt") == 0
    before = sorted(path.stat().st_mtime_ns for path in (tmp_path / "ckpt").rglob("*"))
    assert tool(monkeypatch, "--from-hf", tmp_path / "hf", "--save", tmp_path / "ckpt") == 1
    assert tool(monkeypatch, "--load", tmp_path / "ckpt", "--to-hf", tmp_path / "hf") == 1
    errors = capsys.readouterr().err
    assert f"{tmp_path / 'ckpt'} already holds checkpoints of iterations 0: choose" in errors
    assert f"{tmp_path / 'hf'} already exists" in errors
    assert sorted(path.stat().st_mtime_ns for path in (tmp_path / "ckpt").rglob("*")) == before


def test_no_checkpoint_is_written_into_the_folder_of_the_model(tmp_path: Path, monkeypatch, capsys):
    """Each save copies that folder's files, and so all earlier saves in it."""
    hf_folder.make_folder(folder := tmp_path / "hf")
    assert tool(monkeypatch, "--from-hf", folder, "--save", folder / "run") == 1
    with pytest.raises(SystemExit):
        parse(f"--load-hf {folder} --save {folder} --data-path rows --train-iters 1".split())
    for save, line in zip((folder / "run", folder), capsys.readouterr().err.splitlines(), strict=True):
        assert line.startswith(f"error: --save {save} is in {folder}, the folder of the model")
    assert not (folder / "run").exists()


def test_tensors_that_the_config_does_not_know_are_not_lost_silently(tmp_path: Path):
    hf_folder.make_folder(tmp_path / "hf")
    convert.Import(hf.HFCheckpoint(tmp_path / "hf"), tmp_path / "ckpt").write(Run())
    folder = sharded.iteration_folder(tmp_path / "ckpt", 0)
    config = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 0}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"layers\.6\..* belongs to no part"):
        convert.Export(folder)


@pytest.mark.parametrize(
    "arguments, word",
    [
        ([], "required"),
        (["--from-hf", "a", "--to-hf", "b"], "--from-hf goes with --save"),
        (["--load", "a", "--save", "b"], "--from-hf goes with --save"),
        (["--from-hf", "a", "--load", "b", "--save", "c"], "not allowed"),
        (["--from-hf", "a", "--save", "b", "--max-shard-size", "5GB"], "--max-shard-size goes with --to-hf"),
        (["--load", "a", "--to-hf", "b", "--max-shard-size", "5 bananas"], "5 bananas"),
    ],
)
def test_usage_errors_exit_2(arguments: list[str], word: str, monkeypatch, capsys):
    assert tool(monkeypatch, *arguments) == 2
    assert word in capsys.readouterr().err


def test_tool_runs_from_anywhere_both_ways(tmp_path: Path):
    tensors = hf_folder.make_folder(tmp_path / "hf")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    for arguments in (["--from-hf", "hf", "--save", "ckpt"], ["--load", "ckpt", "--to-hf", "back"]):
        command = [sys.executable, str(TOOL), *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "100%" in done.stderr and "B/s" in done.stderr
    hf_folder.assert_same_tensors(hf_folder.read_folder(tmp_path / "back"), tensors)
