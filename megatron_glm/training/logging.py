"""What a run says: messages and log lines of the first rank, and one JSON object an iteration."""

from __future__ import annotations

import dataclasses
import json
import resource
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_glm.config import RunConfig


def log(message: str) -> None:
    """One line (or more) on standard output, from the first rank only."""
    if dist.get_rank() == 0:
        print(message, flush=True)


def describe(config: RunConfig) -> str:
    """The resolved configuration, one line a value, section by section."""
    lines = []
    for section in dataclasses.fields(config):
        value = getattr(config, section.name)
        if dataclasses.is_dataclass(value):
            lines.append(f"{section.name}:")
            lines += [f"  {field.name} = {getattr(value, field.name)}" for field in dataclasses.fields(value)]
        else:
            lines.append(f"{section.name} = {value}")
    return "\n".join(lines)


def peak_memory_bytes() -> int:
    """Largest device memory of this process so far; on CPU its largest resident set."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class IterationLog:
    """Reports iterations: a line every `interval` of them, one JSON object for each."""

    def __init__(self, path: str | None, interval: int, train_iters: int) -> None:
        self.interval, self.train_iters = interval, train_iters
        self.file = None
        if path is not None and dist.get_rank() == 0:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self.file = open(path, "a")  # a resumed run continues its file
        self.window: list[tuple[float, int, int]] = []  # seconds, tokens and flops since the last line

    def report(self, record: dict[str, Any], consumed_samples: int, seconds: float, tokens: int, flops: int) -> None:
        """Report one iteration.

        Args:
            record: iteration, lm_loss, grad_norm, learning_rate, loss_tokens and what else there is; a skipped step has
                no loss and no norm.
            seconds: what the iteration took, without validation and saving.
            tokens, flops: of the whole step over all ranks, padding excluded.
        """
        ranks = dist.get_world_size()
        rates = {
            "tokens_per_second_per_gpu": tokens / seconds / ranks,
            "tflops_per_gpu": flops / seconds / ranks / 1e12,
        }
        if self.file is not None:
            self.file.write(json.dumps(record | rates | {"peak_memory_bytes": peak_memory_bytes()}) + "\n")
            self.file.flush()
        self.window.append((seconds, tokens, flops))
        if "skipped" in record:
            log(f" iteration {record['iteration']} is skipped: {record['skipped']}")
        elif record["iteration"] % self.interval == 0 or record["iteration"] == self.train_iters:
            self._print(record, consumed_samples)
            self.window.clear()

    def _print(self, record: dict[str, Any], consumed_samples: int) -> None:
        seconds, tokens, flops = (sum(values) for values in zip(*self.window, strict=True))
        rank_seconds = seconds * dist.get_world_size()
        log(
            f" iteration {record['iteration']:8d}/{self.train_iters:8d} |"
            f" consumed samples: {consumed_samples:12d} |"
            f" elapsed time per iteration (ms): {seconds / len(self.window) * 1000:.1f} |"
            f" tokens/s/GPU: {tokens / rank_seconds:.1f} |"
            f" TFLOP/s/GPU: {flops / rank_seconds / 1e12:.3f} |"
            f" learning rate: {record['learning_rate']:.6E} |"
            f" lm loss: {record['lm_loss']:.6E} |"
            f" grad norm: {record['grad_norm']:.3f} |"
        )
