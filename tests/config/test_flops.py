"""FLOPs against sums over single rows, and against the figures of the released model."""

from dataclasses import replace

import pytest

from megatron_glm.config import IndexerConfig, LossConfig, ModelConfig
from megatron_glm.config.flops import attended_keys, causal_keys, forward_flops, head_flops, training_flops


def by_rows(config: ModelConfig, lengths: list[int]) -> tuple[int, int]:
    """The same count, row by row and matrix by matrix."""
    trained = indexers = 0
    h, heads, f = config.hidden_size, config.num_attention_heads, config.moe_intermediate_size
    qk, v, nope, rope = config.qk_head_dim, config.v_head_dim, config.qk_nope_head_dim, config.qk_rope_head_dim
    matrices = [(h, config.q_lora_rank), (config.q_lora_rank, heads * qk), (h, config.kv_lora_rank + rope)]
    matrices += [(config.kv_lora_rank, heads * (nope + v)), (heads * v, h)]
    for length in lengths:
        for position in range(length):
            for layer in range(config.num_hidden_layers):
                trained += sum(2 * rows * columns for rows, columns in matrices)
                trained += 2 * heads * (qk + v) * min(position + 1, config.index_topk)
                if config.mlp_layer_types[layer] == "dense":
                    trained += 3 * 2 * h * config.intermediate_size
                else:
                    trained += (config.num_experts_per_tok + config.n_shared_experts) * 3 * 2 * h * f
                    trained += 2 * h * config.n_routed_experts
                if config.indexer_types[layer] == "full":
                    indexers += 2 * config.index_n_heads * config.index_head_dim * (position + 1)
            trained += 2 * h * config.vocab_size
    return trained, indexers


@pytest.mark.parametrize("lengths", [[1], [63, 64, 65], [200, 3, 0, 129]])
def test_equals_the_sum_over_rows(lengths):
    config = ModelConfig.from_hf("glm5.2-tiny")
    assert forward_flops(config, lengths) == by_rows(config, lengths)
    trained, indexers = by_rows(config, lengths)
    assert training_flops(config, lengths) == 3 * trained + indexers  # the frozen indexers have no backward


def test_only_full_layers_bill_an_indexer():
    config, every = ModelConfig.from_hf("glm5.2"), ModelConfig.from_hf("glm5.2", indexer_types=("full",) * 78)
    length = 10_000
    assert forward_flops(config, [length])[1] == 21 * 2 * 32 * 128 * causal_keys(length)
    assert forward_flops(every, [length])[1] == 78 * 2 * 32 * 128 * causal_keys(length)


def test_long_documents_are_far_below_dense_attention():
    config = ModelConfig.from_hf("glm5.2")
    length = 131_072
    sparse = attended_keys(length, config.index_topk)
    assert sparse == sum(min(p + 1, config.index_topk) for p in range(length))
    assert causal_keys(length) > 30 * sparse
    dense = ModelConfig.from_hf("glm5.2", index_topk=length)
    assert forward_flops(dense, [length])[0] > 2.5 * forward_flops(config, [length])[0]


def test_a_pack_costs_what_its_documents_cost():
    config = ModelConfig.from_hf("glm5.2")
    single = [training_flops(config, [length]) for length in (5000, 300, 2048)]
    assert training_flops(config, [5000, 300, 2048]) == sum(single)
    assert training_flops(config, []) == 0


def test_released_model_costs_two_flops_per_active_weight():
    """At one token the attention core is negligible: 2 FLOPs for each of about 40 G active weights."""
    trained, _ = forward_flops(ModelConfig.from_hf("glm5.2"), [1])
    assert 2 * 38e9 < trained < 2 * 41e9


def test_the_indexers_training_costs_what_its_pairs_do():
    config, length = ModelConfig.from_hf("glm5.2"), 8192
    base, pairs = training_flops(config, [length]), attended_keys(length, 2048)
    more = training_flops(config, [length], indexer=IndexerConfig("sparse")) - base
    projections = 3 * length * 2 * (4096 * 2048 + 128 * 6144 + 32 * 6144)
    assert more == 21 * (3 * 2 * 32 * 128 * pairs + projections) + 78 * 2 * 64 * 256 * pairs
    own = training_flops(config, [length], indexer=IndexerConfig("sparse", "own")) - base
    assert more - own == 57 * 2 * 64 * 256 * pairs
    for shares, selections in ((True, [1]), (False, [1, 2, 3])):  # of three MTP steps
        model = replace(config, index_share_for_mtp_iteration=shares)
        with_mtp, lengths = LossConfig(3), [length - step for step in selections]
        mtp = training_flops(model, [length], with_mtp, IndexerConfig("sparse"))
        mtp -= training_flops(model, [length], with_mtp)
        pairs_of_steps, rows = sum(attended_keys(n, 2048) for n in lengths), sum(lengths)
        of_mtp = (3 * 2 * 32 * 128 + 2 * 64 * 256) * pairs_of_steps + projections // length * rows
        assert mtp - more == of_mtp
    dense = training_flops(config, [length], dense=True)
    warm = training_flops(config, [length], indexer=IndexerConfig("warmup"), dense=True)
    assert (
        dense > base and warm < dense and training_flops(config, [], indexer=IndexerConfig("warmup"), dense=True) == 0
    )


def test_heads_of_detached_steps_have_no_gradient_of_the_weight():
    config = ModelConfig.from_hf("glm5.2")
    whole = training_flops(config, [100, 2], LossConfig(3))
    less = head_flops(config, 99 + 98 + 97 + 1)
    for losses in (LossConfig(3, mtp_loss="tv"), LossConfig(3, mtp_detach=True)):
        assert training_flops(config, [100, 2], losses) == whole - less
