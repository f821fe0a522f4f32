"""Router of the mixture of experts: sigmoid scores, a correction bias that only steers the choice."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from megatron_glm.config.model import ModelConfig
from megatron_glm.model.balance import Balance
from megatron_glm.model.pack import PackRows
from megatron_glm.ops.recompute import keep_choice
from megatron_glm.ops.routing import expert_weights, linear_in_fp32, select_experts
from megatron_glm.parallel.collectives import sum_over
from megatron_glm.parallel.groups import ParallelGroups
from megatron_glm.parallel.linear import replicated
from megatron_glm.parallel.shard import ShardInfo


class Router(nn.Module):
    """Chooses num_experts_per_tok experts for each token of the sequence shard."""

    e_score_correction_bias: Tensor
    counts: Tensor

    def __init__(self, config: ModelConfig, groups: ParallelGroups, balance: Balance | None = None) -> None:
        super().__init__()
        experts, shape = config.n_routed_experts, (config.n_routed_experts, config.hidden_size)
        self.config, self.stage, self.balance = config, groups.tp_cp_dp, balance
        self.weight = nn.Parameter(torch.empty(shape))
        self.register_buffer("e_score_correction_bias", torch.empty(experts, dtype=torch.float32))
        # Tokens that chose each expert since the last step, on this rank; counted by the chunk, outside recomputation.
        self.register_buffer("counts", torch.zeros(experts, dtype=torch.int64), persistent=False)
        everywhere = ShardInfo((experts,), (0,), replica_groups=(self.stage,), sum_groups=(), expert=False)
        self.shards = {"weight": replicated(shape, groups.tp), "e_score_correction_bias": everywhere}

    def forward(self, x: Tensor, pack: PackRows) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Route.

        Args:
            x: [t/TP, D].
        Returns:
            ids [t/TP, K] int64, -1 for padding, weights [t/TP, K] fp32, and in training what `Balance.losses` gives.
        """
        config = self.config
        logits = linear_in_fp32(x, self.weight)
        choice = torch.sigmoid(logits.detach()) + self.e_score_correction_bias
        limits = config.num_experts_per_tok, config.n_group, config.topk_group
        ids = keep_choice(lambda: select_experts(choice, *limits))
        weights = expert_weights(x, self.weight, logits, ids, config.norm_topk_prob, config.routed_scaling_factor)
        if pack.valid is not None:
            ids = ids.masked_fill(~pack.valid.unsqueeze(1), -1)
        if self.balance is None or not torch.is_grad_enabled():
            return ids, weights, {}
        return ids, weights, self.balance.losses(x, self.weight, logits, ids, pack)

    def count(self, ids: Tensor) -> None:
        """Add a micro-batch's choices to the counts; -1 counts for nobody."""
        ids = ids.flatten()
        self.counts.scatter_add_(0, ids.clamp(min=0), (ids >= 0).long())


@torch.no_grad()
def update_router_biases(routers: Iterable[Router], rate: float) -> list[Tensor]:
    """At the end of a step: bias += rate * sign(mean count - count), where the router is trained; counting starts anew.

    Returns:
        the int64 counts [E] of each router, summed over all ranks that routed different tokens.
    """
    totals = []
    for router in routers:
        counts = sum_over(router.counts.clone(), router.stage)
        # In whole numbers: sum - E * count has the sign of mean - count and is exact.
        if router.weight.requires_grad:
            router.e_score_correction_bias += rate * torch.sign(counts.sum() - counts.numel() * counts)
        router.counts.zero_()
        totals.append(counts)
    return totals
