"""Low-rank adapters on the weights of a chunk of the model: which have one, and without them for a while."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn

from megatron_glm.config import LoraConfig
from megatron_glm.config.model import ModelConfig
from megatron_glm.config.parameters import adapter_parameters
from megatron_glm.model.moe import Experts
from megatron_glm.parallel.linear import ParallelLinear

ADAPTED = (ParallelLinear, Experts)


def add_adapters(chunk: nn.Module, model: ModelConfig, lora: LoraConfig) -> None:
    """Gives each weight that is to have one (`adapter_parameters`) its adapter.

    With --base-precision fp8 the routed experts are held in FP8.
    """
    for module in chunk.modules() if lora.base_precision == "fp8" else ():
        if isinstance(module, Experts):
            module.hold_in_fp8()
    table = adapter_parameters(model, lora)
    for name, module in list(chunk.named_modules()) if table else ():
        if isinstance(module, ADAPTED) and (f"{name}.lora_A" in table or f"{name}.gate_lora_A" in table):
            module.adapt(*lora.rank_and_scale(expert=isinstance(module, Experts)))


@contextmanager
def without_adapters(chunks: Iterable[nn.Module]) -> Iterator[None]:
    """The chunks compute as the frozen model does: a reference for the adapted one."""
    modules = [module for chunk in chunks for module in chunk.modules()]
    scales = {module: module.adapter_scale for module in modules if isinstance(module, ADAPTED)}
    for module in scales:
        module.adapter_scale = 0.0
    try:
        yield
    finally:
        for module, scale in scales.items():
            module.adapter_scale = scale
