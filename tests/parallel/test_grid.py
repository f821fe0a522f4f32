"""Rank arithmetic for 1 to 4,096 ranks, and the groups made from it."""

import random
from types import SimpleNamespace

import pytest
import torch.distributed as dist

import megatron_glm.parallel.groups as groups_module
from megatron_glm.config import ParallelConfig
from megatron_glm.parallel.grid import GROUP_AXES, Grid
from megatron_glm.parallel.groups import ParallelGroups
from tests.helpers.reference import single_groups


def parallel(tp=1, cp=1, pp=1, ep=1, node=None) -> ParallelConfig:
    return ParallelConfig(
        tensor_model_parallel_size=tp,
        context_parallel_size=cp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        sequence_parallel=tp > 1,
        moe_token_dispatcher_type="hybrid" if node else "alltoall",
        expert_node_size=node,
    )


def legal_grids(count: int) -> list[tuple[int, dict[str, int]]]:
    """Random legal layouts of 1 to 4,096 ranks, not only powers of two."""
    rng, grids = random.Random(0), []
    while len(grids) < count:
        world = rng.randint(1, 4096)
        sizes = {}
        rest = world
        for axis in rng.sample(["tp", "cp", "pp"], 3):
            sizes[axis] = rng.choice([d for d in range(1, rest + 1) if rest % d == 0])
            rest //= sizes[axis]
        stage = world // sizes["pp"]
        sizes["ep"] = rng.choice([d for d in range(1, stage + 1) if stage % d == 0])
        sizes["node"] = rng.choice([d for d in range(1, sizes["ep"] + 1) if sizes["ep"] % d == 0])
        grids.append((world, sizes))
    return grids


@pytest.mark.parametrize("world, sizes", legal_grids(60))
def test_groups_partition_the_ranks(world, sizes):
    grid = Grid.create(parallel(**sizes), world)
    expected = {
        "tp": grid.tp,
        "cp": grid.cp,
        "tp_cp": grid.tp * grid.cp,
        "dp": grid.dp,
        "dp_cp": grid.dp * grid.cp,
        "tp_cp_dp": world // grid.pp,
        "pp": grid.pp,
        "ep": grid.ep,
        "edp": grid.edp,
        "ep_node": grid.node,
        "ep_inter": grid.inter,
    }
    assert expected.keys() == GROUP_AXES.keys()
    stage = world // grid.pp
    for name, size in expected.items():
        groups = grid.groups(name)
        assert sorted(rank for ranks in groups for rank in ranks) == list(range(world))
        assert all(len(ranks) == size and ranks == sorted(ranks) for ranks in groups)
        if name != "pp":  # only pp groups leave a stage
            assert all(ranks[0] // stage == ranks[-1] // stage for ranks in groups)
    assert len(grid.ring_edges()) == world


@pytest.mark.parametrize("world, sizes", legal_grids(10))
def test_ranks_of_a_group_share_every_other_coordinate(world, sizes):
    """The rank of (pp, dp, cp, tp) and of (pp, edp, ep), written out once more by hand."""
    grid = Grid.create(parallel(**sizes), world)
    dense = {
        rank: {
            "tp": rank % grid.tp,
            "cp": rank // grid.tp % grid.cp,
            "dp": rank // (grid.tp * grid.cp) % grid.dp,
            "pp": rank // (world // grid.pp),
        }
        for rank in range(world)
    }
    expert = {
        rank: {
            "ep": rank % grid.ep,
            "edp": rank % (world // grid.pp) // grid.ep,
            "pp": rank // (world // grid.pp),
        }
        for rank in range(world)
    }
    for name, axes in {"tp": ("tp",), "tp_cp": ("cp", "tp"), "dp_cp": ("dp", "cp"), "pp": ("pp",)}.items():
        for ranks in grid.groups(name):
            assert len({tuple(c for a, c in dense[rank].items() if a not in axes) for rank in ranks}) == 1
    for name in ("ep", "edp"):
        for ranks in grid.groups(name):
            assert len({tuple(c for a, c in expert[rank].items() if a != name) for rank in ranks}) == 1
    for ranks in grid.groups("ep_inter"):  # equal index in their node, node by node
        assert [rank % grid.node for rank in ranks] == [ranks[0] % grid.node] * grid.inter


def test_experts_fold_over_context_parallel_ranks():
    grid = Grid.create(parallel(cp=8, pp=4, ep=64), 256)
    assert (grid.dp, grid.edp) == (8, 1)
    assert grid.groups("ep") == [list(range(first, first + 64)) for first in (0, 64, 128, 192)]
    assert grid.groups("cp")[1] == list(range(8, 16))
    assert grid.ring_edges()[:4] == [(0, 64), (64, 128), (128, 192), (192, 0)]


@pytest.mark.parametrize(
    "world, sizes, words",
    [
        (8, {"tp": 3}, ["--tensor-model-parallel-size", "8", "3"]),
        (8, {"tp": 2, "cp": 2, "pp": 4}, ["--context-parallel-size", "8", "16"]),
        (12, {"pp": 2, "ep": 4}, ["--expert-model-parallel-size", "6", "4"]),
        (8, {"ep": 8, "node": 3}, ["--expert-node-size", "8", "3"]),
    ],
)
def test_impossible_grids_are_refused_by_name(world, sizes, words):
    with pytest.raises(ValueError) as error:
        Grid.create(parallel(**sizes), world)
    assert all(word in str(error.value) for word in words)


class FakeGroup(tuple):
    """The ranks of a group; equal ranks are not the same object."""


@pytest.mark.parametrize(
    "world, sizes", [(1, {}), (8, {"pp": 2, "cp": 2}), (16, {"tp": 2, "cp": 2, "pp": 2, "ep": 4, "node": 2})]
)
def test_all_ranks_create_the_same_groups_in_the_same_order(monkeypatch, world, sizes):
    """A rank that skips or swaps one `new_group`, or one first message over a pipeline edge, hangs the others."""
    created, connected = [], []

    def new_group(ranks=None, backend=None, timeout=None):
        created[-1].append((tuple(ranks or range(world)), backend))
        return FakeGroup(created[-1][-1][0])

    everyone = FakeGroup(range(world))
    everyone.size = lambda: world
    fake = SimpleNamespace(group=SimpleNamespace(WORLD=everyone), new_group=new_group)
    fake.get_world_size, fake.get_backend = lambda: world, lambda: "nccl"
    monkeypatch.setattr(groups_module, "dist", fake)
    monkeypatch.setattr(groups_module, "_connect", lambda group, sends: connected[-1].append((tuple(group), sends)))
    config = parallel(**sizes)
    grid = Grid.create(config, world)
    for rank in range(world):
        created.append([])
        connected.append([])
        fake.get_rank = lambda rank=rank: rank
        groups = ParallelGroups.create(config)
        for name in GROUP_AXES:
            group = getattr(groups, name)
            if group is None:
                assert name in ("ep_node", "ep_inter") and "node" not in sizes
            else:
                assert rank in group and list(group) in grid.groups(name)
        assert tuple(groups.gloo_world) == tuple(groups.checkpoint) == tuple(range(world))
        assert groups.gloo_world is not groups.checkpoint
        after, before = dict(grid.ring_edges())[rank], {b: a for a, b in grid.ring_edges()}[rank]
        assert set(groups.pp_forward.outbound) == set(groups.pp_backward.inbound) == {rank, after}
        assert set(groups.pp_forward.inbound) == set(groups.pp_backward.outbound) == {rank, before}
        # One way only, also where the next rank is the previous one.
        assert len({id(group) for group in (*groups.pp_forward, *groups.pp_backward)}) == (4 if grid.pp > 1 else 2)
    assert all(calls == created[0] for calls in created)
    assert created[0].count((tuple(range(world)), "gloo")) == 2
    assert all(len(edges) == (4 if grid.pp > 1 else 0) for edges in connected)
    while any(connected):  # a first message holds both ranks until both have come to it
        ready = [edges[0][0] for edges in connected if edges]
        ranks = next(ranks for ranks in ready if all(connected[r] and connected[r][0][0] == ranks for r in ranks))
        assert sorted(connected[rank].pop(0)[1] for rank in ranks) == [False, True]


def test_groups_of_one_process():
    groups = single_groups()
    assert groups.tp is groups.tp_cp_dp is groups.ep is groups.gloo_world is dist.group.WORLD
    assert groups.checkpoint is not groups.gloo_world
    assert (groups.pp.size(), groups.pp.rank(), groups.ep_node) == (1, 0, None)
