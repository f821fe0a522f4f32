"""Linear maps, such as a gather of rows, whose backward is their transpose."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Map = Callable[[Tensor], Tensor]


def linear_map(x: Tensor, forward: Map, transpose: Map) -> Tensor:
    """forward(x); its gradient by x is transpose(gradient of the result). Both are computed outside autograd."""
    return _LinearMap.apply(x, forward, transpose)


class _LinearMap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, forward: Map, transpose: Map) -> Tensor:
        ctx.transpose = transpose
        return forward(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return ctx.transpose(grad), None, None
