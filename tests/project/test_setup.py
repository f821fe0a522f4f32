"""examples/setup.sh with an interpreter that only notes what pip is asked for."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_glm import packages

ROOT = Path(__file__).resolve().parents[2]
FILES = ("examples/setup.sh", "setup.py", "megatron_glm/__init__.py", "megatron_glm/packages.py")

# `box/fake` holds the torch that it has; installing one writes its version there.
INTERPRETER = """#!/bin/bash
case "$1 $2" in
  "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  "-m pip")
    echo "${{@:3}}" >>{box}/pip.log
    [ "$3" = install ] || exit 0
    echo "WARNING: noise" >&2
    [ ! -e {box}/no_index ] || {{ echo "ERROR: no index" >&2; exit 1; }}
    [ ! -e {box}/kill ] || {{ rm {box}/kill; kill -KILL $PPID; exit; }}
    case "$*" in *torch==*)
      words="$*" && words="${{words##* torch==}}" && version="${{words%% *}}"
      mkdir -p {box}/fake/torch && touch {box}/fake/torch/__init__.py
      echo "__version__, cuda = '$version', '13.0'" >{box}/fake/torch/version.py ;;
    esac ;;
  *) PYTHONPATH={box}/fake exec {python} "$@" ;;
esac
"""


class Box:
    def __init__(self, folder: Path) -> None:
        self.folder, self.environment = folder, folder / ".venv"
        for name in FILES:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)
        (folder / "pyproject.toml").touch()
        self.program("python3", INTERPRETER.format(box=folder, python=sys.executable))
        self.hardware("")

    def program(self, name: str, text: str, place: str = "bin") -> Path:
        path = self.folder / place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
        return path

    def hardware(self, *gpus: str) -> None:
        """What nvidia-smi lists, as in "9.0, 580.95"."""
        self.program("nvidia-smi", "#!/bin/sh\n" + "".join(f"echo '{gpu}'\n" for gpu in gpus if gpu))

    def torch(self, version: str, cuda: str | None = "13.0") -> None:
        folder = self.folder / "fake/torch"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "__init__.py").touch()
        (folder / "version.py").write_text(f"__version__, cuda = {version!r}, {cuda!r}\n")

    def active(self) -> dict[str, str]:
        """An environment that the user made and activated."""
        self.environment = self.folder / "mine"
        self.program("python", (self.folder / "bin/python3").read_text(), "mine/bin")
        return {"VIRTUAL_ENV": str(self.environment)}

    def run(self, **variables: str) -> subprocess.CompletedProcess:
        environment = {"PATH": f"{self.folder}/bin:/usr/bin:/bin", "HOME": str(self.folder), **variables}
        command = ["bash", str(self.folder / "examples/setup.sh")]
        return subprocess.run(command, env=environment, text=True, capture_output=True, cwd="/")

    def installed(self) -> list[str]:
        """What pip was asked to install since the last look, beside the package."""
        log = self.folder / "pip.log"
        calls = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
        log.unlink(missing_ok=True)
        return [word for call in calls if call[0] == "install" for word in call[1:] if word[0] not in "-."]


@pytest.fixture
def box(tmp_path: Path) -> Box:
    return Box(tmp_path)


def sets_up(box: Box, **variables: str) -> list[str]:
    """What it installs: one line of its own, no word of pip's, and the interpreter on stdout."""
    done = box.run(**variables)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{box.environment}/bin/python\n"
    assert done.stderr.count("\n") <= 1 and "noise" not in done.stderr
    return box.installed()


def test_a_machine_without_a_gpu(box):
    box.torch("2.10.0")
    assert sets_up(box) == ["torch==2.13.0"]
    assert sets_up(box) == []  # up to date
    box.torch("2.14.1+cu130")
    shutil.rmtree(box.environment)
    assert sets_up(box) == []  # an installed torch stays; the package and its test extra are installed
    (box.environment / ".megatron_glm_setup").write_text("something older")
    assert box.run().stderr.startswith("setting up")


def test_a_hopper_machine_gets_the_first_set_and_a_login_node_keeps_it(box):
    assert sets_up(box) == []  # here the tests' own torch
    box.hardware("9.0, 580.95.05", "9.0, 580.95.05")
    box.torch("2.13.0")
    assert sets_up(box) == packages.FRESH.requirements
    assert sets_up(box) == []
    box.hardware("")
    assert sets_up(box) == []


@pytest.mark.parametrize("gpu", ["8.0, 580.95.05", "9.0, 550.54.15", "9.0, [N/A]"])
def test_other_gpus_get_torch_alone(box, gpu):
    box.hardware(gpu)
    box.torch("2.9.1")
    assert sets_up(box) == ["torch==2.11.0"]


def test_an_active_environment_gets_the_set_of_its_torch(box):
    variables = box.active()
    box.hardware("9.0, 580.95.05")
    box.torch("2.14.1+cu130")
    assert sets_up(box, **variables) == packages.SETS[1].requirements
    assert sets_up(box, **variables) == []


@pytest.mark.parametrize("version, cuda", [("2.15.0+cu130", "13.0"), ("2.13.0+cpu", None), ("2.11.0+cpu", None)])
def test_a_torch_outside_the_table_is_refused_in_an_active_environment(box, version, cuda):
    variables = box.active()
    box.hardware("9.0, 580.95.05")
    box.torch(version, cuda)
    done = box.run(**variables)
    assert done.returncode == 2 and done.stdout == "" and box.installed() == []
    assert f"error: torch {version}" in done.stderr and "pip install -e '.[gpu]'" in done.stderr
    assert f"PYTHON={box.environment}/bin/python" in done.stderr


def test_a_failure_shows_what_pip_said_and_the_next_run_starts_again(box):
    (box.folder / "no_index").touch()
    done = box.run()
    assert done.returncode == 2 and done.stdout == ""
    assert "ERROR: no index" in done.stderr and "noise" not in done.stderr and "run this again" in done.stderr
    (box.folder / "no_index").unlink()
    sets_up(box)


def test_a_killed_setup_is_repaired(box):
    sets_up(box)
    (box.environment / ".megatron_glm_setup").write_text("something older")
    (box.folder / "kill").touch()
    assert box.run().returncode == -9
    (box.environment / "half").touch()
    sets_up(box)
    assert not (box.environment / "half").exists()
    assert "unfinished" not in (box.environment / ".megatron_glm_setup").read_text()


def test_a_killed_setup_of_an_active_environment_loses_only_half_packages(box):
    variables = box.active()
    site = box.environment / "lib/python3.11/site-packages"
    for name in ("before", "half", "whole"):
        (site / f"{name}-1.0.dist-info").mkdir(parents=True)
    os.utime(site / "before-1.0.dist-info", (0, 0))
    (site / "whole-1.0.dist-info/RECORD").touch()
    (box.folder / "kill").touch()
    assert box.run(**variables).returncode == -9
    os.utime(box.environment / ".megatron_glm_setup", (1, 1))
    sets_up(box, **variables)
    assert sorted(path.name for path in site.iterdir()) == ["before-1.0.dist-info", "whole-1.0.dist-info"]


def test_an_environment_that_the_user_made_is_not_thrown_away(box):
    box.program("python", (box.folder / "bin/python3").read_text(), ".venv/bin")
    (box.environment / "theirs").touch()
    sets_up(box)
    assert (box.environment / "theirs").exists()


def test_an_interpreter_by_name(box):
    good = str(box.folder / "bin/python3")
    assert box.run(PYTHON=good).stdout == f"{good}\n" and box.installed() == []
    box.torch("2.9.0")
    old = box.program("old", "#!/bin/sh\n[ \"$1\" = -V ] && echo 'Python 3.9.2'\nexit 1\n")
    for python, says in ((good, "lacks torch 2.11"), ("/nope", "is no program"), (str(old), "is Python 3.9.2")):
        done = box.run(PYTHON=python)
        assert done.returncode == 2 and done.stdout == "" and f"PYTHON={python} " in done.stderr
        assert says in done.stderr and done.stderr.count("\n") == 1


def test_no_python_is_new_enough(box):
    text = "#!/bin/sh\n[ \"$1\" = -V ] && echo 'Python 3.9.2'\nexit 1\n"
    for name in ("python3", "python3.11", "python3.12", "python3.13"):
        box.program(name, text)
    done = box.run()
    assert done.returncode == 2 and "python3 is Python 3.9.2" in done.stderr
