"""--data-parallel-sharding slabs: bit for bit what whole weights give whose gradients are added in rank order."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_glm.config import Fp8Config, IndexerConfig, LoraConfig, LossConfig, ParallelConfig, RunConfig
from megatron_glm.model.glm import GLMChunk
from megatron_glm.ops.fp8 import FP8
from megatron_glm.parallel import fsdp, sharded, sharded_weight
from megatron_glm.parallel.fsdp import local, reduce_partial_gradients
from megatron_glm.parallel.groups import ParallelGroups
from megatron_glm.parallel.shard import shard_dim
from megatron_glm.training.engine import Engine, losses_of
from megatron_glm.training.initialize import build_chunks, pipeline_layout
from megatron_glm.training.optimizer import MOMENTS, AdamW, build_optimizer
from tests.helpers import distributed
from tests.helpers.distributed import close_groups
from tests.helpers.finetune import finetune, write_rows
from tests.parity.layouts import pack, parity_model, run_config
from tests.parity.test_layouts import EVERY, FULL, KEPT, SELECTIVE, SLABS, ZERO_BUBBLE, layout

pytestmark = pytest.mark.timeout(300)
MTP, ADAPTERS = LossConfig(2), LoraConfig(lora_rank=4, lora_expert_rank=8)
ON_FP8 = replace(ADAPTERS, base_precision="fp8")
ON_BLOCKS = {  # some weights are cut into whole blocks, others (q_a, o_proj) are not
    "model": parity_model(4, moe_intermediate_size=128, q_lora_rank=128, qk_nope_head_dim=56, intermediate_size=256),
    "fp8": Fp8Config(fp8="blockwise"),
}
FEW = {"model": parity_model(4, n_routed_experts=2)}  # of 4 ranks, which share them along another dim


def configured(parallel: ParallelConfig, packs: int, bf16: bool = True, **changes) -> RunConfig:
    config = run_config(parity_model(4), parallel, packs, seed=0)
    return replace(config, train=replace(config.train, bf16=bf16), **changes)


class Replica:
    """The optimizer of whole weights: it moves each rank's piece, as it would a shard, and the ranks put them together.

    torch's AdamW on a CPU rounds the last elements of a tensor otherwise than those before.
    """

    def __init__(self, optimizer: AdamW, chunks: list[GLMChunk], groups: ParallelGroups) -> None:
        self.optimizer, self.before = optimizer, {}
        self.of_name = {n: (p, groups.edp if c.shards[n].expert else groups.dp_cp) for n, c, p in parameters(chunks)}
        of_name = self.of_name.items()
        self.pieces = {n: nn.Parameter(my_piece(p.detach(), g).clone(), p.requires_grad) for n, (p, g) in of_name}
        names = {p: n for n, (p, _) in self.of_name.items()}
        for group in optimizer.param_groups:
            whole, group["params"] = group["params"], [self.pieces[names[p]] for p in group["params"]]
            for old, new in zip(whole, group["params"], strict=True):
                state = optimizer.state.pop(old)
                optimizer.state[new] = state | {moment: torch.zeros_like(new.detach()) for moment in MOMENTS}

    def reduce(self) -> None:
        """The gradients of what has run, added up over the ranks and to those before."""
        for parameter, group in self.of_name.values():
            if parameter.grad is not None:
                total, before = in_rank_order(parameter.grad, group), self.before.pop(parameter, None)
                parameter.grad = None
                self.before[parameter] = total if before is None else before + total

    def complete(self) -> None:
        for parameter, total in self.before.items():
            parameter.grad = total
        self.before = {}

    @torch.no_grad()
    def step(self) -> None:
        for name, (parameter, group) in self.of_name.items():
            if parameter.grad is not None:
                self.pieces[name].grad = my_piece(parameter.grad, group).clone()
                parameter.grad = None
        self.optimizer.step()
        for name, (parameter, group) in self.of_name.items():
            if parameter.requires_grad:
                my_piece(parameter.zero_(), group).copy_(self.pieces[name])
                dist.all_reduce(parameter, group=group)
        self.optimizer.zero_grad()


def parameters(chunks: list[GLMChunk]) -> list[tuple[str, GLMChunk, nn.Parameter]]:
    return [(name, chunk, parameter) for chunk in chunks for name, parameter in chunk.named_parameters()]


def steps_of(config: RunConfig, whole: bool, steps: int = 2) -> dict[str, list[Tensor]]:
    """By name what this rank has after each step: its losses; its piece of gradients, parameters and moments.

    whole: the data ranks hold whole weights, and add up their gradients one rank after the other.
    """
    layout = pipeline_layout(config, config.parallel.data_parallel_size(dist.get_world_size()))
    groups = ParallelGroups.create(config.parallel, embedding=layout.embedding_ranks(config.losses.mtp_steps > 0))
    with pytest.MonkeyPatch.context() as patch:
        if whole:
            patch.setattr(fsdp, "holds_whole", lambda dp_cp, edp: (True, True))
            config = replace(config, parallel=replace(config.parallel, data_parallel_sharding="fsdp2"))
        chunks = build_chunks(config, groups)
    engine, optimizer = Engine(config, groups, chunks), build_optimizer(config.optimizer, chunks)
    replica = Replica(optimizer, chunks, groups) if whole else None
    found: dict[str, list[Tensor]] = {}
    counts = {name: 7 * config.train.global_batch_size for name in losses_of(config)}
    for step in range(steps):
        mine = range(groups.dp.rank(), config.train.global_batch_size, groups.dp.size())
        batches = [pack(config.model, 0, step, i) for i in mine]
        every = whole and config.parallel.grad_sync == "every"
        for part in [[batch] for batch in batches] if every else [batches]:
            losses = engine.forward_backward(part, counts)
            found.setdefault("losses", []).extend(loss for each in losses for _, loss in sorted(each.items()))
            if replica is not None:
                replica.reduce()
        if replica is not None:
            replica.complete()
        reduce_partial_gradients(chunks, groups.embedding)
        for name, _, parameter in parameters(chunks):
            if (gradient := parameter.grad) is not None:
                piece = local(gradient) if replica is None else my_piece(gradient, replica.of_name[name][1])
                found.setdefault(f"{name}.grad", []).append(piece.clone())
        (replica or optimizer).step()
        optimizer.zero_grad()
        for name, _, parameter in parameters(chunks):
            held = parameter if replica is None else replica.pieces[name]
            tensors = {name: held}
            if held.requires_grad:
                tensors |= {f"{name}.{moment}": optimizer.state[held][moment] for moment in MOMENTS}
            for key, tensor in tensors.items():
                bits = local(tensor.detach()).clone()
                found.setdefault(key, []).append(bits.view(torch.uint8) if bits.dtype == FP8 else bits)
    close_groups(groups)
    return found


def in_rank_order(gradient: Tensor, group: dist.ProcessGroup) -> Tensor:
    everyone = [torch.empty_like(gradient) for _ in range(group.size())]
    dist.all_gather(everyone, gradient.contiguous(), group=group)
    total = everyone[0].clone()
    for other in everyone[1:]:
        total += other
    return total


def my_piece(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    dim = shard_dim(tensor.shape, group.size())
    pieces = tensor.chunk(group.size(), dim)
    return pieces[group.rank()] if group.rank() < len(pieces) else tensor.narrow(dim, 0, 0)


def both(cases: list[RunConfig]) -> list[list[str]]:
    """Of each case, what of this rank is not the same bits with whole weights; how much is."""
    different = []
    for config in cases:
        slabs, whole = (steps_of(config, whole) for whole in (False, True))
        assert slabs.keys() == whole.keys() and sum("exp_avg" in name for name in slabs) >= 20
        different.append([name for name in slabs if not all(map(torch.equal, slabs[name], whole[name]))])
    return different


CASES = {
    2: {
        "ep2 selective recompute": ({}, layout(ep=2, **SLABS, **SELECTIVE)),
        "dp2 mtp full recompute": ({"losses": MTP}, layout(**SLABS, **FULL)),
        "cp2 adapters on experts in fp8": ({"lora": ON_FP8}, layout(cp=2, **SLABS)),
        "dp2 fp8 full recompute": (ON_BLOCKS, layout(**SLABS, **FULL)),
        "dp2 fp8 kept, reduced every time": (ON_BLOCKS, layout(**SLABS, **KEPT, **EVERY)),
        "dp2 indexer warm-up": ({"indexer": IndexerConfig("warmup")}, layout(**SLABS)),
    },
    3: {"dp3": ({}, layout(**SLABS)), "dp3 mtp reduced every time": ({"losses": MTP}, layout(**SLABS, **EVERY))},
    4: {
        "dp4 full recompute": ({}, layout(**SLABS, **FULL)),
        "dp4 ep2 mtp": ({"losses": MTP}, layout(ep=2, **SLABS)),
        "dp2 pp2 vp2 zero bubble": ({}, layout(pp=2, vp=2, **SLABS, **ZERO_BUBBLE)),
        "dp2 pp2 adapters kept experts": (
            {"lora": ADAPTERS},
            layout(pp=2, reshard_experts_after_forward=False, **SLABS),
        ),
        "dp4 few experts, adapters on fp8": (FEW | {"lora": ON_FP8}, layout(**SLABS)),
    },
}


@cache
def different(world_size: int) -> dict[str, list[str]]:
    packs = {2: 4, 3: 6, 4: 8}[world_size]
    cases = [configured(parallel, packs, **changes) for changes, (_, parallel) in CASES[world_size].values()]
    ranks = distributed.run(world_size, both, cases, timeout=280)
    return {name: sum(of_case, []) for name, of_case in zip(CASES[world_size], zip(*ranks, strict=True), strict=True)}


@pytest.mark.parametrize(("world_size", "name"), [(size, name) for size, cases in CASES.items() for name in cases])
def test_steps_are_those_of_whole_weights(world_size, name):
    assert different(world_size)[name] == []


def as_with_nccl(config: RunConfig) -> list[str]:
    """What is another with the calls that NCCL gets: coalesced gathers and reductions, by scattering where in fp32."""
    other = steps_of(config, whole=False)
    with pytest.MonkeyPatch.context() as patch:
        for module in (sharded, sharded_weight):
            patch.setattr(module, "has_nccl", lambda group: True)
        ours = steps_of(config, whole=False)
    return [name for name in ours if not all(map(torch.equal, ours[name], other[name]))]


@pytest.mark.parametrize(
    "changes", [{}, {"model": parity_model(4, n_routed_experts=1, num_experts_per_tok=1)}], ids=str
)
def test_the_calls_of_nccl_give_the_same(changes):
    """Two ranks, where the order of a sum does not matter; a vocabulary of 97 and one expert are cut otherwise."""
    model = replace(changes.get("model", parity_model(4)), vocab_size=97)
    every = layout(**SLABS, **EVERY)[1]
    assert sum(distributed.run(2, as_with_nccl, configured(every, 4, model=model)), []) == []


def trained(folder: Path, *runs: dict[str, Any]) -> None:
    os.chdir(folder)
    os.environ["WORLD_SIZE"] = str(dist.get_world_size())
    for flags in runs:
        uneven = {"ffn_hidden_size": 47, "num_experts": 5}
        finetune(bf16=True, global_batch_size=4, save_interval=1, **uneven, **flags)


def contents(folder: Path) -> dict[str, bytes | dict]:
    """Files by name; of the state what does not follow from the run's own id."""
    files: dict[str, bytes | dict] = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    return files | {"state.json": json.loads((folder / "state.json").read_text()) | {"run_id": "", "crc32": 0}}


def test_both_write_equal_checkpoints_and_load_the_other(tmp_path: Path):
    """On two ranks, where the order of a sum does not matter; rows and experts do not divide by them."""
    write_rows(tmp_path)
    ways = {sharding: {"data_parallel_sharding": sharding} for sharding in ("fsdp2", "slabs")}
    runs = [{"train_iters": 1, "save": f"by {name}", **flags} for name, flags in ways.items()]
    runs += [
        {"train_iters": 2, "save": f"by {name}, then {other}", "load": f"by {name}", **ways[other]}
        for name in ways
        for other in ways
    ]
    distributed.run(2, trained, tmp_path, *runs)
    for iteration in (1, 2):
        saved = [contents(path) for path in sorted(tmp_path.glob(f"by */iter_000000{iteration}"))]
        assert len(saved) == (2, 4)[iteration - 1] and len(saved[0]) > 3
        for other in saved:
            assert other.keys() == saved[0].keys()
            assert [name for name in other if other[name] != saved[0][name]] == []
