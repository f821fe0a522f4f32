"""The losses of the routers in every layout as in one process: values, every gradient, parameters after three steps.

A document's rows lie on several ranks under context and tensor parallelism, and its experts' use is counted over all.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from megatron_glm.config import LossConfig, ParallelConfig, RunConfig
from tests.helpers import distributed
from tests.parity.layouts import Result, clear_reference, parity_model, run_config, train_layouts
from tests.parity.test_layouts import EVERY, FULL, SELECTIVE, compare, layout

pytestmark = pytest.mark.timeout(300)

LOSSES = LossConfig(moe_aux_loss_coeff=0.3, moe_z_loss_coeff=0.1)
LAYOUTS = {
    2: {"tp2 selective": layout(tp=2, **SELECTIVE), "cp2": layout(cp=2, **EVERY), "pp2 full": layout(pp=2, **FULL)},
    4: {
        "tp2 cp2 ep4": layout(tp=2, cp=2, ep=4),
        "dp2 pp2 vp2 zero-bubble": layout(pp=2, vp=2, pipeline_schedule="zero-bubble"),
    },
}


def configuration(parallel: ParallelConfig, seed: int) -> RunConfig:
    return replace(run_config(parity_model(4), parallel, 4, seed), losses=LOSSES)


@cache
def reference() -> tuple[int, Result]:
    return clear_reference(lambda seed: configuration(ParallelConfig(), seed))


@cache
def outcome(world_size: int) -> dict[str, Result]:
    cases = [(name, configuration(parallel, reference()[0])) for name, (_, parallel) in LAYOUTS[world_size].items()]
    return distributed.run(world_size, train_layouts, cases, timeout=200)[0]


@pytest.mark.parametrize(("world_size", "name"), [(size, name) for size, names in LAYOUTS.items() for name in names])
def test_layout_has_the_routers_losses_of_one_process(world_size, name):
    result, expected = outcome(world_size)[name], reference()[1]
    compare(result, expected)
    for ours, one in zip(result.others, expected.others, strict=True):
        assert ours == pytest.approx(one, rel=1e-5) and set(one) == {"aux", "z"} and min(one.values()) > 0
