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
    elif "rehearse_rank" in flags:
        one_thread_on_a_cpu()
        from megatron_glm.rehearsal.report import print_rehearsal

        print_rehearsal(flags, PretrainDataConfig)
    else:
        run(configured(flags, PretrainDataConfig, check_run))


def run(config: RunConfig) -> None:
    say(describe(config, config.logging.verbose))
    one_thread_on_a_cpu()
    # Importing torch takes a second or more: it happens here, after the flags are checked.
    from megatron_glm.training.datasets import pretraining_data
    from megatron_glm.training.run import run_training

    run_training(config, pretraining_data)


if __name__ == "__main__":
    run_program(main)
