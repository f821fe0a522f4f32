"""The losses that are not the next token's: preference between two answers (DPO), as a section of the configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .section import Section, flag_name, option


@dataclass(frozen=True)
class PreferenceConfig(Section):
    loss: Literal["lm", "dpo"] = option(
        "lm",
        "lm: cross entropy of the next token; dpo: direct preference optimization, of rows with a chosen and a "
        "rejected answer",
    )
    reference_logprobs: tuple[str, ...] = option(
        (), "what tools/score.py has printed of the rows with the reference model, for --loss dpo"
    )
    dpo_beta: float = option(0.1, "how strongly --loss dpo holds the model to the reference", minimum=0)
    dpo_label_smoothing: float = option(0.0, "share of pairs whose answers may be the wrong way round", minimum=0)
    dpo_loss_type: Literal["sigmoid", "ipo"] = option(
        "sigmoid", "sigmoid: DPO's; ipo: squared distance of the difference of log-ratios from 1 / (2 beta)"
    )
    dpo_average_log_probs: bool = option(False, "the mean log-probability of an answer's tokens instead of their sum")
    dpo_sft_loss_weight: float = option(0.0, "weight of the cross entropy of the chosen answers beside it", minimum=0)

    @property
    def is_dpo(self) -> bool:
        return self.loss == "dpo"

    def check(self) -> None:
        """Refuses DPO's flags without it, and numbers that it cannot use."""
        if not self.is_dpo:
            for name, field in type(self).__dataclass_fields__.items():
                if (value := getattr(self, name)) != field.default:
                    shown = "" if value is True else f" {' '.join(value) if isinstance(value, tuple) else value}"
                    raise ValueError(f"{flag_name(name)}{shown} needs --loss dpo")
        if self.dpo_label_smoothing >= 0.5:
            raise ValueError(
                f"--dpo-label-smoothing is {self.dpo_label_smoothing}; it must be below 0.5, where nothing is preferred"
            )
        if self.dpo_loss_type == "ipo" and not self.dpo_beta:
            raise ValueError("--dpo-beta is 0.0 with --dpo-loss-type ipo, which divides by it")
        if self.dpo_loss_type == "ipo" and self.dpo_label_smoothing:
            raise ValueError(
                f"--dpo-label-smoothing {self.dpo_label_smoothing} is of the sigmoid loss, --dpo-loss-type is ipo"
            )
