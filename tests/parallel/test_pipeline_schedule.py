"""Schedules as data: complete, free of deadlock, and as idle as the formulas say."""

import subprocess
import sys
from dataclasses import replace

import pytest

from megatron_glm.parallel.pipeline.schedule import Action, build_schedule, check_schedule
from megatron_glm.parallel.pipeline.simulate import main, simulate


@pytest.mark.parametrize("pp", range(1, 9))
def test_every_schedule_is_complete_and_cannot_deadlock(pp):
    for chunks in range(1, 5):
        for micro_batches in range(1, 17):
            for group_size in (None, pp + 1, 2 * pp):
                check_schedule(build_schedule(pp, chunks, micro_batches, group_size))
            check_schedule(build_schedule(pp, chunks, micro_batches, forward_only=True))


@pytest.mark.parametrize("pp, chunks, micro_batches", [(2, 1, 8), (4, 1, 8), (4, 2, 8), (4, 9, 4), (8, 3, 16)])
def test_idle_share_of_equal_stages(pp, chunks, micro_batches):
    """(pp - 1) / (chunks * micro-batches + pp - 1), Narayanan et al. 2021."""
    schedule = build_schedule(pp, chunks, micro_batches)
    idle = simulate(schedule, [(1.0, 2.0)] * (pp * chunks)).idle
    assert idle == pytest.approx((pp - 1) / (chunks * micro_batches + pp - 1))


def test_1f1b_keeps_no_more_micro_batches_than_stages_follow():
    result = simulate(build_schedule(4, 1, 16), [(1.0, 2.0)] * 4)
    assert result.peak_live == (4, 3, 2, 1)
    assert result.makespan == 3 * (16 + 3)


@pytest.mark.parametrize("pp, chunks, micro_batches", [(2, 1, 8), (4, 1, 8), (8, 1, 16), (4, 2, 8), (4, 3, 12)])
def test_deferred_gradients_fill_idle_time(pp, chunks, micro_batches):
    """(pp - 1)(F + B - W) is left, Qi et al. 2023, in the order and with the memory of 1F1B's first rank."""
    plain = build_schedule(pp, chunks, micro_batches)
    schedule = build_schedule(pp, chunks, micro_batches, name="zero-bubble")
    check_schedule(schedule)
    result = simulate(schedule, [(1.0, 1.0, 1.0)] * (pp * chunks))
    assert result.makespan == 3 * chunks * micro_batches + pp - 1
    assert result.peak_live == (simulate(plain, [(1.0, 2.0)] * (pp * chunks)).peak_live[0],) * pp
    for actions, before in zip(schedule.actions, plain.actions, strict=True):
        assert tuple(action for action in actions if action.kind != "W") == before
    assert build_schedule(pp, chunks, micro_batches, None, True, "zero-bubble").kinds == ("F",)


def test_simulated_spans_respect_costs_and_dependencies():
    schedule = build_schedule(2, 2, 3)
    costs = [(1.0, 3.0), (2.0, 5.0), (1.5, 2.5), (4.0, 8.0)]
    spans = {
        (rank, a): (start, end) for rank, row in enumerate(simulate(schedule, costs).spans) for start, end, a in row
    }
    for (rank, action), (start, end) in spans.items():
        assert end - start == pytest.approx(costs[action.chunk * 2 + rank][action.kind == "B"])
        cause = schedule.cause(rank, action)
        assert cause is None or spans[cause][1] <= start


def test_cause_and_effect_are_inverse():
    schedule = build_schedule(3, 2, 4)
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            effect = schedule.effect(rank, action)
            assert effect is None or schedule.cause(*effect) == (rank, action)


def test_arrivals_are_in_the_order_of_the_sender_and_hold_every_message():
    schedule = build_schedule(4, 3, 8)
    for rank in range(4):
        for kind in "FB":
            sender = (rank + (-1 if kind == "F" else 1)) % 4
            arrivals = schedule.messages.get((rank, kind, sender), [])
            causes = [schedule.cause(rank, arrival) for arrival in arrivals]
            order = [schedule.actions[sender].index(action) for _, action in causes]
            assert {other for other, _ in causes} == {sender} and order == sorted(order)
            remote = {a for a in schedule.actions[rank] if (schedule.cause(rank, a) or (rank,))[0] != rank}
            assert {a for a in remote if a.kind == kind} == set(arrivals)


def broken(change) -> None:
    schedule = build_schedule(2, 2, 4)
    ranks = [list(actions) for actions in schedule.actions]
    change(ranks)
    check_schedule(replace(schedule, actions=tuple(map(tuple, ranks))))


def test_checker_catches_broken_schedules():
    def drop(ranks):
        ranks[1].remove(Action("B", 0, 2))

    def repeat(ranks):
        ranks[0][3] = ranks[0][2]

    def backward_first(ranks):
        row = ranks[1]
        row.insert(0, row.pop(row.index(Action("B", 1, 0))))

    def wait_for_each_other(ranks):
        # Rank 0 wants the last gradient before it makes the activation that this gradient depends on.
        row = ranks[0]
        row.insert(row.index(Action("F", 1, 3)), row.pop(row.index(Action("B", 1, 3))))

    def send_out_of_order(ranks):
        ranks[0][:2] = reversed(ranks[0][:2])

    for change, words in (
        (send_out_of_order, r"rank 1 needs F\(0, 0\), and rank 0 sends F\(0, 1\) first"),
        (drop, r"rank 1: B\(0, 2\) occurs 0 times"),
        (repeat, "rank 0: .* times"),
        (backward_first, "cannot go on: rank 0 at .*, rank 1 at B"),
        (wait_for_each_other, "cannot go on: .*rank 0 at B\\(1, 3\\)|cannot go on: rank 0"),
    ):
        with pytest.raises(ValueError, match=words):
            broken(change)
    broken(lambda ranks: None)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ((4, 2, 8, 3), ["--microbatch-group-size-per-vp-stage 3", "--pipeline-model-parallel-size 4"]),
        ((4, 2, 0), ["0 micro-batches"]),
    ],
)
def test_impossible_schedules_are_refused_by_name(arguments, words):
    with pytest.raises(ValueError) as error:
        build_schedule(*arguments)
    assert all(word in str(error.value) for word in words)


def test_command_prints_idle_share_peak_and_timeline():
    command = [sys.executable, "-m", "megatron_glm.parallel.pipeline.simulate"]
    flags = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --micro-batches 4".split()
    lines = subprocess.run(command + flags, capture_output=True, text=True, check=True).stdout.splitlines()
    assert "idle 11.1%" in lines[0] and lines[1].endswith(" 5 3")
    assert [line.split("|")[0].strip() for line in lines[2:]] == ["rank  0", "rank  1"]
    failed = subprocess.run([*command, *flags, "--stage-costs", "1:3,1:3"], capture_output=True, text=True)
    assert failed.returncode == 2 and "2 stage costs for 2 x 2 stages" in failed.stderr


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--stage-costs 1", "--stage-costs 1: '1' is not two positive numbers"),
        ("--stage-costs 1:2:3", "'1:2:3' is not two positive numbers"),
        ("--stage-costs 1:3,0:0", "'0:0' is not two positive numbers"),
        ("--stage-costs nan:1", "'nan:1' is not two positive numbers"),
        ("--micro-batches 0", "0 micro-batches"),
        ("--pipeline-model-parallel-layout auto", "--pipeline-model-parallel-layout needs --hf-config"),
        ("--hf-config glm5.2-tiny --stage-costs 1:2", "--stage-costs does not go with --hf-config"),
        ("--hf-config glm5.2-tiny --seq-length 0", "--seq-length is 0"),
        (
            "--hf-config glm5.2-tiny --num-layers-per-virtual-pipeline-stage 1 --pipeline-model-parallel-layout auto",
            "both set the stages: give one",
        ),
    ],
)
def test_command_refuses_by_name(flags, words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["schedule", "--pipeline-model-parallel-size", "2", *flags.split()])
    with pytest.raises(SystemExit) as exit:
        main()
    assert exit.value.code == 2 and words in capsys.readouterr().err
