"""Files of a Hugging Face folder that contradict each other, are not whole, or hold something else than a model."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_glm.checkpoint import convert, files, hf, report, sharded
from megatron_glm.checkpoint.output import Run
from megatron_glm.config import iterations, source
from megatron_glm.config.flags import parse
from megatron_glm.config.model import ModelConfig
from megatron_glm.data.chat import ChatTemplate
from megatron_glm.data.tokenizer import Tokenizer
from megatron_glm.parallel.shard import Rectangle
from tests.helpers import hf_folder

INDEX = "model.safetensors.index.json"
SHARDS = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 19970699\n"
NORM = "model.norm.weight"
MTP = "model.layers.6."


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original") / "hf"
    hf_folder.make_folder(folder)
    return folder


@pytest.fixture(autouse=True)
def no_sync(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return shutil.copytree(original, tmp_path / "hf")


def edit(file: Path, change: Callable[[dict], object]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def move(folder: Path, prefix: str, name: str) -> dict[str, torch.Tensor]:
    """Takes the tensors of a prefix out of index and shards and puts them into one file."""
    moved: dict[str, torch.Tensor] = {}
    for shard in SHARDS:
        tensors = load_file(folder / shard)
        moved |= {key: tensors.pop(key) for key in list(tensors) if key.startswith(prefix)}
        save_file(tensors, folder / shard)
    edit(folder / INDEX, lambda index: [index["weight_map"].pop(key) for key in moved])
    (folder / name).parent.mkdir(exist_ok=True)
    save_file(moved, folder / name)
    return moved


def one_file(folder: Path) -> None:
    """Makes model.safetensors of the shards and their index."""
    tensors = hf_folder.read_folder(folder)
    for name in (INDEX, *SHARDS):
        (folder / name).unlink()
    save_file(tensors, folder / "model.safetensors")


def set_config(folder: Path, **changes: object) -> None:
    edit(folder / "config.json", lambda config: config.update(changes))


def pytorch_only(folder: Path) -> None:
    one_file(folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def no_index(folder: Path) -> None:
    (folder / INDEX).unlink()


def twice(folder: Path) -> None:
    tensors = load_file(folder / SHARDS[0]) | {NORM: load_file(folder / SHARDS[2])[NORM]}
    save_file(tensors, folder / SHARDS[0])


def repeated_key(folder: Path) -> None:
    text = (folder / INDEX).read_text()
    (folder / INDEX).write_text(text.replace('"weight_map": {', f'"weight_map": {{"{NORM}": "{SHARDS[0]}", '))


def dangling(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(folder / "blobs" / "gone")

    return change


def pointer(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(POINTER) and None


def extra(file: str, **tensors: torch.Tensor) -> Callable[[Path], None]:
    return lambda folder: save_file({key.replace("__", "."): value for key, value in tensors.items()}, folder / file)


def packed(ending: str, dtype: torch.dtype = torch.uint8) -> Callable[[Path], None]:
    """Puts a tensor of a quantised release in the place of a weight."""
    key = "model.layers.3.mlp.experts.5.up_proj."

    def change(folder: Path) -> None:
        move(folder, key, "other.safetensors")
        save_file(
            {key + ending: torch.zeros(4, 4).to(dtype), key + "weight_scale": torch.zeros(4)},
            folder / "other.safetensors",
        )

    return change


def side(name: str, content: object) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(json.dumps(content)) and None


MODELOPT = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}}
REFUSED: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "one file and an index": (
        extra("model.safetensors", x=torch.zeros(1)),
        ["both model.safetensors and model."],
    ),
    "two indices": (
        lambda f: shutil.copy(f / INDEX, f / "model.safetensors.index.fp32.json"),
        [INDEX, "model.safetensors.index.fp32.json"],
    ),
    "index of another name": (
        lambda f: (f / INDEX).rename(f / "weights.safetensors.index.json"),
        ["only an index of another name, weights.safetensors.index.json"],
    ),
    "shards without index": (no_index, [SHARDS[0], f"download {INDEX}"]),
    "other name": (
        lambda f: (one_file(f), (f / "model.safetensors").rename(f / "consolidated.safetensors")),
        ["holds neither", "consolidated.safetensors"],
    ),
    "PyTorch": (pytorch_only, ["only pytorch_model.bin: save the model as safetensors"]),
    "GGUF": (lambda f: (pytorch_only(f), (f / "pytorch_model.bin").rename(f / "q4.gguf")), ["only q4.gguf"]),
    "shard missing": (lambda f: (f / SHARDS[1]).unlink(), [SHARDS[1], "is missing", INDEX]),
    "shard elsewhere": (
        lambda f: edit(f / INDEX, lambda index: index["weight_map"].update({NORM: "../x.safetensors"})),
        [INDEX, NORM, "../x.safetensors, outside its folder"],
    ),
    "tensor in two shards": (twice, [SHARDS[0], NORM, "does not place there"]),
    "key twice in the index": (repeated_key, [INDEX, f"the key {NORM} is there twice"]),
    "empty index": (lambda f: (f / INDEX).write_text('{"weight_map": {}}'), [INDEX, "its weight_map is empty"]),
    "copy outside the index": (
        lambda f: save_file({NORM: torch.zeros(72)}, f / "consolidated.00.safetensors"),
        ["consolidated.00.safetensors", SHARDS[2], f"both hold {NORM}"],
    ),
    "other shards left": (
        lambda f: (one_file(f), save_file({NORM: torch.zeros(72)}, f / "model-00002-of-00002.safetensors")),
        ["model-00002-of-00002.safetensors", "model.safetensors both hold"],
    ),
    "unknown tensors": (
        extra("mtp.safetensors", mtp__enorm__weight=torch.zeros(72)),
        ["mtp.safetensors", "mtp.enorm"],
    ),
    "deeper": (
        lambda f: ((f / "mtp").mkdir(), save_file({"x": torch.zeros(72)}, f / "mtp" / "a.safetensors")),
        ["mtp/a.safetensors: the tensor x belongs to no part of this model"],
    ),
    "MTP layer not promised": (
        lambda f: (set_config(f, num_nextn_predict_layers=None), move(f, MTP, "mtp.safetensors")),
        ["mtp.safetensors: the tensor model.layers.6.", "config.json says 6 layers and 0 MTP layers"],
    ),
    "half an MTP layer": (
        lambda f: move(f, MTP + "mlp.", "mtp.safetensors") and (f / "mtp.safetensors").unlink(),
        ["hf lacks the tensor model.layers.6.mlp.gate.weight"],
    ),
    "misshapen outside": (
        lambda f: (move(f, NORM, "late.safetensors"), save_file({NORM: torch.zeros(71)}, f / "late.safetensors")),
        ["late.safetensors", NORM, "[71]", "[72]"],
    ),
    "adapter beside": (side("adapter_config.json", {"peft_type": "LORA"}), ["adapter_config.json is of an adapter"]),
    "adapter": (
        lambda f: (no_index(f), save_file({"a": torch.zeros(1)}, f / "adapter_model.safetensors")),
        ["adapter_model.safetensors is of an adapter", "merge it into its base model"],
    ),
    "NVFP4 beside": (side("hf_quant_config.json", MODELOPT), ["hf_quant_config.json", "modelopt, NVFP4"]),
    "GPTQ beside": (side("quantize_config.json", {"bits": 4, "group_size": 128}), ["quantize_config.json", "4 bits"]),
    "W8A8 beside": (
        side("quant_model_description.json", {"model_quant_type": "W8A8"}),
        ["quant_model_description.json"],
    ),
    "format in the config": (
        lambda f: set_config(f, quantization_config={"quant_method": "compressed-tensors", "format": "int-quantized"}),
        ["config.json", "compressed-tensors, int-quantized"],
    ),
    "NVFP4 tensors": (packed("weight_scale_2", torch.float32), ["NVFP4 (model.layers.3", "weight_scale_2"]),
    "packed tensors": (packed("weight_packed"), ["compressed-tensors", "weight_packed"]),
    "GPTQ tensors": (packed("qweight", torch.int32), ["GPTQ or AWQ (model.layers.3"]),
    "bitsandbytes tensors": (packed("weight.quant_state.bitsandbytes__nf4"), ["bitsandbytes (model.layers.3"]),
    "FP8 a tensor": (packed("weight", torch.float8_e4m3fn), ["a scale for each tensor", "weight_scale"]),
    "dangling shard": (dangling(SHARDS[1]), [SHARDS[1], "is a link to", "gone, which does not exist"]),
    "dangling config": (dangling("config.json"), ["config.json is a link to"]),
    "dangling tokenizer": (dangling("tokenizer.json"), ["tokenizer.json is a link to"]),
    "dangling folder": (dangling("additional_chat_templates"), ["additional_chat_templates is a link to"]),
    "tokenizer cut off": (
        lambda f: (f / "tokenizer.json").write_text('{"model": {"vocab"'),
        ["tokenizer.json: not JSON"],
    ),
    "empty file": (lambda f: (f / "generation_config.json").write_text(""), ["generation_config.json: not JSON"]),
    "pointer in a folder": (pointer("additional/other.jinja"), ["additional/other.jinja is a Git LFS pointer"]),
} | {
    f"pointer {name}": (pointer(name), [f"{name} is a Git LFS pointer", "git lfs pull"])
    for name in (SHARDS[2], INDEX, "config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
}


@pytest.mark.parametrize("case", REFUSED)
def test_is_refused_from_names_and_headers(case: str, folder: Path):
    change, words = REFUSED[case]
    change(folder)
    with pytest.raises(ValueError) as error:
        hf.HFCheckpoint(folder)
    message = str(error.value)
    assert "\n" not in message and str(folder) in message, message
    for word in words:
        assert word in message, message


def test_weights_outside_the_index_are_read(folder: Path):
    """An MTP layer in a file of its own, with or without an index beside it."""
    tensors = hf_folder.read_folder(folder)
    move(folder, MTP, "mtp.safetensors")
    move(folder, NORM, "late/norm.safetensors")
    edit(folder / INDEX, lambda index: index.update(weight_map={k: f"./{v}" for k, v in index["weight_map"].items()}))
    convert.Import(hf.HFCheckpoint(folder), folder.parent / "ckpt").write(Run())
    export = convert.Export(folder.parent / "ckpt" / "iter_0000000")
    export.write(folder.parent / "back", Run())
    hf_folder.assert_same_tensors(hf_folder.read_folder(folder.parent / "back"), tensors)
    assert (folder.parent / "back" / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    one_file(folder)
    assert hf.HFCheckpoint(folder).config.num_nextn_predict_layers == 1


def test_nothing_is_written_where_a_file_is_not_whole(folder: Path):
    """Before this was asked, a link to nothing was left out of the checkpoint without a word."""
    dangling("tokenizer.json")(folder)
    with pytest.raises(ValueError, match="tokenizer.json is a link to"):
        convert.Import(hf.HFCheckpoint(folder), folder.parent / "ckpt")
    assert not (folder.parent / "ckpt").exists()


def test_a_linked_folder_is_followed_once(folder: Path):
    (folder / "additional").rename(folder.parent / "elsewhere")
    (folder / "additional").symlink_to(folder.parent / "elsewhere")
    (folder.parent / "elsewhere" / "loop").symlink_to(folder)
    assert Path("additional/other.jinja") in files.side_files(folder)
    convert.Import(hf.HFCheckpoint(folder), folder.parent / "ckpt").write(Run())
    copied = folder.parent / "ckpt" / "iter_0000000" / "hf" / "additional" / "other.jinja"
    assert copied.read_bytes() == hf_folder.SIDE_FILES["additional/other.jinja"]


def test_a_folder_of_its_own_inside_is_another_model(folder: Path, original: Path):
    """An intermediate checkpoint that a trainer left beside the final model."""
    shutil.copytree(original, folder / "checkpoint-500")
    hf.HFCheckpoint(folder)


CHANGES = {
    "MTP": dict(num_nextn_predict_layers=0),
    "forward": dict(rope_theta=5e5, index_topk=7, rms_norm_eps=1e-4, norm_topk_prob=False),
    "layers": dict(num_hidden_layers=3, num_nextn_predict_layers=0),
    "heads": dict(num_attention_heads=2, n_routed_experts=4),
}


@pytest.mark.parametrize("case", CHANGES)
def test_an_exported_config_says_what_is_exported(case: str, folder: Path):
    """Flags of a run change the model after its config.json was copied; everything else stays as it came."""
    old = ("layer_types", ["indexed_attention"] * 6), ("index_topk_freq", 2), ("rope_theta", 8e6), ("num_experts", 8)
    set_config(folder, pad_token_id=None, qk_head_dim=40, index_topk_pattern=None, **dict(old))
    before = ModelConfig.from_hf(folder)
    after = ModelConfig.from_hf(folder, **CHANGES[case])
    ones = [
        Rectangle(name, shape, (0,) * len(shape), torch.ones(shape, dtype=dtype), owner=True)
        for name, (shape, dtype) in hf.parameter_shapes(after).items()
    ]
    sharded.save(folder.parent / "ckpt", 1, ones, {}, after, folder, None)
    for target, fp8 in (("back", False), ("fp8", True)):
        convert.Export(folder.parent / "ckpt" / "iter_0000001", fp8=fp8).write(folder.parent / target, Run())
        assert hf.HFCheckpoint(folder.parent / target).config == after != before
    exported = json.loads((folder.parent / "back" / "config.json").read_text())
    assert exported["head_dim"] == 7 and exported["pad_token_id"] is None


def test_a_path_of_another_kind_is_told(folder: Path, tmp_path: Path):
    convert.Import(hf.HFCheckpoint(folder), tmp_path / "ckpt").write(Run())
    one = tmp_path / "ckpt" / "iter_0000000"
    cache = tmp_path / "models--zai-org--GLM-5.2" / "snapshots" / "ba97"
    shutil.copytree(folder, cache)
    checkpoint, file = "it is a checkpoint: --load", "it is a file: give its folder"
    command = "hf download zai-org/GLM-5.2 --local-dir hf/GLM-5.2"
    for path, words in {
        tmp_path / "ckpt": checkpoint,
        folder / "config.json": file,
        folder / SHARDS[0]: file,
        cache.parents[1]: f"it is a download cache, and the model is in {cache}",
        tmp_path: "holds no config.json; a model is in .*hf",
        Path("zai-org/GLM-5.2"): command,
    }.items():
        with pytest.raises(ValueError, match=words):
            hf.HFCheckpoint(path)
    with pytest.raises(ValueError, match=f"holds neither {INDEX} nor model.safetensors; {checkpoint}"):
        hf.HFCheckpoint(one)
    for path, words in {
        folder: "it is a Hugging Face folder: --load-hf trains from it",
        folder / SHARDS[0]: file,
        Path("zai-org/GLM-5.2"): command,
        tmp_path / "nothing": "tools/convert_hf.py makes one of a Hugging Face folder",
    }.items():
        with pytest.raises(ValueError, match=f"--load {path}: the folder holds no checkpoint .*{words}"):
            iterations.start(path)
    for path, words in {
        tmp_path / "ckpt": checkpoint,
        folder / "config.json": file,
        "zai-org/GLM-5.2": command,
    }.items():
        with pytest.raises(ValueError, match=f"--load-hf {path}: the folder holds no model .*{words}"):
            source.require_model("--load-hf", path)


@pytest.mark.parametrize("name, owner", [("common.pt", "Megatron-LM"), ("zero_pp_rank_0_mp_rank_00", "DeepSpeed")])
def test_checkpoints_of_other_trainers_are_named(tmp_path: Path, name: str, owner: str):
    one = tmp_path / "run" / "iter_0000003"
    one.mkdir(parents=True)
    (one.parent / "latest_checkpointed_iteration.txt").write_text("3")
    for file in (".metadata", name):
        (one / file).write_text("")
    for read in (ModelConfig.from_hf, lambda folder: convert.Export(Path(folder)), hf.HFCheckpoint):
        with pytest.raises(ValueError, match=f"it is a checkpoint of {owner}, which is not read here"):
            read(one)


def test_inspect_reads_either_kind_and_names_neither(folder: Path, tmp_path: Path):
    shown: list[str] = []
    report.inspect(folder, False, shown.append)
    assert any("Hugging Face folder: " in line for line in shown)
    with pytest.raises(ValueError, match="nowhere does not exist"):
        report.inspect(tmp_path / "nowhere", False, shown.append)
    with pytest.raises(ValueError, match="holds no config.json; a model is in .*hf"):
        report.inspect(tmp_path, False, shown.append)


def test_tokenizers_and_templates_that_are_not_whole(folder: Path):
    with pytest.raises(ValueError, match=f"neither tokenizer.json nor a .model file; there is one in {folder}"):
        Tokenizer.load(folder.parent)
    pointer("tokenizer.json")(folder)
    for path in (folder, folder / "tokenizer.json"):
        with pytest.raises(ValueError, match="--tokenizer-model: .*tokenizer.json is a Git LFS pointer"):
            Tokenizer.load(path)
    dangling("tokenizer.json")(folder)
    for path in (folder, folder / "tokenizer.json"):
        with pytest.raises(ValueError, match="--tokenizer-model: .*tokenizer.json is a link to"):
            Tokenizer.load(path)
    with pytest.raises(ValueError, match="--tokenizer-model: zai-org/GLM-5 does not exist; .*hf download zai"):
        Tokenizer.load("zai-org/GLM-5")
    pointer("chat_template.jinja")(folder)
    with pytest.raises(ValueError, match="chat_template.jinja is a Git LFS pointer"):
        ChatTemplate.load(folder)


def test_flags_that_give_weights_another_shape(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    convert.Import(hf.HFCheckpoint(folder), tmp_path / "ckpt").write(Run())
    rest = ["--data-path", "x", "--train-iters", "1"]
    for flag, path in (("--load-hf", folder), ("--load", tmp_path / "ckpt")):
        for given, words in {
            ("--num-layers", "4"): "--num-layers 4 with a 6-layer checkpoint",
            ("--num-experts", "16"): "--num-experts 16 with a checkpoint of n_routed_experts 8",
            ("--qk-head-dim", "16"): "--qk-head-dim 16 with a checkpoint of qk_nope_head_dim 24",
        }.items():
            with pytest.raises(SystemExit) as stopped:
                parse([flag, str(path), *given, *rest])
            assert stopped.value.code == 2
            assert f"{words} ({flag} {path}" in capsys.readouterr().err
        assert parse([flag, str(path), "--num-layers", "6", "--rotary-base", "1e4", *rest]).model.rope_theta == 1e4
