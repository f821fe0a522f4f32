"""MTP in every kind of layout trains as one process does; the embedding's copies stay equal bit for bit."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from megatron_glm.config import LossConfig, ParallelConfig, RunConfig
from tests import distributed
from tests.parity.layouts import GAP, Result, parity_model, run_config, train, train_layouts
from tests.parity.test_layouts import EVERY, FULL, KEPT, SELECTIVE, ZERO_BUBBLE, compare, layout
from tests.reference import single_groups

pytestmark = pytest.mark.timeout(900)  # the first case of a world size runs all of them

SHARED, OWN = LossConfig(3, mtp_loss_scaling_factor=0.3), LossConfig(1)
DETACHED, ONLY = replace(SHARED, mtp_detach=True), replace(SHARED, train_only="mtp")
GRID = {
    2: {
        "dp2": (SHARED, layout()),
        "tp2": (SHARED, layout(tp=2)),
        "cp2 selective recompute": (SHARED, layout(cp=2, **SELECTIVE)),
        "ep2": (OWN, layout(ep=2)),
        "pp2 full recompute": (SHARED, layout(pp=2, **FULL)),
        "pp2 vp2 detached": (DETACHED, layout(pp=2, vp=2)),
        "pp2 only mtp": (ONLY, layout(pp=2)),
        "pp2 zero bubble": (OWN, layout(pp=2, **ZERO_BUBBLE)),
    },
    4: {
        "tp2 cp2": (OWN, layout(tp=2, cp=2)),
        "dp2 pp2": (SHARED, layout(pp=2)),
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
    single_groups()
    for seed in range(20):
        result = train(configured(losses, ParallelConfig(), seed))
        if result.gap >= GAP:
            return seed, result
    raise AssertionError(f"no seed of 20 gives selections that are clear by {GAP}")


@cache
def outcome(world_size: int) -> dict[str, Result]:
    cases = [
        (name, configured(losses, parallel, reference(losses)[0]))
        for name, (losses, (_, parallel)) in GRID[world_size].items()
    ]
    return distributed.run(world_size, train_layouts, cases, timeout=600)[0]


@pytest.mark.parametrize(("world_size", "name"), [(size, name) for size, cases in GRID.items() for name in cases])
def test_layout_trains_mtp_as_one_process(world_size, name):
    result, expected = outcome(world_size)[name], reference(GRID[world_size][name][0])[1]
    compare(result, expected)
    for ours, one in zip(result.others, expected.others, strict=True):
        assert ours == pytest.approx(one, abs=1e-5)
    assert min(expected.others[0].values()) >= 0 and any("mtp" in key for key in expected.others[0])
