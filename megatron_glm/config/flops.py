"""Floating-point operations of a step, counted from the documents that it really computes.

A multiply-add is 2. Attention is counted in its non-absorbed form whatever the backend does, on the keys that the
sparse attention attends: min(position + 1, index_topk). A step counts an
indexer's scores, not its small projections (under 1 %).
Padding and recomputation count as nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from .indexer import FROZEN, IndexerConfig
from .lora import NO_ADAPTERS, LoraConfig
from .model import ModelConfig
from .parameters import adapter_parameters, layer_parameters, model_parameters
from .run import RunConfig
from .training import NEXT_TOKEN, LossConfig


def causal_keys(length: int) -> int:
    """Keys that the indexer scores in one document: sum over its rows of position + 1."""
    return length * (length + 1) // 2


def attended_keys(length: int, topk: int) -> int:
    """Keys that the attention reads in one document: sum over its rows of min(position + 1, topk)."""
    dense = min(length, topk)
    return causal_keys(dense) + (length - dense) * topk


class LayerFlops(NamedTuple):
    """Forward FLOPs of one decoder layer by kind; the last two are the frozen indexer's, zero in a shared layer."""

    products: int  # the attention's projections, the dense MLP or the router and the shared expert
    experts: int  # the routed ones
    attention: int
    index_scores: int
    index_projections: int

    @property
    def trained(self) -> int:
        return self.products + self.experts + self.attention


def layer_flops(config: ModelConfig, layer: int, doc_lengths: Iterable[int]) -> LayerFlops:
    """One layer's forward over documents of these lengths."""
    lengths = list(doc_lengths)
    tokens = sum(lengths)
    attended = sum(attended_keys(length, config.index_topk) for length in lengths)
    attention = 2 * config.num_attention_heads * attended * (config.qk_head_dim + config.v_head_dim)
    products = _products(config, layer)
    scores = 0
    if config.has_indexer(layer):
        scores = 2 * config.index_n_heads * config.index_head_dim * sum(map(causal_keys, lengths))
    trained = tokens * (products.total() - products["experts"] - products["indexer"])
    return LayerFlops(trained, tokens * products["experts"], attention, scores, tokens * products["indexer"])


@cache
def _products(config: ModelConfig, layer: int) -> Counter[str]:
    """FLOPs of one token's products with a layer's parameters, by their part."""
    found: Counter[str] = Counter()
    for parameter in layer_parameters(config, layer):
        found[parameter.part] += parameter.flops
    return found


def head_flops(config: ModelConfig, tokens: int) -> int:
    """The output projection's forward."""
    return tokens * model_parameters(config)["lm_head.weight"].flops


def forward_flops(config: ModelConfig, doc_lengths: Iterable[int]) -> tuple[int, int]:
    """(FLOPs of the trained parts, FLOPs of the frozen indexers' scores) of one forward over these documents."""
    lengths = list(doc_lengths)
    layers = [layer_flops(config, layer, lengths) for layer in range(config.num_hidden_layers)]
    trained = sum(layer.trained for layer in layers) + head_flops(config, sum(lengths))
    return trained, sum(layer.index_scores for layer in layers)


def mtp_flops(config: ModelConfig, doc_lengths: Iterable[int], steps: int) -> tuple[int, int]:
    """The same as `forward_flops` of the MTP steps, each with its head.

    A document has a row less at each step. Steps that share the first one's keys make none and choose none.
    """
    lengths = list(doc_lengths)
    by_step = [mtp_step_flops(config, lengths, step) for step in range(1, steps + 1)]
    rows = sum(max(0, length - step) for length in lengths for step in range(1, steps + 1))
    return sum(flops.trained for flops in by_step) + head_flops(config, rows), sum(f.index_scores for f in by_step)


def mtp_step_flops(config: ModelConfig, doc_lengths: Iterable[int], step: int) -> LayerFlops:
    """The forward of the MTP layer in step `step` (from 1), without its head."""
    here = [length - step for length in doc_lengths if length > step]
    flops = layer_flops(config, config.num_hidden_layers, here)
    if step == 1 or not config.index_share_for_mtp_iteration:
        return flops
    latents = 2 * config.hidden_size * (config.kv_lora_rank + config.qk_rope_head_dim) * sum(here)
    return flops._replace(products=flops.products - latents, index_scores=0, index_projections=0)


def training_flops(
    config: ModelConfig,
    doc_lengths: Iterable[int],
    losses: LossConfig = NEXT_TOKEN,
    indexer: IndexerConfig = FROZEN,
    dense: bool = False,
    lora: LoraConfig = NO_ADAPTERS,
) -> int:
    """FLOPs of a training step on these documents: the backward costs twice the forward, except of what is frozen.

    Under adapters the frozen weights have a gradient of their input alone: two products instead of three.

    Args:
        losses, indexer: what is trained; in the indexer's warm-up, and with --train-only, the trunk has a forward only.
        dense: every row attends to all keys before it, and nothing is selected.
    """
    lengths = list(doc_lengths)
    seen = replace(config, index_topk=max(lengths, default=1)) if dense else config
    trunk, scores = forward_flops(seen, lengths)
    mtp, mtp_scores = mtp_flops(seen, lengths, losses.mtp_steps)
    frozen = indexer.indexer_training == "warmup" or losses.train_only is not None
    total = (1 if frozen else 3) * trunk + 3 * mtp + (0 if dense else scores + mtp_scores)
    if lora.lora_rank:
        attention = sum(layer_flops(seen, layer, lengths).attention for layer in range(config.num_hidden_layers))
        adapters = sum(parameter.flops for parameter in adapter_parameters(config, lora).values())
        total += 3 * sum(lengths) * adapters - (trunk - attention)
    if losses.mtp_detaches or losses.train_only == "mtp":  # the head's weight has no gradient of the steps
        total -= sum(head_flops(config, max(0, n - step)) for n in lengths for step in range(1, 1 + losses.mtp_steps))
    return total + indexer_loss_flops(seen, lengths, indexer, losses.mtp_steps)


def fp8_flops(run: RunConfig, tokens: int) -> int:
    """Those FLOPs of a training step on so many tokens that are products in FP8.

    MTP steps are taken to have all of the tokens. Of a frozen weight there is no gradient; where the whole trunk is
    frozen, in the indexer's warm-up and with --train-only, it has a forward alone.
    """
    total = 0
    forward_only = run.indexer.indexer_training == "warmup" or run.losses.train_only is not None
    for parameter in model_parameters(run.model).values():
        if run.fp8.computes(parameter, run.model.num_hidden_layers):
            passes = 2 + (run.fp8.weight_gradients(experts=parameter.part == "experts") and not run.lora.lora_rank)
            passes = 1 if forward_only and not parameter.mtp else passes
            total += passes * parameter.flops * (run.losses.mtp_steps if parameter.mtp else 1)
    return total * tokens


def indexer_loss_flops(config: ModelConfig, lengths: Sequence[int], indexer: IndexerConfig, mtp_steps: int = 0) -> int:
    """Of the indexers' loss: scores and projections with their backward, and the products of each teacher's heads."""
    if indexer.indexer_training == "off":
        return 0
    total = sum(_indexer_flops(config, layer, lengths, indexer) for layer in range(config.num_hidden_layers))
    if indexer.indexer_training == "sparse":
        for step in range(1, 1 + config.mtp_selections(mtp_steps)):
            here = [max(0, length - step) for length in lengths]
            total += _indexer_flops(config, config.num_hidden_layers, here, indexer)
    return total


def _indexer_flops(config: ModelConfig, layer: int, lengths: Sequence[int], indexer: IndexerConfig) -> int:
    pairs, total = sum(attended_keys(length, config.index_topk) for length in lengths), 0
    if config.has_indexer(layer):
        total += 3 * (2 * config.index_n_heads * config.index_head_dim * pairs)
        total += 3 * sum(lengths) * _products(config, layer)["indexer"]
    if indexer.taught_by(config, layer):
        total += 2 * config.num_attention_heads * config.qk_head_dim * pairs
    return total
