"""README and docs/: every command runs here on a small model, or says what it needs and is checked as far as it can be.

A fenced `bash` block whose first line is `# needs: …` is not run: its files must exist and its flags must be known.
"""

from __future__ import annotations

import ast
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest

from megatron_glm import commands as installed
from megatron_glm.config import DataConfig, PretrainDataConfig
from megatron_glm.config.flags import build_parser
from tests.helpers.preloaded import python

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", "CONTRIBUTING.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
NEEDS = "# needs: "
INSTALLED = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
FREE = {"hf", "git", "docker", "apptainer", "source", "export", "cd", "mkdir"}  # not ours
ARGUMENTS_ALONE = {
    f"tools/{name}.py"
    for name in ("convert_hf", "export_adapter", "benchmark", "plot_kernels", "rehearse_start", "rehearse_save")
}
EXTRAS = {"test", "data", "logging", "gpu", "gpu-torch214", "te"}


def blocks(page: str) -> list[str]:
    return re.findall(r"^```bash\n(.*?)^```$", (ROOT / page).read_text(), re.M | re.S)


def commands(block: str) -> list[list[str]]:
    """The words of each simple command, without comments and variables that are set for it."""
    found, pending = [], ""
    for line in block.splitlines():
        pending += line.removesuffix("\\") + ("\n" if not line.endswith("\\") else " ")
        if line.endswith("\\"):
            continue
        try:
            words = shlex.split(pending, comments=True)
        except ValueError:  # a quotation that goes on in the next line
            continue
        pending = ""
        while words and re.match(r"[A-Z_]+=", words[0]):
            words = words[1:]
        if words:
            found.append(words)
    assert not pending.strip(), f"unfinished: {pending}"
    return found


def check(words: list[str]) -> None:
    """What can be said of a command without running it: files, targets and extras exist, flags are known."""
    program, rest = words[0], words[1:]
    if program == "torchrun":
        from torch.distributed.run import get_args_parser

        flags = get_args_parser().parse_args(rest)
        check([*([] if flags.no_python else ["python"]), flags.training_script, *flags.training_script_args])
    elif program in ("bash", "sbatch"):
        script = next(word for word in rest if not word.startswith("--"))
        assert (ROOT / script).is_file(), script
        flags = rest[rest.index(script) + 1 :]
        if "glm5" in script:
            known_flags("pretrain_glm.py" if "pretrain" in script else "finetune_glm.py", flags)
        else:
            assert not flags, words
    elif program in ("pip", "python", "python3") and "install" in rest or "wheel" in rest:
        named = re.findall(r"\.\[(.*?)\]", " ".join(rest))
        assert {extra for extras in named for extra in extras.split(",")} <= EXTRAS, words
    elif program.startswith("python") and rest[0] == "-c":
        compile(rest[1], "<docs>", "exec")
    elif program.startswith("python") and rest[0] == "-m":
        assert find_spec(rest[1]), words
        assert all((ROOT / word).exists() for word in rest if word.startswith("tests/")), words
    elif program.startswith("python"):
        assert (ROOT / rest[0]).is_file(), words
        known_flags(rest[0], rest[1:])
    elif program in INSTALLED:
        check(["python", script_of(INSTALLED[program]), *rest])
    elif program == "make":
        assert all(re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M) for target in rest), words
    else:
        assert program in FREE, words


def script_of(entry: str) -> str:
    """What an installed command runs."""
    with mock.patch.object(installed, "run") as ran:
        getattr(installed, entry.split(":")[1])()
    return ran.call_args.args[0]


def known_flags(script: str, flags: list[str]) -> None:
    """Ends with an error, or returns, as the script would after reading its flags."""
    if flags == ["--help"]:
        return
    if script in ("tools/plot_log.py", "tools/compare_automodel.py"):
        runpy.run_path(str(ROOT / script))["build_parser"]().parse_args(flags)
    elif script == "tools/plan.py" and flags == ["published"]:
        pass
    elif flags[:1] == ["search"]:
        runpy.run_path(str(ROOT / script))["search_parser"]().parse_args(flags[1:])
    elif script in ("finetune_glm.py", "pretrain_glm.py", "tools/plan.py"):
        build_parser(data=PretrainDataConfig if script == "pretrain_glm.py" else DataConfig).parse_args(flags)
    elif script in ARGUMENTS_ALONE:
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(str(ROOT / "tools"))
            patch.setattr(sys, "argv", [script, *flags])
            if flags[:1] == ["step"]:
                runpy.run_path(str(ROOT / "tools" / "benchmark.py"))["step_parser"]().parse_args(flags[1:])
            else:
                runpy.run_path(str(ROOT / script))["parse_arguments"]()
    elif script in ("tools/generate.py", "tools/score.py"):
        runpy.run_path(str(ROOT / script))["parser"]().parse_args(flags)
    elif script == "tools/doctor.py":
        assert not flags
    else:
        raise AssertionError(f"how are the flags of {script} checked?")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Iterator[Callable[[str, Path], None]]:
    """run(block, folder): by bash, and it must succeed."""
    with python(tmp_path_factory.mktemp("bin")) as interpreter:
        environment = os.environ | {"PYTHON": str(interpreter), "PATH": f"{interpreter.parent}:{os.environ['PATH']}"}

        def run(block: str, folder: Path) -> None:
            command = ["bash", "-euo", "pipefail", "-c", block]
            done = subprocess.run(command, cwd=folder, env=environment, text=True, capture_output=True)
            assert done.returncode == 0, f"{block}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"

        yield run


@pytest.fixture(scope="module")
def prepared(run, tmp_path_factory) -> Path:
    """The quickstart's model and data, shortened, a checkpoint of it, and stand-ins for the downloads."""
    import pyarrow
    import pyarrow.parquet

    folder = tmp_path_factory.mktemp("docs")
    run("python examples/quickstart_data.py --save quickstart_output", linked(folder))
    run("python tools/convert_hf.py --from-hf quickstart_output/hf --save run/base", folder)
    rows = (folder / "quickstart_output/train.jsonl").read_text().splitlines(keepends=True)
    for name, part in (("train", rows[:60]), ("valid", rows[60:80])):
        (folder / f"quickstart_output/{name}.jsonl").write_text("".join(part))
    chats = {"messages": [[{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]], "id": ["1"]}
    endings = {"ctx": ["He"], "endings": [["sits.", "flies."]], "label": ["0"]}
    files = {"tulu3/data/train-0": chats, "hellaswag/data/train-0": endings, "hellaswag/data/validation-0": endings}
    for name, columns in files.items():
        (folder / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        pyarrow.parquet.write_table(pyarrow.table(columns), folder / "data" / f"{name}.parquet")
    return folder


def linked(folder: Path) -> Path:
    """The repository's parts in a folder in which commands may write."""
    for name in ("examples", "tools", "tests", "megatron_glm", "finetune_glm.py", "pretrain_glm.py", "pyproject.toml"):
        (folder / name).symlink_to(ROOT / name)
    return folder


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_run(page, run, prepared, tmp_path):
    runnable = [block for block in blocks(page) if not block.startswith(NEEDS)]
    if not runnable:
        return
    linked(tmp_path)
    for name in ("quickstart_output", "data", "run"):
        if name != "run" or "--save run/base" not in (ROOT / page).read_text():
            shutil.copytree(prepared / name, tmp_path / name)
    for block in runnable:
        run(block, tmp_path)


@pytest.mark.parametrize("page", PAGES)
def test_commands_that_need_more_are_well_formed(page):
    for block in blocks(page):
        assert subprocess.run(["bash", "-n", "-c", block]).returncode == 0
        for words in commands(block) if block.startswith(NEEDS) else ():
            check(words)


@pytest.mark.parametrize("page", PAGES)
def test_links_and_named_files_exist(page):
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", text):
        assert ((ROOT / page).parent / target).exists(), target
    for name in re.findall(r"`((?:megatron_glm|examples|tools|tests)/[\w./-]+)`", text):
        assert (ROOT / name).exists(), name


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub and mkdocs make it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES)
def test_anchors_of_links_exist(page):
    for target, anchor in re.findall(r"\]\((?!http)([^)#]*)#([^)]+)\)", (ROOT / page).read_text()):
        file = (ROOT / page).parent / target if target else ROOT / page
        headings = re.findall(r"^#+ (.+)$", file.read_text(), re.M)
        assert anchor in map(slug, headings), (target, anchor)


def test_the_site_has_every_page_once():
    """mkdocs, which `make docs` runs, is no package of the tests: its settings are read as text."""
    pages = re.findall(r"(?:- |: )([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert sorted(pages) == [page.removeprefix("docs/") for page in PAGES[2:]]
    made = re.search(r'"docs": \["(mkdocs==[\d.]+)"\]', (ROOT / "setup.py").read_text())
    assert made and f"MKDOCS := {made[1]}\n" in (ROOT / "Makefile").read_text()


def test_every_page_is_linked():
    linked_pages = re.findall(r"\]\((docs/[^)#]+\.md)", (ROOT / "README.md").read_text())
    assert sorted(set(linked_pages)) == PAGES[2:]


def test_a_flag_that_does_not_exist_is_found():
    for command in ("torchrun finetune_glm.py --seq-len 4", "bash examples/glm5_hellaswag.sh --seq-len 4"):
        with pytest.raises(SystemExit):
            check(commands(command)[0])


PLACE = re.compile(r"^\d+\. `([\w/]+\.py)`: ((?:`[\w.]+`(?:, )?)+)", re.M)


def names_in(file: Path) -> set[str]:
    """Functions, classes and variables of a module, and `Class.method`."""
    found = set()
    for node in ast.parse(file.read_text()).body:
        targets = [target.id for target in getattr(node, "targets", []) if isinstance(target, ast.Name)]
        found.update([getattr(node, "name", None), *targets])
        if isinstance(node, ast.ClassDef):
            found.update(f"{node.name}.{part.name}" for part in node.body if hasattr(part, "name"))
    return found


def test_the_ways_of_the_architecture_page_are_there():
    sections = re.split(r"^## ", (ROOT / "docs/architecture.md").read_text(), flags=re.M)
    ways = {section.splitlines()[0]: section for section in sections if section.startswith("The way of")}
    assert set(ways) == {f"The way of a {what}" for what in ("batch", "gradient", "selection", "Hugging Face tensor")}
    for title, section in ways.items():
        places = PLACE.findall(section)
        assert len(places) == len(re.findall(r"^\d+\. ", section, re.M)) > 6, title
        for file, names in places:
            missing = set(re.findall(r"`([\w.]+)`", names)) - names_in(ROOT / file)
            assert not missing, f"{title}: {file} has no {missing}"


def test_each_of_the_seven_tasks_touches_six_files_at_most():
    sections = re.split(r"^## ", (ROOT / "docs/extending.md").read_text(), flags=re.M)[1:8]
    assert len({section.splitlines()[0] for section in sections}) == 7
    for section in sections:
        steps = re.findall(r"^(\d+\. .*?)(?=^\d+\. |^\n|\Z)", section, re.M | re.S)
        files = {file for step in steps for file in re.findall(r"`(megatron_glm/[\w/]+\.py)`", step)}
        assert 2 <= len(files) <= 6, (section.splitlines()[0], sorted(files))
