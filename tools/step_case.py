"""The training step that `benchmark.py step` measures: weights and documents at random, the reference case."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from measure import documents_of, matmul_rate

from megatron_glm.config import PretrainDataConfig, RunConfig, flag_name
from megatron_glm.config.flags import resolve
from megatron_glm.config.plan_flags import PLAN_FLAGS
from megatron_glm.parallel.fsdp import local, reduce_partial_gradients
from megatron_glm.parallel.groups import ParallelGroups
from megatron_glm.planner.machine import H200
from megatron_glm.planner.memory import rank_memory
from megatron_glm.planner.plan import Plan
from megatron_glm.planner.time import calibration, step_time, unpredictable
from megatron_glm.rehearsal.made_up import balance, draw, packs
from megatron_glm.training.engine import Engine
from megatron_glm.training.initialize import build_chunks, choose_backend, initialize
from megatron_glm.training.optimizer import build_optimizer
from megatron_glm.training.step import count, train_step

REFERENCE = {"hf_config": "glm5.2", "num_hidden_layers": 4, "n_routed_experts": 32, "num_nextn_predict_layers": 0}
READ_AND_WRITTEN = {"load", "load_hf", "save", "data_path", "train_data_path", "valid_data_path", "test_data_path"}
READ_AND_WRITTEN |= {"log_file", "tensorboard_dir", "wandb_project", "eval_only", *PLAN_FLAGS}
FORMULA = (
    "3 x forward of the trained parts + forward of the index scores, multiply-add = 2, attention in its non-absorbed "
    "form on min(position + 1, index_topk) keys, recomputation not counted (megatron_glm/config/flops.py)"
)
IN_A_ROW = 3  # measured steps that follow each other without a wait for the device
# The first kind whose words a kernel's name holds; what holds none is elementwise.
KINDS = {
    "index": ("index_score", "indexer", "top_k", "mqa_logits"),  # before attention: cuDNN's are named after both
    "attention": ("sparse_attn", "flash", "fmha", "sdpa", "mla", "attention", "splitkv"),
    "grouped GEMM": ("grouped", "group_gemm", "ptr_array", "ptrarray", "groupproblem"),
    "GEMM": ("gemm", "nvjet", "cutlass", "xmma", "wgmma"),
    "communication": ("nccl",),
    "copies and casts": ("widened", "memcpy", "memset", "copy", "cat", "fill", "index_select", "gather", "scatter"),
}


def configured(flags: argparse.Namespace) -> RunConfig:
    """The configuration of these flags, completed by the reference case, checked for the ranks that are here."""
    bf16 = torch.cuda.is_available() or getattr(flags, "attention_backend", "auto") in ("cudnn", "tilelang")
    own = {"mock_data": True, "train_iters": 1, "profile_step_start": 0, "bf16": bf16, "mtp_num_steps": 0}
    given = REFERENCE | own | vars(flags)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if useless := sorted(READ_AND_WRITTEN & vars(flags).keys()):
        raise ValueError(f"{flag_name(useless[0])} has no use here: the benchmark's weights and documents are random")
    if given.get("rounds", 1) < 1:
        raise ValueError(f"--rounds is {given['rounds']}; it must be at least 1")
    if "held_multiprocessors" in given and not (given["held_multiprocessors"] > 0 and torch.cuda.is_available()):
        raise ValueError(f"--held-multiprocessors {given['held_multiprocessors']}: at least 1, and it needs a GPU")
    config = resolve(argparse.Namespace(**given), PretrainDataConfig)
    layers, dense = config.model.num_hidden_layers, given.get("dense_layers", 1)
    if not 0 <= dense <= layers:
        raise ValueError(f"--dense-layers is {dense}, the model has {layers} layers")
    kinds = ("dense",) * dense + ("sparse",) * (layers - dense)
    config = replace(config, model=replace(config.model, mlp_layer_types=kinds))
    if "global_batch_size" not in given:
        dp = config.parallel.data_parallel_size(world)
        batch = config.train.micro_batch_size * dp * config.parallel.pipeline_model_parallel_size
        config = replace(config, train=replace(config.train, global_batch_size=batch))
    config = choose_backend(config)
    config.check(world)
    return config


class Bench:
    """The model of this rank and a global batch of random documents."""

    def __init__(self, config: RunConfig, kind: str) -> None:
        self.config = config
        self.groups: ParallelGroups = initialize(config)
        self.chunks = build_chunks(config, self.groups, draw)
        self.engine = Engine(config, self.groups, self.chunks)
        lengths = documents_of(config.data.seq_length) if kind == "short" else (config.data.seq_length,)
        dp = self.groups.dp
        self.batches = packs(config, dp.rank(), config.micro_batches(dp.size()), lengths)
        self.counts = count(config, self.groups, self.batches)

    def forward_backward(self) -> None:
        self.engine.forward_backward(self.batches, self.counts.losses)
        reduce_partial_gradients(self.chunks, self.engine.groups.embedding)

    def whole_step(self, optimizer: torch.optim.Optimizer) -> None:
        rate = self.config.optimizer.lr
        train_step(self.engine, optimizer, self.batches, rate, self.counts)

    def parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for chunk in self.chunks for parameter in chunk.parameters()]

    def drop_gradients(self) -> None:
        for parameter in self.parameters():
            parameter.grad = None

    def held_bytes(self) -> int:
        """Weights and gradients of this rank, as they stay between steps."""
        tensors = [t for p in self.parameters() for t in (p, p.grad) if t is not None]
        return sum(local(tensor).nbytes for tensor in tensors)

    def slowest(self, work: Callable[[], object], rounds: int) -> float:
        """Median seconds of one work of the slowest rank, all of which start together.

        A round is IN_A_ROW works, so that the host runs ahead of the device as far as it does in training.
        """
        seconds = []
        for _ in range(rounds):
            wait_for_device()
            dist.barrier(self.groups.gloo_world)
            begin = time.perf_counter()
            for _ in range(IN_A_ROW):
                work()
            wait_for_device()
            seconds.append((time.perf_counter() - begin) / IN_A_ROW)
        worst = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(worst, dist.ReduceOp.MAX, self.groups.gloo_world)
        return statistics.median(worst.tolist())

    def forwards(self, step: Callable[[], object], rounds: int) -> tuple[float, int | None]:
        """(median seconds that a step spends in forwards, bytes that one leaves allocated) of the only chunk."""
        spent, kept = [], []

        def note(sign: int) -> None:
            wait_for_device()
            spent.append(sign * time.perf_counter())
            kept.append(sign * torch.cuda.memory_allocated() if torch.cuda.is_available() else 0)

        begin = self.chunks[0].register_forward_pre_hook(lambda *_: note(-1), prepend=True)
        end = self.chunks[0].register_forward_hook(lambda *_: note(1))
        seconds = []
        for _ in range(rounds):
            spent.clear()
            step()
            seconds.append(sum(spent))
        begin.remove()
        end.remove()
        return statistics.median(seconds), sum(kept[-2:]) if torch.cuda.is_available() else None


def wait_for_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure_step(config: RunConfig, flags: argparse.Namespace) -> dict:
    """Everything that the benchmark reports of one configuration; times are medians of the slowest rank."""
    given = vars(flags)
    documents, routing, rounds = given.get("documents", "one"), given.get("routing", "natural"), given.get("rounds", 7)
    if routing == "balanced":
        balance(config.model.n_routed_experts)
    if "write_calibration" in given:  # before it takes minutes: whether there can be one
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        calibration(Plan.create(config, ranks, ranks), H200, 1.0, 1.0)
    bench = Bench(config, documents)
    on_gpu = torch.cuda.is_available()
    for _ in range(2):  # compiles, fills the allocator
        bench.drop_gradients()
        bench.forward_backward()
    held = bench.held_bytes()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()

    def step() -> None:
        bench.drop_gradients()
        bench.forward_backward()

    both = bench.slowest(step, rounds)
    peak = torch.cuda.max_memory_allocated() if on_gpu else None
    forward, kept = bench.forwards(step, rounds) if bench.groups.pp.size() == 1 else (None, None)
    table = kernel_table(step) if config.logging.profile else None
    rate, ranks = matmul_rate(), dist.get_world_size()
    plan, place = Plan.create(config, ranks, min(ranks, 8)), bench.groups.pp.rank()
    tokens, flops = bench.counts.tokens, bench.counts.flops
    predicted = step_time(plan, H200, optimizer=False).seconds if unpredictable(config) is None else None
    result = {
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "ranks": ranks,
        "attention_backend": config.kernels.attention_backend,
        "recompute": config.parallel.recompute_granularity,
        "seq_length": config.data.seq_length,
        "documents": documents,
        "routing": routing,
        "micro_batches": len(bench.batches),
        "tokens": tokens,
        "tokens_per_second_per_gpu": tokens / both / ranks,
        "ms_forward_backward": both * 1e3,
        "ms_forward": None if forward is None else forward * 1e3,
        "ms_predicted_for_h200": predicted * 1e3 if predicted else None,
        "ms_backward": None if forward is None else (both - forward) * 1e3,
        "tflops_per_gpu": flops / both / ranks / 1e12,
        "flops_formula": FORMULA,
        "matmul_tflops": rate,
        "share_of_matmul_rate": flops / both / ranks / 1e12 / rate,
        "fp8": config.fp8.blockwise,
        "planned_bytes": rank_memory(plan, place),
        "planned_kept_by_a_forward": plan.kept_by_a_forward(place),
        "bytes_kept_by_a_forward": kept,
        "peak_bytes": peak,
        "peak_bytes_above_weights_and_gradients": None if peak is None else peak - held,
    }
    if "with_optimizer" in given:
        optimizer = build_optimizer(config.optimizer, bench.chunks)
        whole = bench.slowest(lambda: bench.whole_step(optimizer), rounds)
        result |= {"ms_step": whole * 1e3, "ms_optimizer": (whole - both) * 1e3}
        result["tokens_per_second_per_gpu_with_optimizer"] = tokens / whole / ranks
    if "held_multiprocessors" in given:
        from held import held_times  # imports triton

        fewer, fp8 = config.parallel.communication_sms or 8, config.fp8.blockwise
        measured = held_times(step, lambda work: bench.slowest(work, rounds), given["held_multiprocessors"], fewer, fp8)
        result["ms_held"] = measured
    if "write_calibration" in given:
        assert forward is not None
        found: dict = {"device": result["device"], "precision": "fp8" if config.fp8.blockwise else "bf16"}
        found |= calibration(plan, H200, forward, both - forward)
        Path(given["write_calibration"]).write_text(json.dumps(found) + "\n")
    if table is not None:
        result["kernels_ms"] = table
        if bench.groups.pp.size() > 1:
            simulated = plan.simulation.idle
            result |= {"pipeline_idle": idle_share(table, bench.groups), "pipeline_idle_simulated": simulated}
    return result


def idle_share(table: dict[str, float], groups: ParallelGroups) -> float:
    """Share of the ranks' time of one step, as long as the longest took, in which no kernel but communication runs."""
    whole = table["from first to last"]
    mine = torch.tensor([whole - table["idle"] - table["communication alone"], whole], dtype=torch.float64)
    ranks = [torch.empty_like(mine) for _ in range(groups.gloo_world.size())]
    dist.all_gather(ranks, mine, groups.gloo_world)
    work, whole = torch.stack(ranks).unbind(1)
    return 1 - (work.mean() / whole.max()).item()


def kernel_table(step: Callable[[], None]) -> dict[str, float]:
    """Milliseconds of one step's device time, see `by_kind`; on a CPU of its outermost operators."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CUDA] if torch.cuda.is_available() else [ProfilerActivity.CPU]
    with profile(activities=activities) as profiler:
        step()
        wait_for_device()
    device = torch.autograd.DeviceType.CUDA if torch.cuda.is_available() else torch.autograd.DeviceType.CPU
    return by_kind(
        [
            (e.name, e.time_range.start, e.time_range.end)
            for e in profiler.events()
            if e.device_type == device and e.cpu_parent is None
        ]
    )


def by_kind(spans: list[tuple[str, float, float]]) -> dict[str, float]:
    """(name, start, end) of kernels in microseconds -> milliseconds of each kind, and of times when few or none run.

    `communication alone`: when nothing else runs, a wait; the rest of the communication is overlapped. `idle`: when no
    kernel runs. `from first to last`: all of it.
    """
    times, busy, working = Counter(), 0.0, 0.0
    until = until_work = float("-inf")
    for name, start, end in sorted(spans, key=lambda span: span[1]):
        lower = name.lower()
        kind = next((kind for kind, words in KINDS.items() if any(word in lower for word in words)), "elementwise")
        times[kind] += end - start
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
        if kind != "communication":
            working += max(0.0, end - max(start, until_work))
            until_work = max(until_work, end)
    whole = until - min(start for _, start, _ in spans) if spans else 0.0
    rest = {"communication alone": busy - working, "idle": whole - busy, "from first to last": whole}
    return {kind: time / 1e3 for kind, time in (*times.most_common(), *rest.items())}
