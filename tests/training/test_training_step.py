"""One optimizer step of a tiny model: nothing depends on how the step is cut, and what is frozen stays."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_glm.config import (
    DataConfig,
    KernelConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
)
from megatron_glm.config.flops import training_flops
from megatron_glm.data.packing import build_batch
from megatron_glm.model.pack import PackRows, has_sparse_rows
from megatron_glm.parallel import fsdp
from megatron_glm.parallel.fsdp import local
from megatron_glm.training import engine as engine_module
from megatron_glm.training.engine import Engine
from megatron_glm.training.evaluate import evaluate
from megatron_glm.training.initialize import build_chunks, initialize
from megatron_glm.training.optimizer import build_optimizer
from megatron_glm.training.step import count, train_step

SEQ = 24
MODEL = ModelConfig.from_hf(
    "glm5.2-tiny",
    num_hidden_layers=3,
    hidden_size=32,
    vocab_size=64,
    intermediate_size=48,
    moe_intermediate_size=16,
    num_attention_heads=2,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
    index_head_dim=16,
    index_topk=4,
    initializer_range=0.1,
)


def run_config(**sections) -> RunConfig:
    config = RunConfig(
        model=MODEL,
        kernels=KernelConfig("torch", loss_chunk_size=16),
        data=DataConfig(data_path=("unused",), seq_length=SEQ),
        train=TrainConfig(train_iters=1, global_batch_size=1),
    )
    return dataclasses.replace(config, **sections)


@pytest.fixture(scope="module")
def groups():
    return initialize(run_config())


def packs() -> list[list[tuple[np.ndarray, np.ndarray]]]:
    """Four packs with unequal masks and unequal padding."""
    random = np.random.default_rng(0)
    documents = [(random.integers(0, 64, n), random.random(n) < p) for n, p in [(20, 0.9), (9, 0.1), (13, 0.5), (3, 1)]]
    return [[documents[0]], [documents[1], documents[2]], [documents[3]], [documents[2]]]


def batches(micro_batch_size: int):
    all_packs = packs()
    for start in range(0, len(all_packs), micro_batch_size):
        chosen = [document for pack in all_packs[start : start + micro_batch_size] for document in pack]
        yield build_batch(chosen, micro_batch_size * SEQ)


class Recorder:
    """Stands where the optimizer does and keeps the gradients that it is given."""

    param_groups: list = []

    def __init__(self, chunks) -> None:
        self.parameters = {name: p for chunk in chunks for name, p in chunk.named_parameters()}

    def step(self, scale: float) -> None:
        self.grads = {n: local(p.grad) * scale for n, p in self.parameters.items() if p.grad is not None}

    def zero_grad(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None


def gradients(groups, steps, config: RunConfig):
    chunks = build_chunks(config, groups)
    recorder = Recorder(chunks)
    result = train_step(Engine(config, groups, chunks), recorder, list(steps), 0.0)
    return result, recorder.grads


NO_CLIP = OptimizerConfig(clip_grad=0.0)


def test_loss_and_gradients_do_not_depend_on_accumulation(groups):
    config = run_config(optimizer=NO_CLIP)
    expected, reference = gradients(groups, batches(1), config)
    assert expected.counts.loss_tokens == sum(int(flags[1:].sum()) for pack in packs() for _, flags in pack)
    assert expected.counts.tokens == 20 + 9 + 13 + 3 + 13
    every = dataclasses.replace(config, parallel=ParallelConfig(grad_sync="every"))
    for size, cut_config in ((2, config), (4, config), (1, every)):
        result, grads = gradients(groups, batches(size), cut_config)
        assert result.counts == expected.counts
        assert result.losses["lm"] == pytest.approx(expected.losses["lm"], rel=1e-6)
        assert result.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
        assert grads.keys() == reference.keys()
        for name, gradient in grads.items():
            assert (gradient - reference[name]).norm() <= 1e-5 * reference[name].norm(), (size, name)


def test_the_loss_is_the_mean_over_tokens_not_over_micro_batches(groups):
    config = run_config(optimizer=NO_CLIP)
    chunks = build_chunks(config, groups)
    engine = Engine(config, groups, chunks)
    sums = [losses["lm"].item() for losses in engine.evaluate(list(batches(1)))]
    counts = [batch.loss_tokens for batch in batches(1)]
    assert len(set(counts)) > 2
    result, _ = gradients(groups, batches(1), config)
    assert result.losses["lm"] == pytest.approx(sum(sums) / sum(counts), rel=1e-6)
    found, tokens = evaluate(engine, [list(batches(2)), list(batches(4))])
    assert (found["lm"], tokens) == pytest.approx((result.losses["lm"], 2 * sum(counts)), rel=1e-6)


def test_a_micro_batch_of_padding_changes_nothing(groups):
    config = run_config(optimizer=NO_CLIP)
    empty = build_batch([], SEQ)
    expected, reference = gradients(groups, batches(1), config)
    for steps in ([empty, *batches(1)], [*batches(1), empty]):
        result, grads = gradients(groups, steps, config)
        assert (result.losses["lm"], result.counts) == (expected.losses["lm"], expected.counts)
        assert all(torch.equal(grads[name], gradient) for name, gradient in reference.items())


def test_a_step_without_loss_tokens_is_zero(groups):
    config = run_config()
    result, grads = gradients(groups, [build_batch([], SEQ)], config)
    assert (result.losses["lm"], result.grad_norm, result.counts.loss_tokens) == (0.0, 0.0, 0)
    trained = {n for chunk in build_chunks(config, groups) for n, p in chunk.named_parameters() if p.requires_grad}
    assert grads.keys() == trained  # every parameter takes part in every step, so that all ranks agree
    assert not any(gradient.any() for gradient in grads.values())


def test_frozen_parameters_stay_under_weight_decay(groups):
    config = run_config(optimizer=OptimizerConfig(lr=0.1, weight_decay=0.5))
    chunks = build_chunks(config, groups)
    before = {name: local(p).detach().clone() for name, p in chunks[0].named_parameters()}
    optimizer = build_optimizer(config.optimizer, chunks)
    train_step(Engine(config, groups, chunks), optimizer, list(batches(2)), 0.1)
    held = {id(p) for p in optimizer.state}
    for name, parameter in chunks[0].named_parameters():
        frozen = ".indexer." in name or name.startswith("layers.3.")
        assert torch.equal(local(parameter), before[name]) == frozen, name
        assert (id(parameter) in held) != frozen, name
    assert any(".indexer." in name for name in before) and any(name.startswith("layers.3.") for name in before)


def test_the_step_is_clipped_and_takes_the_given_rate(groups):
    bound = 0.01
    config = run_config(optimizer=OptimizerConfig(clip_grad=bound))
    free, reference = gradients(groups, batches(1), run_config(optimizer=NO_CLIP))
    result, grads = gradients(groups, batches(1), config)
    assert result.grad_norm == pytest.approx(free.grad_norm) and free.grad_norm > 10 * bound
    for name, gradient in grads.items():
        torch.testing.assert_close(gradient, reference[name] * (bound / free.grad_norm))
    chunks = build_chunks(config, groups)
    optimizer = build_optimizer(config.optimizer, chunks)
    train_step(Engine(config, groups, chunks), optimizer, list(batches(1)), 0.125)
    assert {group["lr"] for group in optimizer.param_groups} == {0.125}


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_routing_counts_are_exact_and_move_the_bias(groups, recompute):
    """int64, padding excluded, once under recomputation and whatever the number of micro-batches."""
    parallel = ParallelConfig(recompute_granularity=recompute)
    rate = 0.25
    config = run_config(parallel=parallel, optimizer=OptimizerConfig(moe_router_bias_update_rate=rate))
    chunks = build_chunks(config, groups)
    Engine(config, groups, chunks).forward_backward(list(batches(1)), {"lm": 1})
    routers = chunks[0].routers()
    assert len(routers) == 2
    tokens = sum(len(ids) for pack in packs() for ids, _ in pack)
    counts = [router.counts.clone() for router in routers]
    for routed in counts:
        assert routed.dtype == torch.int64 and routed.sum() == tokens * MODEL.num_experts_per_tok

    chunks = build_chunks(config, groups)
    train_step(Engine(config, groups, chunks), Recorder(chunks), list(batches(2)), 0.0)
    for router, routed in zip(chunks[0].routers(), counts, strict=True):
        mean = routed.double().mean()
        expected = rate * torch.sign(mean - routed.double())
        assert torch.equal(router.e_score_correction_bias.double(), expected) and expected.any()
        assert not router.counts.any()


def test_evaluation_leaves_no_trace(groups):
    config = run_config(optimizer=OptimizerConfig(moe_router_bias_update_rate=0.25))
    chunks = build_chunks(config, groups)
    before = {name: local(tensor).clone() for name, tensor in chunks[0].state_dict().items()}
    evaluate(Engine(config, groups, chunks), [list(batches(1))])
    assert not any(router.counts.any() for router in chunks[0].routers())
    assert all(torch.equal(local(tensor), before[name]) for name, tensor in chunks[0].state_dict().items())


def test_a_loss_that_is_not_finite_stops_before_the_weights_move(groups):
    config = run_config()
    chunks = build_chunks(config, groups)
    optimizer = build_optimizer(config.optimizer, chunks)
    local(chunks[0].norm.weight).detach().fill_(float("nan"))
    before = {name: local(tensor).clone() for name, tensor in chunks[0].state_dict().items() if name != "norm.weight"}
    with pytest.raises(FloatingPointError, match="lm loss is nan"):
        train_step(Engine(config, groups, chunks), optimizer, list(batches(1)), 1.0)
    assert all(torch.equal(local(chunks[0].state_dict()[name]), tensor) for name, tensor in before.items())


def test_bf16_computes_in_bf16_and_keeps_fp32_masters(groups):
    config = run_config(train=TrainConfig(train_iters=1, bf16=True), optimizer=NO_CLIP)
    exact, reference = gradients(groups, batches(1), run_config(optimizer=NO_CLIP))
    result, grads = gradients(groups, batches(1), config)
    assert result.losses["lm"] != exact.losses["lm"] and result.losses["lm"] == pytest.approx(
        exact.losses["lm"], rel=1e-2
    )
    assert all(gradient.dtype == torch.float32 for gradient in grads.values())
    assert {local(p).dtype for p in build_chunks(config, groups)[0].parameters()} == {torch.float32}


def trained_in_bf16(groups, reshard: bool, recompute: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of three steps of four micro-batches, an evaluation between them, and the parameters after them."""
    parallel = ParallelConfig(
        reshard_after_forward=reshard, reshard_experts_after_forward=reshard, recompute_granularity=recompute
    )
    config = run_config(train=TrainConfig(train_iters=3, global_batch_size=4, bf16=True), parallel=parallel)
    chunks = build_chunks(config, groups)
    optimizer = build_optimizer(config.optimizer, chunks)
    engine, losses = Engine(config, groups, chunks), []
    for _ in range(3):
        losses.append(train_step(engine, optimizer, list(batches(1)), 1e-2).losses["lm"])
        losses.append(evaluate(engine, [list(batches(1))])[0]["lm"])
    assert {type(p) for p in chunks[0]._parameters.values()} <= {torch.nn.Parameter}
    return losses, {name: local(parameter).detach() for name, parameter in chunks[0].named_parameters()}


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_copies_made_each_time_train_as_copies_that_are_held(groups, recompute):
    """Held copies follow their masters when the optimizer changes them."""
    (losses, parameters), (other_losses, other_parameters) = (
        trained_in_bf16(groups, reshard, recompute) for reshard in (True, False)
    )
    assert len(set(losses)) == 6, "each step and each evaluation sees new weights"
    assert other_losses == losses and other_parameters.keys() == parameters.keys()
    assert all(torch.equal(other_parameters[name], tensor) for name, tensor in parameters.items())


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_weights_of_one_rank_have_the_gradients_of_fsdp(groups, recompute, monkeypatch):
    """Bit for bit: FSDP's sums are fp32 from the products on, too."""
    parallel = ParallelConfig(recompute_granularity=recompute)
    config = run_config(
        train=TrainConfig(train_iters=1, global_batch_size=4, bf16=True), parallel=parallel, optimizer=NO_CLIP
    )
    result, whole = gradients(groups, batches(1), config)
    monkeypatch.setattr(fsdp, "holds_whole", lambda dp_cp, edp: (False, False))
    expected, sharded = gradients(groups, batches(1), config)
    assert result.losses["lm"] == expected.losses["lm"] and whole.keys() == sharded.keys()
    for name, gradient in whole.items():
        assert torch.equal(gradient, sharded[name]), name


@pytest.mark.parametrize("dense_rows", ["auto", "short", "off"])
def test_every_stage_knows_whether_a_selection_is_coming(dense_rows):
    for lengths in ((), (1,), (4,), (5,), (4, 4), (2, 5)):
        plan = PackRows.build(MODEL, lengths, SEQ, dense_rows=dense_rows)
        assert has_sparse_rows(MODEL, lengths, dense_rows) == (plan.sparse is not None)


def test_counts_of_a_long_context_step_do_not_overflow(groups):
    """300 packs of 131,072 tokens are 1.1e19 FLOPs, above 2^63 = 9.2e18; the counts of tokens stay exact."""
    config = run_config(model=ModelConfig.from_hf("glm5.2"))
    one, packs = 131_072, 300
    counted = count(config, groups, [SimpleNamespace(doc_lengths=(one,), loss_tokens=one - 1)] * packs)
    assert (counted.tokens, counted.loss_tokens) == (packs * one, packs * (one - 1))
    assert counted.flops == pytest.approx(packs * training_flops(config.model, [one]), rel=1e-12)
    assert counted.flops > 2**63


def test_messages_come_early_from_the_third_step_of_training_on(groups, monkeypatch):
    """By then every kernel has been loaded. Validations have none before them to hide behind."""
    early, made = [], engine_module.Runner

    def runner(*args, **kwargs):
        early.append(kwargs["early"])
        return made(*args, **kwargs)

    monkeypatch.setattr(engine_module, "Runner", runner)
    for sms in (0, 8):
        config = run_config(parallel=ParallelConfig(communication_sms=sms))
        engine = Engine(config, groups, build_chunks(config, groups))
        engine.evaluate(list(batches(4)))
        for _ in range(3):
            engine.forward_backward(list(batches(4)), {"lm": 1})
        engine.evaluate(list(batches(4)))
    assert early == [False] * 5 + [False, False, False, True, False]
