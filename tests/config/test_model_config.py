"""The config of a model: what is read, what is refused and in which words, and the sizes of the released models."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields, replace

import pytest
import torch

from megatron_glm.config.model import ModelConfig
from megatron_glm.config.source import PRESET_FOLDER
from tests.helpers.reference import single_chunk, small_config

RELEASED = dict(
    vocab_size=154880,
    hidden_size=6144,
    intermediate_size=12288,
    moe_intermediate_size=2048,
    num_hidden_layers=78,
    num_attention_heads=64,
    q_lora_rank=2048,
    kv_lora_rank=512,
    qk_nope_head_dim=192,
    qk_rope_head_dim=64,
    v_head_dim=256,
    index_n_heads=32,
    index_head_dim=128,
    index_topk=2048,
    n_routed_experts=256,
    num_experts_per_tok=8,
    n_shared_experts=1,
    n_group=1,
    topk_group=1,
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
    rms_norm_eps=1e-5,
    latent_norm_eps=1e-6,
    indexer_norm_eps=1e-6,
    initializer_range=0.02,
    num_nextn_predict_layers=1,
    dtype="bfloat16",
    pad_token_id=154820,
    eos_token_id=(154820, 154827, 154829),
    mlp_layer_types=("dense",) * 3 + ("sparse",) * 75,
)
FULL_LAYERS = (0, 1, 2, *range(6, 78, 4))  # of GLM-5.2
OLD = dict(
    rope_theta=1e6,
    max_position_embeddings=202752,
    indexer_types=("full",) * 78,
    index_share_for_mtp_iteration=False,
)
NEW = dict(
    rope_theta=8e6,
    max_position_embeddings=1048576,
    indexer_types=tuple("full" if i in FULL_LAYERS else "shared" for i in range(78)),
    index_share_for_mtp_iteration=True,
)


def raw_config(**changes) -> dict:
    """The content of a loadable config.json of four layers; a value of `...` removes the field."""
    content = small_config().to_hf() | dict(num_nextn_predict_layers=1) | changes
    return {name: value for name, value in content.items() if value is not ...}


def written(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(raw_config(**changes)))
    return path


def read(folder, **changes) -> ModelConfig:
    written(folder, **changes)
    return ModelConfig.from_hf(folder)


@pytest.mark.parametrize("preset, differing", [("glm5", OLD), ("glm5.1", OLD), ("glm5.2", NEW)])
def test_presets_have_the_released_values(preset, differing):
    expected = RELEASED | differing
    assert expected.keys() == {field.name for field in fields(ModelConfig)}
    config = ModelConfig.from_hf(preset)
    assert {name: getattr(config, name) for name in expected} == expected
    assert [i for i in range(79) if config.has_indexer(i)] == [*(FULL_LAYERS if differing is NEW else range(78)), 78]
    assert [i for i in range(79) if not config.is_moe(i)] == [0, 1, 2]
    assert config.qk_head_dim == 256 and config.mtp_layer_ids == (78,)


def test_the_tiny_preset_is_a_glm_5_2_in_small():
    config = ModelConfig.from_hf("glm5.2-tiny")
    assert set(config.indexer_types) == {"full", "shared"} and set(config.mlp_layer_types) == {"dense", "sparse"}
    assert config.mtp_layer_ids == (6,) and config.index_n_heads >= 16 and config.rope_theta == 8e6


@pytest.mark.parametrize(
    "preset, parameters, tensors",
    [("glm5", 743_911_199_232, 59_870), ("glm5.1", 743_911_199_232, 59_870), ("glm5.2", 743_377_000_704, 59_585)],
)
def test_parameters_and_tensors_of_the_released_models(preset, parameters, tensors):
    config = ModelConfig.from_hf(preset)
    with torch.device("meta"):
        chunk = single_chunk(config)
    sizes = {name: parameter.numel() for name, parameter in chunk.named_parameters()}
    mtp = sum(size for name, size in sizes.items() if name.startswith("layers.78."))
    assert (sum(sizes.values()) - mtp, mtp) == (parameters, 9_952_920_320)
    on_disk = {"gate_up": 2 * config.n_routed_experts, "down": config.n_routed_experts}  # one tensor per expert there
    assert sum(on_disk.get(name.rpartition(".")[2], 1) for name in chunk.state_dict()) == tensors


def test_to_hf_is_read_back_equal(tmp_path):
    irregular = replace(
        small_config(num_hidden_layers=5, indexer_types=("full", "full", "shared", "shared", "full")),
        norm_topk_prob=False,
        num_nextn_predict_layers=2,
        pad_token_id=3,
        eos_token_id=(1, 2),
        dtype="float32",
    )
    for config in (irregular, *(ModelConfig.from_hf(path.stem) for path in PRESET_FOLDER.glob("*.json"))):
        (tmp_path / "config.json").write_text(json.dumps(config.to_hf()))
        assert ModelConfig.from_hf(tmp_path) == config


def test_a_config_is_found_in_a_folder_a_checkpoint_or_a_file(tmp_path):
    (tmp_path / "hf").mkdir()
    path = written(tmp_path / "hf")
    assert ModelConfig.from_hf(tmp_path) == ModelConfig.from_hf(path) == ModelConfig.from_hf(str(tmp_path / "hf"))
    with pytest.raises(ValueError, match="glm6: neither a folder, a config file nor a preset .*glm5.2-tiny"):
        ModelConfig.from_hf("glm6")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty: the folder holds neither config.json nor hf/config.json"):
        ModelConfig.from_hf(tmp_path / "empty")
    for content, words in (("{", "not JSON"), ("[]", "must be a JSON object, not list")):
        path.write_text(content)
        with pytest.raises(ValueError, match=f"config.json: .*{words}"):
            ModelConfig.from_hf(path)


def test_head_dim_is_never_read(tmp_path):
    """It is junk in the released configs; a trainer took it for the width of the rotary part."""
    assert not hasattr(ModelConfig.from_hf("glm5.2"), "head_dim")
    expected = read(tmp_path, head_dim=...)
    for junk in (192, 999_983, 0, -1, None, "junk"):
        assert read(tmp_path, head_dim=junk) == expected


def test_the_explicit_list_is_the_schedule(tmp_path):
    """Irregular lists exist; only a schedule given beside one has to agree with it."""
    irregular = ["full", "shared", "shared", "full"]
    assert read(tmp_path, indexer_types=irregular).indexer_types == tuple(irregular)
    assert read(tmp_path, indexer_types=irregular, index_topk_pattern="FSSF").indexer_types == tuple(irregular)


def test_without_a_list_the_schedule_is_derived(tmp_path):
    assert read(tmp_path, indexer_types=...).indexer_types == ("full",) * 4
    assert read(tmp_path, indexer_types=None, index_topk_pattern="FFSF").indexer_types[2] == "shared"
    lists = dict(num_hidden_layers=78, mlp_layer_types=None, first_k_dense_replace=5, indexer_types=None)
    config = read(tmp_path, index_topk_freq=4, index_skip_topk_offset=3, **lists)
    assert config.indexer_types == NEW["indexer_types"]
    assert config.mlp_layer_types == ("dense",) * 5 + ("sparse",) * 73
    assert read(tmp_path, **lists | dict(first_k_dense_replace=...)).mlp_layer_types == RELEASED["mlp_layer_types"]


def test_older_spellings_are_understood(tmp_path):
    config = read(tmp_path, rope_parameters=..., rope_theta=5e5, dtype=..., torch_dtype="float16", eos_token_id=7)
    assert (config.rope_theta, config.dtype, config.eos_token_id) == (5e5, "float16", (7,))
    assert read(tmp_path, mlp_layer_types=["sparse"] * 4, first_k_dense_replace=3).mlp_layer_types == ("sparse",) * 4


REFUSED = {
    "rope_theta missing": (dict(rope_parameters={"rope_type": "default"}), "rope_parameters.rope_theta is missing"),
    "no rope at all": (dict(rope_parameters=...), "rope_parameters.rope_theta is missing"),
    "rope_theta": (dict(rope_parameters={"rope_theta": "1e6"}), "rope_theta is '1e6', it must be a positive number"),
    "rope type": (
        dict(rope_parameters={"rope_type": "yarn", "rope_theta": 1e6}),
        "rope_parameters.rope_type is 'yarn', only 'default' is served",
    ),
    "rope scaling": (dict(rope_scaling={"factor": 2}), "rope_scaling.factor is 2: only plain"),
    "rope layout": (dict(rope_interleave=False), "rope_interleave is False, only True is served"),
    "indexer rope": (dict(indexer_rope_interleave=False), "indexer_rope_interleave is False, only True"),
    "architecture": (
        dict(architectures=["DeepseekV32ForCausalLM"]),
        "architectures is ['DeepseekV32ForCausalLM'], only ['GlmMoeDsaForCausalLM'] is served",
    ),
    "model type": (dict(model_type="glm4_moe"), "model_type is 'glm4_moe', only 'glm_moe_dsa' is served"),
    "no model type": (dict(model_type=...), "model_type is None"),
    "activation": (dict(hidden_act="gelu"), "hidden_act is 'gelu', only 'silu' is served"),
    "scoring": (dict(scoring_func="softmax"), "scoring_func is 'softmax', only 'sigmoid' is served"),
    "top-k method": (dict(topk_method="greedy"), "topk_method is 'greedy', only 'noaux_tc' is served"),
    "attention bias": (dict(attention_bias=True), "attention_bias is True, only False is served"),
    "attention dropout": (dict(attention_dropout=0.1), "attention_dropout is 0.1, only 0.0 is served"),
    "mlp bias": (dict(mlp_bias=True), "mlp_bias is True, only False is served"),
    "tied embeddings": (dict(tie_word_embeddings=True), "tie_word_embeddings is True, only False is served"),
    "grouped heads": (dict(num_key_value_heads=2), "num_key_value_heads is 2, it must equal num_attention_heads 4"),
    "layer 0 shared": (dict(indexer_types=["shared"] + ["full"] * 3), "indexer_types[0] is 'shared'"),
    "indexer list too short": (
        dict(indexer_types=["full"] * 3),
        "indexer_types lists 3 layers, num_hidden_layers is 4",
    ),
    "indexer list unknown": (dict(indexer_types=["full"] * 3 + ["half"]), "indexer_types[3] is 'half', it must be"),
    "pattern unknown": (dict(indexer_types=..., index_topk_pattern="FSXF"), "index_topk_pattern[2] is 'X'"),
    "list against freq and offset": (
        dict(indexer_types=["full", "full", "shared", "full"], index_topk_freq=2, index_skip_topk_offset=1),
        "indexer_types and index_topk_freq/index_skip_topk_offset disagree on layers [1, 2, 3]",
    ),
    "list against pattern": (dict(index_topk_pattern="FSFF"), "and index_topk_pattern disagree on layers [3]"),
    "frequency": (dict(index_topk_freq=0), "index_topk_freq is 0, it must be a whole number of at least 1"),
    "mlp list too long": (
        dict(mlp_layer_types=["dense"] * 5),
        "mlp_layer_types lists 5 layers, num_hidden_layers",
    ),
    "mlp list unknown": (dict(mlp_layer_types=["moe"] * 4), "mlp_layer_types[0] is 'moe', it must be 'dense' or"),
    "zero": (dict(index_topk=0), "index_topk is 0, it must be a whole number of at least 1"),
    "text for a number": (dict(hidden_size="32"), "hidden_size is '32', it must be a whole number"),
    "layers": (dict(num_hidden_layers="4"), "num_hidden_layers is '4', it must be a whole number"),
    "no layers": (dict(num_hidden_layers=None), "missing field num_hidden_layers"),
    "endless layers": (dict(num_hidden_layers=10**9, index_topk_freq=4), "num_hidden_layers is 1000000000, it must be"),
    "true for a number": (dict(n_shared_experts=True), "n_shared_experts is True, it must be a whole number"),
    "negative MTP": (dict(num_nextn_predict_layers=-1), "num_nextn_predict_layers is -1, it must be a whole number"),
    "text for a truth value": (dict(norm_topk_prob="false"), "norm_topk_prob is 'false', it must be true or false"),
    "epsilon": (dict(rms_norm_eps=0), "rms_norm_eps is 0, it must be a positive number"),
    "infinite": (dict(rms_norm_eps=float("inf")), "rms_norm_eps is inf, it must be a positive number"),
    "no list": (dict(mlp_layer_types=3), "mlp_layer_types is 3, it must be a list"),
    "one architecture": (dict(architectures=1), "architectures is 1, it must be a list"),
    "no object": (dict(rope_parameters="default"), "rope_parameters is 'default', it must be an object"),
    "pattern type": (dict(index_topk_pattern=4), "index_topk_pattern is 4, it must be a string or a list"),
    "offset": (dict(index_skip_topk_offset="2"), "index_skip_topk_offset is '2', it must be a whole number"),
    "dense layers": (dict(first_k_dense_replace=1.5), "first_k_dense_replace is 1.5, it must be a whole number"),
    "end token": (dict(eos_token_id=["</s>"]), "eos_token_id is ['</s>'], it must be a token id"),
    "dtype": (dict(dtype="float8_e4m3fn"), "dtype is 'float8_e4m3fn', it must be one of bfloat16, float16, float32"),
    "odd rope": (dict(qk_rope_head_dim=7), "qk_rope_head_dim is 7, rotary pairs need an even number"),
    "narrow index head": (dict(index_head_dim=4), "index_head_dim 4 is smaller than qk_rope_head_dim 8"),
    "groups": (dict(n_group=3), "n_routed_experts 8 is not divisible by n_group 3"),
    "kept groups": (dict(n_group=2, topk_group=3), "topk_group 3 is more than n_group 2"),
    "group of one": (dict(n_group=8, topk_group=2), "n_routed_experts 8 in n_group 8 leaves fewer than 2"),
    "experts": (dict(num_experts_per_tok=5, n_group=2), "num_experts_per_tok is 5, n_routed_experts 8, n_group 2 and"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_by_field_and_file(tmp_path, case):
    changes, words = REFUSED[case]
    path = written(tmp_path, **changes)
    with pytest.raises(ValueError) as error:
        ModelConfig.from_hf(tmp_path)
    message = str(error.value)
    assert message.startswith(f"{path}: ") and words in message and "\n" not in message, message


@pytest.mark.parametrize(
    "content", [b'{"a": "\xe9"}', b"[" * 100_000, b"{", b"[]"], ids=["latin-1", "deep", "cut", "list"]
)
def test_refuses_what_is_no_json_object(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"config.json: (not JSON|a config must be a JSON object)"):
        ModelConfig.from_hf(tmp_path)


REQUIRED = [field.name for field in fields(ModelConfig) if field.default is MISSING]
DERIVED = {"rope_theta", "indexer_types", "mlp_layer_types"}  # have cases of their own


@pytest.mark.parametrize("name", [name for name in REQUIRED if name not in DERIVED])
def test_a_missing_field_is_named(tmp_path, name):
    path = written(tmp_path, **{name: ..., "num_key_value_heads": ...})
    with pytest.raises(ValueError) as error:
        ModelConfig.from_hf(path)
    assert str(error.value) == f"{path}: missing field {name}"


def test_overrides_change_single_fields():
    base = ModelConfig.from_hf("glm5.2")
    assert ModelConfig.from_hf("glm5.2", index_topk=512, rope_theta=1e4) == replace(
        base, index_topk=512, rope_theta=1e4
    )
    short = ModelConfig.from_hf("glm5.2", num_hidden_layers=7, first_k_dense_replace=1)
    assert short.indexer_types == base.indexer_types[:7] and short.mtp_layer_ids == (7,)
    assert short.mlp_layer_types == ("dense",) + ("sparse",) * 6
    with pytest.raises(ValueError, match="num_hidden_layers 79 is more than the 78 layers of this config"):
        ModelConfig.from_hf("glm5.2", num_hidden_layers=79)
    with pytest.raises(ValueError, match="glm5.2.json: index_topk is 0, it must be"):
        ModelConfig.from_hf("glm5.2", index_topk=0)
