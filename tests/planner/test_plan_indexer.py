"""What the planner says that the training of the indexers needs."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_glm.config import (
    DataConfig,
    IndexerConfig,
    KernelConfig,
    ModelConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
)
from megatron_glm.model.indexer_training import student_fields
from megatron_glm.planner import activations
from megatron_glm.planner.activations import Shapes, indexer_kept, indexer_working, student_arrived
from megatron_glm.planner.memory import rank_memory
from megatron_glm.planner.plan import GIB, Plan
from megatron_glm.planner.traffic import rank_traffic

MODEL = ModelConfig.from_hf("glm5.2")
ROW = 2048 * 4  # bytes of a row's keys, or of its probabilities


def plan(training: str = "off", recompute: str = "full", **given) -> Plan:
    """128k tokens over CP16 PP4 EP64."""
    parallel = ParallelConfig(
        context_parallel_size=16,
        pipeline_model_parallel_size=4,
        pipeline_model_parallel_layout="auto",
        expert_model_parallel_size=64,
        recompute_granularity=recompute,
    )
    config = RunConfig(
        model=MODEL,
        parallel=parallel,
        kernels=KernelConfig("cudnn"),
        data=DataConfig(("x",), seq_length=131072),
        train=TrainConfig(bf16=True, global_batch_size=16, train_iters=1),
        indexer=IndexerConfig(training, **given),
    )
    return Plan.create(config, 256, 8)


@pytest.mark.parametrize("mode", ["sparse", "warmup"])
@pytest.mark.parametrize("teacher", ["served", "own"])
def test_what_a_stage_gets_of_a_student_is_what_crosses(mode, teacher):
    training, s = IndexerConfig(mode, teacher), Shapes(4096, 2048, 1024, 0, 2048, tp=2, b=2)
    fields = student_fields(training, MODEL, (True,), s.shard, s.pack, torch.bfloat16)
    assert student_arrived(training, MODEL, s) == sum(math.prod(f.shape) * f.dtype.itemsize for f in fields)


def test_each_teacher_keeps_its_rows_unless_it_is_computed_again():
    s, served = Shapes(8192, 8192, 8192, 0, 2048, tp=1, b=2), IndexerConfig("sparse")
    kinds = {layer: MODEL.has_indexer(layer) for layer in (6, 7)}
    assert set(kinds.values()) == {True, False}
    for layer, full in kinds.items():
        kept = {kind: indexer_kept(served, MODEL, layer, s, kind) for kind in ("none", "selective", "full")}
        assert kept == {
            "none": (1 + full) * 8192 * ROW,
            "selective": (1 + full) * 8192 * ROW,
            "full": full * 8192 * ROW,
        }
    assert indexer_kept(IndexerConfig(), MODEL, 6, s, "none") == 0


def test_128k_rows_need_1_gib_of_a_rank_in_warm_up(monkeypatch):
    for tokens in (8192, 131072):  # with and without context parallelism
        assert (
            indexer_working(IndexerConfig("warmup"), MODEL, Shapes(131072, tokens, tokens, tokens, 2048, 1, 2)) == GIB
        )
    with_loss = rank_memory(plan("warmup"), 1)
    monkeypatch.setattr(activations, "CHUNK_BYTES", 0)
    without = rank_memory(plan("warmup"), 1)
    assert with_loss["working set of a layer"] - without["working set of a layer"] == GIB
    assert with_loss["AdamW moments"] < GIB / 10 and with_loss["frozen weights"] > 5 * GIB


def test_the_sparse_stage_needs_a_few_arrays_of_the_selected_keys():
    shapes = plan("sparse").shapes
    working = indexer_working(IndexerConfig("sparse"), MODEL, shapes)
    assert working == 4 * shapes.tokens * ROW + 2 * shapes.dense * 64 * 576 * 2 and shapes.dense < 4096
    off, own, served = (
        [rank_memory(p, rank) for rank in range(4)]
        for p in (plan(), plan("sparse", indexer_teacher="own"), plan("sparse"))
    )
    assert served[1]["working set of a layer"] - off[1]["working set of a layer"] == working
    less, more = (
        [b["activations"] - a["activations"] for a, b in zip(x, y, strict=True)] for x, y in ((off, own), (own, served))
    )
    assert min(*less, *more) >= 0 and max(less) > 0 and max(more) > 0  # with "own" no student crosses


def test_warm_up_sends_tokens_to_experts_in_the_forward_alone():
    def sent(training: str, recompute: str) -> float:
        return rank_traffic(plan(training, recompute), 1)["tp_cp", "latents, index keys"]

    assert sent("sparse", "none") == 2 * sent("warmup", "none") and sent("sparse", "full") == 3 * sent("warmup", "full")
