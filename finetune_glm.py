"""Fine-tune a GLM-5 model on chats, prompts and completions, or ready token ids.

With --dry-run (and --nnodes, --nproc-per-node, --gpu-memory-gb) it prints what the run needs and whether it fits,
with --check-data what is in the data.
"""

from __future__ import annotations

from megatron_glm import signals

if __name__ == "__main__":
    signals.install()  # before anything that takes time

from megatron_glm.config import DataConfig, RunConfig
from megatron_glm.config.describe import describe
from megatron_glm.config.flags import build_parser, configured
from megatron_glm.launch import is_first_rank, one_thread_on_a_cpu, ranks_from_slurm, run_program, say
from megatron_glm.parallel.pipeline.layout import check_run


def main() -> None:
    ranks_from_slurm()
    flags = build_parser(__doc__).parse_args()
    if "dry_run" in flags:
        from megatron_glm.planner.report import print_plan

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
    from megatron_glm.training.datasets import finetuning_data
    from megatron_glm.training.engine import Engine
    from megatron_glm.training.initialize import build_chunks, choose_backend, initialize
    from megatron_glm.training.logging import log
    from megatron_glm.training.loop import is_finished, report_losses, total_iterations, train
    from megatron_glm.training.optimizer import build_optimizer
    from megatron_glm.training.turns import once_per_node

    config = choose_backend(config)
    groups = initialize(config)
    data = finetuning_data(config, once_per_node(groups.gloo_world), log)
    require_same_data(groups.checkpoint, **data.by_name)
    test = {} if data.test is None else {"test": data.test}
    finished = not config.train.eval_only and is_finished(config, data.train)
    if finished and not test:
        return
    chunks = build_chunks(config, groups)
    engine = Engine(config, groups, chunks)
    if config.train.eval_only or finished:
        load_checkpoint(config, chunks, None, groups)
        sets = {} if config.data.holds_out else {"eval": data.train}
        report_losses(engine, test if finished else sets | data.valid | test)
        return

    optimizer = build_optimizer(chunks, config.optimizer)
    progress = load_checkpoint(config, chunks, optimizer, groups, data.train)
    train(engine, optimizer, data.train, data.valid, progress)
    if progress.iteration >= total_iterations(config, data.train, progress):
        report_losses(engine, test)


def check_data(config: RunConfig) -> None:
    """Prints what a run would make of its rows. One process does it; it needs neither GPU nor weights."""
    if is_first_rank():
        from megatron_glm.training.datasets import finetuning_data

        finetuning_data(config, lambda work: work(), say)


if __name__ == "__main__":
    run_program(main)
