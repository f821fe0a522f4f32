"""`tools/plan.py search`: from its flags to the layouts found, as JSON or as a table."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_glm.config import DataConfig, flag_name, require_multiple, sort_flags
from megatron_glm.config.flags import DataSection, refuse
from megatron_glm.planner.machine import DEFAULT_TYPE, Machine, machine_of
from megatron_glm.planner.plan import GIB
from megatron_glm.planner.report import check_sizes, planned_config, refuse_rehearsal
from megatron_glm.planner.search import Result, Search, layout_flags
from megatron_glm.planner.time import Ledger, unpredictable

# Flags of a search that are no flags of the layout: where the model, the data and the length of a run come from, and
# what the search itself is asked for.
OF_RUN = (
    "hf_config", "load", "load_hf", "ckpt_step", "save", "data_path", "train_data_path", "valid_data_path",
    "test_data_path", "mock_data", "train_iters", "train_epochs", "train_samples", "nproc_per_node",
)  # fmt: skip
OF_SEARCH = ("gpus", "program", "json", "results")
REPLACED = ("gpu_type", "gpu_memory_gb", "bf16", "seq_length", "global_batch_size")  # always among the flags found


def print_found(flags: argparse.Namespace, words: Sequence[str], data: DataSection = DataConfig) -> None:
    """Prints the layouts that fit, the fastest first; where none is there or fits, one line and exit code 2.

    Args:
        flags, words: the command line, parsed and as it was written.
    """
    try:
        machine, results = search(flags, data)
    except ValueError as error:
        refuse(str(error))
    given = ["--gpu-type", getattr(flags, "gpu_type", DEFAULT_TYPE), *_given(words)]
    rows = [_row(result, results[0], machine, given) for result in results]
    if getattr(flags, "json", False):
        print(json.dumps(rows, indent=1))
    else:
        print("\n".join(_table(results, rows, machine)))


def search(flags: argparse.Namespace, data: DataSection) -> tuple[Machine, list[Result]]:
    """Raises ValueError, naming the flag, for a search that cannot be."""
    given = vars(flags)
    check_sizes(flags)
    for name in ("dry_run", "nnodes"):
        if name in given:
            raise ValueError(f"{flag_name(name)} does not go with search: --gpus says on how many it plans")
    if "picture" in given:
        raise ValueError(f"--picture {given['picture']} is of one plan: give it with the flags of the layout it found")
    refuse_rehearsal(flags)
    for name in ("gpus", "results"):
        if given.get(name, 1) < 1:
            raise ValueError(f"{flag_name(name)} is {given[name]}; it must be at least 1")
    if "gpus" not in given:
        raise ValueError("search needs --gpus")
    gpus, per_node = given["gpus"], given.get("nproc_per_node", min(8, given["gpus"]))
    require_multiple("--gpus", gpus, "--nproc-per-node", per_node)
    flags = argparse.Namespace(**(given | {"bf16": True}))  # the rates are of bf16
    machine = machine_of(flags)
    config, _ = planned_config(flags, data)
    if reason := unpredictable(config):
        raise ValueError(f"search needs the time of a step, and no rates were measured {reason}")
    return machine, Search(config, frozenset(given), gpus, per_node, machine, given.get("results", 10)).run()


def _given(words: Sequence[str]) -> list[str]:
    """The words that stay flags of the run beside those that are found."""
    ours = {flag_name(name) for name in (*OF_RUN, *OF_SEARCH, *REPLACED)}
    return [word for flag in sort_flags.split(words)[1] if flag.name not in ours for word in flag.words]


def _row(result: Result, best: Result, machine: Machine, given: list[str]) -> dict[str, Any]:
    config = result.time.plan.config
    own = ["--bf16", "--seq-length", str(config.data.seq_length), "--global-batch-size"]
    own += [str(config.train.global_batch_size), "--gpu-memory-gb", f"{machine.memory / GIB:g}"]
    names = {flag.name for flag in sort_flags.split(given)[1]}
    found = [w for flag in sort_flags.split(layout_flags(config))[1] if flag.name not in names for w in flag.words]
    return {
        "flags": own + found + given,
        "peak_gib": result.peak / GIB,
        "tokens_per_second_per_gpu": result.time.tokens_per_second_per_gpu,
        "seconds_per_step": result.time.seconds,
        "against_the_best": _against(result, best),
    }


def _mean(result: Result) -> Ledger:
    """What a pipeline rank spends on average."""
    mean = Ledger()
    for ledger in result.time.by_rank:
        mean.add_all(ledger, 1 / len(result.time.by_rank))
    return mean


def _against(result: Result, best: Result) -> str:
    """The kinds of time that make it slower than the best, the largest first, in percent of the best's step."""
    if result is best:
        return ""
    ours, theirs, whole = _mean(result), _mean(best), best.time.seconds
    more = {kind: (ours[kind].exposed - theirs[kind].exposed) / whole for kind in {*ours, *theirs}}
    order = sorted((kind for kind in more if abs(more[kind]) >= 0.005), key=lambda kind: (-more[kind], kind))
    shown = order[:2] + [kind for kind in order[2:] if more[kind] < 0][-1:]  # and what it saves the most of
    return ", ".join(f"{kind} {more[kind]:+.1%}" for kind in shown)


def _table(results: list[Result], rows: list[dict[str, Any]], machine: Machine) -> Iterator[str]:
    plan = results[0].time.plan
    yield (
        f"{plan.world_size} {machine.name} of {machine.memory / GIB:.1f} GiB in nodes of {plan.gpus_per_node}, "
        f"{machine.nvlink / 1e9:.0f} GB/s in a node, {machine.nic / 1e9:.0f} GB/s between nodes; the fastest first"
    )
    heads = ("TP", "CP", "PP", "VP", "EP", "batch", "recompute", "reshard", "experts", "sync", "moments")
    widths = (4, 4, 4, 4, 5, 6, 10, 8, 8, 6, 8)
    yield "".join(f"{head:>{width}}" for head, width in zip(heads, widths, strict=True)) + (
        f"{'GiB':>7}{'tokens/s':>10}  of a step of the best"
    )
    for result, row in zip(results, rows, strict=True):
        config, base = result.time.plan.config, result.base
        parallel = config.parallel
        cells = (
            base.tp, base.cp, base.pp, result.time.plan.layout.chunks, base.ep, base.micro_batch,
            parallel.recompute_granularity, _yes(parallel.reshard_after_forward),
            _yes(parallel.reshard_experts_after_forward), parallel.grad_sync, config.optimizer.adam_moments_dtype,
        )  # fmt: skip
        text = "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        yield f"{text}{row['peak_gib']:7.1f}{row['tokens_per_second_per_gpu']:10.1f}  {row['against_the_best']}"
    yield ""
    yield f"the best: {' '.join(rows[0]['flags'])}"


def _yes(value: bool) -> str:
    return "yes" if value else "no"
