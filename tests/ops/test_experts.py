"""Token permutation and grouped experts against the plain sum y_t = sum_k w_k * expert_k(x_t)."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import get_args, get_type_hints

import pytest
import torch
import torch.nn.functional as F

from megatron_glm.config import DataConfig, Fp8Config, KernelConfig, ParallelConfig, RunConfig, TrainConfig
from megatron_glm.model.glm import GLMChunk
from megatron_glm.model.moe import MoE
from megatron_glm.model.recompute import run_layer
from megatron_glm.ops import experts
from megatron_glm.ops.experts import grouped_mlp
from megatron_glm.ops.grad_sum import Products
from megatron_glm.ops.permute import RowMap, permute, unpermute
from megatron_glm.parallel.dispatch import DISPATCHERS, make_dispatcher
from megatron_glm.parallel.dispatch.local import DispatchContext, Dispatcher, LocalDispatcher
from megatron_glm.parallel.grid import Grid
from megatron_glm.parallel.groups import ParallelGroups
from megatron_glm.planner.plan import Plan
from megatron_glm.planner.traffic import layer_traffic
from megatron_glm.training.initialize import build_chunks, pipeline_layout
from tests.helpers.reference import single_groups, small_config

E, K, D, HIDDEN = 6, 3, 8, 5


def plain_moe(x, ids, weights, gate_up, down):
    """One token and one expert at a time."""
    out = []
    for token, chosen, scale in zip(x, ids.tolist(), weights, strict=True):
        y = 0 * token
        for k, e in enumerate(chosen):
            if e >= 0:
                gate, up = (gate_up[e] @ token).chunk(2)
                y = y + scale[k] * (down[e] @ (F.silu(gate) * up))
        out.append(y)
    return torch.stack(out) if out else x * 1.0


def case(name, t=7, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    ids = torch.stack([torch.randperm(E, generator=generator)[:K] for _ in range(t)]) if t else torch.empty(0, K).long()
    if name == "one expert":
        ids[:] = torch.tensor([4, -1, -1])
    elif name == "padding":
        ids[-3:] = -1
    elif name == "nothing":
        ids[:] = -1
    shapes = [(t, D), (t, K), (E, 2 * HIDDEN, D), (E, D, HIDDEN)]
    x, weights, gate_up, down = (torch.randn(s, generator=generator, dtype=dtype).requires_grad_() for s in shapes)
    return ids, x, weights, gate_up, down


def run_local(ids, x, weights, gate_up, down, poison=0.0):
    dispatcher = LocalDispatcher(E)
    rows, row_weights, counts, handle = dispatcher.dispatch(x, ids, weights)
    tail = torch.arange(len(rows))[:, None] >= counts.sum()
    for part, unused in ((rows, tail), (row_weights, tail[:, 0])):
        part.register_hook(lambda grad, unused=unused: torch.where(unused, poison, grad))  # as a grouped GEMM leaves it
    out = grouped_mlp(rows, row_weights, counts, gate_up, down)
    return dispatcher.combine(torch.where(tail, poison, out), handle), rows, counts


@pytest.mark.parametrize("name, t", [("all", 7), ("one expert", 7), ("padding", 7), ("nothing", 7), ("all", 0)])
def test_local_experts_equal_the_plain_sum_in_value_and_every_gradient(name, t):
    ids, *leaves = case(name, t)
    expected = plain_moe(leaves[0], ids, *leaves[1:])
    actual, rows, counts = run_local(ids, *leaves, poison=float("nan"))
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=5e-6)
    assert counts.tolist() == [(ids == e).sum().item() for e in range(E)]
    order = [t_ for e in range(E) for t_ in range(t) if e in ids[t_].tolist()]
    assert torch.equal(rows[: len(order)], leaves[0][order])
    probe = torch.randn(t, D)
    wanted = torch.autograd.grad(expected, leaves, probe, allow_unused=True, materialize_grads=True)
    for got, want in zip(torch.autograd.grad(actual, leaves, probe), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_permute_and_unpermute_pass_gradcheck():
    ids, x, weights, *_ = case("padding", dtype=torch.float64)
    rows = RowMap.build(ids, E)

    def there_and_back(x, weights):
        moved, row_weights = permute(x, weights, rows)
        return unpermute(moved.sin() * row_weights[:, None], rows)

    assert torch.autograd.gradcheck(there_and_back, (x, weights))


def test_combine_sums_in_fp32_and_rounds_once():
    ids = torch.tensor([[0, 1, 2]])
    rows = RowMap.build(ids, E)
    source = torch.tensor([[256.0], [1.0], [-256.0]], dtype=torch.bfloat16)  # 256 + 1 is not a bf16
    assert unpermute(source, rows).item() == 1.0


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("tail", [0, 4])
def test_grouped_gemms_equal_the_reference_and_tail_rows_stay_where_they_are(tail, device, monkeypatch):
    """The path of CUDA in bf16; its algebra can be checked on the CPU too."""
    counts = torch.tensor([3, 0, 9, 0, 1], device=device)
    n = int(counts.sum())
    leaves = [torch.randn(s, device=device, dtype=torch.bfloat16) for s in [(n + tail, 16), (5, 48, 16), (5, 16, 24)]]
    leaves.insert(1, torch.rand(n + tail, device=device) + 0.5)
    leaves[0][n:] = leaves[1][n:] = float("nan")
    results = []
    for grouped in (True, False):
        monkeypatch.setattr(experts.grad_sum, "has_grouped_products", lambda rows, grouped=grouped: grouped)
        inputs = [leaf.clone().requires_grad_() for leaf in leaves]
        out = experts.grouped_mlp(*inputs[:2], counts, *inputs[2:])[:n]
        out.float().square().sum().backward()
        results.append([out, *(leaf.grad[:n] for leaf in inputs[:2]), *(leaf.grad for leaf in inputs[2:])])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got.float(), want.float(), rtol=3e-2, atol=3e-2 * want.float().abs().max().item())


@pytest.mark.parametrize("kernels", [True, False])
def test_recomputation_repeats_neither_the_down_projection_nor_the_way_back(monkeypatch, kernels):
    """A layer's gradients with and without recomputation are equal, and what nobody needs again runs once."""
    ran = []
    config = small_config()
    moe = MoE(config, single_groups(), LocalDispatcher(config.n_routed_experts)).bfloat16()
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    moe.gate.e_score_correction_bias = torch.zeros(config.n_routed_experts)
    combine, down = moe.dispatcher.combine, experts._Down.forward
    monkeypatch.setattr(moe.dispatcher, "combine", lambda *args: ran.append("combine") or combine(*args))
    if kernels:
        monkeypatch.setattr(experts.grad_sum, "has_grouped_products", lambda rows: True)
        monkeypatch.setattr(experts._Down, "forward", lambda *args: ran.append("down") or down(*args))
    x, gradients = torch.randn(9, config.hidden_size, dtype=torch.bfloat16), []
    for granularity in ("none", "full"):
        ran.clear()
        moe.zero_grad()
        inputs = x.clone().requires_grad_()
        out, *_ = run_layer(granularity, moe, inputs, SimpleNamespace(valid=None))
        out.sum().backward()
        assert ran == (["down"] if kernels else []) + ["combine"]
        gradients.append([inputs.grad, *(parameter.grad for parameter in moe.parameters())])
    assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_without_any_row_the_weights_still_get_a_zero_gradient(device):
    shapes = [(0, 8), (2, 32, 8), (2, 8, 16)]
    leaves = [torch.ones(s, device=device, dtype=torch.bfloat16, requires_grad=True) for s in shapes]
    counts = torch.zeros(2, dtype=torch.int64, device=device)
    out = grouped_mlp(leaves[0], leaves[0].new_zeros(0, dtype=torch.float32), counts, *leaves[1:])
    for leaf, grad in zip(leaves, torch.autograd.grad(out.sum(), leaves), strict=True):
        assert torch.equal(grad, torch.zeros_like(leaf))


def test_a_dispatcher_is_refused_by_flag_and_numbers():
    """Where the layout is checked, before torch is there."""

    def check(experts: int = 8, **flags) -> None:
        ParallelConfig(expert_model_parallel_size=4, **flags).check(small_config(n_routed_experts=experts), 4)

    hybrid = {"moe_token_dispatcher_type": "hybrid"}
    check(**hybrid, expert_node_size=2)
    for words, refused in {
        "--moe-token-dispatcher-type is 'flex'.*alltoall": lambda: check(moe_token_dispatcher_type="flex"),
        "type hybrid with --expert-node-size None: hybrid needs it": lambda: check(**hybrid),
        "type allgather with --expert-node-size 2": lambda: check(
            moe_token_dispatcher_type="allgather", expert_node_size=2
        ),
        r"--expert-model-parallel-size \(4\).*--expert-node-size \(3\)": lambda: check(**hybrid, expert_node_size=3),
        r"experts \(6\).*--expert-model-parallel-size \(4\)": lambda: check(experts=6),
    }.items():
        with pytest.raises(ValueError, match=words):
            refused()


def test_the_flag_offers_what_the_table_holds():
    choices = get_args(get_type_hints(ParallelConfig)["moe_token_dispatcher_type"])
    assert list(choices) == list(DISPATCHERS)


def sized(parallel: ParallelConfig, ranks: int, **changes) -> Dispatcher:
    """A dispatcher as a plan makes it: no process, no device."""
    config = RunConfig(small_config(**changes), parallel=parallel)
    config = replace(config, data=replace(config.data, seq_length=64), train=TrainConfig(micro_batch_size=2))
    return make_dispatcher(config, ParallelGroups.of_sizes(Grid.create(parallel, ranks)))


def test_every_dispatcher_says_what_it_sends_and_holds():
    row, trip = 32 * 4, 2 * 32 * 4 + 8 * 8  # fp32 hidden states of 32; top-8 of 8 experts: a token goes everywhere
    for name in DISPATCHERS.keys() - {"hybridep"}:  # whose buffers are DeepEP's: test_hybridep.py
        node = 2 if name == "hybrid" else None
        parallel = ParallelConfig(
            expert_model_parallel_size=8, moe_token_dispatcher_type=name, expert_node_size=node, context_parallel_size=2
        )
        dispatcher = sized(parallel, 8, num_experts_per_tok=8)
        assert dispatcher.buffer_bytes() == 2 * 64 * 8 * row
        expected = {"ep": 64 * 7 * trip} if node is None else {"ep_inter": 64 * 3 * trip, "ep_node": 64 * 4 * trip}
        assert dispatcher.traffic() == expected
    alone = sized(ParallelConfig(), 1)
    assert isinstance(alone, LocalDispatcher) and alone.traffic() == {} and alone.buffer_bytes() == 0


def test_all_layers_of_a_rank_share_one_dispatcher():
    """Of both chunks here, and the MTP layer's: what it allocates is there once."""
    parallel = ParallelConfig(pipeline_model_parallel_size=2, num_layers_per_virtual_pipeline_stage=1)
    config = RunConfig(small_config(num_nextn_predict_layers=1), parallel=parallel, kernels=KernelConfig("torch"))
    groups = ParallelGroups.of_sizes(Grid.create(parallel, 2), rank=1)
    moes = [module for chunk in build_chunks(config, groups) for module in chunk.modules() if isinstance(module, MoE)]
    assert len(moes) == 3 and len({moe.dispatcher for moe in moes}) == 1


@pytest.mark.parametrize("kind", [{}, {"moe_token_dispatcher_type": "hybrid", "expert_node_size": 2}])
def test_rows_of_layers_in_bf16_travel_as_they_are(kind):
    parallel = ParallelConfig(expert_model_parallel_size=4, **kind)
    model = small_config(num_nextn_predict_layers=1, mlp_layer_types=("sparse",) * 3, num_hidden_layers=3)
    fp8 = Fp8Config(fp8="blockwise", fp8_dispatch=True, num_layers_at_start_in_bf16=1, num_layers_at_end_in_bf16=1)
    data, train = DataConfig(data_path=("none",), seq_length=64), TrainConfig(global_batch_size=4, train_iters=1)
    config = RunConfig(model, train, data=data, parallel=parallel, kernels=KernelConfig("torch"), fp8=fp8)
    groups = ParallelGroups.of_sizes(Grid.create(parallel, 4))
    with torch.device("meta"):
        [stage] = pipeline_layout(config, 1).stages
        chunk = GLMChunk(config, groups, stage, make_dispatcher(config, groups))
    by_layer = [chunk.layers[str(i)].mlp.dispatcher for i in range(4)]
    assert [each.context.fp8 for each in by_layer] == [False, True, False, True]  # the last one is MTP's
    assert by_layer[0].bytes_sent is by_layer[1].bytes_sent and by_layer[1] is by_layer[3]
    own, narrow = (sum(by_layer[i].traffic().values()) for i in (0, 1))
    assert own == sum(layer_traffic(Plan.create(config, 4, 4), 0).values()) > narrow


def test_copies_of_a_token_with_uniform_routing():
    groups = ParallelGroups.of_sizes(Grid.create(ParallelConfig(), 1))
    context = DispatchContext(groups, n_experts=256, top_k=8, hidden_size=1, most_tokens=1, dtype=torch.bfloat16)
    assert context.copies(1) == 1
    assert context.copies(256) == pytest.approx(8)
    assert 7 < context.copies(64) < 8


@pytest.mark.parametrize("grouped", [True, False])
def test_another_precision_makes_every_product_of_the_experts(grouped, monkeypatch):
    """Counted: gate_up and down have an output, an input gradient and a weight gradient each."""
    made = []

    class Counted(Products):
        def output(self, *args):
            made.append("output")
            return super().output(*args)

        def input_gradient(self, *args):
            made.append("input")
            return super().input_gradient(*args)

        def weight_gradient(self, *args):
            made.append("weight")
            return super().weight_gradient(*args)

    monkeypatch.setattr(experts.grad_sum, "has_grouped_products", lambda rows: grouped)
    leaves = [torch.randn(s, dtype=torch.bfloat16).requires_grad_() for s in [(6, 16), (2, 48, 16), (2, 16, 24)]]
    weights, counts = torch.rand(6), torch.tensor([2, 4])
    experts.grouped_mlp(leaves[0], weights, counts, *leaves[1:], Counted()).float().sum().backward()
    assert sorted(made) == sorted(2 * ["output", "input", "weight"])
