"""finetune_glm.py --load-hf: the same run as from a converted checkpoint, in any layout, reading only its own bytes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_glm.checkpoint import convert, hf
from megatron_glm.checkpoint.output import Run
from megatron_glm.launch import one_line_errors
from tests.helpers import distributed, hf_folder
from tests.helpers.finetune import assert_same, finetune, keep_default_group, tensors, write_rows

MODEL = {
    "num_hidden_layers": 3,
    "indexer_types": ["full", "shared", "full"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "vocab_size": 64,
    "hidden_size": 48,
    "num_attention_heads": 4,
}
LAYOUT = {
    "tensor_model_parallel_size": 2,
    "sequence_parallel": True,
    "pipeline_model_parallel_size": 2,
    "expert_model_parallel_size": 2,
}


def run(folder: Path, out: str, source: dict) -> None:
    os.chdir(folder)
    os.environ["WORLD_SIZE"] = str(dist.get_world_size())
    finetune(None, train_iters=1, seq_length=32, save=out, **source, **LAYOUT)


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_it_is_the_run_from_a_converted_checkpoint(tmp_path: Path, fp8: bool):
    write_rows(tmp_path)
    hf_folder.make_folder(tmp_path / "source", **MODEL)
    convert.Import(hf.HFCheckpoint(tmp_path / "source"), tmp_path / "plain").write(Run())
    convert.Export(tmp_path / "plain" / "iter_0000000", fp8=fp8).write(tmp_path / "hf", Run())
    convert.Import(hf.HFCheckpoint(tmp_path / "hf"), tmp_path / "converted").write(Run())
    distributed.run(4, run, tmp_path, "direct", {"load_hf": "hf"})
    distributed.run(4, run, tmp_path, "indirect", {"load": "converted"})
    assert_same(tensors(tmp_path / "direct", 1), tensors(tmp_path / "indirect", 1))
    side = (tmp_path / "direct" / "iter_0000001" / "hf" / "config.json").read_bytes()
    assert side == (tmp_path / "hf" / "config.json").read_bytes()


def test_only_the_rows_of_a_rank_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    hf_folder.make_folder(tmp_path / "hf", **MODEL)
    checkpoint = hf.HFCheckpoint(tmp_path / "hf")
    asked = []
    piece = checkpoint._piece
    monkeypatch.setattr(checkpoint, "_piece", lambda tensor, *place: asked.append(tensor.key) or piece(tensor, *place))
    name = "layers.1.mlp.experts.down"
    shape, dtype = checkpoint.shapes[name]
    mine = torch.zeros(2, *shape[1:], dtype=torch.float32)
    checkpoint.fill([hf.Rectangle(name, shape, (2, 0, 0), mine, owner=True)])
    assert asked == [f"model.layers.1.mlp.experts.{expert}.down_proj.weight" for expert in (2, 3)]
    assert torch.equal(mine[1], checkpoint.source.entries[asked[1]].tensor().float())


@pytest.mark.parametrize(
    "flags, code, message",
    [
        ({"load_hf": "nowhere"}, 2, "--load-hf nowhere: the folder holds no model (config.json is missing)"),
        ({"load_hf": "hf", "load": "converted"}, 2, "--load converted and --load-hf hf both set the weights"),
        ({"load_hf": "hf", "hf_config": "glm5.2"}, 2, "--load-hf hf is of another model: its vocab_size is 64"),
        ({"load_hf": "hf", "num_experts": 16}, 2, "--num-experts 16 with a checkpoint of n_routed_experts 8 (--load-"),
        ({"load_hf": "hf", "mtp_num_layers": 3}, 2, "--mtp-num-layers 3 with a checkpoint of 1 MTP layers (--load-hf"),
    ],
)
def test_errors(tmp_path: Path, flags: dict, code: int, message: str, capfd, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path)
    hf_folder.make_folder(tmp_path / "hf", **MODEL)
    convert.Import(hf.HFCheckpoint(tmp_path / "hf"), tmp_path / "converted").write(Run())
    with pytest.raises(SystemExit) as exit, keep_default_group(), one_line_errors():
        finetune(None, train_iters=1, seq_length=32, **flags)
    assert exit.value.code == code
    assert message in capfd.readouterr().err
