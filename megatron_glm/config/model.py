"""The shape of a GLM-5 model, read from a Hugging Face `config.json` and checked.

`ModelConfig.from_hf` is the only way in: a folder, a JSON file or the name of a preset. Every field
that changes the mathematics is either understood or refused, so that a config which loads is a
config which is computed exactly.
"""

from __future__ import annotations

import math
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from .hf_keys import ARCHITECTURE, EXPERT_ALIASES, MODEL_TYPE, SERVED_VALUES, read_rope_theta, refuse_unserved
from .quantization import weight_block
from .source import locate, read_json, without_null

DTYPES = ("bfloat16", "float16", "float32")
SHAPE_FIELDS = """
    vocab_size hidden_size intermediate_size moe_intermediate_size num_hidden_layers num_attention_heads q_lora_rank
    kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim index_n_heads index_head_dim n_routed_experts
    n_shared_experts
""".split()  # of ModelConfig: weights that were made for one value fit no other
MOST_ROWS = 2**24  # of a matrix, whose bytes then fit into 64 bits
MOST_LAYERS = 10_000  # of a kind; far above any model, and lists of this length take no time


@dataclass(frozen=True)
class ModelConfig:
    """Shape and constants of one model; the names are those of the Hugging Face config.

    `head_dim` of the Hugging Face config is deliberately not a field: released configs carry a value
    there which is no dimension of this model.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int
    rope_theta: float
    indexer_types: tuple[str, ...]
    mlp_layer_types: tuple[str, ...]
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 2.5
    rms_norm_eps: float = 1e-5
    latent_norm_eps: float = 1e-6  # q_a and kv_a norms
    indexer_norm_eps: float = 1e-6  # LayerNorm of the index key
    max_position_embeddings: int = 202752
    initializer_range: float = 0.02
    num_nextn_predict_layers: int = 0
    index_share_for_mtp_iteration: bool = False  # MTP steps after the first reuse its keys and its selection
    dtype: str = "bfloat16"
    pad_token_id: int | None = None
    eos_token_id: tuple[int, ...] = ()

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def mtp_layer_ids(self) -> tuple[int, ...]:
        """Layer indices of the MTP modules: they follow the decoder layers."""
        return tuple(range(self.num_hidden_layers, self.num_hidden_layers + self.num_nextn_predict_layers))

    def has_indexer(self, layer: int) -> bool:
        """True where the layer scores keys itself ("full"); an MTP layer always does."""
        return layer >= self.num_hidden_layers or self.indexer_types[layer] == "full"

    def mtp_selections(self, steps: int) -> int:
        """How many of so many MTP steps select keys of their own: the first, where the others share its."""
        return min(steps, 1) if self.index_share_for_mtp_iteration else steps

    def is_moe(self, layer: int) -> bool:
        """True where the MLP is a mixture of experts; it always is in an MTP layer."""
        return layer >= self.num_hidden_layers or self.mlp_layer_types[layer] == "sparse"

    @classmethod
    def from_hf(cls, source: str | Path, **overrides: Any) -> ModelConfig:
        """Read a config.

        Args:
            source: a folder with `config.json` (or `hf/config.json`, as in our checkpoints), a JSON file,
                or a preset: glm5, glm5.1, glm5.2, glm5.2-tiny, in any spelling (GLM-5.2, glm52).
            overrides: single fields by name. A smaller `num_hidden_layers` keeps the first layers.
        Raises:
            ValueError: naming the field and the file where the config cannot be computed exactly.
        """
        path = locate(source)
        config = _parse(without_null(read_json(path)), path)
        if overrides:
            config = _override(config, overrides, path)
        _check(config, path)
        return config

    def to_hf(self) -> dict[str, Any]:
        """This config as the content of a Hugging Face `config.json`, which `from_hf` reads back equal."""
        content: dict[str, Any] = {"architectures": [ARCHITECTURE], "model_type": MODEL_TYPE}
        content |= {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}
        content["rope_parameters"] = {"rope_theta": content.pop("rope_theta"), "rope_type": "default"}
        return content | SERVED_VALUES | {"num_key_value_heads": self.num_attention_heads}


def _parse(raw: dict[str, Any], path: Path) -> ModelConfig:
    """The config of a JSON object whose null members are taken out already."""
    for alias in EXPERT_ALIASES:
        raw = {"n_routed_experts": raw[alias]} | raw if alias in raw else raw
    _check_containers(raw, path)
    weight_block(raw, path)
    refuse_unserved(raw, {field.name for field in fields(ModelConfig)}, path)
    values = {f.name: raw[f.name] for f in fields(ModelConfig) if f.name in raw and f.name != "indexer_types"}
    values["rope_theta"] = read_rope_theta(raw, path)
    if values["rope_theta"] is None:
        raise ValueError(f"{path}: rope_parameters.rope_theta is missing (GLM-5: 1e6, GLM-5.2: 8e6); it has no default")
    if "dtype" not in values and "torch_dtype" in raw:
        values["dtype"] = raw["torch_dtype"]
    eos = raw.get("eos_token_id", [])
    values["eos_token_id"] = tuple(eos) if isinstance(eos, list) else (eos,)

    for field in fields(ModelConfig):
        derived = field.name in ("indexer_types", "mlp_layer_types", "rope_theta")
        if field.default is MISSING and not derived and field.name not in values:
            raise ValueError(f"{path}: missing field {field.name}")
    _check_scalars(values, path)
    layers = values["num_hidden_layers"]
    values["indexer_types"] = _indexer_types(raw, layers, path)
    values["mlp_layer_types"] = _mlp_types(raw, layers, path)
    return ModelConfig(**values)


def _check_containers(raw: dict[str, Any], path: Path) -> None:
    """Refuses fields that are no list, object or text where the rest of this file counts on one."""
    kinds = dict.fromkeys(("architectures", "indexer_types", "mlp_layer_types"), (list,))
    kinds |= dict.fromkeys(("rope_parameters", "rope_scaling"), (dict,)) | {"index_topk_pattern": (str, list)}
    for name, served in kinds.items():
        if name in raw and not isinstance(raw[name], served):
            words = " or ".join({list: "a list", dict: "an object", str: "a string"}[kind] for kind in served)
            raise ValueError(f"{path}: {name} is {raw[name]!r}, it must be {words}")
    for name in ("index_skip_topk_offset", "first_k_dense_replace"):
        if name in raw and type(raw[name]) is not int:
            raise ValueError(f"{path}: {name} is {raw[name]!r}, it must be a whole number")
    eos = raw.get("eos_token_id", [])
    pad = [raw["pad_token_id"]] if "pad_token_id" in raw else []
    for name, ids in {"eos_token_id": eos if isinstance(eos, list) else [eos], "pad_token_id": pad}.items():
        if not all(type(token) is int for token in ids):
            raise ValueError(f"{path}: {name} is {raw[name]!r}, it must be a token id")


def _indexer_types(raw: dict[str, Any], layers: int, path: Path) -> tuple[str, ...]:
    """The explicit list wins; a pattern or freq/offset beside it must say the same."""
    sources: dict[str, tuple[str, ...]] = {}
    if "indexer_types" in raw:
        sources["indexer_types"] = tuple(raw["indexer_types"])
    if (pattern := raw.get("index_topk_pattern")) is not None:
        names = {"F": "full", "S": "shared"}
        sources["index_topk_pattern"] = tuple(names.get(c, str(c)) for c in pattern)
    if (freq := raw.get("index_topk_freq")) is not None:
        if type(freq) is not int or freq < 1:
            raise ValueError(f"{path}: index_topk_freq is {freq!r}, it must be a whole number of at least 1")
        offset = raw.get("index_skip_topk_offset", 2)
        sources["index_topk_freq/index_skip_topk_offset"] = tuple(
            "full" if max(i - offset + 1, 0) % freq == 0 else "shared" for i in range(layers)
        )
    if not sources:
        return ("full",) * layers
    (first, types), *others = sources.items()
    _check_layer_list(types, first, ("full", "shared"), layers, path)
    for other, other_types in others:
        _check_layer_list(other_types, other, ("full", "shared"), layers, path)
        differing = [i for i in range(layers) if types[i] != other_types[i]]
        if differing:
            raise ValueError(f"{path}: {first} and {other} disagree on layers {differing}; keep one of them")
    return types


def _mlp_types(raw: dict[str, Any], layers: int, path: Path) -> tuple[str, ...]:
    if "mlp_layer_types" in raw:
        types = tuple(raw["mlp_layer_types"])
        _check_layer_list(types, "mlp_layer_types", ("dense", "sparse"), layers, path)
        return types
    return _leading_dense(raw.get("first_k_dense_replace", 3), layers)


def _leading_dense(dense: int, layers: int) -> tuple[str, ...]:
    return tuple("dense" if i < dense else "sparse" for i in range(layers))


def _check_layer_list(types: tuple[str, ...], name: str, served: tuple[str, str], layers: int, path: Path) -> None:
    if len(types) != layers:
        raise ValueError(f"{path}: {name} lists {len(types)} layers, num_hidden_layers is {layers}")
    for layer, value in enumerate(types):
        if value not in served:
            raise ValueError(f"{path}: {name}[{layer}] is {value!r}, it must be {served[0]!r} or {served[1]!r}")


def _check_scalars(values: dict[str, Any], path: Path) -> None:
    for field in fields(ModelConfig):
        value = values.get(field.name, field.default)
        kind, least = type(value), 0 if field.name == "num_nextn_predict_layers" else 1
        if field.type == "int" and (kind is not int or value < least):
            raise ValueError(f"{path}: {field.name} is {value!r}, it must be a whole number of at least {least}")
        most = MOST_LAYERS if field.name in ("num_hidden_layers", "num_nextn_predict_layers") else MOST_ROWS
        if field.name in (*SHAPE_FIELDS, "num_nextn_predict_layers") and value > most:
            raise ValueError(f"{path}: {field.name} is {value}, it must be at most {most}")
        if field.type == "float" and (kind not in (int, float) or not 0 < value < math.inf):
            raise ValueError(f"{path}: {field.name} is {value!r}, it must be a positive number")
        if field.type == "bool" and kind is not bool:
            raise ValueError(f"{path}: {field.name} is {value!r}, it must be true or false")


def _override(config: ModelConfig, overrides: dict[str, Any], path: Path) -> ModelConfig:
    changes = dict(overrides)
    _check_scalars(asdict(config) | changes, path)
    dense = changes.pop("first_k_dense_replace", None)
    layers = changes.get("num_hidden_layers", config.num_hidden_layers)
    if layers > config.num_hidden_layers and not {"indexer_types", "mlp_layer_types"} <= changes.keys():
        raise ValueError(
            f"{path}: num_hidden_layers {layers} is more than the {config.num_hidden_layers} layers of this config, "
            "whose layer types are listed: write a config.json with longer lists"
        )
    changes.setdefault("indexer_types", config.indexer_types[:layers])
    types = config.mlp_layer_types[:layers] if dense is None else _leading_dense(dense, layers)
    changes.setdefault("mlp_layer_types", types)
    return replace(config, **changes)


def _check(config: ModelConfig, path: Path) -> None:
    _check_layer_list(config.indexer_types, "indexer_types", ("full", "shared"), config.num_hidden_layers, path)
    if config.indexer_types[0] != "full":
        raise ValueError(f"{path}: indexer_types[0] is 'shared', but layer 0 has no earlier layer to share with")
    if config.dtype not in DTYPES:
        raise ValueError(f"{path}: dtype is {config.dtype!r}, it must be one of {', '.join(DTYPES)}")
    if config.qk_rope_head_dim % 2:
        raise ValueError(f"{path}: qk_rope_head_dim is {config.qk_rope_head_dim}, rotary pairs need an even number")
    if config.index_head_dim < config.qk_rope_head_dim:
        raise ValueError(
            f"{path}: index_head_dim {config.index_head_dim} is smaller than qk_rope_head_dim {config.qk_rope_head_dim}"
        )
    _check_routing(config, path)


def _check_routing(config: ModelConfig, path: Path) -> None:
    experts, groups = config.n_routed_experts, config.n_group
    if experts % groups:
        raise ValueError(f"{path}: n_routed_experts {experts} is not divisible by n_group {groups}")
    if config.topk_group > groups:
        raise ValueError(f"{path}: topk_group {config.topk_group} is more than n_group {groups}")
    if groups > 1 and experts // groups < 2:
        raise ValueError(f"{path}: n_routed_experts {experts} in n_group {groups} leaves fewer than 2 experts a group")
    reachable = experts // groups * config.topk_group
    if config.num_experts_per_tok > reachable:
        raise ValueError(
            f"{path}: num_experts_per_tok is {config.num_experts_per_tok}, n_routed_experts {experts}, "
            f"n_group {groups} and topk_group {config.topk_group} leave {reachable} to choose from"
        )
