"""--data-parallel-sharding slabs on one GPU: NCCL in one process, and two processes over gloo."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_glm.ops.grad_sum import add_pieces
from tests.gpu.sharded_case import CASES
from tests.helpers.reference import gradient_errors

pytestmark = pytest.mark.gpu


def outcome(ranks: int, backend: str, folder: Path) -> dict:
    file = folder / f"{backend}.pt"
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    subprocess.run(
        [sys.executable, *command, "-m", "tests.gpu.sharded_case", backend, str(file)], check=True, timeout=400
    )
    return torch.load(file, weights_only=False)


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict:
    return outcome(1, "nccl", tmp_path_factory.mktemp("alone"))


def compare(results: dict, expected: dict) -> None:
    for (kind, name, bf16), actual in results.items():
        whole, tolerance = expected["whole", name, bf16], 1e-2 if bf16 else 1e-4
        assert actual.losses == pytest.approx(whole.losses, abs=tolerance), (kind, name, bf16)
        errors = gradient_errors(actual.gradients, whole.gradients)
        worst = max(errors.items(), key=lambda item: item[1])
        assert worst[1] <= (2e-2 if bf16 else 1e-3), (kind, name, bf16, worst)


@pytest.mark.timeout(500)
def test_one_process_trains_as_with_whole_weights(alone):
    assert alone["gathers while busy"] == [False, True]
    compare({key: result for key, result in alone.items() if key[0] in ("slabs", "slowly")}, alone)
    assert {key[1] for key in alone if key[0] == "slowly"} == set(CASES)


@pytest.mark.timeout(500)
def test_two_processes_on_one_gpu_train_as_one(alone, tmp_path):
    compare(outcome(2, "gloo", tmp_path), alone)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("adds", [False, True])
def test_pieces_are_added_in_their_order(dtype, count, adds):
    pieces, into = torch.randn(count, 37, 131, device="cuda").to(dtype), torch.randn(37, 131, device="cuda")
    expected = into.cpu()
    add_pieces(expected, pieces.cpu(), adds)
    add_pieces(into, pieces, adds)
    assert torch.equal(into.cpu(), expected)
