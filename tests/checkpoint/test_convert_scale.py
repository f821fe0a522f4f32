"""Conversion at scale: plans from headers alone, FP8 export, interrupted runs, reading back, what a folder holds."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_glm.checkpoint import chunks, convert, hf, output, sharded
from megatron_glm.checkpoint.chunks import ChunkTable, Piece
from megatron_glm.checkpoint.index import Index, Places
from megatron_glm.checkpoint.output import Run
from megatron_glm.checkpoint.safetensors_io import DTYPE_NAMES, INDEX_NAME
from megatron_glm.config.model import ModelConfig
from megatron_glm.parallel.shard import Rectangle
from tests.checkpoint.test_convert_errors import TOOL, full_disk_after, tool
from tests.helpers import hf_folder
from tests.helpers.distributed import run

# KiB that the tool takes above what its imports hold: torch alone has 200 MB, more in a CUDA build. Not ru_maxrss,
# which a program inherits from the process that starts it: a test run holds up to 1 GB.
PEAK = """
import re, runpy, sys
def memory(name): return int(re.search(name + r":\\s+(\\d+)", open("/proc/self/status").read())[1])
sys.argv = sys.argv[1:]
import megatron_glm.checkpoint.convert, megatron_glm.checkpoint.report
imports = memory("VmRSS")
try: runpy.run_path(sys.argv[0], run_name="__main__")
finally: print(memory("VmHWM") - imports, file=sys.stderr)
"""


@pytest.fixture(autouse=True)
def small_and_not_synced(monkeypatch: pytest.MonkeyPatch):
    """Waiting for the disk shows nothing here; small files and chunks make many of a small model."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 20_000)
    monkeypatch.setattr(sharded, "FILE_BYTES", 60_000)


def converted(tmp_path: Path, **changes: object) -> Path:
    """The one iteration of a converted random folder."""
    hf_folder.make_folder(tmp_path / "hf", **changes)
    convert.Import(hf.HFCheckpoint(tmp_path / "hf"), tmp_path / "ckpt").write(Run())
    return tmp_path / "ckpt" / "iter_0000000"


def headers_only(folder: Path, config: ModelConfig) -> int:
    """Writes the headers and the index of a released folder without any weights; returns the bytes these would have."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config.to_hf()))
    headers: list[dict] = [{}]
    size = total = 0
    for tensor in hf.all_hf_tensors(config):
        nbytes = math.prod(tensor.shape) * tensor.dtype.itemsize
        if size + nbytes > 5 * 10**9:
            headers.append({})
            size = 0
        fields = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": tensor.shape, "data_offsets": [size, size + nbytes]}
        headers[-1][tensor.key] = fields
        size, total = size + nbytes, total + nbytes
    weight_map = {}
    for number, header in enumerate(headers):
        text = json.dumps(header).encode()
        (folder / f"{number}.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
        weight_map |= dict.fromkeys(header, f"{number}.safetensors")
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    assert len(weight_map) == 59_585
    return total


def test_dry_run_at_full_size_from_headers(tmp_path: Path):
    total = headers_only(tmp_path / "hf", ModelConfig.from_hf("glm5.2"))
    command = [sys.executable, "-c", PEAK, TOOL, "--from-hf", "hf", "--save", "ckpt", "--dry-run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *files, summary = done.stdout.splitlines()
    assert summary.startswith(f"would write {len(files)} files with 1369 tensors, {total} bytes")
    assert "part00000.distcp  536.9 MB  1 tensors  embed_tokens.weight" in files
    assert 10**3 < int(done.stderr.split()[-1]) < 2 * 10**5  # 86,500 in either build of torch
    assert not (tmp_path / "ckpt").exists()


def test_a_conversion_needs_more_than_headers(tmp_path: Path, monkeypatch, capsys):
    hf_folder.make_folder(tmp_path / "hf")
    file = tmp_path / "hf" / "model-00002-of-00003.safetensors"
    os.truncate(file, 8 + int.from_bytes(file.read_bytes()[:8], "little"))
    arguments = ["--from-hf", tmp_path / "hf", "--save", tmp_path / "ckpt"]
    assert tool(monkeypatch, *arguments, "--dry-run") == 0
    assert tool(monkeypatch, *arguments) == 1
    assert f"error: {file} is truncated" in capsys.readouterr().err


def test_dry_run_of_an_export_lists_the_files_that_it_writes(tmp_path: Path, monkeypatch, capsys):
    folder = converted(tmp_path)
    arguments = ["--load", folder, "--to-hf", tmp_path / "back", "--max-shard-size", "70KB", "--fp8-block-quantize"]
    assert tool(monkeypatch, *arguments, "--dry-run") == 0
    listed = re.findall(r"^(model-\S+)  ", capsys.readouterr().out, re.MULTILINE)
    assert not (tmp_path / "back").exists()
    assert tool(monkeypatch, *arguments) == 0
    assert listed == sorted(path.name for path in (tmp_path / "back").glob("*.safetensors"))


def test_one_expert_is_found_without_its_neighbours():
    """Of 10,000 experts' chunks only that of the one is looked at, and row blocks of unequal sizes are all found."""
    kind = torch.bfloat16
    pieces = [Piece("experts", (10_000, 2, 2), kind, (e, 0, 0), (1, 2, 2)) for e in reversed(range(10_000))]
    pieces += [Piece("rows", (20, 2), kind, (a, 0), (b - a, 2)) for a, b in ((0, 7), (7, 8), (8, 20))]
    nowhere = np.zeros(len(pieces), dtype=np.int64)
    stored = Index(ChunkTable.of(pieces), Places(["file"], nowhere, nowhere, nowhere, nowhere))

    def found(name: str, start: int, stop: int) -> list[tuple]:
        shape = (stop - start, *stored.tensors[name][0][1:])
        wanted = Rectangle(name, stored.tensors[name][0], (start, 0, 0)[: len(shape)], torch.empty(shape), False)
        parts = stored.parts(wanted)
        return [(stored.piece(p.chunk).offsets[0], p.stored[0], p.wanted[0], p.lengths[0]) for p in parts]

    assert found("experts", 4711, 4712) == [(4711, 0, 0, 1)]
    assert found("rows", 6, 8) == [(0, 6, 0, 1), (7, 0, 1, 1)]
    assert found("rows", 19, 20) == [(8, 11, 0, 1)]


def test_fp8_set_and_config_are_those_of_the_release():
    """GLM-5.2-FP8 has 118,629 tensors."""
    model = ModelConfig.from_hf("glm5.2")
    tensors = list(hf.all_hf_tensors(model))
    quantized = [tensor.key for tensor in tensors if tensor.fp8]
    assert len(tensors) + len(quantized) == 118_629
    for part in ("kv_a_proj_with_mqa", "kv_b_proj", "indexer.wq_b", "indexer.wk"):
        assert f"model.layers.78.self_attn.{part}.weight" in quantized
    config = hf.quantization_config(model)
    kept = config.pop("modules_to_not_convert")
    blocks = {"weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    assert config == {"quant_method": "fp8", "fmt": "e4m3"} | blocks
    attention = ["model.layers.0.self_attn.indexers_proj", "model.layers.0.self_attn.indexer.weights_proj"]
    rest = ["model.embed_tokens", "lm_head", "model.norm", "model.layers.78.eh_proj", "model.layers.3.mlp.gate"]
    assert {*attention, *rest} <= set(kept)
    assert not {key.removesuffix(".weight") for key in quantized} & set(kept)


def test_fp8_round_trips(tmp_path: Path):
    """Within half an e4m3 step after one trip, bit for bit the same after each further one."""
    first = converted(tmp_path, hidden_size=200)
    tensors = hf_folder.read_folder(tmp_path / "hf")
    convert.Export(first, 10**5, fp8=True).write(tmp_path / "fp8", Run(verify=True))
    stored = hf_folder.read_folder(tmp_path / "fp8")
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    assert config.pop("quantization_config") == hf.quantization_config(convert.Export(first).config)
    assert config == json.loads((tmp_path / "hf" / "config.json").read_text())
    key = "model.layers.3.mlp.experts.5.up_proj.weight"
    assert stored[key].dtype == torch.float8_e4m3fn and stored[key + "_scale_inv"].shape == (1, 2)

    convert.Import(hf.HFCheckpoint(tmp_path / "fp8"), tmp_path / "again").write(Run(verify=True))
    convert.Export(tmp_path / "again" / "iter_0000000", 10**5).write(tmp_path / "plain", Run())
    for name, after in hf_folder.read_folder(tmp_path / "plain").items():
        before = tensors[name].float()
        if name + "_scale_inv" in stored:
            smallest = stored[name + "_scale_inv"].max() * 2.0**-10  # half a step of the subnormal numbers
            assert ((after.float() - before).abs() <= before.abs() * (2.0**-4 + 2.0**-8) + smallest).all(), name
        else:
            assert torch.equal(after.float(), before), name
    convert.Export(tmp_path / "again" / "iter_0000000", 10**5, fp8=True).write(tmp_path / "fp8_again", Run())
    hf_folder.assert_same_tensors(hf_folder.read_folder(tmp_path / "fp8_again"), stored)


def test_fp8_refuses_what_is_not_finite(tmp_path: Path):
    tensors = hf_folder.make_folder(tmp_path / "plain")
    key = "model.layers.3.mlp.experts.5.up_proj.weight"
    tensors[key][0, 0] = torch.nan
    hf_folder.write_folder(tmp_path / "hf", hf_folder.tiny_config(), tensors)
    convert.Import(hf.HFCheckpoint(tmp_path / "hf"), tmp_path / "ckpt").write(Run())
    with pytest.raises(ValueError, match=re.escape(key)):
        convert.Export(tmp_path / "ckpt" / "iter_0000000", fp8=True).write(tmp_path / "back", Run())
    assert not (tmp_path / "back").exists() and not (tmp_path / "back.tmp").exists()


class Killed(BaseException):
    """As an interrupt: nothing is cleaned up."""


def killed_after(files: int, monkeypatch: pytest.MonkeyPatch, job, *where: Path) -> list[str]:
    """Runs a conversion that dies when it begins its next file; returns the names of the files it finished."""
    names = [file.name for file in job.files(Run())]
    real, written = output.write_durably, []

    def dying(path: Path, content: bytes) -> None:
        if path.parent.name == output.RECORDS and path.name != output.SETTINGS:
            if len(written) == files:
                raise Killed
            written.append(path.name.removesuffix(".json"))
        real(path, content)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(output, "write_durably", dying)
        job.write(*where, Run())
    assert written == names[:files] and len(names) > files + 1
    return written


def test_resume_of_an_import(tmp_path: Path, monkeypatch):
    tensors = hf_folder.make_folder(tmp_path / "hf")
    job = convert.Import(hf.HFCheckpoint(tmp_path / "hf"), tmp_path / "ckpt")
    finished = killed_after(4, monkeypatch, job)
    staging = tmp_path / "ckpt" / "iter_0000000.tmp"
    os.truncate(staging / finished[1], 100)  # a lost file and a shortened one are written again
    (staging / finished[2]).unlink()
    before = {name: (staging / name).stat().st_mtime_ns for name in (finished[0], finished[3])}
    convert.Import(hf.HFCheckpoint(tmp_path / "hf"), tmp_path / "ckpt").write(Run(resume=True, verify=True))
    folder = tmp_path / "ckpt" / "iter_0000000"
    assert {name: (folder / name).stat().st_mtime_ns for name in before} == before
    assert not (folder / output.RECORDS).exists() and not staging.exists()
    convert.Export(folder).write(tmp_path / "back", Run())
    hf_folder.assert_same_tensors(hf_folder.read_folder(tmp_path / "back"), tensors)


def test_resume_of_an_export_refuses_other_settings_and_sources(tmp_path: Path, monkeypatch):
    folder = converted(tmp_path)
    finished = killed_after(3, monkeypatch, convert.Export(folder, 70_000), tmp_path / "back")
    before = (tmp_path / "back.tmp" / finished[0]).stat().st_mtime_ns
    for other, words in (
        (convert.Export(folder, 80_000), r"--max-shard-size 70000, this one has 80000"),
        (convert.Export(folder, 70_000, fp8=True), r"--fp8-block-quantize false, this one has true"),
    ):
        with pytest.raises(ValueError, match=words):
            other.write(tmp_path / "back", Run(resume=True))
    changed = sorted(folder.glob("*.distcp"))[0]
    times = changed.stat()
    os.utime(changed, ns=(times.st_atime_ns, times.st_mtime_ns + 1))
    with pytest.raises(ValueError, match=rf"{changed.name} .*{times.st_mtime_ns}.*{times.st_mtime_ns + 1}"):
        convert.Export(folder, 70_000).write(tmp_path / "back", Run(resume=True))
    os.utime(changed, ns=(times.st_atime_ns, times.st_mtime_ns))
    convert.Export(folder, 70_000).write(tmp_path / "back", Run(resume=True))
    assert (tmp_path / "back" / finished[0]).stat().st_mtime_ns == before
    originals = hf_folder.read_folder(tmp_path / "hf")
    hf_folder.assert_same_tensors(hf_folder.read_folder(tmp_path / "back"), originals)


@pytest.mark.parametrize("way", ["in", "out"])
def test_verify_finds_one_wrong_byte(way: str, tmp_path: Path, monkeypatch):
    """A byte that the disk changed after it was written."""
    folder = converted(tmp_path)
    real = output._write_share

    def corrupting(staging, files, run):
        result = real(staging, files, run)
        content = bytearray((staging / files[1].name).read_bytes())
        content[len(content) // 2] ^= 1
        (staging / files[1].name).write_bytes(content)
        return result

    monkeypatch.setattr(output, "_write_share", corrupting)
    if way == "in":
        shutil.rmtree(tmp_path / "ckpt")
        job, where = convert.Import(hf.HFCheckpoint(tmp_path / "hf"), tmp_path / "ckpt"), ()
    else:
        job, where = convert.Export(folder, 70_000), (tmp_path / "back",)
    with pytest.raises(ValueError, match=r"byte \d+ is 0x..?, in the source 0x..?"):
        job.write(*where, Run(verify=True))
    assert not list(tmp_path.rglob("*.tmp")) and not (tmp_path / "back").exists()


def test_inspect(tmp_path: Path, monkeypatch, capsys):
    folder = converted(tmp_path)
    for arguments in (["--inspect", tmp_path / "ckpt"], ["--inspect", folder, "--verify"]):
        assert tool(monkeypatch, *arguments) == 0
        shown = capsys.readouterr().out
        for words in ("6 layers", "iteration    0000000, converted", "integrity    good", "optimizer 0 B"):
            assert words in shown
    assert tool(monkeypatch, "--inspect", tmp_path / "hf") == 0
    assert "Hugging Face folder" in capsys.readouterr().out

    files = sorted(folder.glob("*.distcp"))
    content = bytearray(files[2].read_bytes())
    content[len(content) // 2] ^= 1
    files[2].write_bytes(content)
    assert tool(monkeypatch, "--inspect", folder) == 0, "the data is not read"
    assert tool(monkeypatch, "--inspect", folder, "--verify") == 1
    assert f"{files[2]} is damaged" in capsys.readouterr().err
    os.truncate(files[0], 50)
    files[1].unlink()
    assert tool(monkeypatch, "--inspect", tmp_path / "ckpt") == 1
    error = capsys.readouterr().err
    assert f"{files[0]} is truncated" in error and f"{files[1]} is missing" in error


def convert_on_ranks(folder: Path) -> tuple[int, str]:
    """Both ways on this rank's share; then an export that fails on the last rank: (files written here, the error)."""
    group = dist.group.WORLD
    sharded.FILE_BYTES = 60_000
    job = convert.Import(hf.HFCheckpoint(folder / "hf"), folder / "ckpt")
    mine = Run(group=group).share(job.files(Run()))
    job.write(Run(verify=True, group=group))
    export = convert.Export(folder / "ckpt" / "iter_0000000", 70_000)
    export.write(folder / "back", Run(verify=True, group=group))
    progress = full_disk_after(2) if group.rank() == group.size() - 1 else lambda nbytes: None
    with pytest.raises((ValueError, OSError)) as caught:
        export.write(folder / "other", Run(group=group, progress=progress))
    return len(mine), str(caught.value)


def test_processes_share_the_work_and_fail_together(tmp_path: Path):
    tensors = hf_folder.make_folder(tmp_path / "hf")
    (first, error), (second, own) = run(2, convert_on_ranks, tmp_path)
    written = len(list((tmp_path / "ckpt" / "iter_0000000").glob("*.distcp")))
    assert first + second == written and abs(first - second) <= 1 < first
    hf_folder.assert_same_tensors(hf_folder.read_folder(tmp_path / "back"), tensors)
    assert (error, own) == ("rank 1: no space left on device", "no space left on device")
    assert not (tmp_path / "other").exists() and not (tmp_path / "other.tmp").exists()


def test_torchrun(tmp_path: Path):
    """Rank 0 alone says that it is done."""
    hf_folder.make_folder(tmp_path / "hf")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(TOOL)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [*launch, "--from-hf", "hf", "--save", "ckpt"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count("wrote ckpt") == 1, done.stderr
    assert sharded.latest(tmp_path / "ckpt") == 0


def test_srun(tmp_path: Path):
    """Two tasks share the files; two commands that differ are refused, and so is a task that srun did not start."""
    hf_folder.make_folder(tmp_path / "hf")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        slurm = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1]), "SLURM_NTASKS": "2"}
    slurm |= {"OMP_NUM_THREADS": "1", "SLURM_JOB_ID": "1"}

    def tasks(*targets: str, **step: str) -> list[tuple[int, str, str]]:
        started = []
        for rank, target in enumerate(targets):
            environment = os.environ | slurm | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} | step
            command = [sys.executable, str(TOOL), "--from-hf", "hf", "--save", target]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            started.append(subprocess.Popen(command, cwd=tmp_path, env=environment, text=True, **pipes))
        said = [process.communicate(timeout=120) for process in started]
        return [(process.returncode, *texts) for process, texts in zip(started, said, strict=True)]

    first, second = tasks("ckpt", "ckpt", SLURM_STEP_ID="0")
    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    assert "wrote ckpt" in first[1] and second[1] == "" and sharded.latest(tmp_path / "ckpt") == 0
    for code, _, error in tasks("one", "two", SLURM_STEP_ID="1"):
        assert code == 2 and "--save is one on rank 0" in error and "and two on rank 1" in error
    assert not list(tmp_path.glob("one*")) and not list(tmp_path.glob("two*"))
    [(code, _, error)] = tasks("one")
    assert code == 2 and "start it with srun or torchrun" in error and error.count("\n") == 1
