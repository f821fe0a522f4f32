"""The training loop: data, step, report, validation, checkpoint, and the ways to leave it early."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any

from megatron_glm import heartbeat, signals
from megatron_glm.config import RunConfig, TrainConfig
from megatron_glm.config.data import UNNAMED_SET
from megatron_glm.config.flops import fp8_flops
from megatron_glm.data.loader import MicroBatches, one_ahead
from megatron_glm.data.packing import PackedBatch
from megatron_glm.parallel.groups import ParallelGroups
from megatron_glm.training.batch_size import batch_size, iterations_for, iterations_within
from megatron_glm.training.checkpointing import Progress, Saver, require_same_order, start_of_run
from megatron_glm.training.engine import DPO, INDEXER, LM, RECALL, ROUTERS, Engine
from megatron_glm.training.evaluate import LeftOnSignal, evaluate
from megatron_glm.training.logging import IterationLog, log
from megatron_glm.training.lr import learning_rate
from megatron_glm.training.optimizer import AdamW
from megatron_glm.training.profiling import Profiler
from megatron_glm.training.sinks import open_sinks
from megatron_glm.training.step import Requests, StepCounts, count, train_step

START = time.monotonic()  # for --exit-duration-in-mins: when the program imported this
MTP_RECORDS = {"mtp_losses": "mtp", "mtp_acceptance": "accepted"}  # keys of the log, kinds of losses
SAVE_NOW = "save-now"  # a file of this name in --save asks for a checkpoint


def train(
    engine: Engine,
    optimizer: AdamW,
    data: MicroBatches,
    validation: Mapping[str, MicroBatches],
    progress: Progress,
) -> None:
    """Train from `progress` to the last iteration; what a step does depends on the iteration and the seed alone.

    Raises:
        FloatingPointError: naming the iteration, if a loss or gradient is not finite, with --on-nan stop, or in too
            many steps in a row.
        ValueError: before the first step, if --save holds later checkpoints than this run starts from.
        OSError: if a checkpoint cannot be written, with --save-failure stop, or the last one, whatever the flag says.
        SystemExit: after a signal and a save, with its exit code.
    """
    config, groups = engine.config, engine.groups
    first, train_iters = progress.iteration, total_iterations(config, data, progress)
    skips = 0
    with (
        signals.noted(config.checkpoint.save is not None, groups.gloo_world.size()),
        Saver(config, groups, engine.chunks, optimizer, progress, data) as saver,
        IterationLog(config.logging, first, train_iters, open_sinks(config, groups, progress)) as iteration_log,
        Profiler(config.logging) as profiler,
        garbage_collection(config.train),
        closing(one_ahead(training_steps(config, groups, data, progress, train_iters))) as steps,
    ):
        while progress.iteration < train_iters:
            profiler.at(progress.iteration)
            heartbeat.begin_step(progress.iteration + 1)
            start = time.perf_counter()
            batches = next(steps)
            heartbeat.beat()  # ahead of a rank that still waits for its data
            counts = count(config, groups, batches, requests(config, groups, saver, progress.iteration > first))
            signals.all_train()
            if counts.requests.save_failed:
                saver.wait()
            if counts.requests.exit_code or counts.requests.time_up:
                return leave(saver, progress, counts.requests)
            if counts.requests.save_now:
                saver.save(progress)
                if groups.gloo_world.rank() == 0:
                    (saver.folder / SAVE_NOW).unlink(missing_ok=True)
            ids = sample_ids(config, data, progress)
            record = next_step(engine, optimizer, batches, progress, counts, iteration_log) | ids
            seconds = time.perf_counter() - start
            iteration, left = progress.iteration, None
            last = iteration == train_iters or divides(config.train.exit_interval, iteration)
            if validation and (iteration == train_iters or divides(config.train.eval_interval, iteration)):
                try:
                    record |= validate(engine, validation, iteration)
                except LeftOnSignal as caught:
                    left = caught
            iteration_log.report(record, seconds, counts.tokens, counts.flops)
            skips = skips + 1 if "skipped" in record else 0
            if skips == config.train.most_skips:
                raise FloatingPointError(
                    f"iteration {iteration} is the last of {skips} that were skipped in a row "
                    f"(--on-nan-limit): {record['skipped']}"
                )
            if last or (left is None and divides(config.checkpoint.save_interval, iteration)):
                saver.save(progress)
            if last and left is not None:
                saver.wait()
                raise left
            if last:
                return
            collect_garbage(config.train, iteration)


def validate(engine: Engine, sets: Mapping[str, MicroBatches], iteration: int) -> dict[str, Any]:
    """Records of the validation set, or of each by its name, for the log; a line in it for each."""
    records: dict[str, Any] = {}
    for name, data in sets.items():
        found, tokens = evaluate_once(engine, data)
        which = "" if name == UNNAMED_SET else f" {name}"
        line = f" validation{which} at iteration {iteration} | lm loss: {found[LM]:.6E} | tokens: {tokens}"
        log(line + mtp_line(found) + pairs_line(found, "E"))
        for key, value in ({"lm_loss": found[LM]} | mtp_record(found) | pairs_record(found)).items():
            records.setdefault(f"valid_{key}", {})[name] = value
    return {key: value[UNNAMED_SET] if list(sets) == [UNNAMED_SET] else value for key, value in records.items()}


def pairs_record(losses: Mapping[str, float]) -> dict[str, Any]:
    """What is reported of pairs of answers: dpo_loss, and TRL's rewards and logps by kind; empty without pairs."""
    record: dict[str, Any] = {"dpo_loss": losses[DPO]} if DPO in losses else {}
    for name, value in losses.items():
        if "/" in name:
            what, kind = name.split("/")
            record.setdefault(what, {})[kind] = value
    return record


def pairs_line(losses: Mapping[str, float], form: str = "f") -> str:
    """The same for the screen, without the log-probabilities."""
    if DPO not in losses:
        return ""
    rewards = [f"{name}: {losses[name]:.6f}" for name in ("rewards/accuracies", "rewards/margins")]
    return " | ".join(["", f"dpo loss: {losses[DPO]:.6{form}}", *rewards])


def report_losses(engine: Engine, sets: Mapping[str, MicroBatches]) -> None:
    """A line with the mean loss of each set, outside of training."""
    for name, data in sets.items():
        found, tokens = evaluate_once(engine, data)
        log(f"{name} | lm loss: {found[LM]:.6f} | tokens: {tokens}{mtp_line(found)}{pairs_line(found)}")


def mtp_record(losses: Mapping[str, float]) -> dict[str, list[float]]:
    """mtp_losses and mtp_acceptance of all MTP steps in order; empty without any."""
    found = {
        key: [loss for name, loss in losses.items() if name.startswith(f"{kind}_")] for key, kind in MTP_RECORDS.items()
    }
    return {key: values for key, values in found.items() if values}


def mtp_line(losses: Mapping[str, float]) -> str:
    """The losses of all MTP steps for the screen."""
    steps = mtp_record(losses).get("mtp_losses")
    return f" | mtp losses: {' '.join(f'{loss:.6f}' for loss in steps)}" if steps else ""


def evaluate_once(engine: Engine, data: MicroBatches) -> tuple[dict[str, float], int]:
    """Mean losses of a pass over the data, or of its first --eval-iters global batches, and its loss tokens."""
    config, groups = engine.config, engine.groups
    with closing(data.evaluation(*batch_shape(config, groups), config.train.eval_iters)) as steps:
        return evaluate(engine, steps)


def requests(config: RunConfig, groups: ParallelGroups, saver: Saver, trained: bool) -> Requests:
    """What this rank asks for; only the first one looks for the file, and only when there is something to save."""
    save = config.checkpoint.save
    looks = save is not None and trained and groups.gloo_world.rank() == 0
    return Requests.of_signals(
        saving=saver.saving,
        save_now=looks and (saver.folder / SAVE_NOW).is_file(),
        time_up=time_is_up(config),
        save_failed=saver.failed,
    )


def leave(saver: Saver, progress: Progress, requests: Requests) -> None:
    """Save, and end the program after a signal.

    A save that is still being written when the signal comes is the one that stays: it is recent, and another one would
    take as much of the little time again.
    """
    log(f"leaving after iteration {progress.iteration}")
    saver.wait()
    if not (requests.exit_code and requests.saving) or saver.saved is None:  # None: that save has failed
        saver.save(progress)
        saver.wait()
    if requests.exit_code:
        sys.exit(requests.exit_code)


def next_step(
    engine: Engine,
    optimizer: AdamW,
    batches: Sequence[PackedBatch],
    progress: Progress,
    counts: StepCounts,
    iteration_log: IterationLog,
) -> dict[str, Any]:
    """The next iteration of `progress`, and its record for the log; a skipped one has no loss, but says why."""
    config, iteration = engine.config, progress.iteration + 1
    rate = learning_rate(config.optimizer, iteration, iteration_log.train_iters)
    more = iteration_log.wants_statistics(iteration)
    try:
        result = train_step(engine, optimizer, batches, rate, counts, more)
    except FloatingPointError as error:
        raise FloatingPointError(f"iteration {iteration}: {error}") from error
    size = batch_size(config.train, progress.consumed_samples)
    progress.iteration = iteration
    progress.consumed_samples += size
    record = {"iteration": iteration, "consumed_samples": progress.consumed_samples, "global_batch_size": size}
    record |= {"learning_rate": rate, "loss_tokens": counts.loss_tokens}
    if config.fp8.blockwise:
        record["fp8_share"] = fp8_flops(config, counts.tokens) / counts.flops
    if result.fault is not None:
        return record | {"lm_loss": None, "grad_norm": None, "skipped": result.fault}
    record |= {f"{name}_loss": loss for name, loss in result.losses.items() if name in (LM, INDEXER)}
    record |= {key: result.losses[name] for name, key in ROUTERS.items() if name in result.losses}
    record |= pairs_record(result.losses)
    if counts.losses.get(RECALL):  # no row of the step may see enough keys
        record["indexer_recall"] = result.losses[RECALL]
    record |= mtp_record(result.losses)
    return record | {"grad_norm": result.grad_norm, **result.statistics}


def sample_ids(config: RunConfig, data: MicroBatches, progress: Progress) -> dict[str, list[str]]:
    """What the next step is made of, with --log-samples."""
    if not config.logging.log_samples:
        return {}
    size = batch_size(config.train, progress.consumed_samples)
    return {"samples": data.sample_ids(progress.consumed_samples, size)}


def divides(interval: int | None, iteration: int) -> bool:
    return interval is not None and iteration % interval == 0


def time_is_up(config: RunConfig) -> bool:
    minutes = config.train.exit_duration_in_mins
    return minutes is not None and time.monotonic() - START > minutes * 60


@contextmanager
def garbage_collection(train: TrainConfig) -> Iterator[None]:
    """With --manual-gc: one collection now, then none that is not asked for."""
    if train.manual_gc:
        gc.disable()
        gc.collect()
    try:
        yield
    finally:
        gc.enable()


def collect_garbage(train: TrainConfig, iteration: int) -> None:
    """After an iteration, if --manual-gc wants it."""
    if train.manual_gc and divides(train.manual_gc_interval or None, iteration):
        gc.collect()


def training_steps(
    config: RunConfig, groups: ParallelGroups, data: MicroBatches, start: Progress, train_iters: int
) -> Iterator[list[PackedBatch]]:
    """This rank's micro-batches of each step after `start`."""
    consumed_samples = start.consumed_samples
    for _ in range(start.iteration, train_iters):
        shape = batch_shape(config, groups, consumed_samples)
        yield data.batch(consumed_samples, *shape)
        consumed_samples += shape[0]


def batch_shape(
    config: RunConfig, groups: ParallelGroups, consumed_samples: int | None = None
) -> tuple[int, int, int, int]:
    """(packs of the step after `consumed_samples`, or of a full one; packs of a micro-batch; DP rank; DP ranks)."""
    train = config.train
    size = train.global_batch_size if consumed_samples is None else batch_size(train, consumed_samples)
    return size, train.micro_batch_size, groups.dp.rank(), groups.dp.size()


def is_finished(config: RunConfig, data: MicroBatches) -> bool:
    """Whether --load holds the last iteration already; it is logged. Nothing is loaded to find out.

    Raises: ValueError if that run was trained on other data than `data`.
    """
    start = start_of_run(config)
    require_same_order(config, data)
    last = total_iterations(config, data, start)
    if start.iteration >= last:
        log(f"nothing to train: iteration {start.iteration} of {last} is reached")
    return start.iteration >= last


def total_iterations(config: RunConfig, data: MicroBatches, progress: Progress) -> int:
    """--train-iters, or where the samples or epochs that are left after `progress` end.

    The last step of --train-epochs may reach into the next epoch; --train-samples is never exceeded.
    """
    train, consumed = config.train, progress.consumed_samples
    if train.train_iters is not None:
        return train.train_iters
    if train.train_samples is not None:
        return progress.iteration + iterations_within(train, train.train_samples, consumed)
    assert train.train_epochs is not None, "checked with the configuration"
    return progress.iteration + iterations_for(train, train.train_epochs * data.dataset.packs_per_epoch, consumed)
