"""tools/compare_automodel.py: what it refuses, and how it reads a turn; AutoModel itself is no package of the tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import compare_automodel as tool  # noqa: E402


@pytest.fixture
def package(tmp_path) -> Path:
    (tmp_path / "nemo_automodel").mkdir()
    (tmp_path / "nemo_automodel" / "__init__.py").touch()
    return tmp_path


@pytest.mark.parametrize(
    "words, says",
    [
        (["--automodel", "gone"], "--automodel gone holds no package nemo_automodel: clone https://github.com/"),
        (
            ["--automodel", "."],
            "--backend cudnn needs a CUDA device, and torch sees none; --backend torch runs",
        ),
        (["--automodel", ".", "--turns", "0"], "--turns is 0; it must be at least 1"),
        (["--automodel", ".", "--backend", "torch", "--documents", "short"], "--backend torch with --documents short"),
    ],
)
def test_what_cannot_be_compared_is_one_line(words, says, package, monkeypatch, capsys):
    monkeypatch.chdir(package)
    monkeypatch.setattr(sys, "argv", ["compare_automodel.py", *words])
    with pytest.raises(SystemExit) as stopped:
        tool.main()
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and error.startswith(f"error: {says}") and error.count("\n") == 1


def test_a_turn_is_the_last_result_whatever_else_was_said(monkeypatch):
    said = f'loading …{tool.BETWEEN}{{"tokens_per_second": 12.5}}\n'
    done = subprocess.CompletedProcess([], 0, said, "")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    assert tool.measured(tool.PEER, []) == 12.5
    done.stdout = '{"tokens_per_second_per_gpu": 25.0}\n'
    assert tool.measured(tool.OURS, []) == 25.0


def test_a_turn_that_fails_says_why(package, monkeypatch):
    flags = tool.build_parser().parse_args(["--automodel", str(package), "--backend", "torch"])
    monkeypatch.setattr(sys, "argv", ["x", "--automodel", str(package), "--backend", "torch"])
    with pytest.raises(OSError, match="NeMo AutoModel failed: .*No module named 'nemo_automodel.components'"):
        tool.measured(tool.PEER, tool.peer_command())
    assert tool.own_command(flags)[1].endswith("benchmark.py")
