"""Optimizer, checkpoints, the loop and the log, as sections of the configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .parallel import ParallelConfig
from .section import Section, flag_name, option, require_multiple

LARGEST_BF16_BETA = 0.98  # a moment at rest then ends within 10 % of where it should: half a step of bf16 / (1 - beta)


@dataclass(frozen=True)
class OptimizerConfig(Section):
    lr: float = option(1e-5, "peak learning rate", minimum=0)
    min_lr: float = option(0.0, "learning rate at the end of the decay", minimum=0)
    lr_decay_style: Literal["constant", "linear", "cosine", "WSD"] = option(
        "cosine", "shape of the decay after warm-up; WSD stays at the peak until --lr-wsd-decay-iters are left"
    )
    lr_warmup_iters: int = option(0, "iterations of linear warm-up", minimum=0)
    lr_warmup_fraction: float | None = option(
        None, "share of --lr-decay-iters, or of all iterations, that warms up, instead of --lr-warmup-iters"
    )
    lr_decay_iters: int | None = option(None, "iterations after which --min-lr is reached (default: all)")
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = option(
        "exponential", "shape of the decay at the end of WSD"
    )
    lr_wsd_decay_iters: int | None = option(None, "iterations of the decay at the end of WSD")
    weight_decay: float = option(0.0, "decoupled weight decay of the matrices (norms and biases have none)", minimum=0)
    adam_beta1: float = option(0.9, "decay of the first moment")
    adam_beta2: float = option(0.999, "decay of the second moment")
    adam_eps: float = option(1e-8, "term added to the denominator of Adam's update", minimum=0)
    adam_moments_dtype: Literal["fp32", "bf16"] = option(
        "fp32", "what both moments are kept in; bf16 saves 4 bytes a parameter, its rounding needs betas <= 0.98"
    )
    clip_grad: float = option(1.0, "largest norm of the whole gradient; 0 = no clipping", minimum=0)
    moe_router_bias_update_rate: float = option(0.0, "step of the router's correction bias; 0 = frozen", minimum=0)

    def warmup(self, end: int) -> int:
        """Iterations of warm-up where the decay ends with iteration `end`."""
        return self.lr_warmup_iters if self.lr_warmup_fraction is None else round(self.lr_warmup_fraction * end)

    def check(self, train_iters: int | None) -> None:
        if not self.adam_eps:
            raise ValueError("--adam-eps is 0.0; it must be above 0: a weight without gradient would become 0/0")
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
        if (fraction := self.lr_warmup_fraction) is not None:
            if not 0 <= fraction <= 1:
                raise ValueError(f"--lr-warmup-fraction is {fraction}; it must be in [0, 1]")
            if self.lr_warmup_iters:
                raise ValueError(
                    f"--lr-warmup-fraction {fraction} and --lr-warmup-iters {self.lr_warmup_iters} both set the "
                    "warm-up: give one"
                )
        end, end_flag = self.lr_decay_iters, "--lr-decay-iters"
        if end is None:
            end, end_flag = train_iters, "--train-iters"
        warmup = 0 if end is None else self.warmup(end)
        warmup_flag = "--lr-warmup-iters" if fraction is None else f"the iterations of --lr-warmup-fraction {fraction}"
        if end is not None and warmup > end:
            raise ValueError(f"{warmup_flag} ({warmup}) is above {end_flag} ({end})")
        style, decay = self.lr_decay_style, self.lr_wsd_decay_iters
        if (style == "WSD") != (decay is not None):
            raise ValueError(
                f"--lr-decay-style {style} with --lr-wsd-decay-iters {decay}: WSD needs it, no other style takes it"
            )
        if decay is not None and end is not None and warmup + decay > end:
            raise ValueError(f"{warmup_flag} ({warmup}) + --lr-wsd-decay-iters ({decay}) are above {end_flag} ({end})")


@dataclass(frozen=True)
class CheckpointConfig(Section):
    save: str | None = option(None, "folder to write checkpoints to")
    load: str | None = option(
        None, "folder to load the latest checkpoint from, or one iter_… in it; a converted one is iteration 0"
    )
    ckpt_step: int | None = option(None, "load this iteration of --load instead of the latest", minimum=0)
    load_hf: str | None = option(None, "Hugging Face folder to start from, without a converted checkpoint")
    save_interval: int | None = option(None, "iterations between checkpoints (default: only at the end)")
    async_save: bool = option(False, "write checkpoints from a copy in host memory while training goes on")
    keep_last: int | None = option(None, "checkpoints to keep, older ones are removed (default: all)")
    save_retain_interval: int | None = option(
        None,
        "keep each checkpoint whose iteration this divides, a multiple of --save-interval, beside the last --keep-last "
        "(default with it: 1)",
    )
    no_save_optim: bool = option(False, "save the weights only: a third of the size; resuming starts a fresh optimizer")
    save_failure: Literal["stop", "continue"] = option(
        "stop", "when a checkpoint cannot be written (the one before stays): end the run, or report it and train on"
    )
    finetune: bool = option(False, "load the weights only: fresh optimizer, iteration 0")
    no_load_optim: bool = option(False, "continue at the checkpoint's iteration and data with a fresh optimizer")

    @property
    def kept(self) -> int | None:
        """How many of the last checkpoints stay; None: all."""
        return 1 if self.keep_last is None and self.save_retain_interval is not None else self.keep_last

    def check(self) -> None:
        """Refuses flags that another one is missing for."""
        self.require("save", "save_interval", "async_save", "keep_last", "save_retain_interval", "no_save_optim")
        self.require("save_interval", "save_retain_interval")
        self.require("load", "finetune", "no_load_optim", "ckpt_step")
        if self.save_retain_interval is not None and self.save_interval is not None:
            require_multiple("--save-retain-interval", self.save_retain_interval, "--save-interval", self.save_interval)
        if self.load is not None and self.load_hf is not None:
            raise ValueError(f"--load {self.load} and --load-hf {self.load_hf} both set the weights: give one")


@dataclass(frozen=True)
class LossConfig(Section):
    mtp_num_steps: int | None = option(
        None,
        "train the MTP layer to predict so many tokens beyond the next one; 0: it is held and saved as it is "
        "(default: 1 in pre-training where the model has the layer, else 0)",
        minimum=0,
    )
    mtp_loss_scaling_factor: float = option(
        0.1, "weight of the mean of the MTP losses beside the loss of the next token", minimum=0
    )
    mtp_loss: Literal["ce", "tv"] = option(
        "ce",
        "ce: cross entropy of each step; tv: total variation from the next-token prediction there, end to end over the "
        "steps, so that more drafts are accepted; it trains the MTP layer alone",
    )
    mtp_detach: bool = option(False, "the MTP losses train the MTP layer alone: not trunk, embedding and head")
    mtp_unshifted_queries: bool = option(
        False, "where MTP steps share the keys of the first, leave their queries at its positions"
    )
    moe_aux_loss_coeff: float = option(
        0.0, "factor of the loss that evens out the use of the experts within each document", minimum=0
    )
    moe_z_loss_coeff: float = option(0.0, "factor of the loss that keeps the router's logits small", minimum=0)
    moe_router_load_balancing_type: Literal["none", "aux_loss", "seq_aux_loss", "global_aux_loss"] = option(
        "seq_aux_loss", "what --moe-aux-loss-coeff is the factor of; the others need 0"
    )
    train_only: Literal["mtp"] | None = option(None, "train this part of the model alone; the rest stays as it is")

    @property
    def balances(self) -> bool:
        """Whether the routers have losses of their own."""
        return self.moe_aux_loss_coeff > 0 or self.moe_z_loss_coeff > 0

    @property
    def mtp_steps(self) -> int:
        return self.mtp_num_steps or 0

    @property
    def mtp_detaches(self) -> bool:
        """Whether the MTP losses have no gradient in trunk, embedding and head."""
        return self.mtp_detach or self.mtp_loss == "tv"

    def check(self, mtp_layers: int) -> None:
        """Refuses MTP flags that would do nothing, steps without the one layer that they share, another aux loss."""
        if self.mtp_steps and mtp_layers != 1:
            raise ValueError(f"--mtp-num-steps {self.mtp_steps} needs a model with one MTP layer, it has {mtp_layers}")
        given = [name for name in ("mtp_detach", "mtp_unshifted_queries") if getattr(self, name)]
        given += ["mtp_loss"] * (self.mtp_loss != "ce")
        given += ["mtp_loss_scaling_factor"] * (self.mtp_loss_scaling_factor != 0.1)
        given += ["train_only"] * (self.train_only is not None)
        if given and not self.mtp_steps:
            raise ValueError(f"{flag_name(given[0])} needs --mtp-num-steps above 0, it is {self.mtp_steps}")
        if self.moe_aux_loss_coeff and (kind := self.moe_router_load_balancing_type) != "seq_aux_loss":
            raise ValueError(
                f"--moe-aux-loss-coeff {self.moe_aux_loss_coeff} with --moe-router-load-balancing-type {kind}: only "
                "seq_aux_loss is served"
            )


NEXT_TOKEN = LossConfig()  # the loss of the next token alone


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
    train_samples: int | None = option(
        None, "packs in all, instead of --train-iters: as many whole steps as they fill; schedules stay in iterations"
    )
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
    on_nan_limit: int | None = option(
        None, "skipped steps in a row after which --on-nan skip ends the run (default: 10)"
    )
    manual_gc: bool = option(
        False, "let Python's garbage collector run between steps only, at the same ones on all ranks"
    )
    manual_gc_interval: int = option(0, "iterations between its runs with --manual-gc; 0 = only at the start", 0)

    @property
    def most_skips(self) -> int:
        """Skipped steps in a row that end the run."""
        return 10 if self.on_nan_limit is None else self.on_nan_limit

    @property
    def planned_iters(self) -> int | None:
        """The optimizer steps in all, where the flags alone say it."""
        if self.train_samples is not None and not self.rampup_batch_size:
            return self.train_samples // self.global_batch_size
        return self.train_iters

    @property
    def has_length(self) -> bool:
        return any(length is not None for length in (self.train_iters, self.train_epochs, self.train_samples))

    def check(self, tokens_per_pack: int, parallel: ParallelConfig, world_size: int) -> None:
        """Refuses batch sizes that the ranks cannot share equally."""
        if self.seed >= 2**63:
            raise ValueError(f"--seed is {self.seed}; it must be below 2^63")
        self._check_length()
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

    def _check_length(self) -> None:
        lengths = {name: getattr(self, name) for name in ("train_iters", "train_epochs", "train_samples")}
        given = [name for name, length in lengths.items() if length is not None]
        if len(given) > 1 or not (given or self.eval_only):
            got = " and ".join(f"{flag_name(name)} ({lengths[name]})" for name in given) or "none"
            raise ValueError(f"give one of {', '.join(map(flag_name, lengths))}, not {got}")
        first_step = (self.rampup_batch_size or (self.global_batch_size,))[0]
        if self.train_samples is not None and self.train_samples < first_step:
            flag = "--rampup-batch-size starts at" if self.rampup_batch_size else "--global-batch-size is"
            raise ValueError(f"--train-samples ({self.train_samples}) are below one step: {flag} {first_step}")
        if self.on_nan_limit is not None and self.on_nan != "skip":
            raise ValueError(f"--on-nan-limit {self.on_nan_limit} needs --on-nan skip")
        if self.manual_gc_interval:
            self.require("manual_gc", "manual_gc_interval")

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
    verbose: bool = option(False, "show the whole configuration at the start, not only what differs from the defaults")
    log_interval: int = option(1, "iterations between log lines, and between statistics of gradients and experts")
    log_file: str | None = option(
        None, "write one JSON object an iteration to this file; a resumed run continues it after its checkpoint"
    )
    log_samples: bool = option(False, "name the samples of each iteration in --log-file: where each begins in the data")
    tensorboard_dir: str | None = option(None, "folder for TensorBoard")
    wandb_project: str | None = option(None, "log to this project of Weights & Biases (WANDB_MODE=offline: on disk)")
    wandb_entity: str | None = option(None, "team or user whose project it is (default: as Weights & Biases says)")
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
        self.require("log_file", "log_samples")
        self.require("wandb_project", "wandb_entity", "wandb_exp_name")
