"""Bytes that the layers and the head of one micro-batch keep or hold at a time: estimates, by formula, from shapes."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_glm.config import ModelConfig, RunConfig


@dataclass(frozen=True)
class Shapes:
    """Sizes of one micro-batch on one rank. b: bytes of an element in the forward."""

    pack: int  # T
    tokens: int  # t = T / CP
    shard: int  # s = t / TP
    dense: int  # local rows that run as dense attention
    slots: int  # K, width of a selection
    tp: int
    b: int


def layer_activations(model: ModelConfig, layer: int, s: Shapes) -> dict[str, int]:
    """Bytes that autograd keeps of one layer without recomputation, by part.

    A norm of width n keeps its input, the normalised and the scaled rows: 3 n b. Attention keeps the latents
    of query and key, the keys of the whole pack T (C + R) b, and for each head the query; sparse rows also the absorbed
    query (C + R) b, the latent output C b and lse; dense rows query, key, value and output. MoE: the router's fp32 rows
    and scores, and for each of the K s rows of the experts input, gate and up, product and output. Routing is taken to
    be balanced.
    """
    d, b, heads = model.hidden_size, s.b, model.num_attention_heads // s.tp
    latent, rope, value, qk = model.kv_lora_rank, model.qk_rope_head_dim, model.v_head_dim, model.qk_head_dim
    sparse = s.tokens - s.dense
    gathered = s.tokens * b if s.tp > 1 else 0
    attention = 3 * s.shard * (model.q_lora_rank + latent) * b + gathered * model.q_lora_rank
    attention += s.pack * (latent + rope) * b + s.tokens * heads * (qk + value) * b
    attention += sparse * heads * (model.qk_nope_head_dim + latent + rope) * b + sparse * s.slots * 4
    attention += s.dense * heads * (2 * qk + value) * b
    if model.has_indexer(layer):
        attention += (s.shard + s.tokens) * s.slots * 4
    parts = {"norms": 6 * s.shard * d * b, "attention": attention, "attention output": _outputs(model, s)}
    if not model.is_moe(layer):
        return parts | {"mlp": 4 * s.tokens * model.intermediate_size // s.tp * b + gathered * d}
    width = model.moe_intermediate_size
    router = s.shard * (4 * d + 12 * model.n_routed_experts)
    experts = s.shard * model.num_experts_per_tok * (2 * d + 3 * width) * b
    return parts | {"mlp": router + experts + 4 * s.tokens * model.n_shared_experts * width // s.tp * b + gathered * d}


def _outputs(model: ModelConfig, s: Shapes) -> int:
    """Outputs and lse of the attention kernels: the latent output in sparse rows, the value's width in dense ones."""
    sparse, dense = s.tokens - s.dense, s.dense
    rows = sparse * (model.kv_lora_rank * s.b + 4) + dense * (model.v_head_dim * s.b + 4)
    return model.num_attention_heads // s.tp * rows


def layer_kept(model: ModelConfig, layer: int, s: Shapes, granularity: str) -> int:
    """Bytes of a layer between its forward and its backward.

    full: its input s D b, the selection of a full layer twice (as the op returned it and as the layers pass it on) and
    the expert ids; selective: the outputs of the attention kernels too; none: everything.
    """
    parts = layer_activations(model, layer, s)
    if granularity == "none":
        return sum(parts.values())
    kept = s.shard * model.hidden_size * s.b
    if model.has_indexer(layer):
        kept += (s.shard + s.tokens) * s.slots * 4
    if model.is_moe(layer):
        kept += s.shard * model.num_experts_per_tok * 8
    return kept + (parts["attention output"] if granularity == "selective" else 0)


def layer_gradients(model: ModelConfig, s: Shapes) -> int:
    """Most bytes of gradients inside a layer's backward.

    Either the absorbed queries' and their outputs' with the fp32 keys', or those of the experts' rows.
    """
    width = model.kv_lora_rank + model.qk_rope_head_dim
    attention = 2 * s.tokens * (model.num_attention_heads // s.tp) * width * s.b + s.pack * width * 4
    rows = s.shard * model.num_experts_per_tok
    return max(attention, rows * (model.hidden_size + 3 * model.moe_intermediate_size) * s.b)


def head_bytes(config: RunConfig, s: Shapes) -> int:
    """Logits of one chunk and the head's gradient, each in fp32 and in the forward's type, and the gathered hidden
    states with their gradient."""
    model, rows = config.model, min(config.kernels.loss_chunk_size, s.tokens)
    vocab = -(-model.vocab_size // s.tp)
    return rows * vocab * (4 + s.b) + vocab * model.hidden_size * (4 + s.b % 4) + 2 * s.tokens * model.hidden_size * s.b
