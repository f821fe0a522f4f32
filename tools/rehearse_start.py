"""Rehearses the start of a large run of GLM-5.2 on one machine, without GPUs and without memory for the weights.

One rank at a time makes its groups and its part of the model, with a backend that sends nothing; then all ranks meet,
as threads of one process, over a real store. Prints the tables of docs/scale.md.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else a line for each connection without a host name
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a checkout that is not installed, too

from megatron_glm import signals  # noqa: E402

if __name__ == "__main__":
    signals.install(signal.SIGINT)  # Ctrl-C: one line and exit code 130

# The layouts of the recipes for 32 and 64 nodes, the latter also on 128.
LAYOUTS = {256: {"context_parallel_size": 1}, 512: {"context_parallel_size": 8}, 1024: {"context_parallel_size": 8}}
FIXED = {"pipeline_model_parallel_size": 4, "expert_model_parallel_size": 64, "expert_node_size": 8}
FIXED |= {"moe_token_dispatcher_type": "hybrid", "num_layers_per_virtual_pipeline_stage": 2}


def rehearse(ranks: int, rank: int) -> str:
    """A row of the first table, of this process."""
    begin = time.perf_counter()
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend "fake"

    from megatron_glm.config import DataConfig, ModelConfig, ParallelConfig, RunConfig, TrainConfig
    from megatron_glm.parallel import groups as groups_of
    from megatron_glm.parallel.pipeline.layout import check_layout
    from megatron_glm.parallel.rendezvous import files_of_start
    from megatron_glm.training import initialize

    parallel = ParallelConfig(**LAYOUTS[ranks], **FIXED)
    train = TrainConfig(global_batch_size=256, train_iters=1, bf16=True)
    config = RunConfig(ModelConfig.from_hf("glm5.2"), parallel=parallel, train=train, data=DataConfig(seq_length=32768))
    imported = time.perf_counter()
    memory = peak_memory()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    backends = count_groups(dist)
    groups_of._connect = lambda group, sends: None  # there is no other rank to answer
    groups = groups_of.ParallelGroups.create(parallel, groups_of.host_group(parallel))
    made = time.perf_counter()
    check_layout(parallel, config.model, ranks, 32768, config.micro_batches(groups.dp.size()))
    initialize.current_device, initialize.log = lambda: torch.device("meta"), lambda message: None
    chunks = initialize.build_chunks(config, groups, draw=lambda chunk, seed: None)
    end = time.perf_counter()
    gloo, others = backends.count("gloo"), backends.count("of others")
    cells = [ranks, rank, len(backends), f"{len(backends) + 1 - others - gloo} NCCL, {gloo} gloo"]
    cells += [f"{b - a:.1f}" for a, b in ((begin, imported), (imported, made), (made, end))]
    cells += [f"{(peak_memory() - memory) / 2**20:.0f}"]
    cells += [files_of_start(ranks, rank, eager) for eager in (True, False)]
    assert sum(1 for chunk in chunks for _ in chunk.parameters()) > 100
    return row(cells)


def count_groups(dist: ModuleType) -> list[str]:
    """Lets `dist` make fake groups where a GPU run makes NCCL's and gloo's; the list grows by the kind of each."""
    made, new_group = [], dist.new_group

    def counted(ranks: list[int] | None = None, backend: str = "nccl", **settings: Any) -> Any:
        group = new_group(ranks, backend="fake", **settings)
        made.append("of others" if group is dist.GroupMember.NON_GROUP_MEMBER else backend)
        return group

    dist.new_group, dist.get_backend = counted, lambda group=None: "nccl"
    return made


def meeting(ranks: int) -> str:
    """A row of the second table: all ranks meet over one real store, as threads that share two processors or more."""
    from megatron_glm.launch import Place
    from megatron_glm.parallel import rendezvous

    rendezvous.raise_file_limit(2 * ranks)  # both ends of each connection are here
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]

    def meet(rank: int) -> rendezvous.Meeting:
        return rendezvous.Start(Place(rank, ranks, rank % 8, "localhost", port, ""), timedelta(minutes=5)).meet()

    files, begin = open_files(), time.perf_counter()
    with ThreadPoolExecutor(ranks) as pool:
        meetings = list(pool.map(meet, range(ranks)))
    seconds = time.perf_counter() - begin
    assert len({m.rank for m in meetings}) == ranks
    return row([ranks, f"{seconds:.1f}", open_files() - files])


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def peak_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def row(cells: Iterable[object]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", choices=sorted(LAYOUTS), default=[512, 1024], help="of the run")
    parser.add_argument("--rank", type=int, metavar="N", help="print the row of this rank alone")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if arguments.rank is not None:
        print(rehearse(arguments.ranks[0], arguments.rank))
        return
    heads = ["ranks", "rank", "groups", "of this rank", "imports (s)", "groups (s)", "layout and model (s)", "MiB"]
    print(row([*heads, "files, eager gloo", "files, lazy gloo"]), row(["---"] * 10), sep="\n", flush=True)
    for ranks in arguments.ranks:
        for rank in (0, ranks - 1):
            command = [sys.executable, __file__, "--ranks", str(ranks), "--rank", str(rank)]
            subprocess.run(command, check=True)  # a process of its own, as its memory is measured
    print("", row(["ranks", "meeting (s)", "files of all"]), row(["---"] * 3), sep="\n")
    for ranks in arguments.ranks:
        print(meeting(ranks), flush=True)


if __name__ == "__main__":
    main()
