"""The sums of the gradients of weights, in fp32, and the products that add to them.

A weight's gradient is the largest thing that a step writes. `linear`, `embedding` and the head make it in fp32 in the
matrix product itself, and add it to the sum that is already there in the same pass. Any other use of a weight leaves
its gradient to autograd, and it is widened and added in a pass of its own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class GradSum(NamedTuple):
    """The sum of a weight's gradients in a step: an attribute of its owner, None until the first one.

    It is fp32. With `narrow`, on CUDA, the only gradient of a step stays in the dtype in which it was made.
    """

    parameter: nn.Parameter  # what autograd differentiates
    owner: object
    name: str
    narrow: bool = False

    def get(self) -> Tensor | None:
        return getattr(self.owner, self.name)

    def set(self, total: Tensor) -> None:
        setattr(self.owner, self.name, total)

    def add(self, gradient: Tensor) -> None:
        """Add a gradient of the weight's shape, in fp32 or narrower; it may become the sum itself."""
        total = self.get()
        if total is None and (gradient.dtype == torch.float32 or (self.narrow and gradient.is_cuda)):
            total = gradient.contiguous()
        elif gradient.is_cuda:
            from megatron_glm.ops.triton import grad_sum  # needs Triton, which a CPU-only torch has not

            total = grad_sum.add_widened(total, gradient)
        else:
            total = gradient.float().contiguous() if total is None else total.add_(gradient)
        self.set(total)

    def add_product(self, gradient: Tensor, x: Tensor) -> None:
        """Add gradient.T @ x, of the gradient [t, out] of a product x @ weight.T, and x [t, in]."""
        self.set(add_product(self.get(), gradient, x))


def grad_sum_of(weight: Tensor) -> GradSum | None:
    """Where the gradient of `weight` is summed, if it wants one and has such a place."""
    total = getattr(weight, "grad_sum", None)
    return total if total is not None and total.parameter.requires_grad and torch.is_grad_enabled() else None


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [t, in], weight [out, in] -> x @ weight.T [t, out]."""
    total = grad_sum_of(weight)
    return F.linear(x, weight) if total is None else _Linear.apply(x, weight.detach(), total.parameter, total)


def embedding(tokens: Tensor, weight: Tensor) -> Tensor:
    """tokens [t] int64, weight [V, D] -> [t, D]."""
    total = grad_sum_of(weight)
    if total is None:
        return F.embedding(tokens, weight)
    return _Embedding.apply(weight.detach(), total.parameter, tokens, total)


def add_product(total: Tensor | None, grad: Tensor, x: Tensor) -> Tensor:
    """total + grad.T @ x in fp32, in place where there is a total: grad [t, out], x [t, in] -> [out, in]."""
    if not x.is_cuda or x.dtype == torch.float32:
        product = grad.T @ x
        return product.float() if total is None else total.add_(product)
    if total is None:
        return torch.mm(grad.T, x, out_dtype=torch.float32)
    return torch.addmm(total, grad.T, x, out_dtype=torch.float32, out=total)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, parameter: nn.Parameter, total: GradSum) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.total = total
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, weight = ctx.saved_tensors
        grad_x = grad @ weight if ctx.needs_input_grad[0] else None
        ctx.total.add_product(grad, x)
        return grad_x, None, None, None


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight: Tensor, parameter: nn.Parameter, tokens: Tensor, total: GradSum) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.total, ctx.shape = total, weight.shape
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (tokens,) = ctx.saved_tensors
        total = ctx.total.get()
        if total is None:
            total = torch.zeros(ctx.shape, device=grad.device)
        total.index_put_((tokens,), grad.to(total.dtype), accumulate=True)  # sorts: the same bits in every run
        ctx.total.set(total)
        return None, None, None, None
