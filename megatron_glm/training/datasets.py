"""What a run trains on and what it is evaluated on, by name, from its flags."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from megatron_glm.config import DataConfig, PretrainDataConfig, RunConfig
from megatron_glm.config.data import PARTS, UNNAMED_SET, parse_split, validation_sets
from megatron_glm.data.blend import cache_key, open_array, parse_blend, save_array
from megatron_glm.data.cache import Once, digests, make_folder
from megatron_glm.data.files import find_files
from megatron_glm.data.finetuning import ALL, Documents, PackedDataset, Packing, Share, load_documents
from megatron_glm.data.loader import MicroBatches, Packs
from megatron_glm.data.pretraining import Blend, build_datasets
from megatron_glm.data.reference import read_reference, reference_of
from megatron_glm.data.rows import RowSettings
from megatron_glm.training.batch_size import samples_after
from megatron_glm.training.checkpointing import FINGERPRINT_PACKS, start_of_run

Log = Callable[[str], None]


@dataclass
class DataSets:
    """`train` is None where a pre-training run only evaluates; evaluates_train: --eval-only reports it, too."""

    train: MicroBatches | None = None
    valid: dict[str, MicroBatches] = field(default_factory=dict)  # by name; UNNAMED_SET for one without
    test: MicroBatches | None = None
    evaluates_train: bool = False

    @property
    def tested(self) -> dict[str, MicroBatches]:
        """What a finished run reports the loss of."""
        return {} if self.test is None else {"test": self.test}

    @property
    def evaluated(self) -> dict[str, MicroBatches]:
        """What --eval-only reports the loss of."""
        train = {} if self.train is None or not self.evaluates_train else {"eval": self.train}
        return train | self.valid | self.tested

    @property
    def by_name(self) -> dict[str, MicroBatches]:
        """All of them."""
        sets = {} if self.train is None else {"train": self.train}
        return (
            sets
            | self.tested
            | {name if name == UNNAMED_SET else f"{UNNAMED_SET} {name}": self.valid[name] for name in self.valid}
        )


def pretraining_data(config: RunConfig, once: Once, log: Log) -> DataSets:
    """The samples of the .bin/.idx files of a run. Raises ValueError, naming flag or file, if they cannot be made."""
    log("opening the data")
    data, sets = config.data, validation_sets(config.data.valid_data_path)
    assert isinstance(data, PretrainDataConfig)

    def build(paths: tuple[str, ...], train: int | None, valid: int | None, test: int | None) -> list[Any]:
        """(training, validation, test) samples; None asks for one epoch, 0 for none."""
        chosen, model, seed = replace(data, valid_data_path=paths), config.model, config.train.seed
        return list(build_datasets(chosen, model.vocab_size, seed, train, valid, test, once, log))

    samples = 0 if config.train.eval_only else _training_samples(config)
    train, valid, test = build((), samples, None, None)
    found = {"train": train, UNNAMED_SET: valid, "test": test}
    found |= {name: build(paths, 0, None, 0)[1] for name, paths in sets.items()}
    found = {name: MicroBatches(dataset) for name, dataset in found.items() if dataset is not None}
    if not found:
        raise ValueError("--eval-only needs a validation or test part: --valid-data-path, --test-data-path or --split")
    for name, batches in found.items():
        log(f"{name}: {batches.dataset.summary()}")
    return DataSets(found.pop("train", None), test=found.pop("test", None), valid=found)


def finetuning_data(config: RunConfig, once: Once, log: Log) -> DataSets:
    """The packs of the rows of a run. Raises ValueError, naming flag, file or row, if they cannot be made."""
    data, source = config.data, _RowSource(config, once, log)
    ends = parse_split(data.split or "1")
    shares = {part: (ends[i], ends[i + 1]) for i, part in enumerate(PARTS) if ends[i] < ends[i + 1]}
    if "train" not in shares:
        raise ValueError(f"--split {data.split} leaves no rows for training")
    made = {part: source.packs("--data-path", data.data_path, share, part) for part, share in shares.items()}
    valid = {UNNAMED_SET: made["valid"]} if "valid" in made else {}
    for name, paths in validation_sets(data.valid_data_path).items():
        valid[name] = source.packs("--valid-data-path", paths, part=name)
    return DataSets(made["train"], valid, made.get("test"), evaluates_train=list(made) == ["train"])


class _RowSource:
    """Packs of the rows of files, each file tokenised and each report shown once."""

    def __init__(self, config: RunConfig, once: Once, log: Log):
        self.config, self.once, self.log = config, once, log
        self.known: dict[tuple[str, ...], Documents] = {}

    def packs(self, flag: str, entries: tuple[str, ...], share: Share = ALL, part: str = "train") -> MicroBatches:
        """The packs of a share of all rows of `entries`, or of a mix of them."""
        paths, weights = parse_blend(entries, flag)
        if weights is None:
            return MicroBatches(self._packed(tuple(paths), share, part))
        mixed = [(path, weight) for path, weight in zip(paths, weights, strict=True) if weight]
        parts = [self._packed((path,), share, part) for path, _ in mixed]
        if len(parts) == 1:
            return MicroBatches(parts[0])
        return MicroBatches(
            self._mix(parts, [weight for _, weight in mixed], flag == "--data-path" and part == "train")
        )

    def _packed(self, paths: tuple[str, ...], share: Share, part: str) -> PackedDataset:
        data, name = self.config.data, " ".join(paths)
        assert isinstance(data, DataConfig)
        new = paths not in self.known
        if new:
            self.log(f"reading {name}")
            self.known[paths] = load_documents(
                paths, RowSettings.of(self.config), data.data_cache_path, self.once, self.log
            )
        documents, how = self.known[paths], (data.seq_length, data.packing, data.overlong)
        together = 2 if self.config.preference.is_dpo else 1
        name += "" if share == ALL else f", {part}"
        try:
            planned = Packing.cached(documents, self.once, self.log, *how, share, together)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        dataset = PackedDataset(documents, *how, self.config.train.seed, planned, together)
        if self.config.preference.reference_logprobs:
            dataset.reference = self._reference(dataset, name, how, share)
        self.log(f"{name}: {dataset.summary()}")
        if new:
            self.log(documents.report.summary())
        return dataset

    def _reference(self, dataset: PackedDataset, name: str, how: tuple[Any, ...], share: Share) -> np.ndarray:
        """What --reference-logprobs say of each piece of a data set: fp64 [pieces], looked up once and mapped."""
        paths, folder = self.config.preference.reference_logprobs, dataset.folder
        key = cache_key(files=digests(find_files(paths), folder), how=how, share=share)
        target = folder / f"reference-{key}"

        def write(temporary: Path, note: Log) -> None:
            note(f"{name}: looking up --reference-logprobs {' '.join(paths)}")
            try:
                values = reference_of(dataset, read_reference(paths))
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
            save_array(temporary / "log_probs.npy", values)

        self.once(lambda: make_folder(target, write, self.log))
        return open_array(target / "log_probs.npy", (len(dataset.packing.starts),), np.float64)

    def _mix(self, parts: list[PackedDataset], weights: list[Fraction], trained: bool) -> Packs:
        """A blend; of what is trained on, as many packs as the run takes."""
        samples, train = None, self.config.train
        if trained and train.has_length and not train.eval_only:
            if train.train_epochs is None:
                samples = _training_samples(self.config)
            else:  # the last step may reach beyond the last epoch
                packs = sum(part.packs_per_epoch for part in parts)
                samples = max(FINGERPRINT_PACKS, packs * train.train_epochs + train.global_batch_size)
        blend = Blend(parts, weights, parts[0].folder.parent, samples)
        self.once(lambda: blend.build(self.log))
        blend.open()
        shares = zip(blend.weights, parts, strict=True)
        self.log("mix: " + ", ".join(f"{w / blend.period:.2%} {part.folder.name}" for w, part in shares))
        return blend


def _training_samples(config: RunConfig) -> int:
    """Samples that the run takes in all.

    A resumed run counts those that the checkpoint has consumed: its earlier steps may have had another batch size.
    """
    samples = config.train.train_samples
    if samples is None:
        start = start_of_run(config)
        assert config.train.train_iters is not None, "checked with the configuration"
        left = max(0, config.train.train_iters - start.iteration)
        samples = samples_after(config.train, left, start.consumed_samples)
    return max(FINGERPRINT_PACKS, samples)
