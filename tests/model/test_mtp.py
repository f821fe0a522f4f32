"""MTP steps of one process against the Hugging Face modules: losses, every gradient, acceptance."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from megatron_glm.config import KernelConfig, LossConfig, OptimizerConfig, ParallelConfig, RunConfig, TrainConfig
from megatron_glm.data.packing import PackedBatch, ahead
from megatron_glm.training.engine import Engine, losses_of
from megatron_glm.training.initialize import build_chunks
from megatron_glm.training.optimizer import build_optimizer
from megatron_glm.training.step import train_step
from tests.helpers.reference import canonical, gradient_errors, hf_model, recorded, single_groups, small_config

pytest.importorskip("transformers")
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as hf_module  # noqa: E402

LAYERS, TOTAL, GAP = 3, 48, 1e-5
LENGTHS = (21, 1, 2, 3, 4, 10)  # with 3 steps documents of 1, 2, k and k + 1 tokens, too; 7 rows of padding


def config(shares: bool):
    model = small_config(
        num_hidden_layers=LAYERS,
        indexer_types=("full", "shared", "full"),
        mlp_layer_types=("dense", "sparse", "sparse"),
        num_nextn_predict_layers=1,
        index_share_for_mtp_iteration=shares,
        index_topk=6,
    )
    deeper = replace(
        model,
        num_hidden_layers=LAYERS + 1,
        indexer_types=(*model.indexer_types, "full"),
        mlp_layer_types=(*model.mlp_layer_types, "sparse"),
        num_nextn_predict_layers=0,
    )
    return model, deeper


def batch(vocabulary: int, seed: int, lengths: tuple[int, ...] = LENGTHS) -> PackedBatch:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, vocabulary, (TOTAL,), generator=generator)
    used = sum(lengths)
    labels = tokens.roll(-1)
    labels[torch.tensor(lengths, dtype=torch.int64).cumsum(0) - 1] = -100
    labels[used:] = -100
    mask = (labels != -100) & (torch.rand(TOTAL, generator=generator) < 0.8)
    position = torch.cat([*map(torch.arange, lengths), torch.zeros(TOTAL - used, dtype=torch.int64)])
    return PackedBatch(tokens, labels, mask, position, lengths, TOTAL - used)


class Fixed:
    """The keys of the first step in place of a step's own."""

    def __init__(self, *keys):
        self.keys = keys

    def update(self, *_, **__):
        return self.keys


class Reference(torch.nn.Module):
    """The model with one more layer, which is run as the MTP block, one document at a time."""

    def __init__(self, deeper, seed: int):
        super().__init__()
        self.hf = hf_model(deeper, seed)
        hidden, generator = deeper.hidden_size, torch.Generator().manual_seed(seed + 1)
        self.norms = torch.nn.ModuleDict(
            {name: hf_module.GlmMoeDsaRMSNorm(hidden, deeper.rms_norm_eps) for name in ("enorm", "hnorm", "last")}
        )
        self.eh_proj = torch.nn.Linear(2 * hidden, hidden, bias=False)
        with torch.no_grad():
            for norm in self.norms.values():
                norm.weight.copy_(1 + 0.1 * torch.randn(hidden, generator=generator))
            self.eh_proj.weight.copy_(torch.randn(hidden, 2 * hidden, generator=generator) * (2 * hidden) ** -0.5)
        self.deeper = deeper

    def named_canonical(self) -> dict[str, torch.nn.Parameter]:
        names = {canonical(name): p for name, p in [*self.hf.named_parameters(), *self.hf.named_buffers()]}
        at = f"layers.{LAYERS}"
        names |= {f"{at}.{name}.weight": self.norms[name].weight for name in ("enorm", "hnorm")}
        names |= {
            f"{at}.shared_head.norm.weight": self.norms["last"].weight,
            f"{at}.eh_proj.weight": self.eh_proj.weight,
        }
        return {name: value for name, value in names.items() if "inv_freq" not in name}

    def hidden(self, tokens, steps: int, shares: bool, shift: bool):
        """Hidden states behind the last norm of the trunk and of each step, of one document [1, n]."""
        base, n = self.hf.model, tokens.shape[1]
        position = torch.arange(n)[None]

        def rope(at):
            return base.rotary_emb(torch.zeros(1, 1, self.deeper.hidden_size), position_ids=at)

        causal = torch.full((n, n), torch.finfo(torch.float32).min).triu(1)[None, None]
        given = {"attention_mask": causal, "position_ids": position, "position_embeddings": rope(position)}
        x, chosen = base.embed_tokens(tokens), None
        for layer in base.layers[:LAYERS]:
            x, chosen = layer(x, prev_topk_indices=chosen, **given)
        found, block = [base.norm(x)], base.layers[LAYERS]
        attention, first, cache = block.self_attn, None, None
        for step in range(1, steps + 1):
            shifted = torch.zeros_like(tokens)
            shifted[:, : max(0, n - step)] = tokens[:, step:]
            pair = self.norms["enorm"](base.embed_tokens(shifted)), self.norms["hnorm"](found[-1])
            u = self.eh_proj(torch.cat(pair, -1))
            if step > 1 and shares:
                at = position + (step - 1 if shift else 0)
                given = {"attention_mask": causal, "position_ids": at, "position_embeddings": rope(at)}
                indexer, attention.indexer = attention.indexer, None
                out = block(u, prev_topk_indices=first, cache=cache, **given)[0]
                attention.indexer = indexer
            else:
                out, chosen = block(u, **given)
            if step == 1 and shares:
                first, latent = chosen, self.deeper.kv_lora_rank
                kv = attention.kv_a_proj_with_mqa(block.input_layernorm(u))
                keys = attention.kv_a_layernorm(kv[..., :latent]).view(1, 1, n, latent)
                rotated = kv[..., latent:].view(1, 1, n, -1)
                _, rotated = hf_module.apply_rotary_pos_emb_interleave(rotated, rotated, *rope(position))
                cache = Fixed(keys, rotated)
            found.append(self.norms["last"](out))
        return found


def ours(model, reference, losses: LossConfig, recompute="none"):
    parallel, kernels = ParallelConfig(recompute_granularity=recompute), KernelConfig("torch", loss_chunk_size=7)
    train = TrainConfig(global_batch_size=1, train_iters=1)
    run = RunConfig(model=model, parallel=parallel, kernels=kernels, losses=losses, train=train)
    [chunk] = build_chunks(run, single_groups())
    chunk.load_state_dict({name: value.detach() for name, value in reference.named_canonical().items()})
    return chunk, Engine(run, single_groups(), [chunk])


def run(engine, chunk, *packs: PackedBatch):
    """All forwards, then all backwards: losses of the last pack, gradients of all, and how clear the choices were."""
    chunk.zero_grad()
    with recorded() as seen:
        outcomes = [chunk(engine._micro_batch(packed, {}), {})[1] for packed in packs]
    for found in outcomes:
        torch.autograd.backward([loss for loss in found.values() if loss.requires_grad])
    gradients = {name: p.grad.clone() for name, p in chunk.named_parameters() if p.grad is not None}
    return {name: value.item() for name, value in outcomes[-1].items()}, gradients, seen.gap


def clear_case(shares: bool, losses: LossConfig):
    """Reference, pack, our chunk and engine, and what `run` gives, with the first seed of clear choices."""
    model, deeper = config(shares)
    for seed in range(20):
        reference, packed = Reference(deeper, seed), batch(model.vocab_size, seed)
        chunk, engine = ours(model, reference, losses)
        outcome = run(engine, chunk, packed)
        if outcome[2] >= GAP:
            return reference, packed, chunk, engine, outcome
    raise AssertionError(f"no seed of 20 gives selections that are clear by {GAP}")


@pytest.mark.parametrize(
    "steps, shares, shift", [(1, False, True), (1, True, True), (3, False, True), (3, True, True), (3, True, False)]
)
def test_steps_equal_the_hugging_face_modules(steps, shares, shift):
    losses = LossConfig(mtp_num_steps=steps, mtp_loss_scaling_factor=0.3, mtp_unshifted_queries=not shift)
    reference, packed, _, _, (found, gradients, _) = clear_case(shares, losses)
    labels = packed.labels.masked_fill(~packed.loss_mask, -100)
    sums, hits, begin = [0.0] * (steps + 1), [0] * steps, 0
    for length in LENGTHS:
        rows = slice(begin, begin + length)
        hidden = reference.hidden(packed.tokens[rows][None], steps, shares, shift)
        logits = [reference.hf.lm_head(state)[0] for state in hidden]
        for step in range(steps + 1):
            wanted = torch.full((length,), -100)
            wanted[: max(0, length - step)] = labels[rows][step:]
            sums[step] = sums[step] + F.cross_entropy(logits[step], wanted, reduction="sum", ignore_index=-100)
            if step:
                valid = (wanted != -100).nonzero().flatten()
                hits[step - 1] += (logits[step].argmax(-1)[valid] == logits[0].argmax(-1)[valid + step]).sum().item()
        begin += length
    assert found["lm"] == pytest.approx(sums[0].item(), rel=1e-6)
    for step in range(1, steps + 1):
        assert found[f"mtp_{step}"] == pytest.approx(float(torch.as_tensor(sums[step]).detach()), rel=1e-6), step
        assert found[f"accepted_{step}"] == hits[step - 1]
    (sums[0] + 0.3 / steps * sum(sums[1:])).backward()
    expected = {n: p.grad for n, p in reference.named_canonical().items() if getattr(p, "grad", None) is not None}
    expected = {name: gradient for name, gradient in expected.items() if ".indexer." not in name}
    errors = gradient_errors(gradients, expected)
    assert max(errors.values()) <= 5e-6, sorted(errors.items(), key=lambda item: -item[1])[:5]


class EngineCache:
    """The keys of a sequence as an engine holds them: each forward appends those of its rows, at their positions."""

    def __init__(self, *tensors):
        self.tensors = list(tensors)  # latents, rotated keys, keys of the indexer

    def upto(self, rows: int) -> EngineCache:
        latents, rotated, indexed = self.tensors
        return EngineCache(latents[:, :, :rows], rotated[:, :, :rows], indexed[:, :rows])

    def update(self, latents, rotated, *_, **__):
        given = zip(self.tensors or [latents[:, :, :0], rotated[:, :, :0]], (latents, rotated), strict=False)
        self.tensors[:2] = [torch.cat(pair, 2) for pair in given]
        return self.tensors[0], self.tensors[1]

    def update_indexer(self, keys, _):
        self.tensors[2:] = [torch.cat([*self.tensors[2:], keys], 1)]
        return self.tensors[2]


def drafted(reference: Reference, tokens: torch.Tensor, steps: int) -> dict[tuple[int, int], torch.Tensor]:
    """Hidden states by (step, row) of one document as an engine drafts that shares keys: one row at a time.

    Each verified row runs step 1, which writes its key and selects among the keys so far. Its drafts follow: each
    writes a key of its own one position further, and attends to what its row's step 1 has selected.
    """
    base, n, width = reference.hf.model, len(tokens), reference.deeper.hidden_size
    block, attention = base.layers[LAYERS], base.layers[LAYERS].self_attn
    indexer, cache, found = attention.indexer, EngineCache(), {}
    trunk = reference.hidden(tokens[None], 0, True, True)[0]

    def run_row(previous, row, step, cache, chosen):
        at = torch.tensor([[row + step - 1]])
        embedded = base.embed_tokens(tokens[row + step].view(1, 1))
        u = reference.eh_proj(torch.cat([reference.norms["enorm"](embedded), reference.norms["hnorm"](previous)], -1))
        given = {"position_ids": at, "position_embeddings": base.rotary_emb(torch.zeros(1, 1, width), position_ids=at)}
        mask = torch.zeros(1, 1, 1, row + step)  # the keys that are in the cache then: the row's own is the last
        attention.indexer = indexer if chosen is None else None
        out, chosen = block(u, attention_mask=mask, prev_topk_indices=chosen, cache=cache, **given)
        attention.indexer = indexer
        return reference.norms["last"](out), chosen

    for row in range(n - 1):
        hidden, chosen = run_row(trunk[:, row : row + 1], row, 1, cache, None)
        found[1, row], drafts = hidden, cache.upto(row + 1)
        for step in range(2, min(steps, n - 1 - row) + 1):
            hidden, _ = run_row(hidden, row, step, drafts, chosen)
            found[step, row] = hidden
    return found


def test_three_sharing_steps_are_the_drafts_of_an_engine():
    reference, packed, chunk, engine, _ = clear_case(True, LossConfig(3))
    seen = []
    hook = chunk.lm_head.register_forward_pre_hook(lambda _, given: seen.extend(each.hidden for each in given[0]))
    with torch.no_grad():
        chunk(engine._micro_batch(packed, {}), {})
        hook.remove()
        begin, compared = 0, 0
        for length in LENGTHS:
            for (step, row), hidden in drafted(reference, packed.tokens[begin : begin + length], 3).items():
                torch.testing.assert_close(seen[step][begin + row], hidden[0, 0], rtol=1e-5, atol=1e-5)
                compared += 1
            begin += length
    assert compared == sum(max(0, length - step) for length in LENGTHS for step in (1, 2, 3))


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recomputation_gives_the_same_bits(shares, recompute):
    """Two forwards before the backwards, of other documents: nothing of one may be kept where the other finds it."""
    model, deeper = config(shares)
    losses = LossConfig(mtp_num_steps=3)
    results = []
    for granularity in ("none", recompute):
        chunk, engine = ours(model, Reference(deeper, 0), losses, granularity)
        packs = batch(model.vocab_size, 0), batch(model.vocab_size, 1, (9, 30))
        results.append(run(engine, chunk, *packs))
    (plain, gradients, _), (again, repeated, _) = results
    assert plain == again and all(torch.equal(gradients[name], repeated[name]) for name in gradients)


def test_detached_steps_and_a_weight_of_zero_leave_the_trunk_as_it_is_without():
    model, deeper = config(True)
    packed, reference = batch(model.vocab_size, 0), Reference(deeper, 0)

    def trunk(losses):
        chunk, engine = ours(model, reference, losses)
        found, gradients, _ = run(engine, chunk, packed)
        layer = {name for name in gradients if name.startswith(f"layers.{LAYERS}.")}
        return found, {name: gradients[name] for name in gradients.keys() - layer}, {n: gradients[n] for n in layer}

    plain, expected, none = trunk(LossConfig())
    assert list(plain) == ["lm"] and not none
    detached = LossConfig(3, mtp_detach=True), LossConfig(3, mtp_loss="tv")
    for losses in (*detached, LossConfig(3, mtp_loss_scaling_factor=0.0)):
        found, gradients, mtp = trunk(losses)
        assert found["lm"] == plain["lm"] and found["mtp_3"] > 0 and mtp
        assert gradients.keys() == expected.keys()
        assert all(torch.equal(gradients[name], expected[name]) for name in expected)
        assert any(gradient.any() for gradient in mtp.values()) == (losses in detached)
    _, alone, mtp = trunk(LossConfig(2, train_only="mtp"))
    assert not alone and any(gradient.any() for gradient in mtp.values())


def test_a_pack_of_padding_alone_has_losses_and_gradients_of_zero():
    model, deeper = config(True)
    chunk, engine = ours(model, Reference(deeper, 0), LossConfig(3))
    found, gradients, _ = run(engine, chunk, batch(model.vocab_size, 0, ()))
    assert len(found) == 7 and not any(found.values())
    assert not any(gradient.any() for gradient in gradients.values())


@pytest.mark.parametrize("loss", ["ce", "tv"])
def test_steps_learn_the_text_or_to_be_accepted(loss):
    """The text is random, as is the trunk: who learns the one does not learn the other."""
    model, deeper = config(True)
    chunk, engine = ours(model, Reference(deeper, 0), LossConfig(2, mtp_loss=loss, train_only="mtp"))
    engine.config = replace(engine.config, optimizer=OptimizerConfig(moe_router_bias_update_rate=1e-3))
    drawn = {name: buffer.clone() for name, buffer in chunk.named_buffers()}
    optimizer = build_optimizer(engine.config.optimizer, [chunk])
    first, *_, last = [train_step(engine, optimizer, [batch(model.vocab_size, 0)], 1e-2).losses for _ in range(25)]
    assert first["lm"] == last["lm"]
    biases = {name: buffer for name, buffer in chunk.named_buffers() if "e_score" in name}
    moved = {name for name, buffer in biases.items() if not torch.equal(buffer, drawn[name])}
    assert len(biases) == 3 and moved == {f"layers.{LAYERS}.mlp.gate.e_score_correction_bias"}
    for step in (1, 2):
        assert last[f"mtp_{step}"] < 0.8 * first[f"mtp_{step}"]
        assert (last[f"accepted_{step}"] > first[f"accepted_{step}"] + 0.3) == (loss == "tv")


def test_tokens_and_labels_ahead_stay_in_their_document_and_mask():
    packed = batch(50, 0)
    for step in (1, 2, 3, 21):
        tokens, labels, there = ahead(packed, step)
        begin = 0
        for length in LENGTHS:
            for i in range(length):
                row, inside = begin + i, i + step < length
                assert there[row] == inside and tokens[row] == (packed.tokens[row + step] if inside else 0)
                target = row + step
                counted = inside and bool(packed.loss_mask[target])
                assert labels[row] == (packed.labels[target] if counted else -100)
            begin += length
        assert not there[begin:].any() and (labels[begin:] == -100).all()
    counts = losses_of(RunConfig(model=config(True)[0], losses=LossConfig(2)))
    assert {name: count(packed) for name, count in counts.items()} == {
        "lm": int(packed.loss_mask.sum()),
        **{f"{kind}_{k}": int((ahead(packed, k)[1] >= 0).sum()) for k in (1, 2) for kind in ("mtp", "accepted")},
    }


def test_flags_that_do_nothing_are_refused():
    for losses, words in (
        (LossConfig(mtp_num_steps=2), "needs a model with one MTP layer, it has 0"),
        (LossConfig(mtp_loss="tv"), "--mtp-loss needs --mtp-num-steps above 0"),
        (LossConfig(mtp_detach=True), "--mtp-detach needs --mtp-num-steps above 0"),
        (LossConfig(train_only="mtp"), "--train-only needs --mtp-num-steps above 0"),
        (LossConfig(mtp_loss_scaling_factor=0.3), "--mtp-loss-scaling-factor needs --mtp-num-steps above 0"),
    ):
        with pytest.raises(ValueError, match=words):
            losses.check(0)
