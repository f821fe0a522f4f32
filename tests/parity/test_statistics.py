"""The statistics of a logged step: gradient norms by module, router loads and biases are of the whole model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_glm.config import ParallelConfig
from megatron_glm.training.statistics import MODULES, module_of
from tests.helpers import distributed
from tests.helpers.reference import recorded, single_groups
from tests.parity.layouts import GAP, pack, parity_model, run_config

PACKS = 4
SIZES = dict(sequence_parallel=True, tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
LAYOUTS = {
    "tp2 cp2 pp2 vp2 ep4": ParallelConfig(
        **SIZES, context_parallel_size=2, expert_model_parallel_size=4, num_layers_per_virtual_pipeline_stage=1
    ),
    "tp2 dp2 pp2 ep2": ParallelConfig(**SIZES, expert_model_parallel_size=2),
    "dp8 ep8": ParallelConfig(expert_model_parallel_size=8),
}


def two_steps(parallel: ParallelConfig, seed: int) -> list[dict]:
    """The statistics of two training steps; clipping lies between the gradients and them, and the biases move."""
    import torch.distributed as dist

    from megatron_glm.parallel.groups import ParallelGroups
    from megatron_glm.training.engine import Engine
    from megatron_glm.training.initialize import build_chunks
    from megatron_glm.training.optimizer import build_optimizer
    from megatron_glm.training.step import train_step

    packs = max(PACKS, parallel.data_parallel_size(dist.get_world_size()))
    config = run_config(parity_model(4), parallel, packs, seed)
    groups = ParallelGroups.create(parallel)
    chunks = build_chunks(config, groups)
    engine, optimizer = Engine(config, groups, chunks), build_optimizer(config.optimizer, chunks)
    results = []
    for step in range(2):
        # beyond PACKS, the packs have no loss and no tokens
        mine = range(groups.dp.rank(), packs, groups.dp.size())
        batches = [pack(config.model, seed, step, i) if i < PACKS else nothing(config, seed) for i in mine]
        result = train_step(engine, optimizer, batches, 1e-3, with_statistics=True)
        results.append(result.statistics | {"norm": result.grad_norm})
    distributed.close_groups(groups)
    return results


def nothing(config, seed: int):
    full = pack(config.model, seed, 0, 0)
    tokens, labels = full.tokens * 0, full.labels * 0 - 100
    return replace(full, tokens=tokens, labels=labels, loss_mask=labels >= 0, doc_lengths=(), padding=len(tokens))


def all_layouts(seed: int) -> dict[str, list[dict]]:
    return {name: two_steps(parallel, seed) for name, parallel in LAYOUTS.items()}


@pytest.mark.timeout(600)
def test_statistics_are_those_of_one_process():
    single_groups()
    for seed in range(20):
        with recorded() as seen:
            expected = two_steps(ParallelConfig(), seed)
        if seen.gap >= GAP:
            break
    for step in expected:
        norms = step["grad_norms"]
        assert set(norms) == set(MODULES) - {"indexer", "mtp"}  # frozen
        assert sum(norm**2 for norm in norms.values()) == pytest.approx(step["norm"] ** 2, rel=1e-6)
        assert list(step["router_load"]) == ["layer_01", "layer_02", "layer_03"]
        assert all(load > 1 for load in step["router_load"].values())
    assert expected[1]["expert_bias_min"]["layer_02"] < 0 < expected[1]["expert_bias_max"]["layer_02"]
    ranks = distributed.run(8, all_layouts, seed, timeout=500)
    for rank, results in enumerate(ranks):
        for name, steps in results.items():
            assert [step["peak_memory_bytes"] for step in steps] == [s["peak_memory_bytes"] for s in ranks[0][name]]
            for step, wanted in zip(steps, expected, strict=True):
                for key in ("grad_norms", "router_load", "expert_bias_min", "expert_bias_max"):
                    assert step[key] == pytest.approx(wanted[key], rel=1e-4), (name, rank, key)


def test_every_parameter_has_its_module():
    model = parity_model(3)
    names = {
        "embed_tokens.weight": "embedding",
        "layers.0.input_layernorm.weight": "norms",
        "layers.1.self_attn.q_a_layernorm.weight": "norms",
        "layers.1.self_attn.kv_a_proj_with_mqa.weight": "attention",
        "layers.0.self_attn.indexer.k_norm.bias": "indexer",
        "layers.0.self_attn.indexer.wq_b.weight": "indexer",
        "layers.0.mlp.gate_proj.weight": "mlp",
        "layers.1.mlp.gate.weight": "router",
        "layers.1.mlp.experts.gate_up": "experts",
        "layers.1.mlp.shared_experts.down_proj.weight": "mlp",
        "norm.weight": "norms",
        "lm_head.weight": "head",
        "layers.3.eh_proj.weight": "mtp",
        "layers.3.mlp.experts.down": "mtp",
    }
    assert {name: module_of(name, model) for name in names} == names
