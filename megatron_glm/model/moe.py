"""Mixture of experts: routed experts behind a dispatcher, and the shared expert beside them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_glm.config.model import ModelConfig
from megatron_glm.config.parameters import ADAPTER
from megatron_glm.model.balance import Balance
from megatron_glm.model.mlp import MLP
from megatron_glm.model.pack import PackRows
from megatron_glm.model.router import Router
from megatron_glm.ops.experts import ExpertAdapters, grouped_mlp
from megatron_glm.ops.fp8 import BLOCK, BLOCKS, FP8, Blocks, scale_shape
from megatron_glm.ops.fp8_products import HeldInFp8
from megatron_glm.ops.grad_sum import AS_THEY_ARE
from megatron_glm.parallel.dispatch.local import Dispatcher
from megatron_glm.parallel.groups import ParallelGroups
from megatron_glm.parallel.shard import ShardInfo
from megatron_glm.parallel.streams import beside

MATRICES = {"gate_up": 2, "down": 1}  # of the experts, and how many each stacks


class Experts(nn.Module):
    """This rank's routed experts, fused: gate_up [e, 2F, D] (gate rows first), down [e, D, F]."""

    gate_up: nn.Parameter
    down: nn.Parameter

    def __init__(self, config: ModelConfig, groups: ParallelGroups) -> None:
        super().__init__()
        experts = config.n_routed_experts
        width, hidden = config.moe_intermediate_size, config.hidden_size
        shapes = {"gate_up": (experts, 2 * width, hidden), "down": (experts, hidden, width)}
        self.products, self.ep = AS_THEY_ARE, groups.ep
        self.adapter_scale = 0.0  # 0: without adapters
        self.shards = {}
        for name, shape in shapes.items():
            self._add(name, shape)

    def _add(self, name: str, shape: tuple[int, int, int]) -> None:
        local = shape[0] // self.ep.size()
        setattr(self, name, nn.Parameter(torch.empty(local, *shape[1:])))
        offsets = (self.ep.rank() * local, 0, 0)
        self.shards[name] = ShardInfo(shape, offsets, replica_groups=(), sum_groups=(), expert=True)

    def adapt(self, rank: int, scale: float) -> None:
        """Each expert's gate, up and down get an adapter: A [e, rank, in], B [e, out, rank]."""
        experts, hidden, width = self.shards["down"].global_shape
        for name, (out, into) in {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}.items():
            self._add(f"{name}_lora_A", (experts, rank, into))
            self._add(f"{name}_lora_B", (experts, out, rank))
        self.adapter_scale = scale

    def hold_in_fp8(self) -> None:
        """Holds the frozen matrices in e4m3, with buffers of scales [e, parts, …]: gate and up apart.

        The buffers are part of no checkpoint: what is frozen is in none, either.
        """
        for name, parts in MATRICES.items():
            weight = getattr(self, name)
            setattr(self, name, nn.Parameter(torch.empty(weight.shape, dtype=FP8), requires_grad=False))
            experts, rows, columns = weight.shape
            scales = torch.empty(experts, *scale_shape((parts, rows // parts, columns)))
            self.register_buffer(f"{name}_scale", scales, persistent=False)
        if self.products is AS_THEY_ARE:
            self.products = HeldInFp8()

    @property
    def held_in_fp8(self) -> list[str]:
        """The names of the matrices that are."""
        return [name for name in MATRICES if hasattr(self, f"{name}_scale")]

    def _matrix(self, name: str) -> Tensor:
        """What computes: the parameter, or its numbers in FP8 with the scales that go with them."""
        if name not in self.held_in_fp8:
            return getattr(self, name)
        blocks = Blocks(getattr(self, name).detach(), getattr(self, f"{name}_scale"))
        rows = blocks.values.shape[1] // blocks.scales.shape[1]
        if rows % BLOCK[0] == 0:  # then the blocks of the parts are those of the whole
            blocks = Blocks(blocks.values, blocks.scales.flatten(1, 2))
        setattr(blocks.values, BLOCKS, blocks)
        return blocks.values

    def forward(self, rows: Tensor, row_weights: Tensor, counts: Tensor) -> Tensor:
        adapters = None
        if self.adapter_scale:
            gate, up, down = ([getattr(self, f"{name}_{end}") for end in ADAPTER] for name in ("gate", "up", "down"))
            adapters = ExpertAdapters(gate, up, down, self.adapter_scale)
        gate_up, down = map(self._matrix, MATRICES)
        return grouped_mlp(rows, row_weights, counts, gate_up, down, self.products, adapters)


class MoE(nn.Module):
    """y = sum_k w_k * expert_k(x) + shared(x) on [t/TP, D]; experts are never tensor-parallel."""

    def __init__(
        self, config: ModelConfig, groups: ParallelGroups, dispatcher: Dispatcher, balance: Balance | None = None
    ) -> None:
        super().__init__()
        self.gate = Router(config, groups, balance)
        self.experts = Experts(config, groups)
        # Under TP the shared expert communicates, too.
        self.overlaps_dispatch = groups.ep.size() > 1 and groups.tp.size() == 1
        width = config.n_shared_experts * config.moe_intermediate_size
        self.shared_experts = MLP(config.hidden_size, width, groups.tp)
        self.dispatcher = dispatcher

    def forward(self, x: Tensor, pack: PackRows) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """-> output [t/TP, D], the chosen experts [t/TP, K] int64 (-1 for padding), and what `Balance.losses` gives."""
        ids, weights, losses = self.gate(x, pack)
        # The shared expert runs while the rows travel to other ranks. It is started before the routed experts, because
        # a layer's recomputation ends with the last tensor that the backward needs: where that is theirs, it skips the
        # down projection and `combine`.
        shared = beside(self.overlaps_dispatch, self.shared_experts, x)
        rows, row_weights, counts, handle = self.dispatcher.dispatch(x, ids, weights)
        routed = self.dispatcher.combine(self.experts(rows, row_weights, counts), handle)
        return routed + shared(), ids, losses
