"""The Hugging Face class as numerical oracle, small random configs, and the record of what a model selected."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import megatron_glm.model.router as router_module
from megatron_glm.config import KernelConfig, ModelConfig, ParallelConfig, RunConfig
from megatron_glm.config.lora import NO_ADAPTERS, LoraConfig
from megatron_glm.model.glm import GLMChunk
from megatron_glm.model.micro_batch import MicroBatch
from megatron_glm.ops import indexer as indexer_ops
from megatron_glm.parallel.dispatch import make_dispatcher
from megatron_glm.parallel.groups import ParallelGroups
from megatron_glm.parallel.pipeline.carry import Carry
from megatron_glm.parallel.pipeline.layout import Stage

SMALL = dict(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    moe_intermediate_size=24,
    num_hidden_layers=4,
    num_attention_heads=4,
    q_lora_rank=24,
    kv_lora_rank=16,
    qk_nope_head_dim=12,
    qk_rope_head_dim=8,
    v_head_dim=10,
    index_n_heads=16,
    index_head_dim=16,
    index_topk=8,
    n_routed_experts=8,
    num_experts_per_tok=2,
    n_shared_experts=1,
    rope_theta=10000.0,
    indexer_types=("full", "shared", "full", "shared"),
    mlp_layer_types=("dense", "sparse", "sparse", "sparse"),
    initializer_range=0.2,
)


def small_config(**changes) -> ModelConfig:
    """A config of a few thousand parameters; layer lists follow `num_hidden_layers` unless given."""
    values = SMALL | changes
    layers = values["num_hidden_layers"]
    for name, pattern in (("indexer_types", ("full", "shared")), ("mlp_layer_types", ("dense", "sparse", "sparse"))):
        if name not in changes and len(values[name]) != layers:
            values[name] = tuple(pattern[min(i, len(pattern) - 1) if name[0] == "m" else i % 2] for i in range(layers))
    return ModelConfig(**values)


@cache
def single_groups() -> ParallelGroups:
    """Groups of one rank, in this process; made once, because each has threads that poll."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return ParallelGroups.create(ParallelConfig())


def single_chunk(config: ModelConfig, recompute: str = "none", lora: LoraConfig = NO_ADAPTERS) -> GLMChunk:
    """The whole model as one chunk, weights uninitialised."""
    parallel, kernels = ParallelConfig(recompute_granularity=recompute), KernelConfig("torch", loss_chunk_size=7)
    run = RunConfig(config, parallel=parallel, kernels=kernels, lora=lora)
    stage = Stage(tuple(range(config.num_hidden_layers)), embedding=True, head=True, mtp=True)
    return GLMChunk(run, single_groups(), stage, make_dispatcher(run, single_groups()))


def hf_model(config: ModelConfig, seed: int) -> torch.nn.Module:
    """GlmMoeDsaForCausalLM in fp32 with random weights of which none is at its trivial value."""
    from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

    content = config.to_hf()
    del content["architectures"], content["model_type"], content["dtype"]
    model = GlmMoeDsaForCausalLM(
        GlmMoeDsaConfig(**content, attn_implementation="eager", experts_implementation="eager")
    ).float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("inv_freq"):
                continue
            noise = torch.randn(tensor.shape, generator=generator)
            if tensor.dim() == 1:
                centre = 0.0 if name.endswith("bias") else 1.0
                tensor.copy_(centre + 0.1 * noise)
            else:
                tensor.copy_(noise * tensor.shape[-1] ** -0.5)
    return model


def canonical(hf_name: str) -> str:
    """Our name of a tensor of the Hugging Face class, which holds experts fused."""
    name = hf_name.removeprefix("model.")
    return name.replace(".experts.gate_up_proj", ".experts.gate_up").replace(".experts.down_proj", ".experts.down")


def copy_weights(hf: torch.nn.Module, chunk: GLMChunk) -> None:
    """Fill a chunk from the Hugging Face model; an MTP layer is not there and must not be in the chunk either."""
    chunk.load_state_dict({canonical(name): value for name, value in hf.state_dict().items()})


@dataclass
class Selections:
    """What one forward chose: by layer order, and how close the closest rejected candidate came."""

    topk: list[Tensor] = field(default_factory=list)
    experts: list[Tensor] = field(default_factory=list)
    gap: float = float("inf")

    def boundary(self, scores: Tensor, k: int) -> None:
        """Record the gap between the k-th and the next of each row's finite scores."""
        if scores.shape[-1] > k:
            best = scores.topk(k + 1, dim=-1).values
            gaps = (best[..., k - 1] - best[..., k])[best[..., k] > float("-inf")]
            if gaps.numel():
                self.gap = min(self.gap, gaps.min().item())


@contextmanager
def recorded() -> Iterator[Selections]:
    """Record our model's selections, in the order in which they are made."""
    seen = Selections()
    index_topk, select = indexer_ops.BACKENDS["torch"], router_module.select_experts

    def watched_topk(iq, ik, w, start, end, k):
        chosen = index_topk(iq, ik, w, start, end, k)
        scores = (w.unsqueeze(-1) * torch.relu(torch.einsum("thd,ud->thu", iq.float(), ik.float()))).sum(1)
        position = torch.arange(ik.shape[0], device=ik.device)
        visible = (position >= start.unsqueeze(1)) & (position < end.unsqueeze(1))
        seen.boundary(scores.masked_fill(~visible, float("-inf")), k)
        seen.topk.append(chosen)
        return chosen

    def watched_select(choice, k, n_group, topk_group):
        chosen = select(choice, k, n_group, topk_group)
        if n_group > 1:
            groups = choice.view(choice.shape[0], n_group, -1).topk(2, dim=-1).values.sum(-1)
            seen.boundary(groups, topk_group)
            kept = torch.zeros_like(groups, dtype=torch.bool).scatter_(1, groups.topk(topk_group, dim=-1).indices, True)
            members = kept.repeat_interleave(choice.shape[1] // n_group, dim=1)
            choice = choice.masked_fill(~members, float("-inf"))
        seen.boundary(choice, k)
        seen.experts.append(chosen)
        return chosen

    indexer_ops.BACKENDS["torch"], router_module.select_experts = watched_topk, watched_select
    try:
        yield seen
    finally:
        indexer_ops.BACKENDS["torch"], router_module.select_experts = index_topk, select


@dataclass
class Outcome:
    logits: Tensor
    loss: Tensor
    gradients: dict[str, Tensor]  # by canonical name; only what has one
    selections: Selections


def run_hf(hf: torch.nn.Module, tokens: Tensor, labels: Tensor, doc_lengths: tuple[int, ...]) -> Outcome:
    """Logits, summed loss and gradients of a pack, document by document; padding rows give zero logits."""
    seen = Selections()
    hooks = []
    for layer in hf.model.layers:
        if layer.self_attn.indexer is not None:
            hooks.append(layer.self_attn.indexer.register_forward_hook(lambda m, i, out: seen.topk.append(out[0])))
        if hasattr(layer.mlp, "gate"):
            hooks.append(layer.mlp.gate.register_forward_hook(lambda m, i, out: seen.experts.append(out[2])))
    hf.zero_grad()
    logits = torch.zeros(tokens.numel(), hf.config.vocab_size)
    loss, begin = torch.zeros(()), 0
    for length in doc_lengths:
        rows = slice(begin, begin + length)
        out = hf(tokens[rows].unsqueeze(0), use_cache=False).logits[0]
        logits[rows] = out.detach()
        loss = loss + F.cross_entropy(out, labels[rows], ignore_index=-100, reduction="sum")
        begin += length
    loss.backward()
    for hook in hooks:
        hook.remove()
    gradients = {canonical(n): p.grad.clone() for n, p in hf.named_parameters() if p.grad is not None}
    return Outcome(logits, loss.detach(), gradients, seen)


class Outputs(NamedTuple):
    hidden: Tensor
    topk: Tensor | None
    loss: Tensor | None


def forward(chunk: GLMChunk, tokens: Tensor, pack, labels: Tensor | None = None, carry: Carry | None = None) -> Outputs:
    """One micro-batch through one chunk; without `carry` it is the first."""
    carry, losses = chunk(MicroBatch(tokens, labels, pack), carry or {})
    return Outputs(carry["hidden"], carry.get("topk"), losses.get("lm"))


def run_chunk(chunk: GLMChunk, tokens: Tensor, labels: Tensor, pack) -> Outcome:
    """The same of our model, in one packed forward and backward."""
    chunk.zero_grad()
    with recorded() as seen:
        out = forward(chunk, tokens, pack, labels)
    out.loss.backward()
    logits = chunk.lm_head.logits(chunk.norm(out.hidden)).detach()
    gradients = {n: p.grad.clone() for n, p in chunk.named_parameters() if p.grad is not None}
    return Outcome(logits, out.loss.detach(), gradients, seen)


def gradient_errors(ours: dict[str, Tensor], reference: dict[str, Tensor]) -> dict[str, float]:
    """Relative error of each gradient; a gradient that must be zero (or absent) and is not counts as infinite."""
    errors = {}
    for name in ours.keys() | reference.keys():
        expected = reference.get(name)
        norm = 0.0 if expected is None else expected.norm().item()
        if norm == 0.0:
            actual = ours.get(name)
            errors[name] = 0.0 if actual is None or not actual.any() else float("inf")
        else:
            errors[name] = float("inf") if name not in ours else ((ours[name] - expected).norm() / norm).item()
    return errors
