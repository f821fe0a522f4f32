"""Small pieces of a tensor that many ranks hold are written by one of them.

FSDP cuts a norm of 6,144 numbers into 128 pieces of 192 bytes, and each of its moments. In 512 ranks of GLM-5.2 such
pieces are three quarters of the chunks and 2 % of the bytes. Rank 0, which gets all ranks' tables, joins neighbours
into blocks and chooses a writer for each among the ranks that hold a part; the parts travel over the checkpoint's own
gloo group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from .chunks import DIMS, Chunk, ChunkTable

SMALL_BYTES = 4 << 20  # a piece below this is joined with its neighbours
BLOCK_BYTES = 8 << 20  # the most that is joined, so that a reader of a part does not read much more than that


@dataclass(frozen=True)
class Moves:
    """What one rank sends and writes.

    pieces, writers [k] int64: this rank's pieces that `writers` write, in the order of their blocks;
    blocks [b, 2 * DIMS] int64: offsets and sizes of the blocks that this rank writes; own [b] int64: for each of them
        the number of one of its pieces in it, which tells the tensor;
    members [m, 4] int64: of each part of these blocks, in their order, the block (of those b), the rank that sends it,
        its bytes and where they begin in the block.
    """

    pieces: np.ndarray
    writers: np.ndarray
    blocks: np.ndarray
    own: np.ndarray
    members: np.ndarray


def moves_of_ranks(tables: Sequence[ChunkTable]) -> list[Moves]:
    """What each rank sends and writes, from the pieces that each of them owns (`tables`, one a rank)."""
    whole = ChunkTable.joined(tables)
    rank = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
    own = np.concatenate([np.arange(len(table)) for table in tables])  # the number of a piece in its rank's table
    small = np.flatnonzero(whole.nbytes < SMALL_BYTES)
    across = np.column_stack((whole.tensor, whole.offsets[:, 1:], whole.sizes[:, 1:]))[small]  # all but the rows
    # Pieces of one tensor that follow each other in its rows come together, and are joined into blocks.
    order = np.lexsort((whole.offsets[small, 0], *across.T))
    small, across = small[order], across[order]
    block = _blocks(across, whole.offsets[small, 0], whole.sizes[small, 0], whole.nbytes[small])
    several = np.bincount(block, minlength=1)[block] > 1  # a piece without neighbours stays where it is
    small = small[several]
    _, first, block, count = np.unique(block[several], return_index=True, return_inverse=True, return_counts=True)
    writer = _writers(rank[small], first, count, np.bincount(block, weights=whole.nbytes[small]), len(tables))
    places = whole.offsets[small[first]]
    sizes = whole.sizes[small[first]].copy()
    sizes[:, 0] = np.bincount(block, weights=whole.sizes[small, 0], minlength=len(first))
    nbytes = whole.nbytes[small]
    before = np.cumsum(nbytes) - nbytes
    members = np.column_stack((block, rank[small], nbytes, before - before[first][block]))
    return _of_ranks(len(tables), own[small], np.hstack((places, sizes)), writer, members)


def _blocks(across: np.ndarray, start: np.ndarray, rows: np.ndarray, nbytes: np.ndarray) -> np.ndarray:
    """The number of the block of each piece, int64 [n].

    A block is a run of pieces of one tensor that follow each other in its rows, of about BLOCK_BYTES at most.

    Args:
        across: [n, 5], the tensor of a piece and where it is in all dims but the rows; pieces of equal ones come
            together, in the order of their rows.
        start, rows, nbytes: [n], a piece's first row, its rows and its bytes.
    """
    new = np.ones(len(start), dtype=bool)
    new[1:] = (across[1:] != across[:-1]).any(axis=1) | (start[1:] != start[:-1] + rows[:-1])
    run = np.cumsum(new) - 1
    before = np.cumsum(nbytes) - nbytes
    part = (before - before[new][run]) // BLOCK_BYTES if len(run) else run
    new[1:] |= part[1:] != part[:-1]
    return np.cumsum(new) - 1


def _writers(rank: np.ndarray, first: np.ndarray, count: np.ndarray, nbytes: np.ndarray, ranks: int) -> np.ndarray:
    """The rank that writes each block [blocks] int64: of those that hold a piece, the one with the fewest bytes so far.

    Args:
        rank: [n] of each piece, block after block; first, count, nbytes: [blocks], a block's first piece, how many it
            has, and their bytes.
    """
    load, writer = np.zeros(ranks), np.zeros(len(first), dtype=np.int64)
    for block in range(len(first)):
        members = rank[first[block] : first[block] + count[block]]
        writer[block] = members[load[members].argmin()]
        load[writer[block]] += nbytes[block]
    return writer


def _of_ranks(
    ranks: int, pieces: np.ndarray, blocks: np.ndarray, writer: np.ndarray, members: np.ndarray
) -> list[Moves]:
    """The share of each rank.

    Args:
        pieces: [n], the number of each piece in its rank's table; members: [n, 4] as in `Moves`, with numbers of all
            blocks; both block after block. blocks: [b, 2 * DIMS]; writer: [b].
    """
    by_source = np.argsort(members[:, 1], kind="stable")
    by_writer = np.argsort(writer[members[:, 0]], kind="stable")
    block_order = np.argsort(writer, kind="stable")
    sent = np.searchsorted(members[by_source, 1], np.arange(ranks + 1))
    got = np.searchsorted(writer[members[by_writer, 0]], np.arange(ranks + 1))
    held = np.searchsorted(writer[block_order], np.arange(ranks + 1))
    moves = []
    for rank in range(ranks):
        mine, out = by_writer[got[rank] : got[rank + 1]], by_source[sent[rank] : sent[rank + 1]]
        here = block_order[held[rank] : held[rank + 1]]
        parts = members[mine].copy()
        from_here = parts[:, 1] == rank
        own = np.zeros(len(here), dtype=np.int64)
        parts[:, 0] = np.searchsorted(here, parts[:, 0])
        own[parts[from_here, 0]] = pieces[mine][from_here]
        moves.append(Moves(pieces[out], writer[members[out, 0]], blocks[here], own, parts))
    return moves


class Exchange:
    """What this rank writes: its chunks less those that others write, and the blocks that it puts together.

    The constructor takes all memory and reads all pieces that this rank sends: if that fails, the other ranks can
    still be stopped. In `run` they would wait for this rank's messages.
    """

    def __init__(self, chunks: list[Chunk], moves: Moves, group: ProcessGroup) -> None:
        self.moves, self.group = moves, group
        self.blocks, self.buffers = _empty_blocks(chunks, moves)
        self.messages = [_packed([chunks[i] for i in moves.pieces[moves.writers == to]]) for to in range(group.size())]
        received = np.bincount(moves.members[:, 1], weights=moves.members[:, 2], minlength=group.size()).astype(int)
        self.received = received.tolist()
        self.incoming = torch.empty(max(self.received), dtype=torch.uint8)
        moved = set(moves.pieces.tolist())
        self.kept = [chunk for number, chunk in enumerate(chunks) if number not in moved]

    def run(self) -> list[Chunk]:
        """Every rank of the group calls it. It sends to one rank and receives from one rank at a time."""
        size, rank, group = self.group.size(), self.group.rank(), self.group
        for distance in range(size):
            to, source = (rank + distance) % size, (rank - distance) % size
            outgoing, incoming = self.messages[to], self.incoming[: self.received[source]]
            if distance == 0:
                incoming = outgoing
            else:
                work = [dist.isend(outgoing, group=group, group_dst=to)] if len(outgoing) else []
                work += [dist.irecv(incoming, group=group, group_src=source)] if len(incoming) else []
                for each in work:
                    if each is not None:
                        each.wait()
            start = 0
            for block, _, nbytes, place in self.moves.members[self.moves.members[:, 1] == source].tolist():
                self.buffers[block][place : place + nbytes] = incoming[start : start + nbytes]
                start += nbytes
        return self.kept + self.blocks


def _empty_blocks(chunks: list[Chunk], moves: Moves) -> tuple[list[Chunk], list[torch.Tensor]]:
    """The blocks that this rank writes, and the bytes of each, to be filled."""
    blocks, buffers = [], []
    for row, number in zip(moves.blocks.tolist(), moves.own.tolist(), strict=True):
        example, dims = chunks[number].piece, len(chunks[number].piece.sizes)
        piece = replace(example, offsets=tuple(row[:dims]), sizes=tuple(row[DIMS : DIMS + dims]))
        data = torch.empty(piece.sizes, dtype=piece.dtype)
        blocks.append(Chunk(piece, lambda data=data: data))
        buffers.append(data.view(-1).view(torch.uint8))
    return blocks, buffers


def _packed(chunks: list[Chunk]) -> torch.Tensor:
    """The bytes of these chunks, one after the other, on the host: [n] uint8."""
    parts = [chunk.read().detach().cpu().contiguous().view(-1).view(torch.uint8) for chunk in chunks]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)
