"""Low-rank adapters (LoRA) on a frozen model, as a section of the configuration."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .model import ModelConfig
from .section import Section, flag_name, option

TARGETS = (
    "q_a_proj",
    "q_b_proj",
    "kv_a_proj_with_mqa",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
    "experts",
)
ADAPTABLE = (*TARGETS, "kv_b_proj")  # which vLLM multiplies into others, and drops its adapter
NOT_ADAPTED = {
    **dict.fromkeys(("wq_b", "wk", "weights_proj", "indexer"), "the loss has no gradient for the choice of keys"),
    **dict.fromkeys(("gate", "router"), "the router stays as it is"),
    **dict.fromkeys(("embed_tokens", "lm_head"), "the vocabulary's weights stay as they are"),
}
GROUPED_MULTIPLE = 8  # grouped products need rows of 16 bytes


@dataclass(frozen=True)
class LoraConfig(Section):
    """W x becomes W x + scale B(A x), with A [rank, in] and B [out, rank] (arXiv 2106.09685)."""

    lora_rank: int = option(0, "rank of the adapters, which alone are trained; 0: none", minimum=0)
    lora_alpha: float | None = option(None, "an adapter's scale is alpha / rank (default: twice the rank)", minimum=0)
    lora_expert_rank: int | None = option(None, "rank of the routed experts' adapters (default: --lora-rank)")
    lora_target_modules: tuple[str, ...] = option(
        TARGETS, "which weights have an adapter; gate_proj, up_proj and down_proj are those outside the routed experts"
    )
    lora_rslora: bool = option(False, "the scale is alpha / sqrt(rank) (arXiv 2312.03732)")
    base: str | None = option(None, "the model under the adapters of --load, if it has moved since")
    base_precision: Literal["fp32", "bf16", "fp8"] | None = option(
        None, "of the frozen weights; fp8: the routed experts' in blocks, the others' bf16 (default: that of the run)"
    )

    @property
    def alpha(self) -> float:
        return 2.0 * self.lora_rank if self.lora_alpha is None else self.lora_alpha

    def rank_and_scale(self, expert: bool) -> tuple[int, float]:
        """Of a routed expert's adapters, or of the others."""
        rank = self.lora_expert_rank if expert and self.lora_expert_rank is not None else self.lora_rank
        return rank, self.alpha / (math.sqrt(rank) if self.lora_rslora else rank)

    def spelled_out(self) -> dict[str, Any]:
        """The settings of the adapters by name, with what defaults mean, so that equal adapters have equal ones."""
        return {
            "lora_rank": self.lora_rank,
            "lora_alpha": self.alpha,
            "lora_expert_rank": self.rank_and_scale(expert=True)[0],
            "lora_target_modules": " ".join(sorted(set(self.lora_target_modules))),
            "lora_rslora": self.lora_rslora,
        }

    def precision(self, bf16: bool) -> str:
        """Of the frozen weights, in a run that computes in bf16 or in fp32."""
        return self.base_precision or ("bf16" if bf16 else "fp32")

    def check(self, model: ModelConfig) -> None:
        self.require("lora_rank", "lora_alpha", "lora_expert_rank", "lora_rslora")
        if not self.lora_rank:
            if self.base is not None:
                raise ValueError(f"--base {self.base} is the model under the adapters of --load, which holds none")
            if self.base_precision is not None:
                raise ValueError(
                    f"--base-precision {self.base_precision} is of the model under adapters: --load holds none, and "
                    "there is no --lora-rank"
                )
            if self.lora_target_modules != TARGETS:
                raise ValueError(f"--lora-target-modules {' '.join(self.lora_target_modules)} needs --lora-rank")
            return
        if self.lora_alpha == 0:
            raise ValueError("--lora-alpha is 0: the adapters would have no effect")
        for name in self.lora_target_modules:
            if name in NOT_ADAPTED:
                raise ValueError(f"--lora-target-modules {name}: {NOT_ADAPTED[name]}")
            if name not in ADAPTABLE:
                raise ValueError(f"--lora-target-modules {name} is none of {' '.join(ADAPTABLE)}")
        rank, _ = self.rank_and_scale(expert=True)
        experts = "experts" in self.lora_target_modules and any(map(model.is_moe, range(model.num_hidden_layers)))
        if experts and rank % GROUPED_MULTIPLE:
            flag, more = "--lora-expert-rank", ""
            if self.lora_expert_rank is None:
                flag, more = "--lora-rank", "; --lora-expert-rank gives them a rank of their own"
            raise ValueError(
                f"{flag} ({rank}) must be a multiple of {GROUPED_MULTIPLE} for the routed experts' grouped products"
                f"{more}"
            )
        if self.lora_expert_rank is not None and not experts:
            raise ValueError(f"--lora-expert-rank {self.lora_expert_rank}: no routed expert has an adapter here")


def with_stored(given: Mapping[str, Any], checkpoint: Path) -> LoraConfig:
    """The section of the flags that are `given`, by field, completed by the adapters in an `iter_…` folder, if any.

    Raises: ValueError where both say something, and not the same.
    """
    try:
        stored = json.loads((checkpoint / "state.json").read_text())["lora"]
        settings = {**stored, "lora_target_modules": tuple(stored["lora_target_modules"])}
        found = LoraConfig(**{**given, **settings})
    except (OSError, ValueError, KeyError, TypeError):
        return LoraConfig(**given)  # a whole model, or damaged, as loading it will say
    theirs, ours = found.spelled_out(), LoraConfig(**{**settings, **given})
    if not ours.lora_rank:
        raise ValueError(f"--lora-rank 0, and the adapters of --load {checkpoint} have {found.lora_rank}")
    for name, value in ours.spelled_out().items():
        if name in given and value != theirs[name]:
            raise ValueError(f"{flag_name(name)} {value}, and the adapters of --load {checkpoint} have {theirs[name]}")
    return found


NO_ADAPTERS = LoraConfig()
