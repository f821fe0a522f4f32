"""A whole run: the sections together, and what must hold between them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .data import DataConfig, PretrainDataConfig
from .fp8 import Fp8Config
from .indexer import IndexerConfig
from .lora import LoraConfig
from .model import ModelConfig
from .parallel import KernelConfig, ParallelConfig
from .preference import PreferenceConfig
from .section import flag_name
from .training import CheckpointConfig, LoggingConfig, LossConfig, OptimizerConfig, TrainConfig


@dataclass(frozen=True)
class RunConfig:
    """A whole resolved run. Its sections are the groups of flags, in the order in which --help shows them.

    hf_folder: holds the model's config and tokenizer files; None for a preset.
    """

    model: ModelConfig
    train: TrainConfig = TrainConfig()
    losses: LossConfig = LossConfig()
    preference: PreferenceConfig = PreferenceConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    data: DataConfig | PretrainDataConfig = DataConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    parallel: ParallelConfig = ParallelConfig()
    kernels: KernelConfig = KernelConfig()
    fp8: Fp8Config = Fp8Config()
    indexer: IndexerConfig = IndexerConfig()
    lora: LoraConfig = LoraConfig()
    logging: LoggingConfig = LoggingConfig()
    hf_folder: str | None = None

    def with_backend(self, gpu: bool) -> RunConfig:
        """The same run with --attention-backend auto replaced: cudnn on a GPU in bf16, else torch."""
        if self.kernels.attention_backend != "auto":
            return self
        backend = "cudnn" if gpu and self.train.bf16 else "torch"
        return replace(self, kernels=replace(self.kernels, attention_backend=backend))

    def micro_batches(self, dp_size: int) -> int:
        """Micro-batches of one data-parallel rank in a step."""
        return self.train.global_batch_size // (self.train.micro_batch_size * dp_size)

    @property
    def trained_parts(self) -> frozenset[str]:
        """What this run trains, of "trunk" (all that computes the next token), "indexer", "mtp", "mtp indexer" and
        "adapters".

        Nothing with --eval-only: all weights are then held in the checkpoint's dtype.
        """
        if self.train.eval_only:
            return frozenset()
        if self.lora.lora_rank:
            return frozenset({"adapters"})
        stages = {"off": {"trunk"}, "warmup": {"indexer"}, "sparse": {"trunk", "indexer"}}
        if self.losses.train_only is not None:
            return frozenset({self.losses.train_only})
        parts = stages[self.indexer.indexer_training] | ({"mtp"} if self.losses.mtp_steps else set())
        return frozenset(parts | ({"mtp indexer"} if {"indexer", "mtp"} <= parts else set()))

    @property
    def part_flags(self) -> str:
        """The flags that say which parts this run trains."""
        flags = {"--indexer-training": self.indexer.indexer_training, "--mtp-num-steps": self.losses.mtp_steps}
        flags |= {"--train-only": self.losses.train_only, "--lora-rank": self.lora.lora_rank or None}
        return ", ".join(f"no {flag}" if value is None else f"{flag} {value}" for flag, value in flags.items())

    @property
    def taught_parts(self) -> frozenset[str]:
        """Those of `trained_parts` that a loss teaches: with a factor of 0 a part has no more than its weight decay."""
        untaught = set() if self.indexer.coefficient else {"indexer", "mtp indexer"}
        return self.trained_parts - untaught - (set() if self.losses.mtp_loss_scaling_factor else {"mtp"})

    @property
    def attends_densely(self) -> bool:
        """Whether every row attends to all keys that it may see, so that nothing is selected."""
        return self.kernels.attention == "dense" or self.indexer.indexer_training == "warmup"

    @property
    def selects(self) -> bool:
        """Whether some row may see more keys than it attends to, so that the indexer's weights matter."""
        return not self.attends_densely and self.data.seq_length > self.model.index_topk

    @property
    def dense_rows(self) -> str:
        """--dense-rows, where auto on a GPU means dense rows only where they were measured to be faster.

        "all" where no row selects.

        With context parallelism that is in packs of "short" documents alone, and with enough rows on each rank
        (docs/performance.md). They have no deterministic backward.
        """
        kernels, cp = self.kernels, self.parallel.context_parallel_size
        if self.attends_densely:
            return "all"
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
        self.optimizer.check(self.train.planned_iters)
        self.losses.check(self.model.num_nextn_predict_layers)
        steps, mode = self.losses.mtp_steps, self.indexer.indexer_training
        if steps >= self.data.seq_length:
            raise ValueError(
                f"--mtp-num-steps {steps} is not below --seq-length ({self.data.seq_length}): no document has a "
                "token that far ahead"
            )
        if self.losses.mtp_unshifted_queries and (steps == 1 or not self.model.index_share_for_mtp_iteration):
            raise ValueError(
                f"--mtp-unshifted-queries is about steps that share the keys of the first: --mtp-num-steps is {steps}, "
                f"index_share_for_mtp_iteration {str(self.model.index_share_for_mtp_iteration).lower()}"
            )
        if steps and (mode == "warmup" or (mode != "off" and self.losses.train_only)):
            flag = f"--train-only {self.losses.train_only}" if self.losses.train_only else f"--mtp-num-steps {steps}"
            raise ValueError(f"{flag} and --indexer-training {mode} each train what the other holds: give one")
        parts = self.trained_parts
        if parts and not self.taught_parts:
            flag = "--mtp-loss-scaling-factor 0 with --train-only" if steps else "--dsa-indexer-loss-coeff 0 with"
            only = self.losses.train_only if steps else f"--indexer-training {mode}"
            raise ValueError(f"{flag} {only}: nothing would be trained")
        if self.losses.balances and parts and "trunk" not in parts:
            name = "moe_aux_loss_coeff" if self.losses.moe_aux_loss_coeff else "moe_z_loss_coeff"
            given = f"{flag_name(name)} {getattr(self.losses, name)}"
            raise ValueError(
                f"{given} trains the routers, which this run holds: it trains {' and '.join(sorted(parts))}"
            )
        self.checkpoint.check()
        self.fp8.check(self.model, self.parallel)
        self._check_indexer()
        self._check_adapters()
        self._check_preference()
        self.logging.check(world_size)
        if self.kernels.attention_backend in ("cudnn", "tilelang") and not self.train.bf16:
            raise ValueError(
                f"--attention-backend {self.kernels.attention_backend} computes in bfloat16: give --bf16, or "
                "--attention-backend torch"
            )
        self._check_profile()
        self.data.check()
        if isinstance(self.data, PretrainDataConfig) and self.train.train_epochs is not None:
            raise ValueError(f"--train-epochs ({self.train.train_epochs}) is for fine-tuning: give --train-iters")
        if self.data.seq_length > self.model.max_position_embeddings:
            raise ValueError(
                f"--seq-length ({self.data.seq_length}) exceeds max_position_embeddings "
                f"({self.model.max_position_embeddings})"
            )

    def _check_indexer(self) -> None:
        self.indexer.check()
        mode, rate = self.indexer.indexer_training, self.optimizer.moe_router_bias_update_rate
        if mode == "warmup" and rate:
            raise ValueError(
                f"--moe-router-bias-update-rate {rate} with --indexer-training warmup, which leaves all but the "
                "indexer as it is: leave it out"
            )
        if mode == "sparse" and self.kernels.attention == "dense":
            raise ValueError(
                "--indexer-training sparse with --attention dense: it learns from the attention to the keys that it "
                "selects; warmup learns from dense attention"
            )
        if self.attends_densely and self.kernels.dense_rows == "off":
            raise ValueError("--dense-rows off with dense attention (--attention dense or --indexer-training warmup)")
        gpu = self.kernels.attention_backend in ("cudnn", "tilelang")
        if gpu and self.kernels.deterministic and self.kernels.attention == "dense" and mode == "off":
            raise ValueError(
                f"--attention dense with --deterministic and --attention-backend {self.kernels.attention_backend}: "
                "the dense backward sums by atomics; --attention-backend torch has the same bits in every run"
            )

    def _check_adapters(self) -> None:
        self.lora.check(self.model)
        if not self.lora.lora_rank or self.train.eval_only:
            return
        given = f"--lora-rank {self.lora.lora_rank}"
        mode, rate = self.indexer.indexer_training, self.optimizer.moe_router_bias_update_rate
        others = {
            f"--indexer-training {mode}": mode != "off",
            f"--mtp-num-steps {self.losses.mtp_steps}": self.losses.mtp_steps > 0,
            f"--train-only {self.losses.train_only}": self.losses.train_only is not None,
            f"--moe-router-bias-update-rate {rate}": bool(rate),
        }
        for flag, contradicts in others.items():
            if contradicts:
                raise ValueError(f"{given} with {flag}: adapters are trained alone, all else is frozen")

    def _check_preference(self) -> None:
        """Preference alone trains with --loss dpo, and needs a reference."""
        self.preference.check()
        if not self.preference.is_dpo:
            return
        if isinstance(self.data, PretrainDataConfig):
            raise ValueError("--loss dpo is for fine-tuning, on rows with a chosen and a rejected answer")
        if self.data.overlong == "split":
            raise ValueError("--overlong split with --loss dpo: an answer is one document; give truncate or refuse")
        if not self.preference.reference_logprobs and not self.lora.lora_rank:
            raise ValueError(
                "--loss dpo needs a reference: --reference-logprobs, which tools/score.py makes of the same rows, or "
                "--lora-rank, where the model without adapters is the reference"
            )
        others = {
            "--mtp-num-steps": self.losses.mtp_steps,
            "--indexer-training": self.indexer.indexer_training * (self.indexer.indexer_training != "off"),
            "--moe-router-bias-update-rate": self.optimizer.moe_router_bias_update_rate,
            "--moe-aux-loss-coeff": self.losses.moe_aux_loss_coeff,
            "--moe-z-loss-coeff": self.losses.moe_z_loss_coeff,
        }
        for flag, value in others.items():
            if value:
                raise ValueError(
                    f"{flag} {value} with --loss dpo, which trains nothing beside the preference: leave it out"
                )

    def _check_profile(self) -> None:
        start, last = self.logging.profile_step_start, self.train.train_iters
        if self.logging.profile and last is not None and start >= last:
            raise ValueError(
                f"--profile-step-start ({start}) is not below --train-iters ({last}): nothing would be recorded"
            )
