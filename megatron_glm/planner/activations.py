"""Bytes that the layers and the head of one micro-batch keep or hold at a time: estimates, by formula, from shapes."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_glm.config import IndexerConfig, LoraConfig, ModelConfig, RunConfig
from megatron_glm.config.lora import NO_ADAPTERS
from megatron_glm.model.indexer_training import ROWS
from megatron_glm.ops.indexer_loss import CHUNK_BYTES


@dataclass(frozen=True)
class Shapes:
    """Sizes of one micro-batch on one rank.

    b: bytes of an element in the forward; padding: rows of zeros that FP8 kernels add to those of a layer's experts;
    lora: the adapters.
    """

    pack: int  # T
    tokens: int  # t = T / CP
    shard: int  # s = t / TP
    dense: int  # local rows that run as dense attention
    slots: int  # K, width of a selection
    tp: int
    b: int
    padding: int = 0
    lora: LoraConfig = NO_ADAPTERS

    def expert_rows(self, model: ModelConfig) -> int:
        """Rows that the experts of a layer compute, if routing is balanced."""
        return self.shard * model.num_experts_per_tok + self.padding


def layer_activations(model: ModelConfig, layer: int, s: Shapes) -> dict[str, int]:
    """Bytes that autograd keeps of one layer on a GPU without recomputation, by part.

    A norm of width n keeps its input and its output n b each, and one fp32 number a row. Attention keeps the norms of
    both latents, the keys of the whole pack T (C + R) b and, a head, the projected queries and the rows that o_proj
    multiplies, V b. Sparse rows keep, a head, the absorbed query (C + R) b, the latent output C b and lse, beside the
    selection; dense rows key, value, output and lse. A gated MLP of width w: gate, up and product, 3 w b.
    MoE: fp32 scores and choices, and for each of the K s rows of the experts the input and gate and up, (D + 2 F) b,
    its weight and its place. Routing is taken to be balanced.
    """
    d, b, heads = model.hidden_size, s.b, model.num_attention_heads // s.tp
    latent, rope, value, qk = model.kv_lora_rank, model.qk_rope_head_dim, model.v_head_dim, model.qk_head_dim
    sparse = s.tokens - s.dense
    gathered = s.tokens * b if s.tp > 1 else 0
    attention = (s.shard + s.tokens) * model.q_lora_rank * b + (s.shard + s.pack) * (latent + rope) * b + 8 * s.shard
    attention += s.tokens * heads * (qk + value) * b + s.dense * heads * (qk + value) * b
    if sparse:
        attention += sparse * heads * (latent + rope) * b + _selection(model, layer, s)
    outputs = _outputs(model, s) - (0 if sparse else s.tokens * heads * value * b)  # only dense rows: o_proj's input
    parts = {"norms": s.shard * (4 * d * b + 8), "attention": attention, "attention output": outputs}
    parts["adapters"] = _adapters(model, layer, s)
    if not model.is_moe(layer):
        return parts | {"mlp": 3 * s.tokens * model.intermediate_size // s.tp * b + gathered * d}
    width, rows = model.moe_intermediate_size, s.shard * model.num_experts_per_tok
    router = s.shard * 4 * model.n_routed_experts + rows * (8 + 3 * 4)
    experts = s.expert_rows(model) * ((d + 2 * width) * b + 4 + 8)
    shared = 3 * s.tokens * model.n_shared_experts * width // s.tp * b
    return parts | {"mlp": router + experts + shared + gathered * d}


def _adapters(model: ModelConfig, layer: int, s: Shapes) -> int:
    """Of each adapter A x, of its rank; and the product of gate and up of the experts, which is computed again without.

    kv_b_proj's is left out: of sparse rows it is of the rank a head, of dense ones of the rank.
    """
    if not s.lora.lora_rank or layer >= model.num_hidden_layers:
        return 0
    rank, expert_rank = (s.lora.rank_and_scale(expert)[0] for expert in (False, True))
    targets = s.lora.lora_target_modules
    rows = {"q_a_proj": s.shard, "kv_a_proj_with_mqa": s.shard} | dict.fromkeys(("q_b_proj", "o_proj"), s.tokens)
    rows |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), s.tokens)
    kept = rank * sum(rows[name] for name in rows if name in targets)
    if "experts" in targets and model.is_moe(layer):
        kept += s.expert_rows(model) * (3 * expert_rank + model.moe_intermediate_size)
    return kept * s.b


def _outputs(model: ModelConfig, s: Shapes) -> int:
    """Outputs and lse of the attention kernels: the latent output in sparse rows, the value's width in dense ones."""
    sparse, dense = s.tokens - s.dense, s.dense
    rows = sparse * (model.kv_lora_rank * s.b + 4) + dense * (model.v_head_dim * s.b + 4)
    return model.num_attention_heads // s.tp * rows


def _selection(model: ModelConfig, layer: int, s: Shapes) -> int:
    """int32 selection that a full layer makes for itself and the shared layers behind it; none where all is dense."""
    return s.tokens * s.slots * 4 if model.has_indexer(layer) and s.dense < s.tokens else 0


def _products(model: ModelConfig, layer: int, s: Shapes) -> int:
    """What selective recomputation keeps beside full: the results of the products that are `kept`."""
    latents = s.shard * (model.q_lora_rank + model.kv_lora_rank + model.qk_rope_head_dim) * s.b
    kept = _outputs(model, s) + latents + s.tokens * model.hidden_size * s.b  # o_proj's, before the sum over TP ranks
    if not model.is_moe(layer):
        return kept + 2 * s.tokens * model.intermediate_size // s.tp * s.b
    width = model.moe_intermediate_size
    shared = 2 * s.tokens * model.n_shared_experts * width // s.tp * s.b
    return kept + shared + s.expert_rows(model) * 2 * width * s.b


def layer_kept(model: ModelConfig, layer: int, s: Shapes, granularity: str) -> int:
    """Bytes of a layer between its forward and its backward.

    full: its input s D b, the selection of a full layer and the expert ids; selective: also the products that
    are `kept`; none: everything.
    """
    if granularity == "none":
        return sum(layer_activations(model, layer, s).values())
    kept = s.shard * model.hidden_size * s.b + _selection(model, layer, s)
    if model.is_moe(layer):
        kept += s.shard * model.num_experts_per_tok * 8
    return kept + (_products(model, layer, s) if granularity == "selective" else 0)


def indexer_kept(indexer: IndexerConfig, model: ModelConfig, layer: int, s: Shapes, granularity: str) -> int:
    """What the indexer's loss keeps of a layer: in warm-up the gradients of queries, keys and weights that a teacher
    has made; in the sparse stage the student's log-probabilities and, unless it is computed again, each teacher's
    probabilities, fp32."""
    teaches, full = bool(indexer.taught_by(model, layer)), model.has_indexer(layer)
    if indexer.indexer_training == "sparse":
        return (teaches * (granularity != "full") + full) * s.shard * s.slots * 4
    return teaches * _index_features(model, s, keys=s.pack)


def student_arrived(indexer: IndexerConfig, model: ModelConfig, s: Shapes) -> int:
    """What a stage that begins with a shared layer gets of an earlier stage's indexer to teach it: `student_fields`."""
    if indexer.indexer_training == "off" or indexer.indexer_teacher == "own":
        return 0
    return s.shard * s.slots * 4 if indexer.indexer_training == "sparse" else _index_features(model, s, keys=s.shard)


def _index_features(model: ModelConfig, s: Shapes, keys: int) -> int:
    """Queries and weights of the shard's rows and so many keys, or their gradients."""
    width = model.index_n_heads * (model.index_head_dim * s.b + 4)
    return s.shard * width + keys * model.index_head_dim * s.b


def indexer_working(indexer: IndexerConfig, model: ModelConfig, s: Shapes) -> int:
    """Most bytes that the indexer's loss of a layer holds beside what it keeps.

    In warm-up the arrays of a chunk of rows. In the sparse stage the keys of all rows, what the heads add up to, and
    two of the teacher, its logarithm or gradients, [t, K] of 4 bytes each; and the queries of some dense rows in the
    latent space, before and after the rope's part is joined to them.
    """
    if indexer.indexer_training == "off":
        return 0
    if indexer.indexer_training == "warmup":
        return CHUNK_BYTES
    width = model.kv_lora_rank + model.qk_rope_head_dim
    latents = 2 * min(s.dense, ROWS) * model.num_attention_heads // s.tp * width * s.b
    return 4 * s.tokens * s.slots * 4 + latents


def layer_again(model: ModelConfig, layer: int, s: Shapes, granularity: str) -> int:
    """Bytes that a layer's recomputation adds to what the layer has kept."""
    return max(0, layer_kept(model, layer, s, "none") - layer_kept(model, layer, s, granularity))


def layer_gradients(model: ModelConfig, s: Shapes) -> int:
    """Most bytes of gradients inside a layer's backward.

    Either the absorbed queries' and their outputs' with the fp32 keys', or those of the experts' rows: of the output,
    of gate, up and their product, and the product itself.
    """
    width = model.kv_lora_rank + model.qk_rope_head_dim
    attention = 2 * s.tokens * (model.num_attention_heads // s.tp) * width * s.b + s.pack * width * 4
    rows = s.expert_rows(model)
    return max(attention, rows * (model.hidden_size + 4 * model.moe_intermediate_size) * s.b)


def layer_deferred(model: ModelConfig, layer: int, s: Shapes) -> int:
    """Bytes that a layer's backward leaves for its "W": input and output gradient of each product of a weight."""
    d, heads = model.hidden_size, model.num_attention_heads // s.tp
    latents = d + 2 * model.q_lora_rank + model.kv_lora_rank + model.qk_rope_head_dim  # q_b's input is counted here
    attention = s.shard * latents + s.tokens * (heads * (model.qk_head_dim + model.v_head_dim) + d)
    width = model.n_shared_experts * model.moe_intermediate_size if model.is_moe(layer) else model.intermediate_size
    mlp = s.tokens * (2 * d + 3 * width // s.tp)
    rows = s.expert_rows(model) if model.is_moe(layer) else 0
    return s.b * (attention + mlp + rows * (2 * d + 3 * model.moe_intermediate_size))


def vocabulary_elements(model: ModelConfig, s: Shapes) -> int:
    """Elements of a rank's part of a vocabulary matrix."""
    return -(-model.vocab_size // s.tp) * model.hidden_size


def head_gradient(config: RunConfig, s: Shapes) -> int:
    """Bytes of the fp32 gradient of the vocabulary matrix, which the forward computes; 0 where it is frozen."""
    return 4 * vocabulary_elements(config.model, s) * ("trunk" in config.trained_parts)


def head_kept(config: RunConfig, s: Shapes) -> int:
    """Bytes that last norm and head keep: the norm's input, and the gradients of the hidden states, MTP's included,
    and of the vocabulary matrix."""
    model, predictions = config.model, 1 + config.losses.mtp_steps
    rows = (predictions * s.tokens + s.shard) * model.hidden_size * s.b + 4 * s.shard
    return head_gradient(config, s) + rows


def head_bytes(config: RunConfig, s: Shapes) -> int:
    """Most bytes at the head: what it keeps, the normalised hidden states, MTP's included, and the logits of one chunk,
    whose gradient takes their place."""
    model, rows = config.model, min(config.kernels.loss_chunk_size, s.tokens)
    logits = rows * -(-model.vocab_size // s.tp) * s.b
    return head_kept(config, s) + logits + (1 + config.losses.mtp_steps) * s.tokens * model.hidden_size * s.b
