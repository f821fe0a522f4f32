"""More expert-data ranks than experts: another dimension is cut, and nothing else changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_glm.config import ParallelConfig
from megatron_glm.parallel.shard import shard_dim
from megatron_glm.planner.plan import Plan
from tests.helpers import distributed
from tests.helpers.reference import single_groups
from tests.parity import test_resharding
from tests.parity.layouts import parity_model, run_config, train
from tests.parity.test_layouts import compare

MODEL = parity_model(4, n_routed_experts=2)  # on 4 ranks


@pytest.mark.parametrize(
    ("shape", "ranks", "dim"),
    [
        ((4, 4096, 6144), 4, 0),
        ((4, 4096, 6144), 3, 2),  # 2, 2 and 0 experts would leave a rank empty; 3 divides only the last
        ((4, 4096, 6144), 16, 1),
        ((5, 7, 9), 4, 0),  # 2, 2, 1, 0: nothing else divides
        ((5, 7, 9), 3, 0),
        ((256, 6144), 512, 1),
        ((32,), 64, 0),
    ],
)
def test_the_dimension_that_is_cut(shape, ranks, dim):
    assert shard_dim(shape, ranks) == dim


def parts(config) -> tuple[list[int], int, int]:
    """Elements of this rank's parts of the experts; bytes of all its parameters, and what the planner says of them."""
    from megatron_glm.parallel.groups import ParallelGroups
    from megatron_glm.training.initialize import build_chunks

    groups = ParallelGroups.create(config.parallel)
    chunks = build_chunks(config, groups)
    held = [4 * p.to_local().numel() for chunk in chunks for p in chunk.parameters()]
    experts = [p.to_local().numel() for c in chunks for n, p in c.named_parameters() if ".mlp.experts." in n]
    distributed.close_groups(groups)
    return experts, sum(held), Plan.create(config, dist.get_world_size(), 4).held(dist.get_rank()).parameters


def test_every_rank_holds_its_share_and_the_planner_knows():
    ranks = distributed.run(4, parts, run_config(MODEL, ParallelConfig(), 4, seed=0))
    assert len({tuple(experts) for experts, _, _ in ranks}) == 1 and min(ranks[0][0]) > 0
    assert [held for _, held, _ in ranks] == [planned for _, _, planned in ranks]


@pytest.mark.parametrize("kept", [False, True], ids=["gathered again", "kept"])
def test_trains_as_one_process(kept):
    single_groups()
    expected = train(run_config(MODEL, ParallelConfig(), 4, seed=0))
    parallel = ParallelConfig(reshard_experts_after_forward=not kept)
    compare(distributed.run(4, train, run_config(MODEL, parallel, 4, seed=0))[0], expected)


def legs(config):
    from megatron_glm.parallel.groups import ParallelGroups

    groups = ParallelGroups.create(config.parallel)
    states = test_resharding.leg(config, groups)
    distributed.close_groups(groups)
    return states


def test_a_checkpoint_goes_to_one_process_and_back(tmp_path: Path):
    """Masters and moments bit for bit: from 4 ranks to one, and from one to 4."""
    first, then = (
        replace(test_resharding.run_config(tmp_path, ParallelConfig(), load, exit_interval=1), model=MODEL)
        for load in (False, True)
    )
    _, saved = distributed.run(4, legs, first)[0]
    loaded, saved_by_one = test_resharding.leg(then, single_groups())
    loaded_again, _ = distributed.run(4, legs, then)[0]
    for before, after in ((saved, loaded), (saved_by_one, loaded_again)):
        assert before.keys() == after.keys()
        assert [name for name in before if not torch.equal(before[name], after[name])] == []
