"""MTP in every kind of layout trains as one process does; the embedding's copies stay equal bit for bit."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import pytest
import torch

from megatron_glm.config import LossConfig, ParallelConfig, RunConfig
from tests.helpers import distributed
from tests.helpers.reference import single_groups
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
        "pp2 m before the head": (SHARED, layout(pp=2, pipeline_model_parallel_layout="Etttt,m|L", **FULL)),
        "pp2 vp2 m before the head": (SHARED, layout(pp=2, pipeline_model_parallel_layout="Et|tt|t,m|L")),
        "pp2 vp2 m alone, zero bubble": (
            VARIATION,
            layout(pp=2, pipeline_model_parallel_layout="Ett|tt|m|L", **ZERO_BUBBLE),
        ),
        "pp2 only m, before the head": (ONLY, layout(pp=2, pipeline_model_parallel_layout="Ettt|t|m|L")),
        "dp2 vp2": (OWN, layout(pipeline_model_parallel_layout="Ett|ttL")),
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
        "pp4 m alone": (OWN, layout(pp=4, pipeline_model_parallel_layout="Ett|tt|m|L")),
        "pp4 m before the head, zero bubble": (
            SHARED,
            layout(pp=4, pipeline_model_parallel_layout="Et|t|tt,m|L", **ZERO_BUBBLE),
        ),
        "tp2 pp2 m before the head": (DETACHED, layout(tp=2, pp=2, pipeline_model_parallel_layout="Etttt,m|L")),
        "dp2 pp2 m before the head, reduced every time": (
            SHARED,
            layout(pp=2, pipeline_model_parallel_layout="Et|tt|t,m|L", **EVERY),
        ),
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


def next_tokens(config: RunConfig):
    """What the model answers for one pack, on the ranks of the last stage."""
    from megatron_glm.parallel.groups import ParallelGroups
    from megatron_glm.training.engine import Engine
    from megatron_glm.training.initialize import build_chunks, pipeline_layout

    layout = pipeline_layout(config, 1)
    groups = ParallelGroups.create(config.parallel, embedding=layout.embedding_ranks(predicts=True))
    engine = Engine(config, groups, build_chunks(config, groups))
    [found] = engine.ask([pack(config.model, 0, 0, 1)], "next tokens")
    distributed.close_groups(groups)
    return found.get("tokens")


def test_a_question_about_next_tokens_runs_no_steps():
    """Their hidden states are then in no message either."""
    single_groups()
    expected = next_tokens(configured(SHARED, ParallelConfig(), 0))
    config = configured(SHARED, layout(pp=2, pipeline_model_parallel_layout="Etttt,m|L")[1], 0)
    first, last = distributed.run(2, next_tokens, config)
    assert first is None and torch.equal(last, expected) and (last >= 0).all()
