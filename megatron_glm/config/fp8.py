"""FP8 training: which products are in FP8, by which kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .model import ModelConfig
from .parallel import ParallelConfig
from .parameters import Parameter
from .section import Section, flag_name, option

MULTIPLE = 128  # rows and columns of a block; sizes on a GPU are multiples of it


@dataclass(frozen=True)
class Fp8Config(Section):
    fp8: Literal["off", "blockwise"] | None = option(
        None,
        "blockwise: products of q_a, q_b, o_proj, dense MLPs, shared and routed experts in FP8, activations and "
        "gradients in rows of 1 x 128, weights in blocks of 128 x 128 (default: off)",
    )
    fp8_format: Literal["e4m3"] | None = option(None, "Megatron's name: with --fp8-recipe blockwise, --fp8 blockwise")
    fp8_recipe: Literal["blockwise"] | None = option(None, "Megatron's name: with --fp8-format e4m3, --fp8 blockwise")
    fp8_wgrad: Literal["auto", "bf16", "fp8"] = option(
        "auto", "precision of the gradients of weights; auto: fp8, and bf16 for routed experts, as measured"
    )
    fp8_backend: Literal["deepgemm", "te"] = option(
        "deepgemm",
        "kernels on a GPU; te: Transformer Engine, and DeepGEMM for routed experts; a CPU runs plain torch with either",
    )
    fp8_dispatch: bool = option(
        False,
        "send tokens to their experts, and output gradients back to them, in FP8 where a layer's products are: about "
        "half the bytes there",
    )
    num_layers_at_start_in_bf16: int = option(0, "first layers of which no product is in FP8", minimum=0)
    num_layers_at_end_in_bf16: int = option(0, "last layers of which no product is in FP8, MTP not counted", minimum=0)

    @property
    def blockwise(self) -> bool:
        """Whether there are products in FP8."""
        return self.fp8 == "blockwise" or self.fp8_format is not None

    def computes(self, parameter: Parameter, layers: int) -> bool:
        """Whether the products of this parameter are in FP8, in a model of so many layers."""
        return parameter.fp8_products and parameter.layer is not None and self.in_layer(parameter.layer, layers)

    def in_layer(self, layer: int, layers: int) -> bool:
        """Whether a layer has products in FP8, in a model of so many layers, behind which its MTP layer comes."""
        first, end = self.num_layers_at_start_in_bf16, layers - self.num_layers_at_end_in_bf16
        return self.blockwise and (layer >= layers or first <= layer < end)

    def share_of_layers(self, layers: int) -> float:
        """How many of a model's layers have products in FP8, as a share of them."""
        return 1 - (self.num_layers_at_start_in_bf16 + self.num_layers_at_end_in_bf16) / layers if self.blockwise else 0

    def weight_gradients(self, experts: bool) -> bool:
        """Whether the gradients of weights are products in FP8, too."""
        return self.fp8_wgrad == "fp8" or (self.fp8_wgrad == "auto" and not experts)

    def check(self, model: ModelConfig, parallel: ParallelConfig) -> None:
        """Refuses flags that contradict each other or would do nothing."""
        if (self.fp8_format is None) != (self.fp8_recipe is None):
            raise ValueError(
                f"--fp8-format {self.fp8_format} with --fp8-recipe {self.fp8_recipe}: give --fp8-format e4m3 and "
                "--fp8-recipe blockwise together, or --fp8 blockwise"
            )
        if self.fp8 == "off" and self.fp8_format is not None:
            raise ValueError(f"--fp8 off and --fp8-format {self.fp8_format} contradict each other: give one")
        defaults = Fp8Config()
        for name in (
            "fp8_wgrad",
            "fp8_backend",
            "fp8_dispatch",
            "num_layers_at_start_in_bf16",
            "num_layers_at_end_in_bf16",
        ):
            if not self.blockwise and getattr(self, name) != getattr(defaults, name):
                value = "" if getattr(self, name) is True else f" {getattr(self, name)}"
                raise ValueError(f"{flag_name(name)}{value} needs --fp8 blockwise")
        kind, ranks = parallel.moe_token_dispatcher_type, parallel.expert_model_parallel_size
        if self.fp8_dispatch and (ranks == 1 or kind not in ("alltoall", "hybrid")):
            raise ValueError(
                f"--fp8-dispatch with --moe-token-dispatcher-type {kind} and --expert-model-parallel-size {ranks}: it "
                "needs alltoall or hybrid, and more than one rank"
            )
        start, end = self.num_layers_at_start_in_bf16, self.num_layers_at_end_in_bf16
        if start + end >= (layers := model.num_hidden_layers) and self.blockwise:
            raise ValueError(
                f"--num-layers-at-start-in-bf16 ({start}) + --num-layers-at-end-in-bf16 ({end}) leave none of the "
                f"{layers} layers to --fp8 blockwise"
            )
