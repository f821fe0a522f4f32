"""Direct preference optimization on packed pairs: the loss of a pack, and its gradient as a factor for each row.

The documents of a pack are pairs: the chosen answer, then the rejected one, each behind the prompt. With lp the sum of
the log-probabilities of an answer's tokens and D = beta ((lp_w - ref_w) - (lp_l - ref_l)), a pair's loss is
-(1 - s) log sigmoid(D) - s log sigmoid(-D), with s the label smoothing. Its gradient in the log-probability of a token
is that in lp, one number a document: the cross entropy of each row is scaled by it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_glm.config import PreferenceConfig
from megatron_glm.model.micro_batch import MicroBatch, Pairs
from megatron_glm.parallel.collectives import sum_over
from megatron_glm.parallel.groups import ParallelGroups
from megatron_glm.parallel.vocab import Prediction, RowAnswers


def preference_losses(
    head: nn.Module,
    hidden: Tensor,
    batch: MicroBatch,
    groups: ParallelGroups,
    config: PreferenceConfig,
    chunk_size: int,
) -> dict[str, Tensor]:
    """The losses by name, fp32 scalars, each a SUM times its scale; "dpo" is the one with a graph.

    Args:
        head: `VocabParallelHead`, maybe wrapped; hidden: sequence shard [t/TP, D] after the last norm.
        batch: with `pairs`.
    Returns:
        "dpo"; "lm", the cross entropy of the chosen answers; and TRL's "rewards/…" and "logps/…". The parts of the
        context-parallel ranks add up to the whole; tensor-parallel ranks all have it.
    """
    assert batch.pairs is not None and batch.labels is not None
    pairs, training, found = batch.pairs, torch.is_grad_enabled(), {}
    documents, labels = batch.pack.local(pairs.documents), batch.pack.local(batch.labels)

    def row_factors(rows: RowAnswers) -> Tensor | None:
        log_probs = by_document(rows.log_probs, documents, len(pairs.tokens))
        sums = sum_over(log_probs, groups.cp).requires_grad_()
        with torch.enable_grad():
            wanted, values = objective(sums, pairs, config, batch)
        # All ranks of a context-parallel group have the sums of whole documents: the first one's values count.
        found.update({name: value * (groups.cp.rank() == 0) for name, value in values.items()})
        if not training:
            return None
        (gradient,) = torch.autograd.grad(wanted, sums)
        return -torch.cat([gradient, gradient.new_zeros(1)])[documents].float()

    (loss,), _ = head([Prediction(hidden, labels, row_factors=row_factors)], chunk_size)
    found = {name: value.detach().float() for name, value in found.items()}
    return found | {"dpo": found["dpo"] + (loss - loss.detach())}


def by_document(values: Tensor, documents: Tensor, count: int) -> Tensor:
    """Sums of the values [t] of each document's rows: fp64 [count]. `documents` [t] int64: -1 is none."""
    sums = torch.zeros(count + 1, dtype=torch.float64, device=values.device)
    return sums.index_add_(0, documents % (count + 1), values.double())[:count]


def objective(
    sums: Tensor, pairs: Pairs, config: PreferenceConfig, batch: MicroBatch
) -> tuple[Tensor, dict[str, Tensor]]:
    """(what the gradient is of, the values to report) of the log-probabilities [documents] of all answers, fp64."""
    reference, tokens = pairs.reference, pairs.tokens.double()
    found, known = (sums / tokens, reference / tokens) if config.dpo_average_log_probs else (sums, reference)
    ratio = found - known
    chosen, rejected = config.dpo_beta * ratio[0::2], config.dpo_beta * ratio[1::2]
    margin, smoothing = chosen - rejected, config.dpo_label_smoothing
    if config.dpo_loss_type == "ipo":
        losses = (ratio[0::2] - ratio[1::2] - 1 / (2 * config.dpo_beta)) ** 2
    else:
        losses = -(1 - smoothing) * F.logsigmoid(margin) - smoothing * F.logsigmoid(-margin)
    values = {
        "lm": -sums[0::2],
        "dpo": losses,
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/accuracies": (chosen > rejected).double(),
        "rewards/margins": margin,
        "logps/chosen": found[0::2],
        "logps/rejected": found[1::2],
    }
    values = {name: value.sum() * batch.scale(name) for name, value in values.items()}
    return values["dpo"] + config.dpo_sft_loss_weight * values["lm"], values
