"""--data-parallel-sharding slabs as it runs on CUDA, with streams that only note what they wait for (vector clocks).

Each stream counts its work, and knows how much of the other's is done before what it does next. What reads gathered
weights must come behind their gather, and a gather behind all that has read its slab.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from functools import partialmethod
from types import SimpleNamespace

import pytest
import torch
from torch.autograd.graph import increment_version

from megatron_glm.config import ParallelConfig
from megatron_glm.parallel import sharded, streams
from megatron_glm.parallel.sharded import ShardedChunk, Slab, Unit
from megatron_glm.parallel.sharded_weight import Reduction, ShardedWeight
from megatron_glm.parallel.whole_weights import held_copy
from megatron_glm.training import engine as engine_module
from tests.parallel.test_sharded import COUNTS, built, configured, packs_of

COMPUTE, TRANSFERS = "compute", "transfers"


class Stream:
    def __init__(self, name: str) -> None:
        self.name, self.done = name, Counter()  # of each stream's work, what comes before the next of this one

    def work(self) -> int:
        self.done[self.name] += 1
        return self.done[self.name]

    def record_event(self) -> Counter:
        return Counter(self.done)

    def wait_event(self, event: Counter) -> None:
        self.done |= event


class Device:
    """Both streams, and when each slab was read and written last, in the counts of the stream that did."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.compute, self.transfers = Stream(COMPUTE), Stream(TRANSFERS)
        self.current = self.compute
        self.read: dict[Slab, int] = Counter()
        self.written: dict[Slab, int] = Counter()
        self.changed = self.totals = self.gathers = self.reductions = self.ahead = 0
        patch.setattr(torch.cuda, "current_stream", lambda *_: self.current)
        patch.setattr(torch.cuda, "stream", self.switch)
        patch.setattr(streams, "_transfers", lambda device: self.transfers)
        patch.setattr(engine_module, "record_change", self.record_change)
        patch.setattr(Unit, "device", SimpleNamespace(type="cuda"))
        patch.setattr(Slab, "memory", lambda slab, _: memory(slab))
        for owner, name, check in (
            (Unit, "_issue", self.gather),
            (Unit, "show", self.show),
            (Unit, "release", self.release),
            (ShardedWeight, "refresh", self.refresh),
            (Reduction, "issue", self.reduce),
            (ShardedChunk, "_reduce", self.before_reduction),
            (ShardedChunk, "_before_backward", self.before_backward),
        ):
            patch.setattr(owner, name, partialmethod(_around, check, getattr(owner, name)))

    def record_change(self) -> Counter:
        """The last change, which other work follows."""
        event = self.compute.record_event()
        self.compute.work()
        return event

    @contextmanager
    def switch(self, stream: Stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def gather(self, original, unit: Unit, asynchronous: bool):
        assert self.current is self.transfers and not asynchronous
        assert self.transfers.done[COMPUTE] >= max(self.read[unit.slab], self.changed), "still read, or not yet changed"
        self.ahead += self.transfers.done[COMPUTE] < self.compute.done[COMPUTE]
        self.written[unit.slab] = self.transfers.work()
        self.gathers += 1
        return original(unit, asynchronous)

    def refresh(self, original, weight: ShardedWeight) -> bool:
        if renewed := original(weight):
            self.changed = self.compute.work()
        return renewed

    def show(self, original, unit: Unit) -> None:
        assert self.compute.done[TRANSFERS] >= self.written[unit.slab], "not yet gathered"
        self.compute.work()
        original(unit)

    def before_backward(self, original, state: ShardedChunk, unit: Unit) -> None:
        original(state, unit)
        if unit.returns:
            assert self.compute.done[TRANSFERS] >= self.written[unit.slab], "not yet gathered"
        self.compute.work()

    def release(self, original, unit: Unit) -> None:
        self.read[unit.slab] = self.compute.work()
        original(unit)

    def before_reduction(self, original, state: ShardedChunk, unit: Unit) -> None:
        self.totals = self.compute.work()
        original(state, unit)

    def reduce(self, original, reduction: Reduction, asynchronous: bool):
        assert self.current is self.transfers and self.transfers.done[COMPUTE] >= self.totals, "not yet made"
        self.transfers.work()
        self.reductions += 1
        return original(reduction, asynchronous)


def _around(owner, check, original, *args):
    return check(original, owner, *args)


def memory(slab: Slab) -> torch.Tensor:
    if slab._memory is None:
        slab._memory = torch.empty(slab.nbytes, dtype=torch.uint8)
    return slab._memory


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"recompute_granularity": "full"},
        {"reshard_after_forward": False, "reshard_experts_after_forward": False},
        {"grad_sync": "every"},
    ],
    ids=str,
)
def test_nothing_is_read_or_written_too_early(settings, monkeypatch):
    monkeypatch.setattr(sharded, "holds_whole", lambda group: False)
    config = configured(packs=2, parallel=ParallelConfig(**{"data_parallel_sharding": "slabs"} | settings))
    engine, chunk, _ = built(config)
    device = Device(monkeypatch)
    copies = []
    for step in range(3):
        device.ahead = 0
        engine.evaluate(packs_of(config))
        engine.forward_backward(packs_of(config), COUNTS)
        assert device.compute.done[TRANSFERS] == device.transfers.done[TRANSFERS], "the optimizer would be too early"
        for parameter in chunk.parameters():
            parameter.grad = None
            if (copy := held_copy(parameter)) is not None:  # what AdamW does on CUDA
                copies.append(copy)
                increment_version([copy if step else parameter])  # a load changes the master alone
        device.changed = device.compute.work()
        assert device.ahead or step < 2, "the first gathers of a step are behind the optimizer alone"
    assert device.gathers > 30 and device.reductions > 100 and len(copies) > 100
