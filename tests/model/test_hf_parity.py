"""One process against the Hugging Face class in fp32: logits, every gradient, every selection."""

from dataclasses import replace

import pytest
import torch

from megatron_glm.model.pack import PackRows
from tests.helpers.reference import (
    Outcome,
    copy_weights,
    forward,
    gradient_errors,
    hf_model,
    run_chunk,
    run_hf,
    single_chunk,
    small_config,
)

pytest.importorskip("transformers")

FULL, SHARED = "full", "shared"
CONFIGS = {
    "alternating": {},
    "all_full": dict(indexer_types=(FULL,) * 4),
    "one_full": dict(indexer_types=(FULL, SHARED, SHARED, SHARED)),
    "irregular": dict(num_hidden_layers=5, indexer_types=(FULL, FULL, SHARED, SHARED, FULL)),
    "tiny_topk": dict(index_topk=3),
    "topk_beyond_length": dict(index_topk=64),
    "two_groups": dict(n_group=2, topk_group=1, n_routed_experts=8, num_experts_per_tok=3),
    "four_groups": dict(n_group=4, topk_group=2, n_routed_experts=12, num_experts_per_tok=4),
    "unnormalised_weights": dict(norm_topk_prob=False, routed_scaling_factor=1.5),
    "odd_dims": dict(hidden_size=37, q_lora_rank=19, kv_lora_rank=13, qk_nope_head_dim=9, v_head_dim=11),
    "many_index_heads": dict(index_n_heads=32, index_head_dim=24, index_topk=5),
    "rope_is_whole_index_head": dict(qk_rope_head_dim=16, index_head_dim=16),
    "two_shared_experts": dict(n_shared_experts=2, num_attention_heads=3),
    "all_dense_mlp": dict(mlp_layer_types=("dense",) * 4, rms_norm_eps=1e-3),
    "large_theta": dict(rope_theta=8e6, num_hidden_layers=3, indexer_types=(FULL, SHARED, FULL)),
    "no_dense_mlp": dict(mlp_layer_types=("sparse",) * 4, num_experts_per_tok=3),
}
PACKS = {"single": (48,), "packed": (21, 1, 17, 4)}
TOTAL, GAP = 48, 1e-5


def batch(config, doc_lengths, seed):
    """Random tokens and labels of a pack; no label at a document's end, on some other rows and on padding."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, config.vocab_size, (TOTAL,), generator=generator)
    labels = tokens.roll(-1)
    ends = torch.tensor(doc_lengths).cumsum(0) - 1
    labels[ends] = -100
    labels[torch.rand(TOTAL, generator=generator) < 0.2] = -100
    labels[sum(doc_lengths) :] = -100
    return tokens, labels


def prepared(config, doc_lengths, dense_rows="auto"):
    """A seed whose selections are all clear by GAP, the reference's outcome, and our chunk with the same weights."""
    for seed in range(20):
        hf, chunk = hf_model(config, seed), single_chunk(config)
        copy_weights(hf, chunk)
        tokens, labels = batch(config, doc_lengths, seed)
        pack = PackRows.build(config, doc_lengths, TOTAL, dense_rows=dense_rows)
        ours = run_chunk(chunk, tokens, labels, pack)
        if ours.selections.gap >= GAP:
            return chunk, tokens, labels, pack, ours, run_hf(hf, tokens, labels, doc_lengths)
    raise AssertionError(f"no seed of 20 gives selections that are clear by {GAP}")


def hf_selections(reference: Outcome, doc_lengths: tuple[int, ...], layers: int) -> list[list[set[int]]]:
    """Selected keys of each full layer and row, as pack positions within the causal range."""
    selected: list[list[set[int]]] = [[] for _ in range(layers)]
    begin = 0
    for number, length in enumerate(doc_lengths):
        for layer in range(layers):
            chosen = reference.selections.topk[number * layers + layer]
            for row in range(length):
                selected[layer].append({begin + key for key in chosen[row].tolist() if key <= row})
        begin += length
    return selected


@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("name", CONFIGS)
def test_equals_hugging_face(name, pack):
    config, doc_lengths = small_config(**CONFIGS[name]), PACKS[pack]
    chunk, tokens, labels, _, ours, reference = prepared(config, doc_lengths)
    used = sum(doc_lengths)
    assert (ours.logits[:used] - reference.logits[:used]).abs().max() <= 2e-5
    assert (ours.loss - reference.loss).abs() <= 2e-5 * used
    errors = gradient_errors(ours.gradients, reference.gradients)
    assert max(errors.values()) <= 1e-4, sorted(errors.items(), key=lambda item: -item[1])[:5]

    # Every row through the sparse, absorbed path: the same again, and every row's selection can be compared.
    absorbed = run_chunk(chunk, tokens, labels, PackRows.build(config, doc_lengths, TOTAL, dense_rows="off"))
    assert (absorbed.logits[:used] - reference.logits[:used]).abs().max() <= 2e-5
    errors = gradient_errors(absorbed.gradients, reference.gradients)
    assert max(errors.values()) <= 1e-4, sorted(errors.items(), key=lambda item: -item[1])[:5]

    layers = config.indexer_types.count(FULL)
    expected = hf_selections(reference, doc_lengths, layers)
    for layer in range(layers):
        assert [set(row) - {-1} for row in absorbed.selections.topk[layer].tolist()] == expected[layer]
    n_moe = config.mlp_layer_types.count("sparse")
    for layer in range(n_moe):
        theirs = torch.cat(reference.selections.experts[layer::n_moe])
        assert torch.equal(ours.selections.experts[layer][:used].sort(1).values, theirs.sort(1).values)


def test_recomputation_keeps_losses_and_gradients_bit_for_bit():
    config = small_config()
    chunk, tokens, labels, pack, ours, _ = prepared(config, PACKS["packed"])
    for granularity in ("full", "selective"):
        chunk.recompute = granularity
        again = run_chunk(chunk, tokens, labels, pack)
        assert torch.equal(again.loss, ours.loss)
        assert all(torch.equal(again.gradients[name], ours.gradients[name]) for name in ours.gradients)


class Mutations:
    """The mistakes of the field, each made on purpose: the parity test must see it."""

    @staticmethod
    def half_split_rope(monkeypatch, chunk):
        def rotate_halves(x, cos, sin):
            shape = (cos.shape[0], *(1,) * (x.dim() - 2), cos.shape[1])
            cos, sin = cos.view(shape), sin.view(shape)
            first, second = x.chunk(2, dim=-1)
            x.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))

        monkeypatch.setattr("megatron_glm.model.indexer.rotate_", rotate_halves)

    @staticmethod
    def rope_on_the_last_dims_of_the_indexer(monkeypatch, chunk):
        from megatron_glm.model.indexer import Indexer, rotate_

        def rotate_last(self, x, cos, sin):
            rotate_(x[..., x.shape[-1] - self.rope_dim :], cos, sin)
            return x

        monkeypatch.setattr(Indexer, "_rotate", rotate_last)

    @staticmethod
    def no_relu(monkeypatch, chunk):
        monkeypatch.setattr(torch, "relu", lambda x: x)

    @staticmethod
    def unnormalised_query_into_the_indexer(monkeypatch, chunk):
        for layer in chunk.layers.values():
            indexer, project = layer.self_attn.indexer, layer.self_attn.q_a_proj
            if indexer is not None:
                original = indexer.forward
                monkeypatch.setattr(indexer, "forward", lambda x, qr, pack, f=original, p=project: f(x, p(x), pack))

    @staticmethod
    def no_causal_mask_before_the_top_k(monkeypatch, chunk):
        from megatron_glm.ops import indexer

        original = indexer.BACKENDS["torch"]

        def unmasked(iq, ik, w, start, end, k):
            chosen = original(iq, ik, w, torch.zeros_like(start), torch.full_like(end, ik.shape[0]), k)
            outside = (chosen < start.unsqueeze(1)) | (chosen >= end.unsqueeze(1))
            chosen = chosen.masked_fill(outside, ik.shape[0]).sort(1).values
            return chosen.masked_fill(chosen == ik.shape[0], -1)

        monkeypatch.setitem(indexer.BACKENDS, "torch", unmasked)

    @staticmethod
    def correction_bias_in_the_weights(monkeypatch, chunk):
        from megatron_glm.model.router import Router

        def leaking(self, x, *_):
            choice = torch.sigmoid(x @ self.weight.T) + self.e_score_correction_bias
            weights, ids = choice.topk(self.config.num_experts_per_tok, dim=-1)
            return ids, weights / weights.sum(-1, keepdim=True) * self.config.routed_scaling_factor, {}

        monkeypatch.setattr(Router, "forward", leaking)

    @staticmethod
    def latent_norm_with_the_eps_of_the_other_norms(monkeypatch, chunk):
        for layer in chunk.layers.values():
            monkeypatch.setattr(layer.self_attn.q_a_layernorm, "eps", 1e-5)
            monkeypatch.setattr(layer.self_attn.kv_a_layernorm, "eps", 1e-5)


@pytest.mark.parametrize("mutation", [name for name in vars(Mutations) if not name.startswith("_")])
def test_sees_the_mistake(mutation, monkeypatch):
    config = replace(small_config(), index_topk=6)
    chunk, tokens, labels, pack, ours, reference = prepared(config, (48,), dense_rows="off")
    assert (ours.logits - reference.logits).abs().max() <= 2e-5
    getattr(Mutations, mutation)(monkeypatch, chunk)
    wrong = forward(chunk, tokens, pack).hidden
    difference = (chunk.lm_head.logits(chunk.norm(wrong)) - reference.logits).abs().max()
    assert difference > (3e-5 if "eps" in mutation else 1e-2), f"{mutation} moves the logits by {difference} only"
