"""The tiny model learns on a GPU as on a CPU: 200 steps of pretrain_glm.py on made-up data, fp32, torch's reference."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FLAGS = (
    "--hf-config glm5.2-tiny --num-layers 4 --attention-backend torch --mock-data --seq-length 128 "
    "--global-batch-size 4 --train-iters 200 --lr 1e-3 --lr-decay-style cosine"
).split()

pytestmark = pytest.mark.gpu


def losses(log: Path, **environment: str) -> list[float]:
    command = [sys.executable, str(ROOT / "pretrain_glm.py"), *FLAGS, "--log-file", str(log)]
    subprocess.run(command, check=True, env=os.environ | environment, stdout=subprocess.DEVNULL)
    return [json.loads(line)["lm_loss"] for line in log.read_text().splitlines()]


@pytest.mark.timeout(900)
def test_two_hundred_steps_agree_with_the_cpu(tmp_path: Path):
    on_gpu, on_cpu = losses(tmp_path / "gpu.jsonl"), losses(tmp_path / "cpu.jsonl", CUDA_VISIBLE_DEVICES="")
    assert len(on_gpu) == len(on_cpu) == 200 and on_cpu[-1] < on_cpu[0] - 1
    assert on_gpu == pytest.approx(on_cpu, abs=1e-2)
