"""Teacher and student of the indexer's loss over selected keys, by cuDNN-frontend's DSA kernels on Hopper in bf16.

Importing this module imports the packages. `backends.py` does it when the backend is chosen.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from cudnn import DSA
from torch import Tensor

from megatron_glm.ops.cudnn import pad_heads, pad_slots, require_bf16, row_chunks

TEACHER_HEADS = BACKWARD_HEADS = 64  # the kernels need a multiple of it, and at least so many; the student takes 32
TINY = 1e-30  # below it the backward takes a probability for 0, and drops the slot's gradient


def attention_mass_cudnn(q: Tensor, kv: Tensor, idx: Tensor, lse: Tensor, scale: float) -> Tensor:
    """`ops.indexer_loss.attention_mass`. The kernel normalises the sum over the heads: here it is times h again."""
    require_bf16(q, kv)
    heads, slots = q.shape[1], idx.shape[1]
    padded = -(-heads // TEACHER_HEADS) * TEACHER_HEADS
    idx, lse = pad_slots(idx), F.pad(lse, (0, padded - heads), value=float("inf"))  # probability 0 in added heads
    mass = torch.zeros(idx.shape, dtype=torch.float32, device=idx.device)
    for rows in row_chunks(len(q), padded):
        given = pad_heads(q[rows], padded), kv, lse[rows], idx[rows]
        result = DSA.sparse_attn_score_recompute_wrapper(
            *_batched(*given), softmax_scale=scale, topk_length=_lengths(idx[rows])
        )
        mass[rows] = result["target"][0]
    return (mass * heads).masked_fill_(idx < 0, 0.0)[:, :slots].contiguous()


def student_log_probs_cudnn(iq: Tensor, ik: Tensor, w: Tensor, idx: Tensor) -> Tensor:
    """`ops.indexer_loss.student_log_probs`, with the head weights rounded to bf16."""
    require_bf16(iq, ik)
    slots, idx = idx.shape[1], pad_slots(idx)
    log_probs = torch.zeros(idx.shape, dtype=torch.float32, device=idx.device)
    for rows in row_chunks(len(iq), iq.shape[1]):
        given = iq[rows], ik, w[rows].bfloat16(), idx[rows]
        result = DSA.sparse_indexer_score_recompute_wrapper(*_batched(*given), topk_length=_lengths(idx[rows]))
        log_probs[rows] = result["predict"][0].clamp_min(TINY).log()
    return log_probs.masked_fill_(idx < 0, 0.0)[:, :slots].contiguous()


def student_backward_cudnn(
    grad: Tensor, iq: Tensor, ik: Tensor, w: Tensor, idx: Tensor, log_probs: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums into ik's gradient by atomics: last bits vary by run.

    The kernel computes target = -grad into q * sum(target) - target, times grad_loss * loss_coeff / rows. Targets are
    brought to about 1, the size that it is made for.
    """
    heads, slots, unused = iq.shape[1], idx.shape[1], idx < 0
    target = (-grad).masked_fill(unused, 0.0)
    size = target.sum(-1).amax().clamp_min(TINY) if len(iq) else grad.new_ones(())
    predict = log_probs.exp().clamp_min_(TINY).masked_fill_(unused, 0.0)
    extra = (0, -slots % 128)
    target, predict, index = F.pad(target / size, extra), F.pad(predict, extra), F.pad(idx.clamp(min=0), extra)
    padded = max(heads, BACKWARD_HEADS)
    weights = F.pad(w.bfloat16(), (0, padded - heads))
    grad_q, grad_w = torch.empty_like(iq), torch.empty_like(w)
    grad_k = torch.zeros(ik.shape, dtype=torch.float32, device=ik.device)
    for rows in row_chunks(len(iq), padded):
        given = pad_heads(iq[rows], padded), weights[rows], ik, target[rows], predict[rows], index[rows]
        result = DSA.indexer_backward_wrapper(
            *_batched(*given), size.view(1), sm_scale=1.0, loss_coeff=float(len(index[rows])), block_I=128
        )
        grad_q[rows] = result["d_index_q"][0, :, :heads]
        grad_w[rows] = result["d_weights"][0, :, :heads].float()
        grad_k += result["d_index_k"][0]
    return grad_q, grad_k.to(ik.dtype), grad_w


def _batched(*tensors: Tensor) -> list[Tensor]:
    """With a batch of one, and a copy where the memory is not in order: the backward overwrites its target."""
    return [x.contiguous().unsqueeze(0) for x in tensors]


def _lengths(idx: Tensor) -> Tensor:
    """Used slots of each row, int32 [1, n]."""
    return (idx >= 0).sum(-1, dtype=torch.int32).unsqueeze(0)
