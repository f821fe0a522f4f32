"""Every dispatcher against one process that owns all experts: outputs, every gradient, and the bytes that moved."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megatron_glm.config import Fp8Config, ParallelConfig, RunConfig
from megatron_glm.ops.experts import grouped_mlp
from megatron_glm.ops.fp8 import ROW, dequantize, quantize
from megatron_glm.parallel.dispatch import DISPATCHERS, make_dispatcher
from megatron_glm.parallel.dispatch.hybridep import HybridEPDispatcher
from megatron_glm.parallel.dispatch.local import Dispatcher, LocalDispatcher
from megatron_glm.parallel.groups import ParallelGroups
from tests.helpers import hybridep
from tests.helpers.distributed import close_groups, run
from tests.helpers.reference import small_config

RANKS, E, K, D, HIDDEN = 8, 16, 4, 12, 6
LAYOUTS = [(2, None), (4, None), (8, None), (8, 2), (8, 4)]  # expert ranks, ranks of a node
CASES = ["unequal", "idle rank", "one expert", "padding", "nothing", "no tokens", "bf16"]
RESULTS = ("y", "x", "weights", "gate_up", "down")
KEYS = [
    (name, ep, node, case)
    for ep, node in LAYOUTS
    for name in DISPATCHERS
    if name == "hybridep" or (name == "hybrid") == (node is not None)
    for case in CASES
]


def made(name: str, groups: ParallelGroups, top_k: int = K, fp8: bool = False) -> Dispatcher:
    """For fp32 rows; a rank has 6 tokens, unless a case says otherwise."""
    model = small_config(n_routed_experts=E, num_experts_per_tok=top_k, hidden_size=D)
    config = RunConfig(model, parallel=ParallelConfig(moe_token_dispatcher_type=name), fp8=Fp8Config(fp8_dispatch=fp8))
    return make_dispatcher(replace(config, data=replace(config.data, seq_length=6)), groups)


def tokens_of_group(case: str, ep: int, seed: int):
    """Tokens per rank, then ids [T, K], x [T, D] and weights [T, K] of all ranks of an expert group."""
    generator = torch.Generator().manual_seed(seed)
    t = [6] * ep
    if case == "unequal":
        t = [5, 0, 9, 1, 0, 2, 7, 3][:ep]
    if case == "no tokens":
        t = [0] * ep
    scores = torch.rand(sum(t), E, generator=generator)
    if case == "idle rank":
        scores[:, E // ep : 2 * E // ep] = -1.0
    ids = scores.topk(K).indices
    if case == "one expert":
        ids[:], ids[:, 2] = -1, E - 1
    if case == "padding":
        ids[-8:] = -1
    if case == "nothing":
        ids[:] = -1
    x, weights = torch.randn(len(ids), D, generator=generator), torch.rand(len(ids), K, generator=generator)
    return t, ids, x, weights


def experts_and_probe(rows: int, dtype=torch.float32):
    generator = torch.Generator().manual_seed(99)
    shapes = [(E, 2 * HIDDEN, D), (E, D, HIDDEN), (rows, D)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def forward_backward(dispatcher, ids, x, weights, gate_up, down, probe):
    """Output and the gradients of x, weights, gate_up and down."""
    leaves = [leaf.clone().requires_grad_() for leaf in (x, weights, gate_up, down)]
    rows, row_weights, counts, handle = dispatcher.dispatch(leaves[0], ids, leaves[1])
    assert counts.dtype == torch.int64 and counts.shape == (len(gate_up),) and row_weights.shape == rows.shape[:1]
    y = dispatcher.combine(grouped_mlp(rows, row_weights, counts, *leaves[2:]), handle)
    assert y.shape == x.shape and y.dtype == x.dtype
    return y.detach(), *torch.autograd.grad(y, leaves, probe)


def compare(name: str, groups: ParallelGroups, node: int | None, case: str) -> dict[str, float]:
    """Largest difference of each result, relative to the largest value of its reference."""
    ep, rank = groups.ep.size(), groups.ep.rank()
    dtype = torch.bfloat16 if case == "bf16" else torch.float32
    t, ids, x, weights = tokens_of_group(case, ep, seed=dist.get_rank() // ep)
    gate_up, down, probe = experts_and_probe(len(ids), dtype)
    x = x.to(dtype)
    reference = forward_backward(LocalDispatcher(E), ids, x, weights, gate_up, down, probe)
    tokens = slice(sum(t[:rank]), sum(t[: rank + 1]))
    local = slice(rank * E // ep, (rank + 1) * E // ep)
    dispatcher = made(name, groups)
    if name == "hybridep" and case in ("unequal", "padding"):
        dispatcher = HybridEPDispatcher(replace(dispatcher.context, row_multiple=4))
    mine = ids[tokens], x[tokens], weights[tokens], gate_up[local], down[local], probe[tokens]
    results = forward_backward(dispatcher, *mine)
    errors = {}
    for what, got, want in zip(RESULTS, results, reference, strict=True):
        part = want[local if what in ("gate_up", "down") else tokens]
        scale = max(want.float().abs().max().item(), 1e-3) if want.numel() else 1.0
        difference = (got - part).float().abs() / scale
        difference = difference.masked_fill((part == 0) & (got != 0), torch.inf)  # what is zero is exactly zero
        errors[what] = difference.max().item() if part.numel() else 0.0
    return errors


def scaled(dispatcher, ids, x, weights, first_expert, probe):
    """Output and gradients of x and weights with experts that only multiply, so that equal sums are equal bits."""
    leaves = x.clone().requires_grad_(), weights.clone().requires_grad_()
    rows, row_weights, counts, handle = dispatcher.dispatch(leaves[0], ids, leaves[1])
    factors = torch.arange(first_expert, first_expert + len(counts)) * 0.37 + 0.11
    scaled = rows * (factors.repeat_interleave(counts) * row_weights)[:, None]
    y = dispatcher.combine(scaled.to(x.dtype), handle)
    return y.detach(), *torch.autograd.grad(y, leaves, probe)


def hybrid_bits(groups: ParallelGroups, node: int) -> tuple[bool, bool]:
    """Is hybrid alltoall, bit for bit: summed node by node, and as it is when each token's experts are in one node?"""
    ep, rank = groups.ep.size(), groups.ep.rank()
    of_node = E // ep * node
    t, ids, x, weights = tokens_of_group("unequal", ep, seed=5 + dist.get_rank() // ep)
    tokens = slice(sum(t[:rank]), sum(t[: rank + 1]))
    ids, x, weights, probe = ids.sort().values[tokens], x[tokens], weights[tokens], x.flip(0)[tokens]
    first = rank * E // ep
    hybrid, alltoall = (made(name, groups) for name in ("hybrid", "alltoall"))

    got = scaled(hybrid, ids, x, weights, first, probe)
    sums = [torch.zeros_like(part) for part in got]
    for n in range(ep // node):
        part = scaled(alltoall, torch.where(ids // of_node == n, ids, -1), x, weights, first, probe)
        sums = [total + share for total, share in zip(sums, part, strict=True)]
    by_node = all(map(torch.equal, got, sums))

    together = torch.where(ids // of_node == ids[:, :1] // of_node, ids, -1)
    one_node = (scaled(d, together, x, weights, first, probe) for d in (hybrid, alltoall))
    return by_node, all(map(torch.equal, *one_node))


def bytes_moved(groups: ParallelGroups, node: int) -> tuple[dict, dict]:
    """What the hybrid dispatcher counted on this rank, and what the choice of experts says."""
    ep, rank = groups.ep.size(), groups.ep.rank()
    t, ids, x, weights = tokens_of_group("unequal", ep, seed=7 + dist.get_rank() // ep)
    tokens = slice(sum(t[:rank]), sum(t[: rank + 1]))
    dispatcher = made("hybrid", groups)
    scaled(dispatcher, ids[tokens], x[tokens], weights[tokens], rank * E // ep, x[tokens])
    crossings, spreads = set(), set()  # (token, from rank, to rank)
    source = [r for r in range(ep) for _ in range(t[r])]
    for token, chosen in enumerate(ids.tolist()):
        for owner in {e // (E // ep) for e in chosen}:
            relay = owner // node * node + source[token] % node
            crossings.add((token, source[token], relay))
            spreads.add((token, relay, owner))
    expected = {}
    for level, moves in (("ep_inter", crossings), ("ep_node", spreads)):
        out = sum(a == rank != b for _, a, b in moves)
        back = sum(b == rank != a for _, a, b in moves)
        row, weight = 4 * D, 4 * K  # fp32
        # out: the token with its weights and ids, later the gradient of its output; back: its output, later gradients
        expected[level] = out * (row + 2 * weight) + back * row + out * row + back * (row + weight)
    return dict(dispatcher.bytes_sent), expected


def in_fp8(name: str, groups: ParallelGroups) -> bool:
    """Is a dispatch in FP8 one of tokens, and of gradients of the outputs, that were rounded to FP8 before?

    In bf16: there FP8 that is cast again, by the second level of hybrid, has the same bits.
    """
    ep, rank = groups.ep.size(), groups.ep.rank()
    t, ids, x, weights = tokens_of_group("unequal", ep, seed=11 + dist.get_rank() // ep)
    tokens = slice(sum(t[:rank]), sum(t[: rank + 1]))
    ids, x, weights, probe = ids[tokens], x[tokens].bfloat16(), weights[tokens], x.flip(0)[tokens].bfloat16()
    plain, ours = (made(name, groups, fp8=fp8) for fp8 in (False, True))
    rounded = (dequantize(*quantize(part, ROW), ROW, part.dtype) for part in (x, probe))
    seen, grad = rounded
    expected = scaled(plain, ids, seen, weights, rank * E // ep, grad)
    got = scaled(ours, ids, x, weights, rank * E // ep, probe)
    return not torch.equal(seen, x) and all(map(torch.equal, got, expected)) if len(x) else True


def sent_by_a_forward(name: str, groups: ParallelGroups, fp8: bool = False) -> tuple[dict, dict]:
    """Bytes that left this rank where every token goes to every expert, and what a plan counts for it."""
    dispatcher = made(name, groups, E, fp8)
    ids = torch.arange(E).expand(6, E)
    rows, _, _, handle = dispatcher.dispatch(torch.ones(6, D), ids, torch.ones(6, E))
    dispatcher.combine(rows, handle)
    return dict(dispatcher.bytes_sent), dispatcher.traffic()


def all_layouts() -> dict:
    """Runs on each rank."""
    results = {}
    sys.modules["deep_ep"] = hybridep  # the contract of its buffer, without its kernels
    for ep, node in LAYOUTS:
        hybridep.HybridEPBuffer.num_of_hybrid_ep_ranks_per_nvlink_domain = node or ep
        groups = ParallelGroups.create(ParallelConfig(expert_model_parallel_size=ep, expert_node_size=node))
        for name, _, _, case in [key for key in KEYS if key[1:3] == (ep, node)]:
            results[name, ep, node, case] = compare(name, groups, node, case)
        if node:
            results["sent", ep, node] = sent_by_a_forward("hybrid", groups)
            results["bits", ep, node] = hybrid_bits(groups, node)
            results["bytes", ep, node] = bytes_moved(groups, node)
        else:
            results["sent", ep, node] = sent_by_a_forward("alltoall", groups)
        name = "hybrid" if node else "alltoall"
        results["fp8", ep, node] = in_fp8(name, groups), sent_by_a_forward(name, groups, fp8=True)
        results["domains", ep, node] = other_domains(groups)
        close_groups(groups)
    return results


@pytest.fixture(scope="module")
def ranks() -> list[dict]:
    return run(RANKS, all_layouts, timeout=240)  # 15 s of processor time


@pytest.mark.parametrize("name, ep, node, case", KEYS)
def test_equals_one_process(ranks, name, ep, node, case):
    limit = 3e-2 if case == "bf16" else 2e-6
    for rank, results in enumerate(ranks):
        for what, error in results[name, ep, node, case].items():
            assert error < limit, f"{what} on rank {rank}: {error}"


@pytest.mark.parametrize("ep, node", [layout for layout in LAYOUTS if layout[1]])
def test_hybrid_equals_alltoall_bit_for_bit_where_sums_have_the_same_order(ranks, ep, node):
    assert [results["bits", ep, node] for results in ranks] == [(True, True)] * RANKS


@pytest.mark.parametrize("ep, node", [layout for layout in LAYOUTS if layout[1]])
def test_hybrid_sends_each_token_once_per_node_and_once_per_rank_inside(ranks, ep, node):
    for results in ranks:
        counted, expected = results["bytes", ep, node]
        assert counted == expected
    assert all(sum(results["bytes", ep, node][0][level] for results in ranks) > 0 for level in ("ep_inter", "ep_node"))


def other_domains(groups: ParallelGroups) -> str:
    """What is said where HybridEP finds other ranks connected than the flags say."""
    dispatcher = made("hybridep", groups)
    hybridep.HybridEPBuffer.num_of_hybrid_ep_ranks_per_nvlink_domain = 1
    try:
        dispatcher.buffer  # noqa: B018
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("ep, node", LAYOUTS)
def test_hybridep_refuses_nodes_that_are_not_there(ranks, ep, node):
    said = f"--expert-node-size {node}: HybridEP finds 1 of the {ep} expert-parallel ranks connected by NVLink, not "
    assert [results["domains", ep, node] for results in ranks] == [f"{said}{node or ep}"] * RANKS


@pytest.mark.parametrize("ep, node", LAYOUTS)
def test_a_plan_counts_the_bytes_that_a_forward_sends(ranks, ep, node):
    for results in ranks:
        sent, planned = results["sent", ep, node]
        assert sent == planned and len(sent) == 1 + (node is not None)


@pytest.mark.parametrize("ep, node", LAYOUTS)
def test_a_dispatch_in_fp8_rounds_what_it_sends_and_nothing_else(ranks, ep, node):
    for results in ranks:
        same, (sent, planned) = results["fp8", ep, node]
        assert same and sent == planned
        assert 0 < sum(sent.values()) < sum(results["sent", ep, node][0].values())
