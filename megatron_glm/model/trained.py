"""Which parameters training changes, and how the others are held."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from megatron_glm.config.model import ModelConfig
from megatron_glm.config.parameters import model_parameters


def is_trained(config: ModelConfig, name: str) -> bool:
    """Whether training changes the parameter of this canonical name: all but indexers and MTP layers."""
    parameter = model_parameters(config)[name]
    return parameter.part != "indexer" and not parameter.mtp


def freeze(config: ModelConfig, chunk: nn.Module) -> None:
    """Marks the parameters that training leaves as they are: no gradient, hence no moments and no fp32 master."""
    for name, parameter in chunk.named_parameters():
        parameter.requires_grad_(is_trained(config, name))


def hold_as_stored(chunk: nn.Module, stored: Mapping[str, torch.dtype]) -> None:
    """Gives frozen parameters the dtype in which the checkpoint holds them, so that none is rounded or widened.

    Call it before they take memory and are sharded. One that `stored` does not name stays fp32, in which it is drawn.
    """
    for name, parameter in chunk.named_parameters():
        if not parameter.requires_grad and name in stored:
            parameter.data = parameter.data.to(stored[name])
