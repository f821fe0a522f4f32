"""What is not trained keeps the checkpoint's dtype and bits, and holds nothing of what training needs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_glm.checkpoint import convert, hf, sharded
from megatron_glm.checkpoint.output import Run
from megatron_glm.config.model import ModelConfig
from megatron_glm.model.trained import is_trained
from tests.helpers import distributed, hf_folder
from tests.helpers.finetune import finetune, write_rows
from tests.parity.test_load_hf import MODEL

LAYOUTS = {
    "fsdp": {"expert_model_parallel_size": 2},
    "pp2 tp2": {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "pipeline_model_parallel_size": 2,
        "expert_model_parallel_size": 2,
    },
}


def run(folder: Path, out: str, iterations: int, flags: dict) -> None:
    os.chdir(folder)
    os.environ["WORLD_SIZE"] = str(dist.get_world_size())
    finetune(None, train_iters=iterations, seq_length=32, global_batch_size=4, save=out, save_interval=1, **flags)


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """All that a checkpoint holds, in the dtype in which it does."""
    reader = sharded.Reader(folder)
    return {name: reader.tensor(name, (0,) * len(s), s, dtype).clone() for name, (s, dtype) in reader.shapes.items()}


@pytest.mark.parametrize("bf16", [True, False], ids=["bf16", "fp32"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_frozen_weights_keep_dtype_and_bits_through_training_and_resharding(tmp_path: Path, layout: str, bf16: bool):
    write_rows(tmp_path)
    hf_folder.make_folder(tmp_path / "hf", **MODEL)
    convert.Import(hf.HFCheckpoint(tmp_path / "hf"), tmp_path / "base").write(Run())
    distributed.run(4, run, tmp_path, "first", 1, {"load": "base", "bf16": bf16, **LAYOUTS[layout]})
    distributed.run(1, run, tmp_path, "second", 2, {"load": "first", "bf16": bf16})
    base = stored(tmp_path / "base/iter_0000000")
    config = ModelConfig.from_hf(tmp_path / "hf/config.json")
    frozen = {name for name in base if not is_trained(config, name)}
    assert len(frozen) > 20 and {base[name].dtype for name in frozen if "bias" not in name} == {torch.bfloat16}
    for place in ("first/iter_0000001", "second/iter_0000002"):
        after = stored(tmp_path / place)
        assert all(after[name].dtype == base[name].dtype and torch.equal(after[name], base[name]) for name in frozen)
        assert not any(name.startswith("optimizer.") and name.endswith(tuple(frozen)) for name in after)
        moved = [name for name in base if name not in frozen and "e_score" not in name]
        assert all(after[name].dtype == torch.float32 for name in moved)
        assert not any(torch.equal(after[name], base[name].float()) for name in moved if "norm" not in name)


def test_a_checkpoint_with_frozen_weights_in_fp32_keeps_them_so(tmp_path: Path):
    """So did earlier versions hold them; rounding them now would be a change of the model."""
    write_rows(tmp_path)
    hf_folder.make_folder(tmp_path / "hf", **MODEL)
    distributed.run(1, run, tmp_path, "drawn", 1, {"hf_config": "hf", "bf16": True})  # no checkpoint: drawn in fp32
    distributed.run(1, run, tmp_path, "second", 2, {"load": "drawn", "bf16": True})
    before, after = stored(tmp_path / "drawn/iter_0000001"), stored(tmp_path / "second/iter_0000002")
    name = "layers.0.self_attn.indexer.wq_b.weight"
    assert after[name].dtype == before[name].dtype == torch.float32 and torch.equal(after[name], before[name])


def test_by_name():
    config = ModelConfig.from_hf("glm5.2")
    assert is_trained(config, "layers.77.mlp.experts.down") and is_trained(config, "lm_head.weight")
    assert not is_trained(config, "layers.0.self_attn.indexer.k_norm.bias")
    assert not is_trained(config, "layers.78.enorm.weight") and not is_trained(config, "layers.78.mlp.experts.down")
