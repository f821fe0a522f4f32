"""Where a run writes, tried before its data are read and its weights loaded: both can take many minutes."""

from __future__ import annotations

import os
from pathlib import Path

from megatron_glm.config import LoggingConfig, RunConfig
from megatron_glm.training.sinks import end_of_records


def check_folders(config: RunConfig) -> None:
    """On every rank. Raises OSError naming the flag whose folder this rank cannot write."""
    logging = config.logging
    if config.checkpoint.save is not None:
        require_writable("--save", Path(config.checkpoint.save))
    if logging.profile and int(os.environ.get("RANK", "0")) in logging.profile_ranks:
        require_writable("--profile-dir", Path(logging.profile_dir))


def check_sinks(logging: LoggingConfig, iteration: int) -> None:
    """On the first rank, which writes them, in a run that starts after `iteration` iterations.

    Raises: OSError if one cannot be written; ValueError if --log-file holds something else than records of a run, or
        Weights & Biases has no login.
    """
    if logging.log_file is not None:
        _check_log_file(Path(logging.log_file), iteration)
    if logging.tensorboard_dir is not None:
        require_writable("--tensorboard-dir", Path(logging.tensorboard_dir))
    if logging.wandb_project is not None:
        require_writable("--wandb-save-dir", Path(logging.wandb_save_dir))
        _check_login(logging.wandb_project)


def require_writable(flag: str, folder: Path) -> None:
    """Raises OSError unless the folder, or the nearest one above it that exists, can be written."""
    exists = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not exists.is_dir() or not os.access(exists, os.W_OK):
        raise OSError(f"{flag} {folder} cannot be written: {exists} is no writable folder; choose another one")


def _check_log_file(path: Path, iteration: int) -> None:
    if not path.exists():
        return require_writable("--log-file", path.parent)
    if not path.is_file() or not os.access(path, os.W_OK):
        raise OSError(f"--log-file {path} cannot be written: it is no writable file; choose another one")
    with path.open("rb") as file:
        end_of_records(file, iteration)


def _check_login(project: str) -> None:
    """Raises ValueError without a key of Weights & Biases; it is asked for on a terminal."""
    import wandb

    if os.environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun"):
        return
    try:
        wandb.login()
    except wandb.Error as error:
        raise ValueError(f"--wandb-project {project}: {error} (WANDB_MODE=offline needs no login)") from error
