"""How much two distributions over the same tokens agree, from logits, and the gradient: no copy of [n, v] on CUDA."""

from __future__ import annotations

import torch
from torch import Tensor


def overlap(p: Tensor, p_lse: Tensor, q: Tensor, q_lse: Tensor, valid: int) -> Tensor:
    """What drafts from q are accepted with where p is wanted, over these columns.

    Args:
        p, q: logits [n, v], of which the first `valid` columns count; the rows of p may be some of a larger tensor.
        p_lse, q_lse: fp32 [n], logs of the sums of exp over the whole vocabulary.
    Returns:
        fp32 [2, n]: the sum of min(p, q), and that of q where q < p, of probabilities.
    """
    if p.is_cuda:
        from megatron_glm.ops.triton import total_variation  # needs Triton, which a CPU-only torch has not

        return total_variation.overlap(p, p_lse, q, q_lse, valid)
    wanted, drafted = _probabilities(p, p_lse), _probabilities(q, q_lse)
    below = drafted.masked_fill(drafted >= wanted, 0.0)
    return torch.stack([torch.minimum(wanted, drafted)[:, :valid].sum(1), below[:, :valid].sum(1)])


def overlap_gradient(
    p: Tensor, p_lse: Tensor, q: Tensor, q_lse: Tensor, below: Tensor, factor: Tensor, valid: int
) -> Tensor:
    """factor times the gradient of the sum of min(p, q) by the logits q: q (1 where q < p - below) [n, v] in q's dtype.

    Zero in columns from `valid` on, and in rows with factor 0. On CUDA it takes the place of q.

    Args:
        below: fp32 [n], the second row of `overlap`, over the whole vocabulary; factor: fp32 [n].
    """
    if p.is_cuda:
        from megatron_glm.ops.triton import total_variation

        return total_variation.overlap_gradient(p, p_lse, q, q_lse, below, factor, valid)
    drafted = _probabilities(q, q_lse)
    gradient = (drafted < _probabilities(p, p_lse)).float().sub_(below.unsqueeze(1)).mul_(drafted)
    gradient[:, valid:] = 0.0
    return gradient.mul_(factor.unsqueeze(1)).to(q.dtype)


def _probabilities(logits: Tensor, lse: Tensor) -> Tensor:
    return logits.float().sub(lse.unsqueeze(1)).exp_()
