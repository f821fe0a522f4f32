"""Work beside other work: a second CUDA stream, so that communication has something to hide behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
import torch.distributed as dist
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


class Transfer:
    """Collectives that run beside what the caller does next: on a CUDA stream of their own, or in gloo's threads.

    Memory that the caller's stream allocated for them must be kept until `wait`.

    Args:
        issue: starts them, given whether to do so asynchronously; returns what to wait for then.
        finish: what follows them, on the same stream.
        after: what they follow, besides what was started on the current stream; None: all of that.
    """

    def __init__(
        self,
        device: torch.device,
        issue: Callable[[bool], list[dist.Work]],
        finish: Callable[[], None],
        after: Sequence[torch.Event] | None = None,
    ) -> None:
        self._done: torch.Event | None = None
        if device.type != "cuda":
            self._works, self._finish = issue(True), finish
            return
        stream, current = _transfers(device), torch.cuda.current_stream(device)
        for event in [current.record_event()] if after is None else after:
            stream.wait_event(event)
        with torch.cuda.stream(stream):
            issue(False)
            finish()
        self._done = stream.record_event()

    def wait(self) -> None:
        """What is started next, on the current stream, follows them. May be called on several streams."""
        if self._done is not None:
            torch.cuda.current_stream().wait_event(self._done)
        elif self._finish is not None:
            finish, self._finish = self._finish, None
            for work in self._works:
                work.wait()
            finish()


@cache
def _transfers(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
