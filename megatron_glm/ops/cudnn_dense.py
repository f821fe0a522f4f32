"""Dense causal attention over segments of packed rows: cuDNN's SDPA on ragged tensors, forward and backward."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import cudnn
import torch
from torch import Tensor

from megatron_glm.ops.upload import upload

BF16, FP32, INT32, INT64 = (getattr(cudnn.data_type, name) for name in ("BFLOAT16", "FLOAT", "INT32", "INT64"))
ELEMENTS = 1 << 29  # of a tensor of one call, where it is still as fast and was seen to be right
UIDS = {
    name: uid
    for uid, name in enumerate("q k v o stats grad dq dk dv rows keys q_at k_at v_at o_at stats_at".split(), start=1)
}


class Segments(NamedTuple):
    """Segments as cuDNN reads them: `batch` sequences, the ones past the real number empty."""

    batch: int
    longest: tuple[int, int]  # rows, keys of one sequence, rounded up
    total: tuple[int, int]  # rows, keys of all of them, rounded up
    rectangular: bool  # some segment has more keys than rows
    gather: Tensor | None  # int64: keys in the order of the segments, where two segments share keys or some are unused
    arrays: dict[str, Tensor]  # lengths int32 [batch] and offsets int64 [batch + 1], in elements


def dense_mla_cudnn(q: Tensor, k: Tensor, v: Tensor, segments: list[int], scale: float) -> tuple[Tensor, Tensor]:
    """Forward of `ops.dense_mla.dense_mla`."""
    if q.dtype != torch.bfloat16:
        raise ValueError(f"dense rows by cuDNN compute in bfloat16 (--bf16), not {q.dtype}")
    shape = (*q.shape[:2], v.shape[2])
    if _rows_used(segments) == q.shape[0]:
        out, lse = q.new_empty(shape), torch.empty(shape[:2], device=q.device)
    else:
        out, lse = q.new_zeros(shape), torch.full(shape[:2], float("-inf"), device=q.device)
    for rows, keys, own in _parts(tuple(segments), q.shape[1] * max(q.shape[2], v.shape[2])):
        plan = _plan(own, keys.stop - keys.start, q.shape[1], q.shape[2], v.shape[2], q.device)
        part_k, part_v = _gathered(plan, k[keys], v[keys])
        graph = _graph(False, plan.batch, plan.longest, plan.total, plan.rectangular, *q.shape[1:], v.shape[2], scale)
        _execute(graph, plan, q=q[rows].contiguous(), k=part_k, v=part_v, o=out[rows], stats=lse[rows])
    return out, lse


def dense_mla_backward_cudnn(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: list[int], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Backward of `ops.dense_mla.dense_mla`."""
    grad_q = torch.empty_like(q) if _rows_used(segments) == q.shape[0] else torch.zeros_like(q)
    grad_k, grad_v = torch.empty_like(k), torch.empty_like(v)
    written = 0  # keys whose gradients hold something: the first ones
    for rows, keys, own in _parts(tuple(segments), q.shape[1] * max(q.shape[2], v.shape[2])):
        plan = _plan(own, keys.stop - keys.start, q.shape[1], q.shape[2], v.shape[2], q.device)
        part_k, part_v = _gathered(plan, k[keys], v[keys])
        given = dict(q=q[rows].contiguous(), k=part_k, v=part_v, o=out[rows], stats=lse[rows], grad=grad[rows])
        in_place = plan.gather is None and keys.start >= written
        sums = (grad_k[keys], grad_v[keys]) if in_place else (torch.empty_like(part_k), torch.empty_like(part_v))
        graph = _graph(True, plan.batch, plan.longest, plan.total, plan.rectangular, *q.shape[1:], v.shape[2], scale)
        _execute(graph, plan, **given, dq=grad_q[rows], dk=sums[0], dv=sums[1])
        both = max(keys.start, min(written, keys.stop))  # where the keys that an earlier part has seen, too, end
        for total, x in zip((grad_k, grad_v), sums, strict=True):
            total[written : keys.start] = 0
            if not in_place:
                if plan.gather is not None:
                    shape = (keys.stop - keys.start, *x.shape[1:])
                    x = torch.zeros(shape, device=x.device).index_add_(0, plan.gather, x.float()).to(x.dtype)
                total[keys.start : both] += x[: both - keys.start]
                total[both : keys.stop] = x[both - keys.start :]
        written = max(written, keys.stop)
    for total in (grad_k, grad_v):
        total[written:] = 0
    return grad_q, grad_k, grad_v


def _rows_used(segments: list[int]) -> int:
    return sum(segments[1::4]) - sum(segments[::4])


@lru_cache(maxsize=8)
def _parts(segments: tuple[int, ...], width: int) -> list[tuple[slice, slice, tuple[int, ...]]]:
    """Runs of segments that one call serves: their rows, their keys, and the segments counted from there.

    Segments with more keys than rows need another mask, which makes all of a call slower: they have their own.

    width: elements of a row. cuDNN's backward is wrong past 2^31 elements.
    """
    groups: list[list[tuple[int, ...]]] = []
    for segment in zip(*(segments[i::4] for i in range(4)), strict=True):
        if segment[1] == segment[0]:
            continue
        joined = [*groups[-1], segment] if groups else []
        alike = {s[1] - s[0] == s[3] - s[2] for s in joined}
        if len(alike) != 1 or max(_length(joined, 0), _length(joined, 2)) * width > ELEMENTS:
            groups.append([])
        groups[-1].append(segment)
    parts = []
    for group in groups:
        row, key = min(s[0] for s in group), min(s[2] for s in group)
        own = tuple(x for r0, r1, k0, k1 in group for x in (r0 - row, r1 - row, k0 - key, k1 - key))
        parts.append((slice(row, row + max(own[1::4])), slice(key, key + max(own[3::4])), own))
    return parts


def _length(group: list[tuple[int, ...]], at: int) -> int:
    """Rows (at 0) or keys (at 2) between the first and the last of a group, or all of them where keys are shared."""
    span = max(s[at + 1] for s in group) - min(s[at] for s in group)
    return max(span, sum(s[at + 1] - s[at] for s in group))


def _gathered(plan: Segments, *tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.contiguous() if plan.gather is None else x.index_select(0, plan.gather) for x in tensors)


def _round_up(number: int, minimum: int) -> int:
    """The next power of two: few sizes, so that few graphs are ever built."""
    return max(minimum, 1 << (number - 1).bit_length())


@lru_cache(maxsize=32)
def _plan(segments: tuple[int, ...], n_keys: int, heads: int, dim: int, v_dim: int, device: torch.device) -> Segments:
    """Kept, since all layers of a micro-batch share it. Every segment has a row."""
    parts = [segments[i : i + 4] for i in range(0, len(segments), 4)]
    rows = [end - begin for begin, end, *_ in parts]
    keys = [end - begin for *_, begin, end in parts]
    in_place = parts[0][2] == 0 and parts[-1][3] == n_keys and all(a[3] == b[2] for a, b in pairwise(parts))
    gather = None if in_place else torch.cat([torch.arange(begin, end) for *_, begin, end in parts])
    batch = _round_up(len(parts), 4)
    fill = batch - len(parts)
    row_at = torch.tensor([part[0] for part in parts] + [parts[-1][1]] * (fill + 1))
    key_at = torch.cat((torch.zeros(1).long(), torch.tensor(keys + [0] * fill).cumsum(0)))
    lengths = torch.tensor([rows + [0] * fill, keys + [0] * fill])
    widths = {"q_at": dim, "k_at": dim, "v_at": v_dim, "o_at": v_dim, "stats_at": 1}
    offsets = [heads * width * (key_at if name in ("k_at", "v_at") else row_at) for name, width in widths.items()]
    arrays = dict(zip(widths, upload(torch.stack(offsets), device), strict=True))
    arrays |= dict(zip(("rows", "keys"), upload(lengths.int(), device), strict=True))
    return Segments(
        batch=batch,
        longest=(_round_up(max(rows), 512), _round_up(max(keys), 512)),
        total=(_round_up(sum(rows), 1024), _round_up(sum(keys), 1024)),
        rectangular=rows != keys,
        gather=None if gather is None else upload(gather, device),
        arrays=arrays,
    )


@lru_cache(maxsize=1)
def _handle(device: int) -> cudnn.Handle:
    return cudnn.create_handle()


@lru_cache(maxsize=128)
def _graph(
    backward: bool,
    batch: int,
    longest: tuple[int, int],
    total: tuple[int, int],
    rectangular: bool,
    heads: int,
    dim: int,
    v_dim: int,
    scale: float,
) -> cudnn.pygraph:
    """A compiled graph; which rows are whose is in the arrays, so that new lengths need no new graph."""
    graph = cudnn.pygraph(
        io_data_type=BF16,
        intermediate_data_type=FP32,
        compute_data_type=FP32,
        handle=_handle(torch.cuda.current_device()),
    )

    def array(name: str, kind) -> cudnn.tensor:
        length = batch + (kind == INT64)
        return graph.tensor(name=name, uid=UIDS[name], dim=(length, 1, 1, 1), stride=(1, 1, 1, 1), data_type=kind)

    offsets = {name: array(name + "_at", INT64) for name in ("q", "k", "v", "o", "stats")}
    sizes = {"q": (longest[0], dim), "k": (longest[1], dim), "v": (longest[1], v_dim), "o": (longest[0], v_dim)}

    def layout(like: str) -> dict:
        length, width = sizes[like] if like in sizes else (longest[0], 1)
        stride = (length * heads * width, width, heads * width, 1)
        return {"dim": (batch, heads, length, width), "stride": stride, "ragged_offset": offsets[like]}

    def tensor(name: str, like: str, kind=BF16):
        return graph.tensor(name=name, uid=UIDS[name], data_type=kind, **layout(like))

    def output(x, name: str, like: str, kind=BF16) -> None:
        given = layout(like)
        x.set_output(True).set_uid(UIDS[name]).set_data_type(kind)
        x.set_dim(given["dim"]).set_stride(given["stride"]).set_ragged_offset(given["ragged_offset"])

    align = cudnn.diagonal_alignment.BOTTOM_RIGHT if rectangular else cudnn.diagonal_alignment.TOP_LEFT
    options = dict(
        attn_scale=scale,
        use_padding_mask=True,
        seq_len_q=array("rows", INT32),
        seq_len_kv=array("keys", INT32),
        max_total_seq_len_q=total[0],
        max_total_seq_len_kv=total[1],
        diagonal_alignment=align,
        diagonal_band_right_bound=0,
    )
    q, k, v = (tensor(name, name) for name in "qkv")
    if backward:
        o, grad, stats = tensor("o", "o"), tensor("grad", "o"), tensor("stats", "stats", FP32)
        grads = graph.sdpa_backward(q=q, k=k, v=v, o=o, dO=grad, stats=stats, **options)
        for x, name, like in zip(grads, ("dq", "dk", "dv"), "qkv", strict=True):
            output(x, name, like)
    else:
        o, stats = graph.sdpa(q=q, k=k, v=v, generate_stats=True, **options)
        output(o, "o", "o")
        output(stats, "stats", "stats", FP32)
    graph.build([cudnn.heur_mode.A])
    return graph


def _execute(graph: cudnn.pygraph, plan: Segments, **tensors: Tensor) -> None:
    device = tensors["q"].device
    handle = _handle(device.index)
    cudnn.set_stream(handle, torch.cuda.current_stream(device).cuda_stream)
    workspace = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device=device)
    # Addresses: cuDNN reads the shapes of the graph, ours are the packed ones.
    pointers = {UIDS[name]: x.data_ptr() for name, x in (tensors | plan.arrays).items()}
    graph.execute(pointers, workspace, handle=handle)
