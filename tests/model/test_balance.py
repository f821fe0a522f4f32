"""The losses of the routers: value and gradients by brute force, what they leave alone, what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_glm.config import LossConfig, RunConfig
from megatron_glm.model import balance
from megatron_glm.model.glm import GLMChunk
from megatron_glm.model.micro_batch import MicroBatch
from megatron_glm.model.pack import PackRows
from megatron_glm.ops import routing
from megatron_glm.parallel.dispatch import make_dispatcher
from megatron_glm.parallel.pipeline.layout import Stage
from tests.helpers.finetune import exit_code, json_log
from tests.helpers.pretrain import pretrain
from tests.helpers.reference import single_groups, small_config

CONFIG = small_config(num_hidden_layers=3)
TOTAL, LENGTHS = 40, (21, 1, 12)  # and six rows of padding
COEFFICIENTS = LossConfig(moe_aux_loss_coeff=0.3, moe_z_loss_coeff=0.2)


def make_chunk(losses: LossConfig, recompute: str = "none") -> GLMChunk:
    run = RunConfig(CONFIG, losses=losses)
    run = replace(run, parallel=replace(run.parallel, recompute_granularity=recompute))
    run = replace(run, kernels=replace(run.kernels, attention_backend="torch"))
    stage = Stage(tuple(range(CONFIG.num_hidden_layers)), embedding=True, head=True, mtp=True)
    chunk = GLMChunk(run, single_groups(), stage, make_dispatcher(run, single_groups()))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in [*chunk.named_parameters(), *chunk.named_buffers()]:
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * (0.2 if tensor.dim() > 1 else 0.1))
            tensor += name.endswith("norm.weight")
    return chunk


def run(chunk: GLMChunk, lengths: tuple[int, ...] = LENGTHS) -> dict[str, Tensor]:
    """Gradients and losses by name."""
    tokens = torch.randint(0, CONFIG.vocab_size, (TOTAL,), generator=torch.Generator().manual_seed(1))
    labels = torch.where(torch.arange(TOTAL) < sum(lengths), tokens.roll(-1), -100)
    scales = {"lm": 0.1, "aux": 1 / 3, "z": 1 / 34}
    _, losses = chunk(MicroBatch(tokens, labels, PackRows.build(CONFIG, lengths, TOTAL), scales), {})
    chunk.zero_grad()
    sum(losses.values()).backward()
    found = {name: p.grad.clone() for name, p in chunk.named_parameters() if p.grad is not None}
    return found | {name: loss.detach() for name, loss in losses.items()}


def by_hand(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The losses of one router, document by document, expert by expert: logits [T, E]."""
    aux, z, begin = logits.new_zeros(()), logits.new_zeros(()), 0
    for n in LENGTHS:
        rows, chosen = logits[begin : begin + n], ids[begin : begin + n]
        scores = rows.sigmoid() / rows.sigmoid().sum(-1, keepdim=True)
        for expert in range(CONFIG.n_routed_experts):
            used = (chosen == expert).sum() * CONFIG.n_routed_experts / (CONFIG.num_experts_per_tok * n)
            aux = aux + used * scores[:, expert].mean()
        z = z + rows.exp().sum(-1).log().square().sum()
        begin += n
    return aux, z


def test_values_and_the_routers_gradients_are_those_of_brute_force(monkeypatch):
    seen = []
    losses_of = routing.logits_loss
    monkeypatch.setattr(balance, "logits_loss", lambda x, w, *a: seen.append((x, w)) or losses_of(x, w, *a))
    chunk = make_chunk(COEFFICIENTS)
    ids = {}
    for i in chunk.routed_layers:
        chunk.router(i).register_forward_hook(lambda m, a, out, i=i: ids.__setitem__(i, out[0]))
    found, plain = run(chunk), run(make_chunk(LossConfig()))
    total = {"aux": 0.0, "z": 0.0}
    for i, (x, _) in zip(chunk.routed_layers, seen[::2], strict=True):
        weight = chunk.router(i).weight.detach().double().requires_grad_()
        aux, z = by_hand(x.detach().double() @ weight.T, ids[i])
        total["aux"] += aux.item() / 3
        total["z"] += z.item() / 34
        assert 0.5 < aux.item() / 3 < 3 and len(seen) == 2 * len(ids) > 2
        last = i == chunk.routed_layers[-1]  # an earlier one's gradient has a part that came through later routers
        (gradient,) = torch.autograd.grad(0.3 * aux / 3 + 0.2 * z / 34, weight)
        name = f"layers.{i}.mlp.gate.weight"
        if last:
            assert (found[name] - plain[name] - gradient).norm() <= 1e-5 * gradient.norm()
    assert {name: found[name].item() for name in total} == pytest.approx(total, rel=1e-5)
    assert torch.equal(found["lm"], plain["lm"])


def test_the_gradient_of_the_input_is_that_of_autograd(monkeypatch):
    """In both forms: fp32, and the two bf16 addends of a GPU."""
    torch.manual_seed(0)
    x, weight, factor = torch.randn(9, 16), torch.randn(6, 16), torch.rand(9, 6)
    rounded = [y.bfloat16().float().requires_grad_() for y in (x, weight)]
    logits = rounded[0] @ rounded[1].T
    loss = (factor * logits.sigmoid()).sum()
    (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True)
    expected = torch.autograd.grad(0.5 * loss, rounded)
    for dtype, bound in ((torch.float32, 1e-6), (torch.bfloat16, 1e-2)):
        monkeypatch.setattr(routing, "_one_pass", lambda x, weight: x.dtype == torch.bfloat16)
        leaves = [y.bfloat16().to(dtype).requires_grad_() for y in (x, weight)]
        value = routing.logits_loss(*leaves, loss.detach(), gradient)
        assert value == loss
        for ours, reference in zip(torch.autograd.grad(0.5 * value, leaves), expected, strict=True):
            assert ours.dtype == dtype and (ours.float() - reference).norm() <= bound * reference.norm()


@pytest.mark.parametrize("granularity", ["full", "selective"])
def test_recomputation_changes_no_bit(granularity):
    plain, again = run(make_chunk(COEFFICIENTS)), run(make_chunk(COEFFICIENTS, granularity))
    assert plain.keys() == again.keys() and all(torch.equal(plain[name], again[name]) for name in plain)


def test_a_pack_of_padding_adds_nothing():
    found = run(make_chunk(COEFFICIENTS), ())
    assert found["aux"] == found["z"] == 0 and not any(value.any() for value in found.values())


def test_the_coefficient_is_a_factor_of_the_gradient_alone():
    def of_aux(coefficient: float) -> tuple[Tensor, dict[str, Tensor]]:
        found, plain = run(make_chunk(LossConfig(moe_aux_loss_coeff=coefficient))), run(make_chunk(LossConfig()))
        return found["aux"], {name: found[name] - plain[name] for name in plain if "gate.weight" in name}

    (value, once), (same, twice) = of_aux(1.0), of_aux(2.0)
    assert value == same
    for name, gradient in once.items():
        assert (twice[name] - 2 * gradient).norm() <= 1e-4 * gradient.norm() > 0, name


REFUSED = {
    "--moe-aux-loss-coeff 0.1 trains the routers, which this run holds: it trains indexer": {
        "moe_aux_loss_coeff": 0.1,
        "indexer_training": "warmup",
    },
    "which this run holds: it trains mtp": {"moe_z_loss_coeff": 0.1, "train_only": "mtp", "mtp_num_steps": 1},
    "load-balancing-type aux_loss": {"moe_aux_loss_coeff": 0.1, "moe_router_load_balancing_type": "aux_loss"},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_is_refused_with_its_flags(message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert exit_code(lambda: pretrain(train_iters=1, **REFUSED[message])) == 2
    assert message in capsys.readouterr().err


def test_the_log_has_both_without_their_factors(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pretrain(train_iters=2, mtp_num_steps=1, moe_aux_loss_coeff=1e-3, moe_z_loss_coeff=1e-4, log_file="log.jsonl")
    pretrain(train_iters=1, moe_router_load_balancing_type="aux_loss", log_file="none.jsonl")
    for line in json_log("log.jsonl"):
        assert line["moe_aux_loss"] > 0 and line["moe_z_loss"] > 0
    assert not [key for line in json_log("none.jsonl") for key in line if key.startswith("moe_")]
