"""Activation recomputation of a layer that never repeats a selection.

Top-k keys and expert choices are always kept: were they computed again, rounding could flip one and the backward
would differentiate another function than the forward computed.

"selective" also keeps what costs the most operations for its bytes: the outputs of attention, of o_proj, of the gate
and up projections of MLPs and experts, and of the down-projections to latents. Its second run is norms, rope, q_b and
the absorbed products, the router's projection, the movement of rows and the gated products. The run ends with the last
tensor that the backward needs, so the experts' down projection, whose output nothing needs, is spared.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_glm.ops.recompute import RecomputeCache


def run_layer(granularity: str, layer: nn.Module, *args: Any) -> Any:
    """Run a layer, and return what it returns.

    "none" keeps everything, "full" its input and selections, "selective" also what is expensive.
    """
    if granularity == "none" or not torch.is_grad_enabled():
        return layer(*args)
    kept = RecomputeCache(products=granularity == "selective")
    return checkpoint(
        layer,
        *args,
        use_reentrant=False,
        preserve_rng_state=False,  # nothing in a layer is random
        context_fn=lambda: (kept.running(second=False), kept.running(second=True)),
    )
