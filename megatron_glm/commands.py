"""The installed commands: each runs the script of its name, of the checkout or as installed beside this package."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

ABOVE = Path(__file__).resolve().parents[1]


def run(script: str) -> None:
    """Runs a script as `python script` does, but for its name, which stays that of the command.

    script: finetune_glm.py, or a file of tools/ with that folder.
    """
    file = ABOVE / script
    if not file.is_file():
        file = ABOVE / script.replace("tools/", "megatron_glm_tools/")
    sys.path.insert(0, str(file.parent))  # tools import each other
    main = ModuleType("__main__")  # its processes find it by its file
    main.__file__ = str(file)
    sys.modules["__main__"] = main
    exec(compile(file.read_bytes(), file, "exec"), vars(main))


def finetune() -> None:
    run("finetune_glm.py")


def pretrain() -> None:
    run("pretrain_glm.py")


def convert() -> None:
    run("tools/convert_hf.py")


def preprocess() -> None:
    run("tools/preprocess_data.py")


def plan() -> None:
    run("tools/plan.py")


def generate() -> None:
    run("tools/generate.py")


def score() -> None:
    run("tools/score.py")


def export_adapter() -> None:
    run("tools/export_adapter.py")


def plot_log() -> None:
    run("tools/plot_log.py")


def plot_kernels() -> None:
    run("tools/plot_kernels.py")


def benchmark() -> None:
    run("tools/benchmark.py")


def doctor() -> None:
    run("tools/doctor.py")
