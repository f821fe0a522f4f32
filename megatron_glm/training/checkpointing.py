"""The whole state of a run as rectangles of global tensors and a few scalars, to disk and back."""

from __future__ import annotations

import concurrent.futures
import itertools
import uuid
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_glm.checkpoint import sharded
from megatron_glm.checkpoint.adapters import adapter_state
from megatron_glm.checkpoint.files import check_side_files, write_durably
from megatron_glm.checkpoint.hf import HFCheckpoint
from megatron_glm.config import PretrainDataConfig, RunConfig, flag_name, iterations
from megatron_glm.data.loader import MicroBatches
from megatron_glm.data.pretraining import Blend
from megatron_glm.model.glm import GLMChunk
from megatron_glm.parallel.fsdp import rectangle
from megatron_glm.parallel.groups import ParallelGroups
from megatron_glm.parallel.shard import Rectangle
from megatron_glm.training.base_model import adapters, base_of_run, fill_base, loaded_base
from megatron_glm.training.host_copy import HostCopy
from megatron_glm.training.logging import log
from megatron_glm.training.never_trained import never_trained
from megatron_glm.training.optimizer import MOMENTS, AdamW, trained_parameters

FINGERPRINT_PACKS = 16  # packs that tell one set of data from another


@dataclass
class Progress:
    """Where a run stands: iterations done (a skipped step is one), packs consumed.

    run_id: what logs know the run by; it stays the same over restarts. The first rank's counts.
    """

    iteration: int = 0
    consumed_samples: int = 0
    run_id: str = field(default_factory=lambda: uuid.uuid4().hex[:8])


class Saver:
    """Writes the checkpoints of a run to --save; every rank has one and calls it alike.

    With --async-save a save waits only for the one before it and for the copy to host memory, whose room is allocated
    here. Its files and its collectives, on a group of their own, are then the work of a thread. An error shows in
    `failed` and is raised by the next `wait` or `save`, or reported there with --save-failure continue. Leaving the
    context waits for the last save, which must succeed.

    Raises: ValueError if --save holds checkpoints after `progress`; OSError if it cannot be written, or if there is no
        room for the copy.
    """

    def __init__(
        self,
        config: RunConfig,
        groups: ParallelGroups,
        chunks: Sequence[GLMChunk],
        optimizer: AdamW,
        progress: Progress,
        data: MicroBatches,
    ) -> None:
        self.data_order = data_order(config, data)
        self.never_trained = never_trained(config) - config.taught_parts
        self.config, self.groups, self.chunks, self.optimizer = config, groups, chunks, optimizer
        self.base = base_of_run(config)
        self.hf_files = None if config.hf_folder is None else Path(config.hf_folder)
        self.saved: int | None = progress.iteration  # on disk, or being written; a run starts with nothing to save
        self.host_copy: HostCopy | None = None
        self.thread = ThreadPoolExecutor(max_workers=1)
        self.pending: Future | None = None
        if config.checkpoint.save is not None:
            self.folder = Path(config.checkpoint.save)
            sharded.on_first_rank(groups.checkpoint, lambda: self._prepare(progress.iteration))
            if config.checkpoint.async_save:
                self.host_copy = HostCopy(self.rectangles(), groups.checkpoint)

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        if error is None:
            self.wait()
            if self.saved is None:
                raise OSError(f"the run ends, but its last checkpoint could not be written to {self.folder}")
        elif self.pending is not None:  # still a good checkpoint, but what ends the run is the other error
            concurrent.futures.wait([self.pending])
            if self.failed:
                log(f"error: iteration {self.saved} is not saved: {self.pending.exception()}")

    @property
    def failed(self) -> bool:
        """The save in the background has ended with an error; ranks see it at different times."""
        return self.pending is not None and self.pending.done() and self.pending.exception() is not None

    @property
    def saving(self) -> bool:
        """A save in the background is being written."""
        return self.pending is not None and not self.pending.done()

    def save(self, progress: Progress) -> None:
        """Save the state of now, once; nothing without --save."""
        if self.config.checkpoint.save is None or self.saved == progress.iteration:
            return
        self.wait()
        self.saved = progress.iteration
        state = {
            "iteration": progress.iteration,
            "consumed_samples": progress.consumed_samples,
            "run_id": progress.run_id,
            "optimizer_steps": self.optimizer.steps,
            "adam_moments_dtype": self.config.optimizer.adam_moments_dtype,
            "never_trained": sorted(self.never_trained),
            "trained_parts": sorted(self.config.trained_parts),
            "no_save_optim": self.config.checkpoint.no_save_optim,
            **self.data_order,
            **({} if self.base is None else adapter_state(self.config.lora, self.base)),
        }
        rectangles = self.rectangles()
        if self.host_copy is not None:
            error = None
            try:
                rectangles = self.host_copy.take(rectangles)
            except (OSError, RuntimeError, MemoryError) as caught:  # the other ranks wait for this part
                error = caught
            self.pending = self.thread.submit(self._write, progress.iteration, rectangles, state, error)
        else:
            with self._failures():
                self._write(progress.iteration, rectangles, state)

    def rectangles(self) -> list[Rectangle]:
        """What this rank has of all that is saved."""
        weights = model_rectangles(self.chunks)
        weights = adapters(weights) if self.config.lora.lora_rank else weights
        moments = not self.config.checkpoint.no_save_optim
        return weights + (optimizer_rectangles(self.chunks, self.optimizer) if moments else [])

    def wait(self) -> None:
        """Wait for the save in the background, if there is one.

        Raises: OSError if it failed, with --save-failure stop.
        """
        pending, self.pending = self.pending, None
        if pending is not None:
            with self._failures():
                pending.result()

    def _write(
        self, iteration: int, rectangles: list[Rectangle], state: dict[str, Any], error: Exception | None = None
    ) -> None:
        """`error`: why this rank has nothing to write; then no rank writes."""
        config, group = self.config, self.groups.checkpoint
        sharded.together(group, lambda: refuse_not_finite(rectangles, error))
        sharded.save(self.folder, iteration, rectangles, state, config.model, self.hf_files, group)
        log(f"saved iteration {iteration} to {self.folder}")
        if self.hf_files is not None:  # where it came from may be removed
            self.hf_files = iterations.iteration_folder(self.folder, iteration) / "hf"
        if (keep := config.checkpoint.kept) is not None:
            retain = config.checkpoint.save_retain_interval
            try:
                sharded.on_first_rank(group, lambda: sharded.remove_old(self.folder, keep, retain))
            except (OSError, ValueError) as error:  # the new one is whole: nothing is lost but room
                log(f"warning: checkpoints older than the last {keep} are not removed: {error}")

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """What becomes of an error of a save; all ranks have it."""
        try:
            yield
        except (OSError, ValueError, RuntimeError, MemoryError) as error:
            message = f"iteration {self.saved} is not saved: {error}"
            if self.config.checkpoint.save_failure == "stop":
                raise OSError(message) from error
            self.saved = None
            log(f"error: {message}; training goes on (--save-failure continue)")

    def _prepare(self, iteration: int) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        check_checkpoints(self.config, iteration)
        if iterations.pointer_fault(self.folder) is not None:  # the run goes on from the last one, which it names
            write_durably(self.folder / iterations.LATEST_NAME, str(iteration).encode())
            log(f"{self.folder / iterations.LATEST_NAME} now names iteration {iteration}")
        sharded.remove_unfinished(self.folder)


def check_checkpoints(config: RunConfig, begins: int | None = None) -> None:
    """What --load and --save hold, before anything is loaded: only names and scalars are read.

    Args:
        begins: iterations that are done at the start; None: as --load says.
    Raises: ValueError if --load holds no such iteration or no optimizer, or if the run would replace or pass over what
        other saves have left in --save.
    """
    section = config.checkpoint
    begins = start_of_run(config).iteration if begins is None else begins
    source = None if section.load is None else iterations.start(section.load, section.ckpt_step)
    if section.save is not None:
        iterations.check_save(Path(section.save), begins, source)


def refuse_not_finite(rectangles: Sequence[Rectangle], error: Exception | None = None) -> None:
    """Raises `error`, or ValueError naming the first tensor with a NaN or an infinity."""
    if error is not None:
        raise error
    for r in rectangles:
        if r.tensor.numel() and not torch.stack(r.tensor.aminmax()).isfinite().all():
            raise ValueError(f"{r.name} is not finite")


def load_checkpoint(
    config: RunConfig,
    groups: ParallelGroups,
    chunks: Sequence[GLMChunk],
    optimizer: AdamW | None = None,
    data: MicroBatches | None = None,
) -> Progress:
    """Fill model and optimizer from the latest checkpoint of --load, or the model from the folder --load-hf.

    Weights only, at iteration 0, without an optimizer, with --finetune and from a converted checkpoint; weights only,
    but at the iteration and data position of the checkpoint, with --no-load-optim. Returns where that run stood.
    Adapters stay as they are drawn where --load holds none; where it does, the model under them is loaded first.

    Args:
        data: what this run trains on; needed where an optimizer is given.
    Raises:
        ValueError: if the checkpoint is of another model, or resuming it would deal other data.
    """
    rectangles, what, under = model_rectangles(chunks), "weights only", base_of_run(config)
    source = config.checkpoint.load_hf if under is None else under.folder
    if source is not None:
        log(f"loading {source}")
        cast = 0

        def fill() -> None:
            nonlocal cast
            cast = fill_base(Path(source), chunks, rectangles)

        sharded.together(groups.checkpoint, fill)
        rule = f"; {cast} matrices of experts were cast to FP8 by the rule of an export" if cast else ""
        log(f"loaded {source} (weights only{rule})")
    if config.checkpoint.load is None or (under is not None and loaded_base(config) is None):
        return Progress()
    if under is not None:
        rectangles = adapters(rectangles)
    folder, iteration = iterations.start(config.checkpoint.load, config.checkpoint.ckpt_step)
    state = None if optimizer is None else resumed_state(config)
    if optimizer is not None and state is not None:
        assert data is not None
        require_same_order(config, data)
        if not config.checkpoint.no_load_optim:
            what = "weights and optimizer"
            was, now = state.get("adam_moments_dtype", "fp32"), config.optimizer.adam_moments_dtype
            if was != now:
                what += f", whose moments were {was} and are {now} from here on"
            rectangles += optimizer_rectangles(chunks, optimizer)
            optimizer.set_steps(state["optimizer_steps"])
    log(f"loading iteration {iteration} of {folder}")
    sharded.load(folder, iteration, rectangles, groups.checkpoint)
    log(f"loaded iteration {iteration} of {folder} ({what})")
    return Progress() if optimizer is None else start_of_run(config)


def require_same_order(config: RunConfig, data: MicroBatches) -> None:
    """Raises ValueError where --load would be resumed with other data, or with the same in another order."""
    if (state := resumed_state(config)) is None:
        return
    for name, value in data_order(config, data).items():
        if (was := state.get(name)) != value:
            what = "on other data: its fingerprint is" if name == "data" else f"with {flag_name(name)}"
            raise ValueError(
                f"{config.checkpoint.load} was trained {what} {was}, this run has {value}; --finetune starts a new "
                "run from its weights"
            )


def start_of_run(config: RunConfig) -> Progress:
    """Where training begins: at the checkpoint of --load, or anew. Raises what `resumed_state` raises."""
    state = resumed_state(config)
    return Progress() if state is None else Progress(state["iteration"], state["consumed_samples"], state["run_id"])


def resumed_state(config: RunConfig) -> dict[str, Any] | None:
    """The state of the run that --load goes on with; None if training begins anew.

    Raises: ValueError if it is damaged, or its optimizer is not there or of another kind of run.
    """
    section = config.checkpoint
    if section.load is None or section.finetune:
        return None
    folder, iteration = iterations.start(section.load, section.ckpt_step)
    if iteration == 0:
        return None
    if "lora" not in (state := run_state(folder, iteration)) and config.lora.lora_rank:
        return None  # a whole model, which new adapters are put on
    if state.get("no_save_optim") and not section.no_load_optim:
        raise ValueError(
            f"--load {section.load}: iteration {iteration} holds no optimizer state (it was saved with "
            "--no-save-optim): give --no-load-optim to go on with a fresh one, or --finetune to start a new run"
        )
    was, now = state.get("trained_parts", ["trunk"]), sorted(config.trained_parts)
    if was != now and not section.no_load_optim:
        raise ValueError(
            f"--load {section.load}: iteration {iteration} holds the optimizer of a run that trained "
            f"{' and '.join(was)}; this run trains {' and '.join(now)} ({config.part_flags}): --finetune starts a new "
            "run from its weights, --no-load-optim goes on with a fresh optimizer"
        )
    return state


def run_state(folder: Path, iteration: int) -> dict[str, Any]:
    """The state of an iteration, as `Saver.save` wrote it. Raises ValueError if it is damaged or of another one."""
    named = iterations.iteration_folder(folder, iteration)
    state = sharded.state_of(named)
    if (was := state.get("iteration", iteration)) != iteration:  # earlier versions did not write it
        raise ValueError(f"{named} was renamed: it holds iteration {was}, as its state.json says")
    for name, kind in {"consumed_samples": int, "run_id": str, "optimizer_steps": int}.items():
        if not isinstance(value := state.get(name), kind):
            raise ValueError(f"{named / 'state.json'} is damaged: its {name} is {value!r}, no {kind.__name__}")
    return state | {"iteration": iteration}


def check_hf_files(config: RunConfig) -> None:
    """What can be known of the Hugging Face files of a run before data and model take their time.

    Raises: ValueError naming the file: of --load-hf as `open_hf`; of the tokenizer and other files that checkpoints
        carry along, one that is not whole.
    """
    base_of_run(config)
    if config.checkpoint.load_hf is not None:
        open_hf(config)
    elif config.hf_folder is not None:
        check_side_files(Path(config.hf_folder))


def open_hf(config: RunConfig) -> HFCheckpoint:
    """The folder of --load-hf, checked from its names and headers.

    Raises: ValueError if it is damaged or lacks the MTP layers of this run.
    """
    assert config.checkpoint.load_hf is not None
    checkpoint, wanted = HFCheckpoint(Path(config.checkpoint.load_hf)), config.model.num_nextn_predict_layers
    if (stored := checkpoint.config.num_nextn_predict_layers) < wanted:
        raise ValueError(
            f"{checkpoint.folder} holds {stored} MTP layers, the model has {wanted}: give --mtp-num-layers {stored}"
        )
    return checkpoint


def data_order(config: RunConfig, data: MicroBatches) -> dict[str, Any]:
    """What decides which documents are in which step: settings by their flags' names, and `data`, a fingerprint."""
    settings: dict[str, Any] = {"seed": config.train.seed, "seq_length": config.data.seq_length}
    if isinstance(config.data, PretrainDataConfig):
        settings |= {"split": config.data.split, "no_document_mask": config.data.no_document_mask}
    else:
        settings |= {"packing": config.data.packing, "overlong": config.data.overlong}
    return settings | {"data": fingerprint(data)}


def fingerprint(data: MicroBatches, packs: int = FINGERPRINT_PACKS) -> str:
    """CRC-32 of the first packs. All documents are shuffled, so that any other number or length of them changes it.

    The first packs of a blend say little about its weights and about rare parts: those count, too.
    """
    dataset, crc = data.dataset, 0
    chosen = (dataset.pack(index) for index in range(packs))
    if isinstance(dataset, Blend):
        crc = zlib.crc32(repr(dataset.weights).encode())
        chosen = itertools.chain(chosen, (part.pack(0) for part in dataset.parts))
    for pack in chosen:
        for ids, targets, *more in pack:
            crc = zlib.crc32(targets.tobytes(), zlib.crc32(ids.astype(np.int32).tobytes(), crc))
            if more[1:] not in ([], [None]):  # with another reference it is another run
                crc = zlib.crc32(repr(more[1]).encode(), crc)
    return f"{crc:08x}"


def model_rectangles(chunks: Sequence[GLMChunk]) -> list[Rectangle]:
    """This rank's part of every parameter and persistent buffer."""
    return [
        rectangle(name, tensor, chunk.shards[name]) for chunk in chunks for name, tensor in chunk.state_dict().items()
    ]


def optimizer_rectangles(chunks: Sequence[GLMChunk], optimizer: AdamW) -> list[Rectangle]:
    """This rank's part of AdamW's moments, each cut as its parameter."""
    return [
        rectangle(f"optimizer.{moment}.{name}", optimizer.state[parameter][moment], shard)
        for name, parameter, shard in trained_parameters(chunks)
        for moment in MOMENTS
    ]
