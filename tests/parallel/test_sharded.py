"""--data-parallel-sharding slabs on one rank that is made to share: what is gathered when, and what is computed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from megatron_glm.config import Fp8Config, ParallelConfig, RunConfig
from megatron_glm.model.glm import GLMChunk
from megatron_glm.ops.fp8 import FP8
from megatron_glm.ops.grad_sum import add_pieces
from megatron_glm.parallel import sharded
from megatron_glm.parallel.fsdp import local, reduce_gradients, set_gradient_sync
from megatron_glm.parallel.sharded import NO_BACKWARD, ShardedChunk, Unit, current_backward, sharded_chunk
from megatron_glm.parallel.streams import Transfer
from megatron_glm.parallel.whole_weights import held_copy
from megatron_glm.training.engine import Engine
from megatron_glm.training.evaluate import evaluate
from megatron_glm.training.initialize import build_chunks
from megatron_glm.training.optimizer import build_optimizer
from megatron_glm.training.step import train_step
from tests.helpers.reference import single_groups
from tests.parity.layouts import pack, parity_model, run_config

COUNTS = {"lm": 100}
SLABS = ParallelConfig(data_parallel_sharding="slabs")


def configured(packs: int = 2, parallel: ParallelConfig = SLABS, bf16: bool = True) -> RunConfig:
    config = run_config(parity_model(5), parallel, packs, seed=0)
    return replace(config, train=replace(config.train, bf16=bf16))


@pytest.fixture
def shares(monkeypatch) -> None:
    """A rank alone shares its weights, too."""
    monkeypatch.setattr(sharded, "holds_whole", lambda group: False)


def built(config: RunConfig) -> tuple[Engine, GLMChunk, ShardedChunk]:
    [chunk] = build_chunks(config, single_groups())
    state = sharded_chunk(chunk)
    assert state is not None
    return Engine(config, single_groups(), [chunk]), chunk, state


def packs_of(config: RunConfig) -> list:
    return [pack(config.model, 0, 0, i) for i in range(config.train.global_batch_size)]


def trained(config: RunConfig) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of two steps with evaluations between them, and the parameters after them."""
    chunks = build_chunks(config, single_groups())
    engine, optimizer, losses = Engine(config, single_groups(), chunks), build_optimizer(config.optimizer, chunks), []
    for _ in range(2):
        losses.append(train_step(engine, optimizer, packs_of(config), 1e-2).losses["lm"])
        losses.append(evaluate(engine, [packs_of(config)])[0]["lm"])
    assert {type(p) for p in chunks[0].parameters()} <= {torch.nn.Parameter, DTensor}
    return losses, {name: local(parameter).detach() for name, parameter in chunks[0].named_parameters()}


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("reshard", [True, False])
def test_slabs_train_as_whole_weights(recompute, reshard, monkeypatch):
    """To the bit, although a backward's weights come into memory that other layers have had in between."""
    settings = {"recompute_granularity": recompute, "reshard_after_forward": reshard}
    config = configured(parallel=replace(SLABS, **settings, reshard_experts_after_forward=reshard))
    losses, whole = trained(config)
    monkeypatch.setattr(sharded, "holds_whole", lambda group: False)
    ours, shards = trained(config)
    assert len(set(losses)) == 4 and ours == losses and shards.keys() == whole.keys()
    assert all(torch.equal(shards[name], tensor) for name, tensor in whole.items())


class LateTransfer(Transfer):
    """Nothing arrives before it is waited for."""

    def __init__(self, device, issue, finish, after=None) -> None:
        def late() -> None:
            issue(False)
            finish()

        super().__init__(device, lambda asynchronous: [], late, after)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("ahead", [True, False], ids=["gathered ahead", "gathered when needed"])
def test_what_is_needed_is_gathered_and_waited_for(recompute, ahead, shares, monkeypatch):
    config = configured(parallel=replace(SLABS, recompute_granularity=recompute))
    losses, expected = trained(config)
    monkeypatch.setattr(sharded, "Transfer", LateTransfer)
    if not ahead:
        monkeypatch.setattr(ShardedChunk, "_gather_ahead", staticmethod(lambda *_: None))
    late, parameters = trained(config)
    assert late == losses and all(torch.equal(parameters[name], tensor) for name, tensor in expected.items())


def order_of(config: RunConfig, monkeypatch) -> list[str]:
    """What happens in one step: which unit begins to be gathered (+) and which one begins to compute (its name)."""
    engine, chunk, state = built(config)
    names = {module: name for name, module in chunk.named_modules()}
    engine.forward_backward(packs_of(config), COUNTS)
    reduce_gradients(chunk, last=True)
    for parameter in chunk.parameters():
        parameter.grad = None
        if parameter.requires_grad:
            increment_version([parameter])  # as an optimizer does
    seen: list[str] = []
    transfer, show, begin = sharded.Transfer, Unit.show, ShardedChunk._before_backward

    def noted(device, issue, *rest):
        if isinstance(owner := getattr(issue, "__self__", None), Unit):
            seen.append(f"+{names[owner.module]}")
        return transfer(device, issue, *rest)

    monkeypatch.setattr(sharded, "Transfer", noted)
    monkeypatch.setattr(Unit, "show", lambda unit: (seen.append(names[unit.module]), show(unit))[1])
    monkeypatch.setattr(
        ShardedChunk, "_before_backward", lambda self, u: (seen.append(f"{names[u.module]}'"), begin(self, u))[1]
    )
    engine.forward_backward(packs_of(config), COUNTS)
    return [entry.replace("layers.", "").replace(".mlp.experts", "e") for entry in seen]


def test_each_unit_is_gathered_while_the_one_before_computes(shares, monkeypatch):
    """Layers 0 (dense) to 4, experts "1e" to "4e". The last two of a kind are still there when the backward begins."""
    seen = order_of(configured(packs=1), monkeypatch)
    turn = seen.index("lm_head'")
    forward, backward = seen[:turn], [entry for entry in seen[turn:] if entry[0] == "+" or entry[-1] == "'"]
    assert " ".join(forward) == (
        "+ +embed_tokens  +0 embed_tokens +1 0 +1e 1 +2 1e +2e 2 +3 2e +3e 3 +4 3e +4e 4 +lm_head 4e lm_head"
    )
    order = "lm_head' ' 4' 4e' 3' 3e' +2 2' +2e 2e' +1 1' +1e 1e' +0 0' embed_tokens'"
    assert " ".join(dict.fromkeys(backward)) == order


def test_what_stays_is_gathered_once_a_step(shares, monkeypatch):
    kept = replace(SLABS, reshard_after_forward=False, reshard_experts_after_forward=False)
    seen = order_of(configured(packs=2, parallel=kept), monkeypatch)
    gathers = [entry for entry in seen if entry.startswith("+")]
    assert len(gathers) == len(set(gathers)) == 12


def test_a_recomputation_gathers_nothing_of_the_layers_behind(shares, monkeypatch):
    full = replace(SLABS, recompute_granularity="full")
    seen = order_of(configured(packs=1, parallel=full), monkeypatch)
    backward = seen[seen.index("lm_head'") :]
    assert [entry for entry in backward if entry.startswith("+")] == "+2 +2e +1 +1e +0".split()


def test_a_backward_that_fails_leaves_nothing(shares, monkeypatch):
    """The next step is what it would have been."""
    config = configured()
    engine, chunk, state = built(config)
    expected = [loss["lm"] for loss in engine.forward_backward(packs_of(config), COUNTS)]
    gradients = {name: local(p.grad).clone() for name, p in chunk.named_parameters() if p.grad is not None}
    chunk.zero_grad()
    with monkeypatch.context() as patch:
        gather = state.units[3].gather
        patch.setattr(state.units[3], "gather", lambda *_: gather(1 / (current_backward() == NO_BACKWARD) and None))
        with pytest.raises(ZeroDivisionError):
            engine.forward_backward(packs_of(config), COUNTS)
    for weight in (weight for unit in state.units for weight in unit.weights):
        weight.total = weight.master.grad = None
    assert [loss["lm"] for loss in engine.forward_backward(packs_of(config), COUNTS)] == expected
    assert all(torch.equal(local(chunk.get_parameter(name).grad), grad) for name, grad in gradients.items())


def test_a_layer_that_is_not_done_keeps_its_slab(shares):
    _, _, state = built(configured())
    first, second, *_ = (unit for unit in state.units if unit.slab is state.units[2].slab)
    first.gather()
    first.running = True
    with pytest.raises(RuntimeError, match="where those of a layer that is not done are"):
        second.gather()


def test_copies_that_adamw_writes_are_sent_as_they_are(shares):
    """On CUDA it writes master and copy in one pass, and raises the copy's version alone."""
    config = configured()
    engine, chunk, _ = built(config)
    before = engine.evaluate(packs_of(config))[0]["lm"].item()
    head = chunk.lm_head.weight
    copy = held_copy(head)
    assert copy is not None and copy.dtype == torch.bfloat16 and torch.equal(copy, local(head).bfloat16())
    with torch.no_grad():
        copy.zero_()
    assert engine.evaluate(packs_of(config))[0]["lm"].item() != before


def test_gradients_wait_until_they_are_to_be_reduced(shares, monkeypatch):
    """Accumulated where they are made, and added to what was reduced before."""
    config = configured(packs=1)
    engine, chunk, state = built(config)
    monkeypatch.setattr(engine, "_before_gradients", lambda chunk: None)
    grad = {}
    for name, syncs in {"each": [True, True], "last": [False, True], "by itself": [False, False]}.items():
        for sync in syncs:
            set_gradient_sync(chunk, sync=sync, last=sync)
            engine._run(packs_of(config), {"lm": 0.01}, training=True)
        if not sync:
            assert chunk.lm_head.weight.grad is None
            reduce_gradients(chunk, last=True)
        assert not any(weight.total is not None for unit in state.units for weight in unit.weights)
        grad[name] = {n: local(p.grad).clone() for n, p in chunk.named_parameters() if p.grad is not None}
        for parameter in chunk.parameters():
            parameter.grad = None
    for name, gradient in grad["each"].items():
        assert torch.allclose(gradient, grad["last"][name], rtol=1e-5, atol=1e-7)
        assert torch.equal(grad["last"][name], grad["by itself"][name])


def test_weights_that_fp8_products_take_are_gathered_in_fp8(shares):
    """With a scale for each block of 128 x 128; in bf16 where a piece is no whole blocks (o_proj has 32 rows here)."""
    sizes = {"moe_intermediate_size": 128, "q_lora_rank": 128, "qk_nope_head_dim": 56, "intermediate_size": 256}
    config = replace(configured(), model=parity_model(5, **sizes), fp8=Fp8Config(fp8="blockwise"))
    _, chunk, state = built(config)
    names = {parameter: name for name, parameter in chunk.named_parameters()}
    weights = {names[weight.master]: weight for unit in state.units for weight in unit.weights}
    cast = {name.removeprefix("layers.1.") for name, weight in weights.items() if weight.cast is not None}
    in_layer = {name for name in cast if not name.startswith("layers.")}
    assert in_layer == {
        *(f"self_attn.{name}_proj.weight" for name in ("q_a", "q_b")),
        *(f"mlp.shared_experts.{name}_proj.weight" for name in ("gate", "up")),
        *(f"mlp.experts.{name}" for name in ("gate_up", "down")),
    }
    experts = weights["layers.1.mlp.experts.gate_up"]
    values, scales = experts.parts
    assert (values.dtype, scales.dtype, scales.shape) == (FP8, torch.float32, (8, 2, 1))
    assert experts.nbytes == 8 * 256 * 32 + 256, "64 bytes of scales, with room to the next weight"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_pieces_are_added_in_fp32_in_their_order(dtype):
    pieces = (torch.randn(3, 5) * torch.tensor([[1.0], [1e4], [1e-3]])).to(dtype)
    expected = (pieces[0].float() + pieces[1].float()) + pieces[2].float()
    into = torch.ones(5)
    add_pieces(into, pieces.clone(), adds=True)
    assert torch.equal(into, 1 + expected)
    add_pieces(into, pieces.clone(), adds=False)
    assert torch.equal(into, expected)
