"""What the model says of a pack, without a loss: the next token of every row, or the log-probability of its label."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_glm.model.pack import PackRows
from megatron_glm.parallel.collectives import sum_over
from megatron_glm.parallel.vocab import Prediction, RowAnswers


def answers(
    head: nn.Module,
    hidden: Tensor,
    labels: Tensor,
    pack: PackRows,
    cp: ProcessGroup,
    chunk_size: int,
    best: bool,
) -> dict[str, Tensor]:
    """Of every row of the pack, the same on all tensor- and context-parallel ranks.

    Args:
        head: `VocabParallelHead`, maybe wrapped.
        hidden: sequence shard [t/TP, D] after the last norm; labels: [t] int64, of the local rows.
        chunk_size: rows whose logits exist at a time.
        best: answer with the most probable tokens in the place of the labels.
    Returns:
        "tokens" int64 [T], -100 where a label is missing; "log_probs" of them fp32 [T], 0 there.
    """
    found: list[RowAnswers] = []
    head([Prediction(hidden, labels, row_factors=found.append)], chunk_size, best)  # append returns None: no loss
    return {"tokens": whole_pack(found[0].tokens, pack, cp), "log_probs": whole_pack(found[0].log_probs, pack, cp)}


def whole_pack(local: Tensor, pack: PackRows, cp: ProcessGroup) -> Tensor:
    """Local rows [t] of all context-parallel ranks, put together: [T]."""
    if pack.local_rows is None:
        return local
    whole = torch.zeros(pack.total, dtype=local.dtype, device=local.device)
    return sum_over(whole.index_copy_(0, pack.local_rows, local), cp)
