"""Everything a run can be told, as frozen dataclasses: one section a subject, one field a flag (`arguments.py`).

A field's type is its check (`Literal` = the choices), its `help` metadata is the flag's help text. What must hold
between fields is checked in `RunConfig.check`, before any process group exists; every refusal is a ValueError that
names the flags and both numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_glm.data_config import DataConfig, PretrainDataConfig
from megatron_glm.model_config import ModelConfig
from megatron_glm.section import Section, flag_name, option, require_multiple

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "KernelConfig",
    "LoggingConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PretrainDataConfig",
    "RunConfig",
    "TrainConfig",
    "flag_name",
]


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
    microbatch_group_size_per_vp_stage: int | None = option(
        None, "micro-batches that a virtual stage runs in a row (default: the number of pipeline stages)"
    )
    moe_token_dispatcher_type: Literal["allgather", "alltoall", "hybrid", "hybridep"] = option(
        "alltoall", "how tokens reach their experts"
    )
    expert_node_size: int | None = option(None, "ranks of a node, for the hybrid dispatcher")
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
        self._check_dispatcher()
        self._check_pipeline(model.num_hidden_layers)

    def _check_dispatcher(self) -> None:
        kind, node = self.moe_token_dispatcher_type, self.expert_node_size
        if (kind == "hybrid") != (node is not None):
            raise ValueError(
                f"--moe-token-dispatcher-type {kind} with --expert-node-size {node}: hybrid needs it, no other takes it"
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
        if pp == 1 and per_stage is not None:
            raise ValueError(
                f"--num-layers-per-virtual-pipeline-stage {per_stage} needs --pipeline-model-parallel-size above 1"
            )


@dataclass(frozen=True)
class KernelConfig(Section):
    attention_backend: Literal["torch", "cudnn", "tilelang"] = option(
        "torch", "implementation of the attention and the indexer; on a GPU the default is cudnn"
    )
    dense_rows: Literal["auto", "off"] = option(
        "auto", "auto: rows that see no more than index_topk keys skip the selection and run as dense attention"
    )
    deterministic: bool = option(False, "the same bits in every run on a GPU, at some cost; not with cudnn")
    loss_chunk_size: int = option(4096, "tokens whose logits exist at a time in the loss")


LARGEST_BF16_BETA = 0.98  # a moment at rest then ends within 10 % of where it should: half a step of bf16 / (1 - beta)


@dataclass(frozen=True)
class OptimizerConfig(Section):
    lr: float = option(1e-5, "peak learning rate")
    min_lr: float = option(0.0, "learning rate at the end of the decay")
    lr_decay_style: Literal["constant", "linear", "cosine", "WSD"] = option(
        "cosine", "shape of the decay after warm-up; WSD stays at the peak until --lr-wsd-decay-iters are left"
    )
    lr_warmup_iters: int = option(0, "iterations of linear warm-up", minimum=0)
    lr_decay_iters: int | None = option(None, "iterations after which --min-lr is reached (default: all)")
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = option(
        "exponential", "shape of the decay at the end of WSD"
    )
    lr_wsd_decay_iters: int | None = option(None, "iterations of the decay at the end of WSD")
    weight_decay: float = option(0.0, "decoupled weight decay of the matrices (norms and biases have none)")
    adam_beta1: float = option(0.9, "decay of the first moment")
    adam_beta2: float = option(0.999, "decay of the second moment")
    adam_eps: float = option(1e-8, "term added to the denominator of Adam's update")
    adam_moments_dtype: Literal["fp32", "bf16"] = option(
        "fp32", "what both moments are kept in; bf16 saves 4 bytes a parameter, its rounding needs betas <= 0.98"
    )
    clip_grad: float = option(1.0, "largest norm of the whole gradient; 0 = no clipping")
    moe_router_bias_update_rate: float = option(0.0, "step of the router's correction bias; 0 = frozen")

    def check(self, train_iters: int | None) -> None:
        for name in ("lr", "min_lr", "weight_decay", "adam_eps", "clip_grad", "moe_router_bias_update_rate"):
            if getattr(self, name) < 0:
                raise ValueError(f"{flag_name(name)} is {getattr(self, name)}; it must not be negative")
        for name in ("adam_beta1", "adam_beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{flag_name(name)} is {getattr(self, name)}; it must be in [0, 1)")
            if self.adam_moments_dtype == "bf16" and getattr(self, name) > LARGEST_BF16_BETA:
                raise ValueError(
                    f"{flag_name(name)} is {getattr(self, name)} with --adam-moments-dtype bf16, whose rounding hides "
                    f"what a step then changes in the moment: give {LARGEST_BF16_BETA} or less, or fp32 moments"
                )
        if self.min_lr > self.lr:
            raise ValueError(f"--min-lr ({self.min_lr}) is above --lr ({self.lr})")
        end, end_flag = self.lr_decay_iters, "--lr-decay-iters"
        if end is None:
            end, end_flag = train_iters, "--train-iters"
        if end is not None and self.lr_warmup_iters > end:
            raise ValueError(f"--lr-warmup-iters ({self.lr_warmup_iters}) is above {end_flag} ({end})")
        style, decay = self.lr_decay_style, self.lr_wsd_decay_iters
        if (style == "WSD") != (decay is not None):
            raise ValueError(
                f"--lr-decay-style {style} with --lr-wsd-decay-iters {decay}: WSD needs it, no other style takes it"
            )
        if decay is not None and end is not None and self.lr_warmup_iters + decay > end:
            raise ValueError(
                f"--lr-warmup-iters ({self.lr_warmup_iters}) + --lr-wsd-decay-iters ({decay}) are above "
                f"{end_flag} ({end})"
            )


@dataclass(frozen=True)
class CheckpointConfig(Section):
    save: str | None = option(None, "folder to write checkpoints to")
    load: str | None = option(None, "folder to load the latest checkpoint from; a converted one is iteration 0")
    load_hf: str | None = option(None, "Hugging Face folder to start from, without a converted checkpoint")
    save_interval: int | None = option(None, "iterations between checkpoints (default: only at the end)")
    async_save: bool = option(False, "write checkpoints from a copy in host memory while training goes on")
    keep_last: int | None = option(None, "checkpoints to keep, older ones are removed (default: all)")
    save_failure: Literal["stop", "continue"] = option(
        "stop", "when a checkpoint cannot be written (the one before stays): end the run, or report it and train on"
    )
    finetune: bool = option(False, "load the weights only: fresh optimizer, iteration 0")
    no_load_optim: bool = option(False, "continue at the checkpoint's iteration and data with a fresh optimizer")

    def check(self) -> None:
        """Refuses flags that another one is missing for."""
        for name in ("save_interval", "async_save", "keep_last"):
            if getattr(self, name) and self.save is None:
                value = getattr(self, name)
                raise ValueError(f"{flag_name(name)}{'' if value is True else f' {value}'} needs --save")
        if self.load is not None and self.load_hf is not None:
            raise ValueError(f"--load {self.load} and --load-hf {self.load_hf} both set the weights: give one")
        for name in ("finetune", "no_load_optim"):
            if getattr(self, name) and self.load is None:
                raise ValueError(f"{flag_name(name)} needs --load")


@dataclass(frozen=True)
class TrainConfig(Section):
    micro_batch_size: int = option(1, "packs that one rank computes at a time")
    global_batch_size: int = option(8, "packs of one optimizer step, over all ranks")
    rampup_batch_size: tuple[int, ...] = option(
        (),
        "START INCREMENT SAMPLES: begin with START packs a step and grow to --global-batch-size by INCREMENT, in equal "
        "parts of SAMPLES packs; the learning rate follows the iterations, whatever their size",
    )
    train_iters: int | None = option(None, "optimizer steps in all, resumed ones included")
    train_epochs: int | None = option(None, "passes over the data, instead of --train-iters")
    seed: int = option(1234, "seed of the initial weights and the order of the data", minimum=0)
    bf16: bool = option(False, "compute in bfloat16 with fp32 master weights and reductions (default: fp32)")
    eval_interval: int = option(100, "iterations between validations, if there is validation data")
    eval_iters: int | None = option(None, "global batches of one validation (default: the whole set once)")
    eval_only: bool = option(
        False, "print the loss and stop: of --data-path (fine-tuning), of validation and test data (pre-training)"
    )
    exit_interval: int | None = option(None, "save and exit after an iteration that this divides")
    exit_duration_in_mins: int | None = option(None, "save and exit this many minutes after the start")
    on_nan: Literal["stop", "skip"] = option(
        "stop", "when a loss or gradient is not finite: end the run, or leave that step's update out"
    )

    def check(self, tokens_per_pack: int, parallel: ParallelConfig, world_size: int) -> None:
        """Refuses batch sizes that the ranks cannot share equally."""
        if self.seed >= 2**63:
            raise ValueError(f"--seed is {self.seed}; it must be below 2^63")
        if not self.eval_only and (self.train_iters is None) == (self.train_epochs is None):
            raise ValueError(f"give one of --train-iters ({self.train_iters}) and --train-epochs ({self.train_epochs})")
        dp, micro = parallel.data_parallel_size(world_size), self.micro_batch_size
        require_multiple(
            "--global-batch-size", self.global_batch_size, "--micro-batch-size x data-parallel ranks", micro * dp
        )
        if self.rampup_batch_size:
            self._check_rampup(micro * dp)
        cp, tp = parallel.context_parallel_size, parallel.tensor_model_parallel_size
        if cp * tp > 1:
            require_multiple(
                "--micro-batch-size x --seq-length",
                micro * tokens_per_pack,
                "2 x --context-parallel-size x --tensor-model-parallel-size",
                2 * cp * tp,
            )

    def _check_rampup(self, packs: int) -> None:
        """`packs`: of one micro-batch on every data-parallel rank."""
        flag, given = "--rampup-batch-size", self.rampup_batch_size
        if len(given) != 3 or min(given) < 1:
            raise ValueError(f"{flag} is {' '.join(map(str, given))}; it takes START INCREMENT SAMPLES, all above 0")
        start, increment, _ = given
        if start > self.global_batch_size:
            raise ValueError(f"{flag} starts at {start}, above --global-batch-size ({self.global_batch_size})")
        require_multiple(
            f"--global-batch-size less {flag}'s START", self.global_batch_size - start, "its INCREMENT", increment
        )
        for name, number in (("START", start), ("INCREMENT", increment)):
            require_multiple(f"{flag}'s {name}", number, "--micro-batch-size x data-parallel ranks", packs)


@dataclass(frozen=True)
class LoggingConfig(Section):
    log_interval: int = option(1, "iterations between log lines, and between statistics of gradients and experts")
    log_file: str | None = option(
        None, "write one JSON object an iteration to this file; a resumed run continues it after its checkpoint"
    )
    log_samples: bool = option(False, "name the samples of each iteration in --log-file: where each begins in the data")
    tensorboard_dir: str | None = option(None, "folder for TensorBoard")
    wandb_project: str | None = option(None, "log to this project of Weights & Biases (WANDB_MODE=offline: on disk)")
    wandb_exp_name: str | None = option(None, "name of the run in Weights & Biases")
    wandb_save_dir: str = option("wandb_output", "folder of Weights & Biases' files")
    profile: bool = option(False, "record --profile-ranks with torch.profiler, one Chrome trace a rank")
    profile_step_start: int = option(10, "iterations that are done when the profile starts", minimum=0)
    profile_step_end: int = option(12, "iterations that are done when the profile ends")
    profile_ranks: tuple[int, ...] = option((0,), "ranks that are recorded")
    profile_dir: str = option("profile", "folder of the traces")

    @property
    def keeps_records(self) -> bool:
        """Whether anything but the log line on the screen wants to know."""
        return any((self.log_file, self.tensorboard_dir, self.wandb_project))

    def check(self, world_size: int) -> None:
        """Refuses a profile of nothing."""
        start, end = self.profile_step_start, self.profile_step_end
        if self.profile and start >= end:
            raise ValueError(f"--profile-step-start ({start}) must be below --profile-step-end ({end})")
        for rank in self.profile_ranks if self.profile else ():
            if not 0 <= rank < world_size:
                raise ValueError(f"--profile-ranks names rank {rank}, the ranks are 0 to {world_size - 1}")
        if self.log_samples and self.log_file is None:
            raise ValueError("--log-samples needs --log-file")
        if self.wandb_exp_name is not None and self.wandb_project is None:
            raise ValueError(f"--wandb-exp-name {self.wandb_exp_name} needs --wandb-project")


@dataclass(frozen=True)
class RunConfig:
    """A whole resolved run. `hf_folder` holds the model's config and tokenizer files, None for a preset."""

    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    kernels: KernelConfig = KernelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    data: DataConfig | PretrainDataConfig = DataConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    train: TrainConfig = TrainConfig()
    logging: LoggingConfig = LoggingConfig()
    hf_folder: str | None = None

    def micro_batches(self, dp_size: int) -> int:
        """Micro-batches of one data-parallel rank in a step."""
        return self.train.global_batch_size // (self.train.micro_batch_size * dp_size)

    @property
    def dense_rows(self) -> str:
        """--dense-rows, where auto on a GPU means dense rows only where they were measured to be faster.

        With context parallelism that is in packs of "short" documents alone, and with enough rows on each rank
        (docs/performance.md). They have no deterministic backward.
        """
        kernels, cp = self.kernels, self.parallel.context_parallel_size
        if kernels.attention_backend == "torch" or kernels.dense_rows == "off":
            return kernels.dense_rows
        rows = self.train.micro_batch_size * self.data.seq_length // cp
        if kernels.deterministic or (cp > 1 and rows < 4096):
            return "off"
        return "auto" if cp == 1 else "short"

    def check(self, world_size: int) -> None:
        """Raises ValueError, naming flags and numbers, unless `world_size` ranks can run this configuration."""
        self.parallel.check(self.model, world_size)
        self.train.check(self.data.seq_length, self.parallel, world_size)
        self.optimizer.check(self.train.train_iters)
        self.checkpoint.check()
        self.logging.check(world_size)
        if self.kernels.attention_backend != "torch" and not self.train.bf16:
            raise ValueError(
                f"--attention-backend {self.kernels.attention_backend} computes in bfloat16: give --bf16, or "
                "--attention-backend torch"
            )
        self.data.check()
        if isinstance(self.data, PretrainDataConfig) and self.train.train_epochs is not None:
            raise ValueError(f"--train-epochs ({self.train.train_epochs}) is for fine-tuning: give --train-iters")
        if self.data.seq_length > self.model.max_position_embeddings:
            raise ValueError(
                f"--seq-length ({self.data.seq_length}) exceeds max_position_embeddings "
                f"({self.model.max_position_embeddings})"
            )
