"""On two GPUs the hybridep dispatcher gives what alltoall gives."""

import json
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_glm.config import ParallelConfig
from megatron_glm.ops.experts import grouped_mlp
from megatron_glm.parallel.dispatch import DISPATCHERS
from megatron_glm.parallel.dispatch.local import DispatchContext
from megatron_glm.parallel.groups import ParallelGroups

pytestmark = pytest.mark.gpu
RANKS, T, E, K, D, HIDDEN = 2, 512, 16, 4, 1024, 256
CASES = ("uniform", "skewed", "idle expert", "padding", "unequal", "nothing")


def tokens(case: str, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(10 * CASES.index(case) + rank)
    t = T if case != "unequal" else (T, 3)[rank]
    scores = torch.rand(t, E, device="cuda")
    if case == "skewed":
        scores[:, 3] += 1
    if case == "idle expert":
        scores[:, 5] = -1
    ids = scores.topk(K).indices
    if case == "padding":
        ids[-t // 3 :] = -1
    if case == "nothing":
        ids[:] = -1
    return torch.randn(t, D, device="cuda", dtype=torch.bfloat16), ids, torch.rand(t, K, device="cuda")


def results(name: str, context: DispatchContext, case: str) -> list[torch.Tensor]:
    """Output and the gradients of x, weights, gate_up and down."""
    rank = context.groups.ep.rank()
    x, ids, weights = tokens(case, rank)
    probe = torch.randn_like(x)
    torch.manual_seed(rank)
    shapes = (E // RANKS, 2 * HIDDEN, D), (E // RANKS, D, HIDDEN)
    matrices = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) / shape[-1] ** 0.5 for shape in shapes]
    leaves = [leaf.requires_grad_() for leaf in (x, weights, *matrices)]
    dispatcher = DISPATCHERS[name](context)
    rows, row_weights, counts, handle = dispatcher.dispatch(x, ids, weights)
    y = dispatcher.combine(grouped_mlp(rows, row_weights, counts, *matrices), handle)
    return [y.detach(), *torch.autograd.grad(y, leaves, probe)]


def compare_on_this_rank() -> dict[str, list[float]]:
    groups = ParallelGroups.create(ParallelConfig(expert_model_parallel_size=RANKS))
    plain = DispatchContext(groups, E, K, D, T, torch.bfloat16)
    errors = {}
    for multiple in (1, 128):
        for case in CASES:
            pairs = zip(
                results("hybridep", replace(plain, row_multiple=multiple), case),
                results("alltoall", plain, case),
                strict=True,
            )
            norms = [((a.float() - b.float()).norm(), b.float().norm()) for a, b in pairs]
            errors[f"{case}, {multiple}"] = [(a / b.clamp(min=1e-6)).item() for a, b in norms]
    return errors


def test_equals_alltoall(tmp_path):
    if torch.cuda.device_count() < RANKS or find_spec("hybrid_ep_cpp") is None:
        pytest.skip(f"needs {RANKS} GPUs and DeepEP's HybridEPBuffer")
    command = ["torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", "-m", "tests.gpu.test_hybridep"]
    subprocess.run([sys.executable, "-m", *command, str(tmp_path)], check=True, timeout=300)
    for rank in range(RANKS):
        errors = json.loads((tmp_path / f"{rank}.json").read_text())
        assert len(errors) == 2 * len(CASES)
        for case, (y, *gradients) in errors.items():
            assert y < 1e-2 and max(gradients) < 2e-2, (rank, case, y, gradients)


if __name__ == "__main__":
    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_rank())
    found = compare_on_this_rank()
    Path(sys.argv[1], f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
