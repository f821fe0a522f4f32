"""What a logged iteration says beyond loss and norm: gradient norms by kind of module, the routers, memory.

Each number is of the whole model in every layout. All of it is one sum and one maximum over the ranks.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_glm.config import LossConfig, ModelConfig, RunConfig
from megatron_glm.config.parameters import ADAPTER, model_parameters
from megatron_glm.model.glm import GLMChunk
from megatron_glm.parallel.groups import ParallelGroups

MODULES = ("embedding", "attention", "indexer", "router", "experts", "mlp", "norms", "head", "mtp")


def module_of(name: str, model: ModelConfig) -> str:
    """The one of MODULES that a parameter belongs to, by its canonical name; an adapter, to that of its weight."""
    if name.endswith(ADAPTER):
        return "attention" if ".self_attn." in name else "experts" if ".experts." in name else "mlp"
    parameter = model_parameters(model)[name]
    part = "mtp" if parameter.mtp else parameter.part
    return "mlp" if part in ("dense", "shared") else part


@torch.no_grad()
def observe(
    groups: ParallelGroups,
    chunks: Sequence[GLMChunk],
    names: Sequence[str],
    squares: Tensor,
    router_counts: Sequence[Tensor],
) -> Tensor:
    """This rank's share of a step's statistics, on the host: [2 * modules + 3 * MoE layers] fp64.

    Args:
        names, squares: trained parameters and this rank's share of the squared norm of each one's gradient, [n] fp64,
            as `gradient_squares` gives them.
        router_counts: tokens of the step by expert [E] of each router of this rank, summed over the stage.
    """
    model = chunks[0].config
    moe_layers = _moe_layers(model, chunks[0].losses)
    norms = torch.zeros(2, len(MODULES), dtype=torch.float64)  # squares, and how many tensors were trained
    for name, square in zip(names, squares.tolist(), strict=True):
        module = MODULES.index(module_of(name, model))
        norms[0, module] += square
        norms[1, module] += 1
    routed = torch.zeros(len(moe_layers), 3, dtype=torch.float64)  # load, smallest and largest bias
    mine = [moe_layers.index(layer) for chunk in chunks for layer in chunk.routed_layers]
    if mine and groups.tp_cp_dp.rank() == 0:  # all ranks of a stage know the same
        biases = torch.stack([router.e_score_correction_bias for chunk in chunks for router in chunk.routers()])
        counts = torch.stack(list(router_counts))
        load = counts.amax(1) * counts.shape[1] / counts.sum(1).clamp(min=1)
        routed[mine] = torch.stack([load, biases.amin(1), biases.amax(1)], dim=1).double().cpu()
    return torch.cat([norms.flatten(), routed.flatten()])


def statistics(config: RunConfig, groups: ParallelGroups, observed: Tensor) -> dict[str, Any]:
    """Collective over all ranks, on the host: what each of them has observed, as the whole model's.

    Returns:
        grad_norms: by module, those without a trained parameter left out;
        router_load: tokens of the busiest expert over the mean, by layer;
        expert_bias_min, expert_bias_max: of the routers' correction bias, by layer;
        peak_memory_bytes: of the rank that needed most.
    """
    moe_layers, total = _moe_layers(config.model, config.losses), observed.clone()
    dist.all_reduce(total, group=groups.gloo_world)
    memory = torch.tensor(peak_memory_bytes())
    dist.all_reduce(memory, op=dist.ReduceOp.MAX, group=groups.gloo_world)
    norms, routed = total[: 2 * len(MODULES)].view(2, -1), total[2 * len(MODULES) :].view(-1, 3)
    by_layer = {
        key: {f"layer_{layer:02d}": value for layer, value in zip(moe_layers, column, strict=True)}
        for key, column in zip(("router_load", "expert_bias_min", "expert_bias_max"), routed.T.tolist(), strict=True)
    }
    trained = norms[1] > 0
    by_module = {m: norm for m, norm, t in zip(MODULES, norms[0].sqrt().tolist(), trained, strict=True) if t}
    return {"grad_norms": by_module, **by_layer, "peak_memory_bytes": memory.item()}


def _moe_layers(model: ModelConfig, losses: LossConfig) -> list[int]:
    """Layers with a router that run, an MTP layer last."""
    runs = [*range(model.num_hidden_layers), *(model.mtp_layer_ids if losses.mtp_steps else ())]
    return [layer for layer in runs if model.is_moe(layer)]


def peak_memory_bytes() -> int:
    """Largest device memory of this process so far; on CPU its largest resident set."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
