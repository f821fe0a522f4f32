"""The gated MLP of the dense layers and of the shared experts."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_glm.ops.swiglu import swiglu
from megatron_glm.parallel.collectives import gather_rows
from megatron_glm.parallel.linear import ColumnParallelLinear, RowParallelLinear


class MLP(nn.Module):
    """down(silu(gate x) * up x) on [t/TP, D]; gate and up are separate so that every shard is one rectangle."""

    def __init__(self, hidden_size: int, width: int, tp: ProcessGroup) -> None:
        super().__init__()
        self.tp = tp
        self.gate_proj = ColumnParallelLinear(hidden_size, width, tp, kept=True)
        self.up_proj = ColumnParallelLinear(hidden_size, width, tp, kept=True)
        self.down_proj = RowParallelLinear(width, hidden_size, tp)

    def forward(self, x: Tensor) -> Tensor:
        x = gather_rows(x, self.tp)
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x), self.down_proj.products.takes_casts))
