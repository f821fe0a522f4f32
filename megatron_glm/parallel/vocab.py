"""Embedding and head cut over the vocabulary, and the cross entropy that never holds [T, V].

The vocabulary is padded to a multiple of the TP size in memory only: padding rows are masked out of the
softmax, get no gradient and are in no checkpoint.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_glm.parallel.collectives import gather_rows, scatter_sum_rows, sum_over
from megatron_glm.parallel.shard import ShardInfo

IGNORE = -100  # label of a position without loss


class VocabParallel(nn.Module):
    """Rows [v, D] of a vocabulary matrix [V, D]; `first` is the token id of the first local row."""

    def __init__(self, vocab_size: int, hidden_size: int, tp: ProcessGroup) -> None:
        super().__init__()
        rows = -(-vocab_size // tp.size())
        self.tp = tp
        self.first = tp.rank() * rows
        self.valid = max(0, min(rows, vocab_size - self.first))
        self.weight = nn.Parameter(torch.empty(rows, hidden_size))
        info = ShardInfo((vocab_size, hidden_size), (self.first, 0), replica_groups=(), sum_groups=(), expert=False)
        self.shards = {"weight": info}


class VocabParallelEmbedding(VocabParallel):
    """tokens [t] int64, the same on every TP rank -> sequence shard [t/TP, D]."""

    def forward(self, tokens: Tensor) -> Tensor:
        if self.tp.size() == 1:
            return F.embedding(tokens, self.weight)
        local = tokens - self.first
        mine = (local >= 0) & (local < self.valid)
        rows = F.embedding(local.masked_fill(~mine, 0), self.weight)
        return scatter_sum_rows(rows * mine.unsqueeze(-1), self.tp)


class VocabParallelHead(VocabParallel):
    """The output projection together with its loss."""

    def forward(self, hidden: Tensor, labels: Tensor, chunk_size: int) -> Tensor:
        """Sum of the cross entropies of all labelled positions.

        Args:
            hidden: sequence shard [t/TP, D] after the last norm.
            labels: [t] int64, the same on every TP rank; -100 = no loss.
            chunk_size: rows whose logits exist at a time.
        Returns:
            fp32 scalar, the same on every TP rank.
        """
        # Detached where no gradient is wanted: a Function is told that a parameter needs one even under no_grad.
        weight = self.weight if torch.is_grad_enabled() else self.weight.detach()
        return _CrossEntropy.apply(gather_rows(hidden, self.tp), weight, labels, self, chunk_size)

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 logits [rows, v] of gathered rows; the columns of padding are -inf."""
        logits = F.linear(hidden, self.weight).float()
        if self.valid < logits.shape[1]:
            logits[:, self.valid :] = float("-inf")
        return logits


class _CrossEntropy(torch.autograd.Function):
    """Loss and both gradients chunk by chunk in the forward, where the logits already are.

    The loss is a sum, so the backward only scales what the forward has computed: in place, because the weight's
    gradient is among the largest tensors of a step. There is thus one backward for a forward.
    """

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, labels: Tensor, head: VocabParallelHead, chunk_size: int):
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.zeros_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        for begin in range(0, hidden.shape[0], chunk_size):
            rows = slice(begin, begin + chunk_size)
            chunk_loss, grad_logits = _chunk(head, weight, hidden[rows], labels[rows])
            loss += chunk_loss
            grad_logits = grad_logits.to(hidden.dtype)
            if wants_hidden:
                grad_hidden[rows] = grad_logits @ weight
            if wants_weight:
                grad_weight += grad_logits.T @ hidden[rows]
        ctx.gradients = grad_hidden, grad_weight
        ctx.weight_dtype = weight.dtype
        return loss

    @staticmethod
    def backward(ctx, grad_loss: Tensor):
        grad_hidden, grad_weight = ctx.gradients
        del ctx.gradients
        if grad_hidden is not None:
            grad_hidden.mul_(grad_loss)
        if grad_weight is not None:
            grad_weight = grad_weight.mul_(grad_loss).to(ctx.weight_dtype)
        return grad_hidden, grad_weight, None, None, None


def _chunk(head: VocabParallelHead, weight: Tensor, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Loss sum of one chunk of rows and the gradient of its logits [rows, v] fp32."""
    logits = F.linear(hidden, weight).float()
    logits[:, head.valid :] = float("-inf")
    counted = labels != IGNORE
    local = labels - head.first
    mine = counted & (local >= 0) & (local < head.valid)
    column = local.masked_fill(~mine, 0).unsqueeze(1)

    largest = logits.max(dim=1).values
    if head.tp.size() > 1:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=head.tp)
    target = logits.gather(1, column).squeeze(1).masked_fill(~mine, 0.0)
    probability = logits.sub_(largest.unsqueeze(1)).exp_()
    total = sum_over(probability.sum(dim=1), head.tp)
    target = sum_over(target, head.tp)
    loss = (total.log() + largest - target).masked_fill(~counted, 0.0).sum()

    probability.div_(total.unsqueeze(1)).masked_fill_(~counted.unsqueeze(1), 0.0)
    probability.scatter_add_(1, column, -mine.float().unsqueeze(1))
    return loss, probability
