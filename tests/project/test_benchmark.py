"""tools/benchmark.py step: the same command on a CPU, for its numbers' meaning, not their size."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_glm.config import ModelConfig
from megatron_glm.config.flops import training_flops

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
TINY = "--hf-config glm5.2-tiny --num-experts 8 --seq-length 32 --rounds 1".split()


def benchmark(*words: str, ranks: int = 1) -> subprocess.CompletedProcess:
    launch = (
        [sys.executable] if ranks == 1 else [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    )
    command = [*launch, str(ROOT / "tools" / "benchmark.py"), "step", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def test_one_json_line_with_consistent_numbers():
    done = benchmark(*TINY, "--with-optimizer", "--profile", "--routing", "balanced", "--recompute-granularity", "full")
    assert done.returncode == 0, done.stderr
    [line] = done.stdout.splitlines()
    result = json.loads(line)
    assert (result["tokens"], result["ranks"], result["recompute"]) == (32, 1, "full")
    seconds = result["ms_forward_backward"] / 1e3
    assert result["tokens_per_second_per_gpu"] == pytest.approx(32 / seconds)
    model = ModelConfig.from_hf("glm5.2-tiny", num_hidden_layers=4, n_routed_experts=8, num_nextn_predict_layers=0)
    assert model.mlp_layer_types == ("dense", "sparse", "sparse", "sparse"), "the tiny preset has the shape measured"
    assert result["tflops_per_gpu"] == pytest.approx(training_flops(model, [32]) / seconds / 1e12)
    assert result["share_of_matmul_rate"] == pytest.approx(result["tflops_per_gpu"] / result["matmul_tflops"])
    assert result["ms_forward"] > 0 and result["ms_step"] > 0 and sum(result["kernels_ms"].values()) > 0
    assert result["peak_bytes"] is None, "a CPU has no device memory"


def test_it_runs_under_torchrun_in_a_layout():
    done = benchmark(*TINY, "--pipeline-model-parallel-size", "2", "--global-batch-size", "4", "--profile", ranks=2)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["ranks"], result["micro_batches"], result["tokens"]) == (2, 4, 128)
    assert result["ms_forward"] is None, "a pipeline's forwards and backwards overlap"
    assert 0 < result["pipeline_idle"] < 1 and 0 < result["pipeline_idle_simulated"] < 1


def test_wrong_flags_are_named():
    done = benchmark("--dense-layers", "9")
    assert (done.returncode, done.stderr) == (2, "error: --dense-layers is 9, the model has 4 layers\n")
    assert "unknown flag --seq-lenght; did you mean --seq-length?" in benchmark("--seq-lenght", "4").stderr


def test_the_ops_that_can_be_named_are_those_that_are_measured():
    from benchmark import OPS
    from kernel_cases import CASES

    assert OPS == tuple(CASES)


def test_kernels_by_kind():
    from step_case import by_kind

    spans = [
        ("nvjet_gemm_x", 0, 10),
        ("cudnn_sparse_attn_bwd", 8, 30),
        ("elementwise_add", 50, 60),
        ("Memcpy DtoD", 60, 61),
        ("kernel_cutlass_sparse_attentionindexer_forward", 61, 63),
        ("ncclDevKernel_SendRecv", 5, 12),
        ("ncclDevKernel_SendRecv", 28, 40),
        ("ncclDevKernel_AllGather", 62, 64),
    ]
    found = by_kind([(name, 1e3 * start, 1e3 * end) for name, start, end in spans])
    assert found == {
        "attention": 22.0,
        "GEMM": 10.0,
        "elementwise": 10.0,
        "index": 2.0,
        "copies and casts": 1.0,
        "communication": 21.0,
        "communication alone": 11.0,
        "idle": 10.0,
        "from first to last": 64.0,
    }


def test_balanced_routing_chooses_each_expert_equally_often(monkeypatch: pytest.MonkeyPatch):
    import torch
    from step_case import balance

    from megatron_glm.model import router

    monkeypatch.setattr(router, "select_experts", router.select_experts)
    balance(8)
    ids = router.select_experts(torch.randn(12, 8), 2, 1, 1)
    assert ids.shape == (12, 2) and ids.flatten().bincount().tolist() == [3] * 8
    assert all(len(set(row)) == 2 for row in ids.tolist())


def test_the_step_has_its_own_weights_and_documents():
    from benchmark import step_parser
    from step_case import configured

    for flag in ("--load", "--load-hf", "--save", "--data-path", "--log-file"):
        with pytest.raises(ValueError, match=f"{flag} has no use here"):
            configured(step_parser().parse_args([flag, "somewhere"]))
    model = configured(step_parser().parse_args([])).model
    assert (model.num_hidden_layers, model.n_routed_experts, model.mlp_layer_types[0]) == (4, 32, "dense")


def test_the_picture_of_kernel_rates_has_the_documented_numbers(tmp_path):
    """docs/kernels.json is the table of the page as data, which the picture is drawn from."""
    from plot_kernels import bars, read

    file = ROOT / "docs" / "kernels.json"
    charts = bars(read(file))
    assert charts["index topk"][:2] == [("tilelang, 4096 tokens", 326, True), ("cuDNN, 4096 tokens", 276, False)]
    page = (ROOT / "docs" / "performance.md").read_text()
    table = page[page.index("## The attention kernels") :].split("\n\n")[3]
    for rows in charts.values():
        assert all(re.search(rf"\b{rate}\b", table) for _, rate, _ in rows), rows
    drawn = plot(file, "--save", tmp_path / "rates.png")
    assert drawn.returncode == 0 and (tmp_path / "rates.png").stat().st_size > 10_000


@pytest.mark.parametrize("text", ["", "{}", '{"results": [{"tflops": 1}]}', '{"results": [], "device": "x"}'])
def test_what_is_no_result_is_refused(tmp_path, text):
    (tmp_path / "k.json").write_text(text)
    done = plot(tmp_path / "k.json", "--save", tmp_path / "rates.png")
    assert done.returncode == 2 and not (tmp_path / "rates.png").exists()
    assert done.stderr == f"error: {tmp_path / 'k.json'} is no result of benchmark.py kernels --json\n"


def plot(*words) -> subprocess.CompletedProcess:
    command = [sys.executable, ROOT / "tools/plot_kernels.py", *words]
    return subprocess.run(command, capture_output=True, text=True)
