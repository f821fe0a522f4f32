"""Pipeline schedules as data: lists of actions made by pure functions, and checked without a process.

A rank runs `chunks` chunks of the model; the stages of the pipeline are numbered in model order, and a `Placement` says
which of them is which chunk of which rank. Everything here counts in actions of a chunk and a micro-batch.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

FORWARD, BACKWARD, WEIGHT = KINDS = ("F", "B", "W")
NAMES = "1f1b", "zero-bubble"  # --pipeline-schedule


class Action(NamedTuple):
    """What a rank does with one chunk and one micro-batch.

    kind: "F" runs the forward; "B" the backward; "W" makes the gradients of weights that a "B" has put off.
    """

    kind: str
    chunk: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}({self.chunk}, {self.micro_batch})"


@dataclass(frozen=True)
class Placement:
    """Which stage each chunk of each rank is: `stages[rank][chunk]`."""

    stages: tuple[tuple[int, ...], ...]

    @classmethod
    def interleaved(cls, pp: int, chunks: int) -> Placement:
        """Stages go round the ranks: chunk c of rank r is stage c * pp + r."""
        return cls(tuple(tuple(range(rank, pp * chunks, pp)) for rank in range(pp)))

    @cached_property
    def of_stage(self) -> dict[int, tuple[int, int]]:
        """(rank, chunk) of each stage."""
        return {stage: (rank, chunk) for rank, row in enumerate(self.stages) for chunk, stage in enumerate(row)}

    @property
    def pp(self) -> int:
        return len(self.stages)

    @property
    def chunks(self) -> int:
        return len(self.stages[0])

    @property
    def count(self) -> int:
        """Stages in all."""
        return self.pp * self.chunks


@dataclass(frozen=True)
class Schedule:
    """What every rank does, in order: `actions[rank]`, each made of the action kinds `kinds`.

    A forward needs the forward of the stage before it, a backward that of the stage after it (the last stage its own
    forward), and a "W" its own backward.
    """

    placement: Placement
    micro_batches: int
    kinds: tuple[str, ...]
    actions: tuple[tuple[Action, ...], ...]

    @property
    def pp(self) -> int:
        return self.placement.pp

    @property
    def chunks(self) -> int:
        return self.placement.chunks

    @property
    def forward_only(self) -> bool:
        return BACKWARD not in self.kinds

    def stage(self, rank: int, action: Action) -> int:
        """The stage that `action` of `rank` is about."""
        return self.placement.stages[rank][action.chunk]

    def cause(self, rank: int, action: Action) -> tuple[int, Action] | None:
        """(rank, action) whose result `action` needs, None for a forward of the first stage."""
        kind, chunk, micro_batch = action
        if kind == WEIGHT:
            return rank, Action(BACKWARD, chunk, micro_batch)
        stage = self.stage(rank, action)
        if kind == BACKWARD and stage == self.placement.count - 1:
            return rank, Action(FORWARD, chunk, micro_batch)
        return self._neighbour(kind, stage + (-1 if kind == FORWARD else 1), micro_batch)

    def effect(self, rank: int, action: Action) -> tuple[int, Action] | None:
        """(rank, action) that needs the tensors which `action` makes, None where they end."""
        kind, _, micro_batch = action
        if kind == WEIGHT:
            return None
        return self._neighbour(kind, self.stage(rank, action) + (1 if kind == FORWARD else -1), micro_batch)

    def _neighbour(self, kind: str, stage: int, micro_batch: int) -> tuple[int, Action] | None:
        if stage not in self.placement.of_stage:
            return None
        rank, chunk = self.placement.of_stage[stage]
        return rank, Action(kind, chunk, micro_batch)

    @cached_property
    def messages(self) -> dict[tuple[int, str, int], list[Action]]:
        """(receiver, kind, sender) -> the receiver's actions that need a message, in the order in which it is sent."""
        found: dict[tuple[int, str, int], list[Action]] = {}
        for sender, actions in enumerate(self.actions):
            for action in actions:
                effect = self.effect(sender, action)
                if effect is not None and effect[0] != sender:
                    found.setdefault((effect[0], action.kind, sender), []).append(effect[1])
        return found


@lru_cache(maxsize=64)  # each step asks again
def build_schedule(
    pp: int,
    chunks: int,
    micro_batches: int,
    group_size: int | None = None,
    forward_only: bool = False,
    name: str = "1f1b",
) -> Schedule:
    """1F1B (one chunk a rank) or interleaved 1F1B, after Narayanan et al. 2021, section 2.2.

    "zero-bubble" is the same order of forwards and backwards, with deferred gradients of weights: `with_idle_filled`.

    Args:
        group_size: micro-batches that one chunk runs in a row (--microbatch-group-size-per-vp-stage), at least and by
            default `pp`. No group is smaller, because ranks can wait for each other around a short last group: what
            is left of the micro-batches makes the groups longer instead.
    """
    if min(pp, chunks, micro_batches) < 1:
        raise ValueError(
            f"a schedule needs at least one of each: --pipeline-model-parallel-size {pp}, "
            f"{chunks} virtual stages a rank, {micro_batches} micro-batches"
        )
    if name not in NAMES:
        raise ValueError(f"--pipeline-schedule {name}: choose from {', '.join(NAMES)}")
    group_size = pp if group_size is None else group_size
    if group_size < pp:
        raise ValueError(
            f"--microbatch-group-size-per-vp-stage {group_size} is below --pipeline-model-parallel-size {pp}: "
            "the ranks would wait for each other"
        )
    count = max(1, micro_batches // group_size)
    edges = [micro_batches * i // count for i in range(count + 1)]
    groups = [range(start, end) for start, end in zip(edges, edges[1:], strict=False)]
    forwards = [Action("F", chunk, mb) for group in groups for chunk in range(chunks) for mb in group]
    backwards = [Action("B", chunk, mb) for group in groups for chunk in reversed(range(chunks)) for mb in group]
    ranks = []
    for rank in range(pp):
        warm_up = pp - rank - 1
        if chunks > 1:  # the first backward waits for the last chunk; twice the distance, as F and B alternate
            warm_up = 2 * warm_up + (chunks - 1) * max(map(len, groups))
        warm_up = min(warm_up, len(forwards))
        steady = [a for pair in zip(forwards[warm_up:], backwards, strict=False) for a in pair]
        rest = backwards[len(forwards) - warm_up :]
        ranks.append(tuple(forwards if forward_only else forwards[:warm_up] + steady + rest))
    kinds = (FORWARD,) if forward_only else (FORWARD, BACKWARD)
    schedule = Schedule(Placement.interleaved(pp, chunks), micro_batches, kinds, tuple(ranks))
    return with_idle_filled(schedule) if name == "zero-bubble" and not forward_only else schedule


def with_idle_filled(schedule: Schedule) -> Schedule:
    """The same order of F and B on each rank, with a "W" wherever the rank would wait, and the rest at the end.

    A backward then reaches the stage before it earlier: with F, B and W of equal time the idle time of 1F1B falls from
    (pp - 1)(F + B + W) to (pp - 1)(F + B - W), as in ZB-H1 (Qi et al. 2023, section 2.2). No rank
    has more micro-batches between F and W than the first one has between F and B in `schedule`.
    """
    steps, pp = [deque(actions) for actions in schedule.actions], schedule.pp
    most = max(peak_live(actions) for actions in schedule.actions)
    made: list[list[Action]] = [[] for _ in range(pp)]
    waiting: list[deque[Action]] = [deque() for _ in range(pp)]
    held = [0] * pp
    ends: dict[tuple[int, Action] | None, int] = {None: 0}
    time = 0
    while any(steps) or any(waiting):
        for rank in range(pp):
            action = steps[rank][0] if steps[rank] else None
            ready = action is not None and ends.get(schedule.cause(rank, action), time + 1) <= time
            if action is not None and ready and (action.kind == BACKWARD or held[rank] < most):
                made[rank].append(steps[rank].popleft())
                ends[rank, action] = time + 1
                if action.kind == FORWARD:
                    held[rank] += 1
                else:
                    waiting[rank].append(Action(WEIGHT, action.chunk, action.micro_batch))
            elif waiting[rank]:
                made[rank].append(waiting[rank].popleft())
                held[rank] -= 1
        time += 1
    return replace(schedule, kinds=KINDS, actions=tuple(map(tuple, made)))


def peak_live(actions: Sequence[Action]) -> int:
    """Most (chunk, micro-batch) pairs that a rank has begun and not ended, with "B" or with the "W" that it leaves."""
    frees = WEIGHT if any(action.kind == WEIGHT for action in actions) else BACKWARD
    return max(itertools.accumulate((action.kind == FORWARD) - (action.kind == frees) for action in actions))


class Step(NamedTuple):
    """One action in an order that respects every dependency; positions are into that order, -1 = none."""

    rank: int
    action: Action
    before: int  # the rank's previous action
    cause: int  # the action whose result this one needs
    cost: int  # where its time is in a list of the times of stage 0's F, B and W, stage 1's, …


@lru_cache(maxsize=64)  # each step asks again
def check_schedule(schedule: Schedule) -> tuple[Step, ...]:
    """Every action exactly once and after its cause, with no rank waiting for ever: all of it in one valid order.

    Messages have no tags, so a rank must also need those of a neighbour in the order in which they are sent.

    Raises:
        ValueError: an action is missing or twice, the ranks wait for each other, or messages are needed out of order.
    """
    wanted = [
        Action(kind, chunk, micro_batch)
        for kind in schedule.kinds
        for chunk in range(schedule.chunks)
        for micro_batch in range(schedule.micro_batches)
    ]
    for rank, actions in enumerate(schedule.actions):
        if sorted(actions) != sorted(wanted):
            wrong = sorted({a for a in {*actions, *wanted} if actions.count(a) != wanted.count(a)})
            raise ValueError(f"schedule of rank {rank}: {wrong[0]} occurs {actions.count(wrong[0])} times")
    steps: list[Step] = []
    position: dict[tuple[int, Action], int] = {}
    done = [0] * schedule.pp
    while len(steps) < schedule.pp * len(wanted):
        before = len(steps)
        for rank, actions in enumerate(schedule.actions):
            while done[rank] < len(actions):
                action = actions[done[rank]]
                cause = schedule.cause(rank, action)
                if cause is not None and cause not in position:
                    break
                previous = position[rank, actions[done[rank] - 1]] if done[rank] else -1
                cost = len(KINDS) * schedule.stage(rank, action) + KINDS.index(action.kind)
                position[rank, action] = len(steps)
                steps.append(Step(rank, action, previous, -1 if cause is None else position[cause], cost))
                done[rank] += 1
        if len(steps) == before:
            stuck = [f"rank {r} at {a[done[r]]}" for r, a in enumerate(schedule.actions) if done[r] < len(a)]
            raise ValueError(f"the schedule cannot go on: {', '.join(stuck)}")
    for (rank, _, sender), messages in sorted(schedule.messages.items()):
        for action, message in zip(sorted(messages, key=lambda each: position[rank, each]), messages, strict=True):
            if action != message:
                raise ValueError(f"rank {rank} needs {action}, and rank {sender} sends {message} first")
    return tuple(steps)


def flat_costs(costs: Sequence[tuple[float, ...]]) -> list[float]:
    """The times of each stage, (forward, backward) or (forward, backward, deferred weight gradients), as one list."""
    return [time for cost in costs for time in (*cost, 0.0)[: len(KINDS)]]


def end_times(steps: Sequence[Step], costs: Sequence[float]) -> list[float]:
    """When each step ends. `costs`: the times of each stage's F, B and W (see `Step.cost` and `flat_costs`)."""
    ends = [0.0] * (len(steps) + 1)  # the extra last entry is the start of time, which -1 points at
    for i, (_, _, before, cause, cost) in enumerate(steps):
        start, other = ends[before], ends[cause]
        ends[i] = (start if start > other else other) + costs[cost]
    return ends[:-1]
