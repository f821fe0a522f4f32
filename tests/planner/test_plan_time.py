"""Predicted step times against every measurement of docs/performance.md, and what moves them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from megatron_glm.config import LoraConfig, LossConfig, ModelConfig, ParallelConfig, PreferenceConfig, RunConfig
from megatron_glm.config.flags import build_parser
from megatron_glm.config.flops import layer_flops
from megatron_glm.planner.machine import H100, H200, Machine, machine_of, rows_factor
from megatron_glm.planner.plan import GIB, Plan
from megatron_glm.planner.report import print_plan
from megatron_glm.planner.time import (
    AGAIN,
    COMPUTING,
    COPIES,
    EXPERTS,
    FSDP,
    LATENTS,
    MESSAGES,
    REFERENCE,
    StepTime,
    calibration,
    step_time,
)

KEEP = {"reshard_after_forward": False, "reshard_experts_after_forward": False}
PIPELINE = {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "auto"}


def reference(ranks: int, batch: int, length=4096, layers=4, experts=32, **parallel) -> Plan:
    """The case of tools/benchmark.py step: GLM-5.2's width, one dense layer, `experts` in each other one."""
    model = ModelConfig.from_hf(
        "glm5.2", num_hidden_layers=layers, n_routed_experts=experts, num_nextn_predict_layers=0
    )
    model = replace(model, mlp_layer_types=("dense",) + ("sparse",) * (layers - 1))
    config = RunConfig(model=model, parallel=ParallelConfig(**parallel))
    train = replace(config.train, bf16=True, global_batch_size=batch, train_iters=1)
    data = replace(config.data, data_path=("none",), seq_length=length)
    return Plan.create(replace(config, train=train, data=data).with_backend(gpu=True), ranks, 8)


def benchmark(ranks: int, batch: int, machine: Machine = H200, **case) -> StepTime:
    """Forward and backward, as the benchmark times them."""
    return step_time(reference(ranks, batch, **case), machine, optimizer=False)


@pytest.mark.parametrize(
    "length, recompute, rate",
    [
        (4096, "none", 28_500),  # balanced routing, as it is planned: 28.1k to 29.0k
        (8192, "none", 28_000),
        (32768, "selective", 25_200),
        (32768, "full", 22_000),
    ],
)
def test_one_gpu_is_predicted_within_3_percent(length, recompute, rate):
    found = benchmark(1, 1, length=length, recompute_granularity=recompute, **KEEP)
    assert found.tokens_per_second_per_gpu == pytest.approx(rate, rel=0.03)


@pytest.mark.parametrize("moments, milliseconds", [("fp32", 50), ("bf16", 39)])
def test_adamw_is_predicted_within_10_percent(moments, milliseconds):
    plan = reference(1, 1, **KEEP)
    optimizer = replace(plan.config.optimizer, adam_moments_dtype=moments, adam_beta2=0.95)
    plan = Plan.create(replace(plan.config, optimizer=optimizer), 1, 8)
    both = [step_time(plan, H200, optimizer=with_it).seconds for with_it in (True, False)]
    assert 1e3 * (both[0] - both[1]) == pytest.approx(milliseconds, rel=0.1)


ALONE = {"4 micro-batches": (1, 4, {}), "1 micro-batch": (1, 1, {}), "16,384 tokens": (1, 1, {"length": 16384})}
EP2 = {"experts": 64, "expert_model_parallel_size": 2}


@pytest.mark.parametrize(
    "ranks, batch, case, alone, ratio",
    [
        pytest.param(2, 8, EP2 | KEEP, "4 micro-batches", 0.91, id="EP2, 4 micro-batches"),
        pytest.param(2, 2, EP2 | KEEP, "1 micro-batch", 0.78, id="EP2, 1 micro-batch"),
        pytest.param(2, 1, {"length": 32768, "context_parallel_size": 2}, "16,384 tokens", 0.85, id="CP2"),
        pytest.param(2, 8, {}, "4 micro-batches", 0.71, id="DP2, everything resharded"),
    ],
)
def test_two_gpus_against_one_are_predicted_within_5_percent(ranks, batch, case, alone, ratio):
    one = benchmark(*ALONE[alone][:2], **KEEP, **ALONE[alone][2]).tokens_per_second_per_gpu
    assert benchmark(ranks, batch, **case).tokens_per_second_per_gpu / one == pytest.approx(ratio, rel=0.05)


def test_the_waits_of_two_resharding_ranks_are_those_measured():
    """180 of 850 ms of copies, 105 more of waits for NCCL; the copies that one GPU has too are in the 180."""
    found = benchmark(2, 8)
    ledger = found.by_rank[0]
    assert found.seconds == pytest.approx(0.850, rel=0.05)
    assert ledger[FSDP].exposed == pytest.approx(0.105, rel=0.1)
    assert ledger[COPIES].exposed == pytest.approx(0.180, rel=0.25)


def test_two_pipeline_ranks_are_predicted_within_10_percent():
    """4 layers, 16 micro-batches: 1,407 ms; the ranks were idle, or waited for messages, for 9.1 % of it."""
    found = benchmark(2, 16, **PIPELINE, **KEEP)
    assert found.seconds == pytest.approx(1.407, rel=0.05)
    for layers, measured in ((4, 0.091), (7, 0.084)):
        found = benchmark(2, 16, layers=layers, **PIPELINE, **KEEP)
        waits = sum(MESSAGES in ledger and ledger[MESSAGES].exposed for ledger in found.by_rank)
        idle = found.simulation.idle + waits / found.simulation.makespan / 2
        assert (1 - measured) / (1 - idle) == pytest.approx(1, rel=0.05), layers  # the same, of the step's length


def full_size(ranks=256, **parallel) -> Plan:
    sizes = {"pipeline_model_parallel_size": 4, "expert_model_parallel_size": 64, "recompute_granularity": "full"}
    sizes |= {"num_layers_per_virtual_pipeline_stage": 2, "moe_token_dispatcher_type": "hybrid", "expert_node_size": 8}
    config = RunConfig(model=ModelConfig.from_hf("glm5.2"), parallel=ParallelConfig(**(sizes | parallel)))
    train = replace(config.train, bf16=True, global_batch_size=256, train_iters=1)
    data = replace(config.data, data_path=("none",), seq_length=4096)
    return Plan.create(replace(config, train=train, data=data).with_backend(gpu=True), ranks, 8)


def test_experts_across_nodes_cost_what_a_table_says():
    """EP64 on 8 nodes: 6.15 ms a transfer, 4 a layer and micro-batch; without recomputation, and waits beside bytes."""
    plan = full_size(recompute_granularity="none")
    ledger = step_time(plan, H100).by_rank[1]
    layers = [layer for stage in plan.layout.of_rank(1) for layer in stage.layers]
    assert all(plan.config.model.is_moe(layer) for layer in layers)
    transfers = ledger[EXPERTS].exposed / len(layers) / plan.schedule.micro_batches - 2e-3
    assert transfers == pytest.approx(4 * 6.15e-3, rel=0.05)


def test_what_is_spent_moves_with_what_is_chosen():
    base = step_time(full_size(), H100)
    node = step_time(
        full_size(moe_token_dispatcher_type="alltoall", expert_node_size=None, expert_model_parallel_size=8), H100
    )
    assert node.by_rank[1][EXPERTS].exposed < 0.3 * base.by_rank[1][EXPERTS].exposed
    assert node.by_rank[1][FSDP].exposed > 3 * base.by_rank[1][FSDP].exposed  # experts are gathered over the network
    assert step_time(full_size(recompute_granularity="none"), H100).by_rank[1][AGAIN].whole == 0
    slow = step_time(full_size(), replace(H100, nic=H100.nic / 2))
    assert slow.by_rank[1][EXPERTS].exposed > 1.7 * base.by_rank[1][EXPERTS].exposed
    assert step_time(full_size(), H200).seconds < base.seconds < slow.seconds
    zero = step_time(full_size(pipeline_schedule="zero-bubble"), H100)
    assert zero.simulation.idle < base.simulation.idle


def test_a_ledger_adds_up_to_the_step():
    for time in (step_time(full_size(), H100), step_time(full_size(grad_sync="every"), H100)):
        for ledger, end in zip(time.by_rank, time.ends, strict=True):
            assert ledger.exposed == pytest.approx(end)
            assert all(0 <= spent.exposed <= spent.whole + 1e-9 for spent in ledger.values())
        tokens = time.tokens_per_second_per_gpu * 256 * time.seconds
        assert tokens == pytest.approx(256 * 4096)


def test_dense_attention_takes_what_cudnn_takes():
    """Without an indexer: 5.1 ms a layer at 4,096 tokens, 18.6 at 8,192, against that of sparse attention."""
    for length, milliseconds in ((4096, 5.13), (8192, 18.6)):
        sparse = reference(1, 1, length=length, **KEEP)
        dense = replace(sparse.config, kernels=replace(sparse.config.kernels, attention="dense"))
        times = [step_time(plan, H200, False).seconds for plan in (Plan.create(dense, 1, 8), sparse)]
        flops = [layer_flops(sparse.config.model, layer, [length]) for layer in range(4)]
        left = (2.3 + 9.9) * sum(f.attention for f in flops) + sum(
            2 * f.index_scores + f.index_projections for f in flops
        )
        added = times[0] - times[1] + left / H200.products
        assert 1e3 * added == pytest.approx(4 * milliseconds, rel=0.06)


def test_fewer_rows_a_rank_than_were_measured_take_longer():
    whole, quarter = (benchmark(1, 4096 // length, length=length, **KEEP) for length in (4096, 1024))
    assert 1.25 < quarter.seconds / whole.seconds < 1.6  # less attention, 256 rows an expert


def test_few_rows_an_expert_are_slower():
    assert [rows_factor(rows) for rows in (8192, 1024, 256, 128)] == pytest.approx([1.0, 1.0, 1.31, 1.89])
    assert 1 < rows_factor(512) < 1.31 and rows_factor(64) > 1.89


def machine(*words: str) -> Machine:
    return machine_of(build_parser().parse_args(["--hf-config", "glm5.2", "--bf16", *words]))


def test_flags_name_the_machine(tmp_path):
    assert machine() == H100 and machine("--gpu-type", "h200") == H200 and H200.memory == 139 * GIB
    assert machine("--gpu-memory-gb", "64").memory == 64 * GIB
    rates = machine("--nvlink-gb-per-second", "300", "--nic-gb-per-second", "20")
    assert (rates.nvlink, rates.nic) == (300e9, 20e9)
    plan = reference(1, 2, **KEEP)
    predicted = step_time(plan, H200, optimizer=False).seconds
    found = calibration(plan, H200, 0.2, 0.3)
    file = tmp_path / "card.json"
    file.write_text(json.dumps({"device": "a card", "precision": "bf16"} | found))
    card = machine("--gpu-type", "h200", "--calibration", str(file))
    assert card.name == "a card" and step_time(plan, card, optimizer=False).seconds == pytest.approx(0.5, rel=0.03)
    assert predicted != pytest.approx(0.5, rel=0.03)


@pytest.mark.parametrize(
    "content, words",
    [
        (None, "No such file"),
        ("{", "Expecting"),
        ("[]", "lacks an object"),
        ('{"device": "x", "precision": "bf16", "forward": 1}', "lacks backward"),
        ('{"device": "x", "precision": "bf16", "forward": 1, "backward": -1}', "backward is -1"),
        ('{"device": "x", "precision": "bf16", "forward": 1, "backward": NaN}', "backward is nan"),
        ('{"device": "x", "precision": "fp8", "forward": 1, "backward": 1}', "measured in fp8, the run is in bf16"),
    ],
)
def test_a_calibration_that_cannot_be_is_refused(content, words, tmp_path, capsys):
    file = tmp_path / "card.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(SystemExit) as stopped:
        print_plan(build_parser().parse_args(["--hf-config", "glm5.2", "--bf16", "--calibration", str(file)]))
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and error.startswith(f"error: --calibration {file}") and words in error


def test_a_calibration_is_of_one_gpu():
    with pytest.raises(ValueError, match="of one GPU, there are 2 ranks"):
        calibration(reference(2, 2), H200, 1.0, 1.0)


@pytest.mark.parametrize(
    "flags, words",
    [
        ([], "without --bf16"),
        (["--bf16", "--attention-backend", "torch"], "of --attention-backend torch"),
        (["--bf16", "--indexer-training", "sparse"], "of --indexer-training sparse"),
    ],
)
def test_what_was_not_measured_is_not_predicted(flags, words, capsys):
    print_plan(build_parser().parse_args(["--hf-config", "glm5.2-tiny", *flags]))
    assert f"time: not predicted, no rates were measured {words}\n" in capsys.readouterr().out


def test_the_report_says_the_time_and_what_is_hidden(capsys):
    words = "--hf-config glm5.2 --bf16 --seq-length 4096 --global-batch-size 256 --nnodes 32 --gpu-type h200"
    words += " --pipeline-model-parallel-size 4 --expert-model-parallel-size 64 --recompute-granularity full"
    print_plan(build_parser().parse_args(words.split()))
    text = capsys.readouterr().out
    assert "predicted for h200, 350 GB/s in a node and 45 GB/s between nodes" in text and "139.0 GiB a GPU" in text
    assert " s a step, " in text and "tokens/s a GPU" in text


@pytest.mark.parametrize("shares", [True, False])
def test_every_mtp_step_sends_its_tokens_to_the_experts(shares):
    """As much as a layer of the trunk, and its keys, unless it attends to those of the first step."""
    case = {"experts": 64, "expert_model_parallel_size": 2, "context_parallel_size": 2, "length": 8192}

    def spent(steps: int) -> tuple[float, float]:
        plan = reference(2, 1, layers=4, **case)
        model = replace(plan.config.model, num_nextn_predict_layers=1, index_share_for_mtp_iteration=shares)
        config = replace(plan.config, model=model, losses=LossConfig(steps))
        ledger = step_time(Plan.create(config, 2, 8), H200, optimizer=False).by_rank[0]
        return ledger[EXPERTS].whole, ledger[LATENTS].whole

    none, one, three = (spent(steps) for steps in (0, 1, 3))
    assert [found[0] / none[0] for found in (one, three)] == pytest.approx([4 / 3, 6 / 3])  # of 3 MoE layers
    keys = one[1] - none[1]
    assert keys > 0 and three[1] == pytest.approx(none[1] + (1 if shares else 3) * keys)


def test_multiprocessors_for_communication_hide_messages_and_cost_the_experts():
    """8 GPUs, a pipeline over two: messages come beside the action before, and a buffer more is held for one."""
    plans = [reference(8, 16, communication_sms=sms, **PIPELINE) for sms in (0, 8)]
    without, with_it = (step_time(plan, H200, optimizer=False) for plan in plans)
    assert without.by_rank[0][MESSAGES].exposed > 0 == with_it.by_rank[0][MESSAGES].exposed
    assert with_it.by_rank[0][MESSAGES].whole == pytest.approx(without.by_rank[0][MESSAGES].whole)
    assert with_it.by_rank[0][COMPUTING].whole > without.by_rank[0][COMPUTING].whole
    assert plans[1].message_bytes(0) - plans[0].message_bytes(0) == 4096 * 6144 * 2


def test_adapters_are_predicted_within_10_percent():
    """A step with AdamW was 1.44 times as fast as one that trains everything: the gradients of frozen weights that are
    spared take about as long as the adapters' own small products, so the plan counts neither."""
    full = reference(1, 1, **KEEP)
    lora = LoraConfig(lora_rank=16, lora_alpha=32, lora_expert_rank=8)
    both = [step_time(plan, H200).seconds for plan in (full, Plan.create(replace(full.config, lora=lora), 1, 8))]
    assert both[0] / both[1] == pytest.approx(1.44, rel=0.1)


@pytest.mark.parametrize("scored", [(), ("scores.jsonl",)])
def test_the_reference_of_pairs_is_a_forward_more(scored):
    plan = reference(2, 8, **PIPELINE)
    preference = PreferenceConfig(loss="dpo", reference_logprobs=scored)
    lora = LoraConfig(lora_rank=8, lora_alpha=16)
    asked = Plan.create(replace(plan.config, lora=lora, preference=preference), 2, 8)
    time, without = step_time(asked, H200), step_time(Plan.create(replace(plan.config, lora=lora), 2, 8), H200)
    forward = time.seconds - without.seconds
    assert forward == (0 if scored else pytest.approx(time.by_rank[0][REFERENCE].whole))
    assert scored or 0.2 * without.seconds < forward < 0.6 * without.seconds
    for ledger, end in zip(time.by_rank, time.ends, strict=True):
        assert ledger.exposed == pytest.approx(end)
