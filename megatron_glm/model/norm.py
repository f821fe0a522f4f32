"""Normalisations on the sequence shard."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_glm.parallel.linear import replicated


class RMSNorm(nn.Module):
    """weight * cast(x * rsqrt(mean(x^2) + eps)): computed in fp32, cast to x's dtype, then scaled. x: [t, dim].

    CUDA in bf16 runs one kernel forward and one backward; every other case is plain torch. Where `casts` is set, a
    product in FP8 takes the result, and that kernel casts it, too.
    """

    casts = False

    def __init__(self, dim: int, eps: float, tp: ProcessGroup) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.eps = eps
        self.shards = {"weight": replicated((dim,), tp)}

    def forward(self, x: Tensor) -> Tensor:
        if self._fused(x):
            from megatron_glm.ops.triton.rmsnorm import rms_norm  # needs Triton, which a CPU-only torch has not

            return rms_norm(x, self.weight, self.eps, self.casts)
        return self.weight * F.rms_norm(x, x.shape[-1:], eps=self.eps)  # torch's kernel computes and keeps fp32 inside

    def add(self, x: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
        """x + added, and its norm."""
        if self._fused(x):
            from megatron_glm.ops.triton.rmsnorm import add_rms_norm

            return add_rms_norm(x, added, self.weight, self.eps, self.casts)
        x = x + added
        return x, self(x)

    def _fused(self, x: Tensor) -> bool:
        return x.is_cuda and x.dtype == self.weight.dtype == torch.bfloat16


class LayerNorm(nn.Module):
    """Mean and variance normalisation with weight and bias, in fp32: the index key is compared, so it keeps fp32."""

    def __init__(self, dim: int, eps: float, tp: ProcessGroup) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.bias = nn.Parameter(torch.empty(dim))
        self.eps = eps
        self.shards = {"weight": replicated((dim,), tp), "bias": replicated((dim,), tp)}

    def forward(self, x: Tensor) -> Tensor:
        normed = F.layer_norm(x.float(), x.shape[-1:], self.weight.float(), self.bias.float(), self.eps)
        return normed.to(x.dtype)
