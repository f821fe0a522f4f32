"""The declared parameters against the modules that hold them, for every preset and cut."""

from __future__ import annotations

import pytest
import torch

from megatron_glm.config import KernelConfig, ModelConfig, ParallelConfig, RunConfig
from megatron_glm.config.parameters import declared, model_parameters
from megatron_glm.model.glm import GLMChunk
from megatron_glm.parallel.dispatch import make_dispatcher
from megatron_glm.parallel.grid import Grid
from megatron_glm.parallel.groups import ParallelGroups
from megatron_glm.parallel.pipeline.layout import Stage
from megatron_glm.planner.units import stage_units
from tests.helpers.reference import small_config

PRESETS = ("glm5", "glm5.1", "glm5.2", "glm5.2-tiny")


def chunk_of_first_rank(config: ModelConfig, parallel: ParallelConfig, stage: Stage) -> GLMChunk:
    run = RunConfig(config, parallel=parallel, kernels=KernelConfig("torch"))
    ranks = max(parallel.tensor_model_parallel_size, parallel.expert_model_parallel_size)
    groups = ParallelGroups.of_sizes(Grid.create(parallel, ranks))
    with torch.device("meta"):
        return GLMChunk(run, groups, stage, make_dispatcher(run, groups))


@pytest.mark.parametrize("preset", PRESETS)
def test_the_modules_hold_what_is_declared_and_nothing_else(preset: str):
    config = ModelConfig.from_hf(preset)
    layers = tuple(range(config.num_hidden_layers))
    chunk = chunk_of_first_rank(config, ParallelConfig(), Stage(layers, embedding=True, head=True, mtp=True))
    held = chunk.state_dict()
    assert {name: tuple(tensor.shape) for name, tensor in held.items()} == {
        name: parameter.shape for name, parameter in model_parameters(config).items()
    }
    buffers = {name for name, parameter in model_parameters(config).items() if parameter.kind == "buffer"}
    assert buffers == held.keys() - dict(chunk.named_parameters()).keys()
    assert all(held[name].dtype == torch.float32 for name in buffers)


@pytest.mark.parametrize("preset", PRESETS[2:])
@pytest.mark.parametrize("tp, ep, world", [(1, 8, 8), (2, 4, 4), (4, 1, 4)])
def test_planned_units_are_the_parameters_of_the_modules(preset: str, tp: int, ep: int, world: int):
    config = ModelConfig.from_hf(preset, vocab_size=1021)  # padded by tp
    parallel = ParallelConfig(tensor_model_parallel_size=tp, sequence_parallel=tp > 1, expert_model_parallel_size=ep)
    grid, layers = Grid.create(parallel, world), tuple(range(config.num_hidden_layers))
    for stage in (Stage(layers[:4], embedding=True), Stage(layers[4:], head=True, mtp=True), Stage((), head=True)):
        chunk = chunk_of_first_rank(config, parallel, stage)
        units = stage_units(config, grid, stage)
        for trains in (True, False):
            held = [(n, tuple(p.shape)) for n, p in chunk.named_parameters() if p.requires_grad == trains]
            planned = [(unit.expert, shape) for unit in units for shape in (unit.trained if trains else unit.frozen)]
            assert sorted(planned) == sorted((".mlp.experts." in name, shape) for name, shape in held)
        mlps = [layer.mlp for layer in chunk.layers.values() if hasattr(layer.mlp, "experts")]
        experts = [sum(p.numel() for p in mlp.experts.parameters()) for mlp in mlps]
        assert [unit.elements for unit in units if unit.expert] == experts
        assert [unit.kind for unit in units].count("layer") == len(chunk.layers)
        for kind, module in {"embedding": chunk.embed_tokens, "head": chunk.lm_head, "root": chunk.norm}.items():
            wanted = [] if module is None else [sum(p.numel() for p in module.parameters())]
            assert [unit.elements for unit in units if unit.kind == kind] == wanted


def test_a_parameter_that_is_not_declared_is_refused():
    config = small_config()
    with pytest.raises(ValueError, match=r"layers.1.gain is \[8\] in its module, and missing"):
        declared(config, {"layers.1.gain": (8,)})
    with pytest.raises(ValueError, match=r"norm.weight is \[3\] in its module, and \[\d+\] in"):
        declared(config, {"norm.weight": (3,)})


def test_a_matrix_decays_and_starts_normal_and_a_vector_does_not():
    for parameter in model_parameters(ModelConfig.from_hf("glm5.2")).values():
        assert parameter.decays == (len(parameter.shape) > 1), parameter.name
