"""The training of the indexer, as a section of the configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .model import ModelConfig
from .section import Section, option

LOSS_COEFFICIENT = 1e-3


@dataclass(frozen=True)
class IndexerConfig(Section):
    indexer_training: Literal["off", "warmup", "sparse"] = option(
        "off",
        "warmup: only the indexer, against dense attention; sparse: with all else, against the attention to the keys "
        "that it selects; off: frozen",
    )
    indexer_teacher: Literal["served", "own"] = option(
        "served", "attention that teaches it: the mean of all layers that use its selection, or its own layer's"
    )
    dsa_indexer_loss_coeff: float | None = option(
        None, f"factor of the indexer's loss in the gradient (default: {LOSS_COEFFICIENT})", minimum=0
    )
    indexer_loss_rows: Literal["all", "sparse"] = option(
        "all", "rows that teach it: all, or those that see more keys than are selected (with --indexer-training sparse)"
    )

    @property
    def coefficient(self) -> float:
        return LOSS_COEFFICIENT if self.dsa_indexer_loss_coeff is None else self.dsa_indexer_loss_coeff

    def taught_by(self, model: ModelConfig, layer: int) -> float:
        """Weight of this decoder layer's attention as a teacher of the indexer whose selection it uses; 0: none."""
        if self.indexer_training == "off":
            return 0.0
        if self.indexer_teacher == "own":
            return float(model.has_indexer(layer))
        full = max(i for i in range(layer + 1) if model.has_indexer(i))
        served = full + 1
        while served < model.num_hidden_layers and not model.has_indexer(served):
            served += 1
        return 1 / (served - full)

    def check(self) -> None:
        given, mode = self.dsa_indexer_loss_coeff, self.indexer_training
        if mode == "off" and given:
            raise ValueError(f"--dsa-indexer-loss-coeff {given} needs --indexer-training warmup or sparse, not off")
        if mode == "off" and self.indexer_teacher != "served":
            raise ValueError(
                f"--indexer-teacher {self.indexer_teacher} needs --indexer-training warmup or sparse, not off"
            )
        if mode != "sparse" and self.indexer_loss_rows == "sparse":
            raise ValueError(
                f"--indexer-loss-rows sparse needs --indexer-training sparse, not {mode}: only there are keys selected"
            )


FROZEN = IndexerConfig()  # no indexer is trained
