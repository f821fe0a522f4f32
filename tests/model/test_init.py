"""Initial weights: a function of seed and name alone, normal in fp32, whatever part a rank holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.distributed import ProcessGroup

from megatron_glm.config import KernelConfig, ParallelConfig, RunConfig
from megatron_glm.model.glm import GLMChunk
from megatron_glm.model.init import initialize_weights
from megatron_glm.parallel.dispatch import make_dispatcher
from megatron_glm.parallel.pipeline.layout import Stage
from tests.helpers.reference import single_chunk, single_groups, small_config

CONFIG = small_config(vocab_size=601, num_nextn_predict_layers=1)  # more than two blocks of rows, and odd


def weights(chunk, seed=1):
    initialize_weights(chunk, seed)
    return chunk.state_dict()


WHOLE = Stage(tuple(range(4)), embedding=True, head=True, mtp=True)


def rank_chunk(tp, tp_size, ep, ep_size, stage=WHOLE):
    """The chunk of one rank of a layout, built without its other ranks."""
    parallel = ParallelConfig(tensor_model_parallel_size=tp_size, expert_model_parallel_size=ep_size)
    run = RunConfig(CONFIG, parallel=parallel, kernels=KernelConfig("torch"))
    groups = replace(single_groups(), tp=ProcessGroup(tp, tp_size), ep=ProcessGroup(ep, ep_size))
    return GLMChunk(run, groups, stage, make_dispatcher(run, groups))


@pytest.mark.parametrize("tp_size, ep_size", [(2, 1), (4, 2), (1, 8)])
def test_every_rank_draws_its_part_of_the_same_model(tp_size, ep_size):
    whole = weights(single_chunk(CONFIG))
    for rank in range(max(tp_size, ep_size)):
        chunk = rank_chunk(rank % tp_size, tp_size, rank % ep_size, ep_size)
        for name, tensor in weights(chunk).items():
            slices = [slice(o, o + n) for o, n in zip(chunk.shards[name].offsets, tensor.shape, strict=True)]
            expected = whole[name][*slices]
            assert torch.equal(tensor[: len(expected)], expected), name
            assert not tensor[len(expected) :].any(), name  # padding of the vocabulary


def test_a_stage_draws_its_layers_of_the_same_model():
    whole, stage = weights(single_chunk(CONFIG)), weights(rank_chunk(0, 1, 0, 1, Stage((2,), head=True, mtp=True)))
    assert {"layers.2.mlp.experts.down", "layers.4.eh_proj.weight", "lm_head.weight"} < stage.keys() < whole.keys()
    assert all(torch.equal(tensor, whole[name]) for name, tensor in stage.items())


def test_the_device_memory_before_does_not_matter_and_the_seed_does():
    chunk = single_chunk(CONFIG)
    first = {name: tensor.clone() for name, tensor in weights(chunk).items()}
    for tensor in [*chunk.parameters(), *chunk.buffers()]:
        tensor.data.fill_(7)
    again = weights(chunk)
    assert all(torch.equal(again[name], first[name]) for name in first)
    assert not any(router.counts.any() for router in chunk.routers())
    other = weights(single_chunk(CONFIG), seed=2)
    matrices = [name for name, tensor in first.items() if tensor.dim() > 1]
    assert not any((other[name] == first[name]).any() for name in matrices)


def test_no_two_tensors_experts_or_blocks_of_rows_are_alike():
    found = weights(single_chunk(CONFIG))
    rows = []
    for tensor in found.values():
        if tensor.dim() > 1:
            rows.append(tensor.flatten(0, -2)[:, :8])  # the first numbers of every row of every matrix
    rows = torch.cat(rows)
    assert rows.unique(dim=0).shape == rows.shape


def test_norms_are_one_and_biases_zero():
    for name, tensor in weights(single_chunk(CONFIG)).items():
        if tensor.dim() == 1:
            assert (tensor == (0 if name.endswith("bias") else 1)).all(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matrices_are_normal_down_to_their_tails(dtype):
    """Drawn in bf16, a bounded draw piled up on its bounds; here the tails are those of a normal distribution."""
    std = 0.02
    chunk = single_chunk(small_config(vocab_size=4001, hidden_size=256, initializer_range=std)).to(dtype)
    drawn = weights(chunk)["embed_tokens.weight"]
    values = drawn.double().flatten() / std
    assert drawn.dtype == dtype and drawn.numel() > 1e6
    assert abs(values.mean()) < 4e-3 and abs(values.std() - 1) < 4e-3
    for bound, outside in ((1, 0.3173), (2, 0.0455), (3, 0.0027), (4, 6.3e-5)):
        assert (values.abs() > bound).double().mean().item() == pytest.approx(outside, rel=0.35 if bound > 3 else 0.06)
    assert 4.4 < values.abs().max() < 6.5
    exact = weights(single_chunk(small_config(vocab_size=4001, hidden_size=256, initializer_range=std)))
    assert torch.equal(drawn, exact["embed_tokens.weight"].to(dtype))  # drawn in fp32, then cast
