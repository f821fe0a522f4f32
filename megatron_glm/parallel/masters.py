"""Weights that compute in bf16 beside fp32 masters, where a rank holds them whole: the gradients reach the masters.

A weight's gradient is the largest thing that a step writes. `linear` and the head make it in fp32 in the matrix
product itself, and add to the gradient that is already there in the same pass; what else uses a weight has its gradient
widened and added in one pass. That of the experts, whose products are in bf16, stays so until a second one is added.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class WholeWeights:
    """Lets a module compute with copies of its fp32 parameters in another dtype.

    While the module runs, each parameter's place is taken by a copy whose attribute `master` is the parameter.

    Args:
        taken: parameters within the module that are looked after elsewhere.
        keep: hold the copies until the parameters change, or make them in each forward (and recomputation).
        narrow: leave the only gradient of a step in the copies' type, on CUDA; the sum of several is in fp32.
    """

    def __init__(
        self, module: nn.Module, taken: set[nn.Parameter], dtype: torch.dtype, keep: bool, narrow: bool = False
    ) -> None:
        self.places = [(m, n) for m in module.modules() for n, p in m.named_parameters(recurse=False) if p not in taken]
        self.dtype, self.keep, self.narrow = dtype, keep, narrow
        self.copies: list[tuple[int, Tensor] | None] = [None] * len(self.places)  # with the version that was copied
        self.masters: list[nn.Parameter] = []
        module.register_forward_pre_hook(lambda *_: self._enter())
        module.register_forward_hook(lambda *_: self._leave(), always_call=True)

    def _enter(self) -> None:
        self.masters = [module._parameters[name] for module, name in self.places]
        for i, (module, name) in enumerate(self.places):
            if self.narrow:
                self.masters[i].grad_dtype = None  # a gradient may have any
            module._parameters[name] = _StandIn.apply(self.masters[i], self._copy(i), self.narrow)
            module._parameters[name].master = self.masters[i]

    def _leave(self) -> None:
        for (module, name), master in zip(self.places, self.masters, strict=True):
            module._parameters[name] = master

    def _copy(self, i: int) -> Tensor:
        master, known = self.masters[i], self.copies[i]
        if not self.keep:
            return master.detach().to(self.dtype)
        if known is None:
            self.copies[i] = master._version, master.detach().to(self.dtype)
            master.held_copy = self.copies[i][1]
        elif known[0] != master._version:
            self.copies[i] = master._version, known[1].copy_(master.detach())
        return self.copies[i][1]


def held_copy(master: nn.Parameter) -> Tensor | None:
    """The copy of a parameter that a module holds, for who changes both without autograd's notice."""
    return getattr(master, "held_copy", None)


def master_of(weight: Tensor) -> nn.Parameter | None:
    """The fp32 parameter that `weight` stands in for and that wants a gradient, or None."""
    master = getattr(weight, "master", None)
    return master if master is not None and master.requires_grad and torch.is_grad_enabled() else None


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [t, in], weight [out, in] -> x @ weight.T [t, out]."""
    master = master_of(weight)
    return F.linear(x, weight) if master is None else _Linear.apply(x, weight.detach(), master)


def embedding(tokens: Tensor, weight: Tensor) -> Tensor:
    """tokens [t] int64, weight [V, D] -> [t, D]."""
    master = master_of(weight)
    return F.embedding(tokens, weight) if master is None else _Embedding.apply(tokens, weight.detach(), master)


def add_product(total: Tensor | None, grad: Tensor, x: Tensor) -> Tensor:
    """total + grad.T @ x in fp32, in place where there is a total: grad [t, out], x [t, in] -> [out, in]."""
    if not x.is_cuda or x.dtype == torch.float32:
        product = grad.T @ x
        return product.float() if total is None else total.add_(product)
    if total is None:
        return torch.mm(grad.T, x, out_dtype=torch.float32)
    return torch.addmm(total, grad.T, x, out_dtype=torch.float32, out=total)


class _StandIn(torch.autograd.Function):
    """A copy in the place of its master, which gets the gradient in its own dtype."""

    @staticmethod
    def forward(ctx, master: Tensor, copy: Tensor, narrow: bool) -> Tensor:
        ctx.master, ctx.narrow = master, narrow
        return copy.view_as(copy)

    @staticmethod
    def backward(ctx, grad: Tensor):
        master = ctx.master
        if not grad.is_cuda:
            return grad.to(master.dtype), None, None
        if ctx.narrow and master.grad is None:
            return grad, None, None
        from megatron_glm.parallel import kernels  # needs Triton, which a CPU-only torch has not

        first, total = master.grad is None, kernels.add_widened(master.grad, grad)
        if not first:
            master.grad = total
        return total if first else None, None, None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, master: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.master = master
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, weight = ctx.saved_tensors
        grad_x = grad @ weight if ctx.needs_input_grad[0] else None
        return grad_x, None, _first(ctx.master, add_product(ctx.master.grad, grad, x))


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tokens: Tensor, weight: Tensor, master: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.master = master
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (tokens,) = ctx.saved_tensors
        total = torch.zeros_like(ctx.master) if ctx.master.grad is None else ctx.master.grad
        total.index_put_((tokens,), grad.to(total.dtype), accumulate=True)  # sorts: the same bits in every run
        return None, None, _first(ctx.master, total)


def _first(master: Tensor, gradient: Tensor) -> Tensor | None:
    """What autograd is to add to the master's gradient: all of it, or nothing where it has been added in place."""
    return None if gradient is master.grad else gradient
