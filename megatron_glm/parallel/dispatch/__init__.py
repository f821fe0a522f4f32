"""Expert dispatchers behind one interface (`--moe-token-dispatcher-type`)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron_glm.config import RunConfig
from megatron_glm.config.fp8 import MULTIPLE
from megatron_glm.parallel.dispatch.allgather import AllGatherDispatcher
from megatron_glm.parallel.dispatch.alltoall import AllToAllDispatcher
from megatron_glm.parallel.dispatch.hybrid import HybridDispatcher
from megatron_glm.parallel.dispatch.hybridep import HybridEPDispatcher
from megatron_glm.parallel.dispatch.local import DispatchContext, Dispatcher, LocalDispatcher
from megatron_glm.parallel.groups import ParallelGroups

# The choices of the flag, which config/parallel.py lists without importing torch.
DISPATCHERS: dict[str, Callable[[DispatchContext], Dispatcher]] = {
    "allgather": AllGatherDispatcher,
    "alltoall": AllToAllDispatcher,
    "hybrid": HybridDispatcher,
    "hybridep": HybridEPDispatcher,
}


def of_layer(dispatcher: Dispatcher, config: RunConfig, layer: int) -> Dispatcher:
    """The run's dispatcher as this layer uses it."""
    in_fp8 = config.fp8.in_layer(layer, config.model.num_hidden_layers)
    return dispatcher if in_fp8 or not config.fp8.fp8_dispatch else dispatcher.in_own_dtype()


def make_dispatcher(config: RunConfig, groups: ParallelGroups) -> Dispatcher:
    """The dispatcher of a checked run, to be made once and shared by all layers. One rank needs no transport.

    groups: those of the run, or `ParallelGroups.of_sizes`: the planner asks for traffic and buffers only.
    """
    model, parallel, train = config.model, config.parallel, config.train
    multiple = MULTIPLE if config.fp8.blockwise and torch.cuda.is_available() else 1  # that the kernels need
    if groups.ep.size() == 1:
        return LocalDispatcher(model.n_routed_experts, multiple)
    shards = parallel.context_parallel_size * parallel.tensor_model_parallel_size
    context = DispatchContext(
        groups=groups,
        n_experts=model.n_routed_experts,
        top_k=model.num_experts_per_tok,
        hidden_size=model.hidden_size,
        most_tokens=train.micro_batch_size * config.data.seq_length // shards,
        dtype=torch.bfloat16 if train.bf16 else torch.float32,
        row_multiple=multiple,
        fp8=config.fp8.fp8_dispatch,
        communication_sms=parallel.communication_sms,
    )
    return DISPATCHERS[parallel.moe_token_dispatcher_type](context)
