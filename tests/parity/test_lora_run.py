"""A run that trains adapters, as a user has it: what it saves, and what goes on from that alone."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_glm.checkpoint import convert, hf, sharded
from megatron_glm.checkpoint.output import Run
from megatron_glm.config.parameters import ADAPTER
from tests.helpers import distributed, hf_folder
from tests.helpers.finetune import finetune, write_rows
from tests.helpers.tools import call
from tests.parity.test_frozen import LAYOUTS, stored
from tests.parity.test_load_hf import MODEL

LORA = {"lora_rank": 4, "lora_alpha": 8, "lora_expert_rank": 8, "moe_router_bias_update_rate": None}


def run(folder: Path, flags: dict) -> None:
    os.chdir(folder)
    os.environ["WORLD_SIZE"] = str(dist.get_world_size())
    finetune(None, **{"seq_length": 32, "global_batch_size": 4, "moe_router_bias_update_rate": None} | flags)


def train(ranks: int, folder: Path, iterations: int, out: str, **flags) -> list[dict]:
    given = {"train_iters": iterations, "save": out, "save_interval": 2, "log_file": f"{out}.jsonl"} | flags
    distributed.run(ranks, run, folder, given)
    return [json.loads(line) for line in (folder / f"{out}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    write_rows(folder)
    hf_folder.make_folder(folder / "hf", **MODEL)
    convert.Import(hf.HFCheckpoint(folder / "hf"), folder / "base").write(Run())
    train(1, folder, 4, "whole", load_hf="hf", **LORA)
    return folder


def losses(lines: list[dict]) -> dict[int, float]:
    return {line["iteration"]: line["lm_loss"] for line in lines if "lm_loss" in line}


def test_a_checkpoint_holds_adapters_and_says_of_what(folder):
    there = stored(folder / "whole/iter_0000004")
    assert there and all(name.endswith(ADAPTER) for name in there)
    assert {name.partition("layers")[0] for name in there} == {"", "optimizer.exp_avg.", "optimizer.exp_avg_sq."}
    state = sharded.state_of(folder / "whole/iter_0000004")
    assert state["lora"]["lora_rank"] == 4 and state["trained_parts"] == ["adapters"]
    assert state["base"]["folder"] == str((folder / "hf").resolve())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_resumes_alone_in_another_layout(folder, layout):
    """Without --lora-rank and without the model: the checkpoint knows them."""
    name = f"resumed {layout}"
    lines = train(4, folder, 4, name, load="whole", ckpt_step=2, **LAYOUTS[layout])
    whole = losses([json.loads(line) for line in (folder / "whole.jsonl").read_text().splitlines()])
    assert losses(lines) == pytest.approx({step: whole[step] for step in (3, 4)}, abs=1e-5)
    before, after = stored(folder / "whole/iter_0000004"), stored(folder / name / "iter_0000004")
    assert before.keys() == after.keys()
    assert all((after[key] - before[key]).abs().max() < 1e-5 for key in before if not key.startswith("optimizer."))


def test_a_converted_checkpoint_is_a_base_as_its_folder_is(folder):
    lines = train(1, folder, 2, "of checkpoint", load="base", **LORA)
    whole = losses([json.loads(line) for line in (folder / "whole.jsonl").read_text().splitlines()])
    assert losses(lines) == {step: whole[step] for step in (1, 2)}
    assert sharded.state_of(folder / "of checkpoint/iter_0000002")["base"]["folder"].endswith("base/iter_0000000")
    train(1, folder, 3, "of checkpoint again", load="of checkpoint")


def test_new_adapters_on_a_checkpoint_of_another_run_begin_a_new_one(folder):
    train(1, folder, 1, "trunk", load="base")
    lines = train(1, folder, 2, "on trunk", load="trunk", **LORA)
    assert list(losses(lines)) == [1, 2]
    assert sharded.state_of(folder / "on trunk/iter_0000002")["base"]["folder"].endswith("trunk/iter_0000001")


def asked(folder: Path, flags: dict) -> tuple[list[dict], list[dict]]:
    """What tools/generate.py and tools/score.py print of the adapters."""
    os.environ |= {"WORLD_SIZE": str(dist.get_world_size()), "RANK": str(dist.get_rank())}
    words = [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    words = [word for word in words if word != "True"]
    found = []
    for tool, more in (
        ("generate", ("--prompt-file", "p.jsonl", "--max-new-tokens", "4")),
        ("score", ("--data-path", "p.jsonl")),
    ):
        with contextlib.chdir(folder):
            code, out, err = call(tool, "--load", "whole", *more, *words)
        assert code == 0, err
        found.append([json.loads(line) for line in out.splitlines()])
    return found[0], found[1]


def test_adapters_generate_and_score_alike_in_every_layout(folder):
    rows = [{"input_ids": list(range(1, n))} for n in (3, 9, 24)]
    (folder / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    [(said, scored)] = distributed.run(1, asked, folder, {})
    for layout in LAYOUTS.values():
        tokens, scores = distributed.run(4, asked, folder, layout)[0]
        assert [line["tokens"] for line in tokens] == [line["tokens"] for line in said]
        assert [line["sum_logprob"] for line in scores] == pytest.approx(
            [line["sum_logprob"] for line in scored], abs=1e-4
        )


def refused(folder: Path, capfd, **flags) -> str:
    given = {"load": "whole", "train_iters": 5} | flags
    with pytest.raises(RuntimeError) as error:
        distributed.run(1, run, folder, given)
    return capfd.readouterr().err + str(error.value)


def test_a_base_that_moved_or_is_another(folder, capfd):
    shutil.copytree(folder / "hf", folder / "moved")
    os.rename(folder / "hf", folder / "away")
    try:
        assert "does not exist: --base DIR if it moved" in refused(folder, capfd)
        train(1, folder, 5, "with moved", load="whole", base="moved", finetune=True)
        now = sharded.state_of(folder / "with moved/iter_0000005")["base"]["folder"]
        assert now == str((folder / "moved").resolve()), "found from any working directory"
        assert "--base nowhere: the folder holds no model" in refused(folder, capfd, base="nowhere")
        hf_folder.make_folder(folder / "other", **MODEL | {"vocab_size": 72})
        message = refused(folder, capfd, base="other")
        assert "is not the model under the adapters" in message and "the digest" in message
    finally:
        os.rename(folder / "away", folder / "hf")


def test_flags_that_contradict_the_adapters(folder, capfd):
    assert "--lora-rank 16, and the adapters of" in refused(folder, capfd, lora_rank=16, lora_expert_rank=16)
    assert "--base base is the model under the adapters of --load, which holds none" in refused(
        folder, capfd, load="base", base="base", lora_rank=4, lora_expert_rank=8
    )
    assert "needs a model to adapt" in refused(
        folder, capfd, load=None, hf_config="hf", save="nothing", lora_rank=4, lora_expert_rank=8
    )
    assert not (folder / "nothing").exists()


SHARDED = {"slabs": {"data_parallel_sharding": "slabs"}}  # FSDP2 does not shard experts in FP8


@pytest.mark.parametrize("layout", [None, *LAYOUTS, *SHARDED])
def test_a_base_in_fp8_is_that_of_its_files_in_bf16_bit_for_bit(folder, layout):
    """Losses and adapters, from files in FP8 and from a checkpoint that was converted from them."""
    if not (folder / "released").exists():
        convert.Export(folder / "base/iter_0000000", fp8=True).write(folder / "released", Run())
        convert.Import(hf.HFCheckpoint(folder / "released"), folder / "widened").write(Run())
    ranks, flags = (1, {}) if layout is None else (4, (LAYOUTS | SHARDED)[layout])
    found = {}
    sources = {"fp8": {"load_hf": "released"}, "bf16": {"load_hf": "released"}, "cast": {"load": "widened"}}
    for name, source in sources.items():
        precision = "bf16" if name == "bf16" else "fp8"
        out = f"{name} of {layout}"
        lines = train(ranks, folder, 2, out, base_precision=precision, bf16=True, **source, **LORA, **flags)
        found[name] = losses(lines), stored(folder / out / "iter_0000002")
    for name in ("fp8", "cast"):
        assert found[name][0] == found["bf16"][0]
        assert all(torch.equal(found[name][1][key], value) for key, value in found["bf16"][1].items()), name
