"""The head where MTP steps learn to be accepted: end-to-end total variation (arXiv 2606.12370, equation 13).

Step j drafts from q_j at row i what the trunk says with p_j at row i + j. Rejection sampling accepts the draft with
a_j = sum of min(p_j, q_j), and those behind it only if it is accepted: the loss of a row is 1 minus the mean over the
steps of a_1 ... a_j. Only the MTP layer learns: head, embedding and trunk have no gradient of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_glm.ops.cross_entropy import row_statistics
from megatron_glm.ops.total_variation import overlap, overlap_gradient
from megatron_glm.parallel.collectives import gather_rows, gather_values, sum_over
from megatron_glm.parallel.context import with_following
from megatron_glm.parallel.vocab import Prediction, VocabParallelHead, require_ones


class DraftHead(VocabParallelHead):
    """The first prediction is the trunk's, with its cross entropy; the others are MTP steps in their order."""

    def __init__(self, vocab_size: int, hidden_size: int, tp: ProcessGroup, cp: ProcessGroup) -> None:
        super().__init__(vocab_size, hidden_size, tp)
        self.cp = cp

    def forward(
        self, predictions: Sequence[Prediction], chunk_size: int, best: bool = False
    ) -> tuple[list[Tensor], Tensor | None]:
        """As `VocabParallelHead.forward`, with the loss of a step being the sum over the rows of 1 - a_1 ... a_j.

        A row counts if the labels of all its steps do. Scale and weight are the same for all steps.
        """
        trunk, *steps = predictions
        if not steps:
            return super().forward(predictions, chunk_size, best)
        losses, _ = super().forward([trunk], chunk_size)
        main = with_following(gather_values(trunk.hidden.detach(), self.tp), len(steps), self.cp)
        hidden = torch.stack([gather_rows(step.hidden, self.tp) for step in steps])
        chosen = hidden.new_empty(len(predictions), hidden.shape[1], dtype=torch.int64) if best else None
        chains, gradient = self._chains(main, hidden.detach(), steps, chunk_size, hidden.requires_grad, chosen)
        if gradient is not None:
            chains = _GradientIsMade.apply(hidden, gradient, *chains)
        return [*losses, *chains], chosen

    @torch.no_grad()
    def _chains(
        self,
        main: Sequence[Tensor],
        hidden: Tensor,
        steps: Sequence[Prediction],
        chunk_size: int,
        trains: bool,
        chosen: Tensor | None,
    ) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """The losses, and with `trains` the gradient of the hidden states [S, t, D].

        Trunk and steps of so few rows are projected together that there are `chunk_size` rows of logits: each is made
        once, though the gradient of a step needs the acceptance of all steps.

        Args:
            main: the trunk's rows, see `with_following`; chosen: [1 + S, t], filled with the most probable tokens.
        """
        count, weight, scale = len(steps), self.weight.detach(), steps[0].scale
        gradient = torch.empty_like(hidden) if trains else None
        losses = torch.zeros(count, dtype=torch.float32, device=hidden.device)
        counted = torch.stack([step.labels >= 0 for step in steps]).all(0)
        size, first = max(1, (chunk_size - count) // (1 + count)), 0
        for run in main:
            for begin in range(0, len(run) - count, size):
                n = min(size, len(run) - count - begin)
                here = slice(first + begin, first + begin + n)
                logits = F.linear(torch.cat([run[begin : begin + n + count], *hidden[:, here]]), weight)
                if chosen is not None:
                    wanted, *_, drafted = self.best(logits).split([n, count, count * n])
                    chosen[0, here], chosen[1:, here] = wanted, drafted.view(count, n)
                pairs = self._pairs(logits, count, n)
                accepted, below = sum_over(torch.stack([overlap(*pair, self.valid) for pair in pairs], 1), self.tp)
                losses += ((1 - accepted.cumprod(0)) * counted[here]).sum(1) * scale
                if gradient is None:
                    continue
                factors = -scale * steps[0].weight * counted[here] * chain_gradient(accepted)
                for step, pair in enumerate(pairs):
                    grad_logits = overlap_gradient(*pair, below[step], factors[step], self.valid)
                    torch.mm(grad_logits, weight, out=gradient[step, here])
            first += len(run) - count
        return losses.unbind(), gradient

    def _pairs(self, logits: Tensor, steps: int, n: int) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Of each step the trunk's logits and their lse at the rows that it drafts for, and its own.

        Args:
            logits: [n + S + S n, v]: of the trunk at n rows and the S that follow them, and of each step at the n rows.
        """
        none = torch.full((len(logits),), -1, device=logits.device)
        lse = self.whole_lse(row_statistics(logits, none, self.valid)[0])
        found = []
        for step in range(1, 1 + steps):
            trunk, draft = slice(step, step + n), slice(steps + step * n, steps + (step + 1) * n)
            found.append((logits[trunk], lse[trunk], logits[draft], lse[draft]))
        return found


def chain_gradient(accepted: Tensor) -> Tensor:
    """a [S, n] -> the gradient of the sum over the steps j of a_1 ... a_j, by products, as an a may be 0."""
    before = torch.cat([torch.ones_like(accepted[:1]), accepted[:-1].cumprod(0)])
    after = torch.ones_like(accepted)  # 1 + a_m+1 (1 + a_m+2 (1 + ...
    for step in range(len(accepted) - 2, -1, -1):
        after[step] += accepted[step + 1] * after[step + 1]
    return before * after


class _GradientIsMade(torch.autograd.Function):
    """Losses whose common gradient was made with them, handed out in one backward."""

    @staticmethod
    def forward(ctx, hidden: Tensor, gradient: Tensor, *losses: Tensor):
        ctx.gradient = gradient
        return tuple(loss.clone() for loss in losses)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        require_ones(grads)
        gradient = ctx.gradient
        del ctx.gradient
        return gradient, None, *(None for _ in grads)
