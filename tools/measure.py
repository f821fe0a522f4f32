"""Times on the device, errors against fp32 and documents, for the benchmarks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

ROUNDS = 7
BURST_MS = 20.0  # calls are timed in bursts of about this length
AHEAD = 20_000_000  # clock cycles, about 10 ms: the device waits so long that the host runs ahead, as in training
TOLERANCE = {"out": 5e-3, "gradient": 1e-2}  # relative to fp32


def documents_of(tokens: int) -> tuple[int, ...]:
    """A mix of 200 to 2,000 tokens that fills a pack."""
    sizes, mix = [], (1750, 420, 1200, 260, 840, 2000, 610, 330, 1480, 950)
    while sum(sizes) < tokens:
        sizes.append(min(mix[len(sizes) % len(mix)], tokens - sum(sizes)))
    return tuple(sizes)


def matmul_rate() -> float:
    """TFLOP/s of a large matrix product in the same run: bf16 on a GPU, a small one in fp32 on a CPU."""
    if not torch.cuda.is_available():
        a, b = torch.randn(2, 512, 512)
        begin = time.perf_counter()
        for _ in range(10):
            a @ b
        return 10 * 2 * 512**3 / (time.perf_counter() - begin) / 1e12
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    return 2 * 8192**3 / milliseconds(lambda: a @ b) / 1e9


def milliseconds(run: Callable[[], object]) -> float:
    """Median time of one call."""
    return times(run=run)["run"]


def times(**runs: Callable[[], object]) -> dict[str, float]:
    """Median time of one call of each; they take turns, so that the clock of a warm chip favours none."""
    bursts = {}
    for name, run in runs.items():
        run()
        bursts[name] = max(1, min(10, int(BURST_MS / _burst(run, 2))))
    rounds = [{name: _burst(run, bursts[name]) for name, run in runs.items()} for _ in range(ROUNDS)]
    return {name: statistics.median(sample[name] for sample in rounds) for name in runs}


def _burst(run: Callable[[], object], calls: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(AHEAD)
    begin.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / calls


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
