"""Runs training steps in any layout and puts the results together, to be compared with one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_glm.config import KernelConfig, ModelConfig, OptimizerConfig, ParallelConfig, RunConfig, TrainConfig
from megatron_glm.data.packing import PackedBatch
from megatron_glm.model.init import initialize_weights
from megatron_glm.parallel.groups import ParallelGroups
from megatron_glm.parallel.shard import ShardInfo
from tests.helpers.distributed import close_groups
from tests.helpers.reference import recorded, single_groups, small_config

SEQ_LENGTH = 64
GAP = 1e-5


@dataclass
class Result:
    """On rank 0: everything of the run by canonical name; on the others: nothing."""

    losses: list[float] = field(default_factory=list)
    others: list[dict[str, float]] = field(default_factory=list)  # of each step: all but the main loss, by name
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)  # of the first step
    parameters: dict[str, Tensor] = field(default_factory=dict)  # after the last step, buffers included
    gap: float = float("inf")


def parity_model(layers: int, **changes) -> ModelConfig:
    """IndexShare, MoE and MTP; the vocabulary (98) needs padding at TP 4, all else divides by what the grid asks."""
    return small_config(
        num_hidden_layers=layers,
        vocab_size=98,
        indexer_types=tuple(("full", "shared", "shared", "full", "shared")[i % 5] for i in range(layers)),
        mlp_layer_types=("dense",) + ("sparse",) * (layers - 1),
        num_nextn_predict_layers=1,
        max_position_embeddings=SEQ_LENGTH,
        **changes,
    )


def run_config(
    model: ModelConfig, parallel: ParallelConfig, packs: int, seed: int, micro_batch_size: int = 1
) -> RunConfig:
    return RunConfig(
        model=model,
        parallel=parallel,
        kernels=KernelConfig("torch", loss_chunk_size=24),
        optimizer=OptimizerConfig(lr=1e-3, adam_eps=1e-3, clip_grad=0.5, moe_router_bias_update_rate=1e-3),
        data=replace(RunConfig(model=model).data, data_path=("none",), seq_length=SEQ_LENGTH),
        train=TrainConfig(micro_batch_size=micro_batch_size, global_batch_size=packs, train_iters=3, seed=seed),
    )


PACKS = (20, 1, 11), (64,), (7, 30, 9, 18), (40, 24)  # documents of the packs; every fourth is half padding


def pack(
    model: ModelConfig, seed: int, step: int, index: int, packs: tuple[tuple[int, ...], ...] = PACKS
) -> PackedBatch:
    """One of the packs, in turn; the masks leave few labels or many."""
    generator = torch.Generator().manual_seed(seed * 100003 + step * 101 + index)
    lengths = packs[index % 4]
    used = sum(lengths)
    tokens = torch.randint(0, model.vocab_size, (SEQ_LENGTH,), generator=generator)
    labels = tokens.roll(-1)
    labels[torch.tensor(lengths, dtype=torch.int64).cumsum(0) - 1] = -100
    labels[used:] = -100
    mask = (labels != -100) & (torch.rand(SEQ_LENGTH, generator=generator) < (0.5, 0.2, 1.0, 0.9)[index % 4])
    position = torch.cat([torch.arange(n) for n in (*lengths, SEQ_LENGTH - used)])
    position[used:] = 0
    return PackedBatch(tokens, labels, mask, position, lengths, SEQ_LENGTH - used)


class Recorder:
    """Stands in for the optimizer to keep the gradients that reach it."""

    def __init__(self, optimizer: torch.optim.Optimizer, capture) -> None:
        self.optimizer, self.capture = optimizer, capture
        self.param_groups = optimizer.param_groups

    def step(self, scale: float) -> None:
        self.capture()
        self.optimizer.step(scale)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


def train(
    config: RunConfig, steps: int = 3, make_pack=pack, copies_agree: bool = True, draw=initialize_weights
) -> Result:
    """Train `steps` steps in this process group and gather what came out on rank 0."""
    from megatron_glm.training.engine import Engine
    from megatron_glm.training.initialize import build_chunks, pipeline_layout
    from megatron_glm.training.optimizer import build_optimizer
    from megatron_glm.training.step import train_step

    config.check(dist.get_world_size())
    layout = pipeline_layout(config, config.parallel.data_parallel_size(dist.get_world_size()))
    groups = ParallelGroups.create(
        config.parallel, embedding=layout.embedding_ranks(predicts=config.losses.mtp_steps > 0)
    )
    chunks = build_chunks(config, groups, draw)
    engine, result = Engine(config, groups, chunks), Result()

    def capture() -> None:
        if not result.losses:
            found = [(n, p.grad, c.shards[n]) for c in chunks for n, p in c.named_parameters() if p.grad is not None]
            result.gradients = assemble(found, groups.gloo_world, copies_agree)

    optimizer = Recorder(build_optimizer(config.optimizer, chunks), capture)
    packs, dp = config.train.global_batch_size, groups.dp
    with recorded() as seen:
        for step in range(steps):
            mine = range(dp.rank(), packs, dp.size())
            batches = [make_pack(config.model, config.train.seed, step, index) for index in mine]
            outcome = train_step(engine, optimizer, batches, config.optimizer.lr)
            result.losses.append(outcome.losses["lm"])
            result.others.append({name: loss for name, loss in outcome.losses.items() if name != "lm"})
            result.norms.append(outcome.grad_norm)
    result.gap = seen.gap
    found = [(n, t, c.shards[n]) for c in chunks for n, t in c.state_dict().items()]
    result.parameters = assemble(found, groups.gloo_world, copies_agree)
    close_groups(groups)
    return result


def assemble(
    tensors: Sequence[tuple[str, Tensor, ShardInfo]], gloo: dist.ProcessGroup, copies_agree: bool
) -> dict[str, Tensor]:
    """Global tensors on rank 0 from all ranks' rectangles.

    Copies of the same rectangle must agree bit for bit, or with `copies_agree` False the last one is taken.
    """
    from megatron_glm.parallel.fsdp import rectangle

    mine = []
    for name, tensor, info in tensors:
        part = rectangle(name, tensor, info)
        # As numpy arrays, because pickling hundreds of small tensors costs more than the training step.
        mine.append((name, part.global_shape, part.offsets, part.tensor.cpu().numpy().copy()))
    everyone = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, everyone, group=gloo)
    whole: dict[str, Tensor] = {}
    for name, shape, offsets, data in (item for rank in everyone or [] for item in rank):
        target = whole.setdefault(name, torch.full(shape, float("nan")))
        data = torch.from_numpy(data)
        target = target[tuple(slice(o, o + n) for o, n in zip(offsets, data.shape, strict=True))]
        known = ~target.isnan()
        if copies_agree and not torch.equal(target[known], data[known]):
            raise AssertionError(f"{name}: copies differ by {(target[known] - data[known]).abs().max()}")
        target.copy_(data)
    for name, tensor in whole.items():
        if tensor.isnan().any():
            raise AssertionError(f"{name}: {int(tensor.isnan().sum())} elements are on no rank or not a number")
    return whole


def train_layouts(
    cases: list[tuple[str, RunConfig]], make_pack=pack, draw=initialize_weights, steps: int = 3
) -> dict[str, Result | str]:
    """One spawn, many layouts: name -> result. A warning that a user would see fails."""
    with warnings.catch_warnings(record=True) as said:
        results = {name: train(config, steps, make_pack, draw=draw) for name, config in cases}
    assert not said, {str(warning.message) for warning in said}
    return results


def clear_reference(
    configured: Callable[[int], RunConfig], make_pack=pack, draw=initialize_weights, steps: int = 3
) -> tuple[int, Result]:
    """One process, `configured` with the first seed whose selections are clear by GAP in all steps."""
    single_groups()
    for seed in range(20):
        result = train(configured(seed), steps, make_pack, draw=draw)
        if result.gap >= GAP:
            return seed, result
    raise AssertionError(f"no seed of 20 gives selections that are clear by {GAP}")
