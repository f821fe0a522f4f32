"""Rehearses what a save and a load of GLM-5.2 on hundreds of ranks do beside moving data, on one machine.

The pieces of each rank come from the real modules on the meta device, cut as FSDP2 cuts them. No data is written: the
index is, with made-up places. The table has the CPU seconds of rank 0 in a save, and what a reader needs.
"""

from __future__ import annotations

import argparse
import multiprocessing
import pickle
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a checkout that is not installed, too

from megatron_glm import signals  # noqa: E402

if __name__ == "__main__":
    signals.install(signal.SIGINT)  # Ctrl-C: one line and exit code 130

import numpy as np  # noqa: E402
import torch  # noqa: E402

from megatron_glm.checkpoint import index, merge, sharded  # noqa: E402
from megatron_glm.checkpoint.chunks import ChunkTable, chunks_of  # noqa: E402
from megatron_glm.checkpoint.index import Places  # noqa: E402
from megatron_glm.config.flags import build_parser, resolve  # noqa: E402
from megatron_glm.model.glm import GLMChunk  # noqa: E402
from megatron_glm.parallel.groups import ParallelGroups  # noqa: E402
from megatron_glm.parallel.shard import Rectangle, shard_dim  # noqa: E402
from megatron_glm.planner.plan import Plan  # noqa: E402
from megatron_glm.training.optimizer import MOMENTS  # noqa: E402

FLAGS = """--hf-config glm5.2 --bf16 --attention-backend torch --recompute-granularity full --context-parallel-size 8
    --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2 --expert-model-parallel-size 64
    --data-path none --seq-length 32768 --global-batch-size 64 --train-iters 100"""
ARCHIVE_BYTES = 1000  # of a chunk in its file beside the data


def rectangles(plan: Plan, rank: int) -> Iterator[Rectangle]:
    """Everything that one rank saves, weights and moments, as tensors without memory."""
    groups = ParallelGroups.of_sizes(plan.grid, rank)
    config = plan.config
    for stage in plan.layout.of_rank(groups.pp.rank()):
        with torch.device("meta"):
            chunk = GLMChunk(config, groups, stage, plan.dispatcher)
        parameters = dict(chunk.named_parameters())
        for name, tensor in chunk.state_dict().items():
            info, offsets = chunk.shards[name], list(chunk.shards[name].offsets)
            if name in parameters:
                group = groups.edp if info.expert else groups.dp_cp
                dim = shard_dim(tensor.shape, group.size())
                rows = -(-tensor.shape[dim] // group.size())
                start = min(tensor.shape[dim], rows * group.rank())
                tensor = tensor.narrow(dim, start, min(rows, tensor.shape[dim] - start))
                offsets[dim] += start
            owner = all(group.rank() == 0 for group in info.replica_groups)
            whole = Rectangle(name, info.global_shape, tuple(offsets), tensor, owner)
            yield whole
            if name in parameters and parameters[name].requires_grad:
                yield from (replace(whole, name=f"optimizer.{moment}.{name}") for moment in MOMENTS)


def written(table: ChunkTable, moves: merge.Moves, rank: int) -> tuple[ChunkTable, Places]:
    """What a rank tells rank 0 when it has written: its chunks after the exchange, and their places."""
    kept = np.setdiff1d(np.arange(len(table)), moves.pieces)
    dims = table.offsets.shape[1]
    offsets = np.concatenate((table.offsets[kept], moves.blocks[:, :dims]))
    sizes = np.concatenate((table.sizes[kept], moves.blocks[:, dims:]))
    final = ChunkTable(table.tensors, np.concatenate((table.tensor[kept], table.tensor[moves.own])), offsets, sizes)
    lengths = final.nbytes + ARCHIVE_BYTES
    file, start = np.divmod(np.cumsum(lengths) - lengths, sharded.FILE_BYTES)
    files = [f"rank{rank:05d}_{number:05d}.distcp" for number in range(int(file.max(initial=0)) + 1)]
    return final, Places(files, file, start, lengths, np.zeros_like(file))


def save(plan: Plan, folder: Path) -> dict[str, float]:
    """Both steps of a save that rank 0 does for all ranks, from and to the bytes that cross the network."""
    sent = [
        pickle.dumps(ChunkTable.of([chunk.piece for chunk in chunks_of(rectangles(plan, rank))]))
        for rank in range(plan.world_size)
    ]
    start = time.process_time()
    tables = [pickle.loads(content) for content in sent]
    ChunkTable.joined(tables).require_whole()
    moves = merge.moves_of_ranks(tables)
    replies = [pickle.dumps(each) for each in moves]
    seconds = time.process_time() - start
    pieces, blocks = sum(map(len, tables)), [int(each.members[:, 2].sum()) for each in moves]
    sent = [pickle.dumps(written(tables[rank], pickle.loads(reply), rank)) for rank, reply in enumerate(replies)]
    start = time.process_time()
    tables, places = zip(*map(pickle.loads, sent), strict=True)
    table = ChunkTable.joined(tables)
    sharded.write_metadata(folder, table, Places.joined(places), {}, plan.config.model, None)
    seconds += time.process_time() - start
    return {
        "pieces": pieces,
        "chunks": len(table),
        "seconds": seconds,
        "block bytes": max(blocks),
        "index bytes": (folder / index.NAME).stat().st_size,
    }


def read(folder: Path, ranks: int, results: multiprocessing.Queue) -> None:
    """In a process of its own: (CPU seconds, bytes) to open the checkpoint and find what one rank loads."""
    wanted = [r for r in rectangles(planned(ranks), ranks // 2) if r.tensor.numel()]
    before, start = peak_bytes(), time.process_time()
    reader = sharded.Reader(folder)
    for rectangle in wanted:
        reader.index.parts(rectangle)
    results.put((time.process_time() - start, peak_bytes() - before))


def peak_bytes() -> int:
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) << 10


def planned(ranks: int) -> Plan:
    return Plan.create(resolve(build_parser().parse_args(FLAGS.split())), ranks, 8)


def rehearse(ranks: int) -> dict[str, float]:
    """One row of the table."""
    processes = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        row = save(planned(ranks), Path(folder))
        results = processes.Queue()
        reader = processes.Process(target=read, args=(Path(folder), ranks, results))
        reader.start()
        row["reader seconds"], row["reader bytes"] = results.get(timeout=600)
        reader.join()
    return row


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[512, 1024], help="sizes to rehearse")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    heads = ("ranks", "pieces", "chunks", "rank 0 (CPU s)", "most joined by a rank (MiB)", "index (MiB)")
    heads += ("reader (CPU s)", "reader (MiB)")
    print(f"| {' | '.join(heads)} |\n|{' --- |' * len(heads)}")
    for ranks in arguments.ranks:
        row = rehearse(ranks)
        mib = {name: row[name] / 2**20 for name in ("block bytes", "index bytes", "reader bytes")}
        print(
            f"| {ranks} | {row['pieces']:,} | {row['chunks']:,} | {row['seconds']:.1f} | {mib['block bytes']:.0f} "
            f"| {mib['index bytes']:.0f} | {row['reader seconds']:.2f} | {mib['reader bytes']:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
