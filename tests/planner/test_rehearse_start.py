"""The rehearsal of a start at 512 ranks gives the groups and descriptors of docs/scale.md; no limit is passed over."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_glm.parallel.rendezvous import files_of_start, raise_file_limit, some

ROOT = Path(__file__).resolve().parents[2]


def test_a_rank_of_512_has_the_documented_groups_and_files():
    command = [sys.executable, ROOT / "tools/rehearse_start.py", "--ranks", "512", "--rank", "511"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    measured = [cell.strip() for cell in printed.strip().strip("|").split("|")]
    lines = (ROOT / "docs/scale.md").read_text().splitlines()
    [documented] = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "| 512 | 511 |" in line]
    assert measured[:4] == documented[:4] and measured[8:] == documented[8:]
    assert float(measured[5]) < 5 and int(measured[7]) < 200  # seconds for the groups, MiB


def test_the_soft_limit_of_files_is_raised_and_a_low_hard_one_is_refused(monkeypatch):
    limits = {"now": (1024, 4096)}
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits["now"])
    monkeypatch.setattr(resource, "setrlimit", lambda which, pair: limits.update(now=pair))
    monkeypatch.delenv("TORCH_GLOO_LAZY_INIT", raising=False)
    raise_file_limit(512)
    assert limits["now"] == (4096, 4096)
    needed = files_of_start(2048, 0, eager=False) + 512
    with pytest.raises(
        ValueError, match=f"2048 ranks need {needed} file descriptors a process, the hard limit .* 4096"
    ):
        raise_file_limit(2048)
    limits["now"] = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    raise_file_limit(10**6)


def test_descriptors_follow_the_ranks():
    assert files_of_start(512, 511, eager=True) == 2 * (512 + 2) + 2
    assert files_of_start(512, 511, eager=False) < 64 < files_of_start(512, 0, eager=False)


def test_ranks_in_words():
    assert some([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert some(list(range(0, 100, 2))).endswith("28, 30 and 34 more")
