"""Pre-train a GLM-5 model, from scratch or from a checkpoint, on .bin/.idx files of tools/preprocess_data.py.

With --dry-run (and --nnodes, --nproc-per-node, --gpu-memory-gb) it prints what the run needs and whether it fits.
"""

from __future__ import annotations

from megatron_glm import signals

if __name__ == "__main__":
    signals.install()  # before anything that takes time

from megatron_glm.config import PretrainDataConfig, RunConfig
from megatron_glm.config.describe import describe
from megatron_glm.config.flags import build_parser, configured
from megatron_glm.launch import one_thread_on_a_cpu, ranks_from_slurm, run_program, say
from megatron_glm.parallel.pipeline.layout import check_run


def main() -> None:
    ranks_from_slurm()
    flags = build_parser(__doc__, PretrainDataConfig).parse_args()
    if "dry_run" in flags:
        from megatron_glm.planner.report import print_plan

        print_plan(flags, PretrainDataConfig)
    else:
        run(configured(flags, PretrainDataConfig, check_run))


def run(config: RunConfig) -> None:
    say(describe(config, config.logging.verbose))
    one_thread_on_a_cpu()
    # Importing torch takes a second or more: it happens here, after the flags are checked.
    from megatron_glm.training.agreement import require_same_data
    from megatron_glm.training.checkpointing import load_checkpoint
    from megatron_glm.training.datasets import pretraining_data
    from megatron_glm.training.engine import Engine
    from megatron_glm.training.initialize import build_chunks, choose_backend, initialize
    from megatron_glm.training.logging import log
    from megatron_glm.training.loop import is_finished, report_losses, total_iterations, train
    from megatron_glm.training.optimizer import build_optimizer
    from megatron_glm.training.turns import once_per_node

    config = choose_backend(config)
    groups = initialize(config)
    data = pretraining_data(config, once_per_node(groups.gloo_world), log)
    require_same_data(groups.checkpoint, **data.by_name)
    test = {} if data.test is None else {"test": data.test}
    finished = not config.train.eval_only and is_finished(config, data.train)
    if finished and not test:
        return
    chunks = build_chunks(config, groups)
    engine = Engine(config, groups, chunks)
    if config.train.eval_only or finished:
        load_checkpoint(config, chunks, None, groups)
        report_losses(engine, test if finished else data.valid | test)
        return

    optimizer = build_optimizer(chunks, config.optimizer)
    progress = load_checkpoint(config, chunks, optimizer, groups, data.train)
    train(engine, optimizer, data.train, data.valid, progress)
    if progress.iteration >= total_iterations(config, data.train, progress):
        report_losses(engine, test)


if __name__ == "__main__":
    run_program(main)
