"""Losses that keep a router's experts in even use, and its logits small. They train the router and what is before it.

Both are sums over the rows of the sequence shard: what a row adds depends on other rows only through the number of
tokens that chose each expert, which has no gradient and is summed over the ranks that share a pack.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_glm.config import LossConfig
from megatron_glm.config.model import ModelConfig
from megatron_glm.model.pack import PackRows
from megatron_glm.ops.recompute import keep_choice
from megatron_glm.ops.routing import logits_loss
from megatron_glm.parallel.collectives import sum_over
from megatron_glm.parallel.groups import ParallelGroups


class Balance:
    """The losses of the routers: "aux", DeepSeek-V3's of each sequence, which here is a document; and "z"."""

    def __init__(self, losses: LossConfig, model: ModelConfig, groups: ParallelGroups) -> None:
        self.aux, self.z = losses.moe_aux_loss_coeff, losses.moe_z_loss_coeff
        self.experts, self.chosen, self.group = model.n_routed_experts, model.num_experts_per_tok, groups.tp_cp

    def losses(self, x: Tensor, weight: Tensor, logits: Tensor, ids: Tensor, pack: PackRows) -> dict[str, Tensor]:
        """Sums over documents and over tokens, fp32 scalars. The gradients, and not the values, have the coefficients.

        Args:
            x [t/TP, D], weight [E, D] and logits [t/TP, E] of the router; ids: [t/TP, K] int64, -1 for padding.
        """
        found, used, logits = {}, ids[:, :1] >= 0, logits.detach()
        if self.aux:
            factor = keep_choice(lambda: self._factors(ids, pack))[pack.documents[0]] * used
            loss, gradient = _weighted_scores(logits, factor)
            found["aux"] = logits_loss(x, weight, loss, gradient * self.aux)
        if self.z:
            loss, gradient = _squared_sizes(logits, used)
            found["z"] = logits_loss(x, weight, loss, gradient * self.z)
        return found

    def _factors(self, ids: Tensor, pack: PackRows) -> Tensor:
        """[documents, E] fp32: the gradient of a document's loss sum_i f_i P_i by a row's share s'_i of its scores.

        With n tokens, of which c_i chose expert i: f_i = E c_i / (K n), and P_i is the mean of s'_i over the tokens. In
        even use every f_i is 1, and so is the loss.
        """
        number, lengths = pack.documents
        counts = torch.zeros(len(lengths), self.experts, device=ids.device)
        place = number.unsqueeze(1) * self.experts + ids.clamp(min=0)
        counts.view(-1).index_add_(0, place.flatten(), (ids >= 0).float().flatten())  # whole numbers: in any order
        counts = sum_over(counts, self.group)
        return counts * (self.experts / self.chosen) / lengths.float().square().unsqueeze(1)


def _weighted_scores(logits: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of the factors times each row's scores over their sum, and its gradient by the logits; [t, E] fp32 each."""
    scores = torch.sigmoid(logits)
    total = scores.sum(-1, keepdim=True)
    mean = (factor * scores).sum(-1, keepdim=True) / total
    return mean.sum(), (factor - mean) / total * scores * (1 - scores)


def _squared_sizes(logits: Tensor, used: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of the squared logsumexp of the used rows [t, 1] and its gradient by the logits."""
    size = logits.logsumexp(-1, keepdim=True) * used
    return size.square().sum(), 2 * size * logits.softmax(-1)
