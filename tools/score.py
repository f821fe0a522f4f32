"""Log-probabilities of completions under a checkpoint, alone or under torchrun in any layout: a JSON line a row.

The rows are those that finetune_glm.py trains on: one answer each, or with --loss dpo a chosen and a rejected one. What
counts is what would be trained on. The lines are a reference for --loss dpo --reference-logprobs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a checkout that is not installed, too

from megatron_glm import signals  # noqa: E402

if __name__ == "__main__":
    signals.install(signal.SIGINT)  # Ctrl-C: one line and exit code 130

from megatron_glm.config import DataConfig, RunConfig  # noqa: E402
from megatron_glm.config.flags import Parser, refuse  # noqa: E402
from megatron_glm.config.inference import ScoreConfig, build_parser, forward_run, with_packs  # noqa: E402
from megatron_glm.config.iterations import iteration_folder, start  # noqa: E402
from megatron_glm.launch import (  # noqa: E402
    is_first_rank,
    one_thread_on_a_cpu,
    ranks_from_slurm,
    run_program,
    world_size,  # noqa: E402
)
from megatron_glm.parallel.pipeline.layout import check_run  # noqa: E402

if TYPE_CHECKING:
    from megatron_glm.data.finetuning import PackedDataset
    from megatron_glm.parallel.groups import ParallelGroups

USAGE = "%(prog)s {--load DIR | --load-hf DIR} --data-path PATH … [flags]"
DATA_FLAGS = ("data_path", "data_cache_path", "seq_length", "overlong", "train_on_last_turn_only")
SCORE_FLAGS = ("token_logprobs",)


def parser() -> Parser:
    return build_parser(__doc__, USAGE, {DataConfig: DATA_FLAGS, ScoreConfig: SCORE_FLAGS})


def main() -> None:
    ranks_from_slurm()
    flags = parser().parse_args()
    out = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # what the run says of itself: standard output has results alone
        run(flags, out)


def run(flags: argparse.Namespace, out: TextIO) -> None:
    one_thread_on_a_cpu()
    try:
        settings = ScoreConfig(**{name: vars(flags)[name] for name in SCORE_FLAGS if name in flags})
        config, ranks = forward_run(flags), world_size()
        config.data.check()
        if "overlong" not in flags:
            config = replace(config, data=replace(config.data, overlong="refuse"))
        if config.data.overlong == "split":
            raise ValueError("--overlong split: a completion is scored whole; give truncate or refuse")
        if "seq_length" not in flags:
            config = with_packs(config, config.data.data_path, [2], ranks)  # until the data are read
        check_run(config, ranks)
        folder = Path(config.checkpoint.load_hf or iteration_folder(*start(flags.load, config.checkpoint.ckpt_step)))
    except ValueError as error:
        refuse(str(error))
    from megatron_glm.training.run import forward_engine  # imports torch: a second or more
    from megatron_glm.training.scoring import model_name, record, scored_data, scores

    made: list[tuple[PackedDataset, list[int]]] = []

    def prepare(config: RunConfig, groups: ParallelGroups) -> RunConfig:
        made.append(scored_data(config, groups, None if "seq_length" not in flags else config.data.seq_length))
        if "seq_length" in flags:
            return config
        config = with_packs(config, config.data.data_path, made[0][0].sizes.tolist(), ranks)
        check_run(config, ranks)
        return config

    engine = forward_engine(config, prepare)
    first = is_first_rank()
    model = model_name(folder) if first else ""
    [(dataset, numbers)] = made
    for number, found in zip(numbers, scores(engine, dataset), strict=True):
        if first:
            print(json.dumps(record(number, found, model, settings.token_logprobs)), file=out, flush=True)


if __name__ == "__main__":
    run_program(main)
