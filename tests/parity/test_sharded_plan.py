"""What --data-parallel-sharding slabs holds and sends is what the planner says."""

from __future__ import annotations

import gc
import warnings
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch import Tensor, nn

from megatron_glm.config import RunConfig
from megatron_glm.ops.fp8 import FP8
from megatron_glm.parallel.fsdp import local
from megatron_glm.parallel.groups import ParallelGroups
from megatron_glm.parallel.sharded_weight import Reduction, ShardedWeight
from megatron_glm.planner.memory import rank_memory
from megatron_glm.planner.plan import Plan
from megatron_glm.planner.traffic import rank_traffic
from megatron_glm.training.engine import Engine, losses_of
from megatron_glm.training.initialize import build_chunks
from megatron_glm.training.optimizer import build_optimizer
from tests.helpers import distributed
from tests.helpers.distributed import close_groups
from tests.parity.layouts import pack
from tests.parity.test_layouts import EVERY, FULL, KEPT, SLABS, layout
from tests.parity.test_sharded import ADAPTERS, MTP, ON_FP8, configured, parameters


def live_tensors() -> list[Tensor]:
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of names that torch warns of when they are looked at
        tensors = [thing for thing in gc.get_objects() if type(thing) in (Tensor, nn.Parameter)]
    return [tensor for tensor in tensors if tensor.device.type == "cpu"]


def storages(tensors: list[Tensor]) -> dict[int, int]:
    """Bytes by address of the memory that they hold."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def grown(config: RunConfig) -> tuple[int, int]:
    """Bytes that forwards without gradients leave behind, and then a step."""
    groups = ParallelGroups.create(config.parallel)
    chunks = build_chunks(config, groups)
    engine, optimizer = Engine(config, groups, chunks), build_optimizer(config.optimizer, chunks)
    batches = [pack(config.model, 0, 0, i) for i in range(config.train.global_batch_size // groups.dp.size())]
    before, found = live_tensors(), []  # which live on, so that nothing new takes their addresses
    known = storages(before)
    for run in engine.evaluate, lambda batches: engine.forward_backward(batches, dict.fromkeys(losses_of(config), 1)):
        run(batches)
        optimizer.zero_grad()
        after = storages(live_tensors())
        found.append(sum(nbytes for address, nbytes in after.items() if address not in known))
    close_groups(groups)
    return found[0], found[1]


@pytest.mark.parametrize("parallel", [{}, KEPT, {"reshard_experts_after_forward": False}], ids=str)
def test_a_forward_leaves_shards_and_two_slabs_a_kind(parallel):
    """As planned, but for the alignment of weights in a slab and the padding of shards: here at most a tenth."""
    config = configured(layout(pp=2, vp=2, ep=1, **SLABS, **parallel)[1], 4)
    config = replace(config, kernels=replace(config.kernels, loss_chunk_size=8))
    ranks, plan = distributed.run(4, grown, config), Plan.create(config, 4, 4)
    for rank, (forward, step) in enumerate(ranks):
        planned = rank_memory(plan, rank // 2)["gathered weights"]
        assert planned <= forward <= 1.1 * planned + 40_000 and step == forward, (rank, planned, forward, step)


def in_fp8(config: RunConfig) -> tuple[int, int]:
    """Numbers in FP8 that this rank holds, and that the planner says it holds."""
    groups = ParallelGroups.create(config.parallel)
    held = [local(p).numel() for _, _, p in parameters(build_chunks(config, groups)) if p.dtype == FP8]
    plan = Plan.create(config, dist.get_world_size(), 4)
    planned = plan.elements(groups.pp.rank(), groups.dp_cp.rank(), groups.edp.rank())[2]
    close_groups(groups)
    return sum(held), planned


def test_experts_in_fp8_are_shared_as_planned():
    config = configured(layout(**SLABS)[1], 3, lora=ON_FP8)
    config = replace(config, optimizer=replace(config.optimizer, moe_router_bias_update_rate=0.0))
    ranks = distributed.run(3, in_fp8, config)
    assert all(held == planned for held, planned in ranks)
    assert [held for held, _ in ranks] == [3 * 3 * n * 24 * 32 + n * 3 * 24 * 32 for n in (3, 3, 2)]  # MTP's, too


def sent(cases: dict[str, RunConfig]) -> dict[str, tuple[float, float]]:
    """Bytes of weights and of gradients that this rank sends in a step of each case."""
    gather, issue, found = ShardedWeight._gather, Reduction.issue, {}
    for name, config in cases.items():
        gathered, reduced = [], []

        def counted(weight, output, *args, into=gathered):
            ranks = weight.group.size()
            into.append(output.nbytes * (ranks - 1) / ranks)
            return gather(weight, output, *args)

        def reduction(part, *args, into=reduced):
            ranks = part.weight.group.size()
            into.append(part.sent.nbytes * (ranks - 1) / ranks)
            return issue(part, *args)

        groups = ParallelGroups.create(
            config.parallel, embedding=(0, 1) if config.parallel.pipeline_model_parallel_size > 1 else ()
        )
        chunks = build_chunks(config, groups)
        batches = [pack(config.model, 0, 0, i) for i in range(config.train.global_batch_size // groups.dp.size())]
        with patch.object(ShardedWeight, "_gather", counted), patch.object(Reduction, "issue", reduction):
            Engine(config, groups, chunks).forward_backward(batches, dict.fromkeys(losses_of(config), 1))
        found[name] = sum(gathered), sum(reduced)
        close_groups(groups)
    return found


def test_weights_and_gradients_are_sent_as_planned():
    """But for the padding of shards."""
    cases = {
        "dp4": configured(layout(**SLABS)[1], 8),
        "mtp, full recompute, reduced every time": configured(layout(**SLABS, **FULL, **EVERY)[1], 8, losses=MTP),
        "kept": configured(layout(ep=2, **SLABS, **KEPT)[1], 8, losses=MTP),
        "adapters": configured(layout(**SLABS)[1], 8, lora=ADAPTERS),
        "pp2": configured(layout(pp=2, pipeline_model_parallel_layout="Et|tt|t,m|L", **SLABS)[1], 8, losses=MTP),
    }
    cases = {
        name: replace(c, optimizer=replace(c.optimizer, moe_router_bias_update_rate=0)) for name, c in cases.items()
    }
    for rank, found in enumerate(distributed.run(4, sent, cases)):
        for name, config in cases.items():
            plan = Plan.create(config, 4, 4)
            traffic = rank_traffic(plan, rank // (4 // plan.grid.pp))
            for kind, nbytes in zip(("gathered weights", "reduced gradients"), found[name], strict=True):
                planned = sum(traffic[axis, kind] for axis in ("dp_cp", "edp"))
                assert 0 < planned == pytest.approx(nbytes, rel=2e-3), (name, rank, kind)
