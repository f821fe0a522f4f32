"""What every chunk of the model is given of a micro-batch, whatever its place in the pipeline."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from torch import Tensor

from megatron_glm.model.pack import PackRows

# what the last chunk makes of the hidden states
Asks = Literal["losses", "next tokens", "log-probs"]


@dataclass(frozen=True)
class MtpInput:
    """One MTP step of a micro-batch.

    tokens: [T] int64, `step` tokens further in the same document; labels: [T] int64, one further still.
    pack: the rows of the pack as this step has them: with its query positions, and without rows that have no token.
    """

    tokens: Tensor
    labels: Tensor
    pack: PackRows


class Pairs(NamedTuple):
    """The documents of a pack as pairs of answers: the chosen one, then the rejected one.

    documents: [T] int64, the number of each row's document, -1 on padding.
    tokens: [documents] int64, how many labels count.
    reference: [documents] fp64, the log-probability of each answer under the reference model.
    """

    documents: Tensor
    tokens: Tensor
    reference: Tensor


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch on the device. The pack is whole on every rank; a chunk takes this rank's rows by `pack.local`.

    tokens: [T] int64.
    labels: [T] int64, the next token of each, -100 = no loss; None: no loss is wanted.
    pack: which keys each row may see, and rope.
    ahead: of each MTP step what it is given and predicts: see `MtpInput`; empty without.
    pairs: with the loss of preferences.
    asks: the losses; or of every row the most probable next token, or the log-probability of its label.
    scales: the factor of each loss by its name, 1 / (its count in the whole step); 1 where a name is missing.
    """

    tokens: Tensor
    labels: Tensor | None
    pack: PackRows
    scales: dict[str, float] = field(default_factory=dict)
    ahead: tuple[MtpInput, ...] = ()
    asks: Asks = "losses"
    pairs: Pairs | None = None

    def scale(self, loss: str) -> float:
        return self.scales.get(loss, 1.0)
