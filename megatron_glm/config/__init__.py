"""All settings of a run, as frozen dataclasses: one section a subject, one field a flag (`flags.py`).

A field's type is its check (`Literal` = the choices), its `help` metadata is the flag's help text. What must hold
between fields is checked in `RunConfig.check`, before any process group exists; every refusal is a ValueError that
names the flags and both numbers. Nothing here imports torch, so that `--help` and a wrong flag answer at once.
"""

from .data import DataConfig, PretrainDataConfig
from .fp8 import Fp8Config
from .indexer import IndexerConfig
from .lora import LoraConfig
from .model import ModelConfig
from .parallel import KernelConfig, ParallelConfig
from .preference import PreferenceConfig
from .run import RunConfig
from .section import flag_name, require_multiple
from .training import (
    LARGEST_BF16_BETA,
    NEXT_TOKEN,
    CheckpointConfig,
    LoggingConfig,
    LossConfig,
    OptimizerConfig,
    TrainConfig,
)

__all__ = [
    "LARGEST_BF16_BETA",
    "CheckpointConfig",
    "DataConfig",
    "Fp8Config",
    "IndexerConfig",
    "KernelConfig",
    "LoggingConfig",
    "LoraConfig",
    "LossConfig",
    "NEXT_TOKEN",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PreferenceConfig",
    "PretrainDataConfig",
    "RunConfig",
    "TrainConfig",
    "flag_name",
    "require_multiple",
]
