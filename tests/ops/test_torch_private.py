"""Names of torch outside its interface: each is asked for by the file that uses it, and a missing one is named."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_glm.torch_private import private

ROOT = Path(__file__).resolve().parents[2]
FSDP = "torch.distributed.fsdp._fully_shard"
FIELDS = {"_fsdp_param_group", "_get_fsdp_state", "_unsharded_param", "unsharded_accumulated_grad", "fsdp_params"}
FIELDS |= {"grad_dtype", "_version", "_parameters"}


@pytest.mark.parametrize(
    "name",
    [
        "torch._gone",
        "torch._gone._deeper",
        "torch._C.DispatchKey.Gone",
        "torch.ops.aten._gone.default",
        f"{FSDP}._fsdp_param.FSDPParam._gone",
    ],
)
def test_a_missing_name_is_one_error(name):
    says = f"megatron_glm/parallel/x.py needs {name}, which torch {torch.__version__} lacks; tested: torch 2.11.0, "
    with pytest.raises(ImportError, match=re.escape(says)):
        private("megatron_glm.parallel.x", "torch.Tensor", name)


def test_names_that_are_there():
    assert private("x", "torch.Tensor") is torch.Tensor
    assert private("x", "torch._utils._flatten_dense_tensors", "torch.nn.Module._parameters")[1] is None


def test_the_error_comes_at_import(tmp_path):
    """With a torch whose FSDP has renamed the field that gradients are summed in."""
    code = (
        f"import {FSDP}._fsdp_param as f; del f.FSDPParam.__annotations__['unsharded_accumulated_grad']\n"
        "for name, value in list(vars(f.FSDPParam).items()):\n"
        "    if 'unsharded_accumulated_grad' in getattr(getattr(value, '__code__', None), 'co_names', ()):\n"
        "        setattr(f.FSDPParam, name, None)\n"
        "import megatron_glm.parallel.fsdp"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True)
    assert "ImportError: megatron_glm/parallel/fsdp.py needs " in done.stderr
    assert "FSDPParam.unsharded_accumulated_grad, which torch" in done.stderr


def uses(tree: ast.AST) -> set[str]:
    """Private names of torch that are written out: imports from, and chains of attributes of, torch; fields of FSDP."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("torch.")}
        elif isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            found.add(text if text.startswith("torch.") or node.attr not in FIELDS else f"torch.{node.attr}")
    return {
        name for name in found if name.startswith("torch.") and re.search(rf"\._(?!_)|\.({'|'.join(FIELDS)})$", name)
    }


@pytest.mark.parametrize("path", sorted((ROOT / "megatron_glm").rglob("*.py")), ids=lambda path: path.stem)
def test_every_use_is_asked_for(path):
    tree = ast.parse(path.read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "private"]
    asked = {ast.unparse(argument).strip("'").split(".")[-1] for call in calls for argument in call.args[1:]}
    for name in uses(tree):
        assert name.split(".")[-1].strip("'") in asked, f"{name}: ask megatron_glm.torch_private for it"


def test_a_use_that_is_not_asked_for_is_found():
    text = "from torch._utils import a\nimport torch._b\ntorch._c(1)\nx._version + y.own._field + torch.nn.Module\n"
    assert uses(ast.parse(text)) == {"torch._utils.a", "torch._b", "torch._c", "torch._version"}
