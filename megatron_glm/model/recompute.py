"""Activation recomputation of a layer that never repeats a selection.

Top-k keys and expert choices are always kept: were they computed again, rounding could flip one and the backward
would differentiate another function than the forward computed.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from megatron_glm.model.layer import LayerOutput

SELECTIONS = (torch.ops.megatron_glm.index_topk.default, torch.ops.megatron_glm.select_experts.default)
ATTENTION = (torch.ops.megatron_glm.sparse_mla.default, torch.ops.megatron_glm.dense_mla.default)
KEPT = {"full": SELECTIONS, "selective": SELECTIONS + ATTENTION}


def run_layer(granularity: str, layer: nn.Module, *args) -> LayerOutput:
    """Run a layer; "none" keeps everything, "full" its input and the selections, "selective" also attention outputs."""
    if granularity == "none" or not torch.is_grad_enabled():
        return layer(*args)
    kept = KEPT[granularity]

    def policy(ctx, op, *op_args, **op_kwargs) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE

    return checkpoint(
        layer,
        *args,
        use_reentrant=False,
        preserve_rng_state=False,  # nothing in a layer is random
        context_fn=partial(create_selective_checkpoint_contexts, policy),
    )
