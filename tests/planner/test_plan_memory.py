"""When a rank holds the most: the states of its stages, action by action."""

from __future__ import annotations

import pytest

from megatron_glm.parallel.pipeline.schedule import build_schedule
from megatron_glm.planner.memory import BACKWARDS, COMPLETE, FORWARDS, GATHERED, IDLE, SHARDS, Moments, rank_memory
from tests.helpers.rehearsed import rehearsed
from tests.planner.test_plan_tool import recipe


def test_every_action_is_a_moment_of_what_is_live():
    schedule = build_schedule(2, 1, 4)
    found = Moments(schedule, 0).list  # F F B F B F B B, of which two are like others
    assert [(m.kind, m.live, m.phases) for m in found] == [
        ("F", (1,), (FORWARDS,)),
        ("F", (2,), (FORWARDS,)),
        ("B", (2,), (BACKWARDS,)),
        ("F", (2,), (BACKWARDS,)),
        ("B", (1,), (BACKWARDS,)),
    ]
    assert [m.first for m in found] == [True, False, False, False, False] and [m.last for m in found][-1]


def test_a_stage_is_complete_while_another_still_runs():
    found = Moments(build_schedule(2, 2, 4), 1).list
    assert {phase for m in found for phase in m.phases} == {IDLE, FORWARDS, BACKWARDS, COMPLETE}
    assert found[0].phases == (FORWARDS, IDLE) and found[-1].phases == (BACKWARDS, COMPLETE) and found[-1].last


@pytest.mark.parametrize("pp_rank", range(4))
def test_gathered_weights_of_all_stages_never_meet_the_gradients_of_all(pp_rank):
    """The dense weights of 19 or 20 layers in bf16, and the gradient shards of everything: both are whole once."""
    plan = recipe(64, reshard_after_forward=False)
    dense = 2 * sum(unit.elements for unit in plan.rank_units(pp_rank) if unit.runs and not unit.expert)
    found, shards = rank_memory(plan, pp_rank), plan.held_most(pp_rank).gradients
    assert found[GATHERED] + found[SHARDS] < dense + shards


def test_the_ranks_that_were_rehearsed_are_documented():
    assert len(rehearsed()) >= 16
