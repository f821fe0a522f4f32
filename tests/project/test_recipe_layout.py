"""--layout auto of the recipes."""

from __future__ import annotations

import re
import sys

import pytest

from megatron_glm.config.plan_flags import GPU_TYPES
from megatron_glm.planner import published
from megatron_glm.planner.machine import H100
from megatron_glm.planner.memory import fits_in
from megatron_glm.planner.plan import GIB, Plan
from megatron_glm.planner.time import step_time
from tests.helpers.rehearsed import check_rehearsed
from tests.project.test_recipes import RECIPES, ROOT, bash, box, launched

__all__ = ["box"]  # a fixture
SIZES = {"TP": "tensor", "CP": "context", "PP": "pipeline", "EP": "expert"}
FLAGS = {
    axis: f"--{name}-model-parallel-size" if axis != "CP" else "--context-parallel-size" for axis, name in SIZES.items()
}

AUTO = "--layout auto --pipeline-model-parallel-size 16 --expert-model-parallel-size 16 --micro-batch-size 1".split()
AUTO += ["--tensor-model-parallel-size", "1"]


def test_layout_auto_runs_the_fastest_layout_that_fits(box):
    torchrun, config = launched(box, "glm5.2_4k_cudnn.sh", *AUTO, "--gpu-type", "h100", "--lr", "2e-5")
    assert torchrun[:2] == ["--nnodes", "32"]
    config.check(256)
    assert (config.parallel.pipeline_model_parallel_size, config.optimizer.lr) == (16, 2e-5)
    assert config.parallel.pipeline_model_parallel_layout is not None, "the recipe's virtual stages are gone"
    assert (config.train.global_batch_size, config.data.seq_length) == (256, 4096)
    plan, published = Plan.create(config, 256, 8), Plan.create(launched(box, "glm5.2_4k_cudnn.sh")[1], 256, 8)
    assert fits_in(plan, 80 * GIB)
    assert step_time(plan, H100).seconds < 0.9 * step_time(published, H100).seconds


@pytest.mark.parametrize("name", ["glm5.2_32k_cp8", "glm5.2_4k_tilelang", "glm5.2_4k_cudnn"])
def test_a_rank_that_was_rehearsed_took_what_is_planned(box, name):
    check_rehearsed(f"{name}.sh", Plan.create(launched(box, f"{name}.sh")[1], 8 * RECIPES[name][1], 8))


def test_layout_auto_plans_too(box):
    done = bash(box, "glm5.2_4k_cudnn.sh", *AUTO, "--gpu-type=h200", "--dry-run", PYTHON=sys.executable)
    assert done.returncode == 0, done.stderr
    assert "looking for the fastest layout that fits 256 GPUs" in done.stdout
    assert "verdict: fits" in done.stdout and "139.0 GiB a GPU" in done.stdout and " PP 16 " in done.stdout


@pytest.mark.parametrize(
    "flags, environment, said",
    [
        (["--layout"], {}, "--layout is nothing; it can be auto"),
        (["--layout=fast"], {}, "--layout is fast; it can be auto"),
        (["--layout", "auto"], {"SCALE": "tiny"}, "not with SCALE=tiny"),
        ([*AUTO, "--gpu-memory-gb", "30"], {}, "no layout fits 256 GPUs of 30.0 GiB; the nearest needs "),
    ],
)
def test_a_layout_that_cannot_be_found_is_one_line(box, flags, environment, said):
    done = bash(box, "glm5.2_4k_cudnn.sh", *flags, **environment)
    assert done.returncode == 2 and not (box / "torchrun.args").exists()
    assert done.stderr.startswith("error: ") and said in done.stderr and done.stderr.count("\n") == 1


def test_the_documented_layouts_are_what_the_planner_finds():
    """All published ones; of the best found, two, with their axes given, so that the search is short."""
    text = (ROOT / "docs" / "recipes.md").read_text()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if re.match(r"\| \d+ \| \d+ h", line)
    ]
    assert len(rows) == len(published.RUNS) * len(published.GPUS) * len(GPU_TYPES)
    contexts = {str(length): (batch, cp) for length, batch, cp in published.RUNS}
    for length, machine, *told in rows:
        (batch, cp), (gpus, gpu) = contexts[length], machine.split()
        run = published.RUN.format(length, batch)
        found = published._published(run, cp, int(gpus), gpu)
        assert [cell.strip() for cell in found.split("|")] == told[:3]
        if gpus == "256" and gpu == "h100":
            axes = dict(re.findall(r"\b(TP|CP|PP|EP)(\d+)", told[3]))
            given = " ".join(f"{FLAGS[axis]} {axes.get(axis, 1)}" for axis in FLAGS)
            found = published._best(f"{run} {given}", int(gpus), gpu)
            assert [cell.strip() for cell in found.split("|")] == told[3:]
