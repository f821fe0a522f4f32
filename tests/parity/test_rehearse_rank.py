"""A rehearsed rank does what the same rank of a real run does: it keeps and sends as many bytes in the same calls."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed import ProcessGroup

import finetune_glm
from megatron_glm.config import DataConfig, PretrainDataConfig
from megatron_glm.config.flags import build_parser
from megatron_glm.planner.machine import machine_of
from megatron_glm.planner.plan import GIB
from megatron_glm.rehearsal.report import print_rehearsal
from megatron_glm.rehearsal.run import memory_limit
from tests.helpers.distributed import close_groups, run

RANKS = 8
SIZES = "--hf-config glm5.2-tiny --nproc-per-node 8 --seq-length 64 --train-iters 1 --attention-backend torch "
CASES = {  # flags, the script's data, ranks that are rehearsed: the first, a middle and the last stage
    "tp2 pp2 ep4": (
        "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 "
        "--expert-model-parallel-size 4 --global-batch-size 4 --bf16 --load nowhere",  # what is frozen is in bf16
        DataConfig,
        (0, 7),
    ),
    "cp2 pp4 vp hybrid, MTP": (
        "--context-parallel-size 2 --pipeline-model-parallel-size 4 --expert-model-parallel-size 2 "
        "--moe-token-dispatcher-type hybrid --expert-node-size 1 --global-batch-size 4 --mock-data "
        "--recompute-granularity full --bf16 --pipeline-model-parallel-layout Et|t|t|t|t|t|m|L",
        PretrainDataConfig,
        (0, 3, 7),
    ),
    "ep4, LoRA on FP8": (
        "--expert-model-parallel-size 4 --global-batch-size 8 --lora-rank 4 --lora-expert-rank 8 "
        "--base-precision fp8 --bf16 --fp8 blockwise --recompute-granularity selective",
        DataConfig,
        (5,),
    ),
    "pp2 ep4, DPO by adapters off": (
        "--pipeline-model-parallel-size 2 --expert-model-parallel-size 4 --global-batch-size 8 --lora-rank 8 "
        "--loss dpo --recompute-granularity full",
        DataConfig,
        (0, 6),
    ),
    "pp4 zero-bubble, natural routing": (
        "--pipeline-model-parallel-size 4 --pipeline-schedule zero-bubble --global-batch-size 8 "
        "--rehearse-routing natural",
        DataConfig,
        (4,),
    ),
}


def flags(case: str, rank: int, *more: str):
    words, data, _ = CASES[case]
    parser = build_parser(None, data)
    return parser.parse_args([*SIZES.split(), *words.split(), "--rehearse-rank", str(rank), *more]), data


def real(names: tuple[str, ...]) -> dict:
    """On each rank: (held, kept, calls, bytes) of each case."""
    from megatron_glm.model import router
    from megatron_glm.planner.plan import Plan
    from megatron_glm.planner.report import planned_config
    from megatron_glm.rehearsal.made_up import balance
    from megatron_glm.rehearsal.run import Part

    found, natural = {}, router.select_experts
    for name in names:
        given, data = flags(name, dist.get_rank())
        config, _ = planned_config(given, data, gpu=False)
        router.select_experts = natural
        if "rehearse_routing" not in given:
            balance(config.model.n_routed_experts)
        part = Part.of(Plan.create(config, RANKS, RANKS))
        kept, messages = part.first_step(ProcessGroup)
        found[name] = part.held_bytes(), kept, dict(messages.calls), dict(messages.bytes)
        close_groups(part.engine.groups)
    return found


def rehearsed(name: str, rank: int) -> tuple:
    from megatron_glm.rehearsal.report import as_json, lines, write
    from megatron_glm.rehearsal.run import rehearse

    dist.destroy_process_group()
    found = rehearse(*flags(name, rank))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    folder = Path(tempfile.mkdtemp())
    write(found, folder / "found.json")
    report, drawn = json.loads((folder / "found.json").read_text()), (folder / "found.png").stat().st_size
    shutil.rmtree(folder)
    assert report == json.loads(json.dumps(as_json(found)))
    return (
        found.held,
        found.kept,
        dict(found.messages.calls),
        dict(found.messages.bytes),
        report,
        [*lines(found)],
        drawn,
    )


@pytest.fixture(scope="module")
def ranks() -> list[dict]:
    return run(RANKS, real, tuple(CASES), timeout=240)


@pytest.mark.parametrize("name, rank", [(name, rank) for name, (_, _, which) in CASES.items() for rank in which])
def test_a_rehearsed_rank_is_the_real_one(ranks, name, rank):
    held, kept, calls, sent, report, lines, drawn = run(1, rehearsed, name, rank)[0]
    expected = ranks[rank][name]
    assert (held, calls, sent) == (expected[0], expected[2], expected[3])
    assert kept == expected[1] > 0

    for kind, nbytes in held.items():  # the plan's are the fullest rank's, whose shards may be a row larger
        assert report["memory"][kind] == {"planned": pytest.approx(nbytes, rel=0.03), "measured": nbytes}
    for row in report["sent"]:
        if row["axes"] and not {"tp", "tp_cp"}.intersection(row["axes"]):  # the sets of experts of few tokens vary
            assert row["sent"] == pytest.approx(row["planned"], rel=0.1 if "ep" in row["axes"][0] else 0.02), row
    kinds = {row["kind"] for row in report["actions"]}
    assert kinds == {"forward", "backward"} | ({"weight gradients"} if "zero-bubble" in name else set())
    spent, simulated = (sum(row[key] for row in report["actions"]) for key in ("seconds", "simulated"))
    assert spent == pytest.approx(simulated) and 0 < report["step"]["host_seconds"]
    assert spent <= report["step"]["seconds"] <= spent + report["step"]["after_actions"] + 1e-6
    assert report["step"]["predicted_for_the_run"] >= report["step"]["after_actions"] + spent
    saved = sum(report["save"]["files"])  # an adapter's checkpoint has no frozen weights
    whole = held["fp32 master weights"] + held["AdamW moments"]
    assert whole <= saved + 70_000 and saved <= whole + held["frozen weights"] + 400_000
    assert lines[0].startswith(f"rank {rank} of 8, pipeline rank {report['pipeline_rank']}, alone") and drawn > 10_000


@pytest.mark.parametrize(
    "words, says",
    [
        ("--rehearse-rank 8", "--rehearse-rank 8: there are ranks 0 to 7 (--nnodes x --nproc-per-node)"),
        ("--rehearse-rank -1", "--rehearse-rank -1: there are ranks 0 to 7"),
        (
            "--rehearse-rank 0 --rehearse-json gone/a.json",
            "--rehearse-json gone/a.json: the folder gone does not exist",
        ),
        ("--rehearse-rank 0 --eval-only", "--rehearse-rank with --eval-only: a rehearsal trains"),
        ("--rehearse-rank 0 --global-batch-size 3", "--global-batch-size"),
        ("--rehearse-rank 0 --dry-run", "--rehearse-rank does not go with a plan, which runs nothing"),
        ("--rehearse-rank 0 --picture a.png", "--picture a.png is of a plan: --rehearse-json FILE draws one beside"),
        ("--rehearse-json a.json", "--rehearse-json needs --rehearse-rank"),
    ],
)
def test_what_cannot_be_rehearsed_is_one_line(words, says, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["finetune_glm.py", *(SIZES if "rank" in words else "").split(), *words.split()])
    with pytest.raises(SystemExit) as stopped:
        finetune_glm.main()
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: {says}")


def test_a_rank_of_torchrun_is_no_rehearsal(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit):
        print_rehearsal(*flags("tp2 pp2 ep4", 0))
    assert "error: --rehearse-rank 0 is one process: start it without torchrun or srun" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, total, most",
    [
        ("", 139, None),  # as a plan without them is of an h100, and this GPU may be what the run is for
        ("--gpu-type h100", 139, 78.7),
        ("--gpu-type h200 --gpu-memory-gb 60", 80, 58.7),
        ("--gpu-type h200", 80, None),
    ],
)
def test_a_larger_gpu_stands_for_the_one_that_is_named(words, total, most):
    given = build_parser(None, DataConfig).parse_args([*SIZES.split(), *words.split()])
    found = memory_limit(vars(given), machine_of(given), total * GIB)
    assert found == (None if most is None else pytest.approx(most * GIB))
