"""Fine-tune a GLM-5 model on chats, prompts and completions, or ready token ids.

With --dry-run (and --nnodes, --nproc-per-node, --gpu-memory-gb) it prints what the run needs and whether it fits,
with --check-data what is in the data.
"""

from __future__ import annotations

from megatron_glm import signals

if __name__ == "__main__":
    signals.install()  # before anything that takes time

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from megatron_glm.config import DataConfig, RunConfig
from megatron_glm.config.describe import describe
from megatron_glm.config.flags import build_parser, configured
from megatron_glm.launch import is_first_rank, one_line_errors, one_thread_on_a_cpu, ranks_from_slurm, say
from megatron_glm.parallel.grid import check_run

if TYPE_CHECKING:
    from megatron_glm.data.cache import Once
    from megatron_glm.data.loader import MicroBatches


def main() -> None:
    ranks_from_slurm()
    flags = build_parser(__doc__).parse_args()
    if "dry_run" in flags:
        from megatron_glm.training.plan_report import print_plan

        print_plan(flags)
        return
    config = configured(flags, DataConfig, check_run)
    if config.data.check_data:
        check_data(config)
    else:
        run(config)


def run(config: RunConfig) -> None:
    say(describe(config, config.logging.verbose))
    one_thread_on_a_cpu()
    # Importing torch takes a second or more: it happens here, after the flags are checked.
    from megatron_glm.training.agreement import require_same_data
    from megatron_glm.training.checkpointing import load_checkpoint
    from megatron_glm.training.evaluate import evaluate
    from megatron_glm.training.initialize import build_chunks, choose_backend, initialize
    from megatron_glm.training.logging import log
    from megatron_glm.training.loop import batch_shape, is_finished, train
    from megatron_glm.training.optimizer import build_optimizer
    from megatron_glm.training.turns import once_per_node

    config = choose_backend(config)
    groups = initialize(config)
    once = once_per_node(groups.gloo_world)
    data = packed(config.data.data_path, config, once, log)
    validates = config.data.valid_data_path and not config.train.eval_only
    validation = packed(config.data.valid_data_path, config, once, log) if validates else None
    require_same_data(groups.checkpoint, training=data, validation=validation)
    if not config.train.eval_only and is_finished(config, data):
        return
    chunks = build_chunks(config, groups)

    if config.train.eval_only:
        load_checkpoint(config, chunks, None, groups)
        steps = data.evaluation(*batch_shape(config, groups))
        loss, tokens = evaluate(chunks, steps, groups, config)
        log(f"eval | lm loss: {loss:.6f} | tokens: {tokens}")
        return

    optimizer = build_optimizer(chunks, config.optimizer)
    progress = load_checkpoint(config, chunks, optimizer, groups, data)
    train(config, chunks, optimizer, data, validation, groups, progress)


def check_data(config: RunConfig) -> None:
    """Prints what a run would make of its rows. One process does it; it needs neither GPU nor weights."""
    if is_first_rank():
        for paths in filter(None, (config.data.data_path, config.data.valid_data_path)):
            packed(paths, config, lambda work: work(), say)


def packed(paths: Iterable[str], config: RunConfig, once: Once, log: Callable[[str], None]) -> MicroBatches:
    """The rows of these files as packs."""
    from megatron_glm.data.finetuning import PackedDataset, Packing, load_documents
    from megatron_glm.data.loader import MicroBatches
    from megatron_glm.data.rows import RowSettings

    data = config.data
    log(f"reading {' '.join(paths)}")
    documents = load_documents(paths, RowSettings.of(config), data.data_cache_path, once, log)
    how = (data.seq_length, data.packing, data.overlong)
    dataset = PackedDataset(documents, *how, config.train.seed, Packing.cached(documents, once, log, *how))
    log(f"{' '.join(paths)}: {dataset.summary()}")
    log(documents.report.summary())
    return MicroBatches(dataset)


if __name__ == "__main__":
    with one_line_errors():
        main()
