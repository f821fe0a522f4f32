"""Data parallelism: torch FSDP2 over our process groups.

Dense parameters are sharded over dp x cp, routed experts over the expert-data group. The shards are fp32 and
are the masters. Gradients are summed, never averaged, because each loss is already divided by its global count.

A group of one rank has nothing to gather or reduce, and FSDP2 would copy every weight and every gradient several times
to do so: there the masters are plain parameters, and the forward computes with `WholeWeights`.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from megatron_glm.config import ParallelConfig
from megatron_glm.ops.fp8 import FP8
from megatron_glm.ops.grad_sum import GRAD_SUM, GradSum, set_grad_sum
from megatron_glm.parallel.groups import ParallelGroups
from megatron_glm.parallel.shard import ModelChunk, Rectangle, ShardInfo, shard_dim
from megatron_glm.parallel.sharded import Slabs, shard_into_slabs, sharded_chunk
from megatron_glm.parallel.whole_weights import WholeWeights
from megatron_glm.torch_private import private

STAYS_GATHERED = "stays_gathered"  # attribute of a module that FSDP2 shards
FSDP = "torch.distributed.fsdp._fully_shard"
flatten, unflatten, shape_and_offset, *_ = private(
    __name__,
    "torch._utils._flatten_dense_tensors",
    "torch._utils._unflatten_dense_tensors",
    "torch.distributed.tensor._utils.compute_local_shape_and_global_offset",
    "torch.distributed.fsdp.FSDPModule._get_fsdp_state",
    f"{FSDP}._fsdp_state.FSDPState._fsdp_param_group",
    f"{FSDP}._fsdp_state.FSDPState._state_ctx",
    f"{FSDP}._fsdp_state.FSDPState._root_post_backward_final_callback",
    f"{FSDP}._fsdp_param_group.FSDPParamGroup.post_backward",
    f"{FSDP}._fsdp_param_group.FSDPParamGroup.fsdp_params",
    f"{FSDP}._fsdp_param.FSDPParam._unsharded_param",
    f"{FSDP}._fsdp_param.FSDPParam.unsharded_accumulated_grad",
)


def shard_chunk(
    parallel: ParallelConfig, groups: ParallelGroups, chunk: ModelChunk, bf16: bool, slabs: Slabs | None = None
) -> None:
    """Shard a chunk of layers in place.

    Args:
        chunk: has `layers` (a ModuleDict), `embed_tokens` and `lm_head` (each may be None); a layer whose `mlp` has
            `experts` shards these over `groups.edp`.
        bf16: compute in bf16, else in fp32. Trained parameters, reductions and sums of gradients are fp32 either way;
            a frozen parameter has any dtype, and is gathered in that one where the model computes in it.
        slabs: of all chunks of this rank, with --data-parallel-sharding slabs; None: of this one alone.
    """
    if parallel.data_parallel_sharding == "slabs":
        return shard_into_slabs(parallel, groups, chunk, bf16, slabs or Slabs())
    # What a layer passes on (an indexer's log-probabilities, the latents of the first MTP step) is a view for FSDP2. It
    # warns of changes in place, and no output of a layer is changed in place.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if bf16 else torch.float32
    # no cast of inputs: hidden states have the type already, and the plan's rope tables must keep theirs
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    whole_experts, whole_chunk = holds_whole(groups.dp_cp.size(), groups.edp.size())
    elsewhere = {p for p in chunk.parameters() if p.dtype == FP8}  # whole on each rank: a gathered one needs its scales

    def shard(module: nn.Module, group: dist.ProcessGroup, whole: bool, reshard: bool, experts: bool = False) -> None:
        if not whole:
            mesh, others = DeviceMesh.from_group(group, device), elsewhere & set(module.parameters())
            fully_shard(
                module,
                mesh=mesh,
                reshard_after_forward=reshard,
                shard_placement_fn=lambda parameter: Shard(shard_dim(parameter.shape, group.size())),
                mp_policy=precision,
                ignored_params=others,
            )
            setattr(module, STAYS_GATHERED, not reshard)
            if not experts or parallel.defers_weights:  # else autograd makes them, before their "W"
                module.register_forward_pre_hook(attach_grad_sums)  # once it is gathered
        else:
            WholeWeights(module, elsewhere, dtype, keep=not reshard, narrow=experts)
        if whole:
            elsewhere.update(module.parameters())

    for layer in chunk.layers.values():
        experts = getattr(layer.mlp, "experts", None)
        if experts is not None:
            shard(experts, groups.edp, whole_experts, parallel.reshard_experts_after_forward, experts=True)
        shard(layer, groups.dp_cp, whole_chunk, parallel.reshard_after_forward)
    for module in (chunk.embed_tokens, chunk.lm_head):
        if module is None:
            continue
        shard(module, groups.dp_cp, whole_chunk, parallel.reshard_after_forward)
        if isinstance(module, FSDPModule):
            module.set_unshard_in_backward(False)  # the head's gradients are made in the forward
    shard(chunk, groups.dp_cp, whole_chunk, parallel.reshard_after_forward)
    for module in chunk.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum


def holds_whole(dp_cp: int, edp: int) -> tuple[bool, bool]:
    """Whether the experts, and whether all parameters, are plain ones, in groups of these sizes.

    FSDP2 needs the chunk where a part of it is sharded.
    """
    return edp == 1, dp_cp == edp == 1


def set_gradient_sync(chunk: nn.Module, sync: bool, last: bool) -> None:
    """Reduce gradients over the data ranks in the next backward of this chunk, or keep accumulating.

    Until they are reduced, weights that stay gathered after a forward do so after the backward, too.

    Args:
        last: no backward of the step follows, so FSDP2 waits for what it has started: reductions, and weights that
            it gathers for nothing.
    """
    if (sharded := sharded_chunk(chunk)) is not None:
        sharded.sync, sharded.last = sync, last
    if not isinstance(chunk, FSDPModule):
        return
    chunk.set_requires_gradient_sync(sync)
    chunk.set_is_last_backward(last)
    for module in chunk.modules():
        if not isinstance(module, FSDPModule):
            continue
        module.set_reshard_after_backward(sync or not getattr(module, STAYS_GATHERED), recurse=False)
        # FSDP2 fails in a frozen module that never runs (an MTP layer) when it has to accumulate.
        if not any(p.requires_grad for p in module.parameters()):
            module.set_requires_gradient_sync(True)


def reduce_gradients(chunk: nn.Module, last: bool) -> None:
    """Reduce what backwards without synchronisation have left, and gradients that were added after them.

    FSDP2 reduces at the end of a backward; this is that end, run by itself, as torch.distributed.pipelining does.
    """
    if (sharded := sharded_chunk(chunk)) is not None:
        sharded.reduce(last)
    if not isinstance(chunk, FSDPModule):
        return
    set_gradient_sync(chunk, sync=True, last=last)
    root = chunk._get_fsdp_state()
    for state in root._state_ctx.all_states:
        if state._fsdp_param_group is not None:
            state._fsdp_param_group.post_backward()
    root._root_post_backward_final_callback()
    if not last:
        set_gradient_sync(chunk, sync=False, last=False)


def gather_ahead(chunk: nn.Module, changed: torch.Event | None) -> None:
    """Let the next forward of this chunk gather its first weights while the actions before it still compute.

    FSDP2 by itself gathers them behind all that was started before: behind the backward of another virtual stage, say.

    Args:
        changed: recorded behind the last change of the weights (`record_change`).
    """
    if changed is None:
        return
    if (sharded := sharded_chunk(chunk)) is not None:
        sharded.gather_ahead(changed)
    elif isinstance(chunk, FSDPModule):
        chunk.set_post_optim_event(changed)


def record_change() -> torch.Event | None:
    """An event behind what has been started: before a step, the optimizer's last change. None without a GPU."""
    return torch.cuda.current_stream().record_event() if torch.cuda.is_available() else None


def reduce_partial_gradients(chunks: Sequence[ModelChunk], copies: dist.ProcessGroup | None = None) -> None:
    """Sum the gradients of replicated parameters over their `sum_groups`, after the last backward of a step.

    copies: the ranks that hold copies of the embedding, of which one may have had no gradient.
    """
    _sum_copies(chunks)
    by_group: dict[dist.ProcessGroup, list[Tensor]] = {}
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            summed = chunk.shards[name].sum_groups
            if parameter.grad is None and parameter.requires_grad and copies is not None and copies in summed:
                parameter.grad = torch.zeros_like(parameter)  # the other one has it
            if parameter.grad is None:
                continue
            for group in summed:
                if group.size() > 1:
                    by_group.setdefault(group, []).append(local(parameter.grad))
    for group, gradients in by_group.items():
        flat = flatten(gradients)
        dist.all_reduce(flat, group=group)
        for gradient, summed in zip(gradients, unflatten(flat, gradients), strict=True):
            gradient.copy_(summed)


def _sum_copies(chunks: Sequence[ModelChunk]) -> None:
    """Each copy of a parameter in the chunks of this rank gets the sum of the gradients of all."""
    by_name: dict[str, list[nn.Parameter]] = {}
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            by_name.setdefault(name, []).append(parameter)
    for parameters in by_name.values():
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if len(parameters) == 1 or not gradients:
            continue
        total = torch.stack(list(map(local, gradients))).sum(0)
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            local(parameter.grad).copy_(total)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that FSDP may have sharded; shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def rectangle(name: str, tensor: Tensor, info: ShardInfo) -> Rectangle:
    """This rank's rectangle of a parameter, buffer or optimizer moment, clipped to the global shape.

    FSDP cuts what tensor and expert parallelism have left along `shard_dim`; rows of vocabulary padding fall away.
    """
    offsets = list(info.offsets)
    if isinstance(tensor, DTensor):
        _, inner = shape_and_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        offsets = [outer + offset for outer, offset in zip(offsets, inner, strict=True)]
    data = local(tensor).detach()
    if data.dim():
        rows = max(0, min(data.shape[0], info.global_shape[0] - offsets[0]))
        data = data[:rows]
        offsets[0] = min(offsets[0], info.global_shape[0])
    owner = not info.copy and all(group.rank() == 0 for group in info.replica_groups)
    return Rectangle(name, info.global_shape, tuple(offsets), data, owner)


def attach_grad_sums(module: nn.Module, _: object = None) -> None:
    """Before a forward of a module that FSDP2 has gathered: its weights get the sums that FSDP2 will reduce.

    FSDP2 itself would make each gradient in the weight's dtype, and add it to its fp32 sum in another pass. It reduces
    gradients of one dtype only, so those that do not come from `linear` are summed in fp32 here, too.
    """
    assert isinstance(module, FSDPModule)
    group = module._get_fsdp_state()._fsdp_param_group
    for state in [] if group is None else group.fsdp_params:
        weight = state._unsharded_param
        if weight.requires_grad and not hasattr(weight, GRAD_SUM):
            set_grad_sum(weight, GradSum(weight, state, "unsharded_accumulated_grad"))
            weight.register_post_accumulate_grad_hook(_move_to_grad_sum)


def _move_to_grad_sum(weight: nn.Parameter) -> None:
    if weight.grad is not None:  # `linear` has none for autograd
        getattr(weight, GRAD_SUM).add(weight.grad)
        weight.grad = None
