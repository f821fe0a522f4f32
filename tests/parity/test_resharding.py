"""A run that changes its layout after every step, through checkpoints, follows the one that never does."""

from __future__ import annotations

import dataclasses
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_glm.config import (
    CheckpointConfig,
    DataConfig,
    KernelConfig,
    LoggingConfig,
    LossConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
)
from megatron_glm.data.finetuning import Documents, PackedDataset
from megatron_glm.data.loader import MicroBatches
from tests.helpers import distributed
from tests.helpers.finetune import json_log
from tests.helpers.reference import single_groups
from tests.parity.layouts import SEQ_LENGTH, assemble, parity_model

TP2_EP2_PP2_VP2 = ParallelConfig(
    tensor_model_parallel_size=2,
    sequence_parallel=True,
    expert_model_parallel_size=2,
    pipeline_model_parallel_size=2,
    num_layers_per_virtual_pipeline_stage=1,
)
# ranks, layout; each loads what the one before has saved
LAYOUTS = [
    (4, TP2_EP2_PP2_VP2),
    (4, ParallelConfig(context_parallel_size=2, expert_model_parallel_size=4)),
    (4, TP2_EP2_PP2_VP2),
    (4, ParallelConfig(reshard_after_forward=False, reshard_experts_after_forward=False)),
    (4, ParallelConfig(tensor_model_parallel_size=4, sequence_parallel=True, expert_model_parallel_size=2)),
    (4, ParallelConfig(pipeline_model_parallel_size=4, pipeline_model_parallel_layout="Et|tt|t,m|L")),
    (4, ParallelConfig(context_parallel_size=4, expert_model_parallel_size=2)),
    (2, ParallelConfig(pipeline_model_parallel_size=2, pipeline_model_parallel_layout="Et|tttL")),
    (1, ParallelConfig()),
    (2, ParallelConfig(pipeline_model_parallel_size=2, pipeline_model_parallel_layout="Et|tt|tm|L")),
    (8, dataclasses.replace(TP2_EP2_PP2_VP2, context_parallel_size=2, num_layers_per_virtual_pipeline_stage=None)),
    (4, ParallelConfig(pipeline_model_parallel_size=2, expert_model_parallel_size=2, grad_sync="every")),
]


def run_config(folder: Path, parallel: ParallelConfig, load: bool, **train) -> RunConfig:
    model, save = parity_model(4), str(folder)
    return RunConfig(
        model=model,
        parallel=parallel,
        kernels=KernelConfig("torch", loss_chunk_size=24),
        optimizer=OptimizerConfig(lr=1e-4, lr_decay_style="constant", moe_router_bias_update_rate=1e-3),
        data=DataConfig(data_path=("none",), seq_length=SEQ_LENGTH),
        checkpoint=CheckpointConfig(save=save, load=save if load else None, async_save=load, keep_last=3),
        losses=LossConfig(mtp_num_steps=2),
        train=TrainConfig(global_batch_size=4, train_iters=len(LAYOUTS), **train),
        logging=LoggingConfig(log_file=f"{folder}.jsonl"),
    )


def documents(vocab_size: int) -> Documents:
    """Thirty documents of up to a pack; not an epoch of the run is like another."""
    random = np.random.default_rng(0)
    lengths = random.integers(5, SEQ_LENGTH + 1, 30)
    total = lengths.sum()
    offsets = np.concatenate(([0], lengths.cumsum()))
    return Documents(random.integers(0, vocab_size, total).astype(np.int32), random.random(total) < 0.8, offsets)


def gathered(chunks: list, optimizer: torch.optim.Optimizer, gloo) -> dict[str, Tensor]:
    """On rank 0 every global parameter, buffer and moment; copies on several ranks have been compared."""
    from megatron_glm.training.optimizer import trained_parameters

    state = [(name, tensor, chunk.shards[name]) for chunk in chunks for name, tensor in chunk.state_dict().items()]
    for name, parameter, shard in trained_parameters(chunks):
        moments = optimizer.state[parameter]
        state += [(f"{moment} {name}", moments[moment], shard) for moment in ("exp_avg", "exp_avg_sq")]
        state.append((f"step {name}", moments["step"], dataclasses.replace(shard, global_shape=(), offsets=())))
    return assemble(state, gloo, copies_agree=True)


def leg(config: RunConfig, groups) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """One start of the program: the whole state after loading, and at the end."""
    from megatron_glm.training.checkpointing import load_checkpoint
    from megatron_glm.training.engine import Engine
    from megatron_glm.training.initialize import build_chunks
    from megatron_glm.training.loop import train
    from megatron_glm.training.optimizer import build_optimizer

    data = MicroBatches(PackedDataset(documents(config.model.vocab_size), SEQ_LENGTH, "best-fit", "truncate", 1234))
    chunks = build_chunks(config, groups)
    optimizer = build_optimizer(config.optimizer, chunks)
    progress = load_checkpoint(config, groups, chunks, optimizer, data)
    start = gathered(chunks, optimizer, groups.gloo_world)
    train(Engine(config, groups, chunks), optimizer, data, {}, progress)
    return start, gathered(chunks, optimizer, groups.gloo_world)


def legs(folder: Path, layouts: list[ParallelConfig], load: bool) -> list:
    from megatron_glm.parallel.groups import ParallelGroups
    from megatron_glm.training.initialize import pipeline_layout

    results = []
    for parallel in layouts:
        config = run_config(folder, parallel, load, exit_interval=1)
        layout = pipeline_layout(config, parallel.data_parallel_size(dist.get_world_size()))
        groups = ParallelGroups.create(parallel, embedding=layout.embedding_ranks(predicts=True))
        results.append(leg(config, groups))
        distributed.close_groups(groups)
        load = True
    return results


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[list, list[dict], list[dict]]:
    """States at the start and end of every leg; the log of the legs; the log of one uninterrupted process."""
    folder = tmp_path_factory.mktemp("resharding")
    leg(run_config(folder / "whole", ParallelConfig(), load=False), single_groups())
    states = []
    for ranks, group in groupby(LAYOUTS, lambda item: item[0]):
        layouts = [parallel for _, parallel in group]
        states += distributed.run(ranks, legs, folder / "legs", layouts, bool(states), timeout=600)[0]
    return states, *(json_log(folder / name) for name in ("legs.jsonl", "whole.jsonl"))


@pytest.mark.parametrize("pair", range(len(LAYOUTS) - 1))
def test_every_bit_of_the_state_survives_a_change_of_layout(runs, pair):
    """Masters, both moments, their step count and the router's bias; the copies of MTP's embedding agree."""
    states, _, _ = runs
    saved, loaded = states[pair][1], states[pair + 1][0]
    assert saved.keys() == loaded.keys() and any(name.startswith("layers.4.") for name in saved)
    different = [name for name in saved if not torch.equal(saved[name], loaded[name])]
    assert not different, f"{different[:3]} … of {len(different)}"
    assert (saved["step norm.weight"] == pair + 1).all() and saved["exp_avg_sq norm.weight"].any()


def test_the_loss_is_that_of_the_uninterrupted_run(runs):
    """Which also says that every step was dealt the same data."""
    _, log, whole = runs
    assert [record["iteration"] for record in log] == list(range(1, len(LAYOUTS) + 1))
    for record, expected in zip(log, whole, strict=True):
        assert record["loss_tokens"] == expected["loss_tokens"]
        assert record["lm_loss"] == pytest.approx(expected["lm_loss"], rel=1e-5), record["iteration"]
    assert whole[-1]["lm_loss"] < whole[0]["lm_loss"] - 1e-3  # a run that stood still would show nothing
