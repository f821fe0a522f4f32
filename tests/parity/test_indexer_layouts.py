"""The indexer trains in every layout as in one process: its loss, every gradient, the parameters after three steps."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from megatron_glm.config import IndexerConfig, LossConfig, ParallelConfig, RunConfig
from tests.helpers import distributed
from tests.parity.layouts import Result, clear_reference, parity_model, run_config, train_layouts
from tests.parity.test_layouts import EVERY, FULL, SELECTIVE, compare, layout

pytestmark = pytest.mark.timeout(300)

TRAINING = {
    "sparse": IndexerConfig("sparse", dsa_indexer_loss_coeff=0.1),
    "warmup": IndexerConfig("warmup", dsa_indexer_loss_coeff=0.1),
    "own": IndexerConfig("sparse", "own", dsa_indexer_loss_coeff=0.1, indexer_loss_rows="sparse"),
    "mtp": IndexerConfig("sparse", dsa_indexer_loss_coeff=0.1),  # with two steps, the second on the keys of the first
}
# Groups of layers 0-2 and 3: two stages cut the first one.
GRID = {
    2: {
        "tp2": ("sparse", "warmup", "own", "mtp"),
        "cp2": ("sparse", "warmup", "mtp"),
        "pp2": ("sparse", "warmup", "own"),
        "dp2": ("sparse", "warmup"),
        "pp2 vp2 full recompute": ("sparse", "mtp"),
        "pp2 m before the head": ("mtp",),
        "tp2 selective recompute": ("sparse",),
    },
    4: {"tp2 cp2": ("sparse", "warmup"), "tp2 pp2 vp2 zero-bubble": ("sparse",), "dp2 pp2 vp2": ("sparse", "warmup")},
}
LAYOUTS = {
    "tp2": layout(tp=2),
    "cp2": layout(cp=2, **EVERY),
    "pp2": layout(pp=2),
    "dp2": layout(),
    "pp2 vp2 full recompute": layout(pp=2, vp=2, **FULL),
    "pp2 m before the head": layout(pp=2, pipeline_model_parallel_layout="Et|tt|t,m|L", **SELECTIVE),
    "tp2 selective recompute": layout(tp=2, **SELECTIVE),
    "tp2 cp2": layout(tp=2, cp=2),
    "tp2 pp2 vp2 zero-bubble": layout(tp=2, pp=2, vp=2, pipeline_schedule="zero-bubble"),
    "dp2 pp2 vp2": layout(pp=2, vp=2),
}


def configuration(mode: str, parallel: ParallelConfig, seed: int) -> RunConfig:
    model, losses = parity_model(4, index_share_for_mtp_iteration=True), LossConfig(2 if mode == "mtp" else 0)
    config = replace(run_config(model, parallel, 4, seed), indexer=TRAINING[mode], losses=losses)
    rate = 0.0 if mode == "warmup" else config.optimizer.moe_router_bias_update_rate
    return replace(config, optimizer=replace(config.optimizer, moe_router_bias_update_rate=rate))


@cache
def reference(mode: str) -> tuple[int, Result]:
    return clear_reference(lambda seed: configuration(mode, ParallelConfig(), seed))


@cache
def outcome(world_size: int) -> dict[str, Result]:
    cases = [
        (f"{name}, {mode}", configuration(mode, LAYOUTS[name][1], reference(mode)[0]))
        for name, modes in GRID[world_size].items()
        for mode in modes
    ]
    return distributed.run(world_size, train_layouts, cases, timeout=200)[0]


@pytest.mark.parametrize(
    ("world_size", "name", "mode"),
    [(size, name, mode) for size, names in GRID.items() for name, modes in names.items() for mode in modes],
)
def test_layout_trains_the_indexer_as_one_process(world_size, name, mode):
    result, expected = outcome(world_size)[f"{name}, {mode}"], reference(mode)[1]
    compare(result, expected)
    for ours, one in zip(result.others, expected.others, strict=True):
        assert ours == pytest.approx(one, rel=1e-5)
        others = {"mtp": {"mtp_1", "mtp_2", "accepted_1", "accepted_2"}, "warmup": {"recall"}}
        assert set(one) == {"indexer", *others.get(mode, ())}
    indexers = {name for name in expected.gradients if ".indexer." in name}
    assert len(indexers) == (15 if mode == "mtp" else 10) and (mode != "warmup" or set(expected.gradients) == indexers)
