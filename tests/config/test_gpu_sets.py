"""The sets of GPU packages: pip resolves each (RESOLVE_GPU_SETS=1 and an index), and what is installed loads.

Extensions that are linked to the driver load without a GPU beside a libcuda.so.1 whose functions all fail.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from megatron_glm import packages

ROOT = Path(__file__).resolve().parents[2]
INSTALLED = not packages.differing(packages.suited()) and packages.installed_torch()[1] is not None


@pytest.mark.skipif(not os.environ.get("RESOLVE_GPU_SETS"), reason="RESOLVE_GPU_SETS is not set: 40 s and an index")
@pytest.mark.parametrize("chosen", packages.SETS, ids=lambda chosen: chosen.torch)
def test_a_set_resolves(chosen, tmp_path):
    """By metadata alone: no wheel is downloaded."""
    command = [sys.executable, "-m", "pip", "install", "-q", "--dry-run", "--ignore-installed", "--report", "r.json"]
    subprocess.run([*command, *chosen.requirements], check=True, cwd=tmp_path)
    found = [entry["metadata"] for entry in json.loads((tmp_path / "r.json").read_text())["install"]]
    versions = {entry["name"].lower().replace("_", "-"): entry["version"] for entry in found}
    assert {name: versions[name] for name in map(packages.name_of, chosen.requirements)} == {
        packages.name_of(requirement): requirement.split("==")[1] for requirement in chosen.requirements
    }
    assert versions["nvidia-cuda-runtime"].startswith(f"{packages.CUDA}.")


@pytest.fixture
def driver(tmp_path) -> Path:
    """A folder with a libcuda.so.1 of all functions that the installed extensions ask it for."""
    names = {"cuInit", "cuDriverGetVersion"}
    for module in packages.suited().packages:
        folder = Path(find_spec(module).origin).parent
        for library in folder.rglob("*.so"):
            listed = subprocess.run(["nm", "-D", "--undefined-only", library], capture_output=True, text=True)
            names |= set(re.findall(r" U (cu[A-Z]\w*)", listed.stdout))
    (tmp_path / "stub.c").write_text("".join(f"int {name}(void) {{ return 100; }}\n" for name in sorted(names)))
    command = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", "libcuda.so.1", "stub.c"]
    subprocess.run(command, check=True, cwd=tmp_path)
    return tmp_path


@pytest.mark.skipif(not INSTALLED, reason="the set of this torch is not installed")
@pytest.mark.skipif(not shutil.which("gcc") or not shutil.which("nm"), reason="needs gcc and nm")
def test_the_installed_set_loads_without_a_gpu(driver):
    code = (
        "import torch; torch.cuda.is_available = lambda: True; torch.cuda.get_device_capability = lambda: (9, 0)\n"
        "from megatron_glm.ops import backends\n"
        "backends.load('cudnn'); backends.load('tilelang')\n"
        "import deep_gemm"
    )
    environment = os.environ | {"LD_LIBRARY_PATH": f"{driver}:{os.environ.get('LD_LIBRARY_PATH', '')}"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
