"""The rules that keep the code readable: import directions, sizes, and no oracle inside the package."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "megatron_glm"
SOURCES = sorted(p for folder in ("megatron_glm", "tools", "tests", "examples") for p in (ROOT / folder).rglob("*.py"))
SOURCES += sorted(ROOT.glob("*.py"))

# part of the package -> the parts that it may import; a script may import anything
CONFIG = {"config"}
ALLOWED = {
    "config": CONFIG,
    "ops": CONFIG | {"ops"},
    "parallel": CONFIG | {"ops", "parallel"},
    "data": CONFIG | {"data"},
    "model": CONFIG | {"parallel", "ops", "model"},
    "checkpoint": CONFIG | {"parallel", "ops", "model", "checkpoint"},
    "planner": CONFIG | {"parallel", "ops", "model", "data", "planner"},
    "training": CONFIG | {"parallel", "ops", "model", "data", "checkpoint", "training"},
    "rehearsal": CONFIG | {"parallel", "ops", "model", "data", "checkpoint", "training", "planner", "rehearsal"},
}
# top-level modules that belong to a part
MODULE_PARTS = {
    "heartbeat": "config",
    "launch": "config",
    "packages": "config",
    "torch_private": "config",
    "signals": "config",
}


def part_of(module: str) -> str:
    """The part of a dotted name inside the package: megatron_glm.model.mla -> model."""
    name = (module.split(".") + [""])[1]
    return MODULE_PARTS.get(name, name)


def imported_modules(tree: ast.AST, package: list[str]) -> list[str]:
    """Dotted names of everything imported anywhere in the tree; `package` resolves relative imports."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            prefix = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join(prefix + ([node.module] if node.module else []))
            found += [f"{base}.{alias.name}" for alias in node.names]
    return found


def violations(name: str, source: str) -> list[str]:
    """Imports of the package module `name` (dotted) that its part is not allowed."""
    part = part_of(name)
    faults = []
    for target in imported_modules(ast.parse(source), name.split(".")[:-1]):
        if target.split(".")[0] == "transformers":
            faults.append(f"{name} imports {target}: transformers is for tests only")
        elif target.split(".")[0] == "megatron_glm" and part_of(target) not in ALLOWED[part]:
            faults.append(f"{name} imports {target}: {part} may import {sorted(ALLOWED[part])} only")
    return faults


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=module_name)
def test_imports_go_one_way(path: Path):
    if path != PACKAGE / "__init__.py":
        assert not violations(module_name(path), path.read_text())


@pytest.mark.parametrize(
    "name, source",
    [
        ("megatron_glm.parallel.linear", "from megatron_glm.model import mla"),
        ("megatron_glm.ops.norm", "from ..parallel.linear import linear"),
        ("megatron_glm.ops.norm", "from megatron_glm import parallel"),
        ("megatron_glm.ops.norm", "from .. import model"),
        ("megatron_glm.data.loader", "import megatron_glm.parallel.groups"),
        ("megatron_glm.checkpoint.hf", "def f():\n    from ..training.loop import train"),
        ("megatron_glm.config", "from .parallel.shard import ShardInfo"),
        ("megatron_glm.model.mla", "import transformers.models"),
    ],
)
def test_a_wrong_import_is_found(name: str, source: str):
    assert len(violations(name, source)) == 1


def test_right_imports_pass():
    assert not violations("megatron_glm.model.mla", "import torch\nfrom ..ops.norm import x\nfrom .indexer import y")
    assert not violations("megatron_glm.config", "from .config.model import ModelConfig")


def dependencies() -> dict[str, set[str]]:
    """Module of the package -> modules of it that it imports, inside functions and under TYPE_CHECKING, too."""
    modules = {module_name(path).removesuffix(".__init__"): path for path in PACKAGE.rglob("*.py")}
    found = {}
    for name, path in modules.items():
        package = module_name(path).split(".")[:-1]
        # `from package import name`: the module package.name if there is one, else the package itself
        targets = imported_modules(ast.parse(path.read_text()), package)
        named = {target if target in modules else target.rpartition(".")[0] for target in targets}
        found[name] = (named & modules.keys()) - {name}
    return found


def cycle(imports: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a circle, in its order; none if there is no circle."""
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return path[path.index(name) :]
        if name in done:
            return []
        found = next(filter(None, (visit(other, [*path, name]) for other in sorted(imports[name]))), [])
        done.add(name)
        return found

    return next(filter(None, (visit(name, []) for name in sorted(imports))), [])


def test_no_modules_import_each_other():
    assert cycle(dependencies()) == []
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_file_has_at_most_400_lines(path: Path):
    assert len(path.read_text().splitlines()) <= 400


def test_functions_are_short():
    lengths = {}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lengths[f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"] = node.end_lineno - node.lineno + 1
    over_80 = {name: length for name, length in lengths.items() if length > 80}
    over_50 = {name: length for name, length in lengths.items() if length > 50}
    assert not over_80
    assert len(over_50) <= 0.05 * len(lengths), over_50


def test_every_folder_of_the_package_is_a_package():
    """setup.py finds packages by their __init__.py: one without it would be missing from an installed copy."""
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    assert {folder for folder in folders if not (folder / "__init__.py").exists()} == set()
