"""MTP in every kind of layout trains as one process does; the embedding's copies stay equal bit for bit."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
import torch.distributed as dist

from megatron_glm.config import LossConfig, ParallelConfig, RunConfig
from tests import distributed
from tests.finetune import finetune, json_log, tensors, write_rows
from tests.parity.layouts import Result, clear_reference, pack, parity_model, run_config, train_layouts
from tests.parity.test_layouts import EVERY, FULL, KEPT, SELECTIVE, ZERO_BUBBLE, compare, layout

pytestmark = pytest.mark.timeout(900)  # the first case of a world size runs all of them

SHARED, OWN = LossConfig(3, mtp_loss_scaling_factor=0.3), LossConfig(1)
# With 3 steps documents of 1, 2, k and k + 1 tokens, of which some are cut by the edges of the ranks' rows (each a
# multiple of 16), and a pack of padding.
PACKS = partial(pack, packs=((20, 1, 11), (15, 2, 3, 4, 27, 1, 12), (), (30, 4, 3, 26)))
DETACHED, ONLY = replace(SHARED, mtp_detach=True), replace(SHARED, train_only="mtp")
VARIATION = replace(SHARED, mtp_loss="tv")
GRID = {
    2: {
        "dp2": (SHARED, layout()),
        "tp2": (SHARED, layout(tp=2)),
        "cp2 selective recompute": (SHARED, layout(cp=2, **SELECTIVE)),
        "ep2": (OWN, layout(ep=2)),
        "pp2 full recompute": (SHARED, layout(pp=2, **FULL)),
        "pp2 vp2 detached": (DETACHED, layout(pp=2, vp=2)),
        "pp2 only mtp": (ONLY, layout(pp=2)),
        "cp2 total variation": (VARIATION, layout(cp=2)),
        "pp2 total variation full recompute": (VARIATION, layout(pp=2, **FULL)),
        "pp2 zero bubble": (OWN, layout(pp=2, **ZERO_BUBBLE)),
    },
    4: {
        "tp2 cp2": (OWN, layout(tp=2, cp=2)),
        "tp2 cp2 total variation": (VARIATION, layout(tp=2, cp=2)),
        "dp2 pp2": (SHARED, layout(pp=2)),
        "ep2 pp2 total variation": (VARIATION, layout(ep=2, pp=2)),
        "tp2 pp2": (SHARED, layout(tp=2, pp=2)),
        "cp2 pp2 reduced every time": (OWN, layout(cp=2, pp=2, **EVERY)),
        "ep2 pp2 kept weights": (SHARED, layout(ep=2, pp=2, **KEPT)),
        "pp4": (SHARED, layout(pp=4)),
    },
}


def configured(losses: LossConfig, parallel: ParallelConfig, seed: int) -> RunConfig:
    model = parity_model(4, index_share_for_mtp_iteration=losses.mtp_steps > 1)
    return replace(run_config(model, parallel, 4, seed), losses=losses)


@cache
def reference(losses: LossConfig) -> tuple[int, Result]:
    return clear_reference(lambda seed: configured(losses, ParallelConfig(), seed), PACKS)


@cache
def outcome(world_size: int) -> dict[str, Result]:
    cases = [
        (name, configured(losses, parallel, reference(losses)[0]))
        for name, (losses, (_, parallel)) in GRID[world_size].items()
    ]
    return distributed.run(world_size, train_layouts, cases, PACKS, timeout=600)[0]


@pytest.mark.parametrize(("world_size", "name"), [(size, name) for size, cases in GRID.items() for name in cases])
def test_layout_trains_mtp_as_one_process(world_size, name):
    result, expected = outcome(world_size)[name], reference(GRID[world_size][name][0])[1]
    compare(result, expected)
    for ours, one in zip(result.others, expected.others, strict=True):
        assert ours == pytest.approx(one, abs=1e-5)
    assert min(expected.others[0].values()) >= 0 and any("mtp" in key for key in expected.others[0])


def finetuned(folder, out: str, iterations: int, flags: dict) -> None:
    os.chdir(folder)
    os.environ["WORLD_SIZE"] = str(dist.get_world_size())
    given = {"mtp_num_steps": 2, "lr_decay_style": "constant", "log_file": f"{out}.jsonl"} | flags
    finetune(train_iters=iterations, save=out, save_interval=1, **given)


def test_a_checkpoint_with_mtp_goes_through_other_stages_and_back(tmp_path):
    """Two stages, then one, then two: as a run that stayed on two."""
    write_rows(tmp_path)
    pp2 = {"pipeline_model_parallel_size": 2}
    distributed.run(2, finetuned, tmp_path, "stayed", 3, pp2)
    distributed.run(2, finetuned, tmp_path, "a", 1, pp2)
    distributed.run(1, finetuned, tmp_path, "b", 2, {"preset": None, "load": "a"})
    distributed.run(2, finetuned, tmp_path, "c", 3, {"preset": None, "load": "b", **pp2})
    expected, found = tensors(tmp_path / "stayed", 3), tensors(tmp_path / "c", 3)
    assert expected.keys() == found.keys() and any(n.startswith("optimizer.exp_avg.layers.3.") for n in found)
    for name, tensor in expected.items():
        assert torch.allclose(found[name].float(), tensor.float(), rtol=0, atol=1e-5), name
    lines = json_log(tmp_path / "c.jsonl")
    assert all(len(line["mtp_losses"]) == 2 for line in lines)
