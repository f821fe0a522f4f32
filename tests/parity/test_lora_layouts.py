"""Adapters train in every layout of the grid as in one process: loss, norm, every gradient, the step that follows."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest
import torch

from megatron_glm.config import LoraConfig, ParallelConfig, RunConfig
from megatron_glm.config.lora import ADAPTABLE
from megatron_glm.model.glm import GLMChunk
from megatron_glm.model.init import _draw, initialize_weights
from megatron_glm.parallel.fsdp import rectangle
from tests.helpers import distributed
from tests.helpers.reference import single_chunk
from tests.parity.layouts import Result, clear_reference, pack, parity_model, run_config, train_layouts
from tests.parity.test_layouts import GRID, LAYERS, compare

pytestmark = pytest.mark.timeout(300)

STEPS = 1  # B is drawn, so that the first step has every gradient


def configuration(parallel: ParallelConfig, seed: int, kind: str) -> RunConfig:
    layers, packs = LAYERS[kind]
    config = run_config(parity_model(layers), parallel, packs, seed)
    config = replace(config, lora=LoraConfig(4, lora_expert_rank=8, lora_target_modules=ADAPTABLE))
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
def reference(kind: str) -> tuple[int, Result]:
    return clear_reference(lambda seed: configuration(ParallelConfig(), seed, kind), draw=draw, steps=STEPS)


@cache
def frozen(kind: str) -> dict[str, torch.Tensor]:
    """The weights without adapters, as they are drawn."""
    chunk = single_chunk(parity_model(LAYERS[kind][0]))
    initialize_weights(chunk, reference(kind)[0])
    return chunk.state_dict()


@cache
def outcome(world_size: int) -> dict[str, Result]:
    cases = [
        (name, configuration(parallel, reference(kind)[0], kind)) for name, (kind, parallel) in GRID[world_size].items()
    ]
    return distributed.run(world_size, train_layouts, cases, pack, draw, STEPS, timeout=280)[0]


@pytest.mark.parametrize(("world_size", "name"), [(size, name) for size, names in GRID.items() for name in names])
def test_layout_trains_adapters_as_one_process(world_size, name):
    result, kind = outcome(world_size)[name], GRID[world_size][name][0]
    compare(result, reference(kind)[1])
    assert all(torch.equal(result.parameters[name], weight) for name, weight in frozen(kind).items())


@pytest.mark.parametrize("kind", LAYERS)
def test_adapters_alone_have_gradients_and_are_in_the_norm(kind):
    layers, expected = LAYERS[kind][0], reference(kind)[1]
    assert set(expected.gradients) == {name for name in expected.parameters if name.endswith(("lora_A", "lora_B"))}
    assert len(expected.gradients) == layers * 10 + (layers - 1) * 2 * 3 + (layers - 1) * 6 + 6
    assert all(gradient.any() for gradient in expected.gradients.values())
    squares = sum(gradient.double().square().sum().item() for gradient in expected.gradients.values())
    assert expected.norms[0] == pytest.approx(math.sqrt(squares), rel=1e-6)
