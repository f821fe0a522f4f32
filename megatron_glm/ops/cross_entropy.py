"""Cross entropy from logits without a copy of them: the row statistics of the loss, and the gradient."""

from __future__ import annotations

from torch import Tensor


def row_statistics(logits: Tensor, column: Tensor, valid: int) -> tuple[Tensor, Tensor]:
    """logits [n, v], column [n] int64 (-1 = none) -> log of the sum of exp over the first `valid` columns, and the
    logit at the column or 0: fp32 [n] each."""
    if logits.is_cuda:
        from megatron_glm.ops.triton import cross_entropy  # needs Triton, which a CPU-only torch has not

        return cross_entropy.row_statistics(logits, column, valid)
    target = logits.gather(1, column.clamp(min=0).unsqueeze(1)).squeeze(1).float()
    return logits[:, :valid].float().logsumexp(dim=1), target.masked_fill(column < 0, 0.0)


def logit_gradient(
    logits: Tensor, column: Tensor, counted: Tensor, lse: Tensor, valid: int, scale: float | Tensor
) -> Tensor:
    """scale * (softmax - one at the column) [n, v], zero in rows that do not count and columns from `valid` on.

    The scale is one number, or one a row: fp32 [n]. On CUDA it takes the place of the logits.
    """
    if logits.is_cuda:
        from megatron_glm.ops.triton import cross_entropy

        return cross_entropy.logit_gradient(logits, column, counted, lse, valid, scale)
    gradient = logits.float().sub_(lse.unsqueeze(1)).exp_()
    gradient[:, valid:] = 0.0
    gradient.scatter_add_(1, column.clamp(min=0).unsqueeze(1), -(column >= 0).float().unsqueeze(1))
    gradient.mul_(scale.unsqueeze(1) if isinstance(scale, Tensor) else scale)
    return gradient.masked_fill_(~counted.unsqueeze(1), 0.0).to(logits.dtype)
