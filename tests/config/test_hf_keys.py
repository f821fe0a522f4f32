"""Which keys of a config.json are read, served, neutral or refused: of the releases, of transformers, of anyone."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest

from megatron_glm.config.hf_keys import NEUTRAL, READ, SERVED_IF_GIVEN, SERVED_VALUES
from megatron_glm.config.model import ModelConfig
from megatron_glm.config.source import PRESET_FOLDER
from tests.config.test_model_config import raw_config, read, written

YARN = {"factor": 40, "original_max_position_embeddings": 4096, "rope_theta": 1e6}
ROPE = "only plain rotary positions are served"
REFUSED = {
    "old spelling": (dict(rope_parameters={"type": "yarn"} | YARN), "rope_parameters.type is 'yarn', only 'default'"),
    "factor first": (dict(rope_parameters=YARN | {"type": "yarn"}), f"rope_parameters.factor is 40: {ROPE}"),
    "factor alone": (dict(rope_parameters={"rope_theta": 1e6, "factor": 40}), f"rope_parameters.factor is 40: {ROPE}"),
    "both types": (
        dict(rope_parameters={"rope_theta": 1e6, "rope_type": "default", "type": "llama3"}),
        "rope_parameters.type is 'llama3', only 'default' is served",
    ),
    "old key": (dict(rope_scaling={"rope_type": "linear"} | YARN), "rope_scaling.rope_type is 'linear', only"),
    "old key, old spelling": (dict(rope_scaling={"type": "dynamic"}), "rope_scaling.type is 'dynamic', only 'default'"),
    "text for a scaling": (dict(rope_scaling="longrope"), "rope_scaling is 'longrope', it must be an object"),
    "rope of part": (
        dict(rope_parameters={"rope_theta": 1e6, "partial_rotary_factor": 0.5}),
        "rope_parameters.partial_rotary_factor is 0.5, only 1.0 is served",
    ),
    "rope of part, outside": (dict(partial_rotary_factor=0.5), "partial_rotary_factor is 0.5, only 1.0 is served"),
    "rope by kind of layer": (
        dict(rope_parameters={"indexed_attention": {"rope_type": "yarn"} | YARN, "full_attention": None}),
        "rope_parameters.indexed_attention is {'rope_type': 'yarn', 'factor': 40, 'original_max_position_embedd",
    ),
    "unknown in rope": (
        dict(rope_parameters={"rope_theta": 1e6, "mrope_section": [1, 2]}),
        f"rope_parameters.mrope_section is [1, 2]: {ROPE}",
    ),
    "two thetas": (
        dict(rope_theta=1e6),
        "rope_theta is 1000000.0 and rope_parameters.rope_theta is 10000.0; keep one of them",
    ),
    "two objects": (dict(rope_scaling={"rope_theta": 1e6}), "rope_parameters and rope_scaling are both given"),
    "no causal mask": (dict(is_causal=False), "is_causal is False, only True is served"),
    "layers of their own": (
        dict(per_layer_config={"0": {"n_group": 2}}),
        "per_layer_config is {'0': {'n_group': 2}}",
    ),
    "other experts": (dict(num_experts=16), "num_experts is 16, it must equal n_routed_experts 8"),
    "local experts": (dict(num_local_experts=4), "num_local_experts is 4, it must equal n_routed_experts 8"),
    "eps of the latent norms": (dict(latent_norm_eps=1e-5), "latent_norm_eps is 1e-05, only 1e-06 is served"),
    "a digit too many": (dict(hidden_size=10**15), "hidden_size is 1000000000000000, it must be at most 16777216"),
    "query width": (dict(qk_head_dim=99), "qk_head_dim is 99, it must equal qk_nope_head_dim + qk_rope_head_dim"),
    "every second layer": (dict(moe_layer_freq=2), "moe_layer_freq is 2, only 1 is served"),
    "router in bf16": (dict(moe_router_dtype="bfloat16"), "moe_router_dtype is 'bfloat16', only 'float32' is served"),
    "auxiliary loss": (dict(output_router_logits=True), "output_router_logits is True, only False is served"),
    "number for a truth value": (dict(rope_interleave=1), "rope_interleave is 1, only True is served"),
    "window": (dict(sliding_window=4096), "sliding_window is 4096: this trainer does not know that key"),
    "false, still unknown": (dict(use_qk_norm=False), "use_qk_norm is False: this trainer does not know that key"),
    "long": (dict(approximate_experts=[1] * 99), "approximate_experts is [1, 1, 1"),
    "several": (dict(mhc=True, hc_mult=4), "mhc is True: this trainer does not know that key, nor hc_mult: remove"),
    "other case": (dict(Hidden_Act="gelu"), "Hidden_Act is 'gelu': this trainer does not know that key"),
    "nested": (dict(text_config={"rope_scaling": YARN}), "text_config is {'rope_scaling': {'factor': 40,"),
    "end token null": (dict(eos_token_id=[None]), "eos_token_id is [None], it must be a token id"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_by_key_and_file(tmp_path, case):
    changes, words = REFUSED[case]
    path = written(tmp_path, **changes)
    with pytest.raises(ValueError) as error:
        ModelConfig.from_hf(tmp_path)
    message = str(error.value)
    assert message.startswith(f"{path}: ") and words in message and "\n" not in message, message


# Beside the shapes: what the released folders hold, the FP8 ones, and one saved by an earlier transformers
RELEASED_EXTRAS = dict(
    ep_size=1,
    moe_layer_freq=1,
    moe_router_dtype="float32",
    pretraining_tp=1,
    qk_head_dim=256,
    index_topk_pattern=None,
    transformers_version="5.12.0",
    use_cache=True,
    bos_token_id=0,
    num_experts=256,
    layer_types=["deepseek_sparse_attention"] * 78,
)
FP8 = dict(
    quant_method="fp8",
    fmt="e4m3",
    activation_scheme="dynamic",
    weight_block_size=[128, 128],
    modules_to_not_convert=["lm_head", "model.layers.0.self_attn.indexers_proj"],
)
OLDER = dict(
    _name_or_path="zai-org/GLM-5",
    torch_dtype="bfloat16",
    rope_scaling=None,
    rope_theta=1e6,
    pruned_heads={},
    is_decoder=False,
    add_cross_attention=False,
    chunk_size_feed_forward=0,
    output_attentions=False,
    max_length=20,
    temperature=1.0,
    num_nextn_predict_layers=None,
)


@pytest.mark.parametrize("preset", ["glm5", "glm5.1", "glm5.2"])
def test_released_configs_are_read(tmp_path, preset):
    content = json.loads((PRESET_FOLDER / f"{preset}.json").read_text())
    expected = ModelConfig.from_hf(preset)
    for extras in (RELEASED_EXTRAS, {"quantization_config": FP8}, OLDER):
        theta = {"rope_theta": content["rope_parameters"]["rope_theta"]} if "rope_theta" in extras else {}
        (tmp_path / "config.json").write_text(json.dumps(content | extras | theta))
        mtp = 0 if extras is OLDER else 1
        assert ModelConfig.from_hf(tmp_path) == replace(expected, num_nextn_predict_layers=mtp)


def test_what_transformers_writes_is_read_and_every_key_it_knows_is_listed(tmp_path):
    from transformers import GenerationConfig, GlmMoeDsaConfig

    expected = ModelConfig.from_hf("glm5.2-tiny")
    source = GlmMoeDsaConfig.from_pretrained(PRESET_FOLDER / "glm5.2-tiny.json")
    for use_diff in (True, False):
        source.to_json_file(tmp_path / "config.json", use_diff=use_diff)
        read = ModelConfig.from_hf(tmp_path)
        assert read == replace(expected, dtype=read.dtype)
    known = {field.name for field in fields(ModelConfig)}.union(READ, NEUTRAL, SERVED_VALUES, SERVED_IF_GIVEN)
    keys = {field.name for field in fields(GlmMoeDsaConfig)} | set(source.to_dict())
    assert keys | set(GenerationConfig._get_default_generation_params()) <= known


def test_null_is_as_absent(tmp_path):
    """Whatever the key: the value is the default, or the field is missing."""
    expected = read(tmp_path, num_nextn_predict_layers=...)
    assert read(tmp_path, num_nextn_predict_layers=None) == expected and expected.num_nextn_predict_layers == 0
    nothing = dict.fromkeys(("sliding_window", "rope_scaling", "quantization_config", "indexer_types", "n_group"))
    assert read(tmp_path, **nothing) == read(tmp_path, **dict.fromkeys(nothing, ...))
    rope = {"rope_theta": 1e4, "rope_type": None, "factor": None, "type": "default"}
    assert read(tmp_path, rope_parameters=rope, rope_theta=None) == read(tmp_path)
    assert read(tmp_path, rope_parameters=None, rope_theta=1e4, rope_scaling={}) == read(tmp_path)


QUANTISED = {
    "GPTQ": (dict(quantization_config={"bits": 4, "group_size": 128, "quant_method": "gptq"}), ["4 bits", "gptq"]),
    "AWQ": (dict(quantization_config={"quant_method": "awq", "w_bit": 4}), ["awq", "4 bits"]),
    "bitsandbytes": (dict(quantization_config={"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}), ["4bit", "nf4"]),
    "NVFP4": (dict(quantization_config={"quant_algo": "NVFP4", "producer": {"name": "modelopt"}}), ["NVFP4, modelopt"]),
    "MXFP4": (dict(quantization_config={"quant_method": "mxfp4"}), ["mxfp4"]),
    "int4": (
        dict(
            quantization_config={
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int"}}},
                "format": "pack-quantized",
                "quant_method": "compressed-tensors",
            }
        ),
        ["pack-quantized, compressed-tensors, 4 bits, int"],
    ),
    "old key": (dict(compression_config={"format": "nvfp4-pack-quantized"}), ["compression_config", "nvfp4-pack-"]),
    "MLX": (dict(quantization={"group_size": 64, "bits": 4}), ["quantization says", "4 bits"]),
    "FP8 a tensor": (dict(quantization_config=FP8 | {"activation_scheme": "static"}), ["fp8 (activation_scheme is"]),
    "other FP8": (dict(quantization_config=FP8 | {"fmt": "e5m2"}), ["fp8 (fmt is 'e5m2')"]),
    "FP8 and more": (dict(quantization_config=FP8 | {"rotation": "hadamard"}), ["fp8 (rotation is 'hadamard')"]),
}


@pytest.mark.parametrize("case", QUANTISED)
def test_other_quantisations_are_named(tmp_path, case):
    changes, words = QUANTISED[case]
    path = written(tmp_path, **changes)
    with pytest.raises(ValueError) as error:
        ModelConfig.from_hf(tmp_path)
    assert str(error.value).startswith(f"{path}: ") and all(word in str(error.value) for word in words), error.value


def test_presets_in_other_spellings_and_models_of_the_hub():
    for name in ("GLM-5.2", "glm52", "glm_5_2", "Glm5.2", "glm-5-2"):
        assert ModelConfig.from_hf(name) == ModelConfig.from_hf("glm5.2")
    assert ModelConfig.from_hf("GLM-5.2-tiny") == ModelConfig.from_hf("glm5.2-tiny")
    command = "hf download zai-org/GLM-5.2 --local-dir hf/GLM-5.2"
    for name in ("zai-org/GLM-5.2", "https://huggingface.co/zai-org/GLM-5.2/tree/main", "hf://zai-org/GLM-5.2"):
        for source in (name, Path(name)):
            with pytest.raises(ValueError, match=f"neither a folder, .*: {command}$"):
                ModelConfig.from_hf(source)
    for name in ("GLM-5.3", "./zai-org/GLM-5.2", "/zai-org/GLM-5.2", "runs/zai-org/GLM-5.2"):
        with pytest.raises(ValueError, match=r"presets: .*\)$"):
            ModelConfig.from_hf(name)


def test_config_files_that_are_none(tmp_path):
    path = tmp_path / "config.json"
    path.symlink_to(tmp_path / "blobs" / "gone")
    for source in (tmp_path, path):
        with pytest.raises(ValueError, match=r"config.json is a link to .*gone, which does not exist"):
            ModelConfig.from_hf(source)
    path.unlink()
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    with pytest.raises(ValueError, match=r"config.json is a Git LFS pointer.*git lfs pull"):
        ModelConfig.from_hf(tmp_path)
    path.write_text(json.dumps(raw_config())[:-1] + ', "n_group": 4}')
    with pytest.raises(ValueError, match="config.json: not JSON: the key n_group is there twice"):
        ModelConfig.from_hf(tmp_path)
