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

from megatron_glm.ops.cross_entropy import logit_gradient, row_statistics
from megatron_glm.ops.grad_sum import GradSum, add_product, embedding, grad_sum_of
from megatron_glm.parallel.collectives import gather_rows, scatter_sum_rows, sum_over
from megatron_glm.parallel.shard import ShardInfo
from megatron_glm.torch_private import private

assert_async = private(__name__, "torch._assert_async")

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
            return embedding(tokens, self.weight)
        local = tokens - self.first
        mine = (local >= 0) & (local < self.valid)
        rows = embedding(local.masked_fill(~mine, 0), self.weight)
        return scatter_sum_rows(rows * mine.unsqueeze(-1), self.tp)


class VocabParallelHead(VocabParallel):
    """The output projection together with its loss."""

    def forward(self, hidden: Tensor, labels: Tensor, chunk_size: int, scale: float = 1.0) -> Tensor:
        """Sum of the cross entropies of all labelled positions, times `scale`.

        It is where a backward starts: the gradients are ready after the forward, for a loss whose own gradient is 1,
        so a factor goes into `scale`.

        Args:
            hidden: sequence shard [t/TP, D] after the last norm.
            labels: [t] int64, the same on every TP rank; -100 = no loss.
            chunk_size: rows whose logits exist at a time.
        Returns:
            fp32 scalar, the same on every TP rank.
        """
        # Detached where no gradient is wanted: a Function is told that a parameter needs one even under no_grad.
        total = grad_sum_of(self.weight)
        weight = self.weight if torch.is_grad_enabled() and total is None else self.weight.detach()
        parameter = None if total is None else total.parameter
        hidden = gather_rows(hidden, self.tp)
        return _CrossEntropy.apply(hidden, weight, parameter, total, labels, self, chunk_size, scale)

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 logits [rows, v] of gathered rows; the columns of padding are -inf."""
        logits = F.linear(hidden, self.weight).float()
        if self.valid < logits.shape[1]:
            logits[:, self.valid :] = float("-inf")
        return logits


class _CrossEntropy(torch.autograd.Function):
    """Loss and both gradients chunk by chunk in the forward, where the logits already are.

    The backward hands them out as they are: scaling the weight's, one of the largest tensors of a step, would be a pass
    over it. There is thus one backward for a forward. Where the weight has a sum of gradients already, the forward adds
    to it.
    """

    @staticmethod
    def forward(
        ctx,
        hidden: Tensor,
        weight: Tensor,
        parameter: nn.Parameter | None,
        total: GradSum | None,
        labels: Tensor,
        head: VocabParallelHead,
        chunk_size: int,
        scale: float,
    ):
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        wants_hidden, wants_weight, wants_total = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        present = total.get() if wants_total and total is not None else None
        grad_weight = present  # fp32
        for begin in range(0, hidden.shape[0], chunk_size):
            rows = slice(begin, begin + chunk_size)
            chunk_loss, grad_logits = _chunk(head, weight, hidden[rows], labels[rows], scale)
            loss += chunk_loss
            if grad_hidden is not None:
                torch.mm(grad_logits, weight, out=grad_hidden[rows])
            if wants_weight or wants_total:
                grad_weight = add_product(grad_weight, grad_logits, hidden[rows])
        ctx.gradients = grad_hidden, grad_weight.to(weight.dtype) if wants_weight and grad_weight is not None else None
        ctx.total, ctx.addend = total, grad_weight if wants_total and present is None else None
        return loss

    @staticmethod
    def backward(ctx, grad_loss: Tensor):
        assert_async(grad_loss == 1, "a factor of the loss goes into the head's scale")
        if ctx.addend is not None:
            ctx.total.add(ctx.addend)
        gradients = ctx.gradients
        del ctx.gradients, ctx.addend
        return *gradients, None, None, None, None, None, None


def _chunk(head: VocabParallelHead, weight: Tensor, hidden: Tensor, labels: Tensor, scale: float):
    """Scaled loss sum of one chunk of rows and the gradient of its logits [rows, v] in hidden's dtype."""
    logits = F.linear(hidden, weight)
    counted = labels != IGNORE
    local = labels - head.first
    column = local.masked_fill(~(counted & (local >= 0) & (local < head.valid)), -1)
    lse, target = row_statistics(logits, column, head.valid)
    if head.tp.size() > 1:
        largest = lse.clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=head.tp)
        lse = largest + sum_over((lse - largest).exp(), head.tp).log()
        target = sum_over(target, head.tp)
    loss = (lse - target).masked_fill(~counted, 0.0).sum() * scale
    return loss, logit_gradient(logits, column, counted, lse, head.valid, scale)
