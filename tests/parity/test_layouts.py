"""The parity grid: every layout trains as one process does, by loss, every gradient, parameters after three steps."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from megatron_glm.config import ParallelConfig
from tests.helpers import distributed
from tests.helpers.reference import gradient_errors, single_groups
from tests.parity.layouts import Result, clear_reference, parity_model, run_config, train, train_layouts

# decoder layers, packs of a step
LAYERS = {"few": (4, 2), "short": (4, 4), "wide": (4, 8), "deep": (12, 4)}

pytestmark = pytest.mark.timeout(900)  # the first case of a world size runs all of them


def layout(tp=1, cp=1, ep=1, pp=1, vp=1, kind="short", **changes) -> tuple[str, ParallelConfig]:
    layers, by_size = LAYERS[kind][0], pp > 1 and "pipeline_model_parallel_layout" not in changes
    return kind, ParallelConfig(
        tensor_model_parallel_size=tp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        pipeline_model_parallel_size=pp,
        num_layers_per_virtual_pipeline_stage=layers // (pp * vp) if by_size else None,
        sequence_parallel=tp > 1,
        **changes,
    )


FULL, SELECTIVE = {"recompute_granularity": "full"}, {"recompute_granularity": "selective"}
HYBRID2 = {"moe_token_dispatcher_type": "hybrid", "expert_node_size": 2}
HYBRID4 = {"moe_token_dispatcher_type": "hybrid", "expert_node_size": 4}
ALLGATHER = {"moe_token_dispatcher_type": "allgather"}
KEPT = {"reshard_after_forward": False, "reshard_experts_after_forward": False}
EVERY = {"grad_sync": "every"}
ZERO_BUBBLE = {"pipeline_schedule": "zero-bubble"}
SLABS = {"data_parallel_sharding": "slabs"}

# Data parallelism is what is left of the ranks.
GRID = {
    2: {
        "dp2": layout(kind="few"),
        "dp2 gradients reduced every time": layout(**EVERY),
        "tp2": layout(kind="few", tp=2),
        "cp2": layout(kind="few", cp=2),
        "ep2": layout(kind="few", ep=2),
        "ep2 allgather": layout(kind="few", ep=2, **ALLGATHER),
        "pp2": layout(pp=2),
        "pp2 vp2": layout(pp=2, vp=2),
        "pp2 vp3 full recompute": layout(pp=2, vp=3, kind="deep", **FULL),
        "pp2 vp2 gradients reduced every time": layout(pp=2, vp=2, **EVERY),
        "pp2 zero bubble": layout(pp=2, **ZERO_BUBBLE),
        "pp2 vp2 zero bubble full recompute": layout(pp=2, vp=2, **ZERO_BUBBLE, **FULL),
        "tp2 full recompute": layout(kind="few", tp=2, **FULL),
        "cp2 selective recompute": layout(kind="few", cp=2, **SELECTIVE),
        "ep2 selective recompute": layout(kind="few", ep=2, **SELECTIVE),
        "cp2 kept weights": layout(kind="few", cp=2, **KEPT),
    },
    4: {
        "tp4": layout(kind="few", tp=4),
        "cp4": layout(kind="few", cp=4),
        "ep4": layout(ep=4),
        "pp4": layout(pp=4),
        "pp4 with a stage that trains nothing": layout(pp=4, pipeline_model_parallel_layout="Ettt|t|m|L"),
        "pp4 vp2": layout(pp=4, vp=2, kind="deep"),
        "pp4 vp3": layout(pp=4, vp=3, kind="deep"),
        "dp2 tp2": layout(kind="few", tp=2),
        "dp2 cp2": layout(kind="few", cp=2),
        "dp2 pp2 vp2": layout(pp=2, vp=2),
        "dp2 pp2 kept weights": layout(pp=2, **KEPT),
        "dp2 pp2 vp2 zero bubble": layout(pp=2, vp=2, **ZERO_BUBBLE),
        "dp2 pp2 zero bubble reduced every time": layout(pp=2, **ZERO_BUBBLE, **EVERY),
        "ep2 pp2 zero bubble kept weights": layout(ep=2, pp=2, **ZERO_BUBBLE, **KEPT),
        "tp2 cp2": layout(kind="few", tp=2, cp=2),
        "tp2 ep2": layout(kind="few", tp=2, ep=2),
        "tp2 ep4": layout(kind="few", tp=2, ep=4),
        "tp2 pp2 vp2": layout(tp=2, pp=2, vp=2),
        "cp2 ep2": layout(kind="few", cp=2, ep=2),
        "cp2 ep4 full recompute": layout(kind="few", cp=2, ep=4, **FULL),
        "cp2 pp2 vp2 selective recompute": layout(cp=2, pp=2, vp=2, **SELECTIVE),
        "ep2 pp2 vp2 full recompute": layout(ep=2, pp=2, vp=2, **FULL),
        "ep4 hybrid 2x2": layout(ep=4, **HYBRID2),
        "dp2 cp2 slabs": layout(kind="few", cp=2, **SLABS),
    },
    8: {
        "tp2 cp2 ep8": layout(kind="few", tp=2, cp=2, ep=8),
        "tp2 cp2 ep4 selective recompute": layout(kind="few", tp=2, cp=2, ep=4, **SELECTIVE),
        "tp4 cp2 ep2": layout(kind="few", tp=4, cp=2, ep=2),
        "tp2 cp4 ep8": layout(kind="few", tp=2, cp=4, ep=8),
        "dp2 tp2 cp2": layout(kind="few", tp=2, cp=2),
        "tp2 cp2 pp2 vp2": layout(tp=2, cp=2, pp=2, vp=2),
        "tp2 ep4 pp2 vp2": layout(tp=2, ep=4, pp=2, vp=2),
        "tp4 ep2 pp2 full recompute": layout(tp=4, ep=2, pp=2, **FULL),
        "cp2 ep2 pp2 vp2": layout(cp=2, ep=2, pp=2, vp=2),
        "cp4 ep4 pp2 selective recompute": layout(cp=4, ep=4, pp=2, **SELECTIVE),
        "tp2 cp2 ep4 pp2 vp2": layout(tp=2, cp=2, ep=4, pp=2, vp=2),
        "dp2 tp2 pp2 vp2 full recompute": layout(tp=2, pp=2, vp=2, **FULL),
        "dp2 cp2 pp2": layout(cp=2, pp=2),
        "tp2 pp4": layout(tp=2, pp=4),
        "cp2 pp4": layout(cp=2, pp=4),
        "ep2 pp4 vp2": layout(ep=2, pp=4, vp=2, kind="deep"),
        "ep8 hybrid 2x4": layout(ep=8, kind="wide", **HYBRID4),
        "tp2 ep8 hybrid 4x2": layout(tp=2, ep=8, **HYBRID2),
        "tp2 cp2 pp2 vp2 slabs": layout(tp=2, cp=2, pp=2, vp=2, **SLABS),
    },
}


@cache
def reference(kind: str) -> tuple[int, Result]:
    """One process, with the first seed whose selections are clear by GAP in all three steps."""
    layers, packs = LAYERS[kind]
    return clear_reference(lambda seed: run_config(parity_model(layers), ParallelConfig(), packs, seed))


def compare(result: Result, expected: Result) -> None:
    assert result.losses == pytest.approx(expected.losses, abs=1e-5)
    assert result.norms == pytest.approx(expected.norms, rel=1e-5)
    errors = gradient_errors(result.gradients, expected.gradients)
    assert max(errors.values()) <= 1e-4, sorted(errors.items(), key=lambda item: -item[1])[:5]
    assert result.parameters.keys() == expected.parameters.keys()
    for name, tensor in expected.parameters.items():
        assert torch.allclose(result.parameters[name], tensor, rtol=0, atol=1e-5), name


@cache
def outcome(world_size: int) -> dict[str, Result]:
    cases = []
    for name, (kind, parallel) in GRID[world_size].items():
        layers, packs = LAYERS[kind]
        cases.append((name, run_config(parity_model(layers), parallel, packs, reference(kind)[0])))
    return distributed.run(world_size, train_layouts, cases, timeout=600)[0]


@pytest.mark.parametrize(
    ("world_size", "name"), [(world_size, name) for world_size, cases in GRID.items() for name in cases]
)
def test_layout_trains_as_one_process(world_size, name):
    compare(outcome(world_size)[name], reference(GRID[world_size][name][0])[1])


@pytest.mark.parametrize("kept", [False, True], ids=["gathered again", "kept"])
@pytest.mark.parametrize("packs", [2, 4], ids=["one micro-batch", "two"])
def test_two_data_ranks_train_in_bf16_as_one_process(packs, kept):
    """FSDP's sums of gradients are as whole weights' are: in fp32, of products in bf16."""
    # Nothing is left to choose, because rounding would change a choice.
    model = parity_model(4, index_topk=64, num_experts_per_tok=8)
    single_groups()
    layouts = ParallelConfig(), ParallelConfig(**KEPT if kept else {})
    configs = [run_config(model, parallel, packs, seed=0) for parallel in layouts]
    alone, ranks = (replace(config, train=replace(config.train, bf16=True)) for config in configs)
    expected, result = train(alone), distributed.run(2, train, ranks)[0]
    assert result.losses == pytest.approx(expected.losses, abs=1e-2)
    errors = gradient_errors(result.gradients, expected.gradients)
    assert max(errors.values()) <= 2e-3, sorted(errors.items(), key=lambda item: -item[1])[:5]
