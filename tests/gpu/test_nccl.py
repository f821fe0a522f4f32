"""On several GPUs, through NCCL, a layout trains as one GPU does."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.nccl_layouts import FEW, LAYOUTS
from tests.helpers.reference import gradient_errors

pytestmark = pytest.mark.gpu


def outcome(ranks: int, folder: Path) -> dict:
    file = folder / f"{ranks}.pt"
    command = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
        "-m",
        "tests.gpu.nccl_layouts",
    ]
    subprocess.run([sys.executable, *command, str(file)], check=True, timeout=300)
    return torch.load(file, weights_only=False)


@pytest.fixture(scope="module")
def one_gpu(tmp_path_factory):
    return outcome(1, tmp_path_factory.mktemp("one"))


@pytest.mark.parametrize("ranks", [2, 4])
def test_layouts_equal_one_gpu(ranks, one_gpu, tmp_path):
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    results = outcome(ranks, tmp_path)
    assert results["gathers while busy"] == [False, True]
    for name in LAYOUTS[ranks]:
        same_model = FEW if name == FEW else "one"
        for bf16, tolerance in ((False, 1e-4), (True, 1e-2)):
            expected, actual = one_gpu[same_model, bf16], results[name, bf16]
            assert actual.losses == pytest.approx(expected.losses, abs=tolerance), (name, bf16)
        errors = gradient_errors(results[name, False].gradients, one_gpu[same_model, False].gradients)
        assert max(errors.values()) <= 1e-3, (name, sorted(errors.items(), key=lambda item: -item[1])[:5])
