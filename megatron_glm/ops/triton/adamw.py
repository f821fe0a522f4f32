"""AdamW as one pass over a parameter: clipping, moments, decay, update and the copy in the forward's type."""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _adamw(
    parameter, grad, mean, square, copy, step, size, lr, decay, beta1, beta2, log_beta1, log_beta2, eps, scale,
    copies: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    count = tl.load(step).to(tl.float64)
    correction1 = (1.0 - tl.exp(count * log_beta1)).to(tl.float32)
    correction2 = tl.sqrt((1.0 - tl.exp(count * log_beta2)).to(tl.float32))
    i = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = i < size
    g = tl.load(grad + i, mask=inside) * scale
    m = tl.load(mean + i, mask=inside).to(tl.float32)
    v = tl.load(square + i, mask=inside).to(tl.float32)
    p = tl.load(parameter + i, mask=inside) * (1.0 - lr * decay)
    m += (g - m) * (1.0 - beta1)
    v = v * beta2 + g * g * (1.0 - beta2)
    p -= lr / correction1 * m / (tl.sqrt(v) / correction2 + eps)
    tl.store(mean + i, m.to(mean.dtype.element_ty), mask=inside)
    tl.store(square + i, v.to(square.dtype.element_ty), mask=inside)
    tl.store(parameter + i, p, mask=inside)
    if copies:
        tl.store(copy + i, p.to(copy.dtype.element_ty), mask=inside)


def adamw(
    parameter: Tensor, grad: Tensor, mean: Tensor, square: Tensor, copy: Tensor | None, step: Tensor,
    lr: float, decay: float, betas: tuple[float, float], eps: float, scale: float,
) -> None:  # fmt: skip
    """Step number `step` (fp32 scalar on the device, counted from 1) of torch.optim.AdamW on grad * scale, in place.

    parameter: fp32; mean, square, grad, copy (or None): of that shape in any type, computed with in fp32.
    """
    for tensor in (parameter, mean, square, *([] if copy is None else [copy])):
        if not tensor.is_contiguous():
            raise ValueError(f"AdamW in one pass needs contiguous tensors, not strides {tensor.stride()}")
    if parameter.numel():
        _adamw[(triton.cdiv(parameter.numel(), BLOCK),)](
            parameter, grad.contiguous(), mean, square, parameter if copy is None else copy, step, parameter.numel(),
            lr, decay, *betas, *(math.log(beta) for beta in betas), eps, scale, copy is not None, BLOCK, num_warps=4,
        )  # fmt: skip
