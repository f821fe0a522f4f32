"""The table of GPU packages: what reads it, and which torch it serves."""

from __future__ import annotations

import ast
import re
import runpy
import sys
from pathlib import Path

import pytest
import setuptools

from megatron_glm import packages

ROOT = Path(__file__).resolve().parents[2]
LATER, FRESH = packages.SETS[1], packages.FRESH


@pytest.fixture
def extras(monkeypatch) -> dict[str, list[str]]:
    given = {}
    monkeypatch.setattr(setuptools, "setup", given.update)
    runpy.run_path(str(ROOT / "setup.py"))
    assert given["install_requires"][0] == "torch>=2.11"
    return given["extras_require"]


def test_each_extra_is_a_set_with_its_torch(extras):
    assert extras["gpu"] == FRESH.requirements and "torch==2.11.0" in extras["gpu"]
    assert extras["gpu-torch214"] == LATER.requirements and "torch==2.14.1" in extras["gpu-torch214"]


def test_the_page_shows_the_table():
    page = (ROOT / "docs" / "install.md").read_text()
    rows = [re.findall(r"`([^`]+)`", line) for line in page.splitlines() if line.startswith("| `torch==")]
    sets = [[entry.requirements[0], *entry.packages.values(), entry.install] for entry in packages.SETS]
    assert [sorted(row) for row in rows] == [sorted(names) for names in sets]
    for entry in packages.SETS:
        assert f"| {entry.tested} |" in page


@pytest.mark.parametrize("version, cuda", [("2.11.0+cu130", "13.0"), ("2.14.1+cu132", "13.2"), ("2.11.0", "13.0")])
def test_a_known_torch_has_its_set(version, cuda):
    assert packages.gpu_set(version, cuda).torch == version.split("+")[0]


@pytest.mark.parametrize(
    "version, cuda, says",
    [
        (
            "2.15.0+cu130",
            "13.0",
            "built for CUDA 13.0, is not one .* pip install -e '.[gpu]' brings one with its packages",
        ),
        ("2.14.0+cu130", "13.0", "torch 2.14.0+cu130"),
        ("2.12.0a0+git1", "13.0", "torch 2.12.0a0+git1"),
        (
            "2.11.0+cpu",
            None,
            "built without CUDA, .* pip uninstall -y torch && pip install -e '.[gpu]'",
        ),
        ("2.14.1+cu126", "12.6", "built for CUDA 12.6, .* && pip install -e '.[gpu-torch214]'"),
    ],
)
def test_another_torch_is_refused_by_name(version, cuda, says):
    with pytest.raises(ValueError, match=re.escape(says).replace(r"\.\*", ".*")) as caught:
        packages.gpu_set(version, cuda)
    assert f"torch {version}" in str(caught.value) and "2.11.0 and 2.14.1" in str(caught.value)


@pytest.mark.parametrize(
    "torch, cpu, gpu",
    [(None, ["torch==2.13.0"], ["torch==2.11.0"]), (("2.10.1", None), ["torch==2.13.0"], ["torch==2.11.0"])]
    + [(("2.13.0+cpu", None), [], []), (("2.15.0+cu130", "13.0"), [], [])],
)
def test_a_machine_without_a_hopper_gpu_keeps_its_torch(monkeypatch, torch, cpu, gpu):
    monkeypatch.setattr(packages, "installed_torch", lambda: torch)
    assert packages.wanted("cpu") == cpu and packages.wanted("gpu") == gpu


def test_a_hopper_machine_gets_the_set_of_its_torch(monkeypatch):
    def wanted(torch: tuple | None) -> list[str]:
        monkeypatch.setattr(packages, "installed_torch", lambda: torch)
        return packages.wanted("hopper")

    monkeypatch.setattr(packages, "no_wheels", lambda: None)
    assert wanted(None) == FRESH.requirements
    assert wanted(("2.14.1+cu130", "13.0")) == LATER.requirements
    with pytest.raises(ValueError, match="torch 2.13.0"):
        wanted(("2.13.0", "13.0"))
    monkeypatch.setattr(packages, "no_wheels", lambda: "no wheels")
    with pytest.raises(ValueError, match="no wheels"):
        wanted(None)


def test_machines_without_wheels(monkeypatch):
    assert packages.no_wheels() is None or sys.version_info[:2] > packages.PYTHONS[1]
    monkeypatch.setattr(packages.sys, "version_info", (3, 14, 0))
    assert "wheels for Python 3.11 to 3.13, this is" in packages.no_wheels()
    monkeypatch.setattr(packages.platform, "machine", lambda: "aarch64")
    assert "this is aarch64" in packages.no_wheels()


def test_what_an_interpreter_lacks(monkeypatch):
    assert packages.unsuitable() is None
    monkeypatch.setattr(packages, "installed_torch", lambda: ("2.9.1+cu128", "12.8"))
    monkeypatch.setattr(packages, "REQUIRED", ("numpy", "no_such_package"))
    assert packages.unsuitable() == "it lacks torch 2.11 or newer (it has 2.9.1+cu128), no_such_package"
    monkeypatch.setattr(packages.sys, "version_info", (3, 10, 2))
    assert packages.unsuitable().endswith("3.11 or newer is needed")


def test_the_installed_torch_is_read_without_importing_it():
    import torch

    assert packages.installed_torch() == (torch.__version__, torch.version.cuda)
    imported = {name for node in ast.walk(ast.parse(Path(packages.__file__).read_text())) for name in names(node)}
    assert imported <= set(sys.stdlib_module_names) | {"__future__"}


def names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name.split(".")[0] for alias in node.names]
    return [node.module.split(".")[0]] if isinstance(node, ast.ImportFrom) else []
