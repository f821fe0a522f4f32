"""tools/plan.py search: its results are plans of their flags, the fastest that fit, and errors name what is wrong."""

from __future__ import annotations

import itertools
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_glm.config import LossConfig
from megatron_glm.config.flags import build_parser
from megatron_glm.parallel.pipeline.layout import build_layout
from megatron_glm.parallel.pipeline.split import auto_sizes, layout_string
from megatron_glm.planner import found, search
from megatron_glm.planner.machine import H200, machine_of
from megatron_glm.planner.memory import peak_memory
from megatron_glm.planner.plan import GIB, Plan
from megatron_glm.planner.report import planned_config, print_plan
from megatron_glm.planner.time import step_time
from tests.planner.test_plan_time import full_size

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import plan as plan_tool  # noqa: E402

CONTRACT = "--hf-config glm5.2 --gpus 256 --gpu-type h100 --seq-length 4096 --global-batch-size 256".split()
WHOLE = "--tensor-model-parallel-size 1 --context-parallel-size 1".split()
SMALL = "--hf-config glm5.2 --num-layers 4 --num-experts 32 --gpu-type h200 --seq-length 4096".split()


def printed(capsys, *words: str) -> str:
    found.print_found(plan_tool.search_parser().parse_args(words), words)
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "words, gpus",
    [
        ([*CONTRACT, "--pipeline-model-parallel-size", "16", "--results", "4"], 256),
        ([*SMALL, "--gpus", "16", "--global-batch-size", "64", "--lr", "1e-4", "--results", "5"], 16),
        ([*SMALL, "--gpus", "4", "--nproc-per-node", "2", "--tensor-model-parallel-size", "2"], 4),
    ],
)
def test_each_result_is_the_plan_of_its_flags(words, gpus, capsys):
    rows = json.loads(printed(capsys, *words, "--json"))
    speeds = [row["tokens_per_second_per_gpu"] for row in rows]
    assert len(rows) >= 4 and speeds == sorted(speeds, reverse=True)
    per_node = min(8, gpus) if "--nproc-per-node" not in words else 2
    shape = ["--num-layers", "4", "--num-experts", "32"] if "--num-layers" in words else []
    for row in rows:
        assert all(isinstance(word, str) for word in row["flags"])
        assert {"--bf16", "--seq-length", "--global-batch-size", "--gpu-memory-gb"} <= set(row["flags"])
        run = ["--hf-config", "glm5.2", "--data-path", "none", "--train-iters", "1"]
        run += ["--nnodes", str(gpus // per_node), "--nproc-per-node", str(per_node), "--dry-run"]
        print_plan(build_parser().parse_args([*row["flags"], *run]))
        text = capsys.readouterr().out
        assert f"verdict: fits ({row['peak_gib']:.1f} GiB at the peak" in text
        assert f"{row['tokens_per_second_per_gpu']:,.1f} tokens/s a GPU" in text
        assert row["peak_gib"] <= (139 if shape else 80)
        assert [row["flags"][row["flags"].index(flag) + 1] for flag in shape[::2]] == shape[1::2]
    assert "--lr" not in words or rows[0]["flags"][rows[0]["flags"].index("--lr") + 1] == "1e-4"


def test_the_best_of_the_256_is_faster_than_the_published_layout(capsys):
    words = [*CONTRACT, "--pipeline-model-parallel-size", "16", "--micro-batch-size", "1", "--json"]
    best = json.loads(printed(capsys, *words))[0]
    published = full_size(reshard_after_forward=False, grad_sync="every")
    assert best["tokens_per_second_per_gpu"] > 1.1 * step_time(published, search_machine()).tokens_per_second_per_gpu


def search_machine():
    return machine_of(build_parser().parse_args(CONTRACT[:2]))


def every_layout(words: list[str], gpus: int, memory: float):
    """Seconds of all layouts that fit, without any pruning; cut into as many virtual stages as is best."""
    flags = build_parser().parse_args([*words, "--bf16"])
    config, _ = planned_config(flags)
    sizes = itertools.product((1, 2, 4), (1, 2, 4), (1, 2, 4), (1, 2, 4), (1, 2, 4))
    settings = itertools.product(("none", "selective", "full"), (False, True), (False, True), ("last", "every"))
    settings = list(settings)
    for tp, cp, pp, ep, batch in sizes:
        for recompute, dense, experts, sync in settings:
            parallel = replace(
                config.parallel,
                tensor_model_parallel_size=tp,
                sequence_parallel=tp > 1,
                context_parallel_size=cp,
                pipeline_model_parallel_size=pp,
                pipeline_model_parallel_layout="auto" if pp > 1 else None,
                expert_model_parallel_size=ep,
                recompute_granularity=recompute,
                reshard_after_forward=dense,
                reshard_experts_after_forward=experts,
                grad_sync=sync,
            )
            if batch * 4096 // (tp * cp) < 1024:
                continue
            train = replace(config.train, micro_batch_size=batch)
            try:
                plan = Plan.create(replace(config, parallel=parallel, train=train), gpus, gpus)
            except ValueError:
                continue
            if peak_memory(plan) <= memory:
                yield step_time(plan, replace(H200, memory=memory)).seconds


@pytest.mark.parametrize("gigabytes", [400, 80, 52])
def test_nothing_faster_is_left_out(gigabytes, capsys):
    """Against every layout of 4 GPUs in their simplest cut, with fp32 moments, as the search is told."""
    words = [*SMALL, "--global-batch-size", "16", "--adam-moments-dtype", "fp32"]
    fastest = min(every_layout(words, 4, gigabytes * GIB))
    rows = json.loads(printed(capsys, *words, "--gpus", "4", "--gpu-memory-gb", str(gigabytes), "--json"))
    assert rows[0]["seconds_per_step"] == pytest.approx(fastest, rel=2e-3) or rows[0]["seconds_per_step"] < fastest


def test_a_table_says_what_the_others_spend_more_on(capsys):
    text = printed(capsys, *SMALL, "--gpus", "8", "--results", "3")
    head, _, best, second, third, _, flags = text.splitlines()
    assert head.startswith("8 h200 of 139.0 GiB in nodes of 8, 350 GB/s in a node, 45 GB/s between nodes")
    assert not re.search(r"[+-]\d", best) and re.search(r"\+\d+\.\d%", second + third)
    assert flags.startswith("the best: --bf16 --seq-length 4096")


def test_what_is_given_stays(capsys):
    given = "--expert-model-parallel-size 2 --reshard-experts-after-forward true --recompute-granularity selective"
    given += " --grad-sync every --moe-token-dispatcher-type allgather --adam-beta2 0.999 --attention-backend tilelang"
    for row in json.loads(printed(capsys, *SMALL, "--gpus", "8", *given.split(), "--json")):
        assert given in " ".join(row["flags"]) and row["flags"].count("--grad-sync") == 1
        assert "bf16" not in row["flags"], "moments in bf16 cannot follow the beta that was given"


def test_bf16_moments_are_taken_where_they_are_needed(capsys):
    words = [*SMALL, "--gpus", "1", "--gpu-memory-gb", "104", "--json"]
    [best, *_] = json.loads(printed(capsys, *words))
    assert " ".join(best["flags"]).count("--adam-beta2 0.95 --adam-moments-dtype bf16") == 1
    plenty = json.loads(printed(capsys, *words, "--gpu-memory-gb", "200"))
    assert "--adam-moments-dtype" not in plenty[0]["flags"]


@pytest.mark.parametrize(
    "words, said",
    [
        ([*SMALL], "search needs --gpus"),
        ([*SMALL, "--gpus", "0"], "--gpus is 0; it must be at least 1"),
        ([*SMALL, "--gpus", "8", "--results", "0"], "--results is 0"),
        ([*SMALL, "--gpus", "12"], "--gpus (12) must be a multiple of --nproc-per-node (8)"),
        ([*SMALL, "--gpus", "8", "--nnodes", "1"], "--nnodes does not go with search"),
        ([*SMALL, "--gpus", "8", "--dry-run"], "--dry-run does not go with search"),
        ([*SMALL, "--gpus", "8", "--nic-gb-per-second", "0"], "--nic-gb-per-second is 0.0"),
        (
            [*SMALL, "--gpus", "8", "--attention-backend", "torch"],
            "no rates were measured of --attention-backend torch",
        ),
        (["--gpus", "8"], "the model has no shape yet"),
        ([*SMALL, "--gpus", "16", "--global-batch-size", "7", *WHOLE], "--global-batch-size (7) must be a multiple of"),
        ([*SMALL, "--gpus", "4", "--gpu-memory-gb", "20"], "no layout fits 4 GPUs of 20.0 GiB; the nearest needs "),
        (
            [*SMALL, "--gpus", "8", "--expert-model-parallel-size", "3"],
            "(8) must be a multiple of --expert-model-parallel",
        ),
    ],
)
def test_what_cannot_be_searched_is_one_line(words, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        found.print_found(plan_tool.search_parser().parse_args(words), words)
    output = capsys.readouterr()
    assert stopped.value.code == 2 and output.out == "" and output.err.count("\n") == 1
    assert output.err.startswith("error: ") and said in output.err


def test_the_nearest_layout_is_the_plan_of_its_flags(capsys):
    with pytest.raises(SystemExit):
        printed(capsys, *SMALL, "--gpus", "4", "--gpu-memory-gb", "20")
    error = capsys.readouterr().err
    peak, more, flags = re.search(r"needs ([\d.]+) GiB, ([\d.]+) more: (--.*)$", error.strip()).groups()
    run = [*SMALL, "--bf16", "--nnodes", "1", "--nproc-per-node", "4", *flags.split()]
    print_plan(build_parser().parse_args(run))
    assert f"verdict: fits ({peak} GiB at the peak" in capsys.readouterr().out
    assert float(peak) - float(more) == pytest.approx(20, abs=0.11)


def test_a_layout_string_is_its_sizes():
    config = full_size().config
    for pp, losses in itertools.product((2, 6, 13), (LossConfig(), LossConfig(3))):
        parallel = replace(config.parallel, pipeline_model_parallel_size=pp, num_layers_per_virtual_pipeline_stage=None)
        for _, ends, sizes in auto_sizes(parallel, config.model, 4096, 8, losses):
            cut = replace(parallel, pipeline_model_parallel_layout=layout_string(sizes, ends))
            stages = build_layout(cut, config.model, 4096, 8).stages
            assert tuple(len(stage.layers) for stage in stages) == sizes and stages[-ends].mtp


def test_a_batch_may_be_smaller_than_the_ranks(capsys):
    """Then the pipeline and the axes inside a pack share the ranks."""
    words = [*SMALL, "--gpus", "8", "--global-batch-size", "2", "--tensor-model-parallel-size", "1", "--json"]
    chosen = [" ".join(row["flags"]) for row in json.loads(printed(capsys, *words, "--results", "99"))]
    assert any("--context-parallel-size 1 --pipeline-model-parallel-size 4" in flags for flags in chosen)
    assert any("--context-parallel-size 4 --pipeline-model-parallel-size 1" in flags for flags in chosen)


def test_bounds_are_below_the_times():
    flags = build_parser().parse_args([*SMALL, "--bf16", "--global-batch-size", "16"])
    config, _ = planned_config(flags)
    trial = search.Search(config, frozenset(vars(flags)), 4, 4, replace(H200, memory=400 * GIB), 100)
    bounds = dict(trial._bounds(search.FEWEST_ROWS, search.MOST_ROWS))
    results = trial.run()
    assert len(results) > 10 and all(bounds[result.base] <= result.time.seconds for result in results)
