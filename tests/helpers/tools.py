"""A program of tools/, called in this process as from the command line."""

from __future__ import annotations

import importlib.util
import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import pytest

from megatron_glm.launch import one_line_errors
from megatron_glm.training import run as training_run
from tests.helpers.distributed import close_groups
from tests.helpers.finetune import keep_default_group

ROOT = Path(__file__).resolve().parents[2]


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def call(name: str, *words: str) -> tuple[int, str, str]:
    """(exit code, standard output, standard error) of a tool, called in this process."""
    initialize, made = training_run.initialize, []

    def noted(config):
        made.append(initialize(config))
        return made[0]

    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), patch.object(sys, "argv", [name, *words]), keep_default_group():
        with patch.object(training_run, "initialize", noted), pytest.raises(SystemExit) as end, one_line_errors():
            try:
                sys.exit(tool(name).main())
            finally:
                for groups in made:
                    close_groups(groups)
    return end.value.code or 0, out.getvalue(), err.getvalue()
