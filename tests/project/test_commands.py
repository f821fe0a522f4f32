"""The installed commands: each names a script that is there, and the wheel has what it needs."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from megatron_glm import commands

ROOT = Path(__file__).resolve().parents[2]
NAMES = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]


@pytest.mark.parametrize("name", NAMES)
def test_a_command_runs_its_script_under_its_own_name(name, monkeypatch, tmp_path, capsys):
    ran = []
    monkeypatch.setattr(commands, "run", ran.append)
    function = NAMES[name].removeprefix("megatron_glm.commands:")
    getattr(commands, function)()
    (script,) = ran
    assert function in Path(script).stem and '__name__ == "__main__"' in (ROOT / script).read_text()
    monkeypatch.undo()
    code = f"import sys; sys.argv = ['/bin/{name}', '--help']; from megatron_glm import commands; commands.{function}()"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, text=True, capture_output=True)
    assert done.returncode == 0 and (done.stdout.startswith(f"usage: {name}") or function == "doctor"), done.stderr


def test_every_tool_has_a_command():
    tools = {path.stem for path in (ROOT / "tools").glob("*.py") if '__name__ == "__main__"' in path.read_text()}
    own = {"rehearse_start", "rehearse_save", "compare_automodel"}  # of this repository's own tables
    scripts = {value.removeprefix("megatron_glm.commands:") for value in NAMES.values()}
    for tool in tools - own:
        assert any(script in tool for script in scripts), tool


def test_an_installation_finds_its_scripts(tmp_path, monkeypatch):
    """Where there is no checkout they lie beside the package, tools/ under a name of their own."""
    (tmp_path / "megatron_glm_tools").mkdir()
    (tmp_path / "megatron_glm_tools" / "sibling.py").write_text("word = 'found'\n")
    (tmp_path / "megatron_glm_tools" / "plan.py").write_text("import sibling\nprint(sibling.word, __name__)\n")
    code = f"from pathlib import Path; from megatron_glm import commands; commands.ABOVE = Path({str(tmp_path)!r}); "
    done = subprocess.run([sys.executable, "-c", code + "commands.plan()"], cwd=ROOT, text=True, capture_output=True)
    assert done.stdout == "found __main__\n", done.stderr


def test_the_hook_before_a_commit_has_the_linter_of_make_check():
    pinned = re.search(r'"ruff==([\d.]+)"', (ROOT / "setup.py").read_text())
    hook = re.search(r"ruff-pre-commit\n\s+rev: v([\d.]+)\n", (ROOT / ".pre-commit-config.yaml").read_text())
    assert pinned and hook and pinned[1] == hook[1]
