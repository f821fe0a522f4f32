"""Sparse attention and key selection by libraries: cuDNN-frontend's DSA kernels and FlashMLA, on Hopper in bf16.

Importing this module imports the packages. `backends.py` does it when the backend is chosen.
"""

from __future__ import annotations

import inspect
import math
from functools import cache, lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from cudnn import DSA
from flash_mla import flash_mla_sparse_fwd
from torch import Tensor

from megatron_glm.ops.indexer import key_segments
from megatron_glm.ops.upload import upload

SCORE_BYTES = 1 << 30  # fp32 scores of one call; large, because a call of few rows leaves processors idle
# Of the top-k kernel, two int32 words a score, so that it runs on a part of the rows at a time
SCRATCH_BYTES = 135 << 22
# Rows of one launch a processor, where there are more than one launch takes: so many keep all processors busy to the
# end. A thread block of the score kernel serves 128 / heads rows and a processor has two or more; four of the top-k
# kernel, of one row each, fill a processor.
SCORE_ROUND, TOP_K_ROUND = 16, 4
ROW_STEP, WIDTH_STEP = 64, 4096  # shapes are rounded up, so that few kernels are compiled and few plans kept
ALIGNED = 8  # columns: rows of scores that begin at 32 bytes
ELEMENTS = 1 << 31  # the libraries count elements in int32: no tensor of one call reaches this
LATENT, ROPE = 512, 64
TEACHER_HEADS = 64  # the kernel takes a multiple of it
# Of the two wheels one asks for this on SM90, the other does not know it.
LEGACY = {"use_legacy": True} if "use_legacy" in inspect.signature(flash_mla_sparse_fwd).parameters else {}


# ---- selection of keys -------------------------------------------------------------------------------------------


class ScoreCall(NamedTuple):
    """One launch of the score and top-k kernels: rows [begin, end), split over the key ranges `cu_keys`."""

    begin: int
    end: int
    key: int  # where its keys begin in the pack
    longest: int  # rows of its largest piece
    width: int  # columns of the score buffer
    dense: bool  # a single piece whose keys reach to the end of the buffer: the score kernel for that is faster
    shifted: bool  # some keys do not start at position 0
    short: bool  # some row has fewer keys than slots
    cu_rows: Tensor  # int32 [pieces + 1], rows of each piece, cumulative
    cu_keys: Tensor  # int32 [pieces + 1], where the keys of each piece begin in the pack
    first: Tensor  # int32 [pieces], keys before the last one that a piece's first row sees
    lengths: Tensor  # int32 [rows rounded up], keys that each row sees; 0 on the added rows
    top_ks: list[tuple[slice, DSA.IndexerTopK]]  # over which of these rows each launch of the top-k kernel runs

    @property
    def rows(self) -> int:
        return self.lengths.numel()


def index_topk_cudnn(
    iq: Tensor, ik: Tensor, w: Tensor, start: Tensor, end: Tensor, k: int, segments: list[int] | None = None
) -> Tensor:
    """`ops.indexer.index_topk`; scores are fp32 sums of bf16 products, one chunk of rows at a time.

    segments: `key_segments(start, end)` from a caller who knows it on the host; without it the device is waited for.
    """
    heads, dim = iq.shape[1:]
    if heads not in (16, 32, 64) or dim != 128 or not 0 < k <= 2048:
        raise ValueError(
            f"--attention-backend cudnn scores 16, 32 or 64 index heads of 128 and selects up to 2048 keys, not "
            f"index_n_heads {heads} of index_head_dim {dim} and index_topk {k}; choose another backend"
        )
    require_bf16(iq, ik)
    if segments is None:
        segments = key_segments(start, end)
    # A call may write -1 into the rows that were added to it; the calls after it run later and overwrite them.
    selected = torch.empty(iq.shape[0] + ROW_STEP, k, dtype=torch.int32, device=iq.device)
    if sum(segments[1::4]) - sum(segments[::4]) < iq.shape[0]:
        selected.fill_(-1)  # for the rows without keys
    calls = _score_calls(tuple(segments), ik.shape[0], k, iq.device)
    if calls:
        size = max(call.rows * call.width for call in calls)
        scores = torch.empty(size, dtype=torch.float32, device=iq.device)
        scratch_size = max(top_k.scratch_workspace_bytes() for call in calls for _, top_k in call.top_ks)
        scratch = torch.empty(scratch_size, dtype=torch.uint8, device=iq.device)
        for call in calls:
            _select(call, iq, ik, w, start, k, scores, scratch, selected)
    return selected[: iq.shape[0]]


def _select(
    call: ScoreCall,
    iq: Tensor,
    ik: Tensor,
    w: Tensor,
    start: Tensor,
    k: int,
    scores: Tensor,
    scratch: Tensor,
    out: Tensor,
) -> None:
    rows = slice(call.begin, call.end)
    scores = scores[: call.rows * call.width].view(call.rows, call.width)
    given, target = (iq[rows], ik.unsqueeze(1), w[rows]), scores[: call.end - call.begin]
    if call.dense:
        keys = ik[call.key : call.key + call.width].unsqueeze(1)
        given, target = [x.unsqueeze(0) for x in (iq[rows], keys, w[rows])], target.unsqueeze(0)
        pieces = {}
    else:
        pieces = {"cu_seqlens_q": call.cu_rows, "cu_seqlens_k": call.cu_keys}
        pieces |= {"max_seqlen_q": call.longest, "max_seqlen_k": call.width}
    DSA.indexer_forward_wrapper(*given, ratio=1, out=target, q_causal_offsets=call.first, **pieces)
    index = out[call.begin : call.begin + call.rows]
    for part, top_k in call.top_ks:
        top_k.execute(scores[part], call.lengths[part], out_indices=index[part], workspace=scratch)
    if call.shifted:  # from columns to pack positions
        index = out[rows]
        index += start[rows].unsqueeze(1)
        if call.short:
            slot = torch.arange(k, dtype=torch.int32, device=out.device)
            index.masked_fill_(slot >= call.lengths[: index.shape[0]].unsqueeze(1), -1)


@lru_cache(maxsize=8)
def _score_calls(segments: tuple[int, ...], total: int, k: int, device: torch.device) -> list[ScoreCall]:
    """The calls for `segments` of a pack of `total` keys, with their arrays on the device.

    Kept, since all layers of a micro-batch share them.
    """
    groups: list[list[tuple[int, int, int, int]]] = []
    for piece in _pieces(segments, _processors(device)):
        if not groups or not _fits(groups[-1], piece):
            groups.append([])
        groups[-1].append(piece)
    arrays, calls = [], []
    for pieces in groups:
        lengths = [torch.arange(e - (r1 - r0) + 1, e + 1) - b for r0, r1, b, e in pieces]
        begin, end, key = pieces[0][0], pieces[-1][1], pieces[0][2]
        arrays += [
            torch.tensor([r0 - begin for r0, *_ in pieces] + [end - begin]),
            torch.tensor([b for _, _, b, _ in pieces] + [pieces[-1][3]]),
            torch.tensor([e - (r1 - r0) - b for r0, r1, b, e in pieces]),
            F.pad(torch.cat(lengths), (0, _rows(pieces) - (end - begin))),
        ]
        shifted, short = any(b for _, _, b, _ in pieces), any(int(x[0]) < k for x in lengths)
        width = min(_width(pieces), total - key)
        dense = len(pieces) == 1 and width % ALIGNED == 0
        longest = max(r1 - r0 for r0, r1, *_ in pieces)
        calls.append((begin, end, key, longest, width if dense else _width(pieces), dense, shifted, short))
    if not calls:
        return []
    # One copy that nothing waits for. Each array is 16-byte aligned.
    padded = [F.pad(a.int(), (0, -a.numel() % 4)) for a in arrays]
    parts = upload(torch.cat(padded), device).split([a.numel() for a in padded])
    parts = [part[: a.numel()] for part, a in zip(parts, arrays, strict=True)]
    arrays = [parts[i : i + 4] for i in range(0, len(parts), 4)]
    return [
        ScoreCall._make((*call, *own, _top_ks(own[-1], call[4], k))) for call, own in zip(calls, arrays, strict=True)
    ]


def _top_ks(lengths: Tensor, width: int, k: int) -> list[tuple[slice, DSA.IndexerTopK]]:
    """The class and not its wrapper, which would keep a plan of every shape it ever saw."""
    step = _rounded(SCRATCH_BYTES // (8 * width), TOP_K_ROUND * _processors(lengths.device))
    plans = []
    for begin in range(0, lengths.numel(), step):
        part = slice(begin, begin + step)
        scores = torch.empty(lengths[part].numel(), width, device=lengths.device)
        plans.append((part, DSA.IndexerTopK(scores, lengths[part], k, return_val=False, deterministic=True)))
        plans[-1][1].check_support()
        plans[-1][1].compile()
    return plans


def _pieces(segments: tuple[int, ...], processors: int) -> list[tuple[int, int, int, int]]:
    """Segments, those that outgrow a score buffer cut by rows: (row begin, row end, key begin, key end).

    A segment is cut from its end, so that the rows that are no full round are its first, which see the fewest keys.
    """
    pieces = []
    for i in range(len(segments) - 4, -1, -4):
        row, row_end, begin, end = segments[i : i + 4]
        while row < row_end:
            most = SCORE_BYTES // (4 * _width_of(end - begin)) // ROW_STEP * ROW_STEP
            rows = row_end - row
            if rows > most:
                rows = min(rows, _rounded(most, SCORE_ROUND * processors))
            pieces.append((row_end - rows, row_end, begin, end))
            row_end, end = row_end - rows, end - rows
    return pieces[::-1]


def _rounded(rows: int, unit: int) -> int:
    """Rows of a launch that may have `rows` (never fewer than ROW_STEP): a multiple of `unit`, or of a half of it, or
    a quarter, and so on, where it may not have so many."""
    while unit > max(rows, ROW_STEP):
        unit //= 2
    return max(ROW_STEP, rows // unit * unit)


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _fits(pieces: list[tuple[int, int, int, int]], piece: tuple[int, int, int, int]) -> bool:
    """Whether a piece can join a call: rows that follow, keys after all of the call's keys, and room for both."""
    joined = [*pieces, piece]
    small = _rows(joined) * _width(joined) * 4 <= SCORE_BYTES
    return pieces[-1][1] == piece[0] and pieces[-1][3] <= piece[2] and small


def _rows(pieces: list[tuple[int, int, int, int]]) -> int:
    return -(-(pieces[-1][1] - pieces[0][0]) // ROW_STEP) * ROW_STEP


def _width(pieces: list[tuple[int, int, int, int]]) -> int:
    return max(_width_of(end - begin) for _, _, begin, end in pieces)


def _width_of(keys: int) -> int:
    return -(-keys // WIDTH_STEP) * WIDTH_STEP


# ---- attention to selected keys ----------------------------------------------------------------------------------


def sparse_mla_cudnn(
    q: Tensor, kv: Tensor, idx: Tensor, length: Tensor, v_dim: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Forward of `ops.sparse_mla.sparse_mla` by FlashMLA."""
    rows, heads = q.shape[:2]
    padded = _served_heads(q, kv, v_dim)
    if rows == 0:
        return q.new_empty(0, heads, v_dim), torch.empty(0, heads, device=q.device)
    idx = pad_slots(idx)
    calls = [
        flash_mla_sparse_fwd(
            pad_heads(q[part], padded),
            kv.unsqueeze(1),
            idx[part].unsqueeze(1),
            scale,
            v_dim,
            None,
            length[part],
            **LEGACY,
        )
        for part in row_chunks(rows, padded)
    ]
    out, _, lse = calls[0] if len(calls) == 1 else (torch.cat(x) for x in zip(*calls, strict=True))
    torch.nan_to_num_(lse, nan=math.nan, posinf=-math.inf, neginf=-math.inf)  # of rows without keys FlashMLA says +inf
    return (out, lse) if padded == heads else (out[:, :heads].contiguous(), lse[:, :heads].contiguous())


def sparse_mla_backward_cudnn(
    grad: Tensor, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor, idx: Tensor, length: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Backward of `ops.sparse_mla.sparse_mla` by cuDNN. Sums into kv's gradient by atomics: last bits vary by run."""
    rows, heads = q.shape[:2]
    padded = _served_heads(q, kv, out.shape[-1])
    if rows == 0:
        return torch.zeros_like(q), torch.zeros_like(kv)
    idx = pad_slots(idx)
    sink = _no_sink(padded, q.device)
    if padded != heads:
        lse = F.pad(lse, (0, padded - heads), value=math.inf)  # makes every probability of these heads exactly 0
    grads_q, grad_kv = [], None
    for part in row_chunks(rows, padded):
        rest = (pad_heads(x[part], padded) for x in (out, grad))
        queries = pad_heads(q[part], padded)
        result = DSA.sparse_attention_backward_wrapper(
            queries, kv, *rest, lse[part], sink, idx[part], softmax_scale=scale, topk_length=length[part]
        )
        grads_q.append(result["dq"] if padded == heads else result["dq"][:, :heads])
        grad_kv = result["dkv"] if grad_kv is None else grad_kv.float() + result["dkv"]
    grad_q = grads_q[0].contiguous() if len(grads_q) == 1 else torch.cat(grads_q)
    assert grad_kv is not None, "there are rows"
    return grad_q, grad_kv.to(kv.dtype)


@cache
def _no_sink(heads: int, device: torch.device) -> Tensor:
    return torch.full((heads,), -math.inf, device=device)


def require_bf16(*tensors: Tensor) -> None:
    for tensor in tensors:
        if tensor.dtype != torch.bfloat16:
            raise ValueError(f"--attention-backend cudnn computes in bfloat16 (--bf16), not {tensor.dtype}")


def _served_heads(q: Tensor, kv: Tensor, v_dim: int) -> int:
    """Heads that the kernels run for q's: fewer are padded, since 32 and odd counts have failed in some versions."""
    require_bf16(q, kv)
    heads, dim = q.shape[1:]
    if (v_dim, dim) != (LATENT, LATENT + ROPE):
        raise ValueError(
            f"--attention-backend cudnn serves kv_lora_rank {LATENT} with qk_rope_head_dim {ROPE}, not {v_dim} with "
            f"{dim - v_dim}; choose another backend"
        )
    if heads > 128:
        raise ValueError(f"--attention-backend cudnn serves up to 128 attention heads a rank, not {heads}")
    return 64 if heads <= 64 else 128


def pad_heads(x: Tensor, heads: int) -> Tensor:
    """x [t, h, d] with zero heads up to `heads`."""
    return x if x.shape[1] == heads else F.pad(x, (0, 0, 0, heads - x.shape[1]))


def pad_slots(idx: Tensor) -> Tensor:
    """idx [t, K] with -1 up to a multiple of 128 slots."""
    return idx if idx.shape[1] % 128 == 0 else F.pad(idx, (0, -idx.shape[1] % 128), value=-1)


def row_chunks(rows: int, heads: int) -> list[slice]:
    step = (ELEMENTS - 1) // (heads * (LATENT + ROPE)) // 1024 * 1024
    return [slice(begin, begin + step) for begin in range(0, rows, step)]


# ---- the teacher of the indexer's loss ---------------------------------------------------------------------------


def attention_mass_cudnn(q: Tensor, kv: Tensor, idx: Tensor, lse: Tensor, scale: float) -> Tensor:
    """`ops.indexer_loss.attention_mass`. The kernel normalises the sum over the heads: here it is times h again."""
    require_bf16(q, kv)
    heads, slots = q.shape[1], idx.shape[1]
    padded = -(-heads // TEACHER_HEADS) * TEACHER_HEADS
    idx, lse = pad_slots(idx), F.pad(lse, (0, padded - heads), value=float("inf"))  # probability 0 in added heads
    mass = torch.zeros(idx.shape, dtype=torch.float32, device=idx.device)
    for rows in row_chunks(len(q), padded):
        given = pad_heads(q[rows], padded), kv, lse[rows], idx[rows]
        batched = [x.contiguous().unsqueeze(0) for x in given]
        used = (idx[rows] >= 0).sum(-1, dtype=torch.int32).unsqueeze(0)
        result = DSA.sparse_attn_score_recompute_wrapper(*batched, softmax_scale=scale, topk_length=used)
        mass[rows] = result["target"][0]
    return (mass * heads).masked_fill_(idx < 0, 0.0)[:, :slots].contiguous()
