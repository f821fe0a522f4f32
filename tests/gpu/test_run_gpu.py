"""pretrain_glm.py on a GPU: the tiny model learns as on a CPU, and a preempted run ends as one that never was."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_glm.config import ModelConfig
from tests.helpers.finetune import assert_same, json_log, records, tensors

ROOT = Path(__file__).resolve().parents[2]
# At twice the rate two roundings of one CPU part by 2e-2 in 130 steps, at this one by 5e-3.
FLAGS = (
    "--hf-config glm5.2-tiny --num-layers 4 --attention-backend torch --mock-data --seq-length 128 "
    "--global-batch-size 4 --train-iters 200 --lr 5e-4 --lr-decay-style cosine"
).split()

pytestmark = pytest.mark.gpu


def losses(log: Path, **environment: str) -> list[float]:
    command = [sys.executable, str(ROOT / "pretrain_glm.py"), *FLAGS, "--log-file", str(log)]
    subprocess.run(command, check=True, env=os.environ | environment, stdout=subprocess.DEVNULL)
    return [record["lm_loss"] for record in json_log(log)]


@pytest.mark.timeout(900)
def test_two_hundred_steps_agree_with_the_cpu(tmp_path: Path):
    on_gpu, on_cpu = losses(tmp_path / "gpu.jsonl"), losses(tmp_path / "cpu.jsonl", CUDA_VISIBLE_DEVICES="")
    assert len(on_gpu) == len(on_cpu) == 200 and on_cpu[-1] < on_cpu[0] - 1
    assert on_gpu == pytest.approx(on_cpu, abs=1e-2)


# What the kernels of tilelang serve, and little else.
SERVED = dict(kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=192, v_head_dim=256, index_topk=64)
SERVED |= dict(index_n_heads=32, index_head_dim=128, num_attention_heads=8, num_hidden_layers=4)
EXACT = (
    "--hf-config model --deterministic --mock-data --seq-length 512 --global-batch-size 2 --train-iters 60 "
    "--lr 1e-3 --adam-beta2 0.95 --adam-moments-dtype bf16 --async-save --save-interval 7"
).split()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("flags", ["--attention-backend tilelang --bf16", "--attention-backend torch"])
def test_a_preempted_run_ends_as_one_that_never_was(tmp_path: Path, flags: str):
    """Bit for bit with --deterministic: SIGTERM, the save that it makes, saves in the background before it."""
    (tmp_path / "model").mkdir()
    shape = ModelConfig.from_hf("glm5.2-tiny", **SERVED).to_hf()
    (tmp_path / "model/config.json").write_text(json.dumps(shape))
    command = [sys.executable, str(ROOT / "pretrain_glm.py"), *EXACT, *flags.split()]

    def start(name: str, *more: str) -> subprocess.Popen:
        files = ["--save", name, "--log-file", f"{name}.jsonl", *more]
        return subprocess.Popen([*command, *files], cwd=tmp_path, stdout=subprocess.DEVNULL)

    assert start("whole").wait() == 0
    process = start("broken")
    while process.poll() is None and len(seen(tmp_path / "broken.jsonl")) < 10:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 75 and 10 <= len(seen(tmp_path / "broken.jsonl")) < 60
    assert start("broken", "--load", "broken").wait() == 0
    assert records(tmp_path / "whole.jsonl") == records(tmp_path / "broken.jsonl")
    assert_same(tensors(tmp_path / "whole", 60), tensors(tmp_path / "broken", 60))


def seen(log: Path) -> list[str]:
    """Whole lines of iterations; the run may be writing one."""
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    return [line for line in lines if line.endswith("\n") and "iteration" in json.loads(line)]
