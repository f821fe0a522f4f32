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
    if "rehearse_rank" in flags:
        one_thread_on_a_cpu()
        from megatron_glm.rehearsal.report import print_rehearsal

        print_rehearsal(flags)
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
    from megatron_glm.training.datasets import finetuning_data
    from megatron_glm.training.run import run_training

    run_training(config, finetuning_data)


def check_data(config: RunConfig) -> None:
    """Prints what a run would make of its rows. One process does it; it needs neither GPU nor weights."""
    if is_first_rank():
        from megatron_glm.training.datasets import finetuning_data

        finetuning_data(config, lambda work: work(), say)


if __name__ == "__main__":
    run_program(main)
