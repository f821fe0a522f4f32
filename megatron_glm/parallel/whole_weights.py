"""Weights that a rank holds whole: the copies that compute where a parameter has another dtype."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from megatron_glm.config.parameters import ADAPTER
from megatron_glm.ops.fp8 import BLOCKS, Blocks
from megatron_glm.ops.fp8_products import Fp8Products
from megatron_glm.ops.grad_sum import GradSum, set_grad_sum
from megatron_glm.torch_private import private

private(__name__, "torch.Tensor._version", "torch.Tensor.grad_dtype", "torch.nn.Module._parameters")

HELD_COPY = "held_copy"  # attribute of a master


class WholeWeights:
    """Lets a module compute with copies, in `dtype`, of its parameters of other dtypes.

    They are fp32 masters in a bf16 run, and frozen bf16 weights in an fp32 run. While the module runs, a copy is in
    each parameter's place. Its attribute `grad_sum` is the parameter's `GradSum`.

    Where a module's `products` are in FP8 and copies are held, the copy is the weight in FP8, in both orientations: the
    values in e4m3, with the attribute `BLOCKS`. Nothing but these products can use it. It is made of a parameter of any
    dtype, once a step, and only once where it is frozen.

    Args:
        elsewhere: parameters within the module that are looked after elsewhere.
        keep: hold the copies until the parameters change, or make them in each forward (and recomputation).
        narrow: leave the only gradient of a step in the copies' type, on CUDA; the sum of several is in fp32.
    """

    def __init__(
        self, module: nn.Module, elsewhere: set[nn.Parameter], dtype: torch.dtype, keep: bool, narrow: bool = False
    ) -> None:
        self.places = [
            (owner, name)
            for owner in module.modules()
            for name, parameter in owner.named_parameters(recurse=False)
            if parameter not in elsewhere and (parameter.dtype != dtype or (keep and fp8_products_of(owner, name)))
        ]
        self.dtype, self.keep, self.narrow = dtype, keep, narrow
        self.copies: list[tuple[int, Tensor | Blocks] | None] = [None] * len(self.places)  # with the version copied
        self.masters: list[nn.Parameter] = []
        if self.places:
            module.register_forward_pre_hook(lambda *_: self._enter())
            module.register_forward_hook(lambda *_: self._leave(), always_call=True)

    def _enter(self) -> None:
        self.masters = [cast(nn.Parameter, module._parameters[name]) for module, name in self.places]
        for i, (module, name) in enumerate(self.places):
            if self.narrow:
                self.masters[i].grad_dtype = None  # a gradient may have any
            narrow = self.narrow and self.masters[i].is_cuda  # AdamW takes other dtypes than fp32 only there
            total = GradSum(self.masters[i], self.masters[i], "grad", narrow)
            held = self._held(i)
            if isinstance(held, Blocks):
                copy = held.values.detach()
                setattr(copy, BLOCKS, held)
            else:
                copy = CopyOf.apply(self.masters[i], held, total)
            set_grad_sum(copy, total)
            module._parameters[name] = cast(nn.Parameter, copy)

    def _leave(self) -> None:
        for (module, name), master in zip(self.places, self.masters, strict=True):
            module._parameters[name] = master

    def _held(self, i: int) -> Tensor | Blocks:
        """What computes in place of a master."""
        master, known = self.masters[i], self.copies[i]
        if not self.keep:
            return master.detach().to(self.dtype)
        if known is None or known[0] != master._version:
            known = master._version, self._copy(i, None if known is None else known[1])
            self.copies[i] = known
        return known[1]

    def _copy(self, i: int, into: Tensor | Blocks | None) -> Tensor | Blocks:
        """A copy of a master as it is now, in the memory of the one before."""
        master = self.masters[i]
        if (products := fp8_products_of(*self.places[i])) is not None:
            assert into is None or isinstance(into, Blocks)
            return products.cast_weight(master.detach(), self.dtype, into)
        if isinstance(into, Tensor):
            return into.copy_(master.detach())
        copy = master.detach().to(self.dtype)
        setattr(master, HELD_COPY, copy)
        return copy


def fp8_products_of(module: nn.Module, name: str) -> Fp8Products | None:
    """Those of a module's weight that is multiplied in FP8; an adapter beside it is not."""
    products = getattr(module, "products", None)
    return products if isinstance(products, Fp8Products) and not name.endswith(ADAPTER) else None


def held_copy(master: nn.Parameter) -> Tensor | None:
    """The module's bf16 copy of this parameter. The fused AdamW kernel writes both; autograd does not see that."""
    return getattr(master, HELD_COPY, None)


class CopyOf(torch.autograd.Function):
    """The copy of a parameter as a function of it: a gradient that autograd makes goes into the parameter's sum."""

    @staticmethod
    def forward(ctx, master: Tensor, copy: Tensor, total: GradSum) -> Tensor:
        ctx.total = total
        return copy.view_as(copy)

    @staticmethod
    def backward(ctx, grad: Tensor):
        ctx.total.add(grad)
        return None, None, None
