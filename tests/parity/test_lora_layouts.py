"""Adapters train in every layout as in one process: loss, every gradient, the parameters after three steps."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from megatron_glm.config import LoraConfig, ParallelConfig, RunConfig
from megatron_glm.model.glm import GLMChunk
from megatron_glm.model.init import _draw, initialize_weights
from megatron_glm.parallel.fsdp import rectangle
from tests import distributed
from tests.parity.layouts import Result, clear_reference, pack, parity_model, run_config, train_layouts
from tests.parity.test_layouts import EVERY, FULL, SELECTIVE, compare, layout

pytestmark = pytest.mark.timeout(300)

LAYOUTS = {
    2: {
        "tp2": layout(tp=2),
        "cp2": layout(cp=2, **EVERY),
        "pp2": layout(pp=2),
        "dp2": layout(),
        "ep2": layout(ep=2),
        "pp2 vp2 full recompute": layout(pp=2, vp=2, **FULL),
        "tp2 selective recompute": layout(tp=2, **SELECTIVE),
    },
    4: {
        "tp2 cp2 ep2": layout(tp=2, cp=2, ep=2),
        "tp2 pp2 vp2 zero-bubble": layout(tp=2, pp=2, vp=2, pipeline_schedule="zero-bubble"),
        "dp4 ep2": layout(ep=2),
        "tp4": layout(tp=4),
    },
}


def configuration(parallel: ParallelConfig, seed: int) -> RunConfig:
    config = replace(run_config(parity_model(4), parallel, 4, seed), lora=LoraConfig(lora_rank=4, lora_expert_rank=8))
    return replace(config, optimizer=replace(config.optimizer, moe_router_bias_update_rate=0.0))


@torch.no_grad()
def draw(chunk: GLMChunk, seed: int) -> None:
    """B is not zero, else A would have no gradient."""
    initialize_weights(chunk, seed)
    for name, parameter in chunk.named_parameters():
        part = rectangle(name, parameter, chunk.shards[name])
        if name.endswith("lora_B") and part.tensor.numel():
            _draw(part, seed, 0.1)


@cache
def reference() -> tuple[int, Result]:
    return clear_reference(lambda seed: configuration(ParallelConfig(), seed), draw=draw)


@cache
def outcome(world_size: int) -> dict[str, Result]:
    cases = [(name, configuration(parallel, reference()[0])) for name, (_, parallel) in LAYOUTS[world_size].items()]
    return distributed.run(world_size, train_layouts, cases, pack, draw, timeout=200)[0]


@pytest.mark.parametrize(("world_size", "name"), [(size, name) for size, names in LAYOUTS.items() for name in names])
def test_layout_trains_adapters_as_one_process(world_size, name):
    result, expected = outcome(world_size)[name], reference()[1]
    compare(result, expected)
    assert set(expected.gradients) == {name for name in expected.parameters if name.endswith(("lora_A", "lora_B"))}
    assert len(expected.gradients) == 4 * 8 + 3 * 2 * 3 + 3 * 6 + 6 and all(
        g.any() for g in expected.gradients.values()
    )
