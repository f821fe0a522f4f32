"""The containers install the first set of GPU packages, pinned, and all that every run imports."""

from __future__ import annotations

import re
from pathlib import Path

from megatron_glm import packages

ROOT = Path(__file__).resolve().parents[2]
LOCK = (ROOT / "containers" / "requirements.lock").read_text().splitlines()
PINNED = [line for line in LOCK if line and not line.startswith("#")]
RECIPES = [(ROOT / "containers" / name).read_text() for name in ("Dockerfile", "megatron_glm.def")]


def test_the_lock_has_the_first_set_and_nothing_that_floats():
    assert PINNED[: len(packages.FRESH.requirements)] == packages.FRESH.requirements
    assert all(re.fullmatch(r"[\w.-]+(\[\w+\])?==[\w.+]+", line) for line in PINNED)
    names = [packages.name_of(line) for line in PINNED]
    assert len(names) == len(set(names)) and set(packages.REQUIRED) <= set(names)


def test_both_recipes_are_the_same():
    """One image, the same packages, the lock, and a check that the interpreter serves."""
    images = {re.search(r"(?im)^from:? (\S+)$", recipe)[1] for recipe in RECIPES}
    assert len(images) == 1 and images.pop().startswith(f"nvidia/cuda:{packages.CUDA}.")
    for recipe in RECIPES:
        assert "containers/requirements.lock" in recipe and "megatron_glm.packages check" in recipe
        assert "python3 python3-dev python3-venv git" in recipe and "--no-deps -e " in recipe


def test_what_is_not_needed_stays_out_of_the_image():
    ignored = (ROOT / ".gitignore").read_text().split()
    for line in (ROOT / ".dockerignore").read_text().split():
        assert line.startswith((".", "**")) or f"/{line}/" in ignored, line
