"""Times on the device and errors against fp32, for the benchmarks."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

BUDGET_MS = 300.0  # device time of one measurement
TOLERANCE = {"out": 5e-3, "gradient": 1e-2}  # relative to fp32


def milliseconds(run: Callable[[], object]) -> float:
    """Median time of one call. Calls are timed in bursts, so that the host's part hides as it does in training."""
    for _ in range(2):
        run()
    burst, bursts = 1, 3
    while True:
        times = []
        for _ in range(bursts):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(burst):
                run()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / burst)
        middle = statistics.median(times)
        if bursts > 3:
            return middle
        burst, bursts = max(1, min(20, int(10 / middle))), 7
        if middle * bursts > BUDGET_MS * 2:
            return middle


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """||value - reference|| / ||reference||; NaN if a value is not finite."""
    difference = (value.float() - reference.float()).norm() / reference.float().norm().clamp_min(1e-30)
    return difference.item()


def judge(errors: dict[str, float]) -> str:
    """The largest error as text, marked where it (or a NaN) is above its tolerance."""
    bad = [
        name for name, error in errors.items() if not error <= TOLERANCE["gradient" if name.startswith("d") else "out"]
    ]
    return " ".join(f"{name} {error:.1e}{' WRONG' if name in bad else ''}" for name, error in errors.items())
