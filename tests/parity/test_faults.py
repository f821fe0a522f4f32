"""Faults that leave the loss falling: each made on purpose or provoked, by name."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from megatron_glm.config import ParallelConfig
from megatron_glm.data.packing import PackedBatch
from tests.helpers import distributed
from tests.helpers.reference import gradient_errors, single_groups
from tests.parity.layouts import GAP, Result, pack, parity_model, run_config, train
from tests.parity.test_layouts import compare

REPLICATED = ("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm", "mlp.gate.weight", "input_layernorm")
CUTS = ["Ett|t|t|tL", "Et|tt|t|tL", "Et|t|tt|tL", "Et|t|t|ttL", "E|tt|tt|tL", "Et|ttt|t|L"]  # of five layers


def padded_pack(doc_lengths: dict[int, tuple[int, ...]], model, seed: int, step: int, index: int) -> PackedBatch:
    """Packs whose documents are cut down to these lengths; what is left is padding."""
    batch = pack(model, seed, step, 1)
    lengths = doc_lengths[index % len(doc_lengths)]
    used, total = sum(lengths), len(batch.tokens)
    labels = batch.labels.clone()
    labels[used:] = -100
    labels[[end - 1 for end in torch.tensor(lengths).cumsum(0).tolist()]] = -100
    position = torch.cat([torch.arange(n) for n in lengths] + [torch.zeros(total - used, dtype=torch.int64)])
    return PackedBatch(batch.tokens, labels, labels != -100, position, lengths, total - used)


EMPTY_EVERY_OTHER = partial(padded_pack, {0: (40, 20), 1: ()})
ONE_SHORT_DOCUMENT = partial(padded_pack, {0: (7,)})


def single(config, make_pack, steps: int) -> Result:
    """One process, its selections clear by GAP for the first of twenty seeds; the seed is in the result's config."""
    single_groups()
    for seed in range(20):
        config = replace(config, train=replace(config.train, seed=seed))
        result = train(config, steps, make_pack)
        if result.gap >= GAP:
            return seed, result
    raise AssertionError(f"no seed of 20 gives selections that are clear by {GAP}")


def without_partial_sums(config) -> Result:
    import megatron_glm.training.step as step

    kept, step.reduce_partial_gradients = step.reduce_partial_gradients, lambda chunks, ends: None
    try:
        return train(config, 1, copies_agree=False)
    finally:
        step.reduce_partial_gradients = kept


def two_ranks(tp_config, cut_configs, empty_config):
    return {
        "summed": train(tp_config, 1),
        "not summed": without_partial_sums(tp_config),
        "cuts": [train(config, 1) for config in cut_configs],
        "empty": train(empty_config, 2, EMPTY_EVERY_OTHER),
    }


def four_ranks(config):
    return train(config, 2, ONE_SHORT_DOCUMENT)


@pytest.fixture(scope="module")
def pair():
    """One spawn of two ranks for all of them, beside what one process computes."""
    model, deep = parity_model(3), parity_model(5)
    seed, expected = single(run_config(model, ParallelConfig(), 4, 0), pack, 1)
    cut_seed, cut_expected = single(run_config(deep, ParallelConfig(), 4, 0), pack, 1)
    empty_seed, empty_expected = single(run_config(model, ParallelConfig(), 4, 0), EMPTY_EVERY_OTHER, 2)
    tp = ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True)
    cuts = [ParallelConfig(pipeline_model_parallel_size=2, pipeline_model_parallel_layout=cut) for cut in CUTS]
    results = distributed.run(
        2,
        two_ranks,
        run_config(model, tp, 4, seed),
        [run_config(deep, cut, 4, cut_seed) for cut in cuts],
        run_config(model, ParallelConfig(expert_model_parallel_size=2), 4, empty_seed),
        timeout=600,
    )[0]
    return results, {"summed": expected, "cuts": cut_expected, "empty": empty_expected}


def test_replicated_weights_under_tensor_parallelism_sum_their_gradients(pair):
    results, expected = pair
    right = gradient_errors(results["summed"].gradients, expected["summed"].gradients)
    wrong = gradient_errors(results["not summed"].gradients, expected["summed"].gradients)
    watched = [name for name in right if any(part in name for part in REPLICATED)]
    assert len(watched) > 12
    for name in watched:
        assert right[name] <= 1e-4, name
        assert wrong[name] > 1e-2, f"{name} is right without the sum over the tensor-parallel ranks"
    assert results["not summed"].losses == results["summed"].losses  # nothing shows in the forward


@pytest.mark.parametrize("cut", range(len(CUTS)), ids=CUTS)
def test_a_stage_may_start_on_any_layer(pair, cut):
    results, expected = pair
    compare(results["cuts"][cut], expected["cuts"])


def test_a_data_rank_may_hold_only_padding(pair):
    results, expected = pair
    compare(results["empty"], expected["empty"])


def test_a_context_rank_may_hold_only_padding():
    model = parity_model(3)
    seed, expected = single(run_config(model, ParallelConfig(), 2, 0), ONE_SHORT_DOCUMENT, 2)
    parallel = ParallelConfig(context_parallel_size=4, expert_model_parallel_size=4)
    compare(distributed.run(4, four_ranks, run_config(model, parallel, 2, seed), timeout=300)[0], expected)
