"""`tools/plan.py published`: the published layouts of GLM-5.2 beside the best found, the table of docs/recipes.md."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import replace

from megatron_glm.config import DataConfig
from megatron_glm.config.flags import build_parser
from megatron_glm.config.plan_flags import GPU_TYPES
from megatron_glm.planner.found import search
from megatron_glm.planner.machine import MACHINES
from megatron_glm.planner.memory import fits_in, peak_memory
from megatron_glm.planner.plan import GIB, Plan
from megatron_glm.planner.report import planned_config
from megatron_glm.planner.time import step_time

GPUS = (64, 128, 256, 512)
# (sequence, global batch, context parallel size)
RUNS = ((4096, 256, 1), (32768, 64, 8))
RUN = "--hf-config glm5.2 --bf16 --attention-backend cudnn --seq-length {} --global-batch-size {}"
LAYOUT = (
    "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2 --expert-model-parallel-size 64 "
    "--moe-token-dispatcher-type hybrid --expert-node-size 8 --recompute-granularity full "
    "--reshard-after-forward false --context-parallel-size {}"
)
PUBLISHED_GPUS = 4 * 64  # PP x EP of that layout


def table() -> Iterator[str]:
    yield "| sequence | GPUs | published | GiB | tokens/s a GPU | best found | GiB | tokens/s a GPU |"
    yield "| --- " * 8 + "|"
    for length, batch, cp in RUNS:
        for gpu in GPU_TYPES:
            for gpus in GPUS:
                run = RUN.format(length, batch)
                yield f"| {length} | {gpus} {gpu} | {_published(run, cp, gpus, gpu)} | {_best(run, gpus, gpu)} |"


def _parsed(text: str, **more: object) -> argparse.Namespace:
    return argparse.Namespace(**(vars(build_parser().parse_args(text.split())) | more))


def _published(run: str, cp: int, gpus: int, gpu: str) -> str:
    """The published layout, with the quickest --grad-sync that fits, as the recipes have it."""
    config, _ = planned_config(_parsed(f"{run} {LAYOUT.format(cp)}"))
    for sync in ("last", "every"):
        changed = replace(config, parallel=replace(config.parallel, grad_sync=sync))
        try:
            plan = Plan.create(changed, gpus, 8)
        except ValueError:
            return f"needs {PUBLISHED_GPUS} GPUs | | "
        if fits_in(plan, MACHINES[gpu].memory):
            speed = step_time(plan, MACHINES[gpu]).tokens_per_second_per_gpu
            return f"{_layout(plan)} | {peak_memory(plan) / GIB:.1f} | {speed:.0f}"
    return f"{_layout(plan)} | {peak_memory(plan) / GIB:.1f} | does not fit"


def _best(run: str, gpus: int, gpu: str) -> str:
    try:
        _, [best] = search(_parsed(f"{run} --gpu-type {gpu}", gpus=gpus, results=1), DataConfig)
    except ValueError as error:
        nearest = re.search(r"nearest needs ([\d.]+) GiB", str(error))
        return f"nothing fits{f': {nearest[1]} at least' if nearest else ''} | | "
    return f"{_layout(best.time.plan)} | {best.peak / GIB:.1f} | {best.time.tokens_per_second_per_gpu:.0f}"


def _layout(plan: Plan) -> str:
    """Axes above 1, virtual stages, and the settings that spend memory."""
    grid, parallel, batch = plan.grid, plan.config.parallel, plan.config.train.micro_batch_size
    axes = {"TP": grid.tp, "CP": grid.cp, "PP": grid.pp, "VP": plan.layout.chunks, "EP": grid.ep}
    settings = {
        f"micro-batch {batch}": batch > 1,
        f"recompute {parallel.recompute_granularity}": parallel.recompute_granularity != "full",
        "dense kept": not parallel.reshard_after_forward,
        "experts kept": not parallel.reshard_experts_after_forward,
        f"sync {parallel.grad_sync}": True,
        "bf16 moments": plan.config.optimizer.adam_moments_dtype == "bf16",
    }
    words = [" ".join(f"{name}{size}" for name, size in axes.items() if size > 1)]
    return ", ".join(words + [text for text, holds in settings.items() if holds])
