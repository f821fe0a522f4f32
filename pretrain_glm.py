"""Pre-train a GLM-5 model, from scratch or from a checkpoint, on .bin/.idx files of tools/preprocess_data.py.

With --dry-run (and --nnodes, --nproc-per-node, --gpu-memory-gb) it prints what the run needs and whether it fits.
"""

from __future__ import annotations

from megatron_glm import signals

if __name__ == "__main__":
    signals.install()  # before anything that takes time

from typing import TYPE_CHECKING

from megatron_glm.config import PretrainDataConfig, RunConfig
from megatron_glm.config.describe import describe
from megatron_glm.config.flags import build_parser, configured
from megatron_glm.launch import one_line_errors, one_thread_on_a_cpu, ranks_from_slurm, say
from megatron_glm.parallel.grid import check_run

if TYPE_CHECKING:
    from megatron_glm.data.loader import MicroBatches
    from megatron_glm.parallel.groups import ParallelGroups


def main() -> None:
    ranks_from_slurm()
    flags = build_parser(__doc__, PretrainDataConfig).parse_args()
    if "dry_run" in flags:
        from megatron_glm.training.plan_report import print_plan

        print_plan(flags, PretrainDataConfig)
    else:
        run(configured(flags, PretrainDataConfig, check_run))


def run(config: RunConfig) -> None:
    say(describe(config, config.logging.verbose))
    one_thread_on_a_cpu()
    # Importing torch takes a second or more: it happens here, after the flags are checked.
    from megatron_glm.training.agreement import require_same_data
    from megatron_glm.training.checkpointing import load_checkpoint
    from megatron_glm.training.evaluate import evaluate
    from megatron_glm.training.initialize import build_chunks, choose_backend, initialize
    from megatron_glm.training.logging import log
    from megatron_glm.training.loop import batch_shape, is_finished, total_iterations, train
    from megatron_glm.training.optimizer import build_optimizer

    config = choose_backend(config)
    groups = initialize(config)
    data = datasets(config, groups)
    require_same_data(groups.checkpoint, **data)
    finished = not config.train.eval_only and is_finished(config, data["train"])
    if finished and "test" not in data:
        return
    chunks = build_chunks(config, groups)

    if config.train.eval_only or finished:
        load_checkpoint(config, chunks, None, groups)
    else:
        optimizer = build_optimizer(chunks, config.optimizer)
        progress = load_checkpoint(config, chunks, optimizer, groups, data["train"])
        train(config, chunks, optimizer, data["train"], data.get("valid"), groups, progress)
        if progress.iteration < total_iterations(config, data["train"], progress):
            return

    for name in ("valid", "test") if config.train.eval_only else ("test",):
        if name in data:
            steps = data[name].evaluation(*batch_shape(config, groups), config.train.eval_iters)
            loss, tokens = evaluate(chunks, steps, groups, config)
            log(f"{name} | lm loss: {loss:.6f} | tokens: {tokens}")


def datasets(config: RunConfig, groups: ParallelGroups) -> dict[str, MicroBatches]:
    """Training, validation and test samples; the latter two where there are any."""
    from megatron_glm.data.loader import MicroBatches
    from megatron_glm.data.pretraining import build_datasets
    from megatron_glm.training.batch_size import samples_after
    from megatron_glm.training.checkpointing import FINGERPRINT_PACKS, start_of_run
    from megatron_glm.training.logging import log
    from megatron_glm.training.turns import once_per_node

    log("opening the data")
    samples = 0
    if not config.train.eval_only:
        start = start_of_run(config)  # its steps may have had another size
        samples = config.train.train_samples
        if samples is None:
            left = max(0, config.train.train_iters - start.iteration)
            samples = samples_after(config.train, left, start.consumed_samples)
        samples = max(FINGERPRINT_PACKS, samples)
    wanted = (samples, None, None)  # None: one epoch, which evaluations begin
    once = once_per_node(groups.gloo_world)
    built = build_datasets(config.data, config.model.vocab_size, config.train.seed, *wanted, once, log)
    found = {name: data for name, data in zip(("train", "valid", "test"), built, strict=True) if data is not None}
    if not found:
        raise ValueError("--eval-only needs a validation or test part: --valid-data-path, --test-data-path or --split")
    for name, data in found.items():
        log(f"{name}: {data.summary()}")
    return {name: MicroBatches(data) for name, data in found.items()}


if __name__ == "__main__":
    with one_line_errors():
        main()
