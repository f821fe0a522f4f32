"""The recipes that train adapters on all of GLM-5.2: what they need, and where the frozen model comes from."""

from __future__ import annotations

import json

import pytest

from megatron_glm.checkpoint.adapters import Base, adapter_state
from megatron_glm.config import LoraConfig
from megatron_glm.planner.memory import fits_in, peak_memory
from megatron_glm.planner.plan import GIB, Plan
from tests.helpers.rehearsed import check_rehearsed
from tests.project.test_recipes import ROOT, bash, box, launched

__all__ = ["box"]  # a fixture


@pytest.mark.parametrize("nodes", [1, 2])
def test_adapters_of_the_whole_model_fit_one_node(box, nodes):
    """8 or 16 H200 GPUs; what it trains, and where the frozen model comes from."""
    name, base = f"glm5.2_lora_{nodes}node", box / "released"
    base.mkdir()
    missing = bash(box, f"{name}.sh", BASE=str(base))
    assert missing.returncode == 2 and "hf download zai-org/GLM-5.2-FP8 --local-dir" in missing.stderr
    (base / "config.json").write_text((ROOT / "megatron_glm/presets/glm5.2.json").read_text())
    _, config = launched(box, f"{name}.sh", BASE=str(base))
    assert config.checkpoint.load_hf == str(base) and config.checkpoint.load is None
    assert (config.lora.lora_rank, config.lora.lora_expert_rank, config.lora.base_precision) == (16, 8, "fp8")
    config.check(8 * nodes)
    plan = Plan.create(config, 8 * nodes, 8)
    assert fits_in(plan, 139 * GIB) and peak_memory(plan) > 0.8 * plan.held_most(0).frozen > 30 * GIB
    check_rehearsed(f"{name}.sh", plan)
    job = (ROOT / "examples/slurm" / f"{name}.sbatch").read_text()
    assert f"#SBATCH --nodes={nodes}\n" in job and job.endswith(f'run_recipe examples/{name}.sh "$@"\n')


def test_tiny_runs_in_small_what_the_recipe_does(box):
    _, config = launched(box, "glm5.2_lora_1node.sh", SCALE="tiny", TINY_FOLDER=str(box / "tiny"))
    config.check(8)
    assert (config.lora.lora_rank, config.lora.lora_expert_rank, config.lora.base_precision) == (16, 8, "fp8")


def test_a_run_goes_on_with_its_model_where_it_is_now(box):
    """BASE has moved since the first start: a checkpoint of adapters names the old place."""
    for path in ("moved/config.json", "run/iter_0000003/hf/config.json"):
        (box / path).parent.mkdir(parents=True)
        (box / path).write_text((ROOT / "megatron_glm/presets/glm5.2.json").read_text())
    for name in ("tensors.index", "hf/tokenizer.json"):
        (box / "run/iter_0000003" / name).touch()
    (box / "run/iter_0000003/state.json").write_text(
        json.dumps(adapter_state(LoraConfig(16, 32, 8), Base(box / "gone", "")))
    )
    (box / "run/latest_checkpointed_iteration.txt").write_text("3")
    _, config = launched(box, "glm5.2_lora_1node.sh", BASE=str(box / "moved"), SAVE=str(box / "run"))
    assert config.checkpoint.load == str(box / "run") and config.checkpoint.load_hf is None
    assert config.lora.base == str(box / "moved")
