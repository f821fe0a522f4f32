"""The planner against what ranks really hold, against the published sizes, and as a user meets it."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_leaves

from megatron_glm.config import LoraConfig, LossConfig, ModelConfig, ParallelConfig, RunConfig
from megatron_glm.config.flags import build_parser
from megatron_glm.config.lora import NO_ADAPTERS
from megatron_glm.model import moe, recompute
from megatron_glm.model.norm import RMSNorm
from megatron_glm.model.pack import PackRows
from megatron_glm.ops.recompute import RecomputeCache
from megatron_glm.ops.sparse_mla import PART_BYTES
from megatron_glm.planner import report as plan_report
from megatron_glm.planner.activations import Shapes, layer_activations, layer_kept
from megatron_glm.planner.memory import peak_memory, rank_memory
from megatron_glm.planner.plan import GIB, Plan
from megatron_glm.planner.traffic import rank_traffic, traffic
from tests.helpers import distributed
from tests.helpers.reference import forward, single_chunk
from tests.parity.layouts import Recorder, pack, parity_model, run_config

ROOT = Path(__file__).resolve().parents[2]


def print_plan(words: list[str]) -> None:
    plan_report.print_plan(build_parser().parse_args(words))


def layout(tp=1, cp=1, ep=1, pp=1, **changes) -> ParallelConfig:
    return ParallelConfig(
        tensor_model_parallel_size=tp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        pipeline_model_parallel_size=pp,
        sequence_parallel=tp > 1,
        **changes,
    )


# Of the parity grid: every axis, shards of unequal size (98 rows of vocabulary over 4 ranks), interleaving, two hops.
LAYOUTS = {
    "tp4": layout(tp=4),
    "tp2 ep4": layout(tp=2, ep=4),
    "cp2 pp2 vp2": layout(cp=2, pp=2, num_layers_per_virtual_pipeline_stage=1),
    "ep2 pp2": layout(ep=2, pp=2, recompute_granularity="full"),
    "ep4 hybrid": layout(ep=4, moe_token_dispatcher_type="hybrid", expert_node_size=2),
}


def configs() -> dict[str, RunConfig]:
    cases = {name: run_config(parity_model(4), parallel, 4, seed=1) for name, parallel in LAYOUTS.items()}
    narrow = replace(cases["tp4"].optimizer, adam_moments_dtype="bf16", adam_beta2=0.95)
    return cases | {"tp4": replace(cases["tp4"], optimizer=narrow)}


def really_held(cases: dict[str, RunConfig]) -> dict[str, tuple[int, int, int]]:
    """Bytes of parameters, gradients and moments of this rank in a training step of each case."""
    import torch.distributed as dist

    from megatron_glm.parallel.fsdp import local
    from megatron_glm.parallel.groups import ParallelGroups
    from megatron_glm.training.engine import Engine
    from megatron_glm.training.initialize import build_chunks
    from megatron_glm.training.optimizer import build_optimizer
    from megatron_glm.training.step import train_step

    def size(tensors) -> int:
        return sum(local(tensor).nbytes for tensor in tensors)

    found = {}
    for name, config in cases.items():
        groups = ParallelGroups.create(config.parallel)
        chunks = build_chunks(config, groups)
        parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
        gradients = []
        optimizer = build_optimizer(config.optimizer, chunks)
        recorder = Recorder(
            optimizer, lambda p=parameters, g=gradients: g.append(size(x.grad for x in p if x.grad is not None))
        )
        mine = range(groups.dp.rank(), config.train.global_batch_size, groups.dp.size())
        batches = [pack(config.model, 1, 0, index) for index in mine]
        train_step(Engine(config, groups, chunks), recorder, batches, 1e-3)
        moments = [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
        found[name] = size(parameters), gradients[0], size(moments)
        distributed.close_groups(groups)
    assert dist.get_world_size() == 4
    return found


def test_weights_gradients_and_moments_are_exact():
    cases = configs()
    ranks = distributed.run(4, really_held, cases)
    for name, config in cases.items():
        plan = Plan.create(config, 4, 4)
        planned = [plan.held(rank) for rank in range(4)]
        assert [(h.parameters, h.gradients, h.moments) for h in planned] == [rank[name] for rank in ranks], name


def really_gathered(cases: dict[str, RunConfig]) -> dict[str, float]:
    """Bytes of weights that this rank receives from others in a training step of each case."""
    from unittest.mock import patch

    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

    from tests.parity.layouts import train

    found, gather = {}, DefaultAllGather.__call__

    def count(self, output_tensor, input_tensor, group, async_op=False):
        found[name] += output_tensor.nbytes * (group.size() - 1) / group.size()
        return gather(self, output_tensor, input_tensor, group, async_op)

    for name, config in cases.items():
        found[name] = 0.0
        with patch.object(DefaultAllGather, "__call__", count):
            train(config, steps=1)
    return found


def test_weights_are_gathered_as_often_as_planned():
    """None for nothing: FSDP2 begins with weights that it takes to be needed next."""
    cases = {
        sync: run_config(parity_model(4), layout(pp=2, grad_sync=sync), packs=8, seed=1) for sync in ("last", "every")
    }
    cases |= {f"{sync}, MTP": replace(config, losses=LossConfig(3)) for sync, config in cases.items()}
    cases["kept, MTP"] = replace(cases["last, MTP"], parallel=layout(pp=2, reshard_after_forward=False))
    cases["one stage, MTP"] = replace(cases["last, MTP"], parallel=layout())
    ranks = distributed.run(4, really_gathered, cases)
    for name, config in cases.items():
        plan = Plan.create(config, 4, 4)
        for rank, found in enumerate(ranks):
            sent = rank_traffic(plan, rank // (4 // plan.grid.pp))
            planned = sum(sent[axis, "gathered weights"] for axis in ("dp_cp", "edp"))
            exact = plan.grid.pp > 1  # in one stage FSDP2 gathers the last norm, of 32 numbers, more often
            assert found[name] == pytest.approx(planned, rel=0 if exact else 1e-3, abs=0), (name, rank)


def recipe(nodes: int, **changes) -> Plan:
    parallel = layout(cp=8, pp=4, ep=64, num_layers_per_virtual_pipeline_stage=2, recompute_granularity="full")
    config = RunConfig(model=ModelConfig.from_hf("glm5.2"), parallel=replace(parallel, **changes))
    train = replace(config.train, bf16=True, global_batch_size=64, train_iters=100)
    data = replace(config.data, data_path=("none",), seq_length=32768)
    kernels = replace(config.kernels, attention_backend="tilelang")
    return Plan.create(replace(config, train=train, data=data, kernels=kernels), 8 * nodes, 8)


def test_all_ranks_together_hold_the_released_model():
    plan = recipe(64)
    held = [plan.held(rank) for rank in range(512)]
    assert sum(rank.parameters for rank in held) == 4 * (743_377_000_704 + 9_952_920_320)
    frozen = (9_952_920_320 + 21 * 9_371_904) * 4  # the MTP layer, its indexer included, and the indexers
    assert sum(rank.gradients for rank in held) == 4 * (743_377_000_704 + 9_952_920_320) - frozen
    for pp_rank, ranks in enumerate(plan.grid.groups("tp_cp_dp")):
        assert rank_memory(plan, pp_rank)["fp32 master weights"] == max(held[rank].masters for rank in ranks)


def test_the_32k_recipe_needs_512_gpus_of_80_gb_as_published():
    assert peak_memory(recipe(32, reshard_after_forward=False)) > 80 * GIB
    assert peak_memory(recipe(64, reshard_after_forward=False)) < 80 * GIB


def test_each_setting_moves_its_kind_of_memory():
    full, kinds = recipe(64), rank_memory(recipe(64), 1)
    every = rank_memory(recipe(64, grad_sync="every"), 1)
    assert every["gradients before reduction"] == 0 < kinds["gradients before reduction"]
    selective = rank_memory(recipe(64, recompute_granularity="selective"), 1)["activations"]
    nothing = rank_memory(recipe(64, recompute_granularity="none"), 1)["activations"]
    assert kinds["activations"] < selective < nothing
    kept = rank_memory(recipe(64, reshard_after_forward=False), 1)["gathered weights"]
    dense = [unit.elements for unit in full.rank_units(1) if not unit.expert]
    assert kept >= 2 * sum(dense) > kinds["gathered weights"]
    deterministic = replace(full.config, kernels=replace(full.config.kernels, deterministic=True))
    ordered = rank_memory(Plan.create(deterministic, 512, 8), 1)["working set of a layer"]
    assert ordered == kinds["working set of a layer"] + PART_BYTES
    sent = {(axis, what): inside + between for axis, what, inside, between in traffic(full)}
    assert ("tp", "sequence shards") not in sent
    stages = 9 * 2 - 1  # inner ranks send 9 outputs and 9 input gradients; the first and last one fewer
    assert sent["pp", "hidden states, selections"] >= 4 * stages * 4096 * 6144 * 2


class KernelNorm(torch.autograd.Function):
    """Keeps what the CUDA kernel of a norm keeps; the values do not matter here."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight, x.new_ones(x.shape[0]))
        return x * weight


class KernelExperts(torch.autograd.Function):
    """Keeps what the experts keep on CUDA: their rows, and gate and up."""

    @staticmethod
    def forward(ctx, rows, gate_up):
        ctx.save_for_backward(rows, rows.new_ones(rows.shape[0], gate_up.shape[1]))
        return rows.new_zeros(1, 1).expand_as(rows)


def as_on_cuda(monkeypatch) -> None:
    """Lets the layers keep what they keep on CUDA, but for the gated MLPs, which also keep silu(gate) here."""
    monkeypatch.setattr(RMSNorm, "forward", lambda norm, x: KernelNorm.apply(x, norm.weight))
    monkeypatch.setattr(moe, "grouped_mlp", lambda rows, *others: KernelExperts.apply(rows, others[2]))


def saved_bytes(model: ModelConfig, tokens: int, lora: LoraConfig = NO_ADAPTERS) -> int:
    """What autograd keeps of a model without its head, weights aside: every storage once."""
    chunk = single_chunk(model, lora=lora)
    plan = PackRows.build(model, (tokens,), tokens, dense_rows="off")
    hidden = torch.randn(tokens, model.hidden_size, requires_grad=True)
    weights = {parameter.untyped_storage().data_ptr() for parameter in chunk.parameters()}
    storages = {}

    def keep(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.no_grad():
        for parameter in chunk.parameters():
            parameter.normal_(std=0.02)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        topk, outputs = None, hidden
        for layer in chunk.layers.values():
            outputs, topk, *_ = layer(outputs, plan, topk)
    assert outputs.requires_grad
    return sum(size for pointer, size in storages.items() if pointer not in weights)


def one_layer(dense: int) -> tuple[ModelConfig, Shapes]:
    """A tiny model of one layer, and the sizes of 512 tokens in it, all of them sparse rows."""
    changes = {"num_hidden_layers": 1, "first_k_dense_replace": dense, "num_nextn_predict_layers": 0}
    tiny = ModelConfig.from_hf("glm5.2-tiny", **changes)
    config = RunConfig(model=tiny, data=replace(RunConfig(model=tiny).data, data_path=("none",), seq_length=512))
    plan = Plan.create(replace(config, train=replace(config.train, train_iters=1)), 1, 8)
    return tiny, replace(plan.shapes, dense=0)


@pytest.mark.parametrize("dense", [1, 0])
def test_the_activations_of_a_layer_are_what_autograd_keeps(dense, monkeypatch):
    as_on_cuda(monkeypatch)
    tiny, shapes = one_layer(dense)
    silu = 4 * (tiny.intermediate_size if dense else tiny.n_shared_experts * tiny.moe_intermediate_size)
    planned = sum(layer_activations(tiny, 0, shapes).values())
    assert planned == pytest.approx(saved_bytes(tiny, 512) - 512 * silu, rel=0.02)


@pytest.mark.parametrize("dense", [1, 0])
@pytest.mark.parametrize("granularity", ["full", "selective"])
def test_what_recomputation_keeps_is_exact(dense, granularity, monkeypatch):
    made = []
    monkeypatch.setattr(recompute, "RecomputeCache", lambda **how: made.append(RecomputeCache(**how)) or made[-1])
    tiny, shapes = one_layer(dense)
    chunk = single_chunk(tiny, granularity)
    with torch.no_grad():
        for parameter in chunk.parameters():
            parameter.normal_(std=0.02)
    plan = PackRows.build(tiny, (512,), 512, dense_rows="off")
    output = forward(chunk, torch.arange(512), plan, torch.arange(512))
    [kept] = made
    results = [tensor for result, _ in kept.results for tensor in tree_leaves(result)]
    assert output.loss.requires_grad
    layer_input = 512 * tiny.hidden_size * 4
    assert layer_kept(tiny, 0, shapes, granularity) == layer_input + sum(tensor.nbytes for tensor in results)


FLAGS = ["--hf-config", "glm5.2", "--seq-length", "32768", "--context-parallel-size", "8", "--bf16"]
FLAGS += ["--pipeline-model-parallel-size", "4", "--expert-model-parallel-size", "64", "--global-batch-size", "64"]
FLAGS += ["--num-layers-per-virtual-pipeline-stage", "2", "--recompute-granularity", "full"]


def test_a_plan_that_does_not_fit_says_what_to_change(capsys):
    print_plan([*FLAGS, "--nnodes", "32", "--gpu-memory-gb", "75"])
    text = capsys.readouterr().out
    assert "warning: --data-path is not given" in text
    assert "256 ranks on 32 nodes of 8" in text
    assert "verdict: does not fit" in text
    assert "twice the ranks (512): " in text and ", fits" in text
    print_plan([*FLAGS, "--nnodes", "32", "--gpu-memory-gb", "140"])
    assert "verdict: fits" in capsys.readouterr().out


def test_a_plan_that_fits_says_what_would_send_less(capsys):
    """The numbers of a line are those of a plan with its flags; a setting that does not fit has no line."""

    def planned(*flags: str) -> tuple[float, float, list[list[str]]]:
        """Seconds to send, GiB at the peak, and (flags, GiB more, seconds less) of each line."""
        print_plan([*FLAGS, "--nnodes", "64", "--gpu-memory-gb", "90", *flags])
        text = capsys.readouterr().out
        (seconds,), (peak,) = re.findall(r"^  ([\d.]+) s in all", text, re.M), re.findall(r"fits \(([\d.]+)", text)
        lines = re.findall(r"^  faster: (.+) takes ([\d.]+) GiB more and ([\d.]+) of", text, re.M)
        return float(seconds), float(peak), lines

    seconds, peak, lines = planned()
    assert len(lines) == 3 and len(lines[2][0].split()) == 4  # two settings, and both together
    for flags, more, less in lines:
        faster, larger, _ = planned(*flags.split())
        assert larger - peak == pytest.approx(float(more), abs=0.11)
        assert seconds - faster == pytest.approx(float(less), abs=0.06)
    assert planned(*lines[2][0].split())[2] == []


def test_what_no_single_change_mends_is_mended_by_several(capsys):
    """The reported number is what a plan with the reported flags says."""
    flags = ["--hf-config", "glm5.2", "--seq-length", "4096", "--bf16", "--nnodes", "16", "--gpu-memory-gb", "100"]
    flags += ["--pipeline-model-parallel-size", "4", "--expert-model-parallel-size", "32", "--micro-batch-size", "2"]
    flags += ["--num-layers-per-virtual-pipeline-stage", "2", "--global-batch-size", "256"]
    print_plan([*flags, "--recompute-granularity", "selective"])
    *single, together = capsys.readouterr().out.partition("what changes it:\n")[2].splitlines()
    assert single and not [line for line in single if line.endswith(", fits")]
    words, _, reached = together.strip().removeprefix("together ").removesuffix(", fits").partition(": ")
    assert "--recompute-granularity full" in words and "--adam-moments-dtype bf16" in words
    assert together.endswith(", fits")
    print_plan([*flags, *words.split()])
    assert f"verdict: fits ({reached} at the peak" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--nnodes", "3"], ("24", "32")),
        (["--nnodes", "32", "--expert-model-parallel-size", "48"], ("64", "48")),
        (["--nnodes", "32", "--seq-length", "32767"], ("32767", "16")),
        (["--nnodes", "0"], ("--nnodes is 0",)),
        (["--nnodes", "32", "--gpu-memory-gb", "nan"], ("--gpu-memory-gb is nan",)),
        (["--nnodes", "32", "--gpu-memory", "80"], ("--gpu-memory",)),
        (["--nnodes", "1000000", "--global-batch-size", "8000000"], ("8,000,000 ranks, at most 131,072",)),
        (["--nnodes", "32", "--global-batch-size", "7999992"], ("3,999,996 micro-batches x stages, at most 262,144",)),
        (
            ["--nnodes", "32", "--micro-batch-size", "9999", "--global-batch-size", "79992"],
            ("327,647,232 rows of a micro-batch, at most 134,217,728",),
        ),
    ],
)
def test_an_impossible_layout_exits_with_2(flags, words, capsys):
    with pytest.raises(SystemExit) as stopped:
        print_plan([*FLAGS, *flags])
    assert stopped.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("error: ") and captured.err.count("\n") == 1
    for word in words:
        assert word in captured.err


def test_missing_inputs_are_warnings(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(ModelConfig.from_hf("glm5.2-tiny").to_hf()))
    missing = [str(tmp_path / name) for name in ("data.jsonl", "valid.jsonl", "tokenizer.json", "checkpoint")]
    flags = ["--data-path", missing[0], "--valid-data-path", missing[1], "--tokenizer-model", missing[2]]
    print_plan(["--hf-config", str(tmp_path), *flags, "--load", missing[3], "--finetune", "--train-iters", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert [path for path in missing if any(line.startswith("warning: ") and path in line for line in lines)] == missing


@pytest.mark.parametrize("script", [["finetune_glm.py", "--dry-run"], ["tools/plan.py"]])
def test_the_scripts_plan_without_torchrun(script, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"WORLD_SIZE": "4"}
    flags = ["--hf-config", "glm5.2-tiny", "--pipeline-model-parallel-size", "2", "--global-batch-size", "4"]
    command = [sys.executable, str(ROOT / script[0]), *script[1:], *flags]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert "layout: 4 ranks on 1 nodes of 4: TP 1 CP 1 DP 2 PP 2" in done.stdout
    assert "verdict: fits" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_a_plan_is_drawn(ending, tmp_path, capsys):
    """With times on GPUs, in operations where none are predicted."""
    file = tmp_path / f"plan.{ending}"
    words = ["--bf16", "--pipeline-schedule", "zero-bubble"] if ending == "png" else []
    flags = ["--hf-config", "glm5.2", "--nnodes", "16", "--pipeline-model-parallel-size", "8", *words]
    flags += ["--expert-model-parallel-size", "16", "--global-batch-size", "64", "--picture", str(file)]
    plan_report.print_plan(build_parser().parse_args(flags))
    assert file.stat().st_size > 10_000
    if ending == "svg":
        text = file.read_text()
        assert all(
            f"<!-- {words} -->" in text for words in ("pipeline rank", "operations", "AdamW moments", "backward")
        )


def test_a_picture_that_cannot_be_drawn_is_refused(tmp_path, capsys):
    flags = ["--hf-config", "glm5.2", "--picture", str(tmp_path / "gone" / "plan.png")]
    with pytest.raises(SystemExit) as stopped:
        plan_report.print_plan(build_parser().parse_args(flags))
    said = f"error: --picture {tmp_path}/gone/plan.png: the folder {tmp_path}/gone does not exist\n"
    assert stopped.value.code == 2 and capsys.readouterr().err == said
