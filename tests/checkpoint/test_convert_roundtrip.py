"""Hugging Face folder -> sharded checkpoint -> Hugging Face folder: the same bits come back."""

from __future__ import annotations

import json
import math
import os
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_glm.checkpoint import chunks, convert, hf, sharded
from megatron_glm.checkpoint.output import Run
from megatron_glm.config.model import ModelConfig
from megatron_glm.ops.fp8 import scale_shape
from megatron_glm.parallel.shard import Rectangle
from tests.helpers import hf_folder


@pytest.fixture(autouse=True)
def no_sync(monkeypatch: pytest.MonkeyPatch):
    """Waiting for the disk shows nothing here and takes most of the time."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def convert_in(source: Path, checkpoint: Path) -> hf.HFCheckpoint:
    opened = hf.HFCheckpoint(source)
    convert.Import(opened, checkpoint).write(Run())
    return opened


def convert_out(checkpoint: Path, target: Path, iteration: int = 0, max_shard_bytes: int = 70_000) -> None:
    convert.Export(sharded.iteration_folder(checkpoint, iteration), max_shard_bytes).write(target, Run())


def round_trip(tmp_path: Path) -> dict[str, torch.Tensor]:
    convert_in(tmp_path / "hf", tmp_path / "ckpt")
    convert_out(tmp_path / "ckpt", tmp_path / "back")
    return hf_folder.read_folder(tmp_path / "back")


def test_round_trip_is_bitwise_with_mtp_and_fp32_bias(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Chunks and files are made small, so that every tensor is cut and spread over several files."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 3000)
    monkeypatch.setattr(sharded, "FILE_BYTES", 20_000)
    tensors = hf_folder.make_folder(tmp_path / "hf")
    assert tensors["model.layers.6.mlp.gate.e_score_correction_bias"].dtype == torch.float32
    assert "model.layers.6.eh_proj.weight" in tensors
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hf_folder.assert_same_tensors(round_trip(tmp_path), tensors)
    assert len(list((tmp_path / "ckpt" / "iter_0000000").glob("*.distcp"))) > 10


def test_progress_counts_every_byte_both_ways(tmp_path: Path):
    hf_folder.make_folder(tmp_path / "hf")
    opened, seen = hf.HFCheckpoint(tmp_path / "hf"), []
    convert.Import(opened, tmp_path / "ckpt").write(Run(progress=seen.append))
    total = sum(math.prod(shape) * dtype.itemsize for shape, dtype in opened.shapes.values())
    assert sum(seen) == total
    seen.clear()
    convert.Export(tmp_path / "ckpt" / "iter_0000000").write(tmp_path / "back", Run(progress=seen.append))
    assert sum(seen) == total


def test_side_files_come_back_byte_for_byte(tmp_path: Path):
    """config.json included: its unknown and junk fields (head_dim) and its indentation stay."""
    hf_folder.make_folder(tmp_path / "hf")
    round_trip(tmp_path)
    for name in [*hf_folder.SIDE_FILES, "config.json"]:
        original = (tmp_path / "hf" / name).read_bytes()
        assert (tmp_path / "ckpt" / "iter_0000000" / "hf" / name).read_bytes() == original, name
        assert (tmp_path / "back" / name).read_bytes() == original, name
    assert not (tmp_path / "back" / ".cache").exists()
    weights = {path.name for path in (tmp_path / "ckpt" / "iter_0000000" / "hf").iterdir() if "model" in path.name}
    assert not weights


def test_shards_stay_under_the_limit(tmp_path: Path):
    hf_folder.make_folder(tmp_path / "hf")
    round_trip(tmp_path)
    files = sorted((tmp_path / "back").glob("*.safetensors"))
    assert len(files) > 3
    assert [f.name for f in files] == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    for file in files:
        header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
        assert file.stat().st_size - header <= 70_000


def test_fused_experts_are_read_and_written_one_an_expert(tmp_path: Path):
    raw = hf_folder.tiny_config()
    tensors = hf_folder.make_folder(tmp_path / "plain")
    fused = dict(tensors)
    for layer in range(1, 7):
        prefix = f"model.layers.{layer}.mlp.experts."
        gate, up, down = (
            torch.stack([fused.pop(f"{prefix}{e}.{part}_proj.weight") for e in range(8)])
            for part in ("gate", "up", "down")
        )
        fused[prefix + "gate_up_proj"] = torch.cat([gate, up], dim=1)
        fused[prefix + "down_proj"] = down
    hf_folder.write_folder(tmp_path / "hf", raw, fused)
    hf_folder.assert_same_tensors(round_trip(tmp_path), tensors)


def quantize(tensors: dict[str, torch.Tensor], block: int) -> tuple[dict, dict, dict[str, int]]:
    """(FP8 tensors with scales, what they mean in bf16, the shard of every scale: not that of its weight)."""
    stored, meant, place = {}, {}, {}
    generator = torch.Generator().manual_seed(1)
    for number, (key, tensor) in enumerate(tensors.items()):
        stored[key] = meant[key] = tensor
        if key.endswith("_proj.weight") and "indexer" not in key or "kv_a_proj" in key:
            shape = scale_shape(tuple(tensor.shape), (block, block))
            scale = torch.rand(shape, generator=generator) + 0.5
            stored[key] = tensor.to(torch.float8_e4m3fn)
            stored[key + "_scale_inv"] = scale
            place[key], place[key + "_scale_inv"] = number % 3, (number + 1) % 3
            full = scale.repeat_interleave(block, 0).repeat_interleave(block, 1)
            meant[key] = (stored[key].float() * full[: tensor.shape[0], : tensor.shape[1]]).bfloat16()
    return stored, meant, place


def test_fp8_input_is_scaled_and_the_export_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Scales lie in another file than their weights, blocks are ragged, chunks start in the middle of blocks."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 3000)
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 16]}
    raw = hf_folder.tiny_config(quantization_config=quantization)
    stored, meant, place = quantize(hf_folder.make_folder(tmp_path / "plain"), 16)
    assert sum(key.endswith("_scale_inv") for key in stored) > 100
    hf_folder.write_folder(tmp_path / "hf", raw, stored, place)
    hf_folder.assert_same_tensors(round_trip(tmp_path), meant)
    exported = json.loads((tmp_path / "back" / "config.json").read_text())
    assert exported == {key: value for key, value in raw.items() if key != "quantization_config"}
    kept = (tmp_path / "ckpt" / "iter_0000000" / "hf" / "config.json").read_bytes()
    assert kept == (tmp_path / "hf" / "config.json").read_bytes()


def test_fused_fp8_experts(tmp_path: Path):
    raw = hf_folder.tiny_config(quantization_config={"weight_block_size": [16, 16]})
    tensors = hf_folder.make_folder(tmp_path / "plain")
    stored, meant, _ = quantize(tensors, 16)
    prefix = "model.layers.3.mlp.experts."
    for suffix, joined in (("", ""), ("_scale_inv", "_scale_inv")):
        parts = [stored.pop(f"{prefix}{e}.down_proj.weight{suffix}") for e in range(8)]
        stored[f"{prefix}down_proj{joined}"] = torch.stack(parts)
    hf_folder.write_folder(tmp_path / "hf", raw, stored)
    hf_folder.assert_same_tensors(round_trip(tmp_path), meant)


def test_promised_but_absent_mtp_layer_is_left_out_with_one_warning(tmp_path: Path):
    """transformers writes such folders: its model has no MTP layer, its config.json keeps the field."""
    tensors = hf_folder.make_folder(tmp_path / "full")
    without = {key: tensor for key, tensor in tensors.items() if not key.startswith("model.layers.6.")}
    hf_folder.write_folder(tmp_path / "hf", hf_folder.tiny_config(), without)
    with pytest.warns(UserWarning, match="without the MTP layer") as caught:
        exported = round_trip(tmp_path)
    assert len(caught) == 1
    hf_folder.assert_same_tensors(exported, without)
    assert ModelConfig.from_hf(tmp_path / "ckpt" / "iter_0000000").num_nextn_predict_layers == 0
    promised = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == promised | {"num_nextn_predict_layers": 0}


def test_config_without_mtp_layer(tmp_path: Path):
    tensors = hf_folder.make_folder(tmp_path / "hf", num_nextn_predict_layers=0)
    assert not any("layers.6." in key for key in tensors)
    hf_folder.assert_same_tensors(round_trip(tmp_path), tensors)


def test_dtypes_are_the_configs_but_fp32_for_the_bias(tmp_path: Path):
    """transformers keeps the gate in fp32 and saves it so; a bias saved in bf16 is widened."""
    gate, bias = "model.layers.2.mlp.gate.weight", "model.layers.2.mlp.gate.e_score_correction_bias"
    tensors = hf_folder.make_folder(tmp_path / "plain")
    tensors[bias] = tensors[bias].bfloat16().float()
    other = tensors | {gate: tensors[gate].float(), bias: tensors[bias].bfloat16()}
    hf_folder.write_folder(tmp_path / "hf", hf_folder.tiny_config(), other)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hf_folder.assert_same_tensors(round_trip(tmp_path), tensors)


def test_rounding_is_told(tmp_path: Path):
    tensors = hf_folder.make_folder(tmp_path / "plain")
    tensors["model.norm.weight"] = torch.full((72,), 1 / 3)
    hf_folder.write_folder(tmp_path / "hf", hf_folder.tiny_config(), tensors)
    with pytest.warns(UserWarning, match="1 tensors were rounded to bfloat16, first model.norm.weight"):
        convert_in(tmp_path / "hf", tmp_path / "ckpt")


def test_single_file_with_unaligned_data(tmp_path: Path):
    """A header of odd length is legal; torch cannot view such data in place."""
    tensors = hf_folder.make_folder(tmp_path / "plain")
    hf_folder.write_folder(tmp_path / "hf", hf_folder.tiny_config(), {})
    for file in (tmp_path / "hf").glob("model*"):
        file.unlink()
    file = tmp_path / "hf" / "model.safetensors"
    save_file(tensors, file)
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    odd = content[8 : 8 + length].rstrip(b" ")
    odd += b" " * (len(odd) % 2 == 0)
    file.write_bytes(len(odd).to_bytes(8, "little") + odd + content[8 + length :])
    hf_folder.assert_same_tensors(round_trip(tmp_path), tensors)


def test_export_of_a_training_checkpoint(tmp_path: Path):
    """fp32 masters become the config's dtype; moments stay behind."""
    tensors = hf_folder.make_folder(tmp_path / "hf")
    opened = convert_in(tmp_path / "hf", tmp_path / "ckpt")
    rectangles = []
    for name, (shape, _) in opened.shapes.items():
        master = torch.empty(shape, dtype=torch.float32)
        rectangles.append(Rectangle(name, shape, (0,) * len(shape), master, owner=True))
    sharded.load(tmp_path / "ckpt", 0, rectangles, None)
    moments = [
        Rectangle(f"optimizer.exp_avg.{r.name}", r.global_shape, r.offsets, torch.zeros_like(r.tensor), owner=True)
        for r in rectangles
    ]
    hf_files = tmp_path / "ckpt" / "iter_0000000" / "hf"
    sharded.save(tmp_path / "ckpt", 7, rectangles + moments, {}, opened.config, hf_files, None)
    convert_out(tmp_path / "ckpt", tmp_path / "back", iteration=7)
    hf_folder.assert_same_tensors(hf_folder.read_folder(tmp_path / "back"), tensors)
    assert (tmp_path / "back" / "config.json").read_bytes() == (tmp_path / "hf" / "config.json").read_bytes()


def test_export_of_a_model_trained_from_scratch_writes_its_config(tmp_path: Path):
    config = ModelConfig.from_hf("glm5.2-tiny", num_hidden_layers=2)
    rectangles = [
        Rectangle(name, shape, (0,) * len(shape), torch.ones(shape, dtype=dtype), owner=True)
        for name, (shape, dtype) in hf.parameter_shapes(config).items()
    ]
    state = {"never_trained": ["indexer", "mtp"]}
    sharded.save(tmp_path / "ckpt", 3, rectangles, state, config, None, None)
    with pytest.warns(UserWarning, match="what it holds of indexer, mtp was never trained"):
        convert_out(tmp_path / "ckpt", tmp_path / "back", iteration=3)
    assert ModelConfig.from_hf(tmp_path / "back") == config
