"""What crosses from one chunk of the model to the next: named tensors, declared once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

Carry = dict[str, Tensor]  # by the names of the declared fields, those that the micro-batch has


@dataclass(frozen=True)
class CarryField:
    """One tensor of a `Carry`. Its shape is fixed, so no shape is ever sent.

    shape: of one micro-batch on one rank, for example [t/TP, D].
    differentiable: its gradient goes back to the stage that sent it.
    stages: for each stage of the pipeline, whether its input has this tensor.
    sparse_only: a micro-batch whose rows all attend densely goes without it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool
    stages: tuple[bool, ...]
    sparse_only: bool = False
