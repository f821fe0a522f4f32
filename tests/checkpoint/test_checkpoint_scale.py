"""What rank 0 and a reader need for the chunks of 512 ranks: `tools/rehearse_save.py` has the shapes of GLM-5.2."""

from __future__ import annotations

import time
import tracemalloc
from pathlib import Path

import numpy as np
import torch

from megatron_glm.checkpoint import index, merge
from megatron_glm.checkpoint.chunks import ChunkTable
from megatron_glm.checkpoint.index import Index, Places
from megatron_glm.parallel.shard import Rectangle

STAGES, RANKS = 4, 128  # of a stage
SMALL, EXPERTS = 720, 290  # tensors cut over all ranks of a stage; chunks of experts that a rank holds alone


def tables() -> list[ChunkTable]:
    """Those of 512 ranks with 1,010 pieces each."""
    found = []
    for stage in range(STAGES):
        tensors = {f"stage{stage}.small{i}": ((6144,), torch.float32) for i in range(SMALL)}
        tensors |= {f"stage{stage}.experts{i}": ((RANKS, 4096, 6144), torch.float32) for i in range(EXPERTS)}
        for rank in range(RANKS):
            offsets = np.zeros((SMALL + EXPERTS, 3), dtype=np.int64)
            sizes = np.ones((SMALL + EXPERTS, 3), dtype=np.int64)
            offsets[:SMALL, 0], sizes[:SMALL, 0] = rank * 48, 48
            offsets[SMALL:, 0], sizes[SMALL:, 1:] = rank, (4096, 6144)
            found.append(ChunkTable(tensors, np.arange(SMALL + EXPERTS), offsets, sizes))
    return found


def test_half_a_million_pieces_cost_seconds_and_a_reader_little(tmp_path: Path):
    """They took 19 s of Python on rank 0, and 7 s and 1.3 GiB in each reader."""
    parts = tables()
    start = time.process_time()
    whole = ChunkTable.joined(parts)
    whole.require_whole()
    moves = merge.moves_of_ranks(parts)
    seconds = time.process_time() - start
    assert len(whole) == 517_120 and sum(len(each.blocks) for each in moves) == STAGES * SMALL
    joined = [int(each.members[:, 2].sum()) for each in moves]
    assert sum(joined) == STAGES * SMALL * 6144 * 4 and max(joined) <= 1.2 * min(joined), "all ranks write a share"

    nothing = np.zeros(len(whole), dtype=np.int64)
    start = time.process_time()
    content = Index(whole, Places(["file"], nothing, nothing, nothing, nothing)).to_bytes()
    seconds += time.process_time() - start
    assert seconds <= 3

    del parts, moves
    (tmp_path / index.NAME).write_bytes(content)
    wanted = torch.empty((1, 4096, 6144), device="meta")
    start = time.process_time()
    stored = index.read(tmp_path / index.NAME)
    for i in range(EXPERTS):
        rectangle = Rectangle(f"stage2.experts{i}", (RANKS, 4096, 6144), (77, 0, 0), wanted, False)
        [part] = stored.parts(rectangle)
        assert stored.piece(part.chunk).offsets == (77, 0, 0)
    assert time.process_time() - start <= 1.5
    tracemalloc.start()
    index.read(tmp_path / index.NAME)
    assert tracemalloc.get_traced_memory()[1] <= 200 << 20  # 520,000 chunks; a third where small ones are joined
    tracemalloc.stop()
