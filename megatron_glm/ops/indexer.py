"""Selection of keys by the lightning indexer: scores and exact top-k."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

SCORE_ELEMENTS = 1 << 25  # fp32 elements of the per-head score block of the torch reference: 128 MiB


def index_topk(
    iq: Tensor,
    ik: Tensor,
    w: Tensor,
    start: Tensor,
    end: Tensor,
    k: int,
    backend: str,
    segments: Sequence[int] | None = None,
) -> Tensor:
    """The k best keys of each query row, `I[t,u] = sum_h w[t,h] * relu(iq[t,h] . ik[u])`.

    Args:
        iq: [t, Hi, Di] index queries; ik: [T, Di] index keys of the pack.
        w: [t, Hi] fp32 head weights with every positive scale folded in.
        start, end: [t] int32, the range of pack positions that a row may attend to; start == end is legal.
        k: number of slots a row.
        segments: `key_segments(start, end)`, for backends that plan their launches on the host.
    Returns:
        [t, k] int32 pack positions, ascending; -1 in the unused slots at the tail. Exact: among equal scores the
        lowest position wins; a row with at most k keys selects all of them.
    """
    if iq.shape[0] == 0:
        return start.new_empty(0, k)
    planned = (segments,) if backend in PLANNED_ON_HOST else ()
    return BACKENDS[backend](iq, ik, w, start, end, k, *planned)


def key_segments(start: Tensor, end: Tensor) -> list[int]:
    """Runs of rows that see one key more each: row begin, row end, key begin, key end of the last row, flattened.

    start, end: [t] as in `index_topk`, read on the host. Rows without keys are in no segment.
    """
    start, end = start.cpu().long(), end.cpu().long()
    rows = (end > start).nonzero().flatten()
    if rows.numel() == 0:
        return []
    first, last = start[rows], end[rows]
    joined = (rows.diff() == 1) & (first.diff() == 0) & (last.diff() == 1)
    breaks = (~joined).nonzero().flatten() + 1
    begins, ends = F.pad(breaks, (1, 0)), F.pad(breaks, (0, 1), value=rows.numel()) - 1
    return torch.stack((rows[begins], rows[ends] + 1, first[begins], last[ends]), dim=1).flatten().tolist()


def index_topk_torch(iq: Tensor, ik: Tensor, w: Tensor, start: Tensor, end: Tensor, k: int) -> Tensor:
    rows, total = iq.shape[0], ik.shape[0]
    output = torch.full((rows, k), -1, dtype=torch.int32, device=iq.device)
    block = max(1, SCORE_ELEMENTS // (iq.shape[1] * total))
    position = torch.arange(total, device=iq.device, dtype=torch.int32)
    keys = ik.float().T
    for begin in range(0, rows, block):
        part = slice(begin, begin + block)
        per_head = torch.relu(iq[part].float() @ keys)  # [rows, Hi, T]
        scores = (w[part].unsqueeze(1) @ per_head).squeeze(1)
        visible = (position >= start[part].unsqueeze(1)) & (position < end[part].unsqueeze(1))
        scores = scores.masked_fill(~visible, float("-inf"))
        # A stable sort, because torch.topk breaks ties in no particular order.
        best = scores.sort(dim=1, descending=True, stable=True).indices[:, :k]
        best = best.masked_fill(~visible.gather(1, best), total).sort(dim=1).values
        output[part, : best.shape[1]] = best.masked_fill(best == total, -1).int()
    return output


BACKENDS = {"torch": index_topk_torch}
PLANNED_ON_HOST: set[str] = set()  # backends that take `segments` as well
