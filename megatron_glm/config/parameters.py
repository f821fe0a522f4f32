"""Every parameter of a model, declared once.

Conversion, checkpoints, initial weights, weight decay, FLOPs and the planner read this table. A module that makes a
parameter of another name or shape is refused when its chunk is built (`declared`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from .lora import NO_ADAPTERS, LoraConfig
from .model import ModelConfig

Part = Literal[
    "embedding", "norms", "attention", "indexer", "dense", "router", "experts", "shared", "mtp", "head", "adapters"
]  # dense: the MLP of a layer without experts; shared: the shared expert
ADAPTER = ("lora_A", "lora_B")  # the ends of an adapter's names


@dataclass(frozen=True)
class Parameter:
    """A parameter or persistent buffer of the whole model, before any rank's cut.

    name: canonical, that of the module that holds it: "layers.3.mlp.experts.down".
    kind: "matrix" and "vocabulary" (embedding, head) start normal and decay; "norm" starts at 1, "bias" at 0; "buffer"
        starts at 0, is fp32 and has no gradient; "lora_A" starts uniform, "lora_B" at 0, both decay.
    tp_dim: the dim that tensor parallelism cuts; None: every rank of it holds the whole.
    used: how many of dim 0 (rows, or experts) one token is multiplied by; None: all.
    fp8: whether the FP8 releases hold it in FP8.
    expert_matrices: Hugging Face's names of the matrices of one expert, which dim 1 stacks in this order.
    layer: the layer that it is in, None outside; mtp: whether that is an MTP layer.
    """

    name: str
    shape: tuple[int, ...]
    part: Part
    kind: Literal["matrix", "vocabulary", "norm", "bias", "buffer", "lora_A", "lora_B"] = "matrix"
    tp_dim: int | None = None
    used: int | None = None
    fp8: bool = False
    expert_matrices: tuple[str, ...] = ()
    layer: int | None = None
    mtp: bool = False

    @property
    def decays(self) -> bool:
        """Whether AdamW's weight decay applies to it."""
        return self.kind in ("matrix", "vocabulary", *ADAPTER)

    @property
    def fp8_products(self) -> bool:
        """Whether FP8 training computes its products in FP8.

        Of what the releases hold in FP8, without kv_a (576 rows are no multiple of 128) and kv_b, whose halves the
        attention multiplies by head, and without the indexer, whose scores choose keys.
        """
        return self.fp8 and self.part != "indexer" and ".self_attn.kv_" not in self.name

    @property
    def hf_key(self) -> str:
        """Its Hugging Face key; the experts' one is that of a newer form, which holds all of a layer in one tensor."""
        fused = "_proj" if self.expert_matrices else ""
        return self.name if self.part == "head" else f"model.{self.name}{fused}"

    @property
    def adapter_prefixes(self) -> tuple[str, ...]:
        """What the names of its adapters begin with: of each matrix that it stacks, in their order."""
        owner = self.name.rpartition(".")[0]
        return tuple(f"{owner}.{m.removesuffix('_proj')}_" for m in self.expert_matrices) or (f"{owner}.",)

    @property
    def flops(self) -> int:
        """Forward FLOPs of one token's product with it; a multiply-add is 2."""
        first, *others = self.shape
        return 2 * (first if self.used is None else self.used) * math.prod(others) if others else 0

    @property
    def fsdp_unit(self) -> Literal["embedding", "experts", "layer", "head", "root"]:
        """What FSDP gathers together; "root" is what the others leave of a chunk."""
        if self.part in ("embedding", "head"):
            return self.part
        if ".experts." in self.name:
            return "experts"
        return "root" if self.layer is None else "layer"


@cache
def model_parameters(config: ModelConfig) -> Mapping[str, Parameter]:
    """All of a model by name, MTP layers included, in the order in which they are converted and exported."""
    size = (config.vocab_size, config.hidden_size)
    rows = [Parameter("embed_tokens.weight", size, "embedding", "vocabulary", tp_dim=0, used=0)]
    for layer in (*range(config.num_hidden_layers), *config.mtp_layer_ids):
        rows += layer_parameters(config, layer)
    rows += [Parameter("norm.weight", (config.hidden_size,), "norms", "norm")]
    rows += [Parameter("lm_head.weight", size, "head", "vocabulary", tp_dim=0)]
    return {row.name: row for row in rows}


@cache
def layer_parameters(config: ModelConfig, layer: int) -> tuple[Parameter, ...]:
    """Those of one layer."""
    hidden, mtp = config.hidden_size, layer in config.mtp_layer_ids
    rows = [*_attention(config)]
    rows += _indexer(config) if config.has_indexer(layer) else []
    rows += _experts(config) if config.is_moe(layer) else _mlp("mlp", hidden, config.intermediate_size, "dense")
    rows += [Parameter(f"{name}_layernorm.weight", (hidden,), "norms", "norm") for name in ("input", "post_attention")]
    if mtp:
        norms = ("enorm", "hnorm", "shared_head.norm")
        rows += [Parameter(f"{name}.weight", (hidden,), "mtp", "norm") for name in norms]
        rows += [Parameter("eh_proj.weight", (hidden, 2 * hidden), "mtp")]
    return tuple(replace(row, name=f"layers.{layer}.{row.name}", layer=layer, mtp=mtp) for row in rows)


def _attention(config: ModelConfig) -> Iterator[Parameter]:
    hidden, heads, at = config.hidden_size, config.num_attention_heads, "self_attn"
    q_rank, latent = config.q_lora_rank, config.kv_lora_rank
    keys_and_values = heads * (config.qk_nope_head_dim + config.v_head_dim)
    yield Parameter(f"{at}.q_a_proj.weight", (q_rank, hidden), "attention", fp8=True)
    yield Parameter(f"{at}.q_a_layernorm.weight", (q_rank,), "norms", "norm")
    yield Parameter(f"{at}.q_b_proj.weight", (heads * config.qk_head_dim, q_rank), "attention", tp_dim=0, fp8=True)
    width = latent + config.qk_rope_head_dim
    yield Parameter(f"{at}.kv_a_proj_with_mqa.weight", (width, hidden), "attention", fp8=True)
    yield Parameter(f"{at}.kv_a_layernorm.weight", (latent,), "norms", "norm")
    yield Parameter(f"{at}.kv_b_proj.weight", (keys_and_values, latent), "attention", tp_dim=0, fp8=True)
    yield Parameter(f"{at}.o_proj.weight", (hidden, heads * config.v_head_dim), "attention", tp_dim=1, fp8=True)


def _indexer(config: ModelConfig) -> Iterator[Parameter]:
    at, heads, dim = "self_attn.indexer", config.index_n_heads, config.index_head_dim
    yield Parameter(f"{at}.wq_b.weight", (heads * dim, config.q_lora_rank), "indexer", fp8=True)
    yield Parameter(f"{at}.wk.weight", (dim, config.hidden_size), "indexer", fp8=True)
    yield Parameter(f"{at}.weights_proj.weight", (heads, config.hidden_size), "indexer")
    yield Parameter(f"{at}.k_norm.weight", (dim,), "indexer", "norm")
    yield Parameter(f"{at}.k_norm.bias", (dim,), "indexer", "bias")


def _experts(config: ModelConfig) -> Iterator[Parameter]:
    hidden, experts, width = config.hidden_size, config.n_routed_experts, config.moe_intermediate_size
    yield Parameter("mlp.gate.weight", (experts, hidden), "router")
    yield Parameter("mlp.gate.e_score_correction_bias", (experts,), "router", "buffer")
    used, halves, whole = config.num_experts_per_tok, ("gate_proj", "up_proj"), ("down_proj",)
    yield Parameter(
        "mlp.experts.gate_up", (experts, 2 * width, hidden), "experts", used=used, fp8=True, expert_matrices=halves
    )
    yield Parameter("mlp.experts.down", (experts, hidden, width), "experts", used=used, fp8=True, expert_matrices=whole)
    yield from _mlp("mlp.shared_experts", hidden, config.n_shared_experts * width, "shared")


def _mlp(at: str, hidden: int, width: int, part: Part) -> Iterator[Parameter]:
    yield Parameter(f"{at}.gate_proj.weight", (width, hidden), part, tp_dim=0, fp8=True)
    yield Parameter(f"{at}.up_proj.weight", (width, hidden), part, tp_dim=0, fp8=True)
    yield Parameter(f"{at}.down_proj.weight", (hidden, width), part, tp_dim=1, fp8=True)


@cache
def adapter_parameters(config: ModelConfig, lora: LoraConfig) -> Mapping[str, Parameter]:
    """The adapters of a model's layers by name; MTP layers have none.

    Those of "layers.3.self_attn.o_proj.weight" [out, in] are "layers.3.self_attn.o_proj.lora_A" [rank, in] and
    "….lora_B" [out, rank]. Of the routed experts' matrices, gate, up and down, each has its own:
    "layers.3.mlp.experts.gate_lora_A" [E, rank, in].
    """
    rows: list[Parameter] = []
    for parameter in model_parameters(config).values() if lora.lora_rank else ():
        owner, _, name = parameter.name.rpartition(".")
        module = owner.rpartition(".")[2]
        if parameter.mtp or parameter.part == "indexer" or module not in lora.lora_target_modules:
            continue
        if parameter.part == "experts" or (name == "weight" and parameter.kind == "matrix"):
            *experts, out, width = parameter.shape
            for prefix in parameter.adapter_prefixes:
                rows += _adapter(parameter, prefix, (*experts, out // len(parameter.adapter_prefixes), width), lora)
    return {row.name: row for row in rows}


def _adapter(of: Parameter, prefix: str, shape: tuple[int, ...], lora: LoraConfig) -> Iterator[Parameter]:
    """The two matrices of the adapter of a matrix [out, in], or one an expert, [E, out, in]."""
    *experts, out, width = shape
    rank, _ = lora.rank_and_scale(expert=bool(experts))
    row = replace(of, part="adapters", fp8=False, expert_matrices=())
    first, second = (*experts, rank, width), (*experts, out, rank)
    yield replace(row, name=f"{prefix}lora_A", shape=first, kind="lora_A", tp_dim=1 if of.tp_dim == 1 else None)
    yield replace(row, name=f"{prefix}lora_B", shape=second, kind="lora_B", tp_dim=0 if of.tp_dim == 0 else None)


def declared(
    config: ModelConfig, shapes: Mapping[str, tuple[int, ...]], lora: LoraConfig = NO_ADAPTERS
) -> dict[str, Parameter]:
    """The declarations of what modules hold: {canonical name: whole shape}.

    Raises: ValueError naming a parameter that is not declared, or has another shape here.
    """
    table = {**model_parameters(config), **adapter_parameters(config, lora)}
    for name, shape in shapes.items():
        if name not in table or table[name].shape != shape:
            other = list(table[name].shape) if name in table else "missing"
            raise ValueError(f"{name} is {list(shape)} in its module, and {other} in config/parameters.py")
    return {name: table[name] for name in shapes}
