"""--profile: some iterations of some ranks under torch.profiler, as Chrome traces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from megatron_glm.config import LoggingConfig


class Profiler:
    """Records the iterations after --profile-step-start up to --profile-step-end of this rank, if it is asked for.

    The trace is written when the last of them is done, or when the run ends before. It opens in Perfetto and in
    chrome://tracing. Raises OSError, before the first iteration, if --profile-dir cannot be made.
    """

    def __init__(self, logging: LoggingConfig) -> None:
        self.logging = logging
        self.wanted = logging.profile and dist.get_rank() in logging.profile_ranks
        self.recording: profile | None = None
        self.folder = Path(logging.profile_dir)
        if self.wanted:
            self.folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Profiler:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stop()

    def at(self, iteration: int) -> None:
        """Starts or ends the recording where it is due; to be called when `iteration` iterations are done."""
        if not self.wanted:
            return
        if iteration >= self.logging.profile_step_end:
            self._stop()
        elif iteration >= self.logging.profile_step_start and self.recording is None:
            activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
            self.first = iteration + 1
            self.recording = profile(activities=activities, record_shapes=True)
            self.recording.start()

    def _stop(self) -> None:
        recording, self.recording = self.recording, None
        if recording is not None:
            recording.stop()
            name = f"rank{dist.get_rank():05d}_from_iteration{self.first}.json.gz"
            recording.export_chrome_trace(str(self.folder / name))
