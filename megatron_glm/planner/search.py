"""The layouts of a run on given GPUs that fit, the fastest first.

A base cuts the model and its tokens: TP, CP, PP, EP and the micro-batch. `least_work` bounds the time of its step from
below, and bases are planned in the order of these bounds until one is above the times of all results. Of a base's
settings (recomputation, resharding, …) each moves memory against time: of those that fit, the ones are timed that no
other beats in every setting.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from megatron_glm.config import LARGEST_BF16_BETA, OptimizerConfig, RunConfig, flag_name
from megatron_glm.parallel.pipeline.split import AUTO_MAX_CHUNKS, auto_sizes, layout_string
from megatron_glm.planner.machine import Machine
from megatron_glm.planner.memory import fits_in, peak_memory
from megatron_glm.planner.plan import GIB, Plan
from megatron_glm.planner.time import StepTime, least_work, step_time

FEWEST_ROWS, MOST_ROWS = 1024, 32768  # of a rank's micro-batch: what the rates may hold for
LARGEST_TP = 8
# bf16 moments round, and need another beta: they must make a step so much faster.
ROUNDING_PAYS = 1.02
SIZES = (
    "tensor_model_parallel_size",
    "context_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "micro_batch_size",
)
# Settings from the fastest value to the one that needs the least memory.
RECOMPUTE = "recompute_granularity"
SETTINGS: dict[str, tuple[Any, ...]] = {
    "reshard_after_forward": (False, True),
    "reshard_experts_after_forward": (False, True),
    "grad_sync": ("last", "every"),
}
LEAST = {name: values[-1] for name, values in SETTINGS.items()}
DISPATCH = ("moe_token_dispatcher_type", "expert_node_size")
STAGES = ("pipeline_model_parallel_layout", "num_layers_per_virtual_pipeline_stage")


class Base(NamedTuple):
    """One choice of `SIZES`."""

    tp: int
    cp: int
    pp: int
    ep: int
    micro_batch: int


@dataclass(frozen=True)
class Result:
    """A layout that fits, and its time."""

    base: Base
    time: StepTime
    peak: int

    @property
    def order(self) -> tuple[float, int]:
        rounds = self.time.plan.config.optimizer.adam_moments_dtype == "bf16"
        return self.time.seconds * (ROUNDING_PAYS if rounds else 1.0), self.peak


class Search:
    """One search.

    Args:
        config: of a run on `world_size` ranks; its fields named in `given` stay as they are.
        wanted: how many results, each of another base.
    """

    def __init__(
        self,
        config: RunConfig,
        given: frozenset[str],
        world_size: int,
        gpus_per_node: int,
        machine: Machine,
        wanted: int,
    ) -> None:
        self.config, self.given, self.machine, self.wanted = config, given, machine, wanted
        self.world_size, self.gpus_per_node = world_size, gpus_per_node
        self.work: dict[tuple[Base, str], float | None] = {}
        self.refusal = ""  # of the first base that cannot be
        self.nearest: tuple[int, Plan] | None = None  # of all that do not fit

    def run(self) -> list[Result]:
        """The best results, the fastest first.

        Raises:
            ValueError: no layout is legal, or none fits; then with the nearest one and what it lacks.
        """
        found = self._best(FEWEST_ROWS, MOST_ROWS)
        if not found and self.nearest is None:  # nothing else is legal
            found = self._best(1, 2**40)
        if found:
            return found
        if self.nearest is None:
            raise ValueError(f"no layout is possible on {self.world_size} GPUs: {self.refusal or self._why_none()}")
        peak, plan = self.nearest
        more, flags = (peak - self.machine.memory) / GIB, " ".join(layout_flags(plan.config))
        raise ValueError(
            f"no layout fits {self.world_size} GPUs of {self.machine.memory / GIB:.1f} GiB; the nearest needs "
            f"{peak / GIB:.1f} GiB, {more:.1f} more: {flags}"
        )

    def _why_none(self) -> str:
        """What a run says of the sizes that were given, alone."""
        sections = self.config.parallel, self.config.train
        values = {name: value for section in sections for name, value in vars(section).items()}
        self._plan(self._configured(Base(*(values[name] if name in self.given else 1 for name in SIZES)), "full", None))
        return self.refusal or "no axes divide the ranks, the experts and --global-batch-size"

    def _best(self, fewest: int, most: int) -> list[Result]:
        found: dict[Base, Result] = {}
        bounds = sorted((bound, base) for base, bound in self._bounds(fewest, most))
        for bound, base in bounds:
            if bound > self._limit(found):
                break
            for result in self._of_base(base, found):
                if base not in found or result.order < found[base].order:
                    found[base] = result
        best = sorted(found.values(), key=lambda result: result.order)[: self.wanted]
        return sorted(best, key=lambda result: result.time.seconds)

    def _limit(self, found: dict[Base, Result]) -> float:
        """Seconds above which no step is among the results any more."""
        times = sorted(result.time.seconds for result in found.values())
        return times[self.wanted - 1] if len(times) >= self.wanted else float("inf")

    # Bases

    def _options(self, field: str, section: Any, values: Iterator[int] | list[int]) -> list[int]:
        return [getattr(section, field)] if field in self.given else list(values)

    def _bases(self, fewest: int, most: int) -> Iterator[Base]:
        """All that divide ranks, experts, layers and batch, with so many rows in a rank's micro-batch."""
        world, model, parallel, train = self.world_size, self.config.model, self.config.parallel, self.config.train
        length, batch = self.config.data.seq_length, train.global_batch_size
        powers = [2**i for i in range(20)]
        axes = (
            self._options(SIZES[0], parallel, [n for n in powers if n <= min(LARGEST_TP, self.gpus_per_node)]),
            self._options(SIZES[1], parallel, [n for n in powers if n <= world]),
            self._options(SIZES[2], parallel, _divisors(world)),
            self._options(SIZES[3], parallel, _divisors(model.n_routed_experts)),
            self._options(SIZES[4], train, [n for n in powers if n <= batch]),
        )
        for base in itertools.starmap(Base, itertools.product(*axes)):
            ranks = base.tp * base.cp * base.pp
            rows = base.micro_batch * length // (base.tp * base.cp)
            if not fewest <= rows <= most and not ({*SIZES[:2], *SIZES[4:]} <= self.given):
                continue
            if base.cp > 1 and base.micro_batch > 1 and not {SIZES[1], SIZES[4]} & self.given:
                continue  # half of both has the same rows, and gathers less
            whole = world % ranks == 0 and world // base.pp % base.ep == 0 and base.pp <= model.num_hidden_layers
            if whole and batch % (base.micro_batch * (world // ranks)) == 0:
                yield base

    def _bounds(self, fewest: int, most: int) -> Iterator[tuple[Base, float]]:
        """Bases that can be, with seconds that a step takes at least."""
        for base in self._bases(fewest, most):
            if (bound := self._bound(base, self._granularities[-1])) is not None:
                yield base, bound

    def _bound(self, base: Base, granularity: str) -> float | None:
        """Seconds that a step takes at least; None where a run refuses the base."""
        whole = base._replace(pp=1)
        if (key := (whole, granularity)) not in self.work:
            config = self._configured(whole, granularity, None)
            batch = base.micro_batch * self.world_size // (base.tp * base.cp)  # one stage may need a larger one
            train = replace(config.train, global_batch_size=batch, rampup_batch_size=())
            plan = self._plan(replace(config, train=train))
            self.work[key] = None if plan is None else least_work(plan, self.machine)
        if (work := self.work[key]) is None:
            return None
        chunks = min(AUTO_MAX_CHUNKS, self.config.model.num_hidden_layers // base.pp)
        # Filling and draining take pp - 1 stages; a cut by layers may make the ends shorter.
        return work / base.pp * (self._micro_batches(base) + 0.8 * (base.pp - 1) / chunks)

    @property
    def _granularities(self) -> tuple[str, ...]:
        """From the recomputation that needs the least memory on."""
        if RECOMPUTE in self.given:
            return (self.config.parallel.recompute_granularity,)
        return "full", "selective", "none"

    # One base

    def _of_base(self, base: Base, found: dict[Base, Result]) -> Iterator[Result]:
        """Where a recomputation does not fit, none that keeps more does."""
        for granularity in self._granularities:
            bound = self._bound(base, granularity)
            if bound is None or bound > self._limit(found):
                continue
            cuts, kept = self._cuts(base, granularity), []
            smallest = self._plan(self._configured(base, granularity, cuts[-1]))
            if smallest is None or not self._fits(smallest):
                return
            for number, layout in enumerate(cuts):
                last = layout == cuts[-1]
                least = smallest if last else self._plan(self._configured(base, granularity, layout))
                if least is None or not fits_in(least, self.machine.memory):
                    continue
                for plan in self._fitting(least, number, kept):
                    time = step_time(plan, self.machine)
                    if time.seconds <= self._limit(found):
                        yield Result(base, time, peak_memory(plan))

    def _cuts(self, base: Base, granularity: str) -> list[str | None]:
        """Layouts of virtual stages: the fastest, which is auto, and those with fewer of them, which keep less."""
        if base.pp == 1 or set(STAGES) & self.given:
            return [None]
        parallel = self._configured(base, granularity, None).parallel
        length, count = self.config.data.seq_length, self._micro_batches(base)
        model, losses = self.config.model, self.config.losses
        timed = auto_sizes(parallel, model, length, count, losses)
        cuts: list[str | None] = ["auto"]
        fewest = len(timed[0].sizes)
        for _, ends, sizes in timed[1:]:
            if len(sizes) < fewest and (len(sizes) == base.pp or len(sizes) <= 0.7 * fewest):
                cuts, fewest = [*cuts, layout_string(sizes, ends)], len(sizes)
        return cuts

    def _micro_batches(self, base: Base) -> int:
        return self.config.train.global_batch_size * base.tp * base.cp * base.pp // base.micro_batch // self.world_size

    def _fits(self, plan: Plan) -> bool:
        if fits := fits_in(plan, self.machine.memory):
            return fits
        if (peak := peak_memory(plan)) and (self.nearest is None or peak < self.nearest[0]):
            self.nearest = peak, plan
        return False

    def _fitting(self, least: Plan, cut: int, kept: list[tuple[int, ...]]) -> Iterator[Plan]:
        """Plans of faster settings that fit.

        kept: choices that fit, of this cut (its number comes first) and of faster ones; what is not better than one of
        them in anything is left out.
        """
        parallel, optimizer = self.config.parallel, self.config.optimizer
        moments = [optimizer] if least.config.optimizer == optimizer else [optimizer, least.config.optimizer]
        values = [[getattr(parallel, n)] if n in self.given else options for n, options in SETTINGS.items()]
        choices = itertools.product(range(len(moments)), *(range(len(options)) for options in values))
        for choice in sorted(((cut, *choice) for choice in choices), key=sum):
            if any(all(a <= b for a, b in zip(other, choice, strict=True)) for other in kept):
                continue
            chosen = {name: options[i] for name, options, i in zip(SETTINGS, values, choice[2:], strict=True)}
            config = replace(least.config, optimizer=moments[choice[1]])
            plan = least.with_settings(replace(config, parallel=replace(config.parallel, **chosen)))
            if fits_in(plan, self.machine.memory):
                kept.append(choice)
                yield plan

    def _configured(self, base: Base, granularity: str, layout: str | None) -> RunConfig:
        """The run in this base and cut, with the settings that need the least memory; what was given stays."""
        config, given = self.config, self.given
        fields: dict[str, Any] = dict(zip(SIZES[:4], base[:4], strict=True)) | {"sequence_parallel": base.tp > 1}
        fields |= {n: value for n, value in [(RECOMPUTE, granularity), *LEAST.items()] if n not in given}
        if "moe_token_dispatcher_type" not in given:
            spans = base.ep > self.gpus_per_node and base.ep % self.gpus_per_node == 0
            fields["moe_token_dispatcher_type"] = "hybrid" if spans else "alltoall"
            fields["expert_node_size"] = self.gpus_per_node if spans else None
        if base.pp == 1:
            fields |= dict.fromkeys(STAGES)
        elif layout is not None:
            fields["pipeline_model_parallel_layout"] = layout
        train = replace(config.train, micro_batch_size=base.micro_batch)
        optimizer = config.optimizer if "adam_moments_dtype" in given else _narrow(config.optimizer, given)
        return replace(config, parallel=replace(config.parallel, **fields), optimizer=optimizer, train=train)

    def _plan(self, config: RunConfig) -> Plan | None:
        """None, and the first reason is kept, if these ranks cannot run it."""
        try:
            return Plan.create(config, self.world_size, self.gpus_per_node)
        except ValueError as error:
            self.refusal = self.refusal or str(error)
            return None


def _narrow(optimizer: OptimizerConfig, given: frozenset[str]) -> OptimizerConfig:
    """With moments in bf16, and a beta that they can follow where none was given; as it is where they cannot."""
    if max(optimizer.adam_beta1, optimizer.adam_beta2) <= LARGEST_BF16_BETA:
        return replace(optimizer, adam_moments_dtype="bf16")
    if optimizer.adam_beta1 > LARGEST_BF16_BETA or "adam_beta2" in given:
        return optimizer
    return replace(optimizer, adam_moments_dtype="bf16", adam_beta2=0.95)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def layout_flags(config: RunConfig) -> list[str]:
    """The flags of what is searched, as a command line has them."""
    parallel, optimizer = config.parallel, config.optimizer
    fields: dict[str, Any] = {n: getattr(parallel, n) for n in (*SIZES[:4], RECOMPUTE, *SETTINGS, *STAGES, *DISPATCH)}
    fields["micro_batch_size"] = config.train.micro_batch_size
    if optimizer.adam_moments_dtype == "bf16":
        fields |= {n: getattr(optimizer, n) for n in ("adam_beta2", "adam_moments_dtype")}
    given = {flag_name(name): str(value) for name, value in fields.items() if value is not None}
    words = [word.lower() if word in ("True", "False") else word for pair in given.items() for word in pair]
    return words + ["--sequence-parallel"] * parallel.sequence_parallel
