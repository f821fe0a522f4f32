"""compute-sanitizer finds nothing in a small case of every op."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from megatron_glm.ops.backends import lacking

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


@pytest.mark.parametrize("backend", ["cudnn", "tilelang"])
def test_memcheck_is_clean(backend):
    if shutil.which("compute-sanitizer") is None or lacking(backend, "auto"):
        pytest.skip(f"needs compute-sanitizer and the packages of {backend}")
    # A library asks the driver for functions that it does not have, which is an API error and none of memory.
    check = ["compute-sanitizer", "--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "9"]
    case = [sys.executable, "-m", "tests.gpu.small_case", backend, "cuda"]
    done = subprocess.run([*check, *case], capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
