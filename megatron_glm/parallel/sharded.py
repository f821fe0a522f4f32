"""Data parallelism by our own sharding: weights are gathered into the memory in which they compute, without copies.

A unit is what is gathered together: the experts of a layer, the rest of a layer, the embedding, the head, the rest of a
chunk. Layers take turns in two slabs of memory for each kind of unit, allocated once: while one computes, the next one
arrives. A unit always has the same slab, so that a backward finds its weights where its forward has left them.

    forward    layer 0: slab A | layer 1: slab B | layer 2: slab A | ...      gathered while the layer before computes
    backward   layer 2: slab A, still there | layer 1: slab B, still there | layer 0: slab A

What a backward differentiates is run by autograd in the reverse order of the forward, so a layer is done when the
backward reaches the one before it: then its gradients are reduced and its slab is free.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from megatron_glm.config import ParallelConfig
from megatron_glm.ops.fp8 import FP8
from megatron_glm.parallel.groups import ParallelGroups
from megatron_glm.parallel.shard import ModelChunk
from megatron_glm.parallel.sharded_weight import Reduction, ShardedWeight, has_nccl
from megatron_glm.parallel.streams import Transfer
from megatron_glm.parallel.whole_weights import WholeWeights
from megatron_glm.torch_private import private

coalescing, current_backward, queue_callback, tree_leaves = private(
    __name__,
    "torch.distributed.distributed_c10d._coalescing_manager",
    "torch._C._current_graph_task_id",
    "torch.autograd.Variable._execution_engine.queue_callback",
    "torch.utils._pytree.tree_leaves",
)

SHARDED = "sharded"  # attribute of a chunk
NO_BACKWARD = -1  # `current_backward` outside of any
LAYER, EXPERTS, VOCABULARY, ROOT = "layer", "experts", "vocabulary", "root"  # kinds of units
WHOLE_CHUNK, FIRST = -2, -1  # depths of what a chunk has beside its layers, and of the embedding


class Slab:
    """Memory for the gathered weights of one unit at a time."""

    def __init__(self, nbytes: int = 0) -> None:
        self.nbytes = nbytes  # of the largest unit
        self.holder: Unit | None = None
        self.released: torch.Event | None = None  # behind the last product that has read it, on CUDA
        self._memory: Tensor | None = None

    def memory(self, device: torch.device) -> Tensor:
        if self._memory is None:
            self._memory = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
        return self._memory


class Slabs:
    """The slabs of a rank, for all its chunks: of these only one runs at a time."""

    def __init__(self) -> None:
        self._kinds: dict[str, list[Slab]] = {}
        self._units: dict[str, int] = {}

    def turn(self, kind: str, nbytes: int) -> Slab:
        """The slab of the next unit of this kind. Embedding and head share one: no backward needs them."""
        slabs = self._kinds.setdefault(kind, [Slab() for _ in range(1 if kind == VOCABULARY else 2)])
        number = self._units[kind] = self._units.get(kind, -1) + 1
        slab = slabs[number % len(slabs)]
        slab.nbytes = max(slab.nbytes, nbytes)
        return slab


class Unit:
    """The weights of a module that are gathered together.

    Args:
        depth: of its layer; a backward reaches the deepest first. Below 0: it is done when the whole backward is.
        returns: the backward needs the weights again.
    """

    def __init__(self, module: nn.Module, weights: list[ShardedWeight], slab: Slab, depth: int, returns: bool) -> None:
        self.module, self.weights, self.slab, self.depth, self.returns = module, weights, slab, depth, returns
        self.running = self.differentiated = False  # its forward runs; its backward has begun and is not done
        self._transfer: Transfer | None = None
        self._gathered: list[tuple[int, ...]] = []  # versions of what the slab holds
        self._placed = False

    @property
    def in_use(self) -> bool:
        return self.running or self.differentiated

    def gather(self, changed: torch.Event | None = None) -> None:
        """Start to gather the weights, unless the slab holds them as they are now.

        changed: behind the last change of the weights; None: they may have been changed by what was started last.
        """
        renewed = [weight.refresh() for weight in self.weights]
        versions, slab = [weight.versions for weight in self.weights], self.slab
        if slab.holder is self and versions == self._gathered:
            return
        if slab.holder is not None:
            if slab.holder is not self and slab.holder.in_use:
                raise RuntimeError("a layer's weights are needed where those of a layer that is not done are")
            slab.holder.wait()
        self._place()
        slab.holder, self._gathered = self, versions
        after = None
        if changed is not None and not any(renewed):
            after = [changed] if slab.released is None else [changed, slab.released]
        self._transfer = Transfer(self.device, self._issue, self._arrive, after)

    def wait(self) -> None:
        if self._transfer is not None:
            self._transfer.wait()

    def release(self) -> None:
        """What was started is the last that reads the slab."""
        if self.device.type == "cuda":
            self.slab.released = torch.cuda.current_stream(self.device).record_event()

    def show(self) -> None:
        for weight in self.weights:
            weight.show()

    def hide(self) -> None:
        for weight in self.weights:
            weight.hide()

    @property
    def device(self) -> torch.device:
        return self.weights[0].piece.device

    def _place(self) -> None:
        if self._placed:
            return
        memory, start = self.slab.memory(self.device), 0
        for weight in self.weights:
            part = memory[start : start + weight.nbytes]
            weight.place(part.data, part)  # `.data` has a counter of changes of its own
            start += weight.nbytes
        self._placed = True

    def _issue(self, asynchronous: bool) -> list[dist.Work]:
        gathers = [gather for weight in self.weights for gather in weight.gathers()]
        return _together(self.weights[0].group, gathers, asynchronous)

    def _arrive(self) -> None:
        for weight in self.weights:
            weight.arrive()


def _together(group: ProcessGroup, collectives: list[Any], asynchronous: bool) -> list[dist.Work]:
    """Start collectives of one kind, with NCCL in one launch."""
    if has_nccl(group) and collectives:
        with coalescing(group):
            for issue in collectives:
                issue(False)
        return []
    works = [issue(asynchronous) for issue in collectives]
    return [work for work in works if work is not None]


class Order:
    """The units of a forward, or of a backward, as they come, some more than once (MTP): the next time is alike."""

    def __init__(self) -> None:
        self.now: list[Unit] = []
        self._before: list[Unit] = []

    def begin(self) -> None:
        self._before, self.now = self.now, []

    def next_after(self, unit: Unit) -> list[Unit]:
        """What is expected behind this one, which comes now: at most one unit."""
        place = len(self.now)
        self.now.append(unit)
        return self._before[place + 1 : place + 2] if self._before[place : place + 1] == [unit] else []


class ShardedChunk:
    """Gathers the units of a chunk before they run, and reduces their gradients."""

    def __init__(self, chunk: nn.Module, units: list[Unit]) -> None:
        self.units = units
        self._forwards, self._backwards = Order(), Order()
        self.sync, self.last = True, True
        self._backward = NO_BACKWARD  # the last one that has come to this chunk
        self._begun: list[Unit] = []  # whose backward is not done
        self._pending: tuple[Transfer, list[Reduction]] | None = None
        chunk.register_forward_pre_hook(lambda *_: self._begin_forward())
        for unit in units:
            self._hook(unit)

    def _hook(self, unit: Unit) -> None:
        unit.module.register_forward_pre_hook(lambda *_: self._before_forward(unit))
        unit.module.register_forward_hook(lambda _, *values: self._after_forward(unit, *values), always_call=True)

    def gather_ahead(self, changed: torch.Event) -> None:
        """Gather the first units of the next forward behind `changed` alone."""
        self._gather_ahead(self._forwards.now[:2], changed)

    def reduce(self, last: bool) -> None:
        """Reduce all gradients that are there, after a backward or by itself.

        last: no more follow in the step, so wait for what has been started.
        """
        for unit in self.units:
            self._reduce(unit)
        if last:
            self._wait_for_gradients()
            for unit in self.units:  # a shard that is still being sent must not change
                unit.wait()

    def _begin_forward(self) -> None:
        self._forwards.begin()
        self._release_begun()  # of a backward that has failed

    def _before_forward(self, unit: Unit) -> None:
        unit.gather()
        if current_backward() == NO_BACKWARD:  # else it is a recomputation
            self._gather_ahead(self._forwards.next_after(unit))
        unit.wait()
        unit.show()
        unit.running = True

    def _after_forward(self, unit: Unit, inputs: Any, output: Any) -> None:
        unit.hide()
        unit.running = False
        if not unit.in_use:
            unit.release()
        if torch.is_grad_enabled() and current_backward() == NO_BACKWARD:
            passed = set(map(id, tree_leaves(inputs)))  # what is only handed on belongs to an earlier unit
            for tensor in tree_leaves(output):
                if isinstance(tensor, Tensor) and tensor.requires_grad and id(tensor) not in passed:
                    tensor.register_hook(lambda _: self._before_backward(unit))

    def _before_backward(self, unit: Unit) -> None:
        """A gradient of the unit's output is there."""
        if self._backward != current_backward():
            self._backward = current_backward()
            self._backwards.begin()
            queue_callback(self._after_backward)
        if unit.differentiated or unit.depth < 0:
            return
        done = self._release_begun(unit.depth)
        unit.differentiated = True
        self._begun.append(unit)
        if unit.returns:
            unit.gather()
            unit.wait()
        self._gather_ahead([following for following in self._backwards.next_after(unit) if following.returns])
        if self.sync:
            for each in done:
                self._reduce(each)

    def _after_backward(self) -> None:
        self._release_begun()
        if self.sync:
            self.reduce(self.last)

    def _release_begun(self, depth: int = WHOLE_CHUNK) -> list[Unit]:
        """The backward of what lies deeper is done: returns these units."""
        done = [unit for unit in self._begun if unit.depth > depth]
        self._begun = [unit for unit in self._begun if unit.depth <= depth]
        for unit in done:
            unit.differentiated = False
            unit.release()
        return done

    @staticmethod
    def _gather_ahead(units: list[Unit], changed: torch.Event | None = None) -> None:
        """Start to gather what comes next, while others compute, unless its slab is still in use."""
        for unit in units:
            holder = unit.slab.holder
            if holder is None or holder is unit or not holder.in_use:
                unit.gather(changed)

    def _reduce(self, unit: Unit) -> None:
        weights = [weight for weight in unit.weights if weight.total is not None]
        if not weights:
            return
        self._wait_for_gradients()  # so that only one unit's gradients are held for the way
        parts = [Reduction(weight) for weight in weights]
        group = weights[0].group
        by_kind = [[part.issue for part in parts if part.scatters], [part.issue for part in parts if not part.scatters]]

        def issue(asynchronous: bool) -> list[dist.Work]:
            scattered = _together(group, by_kind[0], asynchronous)
            exchanged = [part.issue(asynchronous) for part in parts if not part.scatters]
            return [*scattered, *(work for work in exchanged if work is not None)]

        def finish() -> None:
            for part in parts:
                part.finish()

        self._pending = Transfer(unit.device, issue, finish), parts

    def _wait_for_gradients(self) -> None:
        if self._pending is not None:
            self._pending[0].wait()
            self._pending = None


def shard_into_slabs(
    parallel: ParallelConfig, groups: ParallelGroups, chunk: ModelChunk, bf16: bool, slabs: Slabs
) -> None:
    """`fsdp.shard_chunk` with `ShardedChunk`, which is the chunk's attribute `SHARDED` then.

    What only one rank has to hold is computed with by `WholeWeights`. Weights in FP8 are shared, their scales are not.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if bf16 else torch.float32
    meshes = {group: DeviceMesh.from_group(group, device) for group in {groups.edp, groups.dp_cp}}
    taken: set[nn.Parameter] = set()
    units: list[Unit] = []

    def shard(module: nn.Module | None, kind: str, depth: int) -> None:
        if module is None:
            return
        experts = kind == EXPERTS
        group = groups.edp if experts else groups.dp_cp
        keep = not parallel.reshards(experts)
        mine = [
            (owner, name)
            for owner in module.modules()
            for name, parameter in owner.named_parameters(recurse=False)
            if parameter not in taken
        ]
        if holds_whole(group):
            in_fp8 = {parameter for parameter in module.parameters() if parameter.dtype == FP8}
            WholeWeights(module, taken | in_fp8, dtype, keep=keep, narrow=experts)
        elif mine:
            weights = [ShardedWeight(*place, group, meshes[group], dtype, narrow=experts) for place in mine]
            size = sum(weight.nbytes for weight in weights)
            slab = Slab(size) if keep or kind == ROOT else slabs.turn(kind, size)
            units.append(Unit(module, weights, slab, depth, returns=kind in (LAYER, EXPERTS)))
        taken.update(module.parameters())

    for depth, layer in enumerate(chunk.layers.values()):
        shard(getattr(layer.mlp, "experts", None), EXPERTS, depth)
        shard(layer, LAYER, depth)
    shard(chunk.embed_tokens, VOCABULARY, FIRST)
    shard(chunk.lm_head, VOCABULARY, len(chunk.layers))
    shard(chunk, ROOT, WHOLE_CHUNK)
    setattr(chunk, SHARDED, ShardedChunk(chunk, units))


def holds_whole(group: ProcessGroup) -> bool:
    """Whether a rank of this group has all of a weight, and nothing to gather."""
    return group.size() == 1


def sharded_chunk(chunk: nn.Module) -> ShardedChunk | None:
    """Of a chunk that `shard_into_slabs` has sharded."""
    return getattr(chunk, SHARDED, None)
