"""Choice of experts from the router's scores."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("megatron_glm::select_experts", mutates_args=())
def select_experts(choice: Tensor, k: int, n_group: int, topk_group: int) -> Tensor:
    """The k best experts of each token; an operator of its own so that recomputation keeps the choice.

    Args:
        choice: [t, E] fp32, scores with the correction bias.
        n_group, topk_group: only experts of the `topk_group` best of `n_group` equal groups are eligible, a group's
            score being the sum of its two best experts.
    Returns:
        [t, k] int64 expert ids, the best first; among equal scores the lowest id wins.
    """
    if n_group > 1:
        grouped = choice.view(choice.shape[0], n_group, -1)
        group_score = grouped.topk(2, dim=-1).values.sum(-1)
        best = group_score.sort(dim=-1, descending=True, stable=True).indices[:, :topk_group]
        eligible = torch.zeros_like(group_score, dtype=torch.bool).scatter_(1, best, True)
        choice = grouped.masked_fill(~eligible.unsqueeze(-1), float("-inf")).flatten(1)
    return choice.sort(dim=-1, descending=True, stable=True).indices[:, :k].contiguous()
