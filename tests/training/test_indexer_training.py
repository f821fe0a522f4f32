"""The indexer's training in one process: value and gradients against an independent computation, and what it leaves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_glm.config import IndexerConfig, KernelConfig, LossConfig, ParallelConfig, RunConfig
from megatron_glm.model import indexer_training
from megatron_glm.model.glm import GLMChunk
from megatron_glm.model.micro_batch import MicroBatch, MtpInput
from megatron_glm.model.pack import PackRows
from megatron_glm.ops.indexer_loss import recalled
from megatron_glm.ops.rope import apply_rope
from megatron_glm.parallel.dispatch import make_dispatcher
from megatron_glm.parallel.pipeline.layout import Stage
from tests.helpers.reference import single_groups, small_config

TOTAL, LENGTHS = 40, (21, 1, 12)  # and six rows of padding; index_topk is 8
CONFIG = small_config(num_hidden_layers=5, indexer_types=("full", "shared", "shared", "full", "shared"))
SPARSE, WARMUP = IndexerConfig("sparse"), IndexerConfig("warmup")


def make_chunk(training: IndexerConfig, recompute: str = "none", config=CONFIG, mtp_steps: int = 0) -> GLMChunk:
    parallel, kernels = ParallelConfig(recompute_granularity=recompute), KernelConfig("torch", loss_chunk_size=16)
    run = RunConfig(config, parallel=parallel, kernels=kernels, indexer=training, losses=LossConfig(mtp_steps))
    stage = Stage(tuple(range(config.num_hidden_layers)), embedding=True, head=True, mtp=True)
    chunk = GLMChunk(run, single_groups(), stage, make_dispatcher(run, single_groups()))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in [*chunk.named_parameters(), *chunk.named_buffers()]:
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * (0.2 if tensor.dim() > 1 else 0.1))
            tensor += name.endswith("norm.weight")
    return chunk


def run(chunk: GLMChunk, lengths=LENGTHS, dense_rows: str | None = None, config=CONFIG) -> dict[str, Tensor]:
    """Gradients by name, and the losses as "lm" and "indexer"."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, config.vocab_size, (TOTAL,), generator=generator)
    dense_rows = dense_rows or ("all" if warming(chunk) else "auto")
    pack = PackRows.build(config, lengths, TOTAL, dense_rows=dense_rows)
    labels = torch.where(torch.arange(TOTAL) < sum(lengths), tokens.roll(-1), -100)
    chunk.zero_grad()
    _, losses = chunk(MicroBatch(tokens, labels, pack, {"lm": 0.1, "indexer": 0.5}), {})
    torch.autograd.backward([loss for loss in losses.values() if loss.requires_grad])
    found = {name: p.grad.clone() for name, p in chunk.named_parameters() if p.grad is not None}
    return found | {name: loss.detach() for name, loss in losses.items()}


def run_mtp(chunk: GLMChunk, steps: int) -> dict[str, Tensor]:
    """`run` with MTP steps: step k has the token k further, and its rows without one are padding."""
    tokens = torch.randint(0, CONFIG.vocab_size, (TOTAL,), generator=torch.Generator().manual_seed(1))
    pack, ends = PackRows.build(CONFIG, LENGTHS, TOTAL), torch.tensor(LENGTHS).cumsum(0)
    end = ends[torch.searchsorted(ends, torch.arange(TOTAL), right=True).clamp(max=len(ends) - 1)]
    inputs = []
    for step in range(1, 1 + steps):
        there = torch.arange(TOTAL) + step < end
        labels = torch.where(torch.arange(TOTAL) + step + 1 < end, tokens.roll(-step - 1), -100)
        inputs.append(MtpInput(torch.where(there, tokens.roll(-step), 0), labels, pack.mtp_step(there, None)))
    chunk.zero_grad()
    labels = torch.where(torch.arange(TOTAL) < sum(LENGTHS), tokens.roll(-1), -100)
    _, losses = chunk(MicroBatch(tokens, labels, pack, {"lm": 0.1, "indexer": 0.5}, tuple(inputs)), {})
    torch.autograd.backward([loss for loss in losses.values() if loss.requires_grad])
    found = {name: p.grad.clone() for name, p in chunk.named_parameters() if p.grad is not None}
    return found | {name: loss.detach() for name, loss in losses.items()}


def warming(chunk: GLMChunk) -> bool:
    teaching = chunk.layers["0"].self_attn.teaching
    return teaching is not None and teaching.config.indexer_training == "warmup"


def brute_force(training: IndexerConfig, selected: list[Tensor] | None) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the indexers by autograd in fp64, from each layer's input as the model computes it."""
    chunk, inputs = make_chunk(IndexerConfig()), {}
    for i, layer in chunk.layers.items():
        layer.input_layernorm.register_forward_hook(lambda m, a, out, i=i: inputs.__setitem__(int(i), out.detach()))
    run(chunk, dense_rows="all" if training.indexer_training == "warmup" else "auto")
    chunk.double()
    rope = PackRows.build(CONFIG, LENGTHS, TOTAL).rope
    start = torch.tensor([sum(LENGTHS[:i]) for i, n in enumerate(LENGTHS) for _ in range(n)] + [0] * 6)
    end = torch.cat((torch.arange(1, 35), torch.zeros(6, dtype=torch.int64)))
    position = torch.arange(TOTAL)
    causal = (position >= start[:, None]) & (position < end[:, None])
    loss, leaves, full = torch.zeros((), dtype=torch.float64), {}, 0
    for i in range(CONFIG.num_hidden_layers):
        attention, x = chunk.layers[str(i)].self_attn, inputs[i].double()
        if attention.indexer is not None:
            full, mask = i, causal
            indexer = attention.indexer
            leaves |= {f"layers.{i}.self_attn.indexer.{n}": p.requires_grad_() for n, p in indexer.named_parameters()}
            qr = attention.q_a_layernorm(attention.q_a_proj(x)).detach()
            iq = indexer.wq_b(qr).view(TOTAL, CONFIG.index_n_heads, CONFIG.index_head_dim)
            ik = torch.nn.functional.layer_norm(
                indexer.wk(x), (CONFIG.index_head_dim,), indexer.k_norm.weight, indexer.k_norm.bias, 1e-6
            )
            r = CONFIG.qk_rope_head_dim
            iq, ik = (torch.cat((apply_rope(y[..., :r], *rope).double(), y[..., r:]), -1) for y in (iq, ik))
            w = indexer.weights_proj(x) * CONFIG.index_n_heads**-0.5
            products = torch.einsum("thd,ud->thu", iq, ik) * CONFIG.index_head_dim**-0.5
            scores = torch.einsum("th,thu->tu", w, torch.relu(products))
            if selected is not None:
                index = selected.pop(0)
                chosen = torch.zeros(TOTAL, TOTAL, dtype=torch.bool).scatter_(1, index.clamp(min=0).long(), index >= 0)
                many = (end - start > CONFIG.index_topk)[:, None]
                mask = torch.where(many, chosen, causal)
                mask = mask & many if training.indexer_loss_rows == "sparse" else mask
            log_q = torch.where(mask, scores.masked_fill(~mask, -1e30).log_softmax(-1), 0.0)
        if not training.taught_by(CONFIG, i):
            continue
        qr = attention.q_a_layernorm(attention.q_a_proj(x))
        q = attention.q_b_proj(qr).view(TOTAL, attention.heads, -1)
        kv_b = attention.kv_b_proj.weight.view(attention.heads, -1, attention.latent)[:, : attention.nope]
        c, k_rope = attention.kv_a_proj_with_mqa(x).split((attention.latent, attention.rope), -1)
        k_nope = torch.einsum("uc,hnc->uhn", attention.kv_a_layernorm(c), kv_b)
        q_nope, q_rope = q.split((attention.nope, attention.rope), -1)
        q_rope, k_rope = apply_rope(q_rope, *rope).double(), apply_rope(k_rope, *rope).double()
        s = torch.einsum("thn,uhn->thu", q_nope, k_nope) + torch.einsum("thr,ur->thu", q_rope, k_rope)
        p = (s * attention.scale).masked_fill(~mask[:, None], -torch.inf).softmax(-1).nan_to_num(0).mean(1).detach()
        kl = torch.where(mask, torch.special.xlogy(p, p) - p * log_q, 0.0).sum()
        loss = loss + 0.5 * training.taught_by(CONFIG, i) * kl
    assert full == 3
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    return loss.detach(), dict(zip(leaves, gradients, strict=True))


def selections(training: IndexerConfig) -> list[Tensor]:
    """[TOTAL, K] of each layer with an indexer; the sparse rows' are enough."""
    chunk, found = make_chunk(training), []
    for i in ("0", "3"):
        indexer = chunk.layers[i].self_attn.indexer
        select = indexer.select
        indexer.select = lambda *a, select=select: found.append(select(*a)) or found[-1]
    run(chunk)
    return found


CASES = {
    "sparse, served": SPARSE,
    "sparse, own": IndexerConfig("sparse", "own"),
    "sparse, sparse rows": IndexerConfig("sparse", indexer_loss_rows="sparse"),
    "warmup, served": WARMUP,
    "warmup, own": IndexerConfig("warmup", "own"),
}


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_those_of_brute_force(case):
    training = replace(CASES[case], dsa_indexer_loss_coeff=0.1)
    found = run(make_chunk(training))
    selected = selections(training) if training.indexer_training == "sparse" else None
    loss, gradients = brute_force(training, selected)
    assert found["indexer"].item() == pytest.approx(loss.item(), rel=2e-6)
    for name, reference in gradients.items():
        assert (found[name].double() - 0.1 * reference).norm() <= 1e-5 * 0.1 * reference.norm() + 1e-9, name
        assert reference.norm() > 0
    others = {name for name in found if "indexer" not in name} - {"lm", "recall"}
    assert bool(others) == (training.indexer_training == "sparse")


def test_the_trunks_gradients_do_not_see_the_coefficient():
    off = run(make_chunk(IndexerConfig()))
    zero, some = (run(make_chunk(replace(SPARSE, dsa_indexer_loss_coeff=c))) for c in (0.0, 1e-3))
    assert off.keys() == {name for name in some if "indexer" not in name}
    assert all(torch.equal(off[name], some[name]) and torch.equal(off[name], zero[name]) for name in off)
    indexers = [name for name in some if ".indexer." in name]
    assert len(indexers) == 10 and not any(zero[name].any() for name in indexers)
    assert all(some[name].any() for name in indexers) and torch.equal(zero["indexer"], some["indexer"])


@pytest.mark.parametrize("granularity", ["full", "selective"])
@pytest.mark.parametrize("teacher", ["served", "own"])
def test_recomputation_changes_no_bit(granularity, teacher):
    training = IndexerConfig("sparse", teacher)
    plain, again = run(make_chunk(training)), run(make_chunk(training, granularity))
    assert plain.keys() == again.keys() and all(torch.equal(plain[name], again[name]) for name in plain)


@pytest.mark.parametrize("granularity", ["full", "selective"])
def test_micro_batches_under_way_together_keep_their_own_students(granularity):
    """F1 F2 B1 B2, as in a pipeline: the bits of no recomputation."""

    def together(recompute: str) -> dict[str, Tensor]:
        chunk, losses = make_chunk(SPARSE, recompute), []
        for seed, lengths in ((1, LENGTHS), (2, (9, 30))):
            tokens = torch.randint(0, CONFIG.vocab_size, (TOTAL,), generator=torch.Generator().manual_seed(seed))
            batch = MicroBatch(tokens, tokens, PackRows.build(CONFIG, lengths, TOTAL), {"lm": 0.1, "indexer": 0.5})
            losses.append(chunk(batch, {})[1])
        for found in losses:
            torch.autograd.backward(list(found.values()))
        return {name: p.grad for name, p in chunk.named_parameters() if p.grad is not None}

    plain, again = together("none"), together(granularity)
    assert plain.keys() == again.keys() and all(torch.equal(plain[name], again[name]) for name in plain)


def test_served_is_the_mean_of_the_layers_own_losses(monkeypatch):
    """Each layer alone as the teacher of its group, in turn: the mean of the gradients is that of them together."""
    served = run(make_chunk(SPARSE))
    groups = {0: (0, 1, 2), 3: (3, 4)}
    total = {name: torch.zeros_like(value) for name, value in served.items() if ".indexer." in name}
    for full, members in groups.items():
        for teacher in members:
            only = staticmethod(lambda self, model, layer, teacher=teacher: float(layer == teacher))
            monkeypatch.setattr(IndexerConfig, "taught_by", only.__func__)
            one = run(make_chunk(SPARSE))
            for name in total:
                if name.startswith(f"layers.{full}."):
                    total[name] += one[name] / len(members)
    for name, value in total.items():
        assert (value - served[name]).norm() <= 1e-6 * served[name].norm(), name


def test_a_selection_of_all_keys_is_warmup():
    config = replace(CONFIG, index_topk=TOTAL)
    sparse, warm = (run(make_chunk(t, config=config), config=config) for t in (SPARSE, WARMUP))
    assert sparse["indexer"].item() == pytest.approx(warm["indexer"].item(), rel=1e-6)
    for name in (name for name in warm if ".indexer." in name):
        assert (sparse[name] - warm[name]).norm() <= 1e-5 * warm[name].norm(), name


@pytest.mark.parametrize("training", [SPARSE, WARMUP], ids=["sparse", "warmup"])
def test_a_pack_of_padding_has_no_loss_and_zero_gradients(training):
    found = run(make_chunk(training), lengths=())
    assert found["indexer"] == 0 and sum(".indexer." in name for name in found) == 10
    assert not any(value.any() for value in found.values())


def test_short_documents_teach_without_a_selection():
    found = run(make_chunk(SPARSE), lengths=(8, 5, 8))
    assert found["indexer"] > 0 and all(found[name].any() for name in found if ".indexer." in name)
    rows = replace(SPARSE, indexer_loss_rows="sparse")
    assert run(make_chunk(rows), lengths=(8, 5, 8))["indexer"] == 0


def test_blocks_of_rows_change_nothing(monkeypatch):
    whole = run(make_chunk(SPARSE))
    monkeypatch.setattr(indexer_training, "ROWS", 5)
    parts = run(make_chunk(SPARSE))
    assert all(torch.allclose(whole[name], parts[name], rtol=1e-6, atol=1e-9) for name in whole)


def test_warmup_raises_the_recall_of_the_attentions_largest_keys():
    """100 steps of the indexers alone: more of the dense attention's mass is on the keys that they would select."""
    chunk = make_chunk(WARMUP)
    optimizer = torch.optim.AdamW([p for p in chunk.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.0)
    shares = []
    for _ in range(100):
        shares.append(run(chunk)["recall"].item() / (2 * (13 + 4)))  # two indexers, rows of two documents
        optimizer.step()
    print(f"recall@{CONFIG.index_topk}: {shares[0]:.3f} -> {shares[-1]:.3f}")
    assert 0.5 < shares[0] < shares[-1] - 0.05 < 0.95


def test_recall_is_1_where_the_indexer_orders_keys_as_the_attention():
    p = torch.rand(6, 20).softmax(-1)
    seen = torch.tensor([20, 20, 9, 8, 3, 0])
    p = p.masked_fill(torch.arange(20) >= seen[:, None], 0.0)
    scores = p.masked_fill(torch.arange(20) >= seen[:, None], -torch.inf)
    assert recalled(p, scores.mul(3), seen, 8).item() == pytest.approx(3)  # rows that see more than 8 keys
    assert recalled(p, (-scores).masked_fill(scores == -torch.inf, -torch.inf), seen, 8) < 2.5
    assert recalled(p, scores, seen, 20) == 0


@pytest.mark.parametrize("shares", [True, False], ids=["shared", "own"])
def test_the_mtp_layers_own_indexer_learns_from_its_own_attention(shares, monkeypatch):
    """Rows without an input token teach nothing; each step that selects counts; all other gradients are as without."""
    config = replace(CONFIG, index_share_for_mtp_iteration=shares, num_nextn_predict_layers=1)
    number, steps, seen = CONFIG.num_hidden_layers, 2, []

    def spy(self, student, attended, kv, to_key, topk, pack, losses=indexer_training.IndexerTeaching.losses):
        found = losses(self, student, attended, kv, to_key, topk, pack)
        if self.mtp:
            p = self._selected_teacher(attended, kv, to_key, self._keys(topk, pack))
            rows = pack.valid.nonzero().flatten()
            kl = torch.special.xlogy(p, p) - p * student[0].detach()
            seen.append((kl[rows].sum() * self.weight, found["indexer"].detach(), student[0], pack.valid))
        return found

    monkeypatch.setattr(indexer_training.IndexerTeaching, "losses", spy)
    found = run_mtp(make_chunk(SPARSE, config=config, mtp_steps=steps), steps)
    assert len(seen) == (1 if shares else steps)
    for expected, value, log_probs, valid in seen:
        assert value.item() == pytest.approx(expected.item(), rel=1e-6) and value > 0
        assert valid.sum() < sum(LENGTHS) and not log_probs[~valid].any() and log_probs[valid].any()
    trunk = run(make_chunk(SPARSE, config=config))["indexer"]
    assert found["indexer"].item() == pytest.approx((trunk + 0.5 * sum(v for _, v, *_ in seen)).item(), rel=1e-6)
    own = [name for name in found if name.startswith(f"layers.{number}.self_attn.indexer.")]
    assert len(own) == 5 and all(found[name].any() for name in own)
    full = run_mtp(make_chunk(SPARSE, "full", config, steps), steps)
    assert full.keys() == found.keys() and all(torch.equal(full[name], found[name]) for name in found)
    off = run_mtp(make_chunk(IndexerConfig(), config=config, mtp_steps=steps), steps)
    assert all(torch.equal(off[name], found[name]) for name in off) and not set(own) & set(off)
