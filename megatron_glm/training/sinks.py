"""Where the records of a run go: a JSON file, TensorBoard, Weights & Biases; all written by the first rank."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch

from megatron_glm.checkpoint import sharded
from megatron_glm.config import LoggingConfig, RunConfig
from megatron_glm.parallel.groups import ParallelGroups
from megatron_glm.training.checkpointing import Progress
from megatron_glm.training.logging import Sink


def require_packages(logging: LoggingConfig) -> None:
    """Raises ValueError if a package is missing that these flags need."""
    needed = (("--tensorboard-dir", logging.tensorboard_dir, "tensorboard"),)
    needed += (("--wandb-project", logging.wandb_project, "wandb"),)
    for flag, value, package in needed:
        if value is not None and importlib.util.find_spec(package) is None:
            raise ValueError(f"{flag} {value} needs the package {package}: pip install -e '.[logging]'")


def open_sinks(config: RunConfig, groups: ParallelGroups, progress: Progress) -> list[Sink]:
    """The sinks that were asked for, ready for the iteration after `progress`; none but on the first rank.

    Raises: ValueError or OSError, on all ranks, if one cannot be written.
    """
    logging, sinks = config.logging, []

    def open_all() -> None:
        if logging.log_file is not None:
            file = JsonLines(Path(logging.log_file), progress.iteration)
            file.write(config_record(config, groups, progress))
            sinks.append(file)
        if logging.tensorboard_dir is not None:
            sinks.append(TensorBoard(logging.tensorboard_dir, progress.iteration))
        if logging.wandb_project is not None:
            sinks.append(WeightsAndBiases(config, progress.run_id))

    sharded.on_first_rank(groups.checkpoint, open_all)
    return sinks


def config_record(config: RunConfig, groups: ParallelGroups, progress: Progress) -> dict[str, Any]:
    """What the iterations that follow in a log file were run with."""
    place = {"from_iteration": progress.iteration, "run_id": progress.run_id, "ranks": groups.gloo_world.size()}
    return {"kind": "config", **place, "torch": torch.__version__, "config": dataclasses.asdict(config)}


RECORD_STARTS = (b'{"iteration": ', b'{"kind": "config", ')


def end_of_records(file: BinaryIO, iteration: int) -> int:
    """Bytes up to the first record after `iteration`, or up to a record that a kill left unfinished.

    Raises: ValueError if the file holds something else, which must not be lost.
    """
    file.seek(0)
    end = 0
    for number, line in enumerate(file, 1):
        if not line.endswith(b"\n") and any(line[: len(start)] == start[: len(line)] for start in RECORD_STARTS):
            break
        try:
            record = json.loads(line)
            config = record.get("kind") == "config"
            later = record["from_iteration"] >= iteration if config else record["iteration"] > iteration
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"--log-file {file.name} exists, but its line {number} is no record of an iteration"
            ) from error
        if later:
            break
        end += len(line)
    return end


class JsonLines:
    """One JSON object a line: an iteration, or the configuration of those that follow.

    What a killed run wrote after its last checkpoint is cut off: it is done again.
    """

    def __init__(self, path: Path, iteration: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = path.open("ab+")
        self.file.truncate(end_of_records(self.file, iteration))

    def write(self, record: dict[str, Any]) -> None:
        self.file.write(json.dumps(record).encode() + b"\n")
        self.file.flush()

    def close(self) -> None:
        self.file.close()


class TensorBoard:
    """Scalars by iteration; what an earlier run wrote after `iteration` is hidden."""

    def __init__(self, folder: str, iteration: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(folder, purge_step=iteration + 1)

    def write(self, record: dict[str, Any]) -> None:
        for name, number in numbers(record):
            self.writer.add_scalar(name, number, record["iteration"])
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    """A run that keeps its id over restarts; iterations that are done again count once, as the server has them."""

    def __init__(self, config: RunConfig, run_id: str) -> None:
        import wandb

        logging = config.logging
        os.makedirs(logging.wandb_save_dir, exist_ok=True)
        try:
            self.run = wandb.init(
                project=logging.wandb_project,
                entity=logging.wandb_entity,
                name=logging.wandb_exp_name,
                dir=logging.wandb_save_dir,
                config=dataclasses.asdict(config),
                id=run_id,
                resume="allow",
            )
        except wandb.Error as error:
            raise OSError(
                f"--wandb-project {logging.wandb_project}: {error} (WANDB_MODE=offline needs no server)"
            ) from error

    def write(self, record: dict[str, Any]) -> None:
        self.run.log(dict(numbers(record)), step=record["iteration"])

    def close(self) -> None:
        self.run.finish()


def numbers(record: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of a record but its iteration, by name; those of a dict as NAME/KEY, of a list as NAME/1, NAME/2 …"""
    for name, value in record.items():
        parts = {str(place): part for place, part in enumerate(value, 1)} if isinstance(value, list) else value
        if isinstance(parts, dict):
            yield from ((f"{name}/{key}", number) for key, number in numbers(parts))
        elif isinstance(value, int | float) and name != "iteration":
            yield name, value
