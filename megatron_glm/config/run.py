"""A whole run: the sections together, and what must hold between them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .data import DataConfig, PretrainDataConfig
from .model import ModelConfig
from .parallel import KernelConfig, ParallelConfig
from .training import CheckpointConfig, LoggingConfig, OptimizerConfig, TrainConfig


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
        self.optimizer.check(self.train.planned_iters)
        self.checkpoint.check()
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

    def _check_profile(self) -> None:
        start, last = self.logging.profile_step_start, self.train.train_iters
        if self.logging.profile and last is not None and start >= last:
            raise ValueError(
                f"--profile-step-start ({start}) is not below --train-iters ({last}): nothing would be recorded"
            )
