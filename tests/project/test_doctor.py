"""tools/doctor.py: a line for each thing, a command for what is missing, and the exit code."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_glm import packages

ROOT = Path(__file__).resolve().parents[2]
HOPPER = "NVIDIA H200, 143771 MiB, 9.0, 580.95.05"
SEES = {"version": "2.11.0+cu130", "cuda": "13.0", "gpus": 1, "nccl": "2.28.9"}


@pytest.fixture
def doctor(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    monkeypatch.delitem(sys.modules, "doctor", raising=False)
    import doctor

    monkeypatch.setattr(packages, "installed_torch", lambda: ("2.11.0+cu130", "13.0"))
    monkeypatch.setattr(packages, "no_wheels", lambda: None)
    monkeypatch.setattr(packages, "rivals", lambda chosen: [])
    monkeypatch.setattr(doctor.signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["doctor.py"])
    return doctor


@pytest.fixture
def page(doctor, monkeypatch, tmp_path, capsys):
    """page(lines of nvidia-smi, torch=what it answers, **fault of an import) -> (exit code, subject -> its lines)."""

    def page(smi: str | None, torch: dict | str = SEES, **faults: str) -> tuple[int, dict[str, str]]:
        if smi is None:
            monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
        else:
            program = tmp_path / "nvidia-smi"
            program.write_text(f"#!/bin/sh\n{smi}\n")
            program.chmod(0o755)
            monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

        def probe(code: str):
            if code == doctor.TORCH:
                return (None, torch) if isinstance(torch, str) else (torch, "")
            fault = next((fault for name, fault in faults.items() if f'"{name}"' in code), None)
            return (None, fault) if fault else ("loads", "")

        monkeypatch.setattr(doctor, "probe", probe)
        code = doctor.main()
        out = capsys.readouterr().out
        found = re.findall(r"^(\S+) +(--attention-backend \w+ *|.{29})(.+\n(?: +-> .+\n)?)", out, re.M)
        return code, {subject.strip(): f"{state} {text}" for state, subject, text in found}

    return page


def test_this_machine():
    done = subprocess.run([sys.executable, "tools/doctor.py"], cwd=ROOT, text=True, capture_output=True)
    assert done.stderr == "" and done.returncode == ("MISSING" in done.stdout)
    assert re.search(r"^ok +--attention-backend torch +loads$", done.stdout, re.M)
    for subject in ("driver", "python", "torch", "NCCL", "DeepGEMM", "DeepEP", "Transformer Engine", "descriptors"):
        assert re.search(rf"^\S+ +{subject} ", done.stdout, re.M), subject


def test_a_hopper_machine_with_everything(page):
    code, lines = page(f"echo '{HOPPER}'; echo '{HOPPER}'")
    assert code == 0
    assert lines["GPU"].startswith("ok 2 x NVIDIA H200, 143771 MiB") and lines["driver"] == "ok 580.95.05\n"
    assert lines["torch"].startswith("ok 2.11.0+cu130, built for CUDA 13.0, sees 1 GPUs")
    assert lines["NCCL"].startswith("ok 2.28.9") and lines["--attention-backend cudnn"] == "ok loads\n"


@pytest.mark.parametrize("backend, code", [("cudnn", 1), ("tilelang", 0)])
def test_a_backend_that_does_not_load(page, backend, code):
    found, lines = page(f"echo '{HOPPER}'", **{backend: "undefined symbol"})
    assert found == code
    line = lines[f"--attention-backend {backend}"]
    assert "undefined symbol" in line and line.rstrip().endswith("-> pip install -e '.[gpu]'")


@pytest.mark.parametrize(
    "smi, subject, says",
    [
        (
            "echo 'driver/library version mismatch' >&2; exit 18",
            "driver",
            "nvidia-smi: driver/library version mismatch",
        ),
        (f"echo '{HOPPER.replace('580.95', '550.54')}'", "driver", "CUDA 13 needs 580 or newer"),
    ],
)
def test_a_driver_that_does_not_serve(page, smi, subject, says):
    code, lines = page(smi)
    assert code == 1 and lines[subject].startswith("MISSING") and says in lines[subject] and "->" in lines[subject]


@pytest.mark.parametrize(
    "torch, says, command",
    [
        (SEES | {"version": "2.15.0+cu130"}, "not in the table", "pip install -e '.[gpu]'"),
        (SEES | {"version": "2.11.0+cpu", "cuda": None}, "built without CUDA", "pip uninstall -y torch && pip install"),
        (SEES | {"version": "2.10.0+cu130"}, "2.11 or newer", "pip install -e '.[gpu]'"),
        (SEES | {"gpus": 0}, "sees no GPU", "env | grep CUDA_VISIBLE_DEVICES"),
        ("killed by signal 11", "fails to import: killed by signal 11", "--force-reinstall"),
    ],
)
def test_a_torch_that_does_not_serve(page, torch, says, command):
    code, lines = page(f"echo '{HOPPER}'", torch)
    assert code == 1 and lines["torch"].startswith("MISSING") and says in lines["torch"] and command in lines["torch"]


def test_no_torch_at_all(page, monkeypatch):
    monkeypatch.setattr(packages, "installed_torch", lambda: None)
    code, lines = page(f"echo '{HOPPER}'")
    assert code == 1 and lines["torch"].startswith("MISSING not installed\n")
    assert lines["--attention-backend cudnn"].startswith("MISSING needs torch")


def test_a_machine_without_a_gpu(page):
    code, lines = page(None, SEES | {"version": "2.15.0+cpu", "cuda": None, "gpus": 0, "nccl": None})
    assert code == 0 and lines["driver"].startswith("- no NVIDIA GPU") and lines["torch"].startswith("ok 2.15.0+cpu")
    assert lines["--attention-backend cudnn"].startswith("- for Hopper GPUs")


def test_another_gpu_runs_torch(page):
    other = f"echo '{HOPPER.replace('9.0', '8.0')}'"
    assert page(other)[0] == 0
    code, lines = page(other, SEES | {"version": "2.11.0+cpu", "cuda": None})
    assert code == 1 and "it sees no GPU" in lines["torch"]


def test_a_python_that_is_too_old(page, doctor, monkeypatch):
    monkeypatch.setattr(doctor, "too_old", lambda: True)
    code, lines = page(None)
    assert code == 1 and lines["python"].startswith("MISSING") and "torch" not in lines


def test_what_goes_wrong_is_a_line(page, doctor, monkeypatch):
    def broken(machine):
        raise RuntimeError("unforeseen")

    monkeypatch.setattr(doctor, "compilers", broken)
    code, lines = page(f"echo '{HOPPER}'")
    assert code == 0 and "RuntimeError: unforeseen" in lines["broken"]


@pytest.mark.parametrize(
    "code, fault",
    [
        ("import os; os.kill(os.getpid(), 11)", "killed by signal 11"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("print('?')", "no answer, it printed '?\\n'"),
        ("import time; time.sleep(60)", "no answer in 0.2 s"),
    ],
)
def test_a_crash_or_a_hang_is_words(doctor, monkeypatch, code, fault):
    monkeypatch.setattr(doctor, "SECONDS", 0.2 if "sleep" in code else 60)
    assert doctor.probe(code) == (None, fault)
