"""The rehearsal of a save has the pieces that real ranks have."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import torch.distributed as dist

from megatron_glm.config import DataConfig, ModelConfig, ParallelConfig, RunConfig, TrainConfig
from tests.helpers import distributed

PARALLEL = ParallelConfig(context_parallel_size=2, expert_model_parallel_size=2)


def tool() -> ModuleType:
    file = Path(__file__).resolve().parents[2] / "tools" / "rehearse_save.py"
    spec = importlib.util.spec_from_file_location("rehearse_save", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules["rehearse_save"] = module
    spec.loader.exec_module(module)
    return module


def config() -> RunConfig:
    return RunConfig(
        model=ModelConfig.from_hf("glm5.2-tiny"),
        parallel=PARALLEL,
        data=DataConfig(data_path=("none",), seq_length=64),
        train=TrainConfig(global_batch_size=2, train_iters=1),
    )


def described(rectangles) -> set[tuple]:
    return {(r.name, tuple(r.global_shape), tuple(r.offsets), tuple(r.tensor.shape), r.owner) for r in rectangles}


def pieces() -> tuple[set[tuple], set[tuple]]:
    """(of the real modules of this rank, of the rehearsal)."""
    from megatron_glm.parallel.groups import ParallelGroups
    from megatron_glm.planner.plan import Plan
    from megatron_glm.training.checkpointing import model_rectangles, optimizer_rectangles
    from megatron_glm.training.initialize import build_chunks
    from megatron_glm.training.optimizer import build_optimizer

    groups = ParallelGroups.create(PARALLEL)
    chunks = build_chunks(config(), groups)
    optimizer = build_optimizer(config().optimizer, chunks)
    real = described(model_rectangles(chunks) + optimizer_rectangles(chunks, optimizer))
    plan = Plan.create(config(), dist.get_world_size(), 4)
    return real, described(tool().rectangles(plan, dist.get_rank()))


def test_the_rehearsal_has_the_pieces_of_real_ranks():
    for real, rehearsed in distributed.run(4, pieces):
        assert len(real) > 100 and real == rehearsed
