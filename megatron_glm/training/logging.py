"""What a run says: messages, the progress bar and the log lines of the first rank."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from tqdm import tqdm

from megatron_glm.config import LoggingConfig
from megatron_glm.launch import is_first_rank
from megatron_glm.training.statistics import peak_memory_bytes

PEAK_BF16, PEAK_FP8 = 989.4e12, 1978.9e12  # operations a second of an H100 or H200 SXM, dense
BAR = "{desc} {n_fmt}/{total_fmt} |{bar:8}| {elapsed}<{remaining}{postfix}"  # fits 80 columns


class Sink(Protocol):
    """Takes the record of every iteration, in order; a value is a number, a string, None, or a dict of numbers."""

    def write(self, record: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


def log(message: str) -> None:
    """One line (or more) on standard output, from the first rank only."""
    if dist.get_rank() if dist.is_initialized() else not is_first_rank():
        return
    if sys.stderr.isatty():
        tqdm.write(message, file=sys.stdout)  # above the bar
        sys.stdout.flush()
    else:
        print(message, flush=True)


def unit_of(operations: float) -> tuple[float, str]:
    """(size, name) of the unit in which so many operations a second are a number that says something."""
    units = ((1e12, "TFLOP/s"), (1e9, "GFLOP/s"), (1e6, "MFLOP/s"))
    return next((unit for unit in units if operations >= unit[0] / 10), units[-1])


def seconds_at_peak(flops: float, fp8_share: float) -> float | None:
    """Seconds that so many operations take a Hopper GPU at its peak rates, those in FP8 at theirs; None of another."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return None
    return flops * ((1 - fp8_share) / PEAK_BF16 + fp8_share / PEAK_FP8)


def screen_size() -> tuple[int, int]:
    """Columns and lines of the terminal; 80 x 24 where it does not know them: with 0 x 0 tqdm shows nothing."""
    try:
        size = os.get_terminal_size(sys.stderr.fileno())
    except OSError:
        return 80, 24
    return size.columns or 80, size.lines or 24


class IterationLog:
    """Reports iterations: a line every --log-interval of them, a record of each to the sinks.

    Where standard error is a terminal it shows a bar with the time that is left; the lines then go to a file or a pipe
    only.
    """

    def __init__(self, logging: LoggingConfig, first: int, train_iters: int, sinks: Sequence[Sink]) -> None:
        self.logging, self.train_iters, self.sinks = logging, train_iters, sinks
        # Records, seconds, tokens and flops of the iterations since the last line
        self.window: list[tuple[dict[str, Any], float, int, int]] = []
        hidden = dist.get_rank() != 0 or not sys.stderr.isatty() or first >= train_iters
        columns, lines = screen_size()
        self.bar = tqdm(
            desc="training",
            bar_format=BAR,
            total=train_iters,
            initial=first,
            disable=hidden,
            ncols=columns,
            nrows=lines,
        )
        self.lines = hidden or not sys.stdout.isatty()  # whether log lines are shown; the bar replaces them

    def __enter__(self) -> IterationLog:
        return self

    def __exit__(self, *error: Any) -> None:
        if any("skipped" not in record for record, *_ in self.window):  # steps that were to have a line
            self._print()
        self.bar.close()
        for sink in self.sinks:
            sink.close()

    def has_line(self, iteration: int) -> bool:
        return iteration % self.logging.log_interval == 0 or iteration == self.train_iters

    def wants_statistics(self, iteration: int) -> bool:
        """The same on all ranks."""
        return self.logging.keeps_records and self.has_line(iteration)

    def report(self, record: dict[str, Any], seconds: float, tokens: int, flops: int) -> None:
        """Report one iteration.

        Args:
            record: iteration, consumed_samples, global_batch_size, lm_loss, grad_norm, learning_rate, loss_tokens and
                what else there is; a skipped step has no loss and no norm.
            seconds: what the iteration took, without validation and saving.
            tokens, flops: of the whole step over all ranks, padding excluded.
        """
        rank_seconds = seconds * dist.get_world_size()
        rates = {
            "seconds": seconds,
            "tokens_per_second_per_gpu": tokens / rank_seconds,
            "tflops_per_gpu": flops / rank_seconds / 1e12,
        }
        if "fp8_share" in record and (at_peak := seconds_at_peak(flops, record["fp8_share"])) is not None:
            rates["share_of_peak"] = at_peak / rank_seconds
        for sink in self.sinks:
            sink.write(record | rates)
        self.window.append((record, seconds, tokens, flops))
        self._move_bar(record, tokens / rank_seconds, flops / rank_seconds)
        if "skipped" in record:
            log(f" iteration {record['iteration']} is skipped: {record['skipped']}")
        elif self.has_line(record["iteration"]):
            self._print()

    def _move_bar(self, record: dict[str, Any], tokens: float, flops: float) -> None:
        """tokens, flops: a second, of a rank."""
        if self.bar.disable:
            return
        loss = "skipped" if record["lm_loss"] is None else f"loss {record['lm_loss']:.3f}"
        size, unit = unit_of(flops)
        self.bar.set_postfix_str(f"{loss}, {tokens:,.0f} tokens/s, {flops / size:.1f} {unit}", refresh=False)
        self.bar.update(record["iteration"] - self.bar.n)

    def _print(self) -> None:
        records, *measured = zip(*self.window, strict=True)
        seconds, tokens, flops = map(sum, measured)
        steps = [record for record in records if "skipped" not in record]
        record = steps[-1]
        rank_seconds = seconds * dist.get_world_size()
        size, unit = unit_of(flops / rank_seconds)
        line = (
            f" iteration {record['iteration']:8d}/{self.train_iters:8d} |"
            f" consumed samples: {record['consumed_samples']:12d} |"
            f" elapsed time per iteration (ms): {seconds / len(self.window) * 1000:.1f} |"
            f" tokens/s/GPU: {tokens / rank_seconds:.1f} |"
            f" {unit}/GPU: {flops / rank_seconds / size:.3f} |{_of_peak(record, flops / rank_seconds)}"
            f" learning rate: {record['learning_rate']:.6E} |"
            f" global batch size: {record['global_batch_size']:5d} |"
            f"{_means(steps)}{_rewards(record)}{_mtp(steps)}"
            f" grad norm: {_short(record['grad_norm'])} |"
            f" peak memory (GiB): {peak_memory_bytes() / 2**30:.2f} |"
        )
        if self.lines:
            log(line)
        self.window.clear()


def _short(norm: float) -> str:
    """Four digits: 0.811; 4.169E-07 of indexers in warm-up, whose loss has the factor 1e-3."""
    return f"{norm:.3f}" if norm >= 0.1 or norm == 0 else f"{norm:.3E}"


def _means(steps: Sequence[dict[str, Any]]) -> str:
    """The losses of these iterations' records, and what is like them, each the mean over those that have it."""
    text = ""
    for name in ("lm_loss", "dpo_loss", "indexer_loss", "indexer_recall", "moe_aux_loss", "moe_z_loss"):
        if values := [step[name] for step in steps if name in step]:
            text += f" {name.replace('_', ' ')}: {sum(values) / len(values):.6E} |"
    return text


def _of_peak(record: dict[str, Any], flops: float) -> str:
    """flops: a second, of a rank."""
    if "fp8_share" not in record or (seconds := seconds_at_peak(flops, record["fp8_share"])) is None:
        return ""
    return f" share of peak: {seconds:.3f} |"


def _rewards(record: dict[str, Any]) -> str:
    """Of the last step's pairs of answers, where there are any, by the names of TRL."""
    return "".join(
        f" rewards/{kind}: {record['rewards'][kind]:.4f} |" for kind in ("accuracies", "margins") if "rewards" in record
    )


def _mtp(steps: Sequence[dict[str, Any]]) -> str:
    """The MTP losses and acceptances of these iterations' records, each step's mean; nothing where there are none."""
    text = ""
    for name, digits in (("mtp_losses", 4), ("mtp_acceptance", 3)):
        if lists := [step[name] for step in steps if name in step]:
            means = (sum(values) / len(values) for values in zip(*lists, strict=True))
            text += f" {name.replace('_', ' ')}: {' '.join(f'{mean:.{digits}f}' for mean in means)} |"
    return text
