"""The layout of the ranks, and which kernels compute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .model import ModelConfig
from .section import Section, option, require_multiple


@dataclass(frozen=True)
class ParallelConfig(Section):
    tensor_model_parallel_size: int = option(1, "ranks that share the attention heads, dense MLPs and vocabulary")
    pipeline_model_parallel_size: int = option(1, "pipeline stages")
    context_parallel_size: int = option(1, "ranks that share the tokens of one pack")
    expert_model_parallel_size: int = option(1, "ranks that share the experts; folds over dp x cp x tp")
    sequence_parallel: bool = option(False, "split the tokens over the tensor-parallel ranks; required with them")
    num_layers_per_virtual_pipeline_stage: int | None = option(None, "interleave: layers of each virtual stage")
    pipeline_model_parallel_layout: str | None = option(
        None, "layers of each (virtual) stage: a Megatron layout string, or auto for a split by cost"
    )
    pipeline_schedule: Literal["1f1b", "zero-bubble"] = option(
        "1f1b", "zero-bubble: make the gradients of weights where a rank would wait for others; keeps more"
    )
    microbatch_group_size_per_vp_stage: int | None = option(
        None, "micro-batches that a virtual stage runs in a row (default: the number of pipeline stages)"
    )
    moe_token_dispatcher_type: Literal["allgather", "alltoall", "hybrid", "hybridep"] = option(
        "alltoall", "how tokens reach their experts; hybrid: over nodes in two levels; hybridep: DeepEP's kernels"
    )
    expert_node_size: int | None = option(None, "ranks of a node, for hybrid and hybridep (default there: all)")
    data_parallel_sharding: Literal["fsdp2", "slabs"] = option(
        "fsdp2", "slabs: gather weights without copies, into memory that layers take turns in; not yet measured on GPUs"
    )
    reshard_after_forward: bool = option(
        True, "free gathered dense weights after a forward, not only when gradients are reduced"
    )
    reshard_experts_after_forward: bool = option(True, "the same of the experts' weights")
    grad_sync: Literal["last", "every"] = option(
        "last", "reduce gradients after the last micro-batch, or every one (less memory, more traffic)"
    )
    recompute_granularity: Literal["none", "selective", "full"] = option(
        "none", "what the backward computes again instead of keeping"
    )
    communication_sms: Literal[0, 8, 24] = option(
        0,
        "multiprocessors that matrix products leave free for NCCL, which takes no more; stages then wait for messages "
        "beside them; not yet measured between GPUs",
    )
    distributed_timeout_minutes: float = option(
        10.0, "end the run when ranks wait for each other, and no rank has moved, for so long"
    )

    @property
    def defers_weights(self) -> bool:
        """Whether the schedule puts off the gradients of weights ("W")."""
        return self.pipeline_schedule != "1f1b"

    def reshards(self, expert: bool) -> bool:
        """Whether gathered weights of experts, or the dense ones, are freed after a forward."""
        return self.reshard_experts_after_forward if expert else self.reshard_after_forward

    def data_parallel_size(self, world_size: int) -> int:
        """Data-parallel ranks of `world_size` ranks; raises ValueError if the layout does not fit."""
        tp, pp, cp = self.tensor_model_parallel_size, self.pipeline_model_parallel_size, self.context_parallel_size
        require_multiple(
            "the number of ranks",
            world_size,
            "--tensor-model-parallel-size x --pipeline-model-parallel-size x --context-parallel-size",
            tp * pp * cp,
        )
        return world_size // (tp * pp * cp)

    def check(self, model: ModelConfig, world_size: int) -> None:
        """Refuses a layout that `world_size` ranks or the model's shape cannot serve."""
        self.data_parallel_size(world_size)
        tp, ep = self.tensor_model_parallel_size, self.expert_model_parallel_size
        if self.sequence_parallel != (tp > 1):
            verb = "needs" if tp > 1 else "does not take"
            raise ValueError(f"--tensor-model-parallel-size {tp} {verb} --sequence-parallel")
        stage_ranks = world_size // self.pipeline_model_parallel_size
        require_multiple("the ranks of a pipeline stage", stage_ranks, "--expert-model-parallel-size", ep)
        require_multiple("the number of experts", model.n_routed_experts, "--expert-model-parallel-size", ep)
        tp_flag = "--tensor-model-parallel-size"
        require_multiple("the number of attention heads", model.num_attention_heads, tp_flag, tp)
        require_multiple("intermediate_size", model.intermediate_size, tp_flag, tp)
        shared_width = model.n_shared_experts * model.moe_intermediate_size
        require_multiple("the width of the shared experts", shared_width, tp_flag, tp)
        if self.distributed_timeout_minutes <= 0:
            raise ValueError(f"--distributed-timeout-minutes is {self.distributed_timeout_minutes}; it must be above 0")
        self._check_dispatcher()
        self._check_pipeline(model.num_hidden_layers)

    def _check_dispatcher(self) -> None:
        kind, node = self.moe_token_dispatcher_type, self.expert_node_size
        if (kind == "hybrid" and node is None) or (kind not in ("hybrid", "hybridep") and node is not None):
            raise ValueError(
                f"--moe-token-dispatcher-type {kind} with --expert-node-size {node}: hybrid needs it, hybridep takes "
                "it, no other does"
            )
        if node is not None:
            ep = self.expert_model_parallel_size
            require_multiple("--expert-model-parallel-size", ep, "--expert-node-size", node)

    def _check_pipeline(self, layers: int) -> None:
        pp, per_stage = self.pipeline_model_parallel_size, self.num_layers_per_virtual_pipeline_stage
        if pp > layers:
            raise ValueError(f"--pipeline-model-parallel-size {pp} exceeds the model's {layers} layers")
        if per_stage is not None and self.pipeline_model_parallel_layout is not None:
            raise ValueError(
                f"--num-layers-per-virtual-pipeline-stage {per_stage} and --pipeline-model-parallel-layout "
                f"{self.pipeline_model_parallel_layout} both set the stages: give one"
            )
        if pp == 1 and self.defers_weights:
            raise ValueError(
                f"--pipeline-schedule {self.pipeline_schedule} needs --pipeline-model-parallel-size above 1: "
                "a single stage never waits"
            )
        if pp == 1 and per_stage is not None:
            raise ValueError(
                f"--num-layers-per-virtual-pipeline-stage {per_stage} needs --pipeline-model-parallel-size above 1"
            )


@dataclass(frozen=True)
class KernelConfig(Section):
    attention_backend: Literal["auto", "torch", "cudnn", "tilelang"] = option(
        "auto", "implementation of the attention and the indexer; auto: cudnn on a GPU with --bf16, else torch"
    )
    attention: Literal["sparse", "dense"] = option(
        "sparse", "dense: every row attends to all earlier keys of its document, whatever index_topk; for pre-training"
    )
    dense_rows: Literal["auto", "off"] = option(
        "auto", "auto: rows that see no more than index_topk keys skip the selection and run as dense attention"
    )
    deterministic: bool = option(False, "the same bits in every run on a GPU, at some cost; not with cudnn")
    loss_chunk_size: int = option(4096, "tokens whose logits exist at a time in the loss")
