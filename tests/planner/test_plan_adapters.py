"""What the plan of a run with adapters says of activations and of the frozen head."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_glm.config import LoraConfig, ModelConfig
from megatron_glm.config.flags import build_parser, resolve
from megatron_glm.planner.activations import layer_activations
from megatron_glm.planner.memory import rank_memory
from megatron_glm.planner.plan import GIB, Plan
from tests.planner.test_plan_tool import one_layer, saved_bytes


@pytest.mark.parametrize("dense", [1, 0])
def test_adapters_keep_what_is_planned(dense):
    """By what another rank, and other experts, add: frozen weights keep less on a CPU than the kernels of CUDA do."""

    def planned(lora: LoraConfig, model: ModelConfig) -> int:
        return sum(layer_activations(model, 0, replace(shapes, lora=lora)).values())

    tiny, shapes = one_layer(dense)
    small, large = LoraConfig(16, lora_expert_rank=8), LoraConfig(48, lora_expert_rank=24)
    more = saved_bytes(tiny, 512, large) - saved_bytes(tiny, 512, small)
    assert planned(large, tiny) - planned(small, tiny) == more > 0
    wide = replace(tiny, moe_intermediate_size=2 * tiny.moe_intermediate_size)
    silu = 0 if dense else 4 * 512 * tiny.n_shared_experts * tiny.moe_intermediate_size
    more = saved_bytes(wide, 512, small) - saved_bytes(tiny, 512, small)
    assert planned(small, wide) - planned(small, tiny) == more - silu


def test_a_frozen_head_has_no_gradient_in_the_plan():
    """154,880 x 6,144 numbers in fp32 are 3.5 GiB, where a step has one micro-batch."""
    flags = ["--hf-config", "glm5.2", "--seq-length", "4096", "--bf16", "--expert-model-parallel-size", "8"]
    flags += ["--data-path", "x", "--train-iters", "1", "--lora-rank", "8"]
    one, several = (
        rank_memory(Plan.create(resolve(build_parser().parse_args([*flags, "--global-batch-size", size])), 8, 8), 0)
        for size in ("8", "32")
    )
    assert max(one["logits chunk and head"], several["logits chunk and head"]) < 2 * GIB
    assert max(one["gradients before reduction"], several["gradients before reduction"]) < 2 * GIB
