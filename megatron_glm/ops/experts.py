"""The routed experts' feed-forward: one small gated MLP for each group of rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_glm.ops.kept import kept_products


def grouped_mlp(rows: Tensor, counts: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """down_e(silu(gate_e(x)) * up_e(x)) for rows grouped by expert.

    rows [n, D], the first counts[0] of them for expert 0 and so on; counts [e] int64 on the rows' device, zeros legal;
    gate_up [e, 2F, D], gate first; down [e, D, F]; -> [n, D]. Rows past counts.sum() are tail: what comes out of
    them is undefined, and it never reaches another row or a weight gradient.
    CUDA in bf16 runs grouped GEMMs without waiting for the counts; every other case, no rows at all included, is the
    reference loop.
    """
    if rows.is_cuda and rows.dtype == torch.bfloat16 and rows.shape[0] > 0:
        return _grouped(rows, counts, gate_up, down)
    return _reference(rows, counts, gate_up, down)


def _gated(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def _grouped(rows: Tensor, counts: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    ends = counts.cumsum(0).to(torch.int32)
    with kept_products():
        product = F.grouped_mm(rows, gate_up.transpose(1, 2), offs=ends)
    hidden = _gated_in_one_pass(product)
    return F.grouped_mm(hidden, down.transpose(1, 2), offs=ends)


def _gated_in_one_pass(gate_up: Tensor) -> Tensor:
    if not gate_up.is_cuda:
        return _gated(gate_up)
    from megatron_glm.ops.swiglu import swiglu  # needs Triton, which a CPU-only torch has not

    return swiglu(gate_up)


def _reference(rows: Tensor, counts: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    sizes = counts.tolist()
    *groups, tail = rows.split([*sizes, rows.shape[0] - sum(sizes)])
    # Empty experts run too, so that every weight has a gradient (zero) on every rank and no rank skips its reduction.
    # unbind, because the backward of weight[e] would be one zero tensor of all experts for each expert.
    with kept_products():
        products = [F.linear(group, w_in) for group, w_in in zip(groups, gate_up.unbind(), strict=True)]
    outputs = [F.linear(_gated(product), w_out) for product, w_out in zip(products, down.unbind(), strict=True)]
    return torch.cat([*outputs, torch.zeros_like(tail)])
