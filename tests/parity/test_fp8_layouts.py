"""FP8 products in every kind of layout: as one process, up to what rounding moves over the edge of an e4m3 number."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from megatron_glm.config import Fp8Config, ParallelConfig, RunConfig
from tests.helpers import distributed
from tests.helpers.reference import gradient_errors, single_groups
from tests.parity.layouts import Result, parity_model, run_config, train
from tests.parity.test_layouts import ALLGATHER, EVERY, FULL, KEPT, SELECTIVE, ZERO_BUBBLE, layout

pytestmark = pytest.mark.timeout(600)
EXACT, SUMS, TOKENS = 1e-6, 5e-2, 0.15  # the same sums; sums in another order; rows of other tokens along a sum
GRID = {
    2: {
        "dp2": (EXACT, layout()),
        "dp2 kept weights gradients reduced every time": (EXACT, layout(**KEPT, **EVERY)),
        "tp2": (SUMS, layout(tp=2)),
        "cp2 selective recompute": (TOKENS, layout(cp=2, **SELECTIVE)),
        "ep2 allgather": (SUMS, layout(ep=2, **ALLGATHER)),
        "pp2 vp2 zero bubble full recompute": (EXACT, layout(pp=2, vp=2, **ZERO_BUBBLE, **FULL)),
    },
    4: {
        "tp2 ep4": (SUMS, layout(tp=2, ep=4)),
        "ep2 pp2 zero bubble kept weights": (SUMS, layout(ep=2, pp=2, **ZERO_BUBBLE, **KEPT)),
    },
}


def configured(parallel: ParallelConfig, fp8: str = "blockwise") -> RunConfig:
    # Nothing is left to choose, because rounding would change a choice. A rank's part of each weight is whole blocks.
    sizes = {"q_lora_rank": 128, "qk_nope_head_dim": 56, "v_head_dim": 64, "intermediate_size": 256}
    model = parity_model(4, index_topk=64, num_experts_per_tok=8, moe_intermediate_size=256, **sizes)
    return replace(run_config(model, parallel, packs=4, seed=0), fp8=Fp8Config(fp8=fp8))


@cache
def reference(fp8: str = "blockwise") -> Result:
    single_groups()
    return train(configured(ParallelConfig(), fp8), steps=1)


def train_once(cases: list[tuple[str, RunConfig]]) -> dict[str, Result]:
    return {name: train(config, steps=1) for name, config in cases}


@cache
def outcome(world_size: int) -> dict[str, Result]:
    cases = [(name, configured(parallel)) for name, (_, (_, parallel)) in GRID[world_size].items()]
    return distributed.run(world_size, train_once, cases, timeout=500)[0]


@pytest.mark.parametrize(("world_size", "name"), [(size, name) for size, cases in GRID.items() for name in cases])
def test_layout_trains_as_one_process(world_size, name):
    bound, result, expected = GRID[world_size][name][0], outcome(world_size)[name], reference()
    errors = gradient_errors(result.gradients, expected.gradients)
    assert max(errors.values()) <= bound, sorted(errors.items(), key=lambda item: -item[1])[:5]
    assert result.losses == pytest.approx(expected.losses, rel=bound / 50)
    assert result.norms == pytest.approx(expected.norms, rel=bound / 5)


def test_the_bounds_tell_fp8_from_no_fp8():
    errors = gradient_errors(reference("off").gradients, reference().gradients)
    assert errors["layers.1.self_attn.q_a_proj.weight"] > 2 * 0.15
