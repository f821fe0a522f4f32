"""A whole run, from a checked configuration to the last checkpoint; what it trains on is the script's choice."""

from __future__ import annotations

from collections.abc import Callable

from megatron_glm.config import RunConfig
from megatron_glm.data.cache import Once
from megatron_glm.parallel.groups import ParallelGroups
from megatron_glm.training.agreement import require_same_data
from megatron_glm.training.checkpointing import load_checkpoint
from megatron_glm.training.datasets import DataSets, Log
from megatron_glm.training.engine import Engine
from megatron_glm.training.initialize import build_chunks, choose_backend, initialize
from megatron_glm.training.logging import log
from megatron_glm.training.loop import is_finished, report_losses, total_iterations, train
from megatron_glm.training.optimizer import build_optimizer
from megatron_glm.training.turns import once_per_node


def forward_engine(config: RunConfig, prepare: Callable[[RunConfig, ParallelGroups], RunConfig]) -> Engine:
    """The engine of a run that trains nothing, with the weights of --load or --load-hf.

    Args:
        prepare: called before the model is made; returns the configuration, which may have packs of another length.
    Raises: what `initialize`, `prepare` and `load_checkpoint` raise, on all ranks.
    """
    config = choose_backend(config)
    groups = initialize(config)
    config = prepare(config, groups)
    engine = Engine(config, groups, build_chunks(config, groups))
    load_checkpoint(config, groups, engine.chunks)
    return engine


def run_training(config: RunConfig, make_data: Callable[[RunConfig, Once, Log], DataSets]) -> None:
    """Train to the last iteration and report the loss of the test set, or only evaluate, with --eval-only.

    Where --load holds the last iteration already, only the test set is reported.

    Raises: what `initialize`, `make_data`, `load_checkpoint` and `train` raise, on all ranks.
    """
    config = choose_backend(config)
    groups = initialize(config)
    data = make_data(config, once_per_node(groups.gloo_world), log)
    require_same_data(groups.checkpoint, **data.by_name)
    if data.train is None or config.train.eval_only or is_finished(config, data.train):
        if sets := data.evaluated if config.train.eval_only else data.tested:
            engine = Engine(config, groups, build_chunks(config, groups))
            load_checkpoint(config, groups, engine.chunks)
            report_losses(engine, sets)
        return

    engine = Engine(config, groups, build_chunks(config, groups))
    optimizer = build_optimizer(config.optimizer, engine.chunks)
    progress = load_checkpoint(config, groups, engine.chunks, optimizer, data.train)
    train(engine, optimizer, data.train, data.valid, progress)
    if progress.iteration >= total_iterations(config, data.train, progress):
        report_losses(engine, data.tested)
