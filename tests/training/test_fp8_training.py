"""Training with FP8 products on a CPU: their errors, which weights have them, and that recomputation changes no bit."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from megatron_glm.config import (
    Fp8Config,
    IndexerConfig,
    LoraConfig,
    ModelConfig,
    ParallelConfig,
    PretrainDataConfig,
    RunConfig,
)
from megatron_glm.config.flags import parse
from megatron_glm.config.flops import fp8_flops, training_flops
from megatron_glm.config.parameters import model_parameters
from megatron_glm.ops import backends
from megatron_glm.ops.experts import grouped_mlp
from megatron_glm.ops.fp8_products import Fp8Products
from megatron_glm.ops.grad_sum import AS_THEY_ARE, linear
from megatron_glm.ops.permute import RowMap, permute, unpermute
from megatron_glm.parallel.linear import ColumnParallelLinear
from megatron_glm.parallel.whole_weights import WholeWeights
from megatron_glm.planner.machine import H200
from megatron_glm.planner.memory import rank_memory
from megatron_glm.planner.plan import Plan
from megatron_glm.planner.time import step_time
from tests.helpers.reference import gradient_errors, single_groups
from tests.parity.layouts import Result, parity_model, run_config, train

TINY = ["--hf-config", "glm5.2-tiny", "--data-path", "rows.jsonl", "--train-iters", "10", "--seq-length", "64"]
KEPT = {"reshard_after_forward": False, "reshard_experts_after_forward": False}
ON = Fp8Config(fp8="blockwise")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def error(value: Tensor, reference: Tensor) -> float:
    return ((value - reference).norm() / reference.norm()).item()


@pytest.mark.parametrize("shape", [(200, 384, 256), (130, 200, 72), (1, 128, 128)])
@pytest.mark.parametrize("weight_gradients", [False, True])
def test_linear_is_near_the_exact_product(shape, weight_gradients):
    """A layout fault gives errors above 0.3; three mantissa bits in both operands give 3.7e-2."""
    tokens, inner, outer = shape
    x, weight, gradient = torch.randn(tokens, inner), torch.randn(outer, inner), torch.randn(tokens, outer)
    x[0] = gradient[-1] = 0
    seen = []
    for products in (AS_THEY_ARE, Fp8Products(weight_gradients)):
        leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
        y = linear(*leaves, products=products)
        y.backward(gradient)
        seen.append([y.detach(), *(leaf.grad for leaf in leaves)])
    for exact, ours in zip(*seen, strict=True):
        assert error(ours, exact) < 5e-2 if exact.norm() else not ours.any()
    y, dx, dw = seen[1]
    assert not y[0].any() and not dx[-1].any()
    assert weight_gradients != torch.equal(dw, seen[0][2]) or not dw.any()


@pytest.mark.parametrize("multiple", [1, 128])
def test_experts_with_padded_rows_are_those_without(multiple):
    """Experts without tokens and with one, slots without expert; rows of padding reach nothing."""
    ids = torch.tensor([[0, 3], [3, -1], [-1, -1], [3, 1], [0, 3]])
    x, weights, grad = torch.randn(5, 64), torch.rand(5, 2), torch.randn(5, 64)
    matrices = torch.randn(4, 256, 64), torch.randn(4, 64, 128)
    seen = []
    for products, padded in ((AS_THEY_ARE, 1), (Fp8Products(), multiple)):
        leaves = [y.clone().requires_grad_() for y in (x, weights, *matrices)]
        rows = RowMap.build(ids, 4, padded)
        assert rows.counts.tolist() == ([2, 1, 0, 4] if padded == 1 else [128, 128, 0, 128])
        assert rows.head(7).size == (7 if padded == 1 else 4 * 128)  # 7 + 4 * 127 at most
        moved, row_weights = permute(*leaves[:2], rows)
        out = unpermute(grouped_mlp(moved, row_weights, rows.counts, *leaves[2:], products), rows)
        out.backward(grad)
        seen.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for exact, ours in zip(*seen, strict=True):
        assert error(ours, exact) < 0.2  # two products one behind the other
    assert not seen[1][0][2].any() and not seen[1][3][2].any()


def covered(fp8: Fp8Config, model: ModelConfig) -> set[str]:
    return {name for name, row in model_parameters(model).items() if fp8.computes(row, model.num_hidden_layers)}


def test_which_weights_have_fp8_products():
    model = parity_model(4)
    names = covered(ON, model)
    kinds = {name.split(".", 2)[2] for name in names}
    attention = {f"self_attn.{name}.weight" for name in ("q_a_proj", "q_b_proj", "o_proj")}
    mlp = {f"{at}.{name}.weight" for at in ("mlp", "mlp.shared_experts") for name in ("gate_proj", "up_proj")}
    mlp |= {"mlp.down_proj.weight", "mlp.shared_experts.down_proj.weight", "mlp.experts.gate_up", "mlp.experts.down"}
    assert kinds == attention | mlp
    assert {int(name.split(".")[1]) for name in names} == {0, 1, 2, 3, 4}  # 4 is the MTP layer
    inner = replace(ON, num_layers_at_start_in_bf16=1, num_layers_at_end_in_bf16=2)
    assert covered(inner, model) == {name for name in names if name.split(".")[1] in "14"}
    assert not covered(Fp8Config(), model)


def test_megatrons_names_are_names_of_it():
    assert parse([*TINY, "--fp8-format", "e4m3", "--fp8-recipe", "blockwise"]).fp8.blockwise
    assert parse([*TINY, "--fp8", "blockwise"]).fp8.blockwise
    assert not parse([*TINY, "--fp8", "off"]).fp8.blockwise and not parse(TINY).fp8.blockwise


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("--fp8-format e4m3", "--fp8-format e4m3 with --fp8-recipe None: give"),
        ("--fp8-recipe blockwise", "--fp8-format None with --fp8-recipe blockwise: give"),
        ("--fp8 off --fp8-format e4m3 --fp8-recipe blockwise", "--fp8 off and --fp8-format e4m3 contradict"),
        ("--fp8-wgrad bf16", "--fp8-wgrad bf16 needs --fp8 blockwise"),
        ("--num-layers-at-end-in-bf16 1 --fp8 off", "--num-layers-at-end-in-bf16 1 needs --fp8 blockwise"),
        ("--fp8-backend te", "--fp8-backend te needs --fp8 blockwise"),
        ("--fp8-dispatch", "--fp8-dispatch needs --fp8 blockwise"),
        (
            "--fp8 blockwise --fp8-dispatch",
            "--fp8-dispatch with --moe-token-dispatcher-type alltoall and",
        ),
        ("--fp8 blockwise --num-layers-at-start-in-bf16 5 --num-layers-at-end-in-bf16 1", "leave none of the 6 layers"),
        ("--fp8-format hybrid", "--fp8-format e4m3, for gradients, too"),
        ("--fp8-recipe delayed", "--fp8-recipe blockwise, the scales of a Hopper"),
        ("--first-last-layers-bf16", "--num-layers-at-start-in-bf16 1 --num-layers-at-end-in-bf16 1"),
    ],
)
def test_what_contradicts_is_refused(capsys, words, answer):
    with pytest.raises(SystemExit) as stop:
        parse([*TINY, *words.split()])
    assert stop.value.code == 2 and answer in capsys.readouterr().err


def configured(bf16: bool, fp8: Fp8Config = ON, **parallel) -> RunConfig:
    # Nothing is left to choose, because rounding would change a choice.
    model = parity_model(3, index_topk=64, num_experts_per_tok=8)
    config = run_config(model, ParallelConfig(**parallel), packs=2, seed=0)
    return replace(config, train=replace(config.train, bf16=bf16), fp8=fp8)


@cache
def outcome(bf16: bool) -> Result:
    single_groups()
    return train(configured(bf16, **KEPT), steps=2)


@pytest.mark.parametrize("parallel", [{"recompute_granularity": "full"}, {"recompute_granularity": "selective"} | KEPT])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_recomputation_and_casts_at_other_times_change_no_bit(bf16, parallel):
    """KEPT weights are cast once a step from the masters, others in each forward and backward."""
    expected = outcome(bf16)
    single_groups()
    result = train(configured(bf16, **parallel), steps=2)
    assert result.losses == expected.losses and result.norms == expected.norms
    for tensors, wanted in ((result.gradients, expected.gradients), (result.parameters, expected.parameters)):
        assert all(torch.equal(tensors[name], tensor) for name, tensor in wanted.items())


def test_adapters_beside_weights_in_fp8_stay_as_they_are():
    """Whether the frozen base is cast once or at each product changes no bit."""
    seen = []
    for parallel in (KEPT, {"recompute_granularity": "full"}):
        single_groups()
        config = configured(True, **parallel)
        optimizer = replace(config.optimizer, moe_router_bias_update_rate=0.0)
        config = replace(config, lora=LoraConfig(lora_rank=8, base_precision="fp32"), optimizer=optimizer)
        seen.append(train(config, steps=2))
    kept, again = seen
    assert kept.losses == again.losses and kept.gradients.keys() == again.gradients.keys()
    assert all(torch.equal(kept.gradients[name], gradient) for name, gradient in again.gradients.items())
    assert all(name.endswith(("lora_A", "lora_B")) for name in kept.gradients)
    assert kept.gradients["layers.1.mlp.experts.down_lora_B"].any()


def test_it_is_another_computation_than_bf16_and_near_it():
    single_groups()
    plain, ours = train(configured(True, Fp8Config(), **KEPT), steps=2), outcome(True)
    assert ours.losses != plain.losses and ours.losses == pytest.approx(plain.losses, rel=2e-2)
    errors = gradient_errors(ours.gradients, plain.gradients)
    assert errors["layers.1.mlp.experts.down"] < 0.25 and errors["lm_head.weight"] < 0.2


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_kept_weights_are_cast_once_a_step(monkeypatch, bf16):
    casts = []
    original = Fp8Products.cast_weight
    monkeypatch.setattr(Fp8Products, "cast_weight", lambda *args: casts.append(1) or original(*args))
    single_groups()
    config = configured(bf16, **KEPT, recompute_granularity="full")
    train(config, steps=2)  # of two micro-batches each
    weights = len([n for n in covered(ON, config.model) if not n.startswith("layers.3")])  # no MTP
    assert len(casts) == 2 * weights


def test_kept_weights_that_are_frozen_are_cast_once():
    """In the dtype of a checkpoint, as in that of the run."""
    for dtype in (torch.bfloat16, torch.float32):
        layer = ColumnParallelLinear(128, 128, single_groups().tp)
        layer.weight = nn.Parameter(torch.randn(128, 128, dtype=dtype), requires_grad=False)
        layer.products = Fp8Products()
        whole = WholeWeights(layer, set(), torch.bfloat16, keep=True)
        x = torch.randn(4, 128).bfloat16().requires_grad_()
        expected = Fp8Products().output(x, layer.weight.bfloat16())
        for _ in range(2):
            y = layer(x)
            assert torch.equal(y, expected)
            y.sum().backward()
        held = whole.copies[0]
        assert held is not None and held[0] == layer.weight._version and layer.weight.grad is None
        with torch.no_grad():
            layer.weight.mul_(2)
        assert torch.equal(layer(x), 2 * expected)


def test_the_share_of_fp8_in_the_operations_of_a_step():
    """A layer of GLM-5.2 with experts: q_a, q_b, o_proj and nine experts of 86 % of its products with weights."""
    run = RunConfig(ModelConfig.from_hf("glm5.2"), fp8=ON)
    whole = training_flops(run.model, [4096])
    share = fp8_flops(run, 4096) / whole
    assert 0.5 < share < fp8_flops(replace(run, fp8=replace(ON, fp8_wgrad="fp8")), 4096) / whole < 0.9
    assert fp8_flops(replace(run, fp8=replace(ON, num_layers_at_start_in_bf16=39)), 4096) < 0.6 * share * whole
    frozen = replace(run, indexer=IndexerConfig(indexer_training="warmup"))
    assert 0.3 < fp8_flops(frozen, 4096) / fp8_flops(run, 4096) < 0.5
    assert fp8_flops(replace(run, fp8=Fp8Config()), 4096) == 0


def test_the_plan_knows_padded_rows_and_faster_products():
    flags = ["--hf-config", "glm5.2", "--num-layers", "4", "--num-experts", "32", "--mock-data", "--train-iters", "1"]
    flags += ["--seq-length", "4096", "--bf16", "--attention-backend", "cudnn", "--global-batch-size", "1"]
    flags += ["--mtp-num-steps", "0"]
    plans = [Plan.create(parse([*flags, *fp8], data=PretrainDataConfig), 1, 1) for fp8 in ([], ["--fp8", "blockwise"])]
    plain, ours = (rank_memory(plan, 0) for plan in plans)
    rows, width = 127 * 32, plans[0].config.model.hidden_size + 2 * plans[0].config.model.moe_intermediate_size
    moe_layers = sum(map(plans[0].config.model.is_moe, range(4)))
    assert ours["activations"] - plain["activations"] == moe_layers * rows * (2 * width + 12)
    assert ours["gathered weights"] == plain["gathered weights"]
    seconds = [step_time(plan, H200, optimizer=False).seconds for plan in plans]
    assert 0.8 < seconds[1] / seconds[0] < 0.95


@pytest.mark.parametrize(
    ("changes", "missing", "answer"),
    [
        ({"bf16": False}, (), "--fp8 blockwise on a GPU computes the rest in bfloat16: give --bf16"),
        ({}, ("deep_gemm",), "--fp8-backend deepgemm cannot run here: it lacks tokenspeed-deepgemm=="),
        (
            {"fp8_backend": "te"},
            ("transformer_engine_torch",),
            "--fp8-backend te cannot run here: it lacks Transformer",
        ),
        ({}, ("hopper",), "--fp8-backend deepgemm cannot run here: it lacks a Hopper GPU"),
        ({}, (), "layers.0.self_attn.q_a_proj.weight is [24, 32] on each of 1 tensor-parallel ranks, and its rows and"),
        ({"fp8_backend": "te"}, (), "--fp8-backend te takes multiples of 128 tokens, and --micro-batch-size x"),
    ],
)
def test_what_a_gpu_lacks_or_cannot_serve_is_refused(monkeypatch, changes, missing, answer):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0) if "hopper" in missing else (9, 0))
    monkeypatch.setattr(backends, "find_spec", lambda module: None if module in missing else module)
    config = configured(changes.pop("bf16", True), replace(ON, **changes))
    with pytest.raises(ValueError, match=re.escape(answer)):
        backends.check_fp8(config)
    backends.check_fp8(replace(config, fp8=Fp8Config()))


def test_tensor_parallel_parts_are_what_must_be_whole_blocks(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(backends, "find_spec", lambda module: module)
    flags = ["--hf-config", "glm5.2", "--mock-data", "--train-iters", "1", "--bf16", "--fp8", "blockwise"]
    backends.check_fp8(parse(flags, data=PretrainDataConfig))
    config = parse(flags, data=PretrainDataConfig)
    parallel = replace(config.parallel, tensor_model_parallel_size=32, sequence_parallel=True)
    with pytest.raises(ValueError, match=r"shared_experts.gate_proj.weight is \[64, 6144\] on each of 32"):
        backends.check_fp8(replace(config, parallel=parallel))
