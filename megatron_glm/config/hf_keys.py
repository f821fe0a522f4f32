"""Every key of a `config.json` that may be there, and what is refused.

A key is read into `ModelConfig`, or must have the one value that this code computes, or changes nothing. Any other key
is refused by its name: it may say something that the model would be computed wrongly without. transformers keeps such
keys as attributes, and code beyond the model's class reads some of them (`is_causal` for the mask, for example).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

ARCHITECTURE = "GlmMoeDsaForCausalLM"
MODEL_TYPE = "glm_moe_dsa"

# The only values that are computed here. `to_hf` writes them, too.
SERVED_VALUES: dict[str, Any] = {
    "hidden_act": "silu",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "rope_interleave": True,
    "indexer_rope_interleave": True,
}
# The same of keys that are seldom there.
SERVED_IF_GIVEN: dict[str, Any] = {
    "add_cross_attention": False,
    "chunk_size_feed_forward": 0,
    "is_causal": True,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "moe_layer_freq": 1,
    "latent_norm_eps": 1e-6,  # both are constants of transformers, which reads neither key
    "indexer_norm_eps": 1e-6,
    "moe_router_dtype": "float32",
    "output_router_logits": False,
    "partial_rotary_factor": 1.0,  # the rotary dimensions are qk_rope_head_dim, and all of them turn
    "per_layer_config": {},
    "pruned_heads": {},
    "tie_encoder_decoder": False,
}
EXPERT_ALIASES = ("num_experts", "num_local_experts")  # transformers takes either for n_routed_experts
# Keys that are read and are no field of ModelConfig.
READ = """
    architectures model_type torch_dtype rope_parameters rope_scaling rope_theta index_topk_pattern index_topk_freq
    index_skip_topk_offset first_k_dense_replace num_key_value_heads num_experts num_local_experts qk_head_dim
    quantization_config
""".split()
# Keys that change nothing of what is trained: transformers computes head_dim and layer_types itself, the layout of
# processes and how drafts of several MTP steps share an index are matters of serving, and the others describe the
# file, ids that data and generation use, forms of output, classification heads, and generation.
NEUTRAL = """
    head_dim layer_types use_cache ep_size pretraining_tp
    _name_or_path name_or_path _commit_hash transformers_version auto_map tokenizer_class prefix
    _attn_implementation attn_implementation _attn_implementation_autoset experts_implementation
    _experts_implementation use_bfloat16 torchscript tf_legacy_loss unsloth_fixed unsloth_version
    bos_token_id sep_token_id cls_token_id mask_token_id unk_token_id decoder_start_token_id
    return_dict output_hidden_states output_attentions tie_last_hidden_states
    id2label label2id num_labels problem_type finetuning_task task_specific_params
    assistant_confidence_threshold assistant_lookbehind bad_words_ids begin_suppress_tokens diversity_penalty do_sample
    early_stopping encoder_no_repeat_ngram_size encoder_repetition_penalty epsilon_cutoff eta_cutoff
    exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty max_length min_length
    no_repeat_ngram_size num_assistant_tokens num_assistant_tokens_schedule num_beam_groups num_beams
    num_return_sequences output_scores remove_invalid_values repetition_penalty return_dict_in_generate
    suppress_tokens target_lookbehind temperature top_k top_p typical_p
""".split()


def refuse_unserved(raw: dict[str, Any], fields: set[str], path: Path) -> None:
    """Refuses what would be computed otherwise, or is unknown; null members are gone from `raw` already.

    fields: the names of `ModelConfig`.
    """
    architectures = raw.get("architectures")
    if architectures is not None and list(architectures) != [ARCHITECTURE]:
        raise ValueError(f"{path}: architectures is {architectures}, only ['{ARCHITECTURE}'] is served")
    if raw.get("model_type") != MODEL_TYPE:
        raise ValueError(f"{path}: model_type is {raw.get('model_type')!r}, only {MODEL_TYPE!r} is served")
    served = SERVED_VALUES | SERVED_IF_GIVEN
    for name in (name for name in raw if name in served):
        _require_served(name, raw[name], served[name], path)
    if unknown := [name for name in raw if name not in fields.union(READ, NEUTRAL, served)]:
        first = f"{unknown[0]} is {shortened(raw[unknown[0]])}"
        others = "".join(f", nor {name}" for name in unknown[1:])
        remedy = "remove it (or make it null) if it does not change the model"
        raise ValueError(f"{path}: {first}: this trainer does not know that key{others}: {remedy}")
    _require_equal(raw, "num_key_value_heads", "num_attention_heads", raw.get("num_attention_heads"), path)
    for alias in EXPERT_ALIASES:
        _require_equal(raw, alias, "n_routed_experts", raw.get("n_routed_experts"), path)
    parts = [raw.get(name) for name in ("qk_nope_head_dim", "qk_rope_head_dim")]
    numbers = [part for part in parts if isinstance(part, int)]
    if len(numbers) == 2:
        _require_equal(raw, "qk_head_dim", "qk_nope_head_dim + qk_rope_head_dim", sum(numbers), path)


def read_rope_theta(raw: dict[str, Any], path: Path) -> Any:
    """The base of plain rotary positions, from any of its spellings; None if it is nowhere.

    transformers lets the theta in an object win over `rope_theta`; here they must not differ. Refuses every scaling:
    yarn, linear, dynamic, llama3, longrope, one for each kind of layer.
    """
    found = {} if raw.get("rope_theta") is None else {"rope_theta": raw["rope_theta"]}
    for name in ("rope_parameters", "rope_scaling"):
        for key, value in raw.get(name, {}).items():
            if key in ("rope_type", "type"):
                _require_served(f"{name}.{key}", value, "default", path)
            elif key == "partial_rotary_factor":
                _require_served(f"{name}.{key}", value, 1.0, path)
            elif key == "rope_theta":
                found[f"{name}.{key}"] = value
            else:
                raise ValueError(f"{path}: {name}.{key} is {shortened(value)}: only plain rotary positions are served")
    if raw.get("rope_parameters") and raw.get("rope_scaling"):
        raise ValueError(f"{path}: rope_parameters and rope_scaling are both given: remove rope_scaling, the old name")
    values = list(found.values())
    if values[1:] and values[0] != values[1]:
        said = " and ".join(f"{name} is {value!r}" for name, value in found.items())
        raise ValueError(f"{path}: {said}; keep one of them")
    return values[0] if values else None


def shortened(value: Any) -> str:
    """The value as Python writes it, cut after 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else text[:79] + "…"


def _require_served(name: str, value: Any, served: Any, path: Path) -> None:
    if value != served or isinstance(value, bool) != isinstance(served, bool):
        raise ValueError(f"{path}: {name} is {shortened(value)}, only {served!r} is served")


def _require_equal(raw: dict[str, Any], name: str, other: str, wanted: Any, path: Path) -> None:
    if name in raw and wanted is not None and raw[name] != wanted:
        raise ValueError(f"{path}: {name} is {shortened(raw[name])}, it must equal {other} {wanted}")
