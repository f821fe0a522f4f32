"""Multiprocessors that are held while something is measured, as NCCL's kernels hold them; on a GPU only."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from megatron_glm.ops.multiprocessors import leave_free


@triton.jit
def _hold(ended, seen):
    """Each program is on a multiprocessor of its own, as long as there are so many, until `ended` is not 0."""
    flag = tl.load(ended, volatile=True)
    while flag == 0:
        flag = tl.load(ended, volatile=True)
    tl.store(seen + tl.program_id(0), flag)


class Holder:
    """Holds `count` multiprocessors while a piece of work runs. The work must not wait for the whole device."""

    def __init__(self, count: int) -> None:
        self.ended, self.seen = (torch.zeros(n, dtype=torch.int32, device="cuda") for n in (1, count))
        self.holding, self.ending = torch.cuda.Stream(), torch.cuda.Stream()

    def __call__(self, work: Callable[[], object]) -> None:
        current = torch.cuda.current_stream()
        self.ended.zero_()
        self.holding.wait_stream(current)
        with torch.cuda.stream(self.holding):
            _hold[(len(self.seen),)](self.ended, self.seen, num_warps=16)
        work()
        self.ending.wait_stream(current)
        with torch.cuda.stream(self.ending):
            self.ended.fill_(1)
        current.wait_stream(self.holding)


def held_times(
    work: Callable[[], object], measure: Callable[[Callable[[], object]], float], held: int, fewer: int, fp8: bool
) -> dict[str, float]:
    """Milliseconds of `work` alone and while `held` multiprocessors are, planned with all of them and with `fewer`
    less."""
    holder, found = Holder(held), {}
    for name, free in (("", 0), (f", planned with {fewer} fewer", fewer)):
        leave_free(free, fp8)
        for _ in range(2):  # other kernels, which are loaded while nothing is held
            work()
        torch.cuda.synchronize()
        found[f"alone{name}"] = 1e3 * measure(work)
        found[f"beside {held} held{name}"] = 1e3 * measure(lambda: holder(work))
    return found
