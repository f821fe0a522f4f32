"""Which parameters training changes, and how the others are held."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import nn

from megatron_glm.config.model import ModelConfig
from megatron_glm.config.parameters import ADAPTER, model_parameters
from megatron_glm.ops.fp8 import FP8

TRUNK = frozenset({"trunk"})


def part_of(config: ModelConfig, name: str) -> str:
    """The part with the parameter of this canonical name: "adapters", "mtp", "indexer", "mtp indexer" or "trunk"."""
    if name.endswith(ADAPTER):
        return "adapters"
    parameter = model_parameters(config)[name]
    if parameter.part == "indexer":
        return "mtp indexer" if parameter.mtp else "indexer"
    return "mtp" if parameter.mtp else "trunk"


def is_trained(config: ModelConfig, name: str, parts: Collection[str] = TRUNK) -> bool:
    """Whether training changes the parameter of this canonical name, where it trains these parts (`part_of`)."""
    return part_of(config, name) in parts


def freeze(config: ModelConfig, chunk: nn.Module, parts: Collection[str]) -> None:
    """Marks the parameters that training leaves as they are: no gradient, hence no moments and no fp32 master."""
    for name, parameter in chunk.named_parameters():
        parameter.requires_grad_(is_trained(config, name, parts))


def hold_as_stored(chunk: nn.Module, stored: Mapping[str, torch.dtype]) -> None:
    """Gives frozen parameters the dtype in which the checkpoint holds them, so that none is rounded or widened.

    Call it before they take memory and are sharded. One that `stored` does not name stays fp32, in which it is drawn.
    """
    for name, parameter in chunk.named_parameters():
        if not parameter.requires_grad and name in stored and parameter.dtype != FP8:
            parameter.data = parameter.data.to(stored[name])
