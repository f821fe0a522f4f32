"""The passes around attention in Triton against the torch reference in fp32: values and every gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_glm.model.pack import PackRows
from megatron_glm.model.recompute import run_layer
from megatron_glm.ops import latent as reference
from megatron_glm.ops import rope as reference_rope
from megatron_glm.ops.rows import row_count
from tests.helpers.reference import single_chunk, small_config

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
# heads, N, R, V, C
SHAPES = {"GLM-5": (64, 192, 64, 256, 512), "a rank": (8, 192, 64, 256, 512), "odd": (3, 12, 6, 10, 20)}
# rows, expanded, absorbed (as ranges, or as lists where they are scattered)
ROWS = {
    "one document": (70, range(0, 33), range(33, 70)),
    "packed": (70, [*range(0, 20), *range(40, 55)], [*range(20, 40), *range(55, 70)]),
    "packed, padding": (70, [*range(0, 20), *range(40, 55)], [*range(20, 40), *range(55, 63)]),
    "padding": (70, range(0, 33), range(33, 50)),
    "all expanded": (33, range(0, 33), None),
    "all absorbed": (33, None, range(0, 33)),
    "some absorbed": (33, None, [1, 4, 32]),
    "none of this rank": (33, range(0, 0), range(0, 0)),
}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE).bfloat16()


def poison_free_memory() -> None:
    """What is allocated next holds NaN."""
    if DEVICE == "cuda":
        torch.full((1 << 28,), float("nan"), device=DEVICE)


def as_rows(rows: range | list[int] | None) -> slice | Tensor | None:
    if rows is None or isinstance(rows, range):
        return rows and slice(rows.start, rows.stop)
    return torch.tensor(rows, device=DEVICE)


def forms(case: str) -> tuple[int, tuple]:
    total, *rows = ROWS[case]
    return total, tuple(slice(0, 0) if x == range(0, 0) else as_rows(x) for x in rows)


def tables(rows: int, rope: int) -> tuple[Tensor, Tensor]:
    return reference_rope.rope_tables(torch.randint(0, 5000, (rows,), device=DEVICE), rope, 1e6)


def close(value: Tensor, truth: Tensor) -> None:
    """Within the rounding of bf16, element by element against the largest, and in norm."""
    assert value.shape == truth.shape and value.dtype == torch.bfloat16
    difference = value.float() - truth
    assert not difference.isnan().any()
    if value.numel():
        assert difference.abs().max() <= 2**-7 * truth.abs().max()
        assert difference.norm() <= 4e-3 * truth.norm()


def compare(fused, plain, *inputs: Tensor) -> None:
    """`fused` of bf16 inputs against `plain` of the same numbers in fp32, and gradients for random cotangents."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    wide = [x.float().requires_grad_() for x in inputs]
    poison_free_memory()
    ours, truth = fused(*leaves), plain(*wide)
    assert [x is None for x in ours] == [x is None for x in truth]
    ours, truth = ([x for x in values if x is not None] for values in (ours, truth))
    cotangents = [normal(*x.shape) for x in truth]
    torch.autograd.backward(truth, [x.float() for x in cotangents])
    poison_free_memory()
    torch.autograd.backward(ours, cotangents)
    for value, expected in zip(ours, truth, strict=True):
        close(value.detach(), expected.detach())
    for leaf, expected in zip(leaves, wide, strict=True):
        close(leaf.grad, expected.grad)


@pytest.mark.parametrize("rope", [64, 6])
@pytest.mark.parametrize("heads", [None, 1, 5, 64])
@pytest.mark.parametrize("rows", [0, 1, 41])
def test_rope(rows, heads, rope):
    """Of the last dims of a wider tensor, as MLA does, and in place on the first, as the indexer does."""
    from megatron_glm.ops.triton import rope as fused

    angles = tables(rows, rope)
    shape = (rows, rope + 16) if heads is None else (rows, heads, rope + 16)
    compare(
        lambda x: (fused.apply_rope(x[..., 16:], *angles),),
        lambda x: (reference_rope._rotated(x[..., 16:], *angles),),
        normal(*shape),
    )
    x = normal(*shape)
    truth = x.float()
    truth[..., :rope] = reference_rope._rotated(truth[..., :rope], *angles)
    fused.rotate_(x[..., :rope], *angles)
    close(x, truth)


@pytest.mark.parametrize("case", ROWS)
@pytest.mark.parametrize("shape", SHAPES)
def test_queries(shape, case):
    from megatron_glm.ops.triton import latent as fused

    heads, nope, rope, _, width = SHAPES[shape]
    total, rows = forms(case)
    angles = tables(total, rope)
    weight = normal(heads, nope, width) / 16

    def run(queries):
        if rows[1] is None:
            return lambda q: queries(q, angles, rows, None)
        return lambda q, to_key: queries(q, angles, rows, to_key)

    inputs = (normal(total, heads, nope + rope), weight)
    compare(run(fused.queries), run(reference.queries), *inputs[: 1 if rows[1] is None else 2])


@pytest.mark.parametrize("rows", [slice(0, 50), slice(7, 31), [0, 3, 4, 49], slice(0, 0)], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_expanded_keys(shape, rows):
    from megatron_glm.ops.triton import latent as fused

    heads, nope, rope, value, width = SHAPES[shape]
    at = rows if isinstance(rows, slice) else torch.tensor(rows, device=DEVICE)
    compare(
        lambda kv, weight: fused.expanded_keys(kv, weight, at, heads, nope),
        lambda kv, weight: reference.expanded_keys(kv, weight, at, heads, nope),
        normal(50, width + rope),
        normal(heads * (nope + value), width) / 16,
    )


@pytest.mark.parametrize("case", [case for case in ROWS if case != "all expanded"])
@pytest.mark.parametrize("shape", SHAPES)
def test_outputs(shape, case):
    from megatron_glm.ops.triton import latent as fused

    heads, _, _, value, width = SHAPES[shape]
    total, rows = forms(case)
    parts = [normal(row_count(rows[1]), heads, width), normal(heads, value, width) / 16]
    if rows[0] is not None:
        parts.append(normal(row_count(rows[0]), heads, value))

    def run(outputs):
        return lambda absorbed, to_value, expanded=None: (outputs(total, rows, expanded, absorbed, to_value),)

    compare(run(fused.outputs), run(reference.outputs), *parts)


def test_rows_that_are_none_of_a_form_and_only_expanded_ones_beside_padding():
    from megatron_glm.ops.triton import latent as fused

    heads, _, _, value, _ = SHAPES["a rank"]
    rows = slice(0, 20), None
    compare(
        lambda x: (fused.outputs(33, rows, x, None, None),),
        lambda x: (reference.outputs(33, rows, x, None, None),),
        normal(20, heads, value),
    )


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
@pytest.mark.parametrize("documents", [(64,), (30, 20, 10), (8, 8), (8,) * 8, ()], ids=str)
def test_attention_of_a_layer_that_is_given_its_selection(documents, recompute):
    """The fused passes in their places, recomputed too, against the same layer in fp32 on the CPU."""
    chunk = single_chunk(small_config())
    with torch.no_grad():
        for parameter in chunk.parameters():
            parameter.copy_((0.2 * torch.randn(parameter.shape)).bfloat16())
    layer = chunk.layers["1"].self_attn
    x, grad = (torch.randn(64, small_config().hidden_size).bfloat16().float() for _ in range(2))
    topk = torch.arange(8, dtype=torch.int32).expand(64, 8).contiguous()
    results = []
    for device, dtype in (("cpu", torch.float32), (DEVICE, torch.bfloat16)):
        layer.to(device, dtype).zero_grad()
        pack = PackRows.build(small_config(), documents, 64, device=device)
        hidden = x.detach().to(device, dtype).requires_grad_()
        out, *_ = run_layer(recompute, layer, hidden, pack, topk.to(device))
        out.backward(grad.to(device, dtype))
        parameters = [p.grad for p in layer.parameters() if p.requires_grad]
        results.append(
            [y.float().cpu().clone() for y in (out.detach(), hidden.grad, *parameters)]
        )  # a gradient moves with the layer
    for ours, truth in zip(*reversed(results), strict=True):
        assert (ours - truth).norm() <= 3e-2 * truth.norm()
