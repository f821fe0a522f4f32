"""Rank arithmetic: which ranks form which group. Pure integers, no process group.

Dense grid  (pp, dp, cp, tp): the last axis is the fastest, so the ranks of one pipeline stage are one block.
Expert grid (pp, edp, ep) over the same blocks: experts fold over dp x cp x tp and are never tensor-parallel.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from megatron_glm.config import ParallelConfig, require_multiple

DENSE_AXES = ("pp", "dp", "cp", "tp")  # slowest first
EXPERT_AXES = ("pp", "edp", "ep")
NODE_AXES = ("pp", "edp", "inter", "node")  # the ep axis cut into nodes of consecutive ranks

# What ParallelGroups holds: name -> (grid axes, the axes along which the ranks of one group differ).
GROUP_AXES = {
    "tp": (DENSE_AXES, ("tp",)),
    "cp": (DENSE_AXES, ("cp",)),
    "tp_cp": (DENSE_AXES, ("cp", "tp")),
    "dp": (DENSE_AXES, ("dp",)),
    "dp_cp": (DENSE_AXES, ("dp", "cp")),
    "tp_cp_dp": (DENSE_AXES, ("dp", "cp", "tp")),
    "pp": (DENSE_AXES, ("pp",)),
    "ep": (EXPERT_AXES, ("ep",)),
    "edp": (EXPERT_AXES, ("edp",)),
    "ep_node": (NODE_AXES, ("node",)),
    "ep_inter": (NODE_AXES, ("inter",)),
}


@dataclass(frozen=True)
class Grid:
    """Axis sizes of one run. Build it with `Grid.create`, which refuses impossible combinations."""

    tp: int
    cp: int
    dp: int
    pp: int
    ep: int
    edp: int
    node: int
    inter: int

    @classmethod
    def create(cls, parallel: ParallelConfig, world_size: int) -> Grid:
        """Raises ValueError, naming flags and numbers, when the axes do not fill `world_size` ranks exactly."""
        dp, pp = parallel.data_parallel_size(world_size), parallel.pipeline_model_parallel_size
        ep, stage = parallel.expert_model_parallel_size, world_size // pp
        ep_flag = "--expert-model-parallel-size"
        require_multiple(f"the ranks of one of {pp} pipeline stages", stage, ep_flag, ep)
        node = parallel.expert_node_size or ep
        require_multiple(ep_flag, ep, "--expert-node-size", node)
        tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
        return cls(tp=tp, cp=cp, dp=dp, pp=pp, ep=ep, edp=stage // ep, node=node, inter=ep // node)

    def groups(self, name: str) -> list[list[int]]:
        """All groups of one kind (a key of GROUP_AXES): disjoint, together all ranks, each ascending."""
        axes, varying = GROUP_AXES[name]
        members = self.first(name)
        starts = self._offsets(axes, [axis for axis in axes if axis not in varying])
        return [[start + member for member in members] for start in starts]

    def first(self, name: str) -> list[int]:
        """The group of one kind that rank 0 is in."""
        axes, varying = GROUP_AXES[name]
        return self._offsets(axes, [axis for axis in axes if axis in varying])

    def _offsets(self, axes: tuple[str, ...], wanted: list[str]) -> list[int]:
        """Ranks that differ from rank 0 along the axes `wanted` only."""
        strides, stride = {}, 1
        for axis in reversed(axes):
            strides[axis] = stride
            stride *= getattr(self, axis)
        ranges = [range(0, getattr(self, axis) * strides[axis], strides[axis]) for axis in wanted]
        return [sum(index) for index in itertools.product(*ranges)]

    def ring_edges(self) -> list[tuple[int, int]]:
        """(rank, rank of the next stage) for every rank; the last stage is followed by the first one."""
        return [pair for ranks in self.groups("pp") for pair in zip(ranks, ranks[1:] + ranks[:1], strict=True)]
