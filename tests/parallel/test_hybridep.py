"""What the hybridep dispatcher needs of a run, and what a plan counts for it; tests/parity/test_dispatch.py runs it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from megatron_glm.config import Fp8Config, ModelConfig, ParallelConfig, RunConfig, TrainConfig
from megatron_glm.parallel.dispatch import hybridep, make_dispatcher
from megatron_glm.parallel.grid import Grid
from megatron_glm.parallel.groups import ParallelGroups


def config(ep: int = 16, node: int | None = 8, **sizes) -> RunConfig:
    parallel = ParallelConfig(
        expert_model_parallel_size=ep, expert_node_size=node, moe_token_dispatcher_type="hybridep"
    )
    run = RunConfig(replace(ModelConfig.from_hf("glm5.2"), **sizes), parallel=parallel)
    return replace(run, train=replace(run.train, bf16=True))


@pytest.mark.parametrize(
    "run, gpu, built, words",
    [
        (config(), False, True, "lacks GPUs; alltoall"),
        (config(), True, False, "lacks DeepEP's HybridEPBuffer .docs/install.md"),
        (replace(config(), train=TrainConfig()), True, True, "moves bfloat16 rows: give --bf16"),
        (replace(config(), fp8=Fp8Config(fp8="blockwise", fp8_dispatch=True)), True, True, "with --fp8-dispatch: its"),
        (config(hidden_size=200), True, True, "hidden_size must be a multiple of 16, not 200"),
        (config(2, None, n_routed_experts=6), True, True, "the experts of a domain must be a multiple of 4, not 6"),
    ],
)
def test_what_it_cannot_serve_is_refused(run, gpu, built, words, monkeypatch):
    monkeypatch.setattr(hybridep.torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(hybridep, "find_spec", lambda name: built or None)
    with pytest.raises(ValueError, match=f"^--moe-token-dispatcher-type hybridep:? {words}"):
        hybridep.check(run)


def test_one_rank_needs_no_transport(monkeypatch):
    hybridep.check(config(1, None))


def test_a_plan_counts_rows_by_level_and_the_buffer():
    run = config()
    dispatcher = make_dispatcher(run, ParallelGroups.of_sizes(Grid.create(run.parallel, 16)))
    tokens, d, experts = run.data.seq_length, 6144, 16 * 8  # of a domain, whose weights go with each token
    other_node = 1 - math.comb(128, 8) / math.comb(256, 8)
    traffic = dispatcher.traffic()
    assert set(traffic) == {"ep_inter", "ep_node"}
    assert traffic["ep_inter"] / tokens / (4 * d + 4 * experts) == pytest.approx(other_node)
    assert dispatcher.buffer_bytes() == 16 * tokens * (2 * d + 4 * experts + 4 * d // 128)
