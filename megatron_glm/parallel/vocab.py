"""Embedding and head cut over the vocabulary, and the cross entropy that never holds [T, V].

The vocabulary is padded to a multiple of the TP size in memory only: padding rows are masked out of the
softmax, get no gradient and are in no checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

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

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        tp: ProcessGroup,
        copies: ProcessGroup | None = None,
        copy: bool = False,
    ) -> None:
        """Copies of the rows have a part of the gradient each.

        Args:
            copies: the pipeline ranks that hold one; copy: this is one of another chunk's on the same rank.
        """
        super().__init__()
        rows = -(-vocab_size // tp.size())
        self.tp = tp
        self.first = tp.rank() * rows
        self.valid = max(0, min(rows, vocab_size - self.first))
        self.weight = nn.Parameter(torch.empty(rows, hidden_size))
        both = () if copies is None else (copies,)
        info = ShardInfo((vocab_size, hidden_size), (self.first, 0), both, both, expert=False, copy=copy)
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


class RowAnswers(NamedTuple):
    """What a model says of each local row: the log-probability of a token, fp32 [t], and that token, int64 [t].

    Rows without a label have 0 and -100.
    """

    log_probs: Tensor
    tokens: Tensor


class Prediction(NamedTuple):
    """What the head is to predict from some hidden states.

    hidden: sequence shard [t/TP, D] after the last norm; labels: [t] int64, the same on every TP rank; -100 = no loss.
    scale: factor of the loss; weight: another one, of its gradients alone.
    trains_head: whether the head's own weight has a gradient of it.
    row_factors: given the answers of all rows, a factor [t] fp32 for the loss of each; or None: no loss is wanted. It
        is called before any gradient is made, so that a factor may depend on all log-probabilities. The answers are
        about the labels, or about the most probable tokens where the head is asked for these.
    """

    hidden: Tensor
    labels: Tensor
    scale: float = 1.0
    weight: float = 1.0
    trains_head: bool = True
    row_factors: Callable[[RowAnswers], Tensor | None] | None = None


class VocabParallelHead(VocabParallel):
    """The output projection together with its loss."""

    def forward(
        self, predictions: Sequence[Prediction], chunk_size: int, best: bool = False
    ) -> tuple[list[Tensor], Tensor | None]:
        """The sum of the cross entropies of all labelled positions of each prediction, times its scale.

        It is where a backward starts: the gradients are ready after the forward, for losses whose own gradient is 1, so
        factors go into `Prediction`. All at once, because they add to one gradient of the weight.

        Args:
            chunk_size: rows whose logits exist at a time.
            best: return the most probable tokens, too.
        Returns:
            fp32 scalars, and int64 [predictions, t], the lowest id among equals; the same on every TP rank.
        """
        total = grad_sum_of(self.weight)
        # Detached where no gradient is wanted: a Function is given a parameter as one that needs it even under no_grad.
        weight = self.weight if torch.is_grad_enabled() and total is None else self.weight.detach()
        parameter = None if total is None else total.parameter
        hidden = [gather_rows(each.hidden, self.tp) for each in predictions]
        rows = hidden[0] if len(hidden) == 1 else torch.cat(hidden)
        *losses, chosen = _CrossEntropy.apply(
            rows, weight, parameter, total, tuple(predictions), self, chunk_size, best
        )
        return losses, chosen if best else None

    def whole_lse(self, lse: Tensor) -> Tensor:
        """Logs of the sums of exp [n] over this rank's columns -> over the whole vocabulary."""
        if self.tp.size() == 1:
            return lse
        largest = lse.clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.tp)
        return largest + sum_over((lse - largest).exp(), self.tp).log()

    def best(self, logits: Tensor) -> Tensor:
        """Ids [rows] of the largest logit of each row [v] over all TP ranks; the lowest among equals."""
        value, column = logits[:, : self.valid].max(dim=-1)
        token = column + self.first
        if self.tp.size() == 1:
            return token
        largest = value.clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.tp)
        token = torch.where(value == largest, token, torch.iinfo(torch.int64).max)
        dist.all_reduce(token, op=dist.ReduceOp.MIN, group=self.tp)
        return token

    def statistics(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the loss needs of logits [rows, v] and labels [rows] int64: three tensors [rows].

        The label's column, -1 where it is another rank's or none; over the whole vocabulary, fp32, the log of the sum
        of exp, and the label's logit, 0 without one.
        """
        local = labels - self.first
        column = local.masked_fill((local < 0) | (local >= self.valid), -1)
        lse, target = row_statistics(logits, column, self.valid)
        return column, self.whole_lse(lse), sum_over(target, self.tp)

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 logits [rows, v] of gathered rows; the columns of padding are -inf."""
        logits = F.linear(hidden, self.weight).float()
        if self.valid < logits.shape[1]:
            logits[:, self.valid :] = float("-inf")
        return logits


class _CrossEntropy(torch.autograd.Function):
    """Losses and both gradients chunk by chunk in the forward, where the logits already are.

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
        predictions: tuple[Prediction, ...],
        head: VocabParallelHead,
        chunk_size: int,
        best: bool,
    ):
        losses = [torch.zeros((), dtype=torch.float32, device=hidden.device) for _ in predictions]
        tokens = hidden.shape[0] // len(predictions)
        chosen = torch.empty(len(predictions), tokens if best else 0, dtype=torch.int64, device=hidden.device)
        wants_hidden, wants_weight, wants_total = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        present = total.get() if wants_total and total is not None else None
        grad_weight = present  # fp32
        for i, prediction in enumerate(predictions):
            factors, labels = None, prediction.labels
            if prediction.row_factors is not None:
                found = _answers(head, hidden[i * tokens :][:tokens], weight, None if best else labels, chunk_size)
                factors = prediction.row_factors(found)
                if factors is None:
                    chosen[i] = found.tokens if best else chosen[i]
                    continue
            for begin in range(0, tokens, chunk_size):
                end = min(begin + chunk_size, tokens)
                rows = slice(i * tokens + begin, i * tokens + end)
                logits = F.linear(hidden[rows], weight)
                if best:
                    chosen[i, begin:end] = head.best(logits)
                factor = None if factors is None else factors[begin:end]
                chunk_loss, grad_logits = _chunk(head, logits, labels[begin:end], prediction, factor)
                losses[i] += chunk_loss
                if grad_hidden is not None:
                    torch.mm(grad_logits, weight, out=grad_hidden[rows])
                if (wants_weight or wants_total) and prediction.trains_head:
                    grad_weight = add_product(grad_weight, grad_logits, hidden[rows])
                del logits, grad_logits  # before the next ones are made
        ctx.mark_non_differentiable(chosen)
        ctx.gradients = grad_hidden, grad_weight.to(weight.dtype) if wants_weight and grad_weight is not None else None
        ctx.total, ctx.addend = total, grad_weight if wants_total and present is None else None
        return *losses, chosen

    @staticmethod
    def backward(ctx, *grads: Tensor):
        require_ones(grads[:-1])
        if ctx.addend is not None:
            ctx.total.add(ctx.addend)
        gradients = ctx.gradients
        del ctx.gradients, ctx.addend
        return *gradients, None, None, None, None, None, None


def require_ones(grads: Sequence[Tensor]) -> None:
    """Fails where gradients that were made in the forward would have to be scaled."""
    assert_async((torch.stack(tuple(grads)) == 1).all(), "a factor of the loss goes into the head's Prediction")


def _answers(
    head: VocabParallelHead, hidden: Tensor, weight: Tensor, labels: Tensor | None, chunk_size: int
) -> RowAnswers:
    """Of the labels [t], or without them of the most probable tokens."""
    found = RowAnswers(*(hidden.new_zeros(len(hidden), dtype=dtype) for dtype in (torch.float32, torch.int64)))
    for begin in range(0, len(hidden), chunk_size):
        rows = slice(begin, begin + chunk_size)
        logits = F.linear(hidden[rows], weight)
        tokens = head.best(logits) if labels is None else labels[rows]
        _, lse, target = head.statistics(logits, tokens)
        found.log_probs[rows] = (target - lse).masked_fill(tokens == IGNORE, 0.0)
        found.tokens[rows] = tokens
    return found


def _chunk(
    head: VocabParallelHead, logits: Tensor, labels: Tensor, prediction: Prediction, factors: Tensor | None = None
):
    """Scaled loss sum of one chunk of rows and the gradient of its logits [rows, v] in hidden's dtype."""
    counted = labels != IGNORE
    column, lse, target = head.statistics(logits, labels)
    loss = (lse - target).masked_fill(~counted, 0.0)
    scale: float | Tensor = prediction.scale * prediction.weight
    if factors is not None:
        loss, scale = loss * factors, factors * scale
    return loss.sum() * prediction.scale, logit_gradient(logits, column, counted, lse, head.valid, scale)
