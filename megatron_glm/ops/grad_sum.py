"""The products of weights, and the sums of their gradients in fp32.

A weight's gradient is the largest thing that a step writes. `linear`, `embedding` and the head make it in fp32 in the
matrix product itself, and add it to the sum that is already there in the same pass; `grouped_linear` adds it in a
second pass. Any other use of a weight (norms, kv_b's absorbed halves, the router) leaves its gradient to autograd, and
it is widened and added in a pass of its own.

The products say themselves what selective recomputation keeps (`kept`), and a backward may put the gradients of weights
off (`deferring`), so that a pipeline schedule makes them when the rank would be idle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_glm.ops.recompute import keep_product

GRAD_SUM = "grad_sum"  # attribute of a weight
_deferred: list[Callable[[], None]] | None = None  # of the process: CUDA backwards run in a thread of autograd


@contextmanager
def deferring(later: list[Callable[[], None]]) -> Iterator[None]:
    """The backwards in this block put the gradients of weights into `later`, as calls that make and add them."""
    global _deferred
    _deferred = later
    try:
        yield
    finally:
        _deferred = None


class Products:
    """The three products of a weight in the dtype of their operands. Another precision is a subclass.

    x [t, in], gradient [t, out], weight [out, in]. With `ends` [e] int32, rows are grouped: rows ends[i-1] to ends[i]
    go with weight[i] of [e, out, in]. Rows past the last end are tail: undefined, and part of no sum.
    """

    takes_casts = False  # whether a kernel that writes an x makes its cast, too (`ops/fp8_casts.py`)

    def bound(self, weight: Tensor) -> Products:
        """The products of this weight, where a precision holds more of it than its values."""
        return self

    def output(self, x: Tensor, weight: Tensor, ends: Tensor | None = None) -> Tensor:
        """x @ weight.T [t, out]."""
        if ends is None:
            return F.linear(x, weight)
        if has_grouped_products(x):
            return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
        *groups, tail = groups_of(x, ends)
        products = [F.linear(group, w) for group, w in zip(groups, weight.unbind(), strict=True)]
        return torch.cat([*products, x.new_zeros(len(tail), weight.shape[1])])

    def input_gradient(self, gradient: Tensor, weight: Tensor, ends: Tensor | None = None) -> Tensor:
        """gradient @ weight [t, in]."""
        if ends is None:
            return gradient @ weight
        if has_grouped_products(gradient):
            return F.grouped_mm(gradient, weight, offs=ends)
        *groups, tail = groups_of(gradient, ends)
        products = [group @ w for group, w in zip(groups, weight.unbind(), strict=True)]
        return torch.cat([*products, gradient.new_zeros(len(tail), weight.shape[2])])

    def weight_gradient(self, gradient: Tensor, x: Tensor, ends: Tensor | None = None) -> Tensor:
        """gradient.T @ x [out, in], or [e, out, in]; an expert without rows has zeros."""
        if ends is None:
            return gradient.T @ x
        if has_grouped_products(x):
            return F.grouped_mm(gradient.t(), x, offs=ends)
        pairs = zip(groups_of(gradient, ends)[:-1], groups_of(x, ends)[:-1], strict=True)
        return torch.stack([g.T @ rows for g, rows in pairs])

    def add_weight_gradient(self, total: Tensor | None, gradient: Tensor, x: Tensor) -> Tensor:
        """total + gradient.T @ x in fp32, in place where there is a total."""
        return add_product(total, gradient, x)


AS_THEY_ARE = Products()


def has_grouped_products(x: Tensor) -> bool:
    """Grouped GEMMs do not wait for the counts; they need rows."""
    return x.is_cuda and x.dtype == torch.bfloat16 and len(x) > 0


def groups_of(x: Tensor, ends: Tensor) -> list[Tensor]:
    """The rows of each group, and the tail."""
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return list(x.split([*sizes, len(x) - sum(sizes)]))


class GradSum(NamedTuple):
    """The sum of a weight's gradients in a step: an attribute of its owner, None until the first one.

    It is fp32. With `narrow` the only gradient of a step stays in the dtype in which it was made.
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
        if total is None and (gradient.dtype == torch.float32 or self.narrow):
            total = gradient.contiguous()
        elif gradient.is_cuda:
            from megatron_glm.ops.triton import grad_sum  # needs Triton, which a CPU-only torch has not

            total = grad_sum.add_widened(total, gradient)
        else:
            total = gradient.float().contiguous() if total is None else total.float().add_(gradient)
        self.set(total)

    def add_product(
        self, gradient: Tensor, x: Tensor, ends: Tensor | None = None, products: Products = AS_THEY_ARE
    ) -> None:
        """Add gradient.T @ x of a product x @ weight.T, now or when a schedule says so; see `Products`."""

        def make() -> None:
            if ends is None:
                self.set(products.add_weight_gradient(self.get(), gradient, x))
            else:
                self.add(products.weight_gradient(gradient, x, ends))

        make() if _deferred is None else _deferred.append(make)


def grad_sum_of(weight: Tensor) -> GradSum | None:
    """Where the gradient of `weight` is summed, if it wants one and has such a place."""
    total = getattr(weight, GRAD_SUM, None)
    return total if total is not None and total.parameter.requires_grad and torch.is_grad_enabled() else None


def set_grad_sum(weight: Tensor, total: GradSum) -> None:
    setattr(weight, GRAD_SUM, total)


def linear(x: Tensor, weight: Tensor, kept: bool = False, products: Products = AS_THEY_ARE) -> Tensor:
    """x [t, in], weight [out, in] -> x @ weight.T [t, out].

    Args:
        kept: selective recomputation keeps the product: expensive to compute again and small to keep.
    """
    return _Linear.apply(x, *weight_inputs(weight), None, kept, products.bound(weight))


def grouped_linear(
    x: Tensor, weight: Tensor, ends: Tensor, kept: bool = False, products: Products = AS_THEY_ARE
) -> Tensor:
    """x [t, in] grouped by expert, weight [e, out, in], ends [e] int32 on x's device -> [t, out]; see `Products`."""
    return _Linear.apply(x, *weight_inputs(weight), ends, kept, products.bound(weight))


def weight_inputs(weight: Tensor) -> tuple[Tensor, Tensor, GradSum | None]:
    """What a Function needs of a weight: its values, what autograd differentiates, and where its gradients go."""
    total = grad_sum_of(weight)
    return weight.detach(), weight if total is None else total.parameter, total


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


def add_pieces(into: Tensor, pieces: Tensor, adds: bool) -> None:
    """The sum of pieces [n, ...] in their order, in fp32: `into` [...] fp32 becomes it, or with `adds` grows by it."""
    if pieces.is_cuda:
        from megatron_glm.ops.triton import grad_sum  # needs Triton, which a CPU-only torch has not

        return grad_sum.add_pieces(into, pieces, adds)
    first, *others = pieces.unbind()
    total = first.float()
    for piece in others:
        total += piece
    into.add_(total) if adds else into.copy_(total)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        weight: Tensor,
        parameter: Tensor,
        total: GradSum | None,
        ends: Tensor | None,
        kept: bool,
        products: Products,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        ctx.total, ctx.products = total, products
        if kept:
            return keep_product(lambda: products.output(x, weight, ends))
        return products.output(x, weight, ends)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, weight, ends = ctx.saved_tensors
        grad_x = ctx.products.input_gradient(grad, weight, ends) if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.total is not None:
            ctx.total.add_product(grad, x, ends, ctx.products)
        elif ctx.needs_input_grad[2]:
            grad_weight = ctx.products.weight_gradient(grad, x, ends)
        return grad_x, None, grad_weight, None, None, None, None


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
