"""Weights that compute in bf16 beside fp32 masters, and the sums of their gradients in fp32.

A weight's gradient is the largest thing that a step writes. `linear` and the head make it in fp32 in the matrix
product itself, and add to the gradient that is already there in the same pass. Where a rank holds a weight whole
(`WholeWeights`), what else uses it has its gradient widened and added in one pass; that of the experts, whose products
are in bf16, stays so until a second one is added. Where FSDP2 gathers it (`keep_totals`), FSDP2 reduces the sum.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from megatron_glm.torch_private import private

FSDP = "torch.distributed.fsdp._fully_shard"
private(
    __name__,
    "torch.Tensor._version",
    "torch.Tensor.grad_dtype",
    "torch.nn.Module._parameters",
    "torch.distributed.fsdp.FSDPModule._get_fsdp_state",
    f"{FSDP}._fsdp_state.FSDPState._fsdp_param_group",
    f"{FSDP}._fsdp_param_group.FSDPParamGroup.fsdp_params",
    f"{FSDP}._fsdp_param.FSDPParam._unsharded_param",
    f"{FSDP}._fsdp_param.FSDPParam.unsharded_accumulated_grad",
)


class Total(NamedTuple):
    """The fp32 sum of a weight's gradients: an attribute of its owner, None until the first one of a step."""

    parameter: nn.Parameter  # what autograd differentiates
    owner: object
    name: str

    def get(self) -> Tensor | None:
        return getattr(self.owner, self.name)

    def set(self, total: Tensor) -> None:
        setattr(self.owner, self.name, total)

    def add(self, gradient: Tensor) -> None:
        """Into the sum that is there, which may be narrow itself, or as the first, which is taken as it is in fp32."""
        total = self.get()
        if total is None and gradient.dtype == torch.float32:
            total = gradient.contiguous()
        elif gradient.is_cuda:
            from megatron_glm.parallel import kernels  # needs Triton, which a CPU-only torch has not

            total = kernels.add_widened(total, gradient)
        else:
            total = gradient.float().contiguous() if total is None else total.add_(gradient)
        self.set(total)


class WholeWeights:
    """Lets a module compute with copies of its fp32 parameters in another dtype.

    While the module runs, each parameter's place is taken by a copy whose attribute `total` is the parameter's `Total`.

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
            total = Total(self.masters[i], self.masters[i], "grad")
            module._parameters[name] = _StandIn.apply(self.masters[i], self._copy(i), total, self.narrow)
            module._parameters[name].total = total

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


def keep_totals(module: FSDPModule) -> None:
    """Before a forward of a module that FSDP2 has gathered: its weights get the sums that FSDP2 will reduce.

    FSDP2 itself would make each gradient in the weight's dtype, and add it to its fp32 sum in another pass. It reduces
    gradients of one dtype only, so those that do not come from `linear` are summed in fp32 here, too.
    """
    group = module._get_fsdp_state()._fsdp_param_group
    for state in [] if group is None else group.fsdp_params:
        weight = state._unsharded_param
        if weight.requires_grad and not hasattr(weight, "total"):
            weight.total = Total(weight, state, "unsharded_accumulated_grad")
            weight.register_post_accumulate_grad_hook(_move_to_total)


def _move_to_total(weight: nn.Parameter) -> None:
    if weight.grad is not None:  # `linear` has none for autograd
        weight.total.add(weight.grad)
        weight.grad = None


def total_of(weight: Tensor) -> Total | None:
    """Where the gradient of `weight` is summed, if it wants one and has such a place."""
    total = getattr(weight, "total", None)
    return total if total is not None and total.parameter.requires_grad and torch.is_grad_enabled() else None


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [t, in], weight [out, in] -> x @ weight.T [t, out]."""
    total = total_of(weight)
    return F.linear(x, weight) if total is None else _Linear.apply(x, weight.detach(), total.parameter, total)


def embedding(tokens: Tensor, weight: Tensor) -> Tensor:
    """tokens [t] int64, weight [V, D] -> [t, D]."""
    total = total_of(weight)
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


class _StandIn(torch.autograd.Function):
    """A copy in the place of its master, whose sum gets the gradient."""

    @staticmethod
    def forward(ctx, master: Tensor, copy: Tensor, total: Total, narrow: bool) -> Tensor:
        ctx.total, ctx.narrow = total, narrow
        return copy.view_as(copy)

    @staticmethod
    def backward(ctx, grad: Tensor):
        if ctx.narrow and grad.is_cuda and ctx.total.get() is None:
            return grad, None, None, None
        ctx.total.add(grad)
        return None, None, None, None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, parameter: nn.Parameter, total: Total) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.total = total
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, weight = ctx.saved_tensors
        grad_x = grad @ weight if ctx.needs_input_grad[0] else None
        ctx.total.set(add_product(ctx.total.get(), grad, x))
        return grad_x, None, None, None


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight: Tensor, parameter: nn.Parameter, tokens: Tensor, total: Total) -> Tensor:
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
