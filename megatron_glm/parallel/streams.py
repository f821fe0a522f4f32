"""Work beside other work: a second CUDA stream, so that communication has something to hide behind."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from megatron_glm.ops.linear_map import linear_map


def beside(active: bool, compute: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], Tensor]:
    """Start compute(x) beside what the caller does next.

    Its backward runs beside the backward of that, too, since autograd runs a node on the stream of its forward.

    Args:
        active: whether there is communication to hide; without it, or on a CPU, compute(x) runs now.
    Returns:
        a function that waits for the result and returns it; call it once.
    """
    if not (active and x.is_cuda):
        result = compute(x)
        return lambda: result
    stream = _second_stream(x.device)
    x = _handover(x, torch.cuda.current_stream(x.device), stream)
    with torch.cuda.stream(stream):
        result = compute(x)
    return lambda: _handover(result, stream, torch.cuda.current_stream(result.device))


@cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _handover(x: Tensor, giver: torch.cuda.Stream, taker: torch.cuda.Stream) -> Tensor:
    """x, which `giver` has computed, for use on `taker`; the gradient goes the other way.

    It runs on the caller's stream, and in the backward so that the caller's stream has waited for all that the other
    one was given before: the gradients of weights, which sharded data parallelism reads there, are among it.
    """
    return linear_map(x, lambda x: _handed(x.view_as(x), giver, taker), lambda grad: _handed(grad, taker, giver))


def _handed(x: Tensor, giver: torch.cuda.Stream, taker: torch.cuda.Stream) -> Tensor:
    taker.wait_stream(giver)
    x.record_stream(taker)  # its memory is the giver's: it must not be given away before the taker is done
    return x
