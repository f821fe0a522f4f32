"""The model in one process: selections, packing, precision, recomputation and routing, without any oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from megatron_glm.config import KernelConfig, RunConfig
from megatron_glm.model.glm import GLMChunk
from megatron_glm.model.init import initialize_weights
from megatron_glm.model.pack import PackRows
from megatron_glm.model.router import Router, update_router_biases
from megatron_glm.ops import indexer as indexer_ops
from megatron_glm.parallel.dispatch import make_dispatcher
from megatron_glm.parallel.pipeline.layout import Stage
from tests.helpers.reference import forward, recorded, single_chunk, single_groups, small_config

TOTAL = 48
LONG, PACKED = (45,), (21, 1, 17, 4)  # documents far longer than twice index_topk = 8; both leave padding


def built(config, recompute="none", seed=0):
    """One chunk whose weights, norms and router biases are all away from their trivial values."""
    chunk = single_chunk(config, recompute)
    initialize_weights(chunk, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in [*chunk.parameters(), *chunk.buffers()]:
            if tensor.dim() == 1 and tensor.is_floating_point():
                tensor += 0.1 * torch.randn(tensor.shape, generator=generator)
    return chunk


def in_bf16(chunk):
    """Parameters as mixed precision shows them to the forward; buffers stay fp32."""
    for parameter in chunk.parameters():
        parameter.data = parameter.data.bfloat16()
    return chunk


def batch(doc_lengths, seed=0, total=TOTAL):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 96, (total,), generator=generator)
    labels = tokens.roll(-1)
    labels[torch.tensor(doc_lengths).cumsum(0) - 1] = -100
    labels[sum(doc_lengths) :] = -100
    return tokens, labels


def run(chunk, tokens, labels, pack):
    chunk.zero_grad()
    out = forward(chunk, tokens, pack, labels)
    out.loss.backward()
    return out, {name: p.grad.clone() for name, p in chunk.named_parameters() if p.grad is not None}


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    different = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert not different, different


# ---- IndexShare


@pytest.mark.parametrize("recompute", ["full", "selective"])
@pytest.mark.parametrize("order", ["12", "21"])
def test_micro_batches_in_flight_keep_their_own_selection(recompute, order):
    """Forward 1, forward 2, then the backwards: with recomputation the bits are those without.

    Trainers that kept the selection on the layer or the config gave micro-batch 1 the keys of micro-batch 2.
    """
    config = small_config()
    gradients = []
    for granularity in ("none", recompute):
        chunk = built(config, granularity)
        losses = {}
        for number, lengths in (("1", LONG), ("2", PACKED)):
            tokens, labels = batch(lengths, seed=int(number))
            losses[number] = forward(chunk, tokens, PackRows.build(config, lengths, TOTAL), labels).loss
        for number in order:
            losses[number].backward()
        gradients.append({name: p.grad for name, p in chunk.named_parameters() if p.grad is not None})
    assert_same(*gradients)


def test_recomputation_never_selects_again():
    """Were a selection made again, rounding could flip it and the backward would belong to another function."""
    config = small_config()
    chunk = built(config, "full")
    with recorded() as seen:
        loss = forward(chunk, batch(LONG)[0], PackRows.build(config, LONG, TOTAL), batch(LONG)[1]).loss
        made = len(seen.topk)
        loss.backward()
        assert made == len(seen.topk) == config.indexer_types.count("full")


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_model_cut_anywhere_equals_the_whole(cut):
    """Layers 1 and 3 are shared: a chunk that starts with one takes the selection of the chunk before."""
    config = small_config()
    tokens, labels = batch(PACKED)
    pack = PackRows.build(config, PACKED, TOTAL)
    whole, expected = run(built(config), tokens, labels, pack)
    parts, cut_run = [], RunConfig(config, kernels=KernelConfig("torch"))
    for layers in (range(cut), range(cut, 4)):
        stage = Stage(tuple(layers), embedding=layers.start == 0, head=layers.stop == 4)
        parts.append(GLMChunk(cut_run, single_groups(), stage, make_dispatcher(cut_run, single_groups())))
        weights = built(config).state_dict()
        parts[-1].load_state_dict({name: weights[name] for name in parts[-1].state_dict()})
    first = forward(parts[0], tokens, pack)
    assert first.topk.dtype == torch.int32 and not first.topk.requires_grad
    hidden = first.hidden.detach().requires_grad_()
    second = forward(parts[1], tokens, pack, labels, {"hidden": hidden, "topk": first.topk})
    assert not second.hidden.requires_grad  # nor where it is the input, which FSDP2 would warn of
    second.loss.backward()
    first.hidden.backward(hidden.grad)
    torch.testing.assert_close(second.loss, whole.loss)
    gradients = {name: p.grad for part in parts for name, p in part.named_parameters() if p.grad is not None}
    assert gradients.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(gradients[name], expected[name], rtol=1e-4, atol=1e-5, msg=name)


def test_a_shared_layer_has_no_indexer_and_needs_none():
    config = replace(small_config(), num_nextn_predict_layers=1)
    chunk = single_chunk(config)
    with_indexer = {int(name.split(".")[1]) for name in chunk.state_dict() if ".indexer." in name}
    assert with_indexer == {0, 2, 4}  # the MTP layer has one of its own
    chunk.load_state_dict(built(config).state_dict())


def test_the_indexer_and_the_mtp_layer_are_frozen_but_held():
    chunk = built(replace(small_config(), num_nextn_predict_layers=1))
    frozen = {name for name, p in chunk.named_parameters() if not p.requires_grad}
    assert frozen == {n for n, _ in chunk.named_parameters() if ".indexer." in n or n.startswith("layers.4.")}
    tokens, labels = batch(LONG)
    _, gradients = run(chunk, tokens, labels, PackRows.build(chunk.config, LONG, TOTAL))
    assert gradients.keys() == {n for n, _ in chunk.named_parameters()} - frozen


# ---- packing


def test_documents_padding_and_position_in_the_pack_do_not_show():
    """Each document alone, or in a pack between others and padding of any content: same rows, losses add up."""
    config = small_config()
    chunk = built(config)
    tokens, labels = batch(PACKED)
    packed = forward(chunk, tokens, PackRows.build(config, PACKED, TOTAL), labels)
    tokens[sum(PACKED) :] = 95
    again = forward(chunk, tokens, PackRows.build(config, PACKED, TOTAL), labels)
    assert torch.equal(again.hidden[: sum(PACKED)], packed.hidden[: sum(PACKED)])
    begin, losses = 0, []
    for length in PACKED:
        rows = slice(begin, begin + length)
        alone = forward(chunk, tokens[rows], PackRows.build(config, (length,), length), labels[rows])
        torch.testing.assert_close(alone.hidden, packed.hidden[rows], rtol=1e-5, atol=1e-5)
        losses.append(alone.loss)
        begin += length
    torch.testing.assert_close(sum(losses), packed.loss)


def test_no_row_sees_a_later_token():
    """Also beyond twice index_topk, where a wrong mask before the top-k would show."""
    config = small_config()
    chunk = built(config)
    tokens, _ = batch(LONG)
    for dense_rows in ("auto", "off"):
        pack = PackRows.build(config, LONG, TOTAL, dense_rows=dense_rows)
        before = forward(chunk, tokens, pack).hidden
        changed = tokens.clone()
        changed[30:] = (changed[30:] + 1) % 96
        after = forward(chunk, changed, pack).hidden
        torch.testing.assert_close(after[:30], before[:30], rtol=1e-5, atol=1e-5)
        assert ((after - before)[30:45].abs().amax(1) > 0.1).all()


@pytest.mark.parametrize("lengths", [LONG, PACKED, (8, 9, 1, 30)])
def test_dense_rows_equal_sparse_rows(lengths):
    """Loss and gradients, in fp32 up to rounding: for short rows the sparse attention is the dense one."""
    config = small_config()
    tokens, labels = batch(lengths)
    outcomes = []
    for dense_rows in ("auto", "off"):
        pack = PackRows.build(config, lengths, TOTAL, dense_rows=dense_rows)
        outcomes.append(run(built(config), tokens, labels, pack))
    (auto, expected), (off, gradients) = outcomes
    torch.testing.assert_close(off.loss, auto.loss)
    assert gradients.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(gradients[name], expected[name], rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("dense_rows", ["auto", "off"])
def test_a_pack_of_padding_is_finite_and_every_gradient_is_zero(dense_rows):
    """Every trained parameter still has a gradient: on several ranks a missing one would hang the reduction."""
    config, attended = small_config(), []
    for recompute in ("none", "full"):
        chunk = built(config, recompute)
        pack = PackRows.build(config, (), TOTAL, dense_rows=dense_rows)
        for layer in chunk.layers.values():
            layer.self_attn.register_forward_hook(lambda module, args, out: attended.append(out[0]))
        tokens, _ = batch(LONG)
        out, gradients = run(chunk, tokens, torch.full((TOTAL,), -100), pack)
        assert out.loss == 0 and out.hidden.isfinite().all() and not any(rows.any() for rows in attended)
        assert gradients.keys() == {name for name, p in chunk.named_parameters() if p.requires_grad}
        assert not any(gradient.any() for gradient in gradients.values())
        assert not any(router.counts.any() for router in chunk.routers())


@pytest.mark.parametrize("lengths", [LONG, PACKED, (8, 3), ()])
def test_nothing_reads_memory_that_nobody_wrote(lengths):
    """Fresh memory is filled with NaN: unused slots, tail rows of the experts and padding reach no result."""
    config = small_config()
    chunk = built(config)
    tokens, labels = batch(lengths or LONG)
    labels[sum(lengths) :] = -100
    pack = PackRows.build(config, lengths, TOTAL)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        out, gradients = run(chunk, tokens, labels, pack)
    finally:
        torch.use_deterministic_algorithms(False)
    assert out.hidden.isfinite().all() and out.loss.isfinite()
    assert all(gradient.isfinite().all() for gradient in gradients.values())


# ---- norms and precision


def test_the_index_key_norm_is_a_layer_norm_with_bias_and_its_own_eps():
    """A small variance shows the eps, a large mean that the mean is taken off."""
    for eps in (1e-6, 1e-3):
        norm = built(replace(small_config(), indexer_norm_eps=eps)).layers["0"].self_attn.indexer.k_norm
        x = 3.0 + 1e-3 * torch.randn(32, 16, generator=torch.Generator().manual_seed(0)).double()
        centred = x - x.mean(-1, keepdim=True)
        expected = centred * (centred.square().mean(-1, keepdim=True) + eps).rsqrt() * norm.weight + norm.bias
        torch.testing.assert_close(norm(x.float()).double(), expected, rtol=0, atol=2e-3)
        assert norm.bias.abs().min() > 2e-3


def test_each_rms_norm_has_the_eps_of_its_field():
    config = replace(small_config(), rms_norm_eps=1e-2, latent_norm_eps=1e-4)
    layer = built(config).layers["0"]
    latent = ((layer.self_attn.q_a_layernorm, 1e-4), (layer.self_attn.kv_a_layernorm, 1e-4))
    for norm, eps in (*latent, (layer.input_layernorm, 1e-2), (layer.post_attention_layernorm, 1e-2)):
        x = 1e-2 * torch.randn(5, norm.weight.numel(), generator=torch.Generator().manual_seed(0))
        expected = norm.weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
        torch.testing.assert_close(norm(x), expected)
    assert small_config().latent_norm_eps == 1e-6 != small_config().rms_norm_eps


def test_an_rms_norm_casts_before_it_scales():
    norm = in_bf16(built(small_config())).norm
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + norm.eps)
    assert torch.equal(norm(x), norm.weight * normed.bfloat16())
    assert not torch.equal(norm(x), (norm.weight.float() * normed).bfloat16())


def test_head_weights_of_the_indexer_are_not_rounded(monkeypatch):
    """In bf16 they move the selection: here the rounded ones would choose other keys."""
    config = small_config()
    indexer = in_bf16(built(config)).layers["0"].self_attn.indexer
    pack = PackRows.build(config, (512,), 512)
    x, qr = (torch.randn(512, n, generator=torch.Generator().manual_seed(1)).bfloat16() for n in (32, 24))
    calls, select = [], indexer_ops.BACKENDS["torch"]
    monkeypatch.setitem(indexer_ops.BACKENDS, "torch", lambda *args: calls.append(args) or select(*args))
    chosen = indexer(x, qr, pack)[pack.sparse.shard_rows]
    ((iq, ik, w, *rest),) = calls
    product = F.linear(x.double(), indexer.weights_proj.weight.double())[pack.sparse.shard_rows]
    exact, rounded = product * (16 * 16) ** -0.5, indexer.weights_proj(x)[pack.sparse.shard_rows].float()
    assert w.dtype == torch.float32
    torch.testing.assert_close(w.double(), exact, rtol=1e-5, atol=1e-6)
    assert torch.equal(chosen, select(iq, ik, exact.float(), *rest))
    assert not torch.equal(chosen, select(iq, ik, rounded, *rest))


def test_bf16_is_finite_and_close_to_fp32():
    """Every key and expert chosen, so that rounding flips no choice: what is left is rounding."""
    config = small_config(index_topk=TOTAL, num_experts_per_tok=8, initializer_range=0.1)
    tokens, labels = batch(PACKED)
    for dense_rows in ("auto", "off"):
        pack = PackRows.build(config, PACKED, TOTAL, dense_rows=dense_rows)
        exact, expected = run(built(config), tokens, labels, pack)
        out, gradients = run(in_bf16(built(config)), tokens, labels, pack)
        assert out.hidden.dtype == torch.bfloat16 and out.loss.dtype == torch.float32
        assert abs(out.loss / exact.loss - 1) < 1e-2
        for name, gradient in gradients.items():
            error = (gradient.float() - expected[name]).norm() / expected[name].norm()
            assert gradient.dtype == torch.bfloat16 and error < 5e-2, f"{name}: {error}"
    sparse = small_config()
    _, gradients = run(in_bf16(built(sparse, "full")), tokens, labels, PackRows.build(sparse, PACKED, TOTAL))
    assert all(gradient.isfinite().all() for gradient in gradients.values())


# ---- router


def router_of(**changes):
    return built(small_config(**changes)).layers["1"].mlp.gate


def test_the_correction_bias_steers_the_choice_only():
    for changes in ({}, dict(norm_topk_prob=False, routed_scaling_factor=1.5), dict(n_group=2, topk_group=1)):
        router = router_of(**changes)
        config = router.config
        x = torch.randn(40, 32, generator=torch.Generator().manual_seed(0))
        ids, weights, _ = router(x, PackRows.build(config, (40,), 40))
        score = torch.sigmoid(x.double() @ router.weight.double().T)
        for row in range(40):
            choice = score[row] + router.e_score_correction_bias
            groups = choice.view(config.n_group, -1)
            best = groups.topk(2).values.sum(-1).argmax()
            allowed = range(8) if config.n_group == 1 else range(int(best) * 4, int(best) * 4 + 4)
            expected = sorted(allowed, key=lambda e: -choice[e].item())[:2]
            assert ids[row].tolist() == expected
            chosen = score[row, expected] * config.routed_scaling_factor
            if config.norm_topk_prob:
                chosen = chosen / score[row, expected].sum()
            torch.testing.assert_close(weights[row].double(), chosen, rtol=1e-5, atol=1e-6)


def test_routing_is_decided_in_fp32():
    """A difference far below bf16 decides, in the gate's product as well as in the fp32 bias."""
    with torch.no_grad():
        torch.set_default_dtype(torch.bfloat16)
        try:
            router = Router(small_config(), single_groups())
        finally:
            torch.set_default_dtype(torch.float32)
        assert router.e_score_correction_bias.dtype == torch.float32 and router.counts.dtype == torch.int64
        router.weight.zero_()
        router.e_score_correction_bias.zero_()[3] = 1e-5
        x, pack = torch.ones(2, 32, dtype=torch.bfloat16), PackRows.build(small_config(), (2,), 2)
        assert router(x, pack)[0][:, 0].tolist() == [3, 3]
        router.e_score_correction_bias.zero_()
        router.weight[:, 0] = 1.0
        router.weight[5, 1] = 2**-10  # 1 + 2^-10 is no bf16
        ids, weights, _ = router(x, pack)
        assert ids[:, 0].tolist() == [5, 5] and weights.dtype == torch.float32


def test_counts_are_exact_far_beyond_what_bf16_counts():
    router = router_of()
    router.count(torch.tensor([[0, 1]] * 2 + [[-1, -1]] * 5))
    router.count(torch.tensor([[0, 2]] * 1001))
    assert router.counts.dtype == torch.int64
    assert router.counts.tolist() == [1003, 2, 1001, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_tokens_are_counted_once_without_padding(recompute):
    config = small_config()
    chunk = built(config, recompute)
    pack = PackRows.build(config, PACKED, TOTAL)
    losses = []
    with recorded() as seen:
        for seed in (0, 1):
            tokens, labels = batch(PACKED, seed)
            losses.append(forward(chunk, tokens, pack, labels).loss)
    sum(losses).backward()
    chosen = [torch.cat([ids[: sum(PACKED)] for ids in seen.experts[layer::3]]) for layer in range(3)]
    assert [router.counts.tolist() for router in chunk.routers()] == [
        ids.flatten().bincount(minlength=8).tolist() for ids in chosen
    ]


def test_the_bias_moves_by_the_sign_of_whole_numbers():
    """bias += rate * sign(mean - count); a mean that is no whole number, and counts that differ by one in 2^40."""
    router, big = router_of(), 2**40
    for counts, signs in (
        ([3, 1, 2, 2, 2, 2, 2, 2], [-1, 1, 0, 0, 0, 0, 0, 0]),
        ([big + 1, *[big] * 7], [-1, 1, 1, 1, 1, 1, 1, 1]),
        ([0] * 8, [0] * 8),
    ):
        before = router.e_score_correction_bias.clone()
        router.counts.copy_(torch.tensor(counts))
        (total,) = update_router_biases([router], 0.25)
        assert total.dtype == torch.int64 and total.tolist() == counts
        assert torch.equal(router.e_score_correction_bias, before + 0.25 * torch.tensor(signs))
        assert not router.counts.any()
    router.counts[0] = 9
    update_router_biases([router], 0.0)
    assert torch.equal(router.e_score_correction_bias, before)
