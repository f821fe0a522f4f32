"""The pre-training recipe, with the stand-ins of the other recipes' tests."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from megatron_glm.config import ModelConfig, PretrainDataConfig, RunConfig
from megatron_glm.config.flags import build_parser, resolve
from megatron_glm.parallel.pipeline.layout import check_layout
from megatron_glm.planner.machine import H100
from megatron_glm.planner.plan import GIB, Plan
from megatron_glm.planner.report import report
from megatron_glm.training.batch_size import samples_after
from tests.unit.test_recipes import ROOT, bash, box, checkpoint  # noqa: F401  (box is a fixture)

NAME = "pretrain_glm5.2"


@pytest.fixture
def data(box) -> Path:  # noqa: F811
    """The stand-ins' folder with Megatron files of three names, one of them where SCALE=tiny has its own."""
    (box / "tiny").mkdir()
    for prefix in ("a", "b", "tiny/library_text_document"):
        for ending in ("bin", "idx"):
            (box / f"{prefix}.{ending}").touch()
    return box


def launched(folder: Path, *flags: str, **environment: str) -> tuple[list[str], RunConfig]:
    """torchrun's own arguments and the configuration of the ranks that it would have started."""
    given = {"CHECKPOINT": "", "DATA_PATH": "a", "TINY_FOLDER": str(folder / "tiny")}
    done = bash(folder, f"{NAME}.sh", *flags, **given | environment)
    assert done.returncode == 0, done.stderr
    arguments = (folder / "torchrun.args").read_text().splitlines()
    program = arguments.index(str(ROOT / "pretrain_glm.py"))
    flags = build_parser(data=PretrainDataConfig).parse_args(arguments[program + 1 :])
    return arguments[:program], resolve(flags, PretrainDataConfig)


def test_the_recipe_trains_on_a_trillion_tokens_from_scratch(data):
    torchrun, config = launched(data)
    assert torchrun[:2] == ["--nnodes", "64"] and torchrun[-2:] == ["--nproc-per-node", "8"]
    assert config.model == ModelConfig.from_hf("glm5.2") and config.checkpoint.load is None
    config.check(512)
    parallel = config.parallel
    check_layout(parallel, config.model, 512, 4096, config.micro_batches(parallel.data_parallel_size(512)))
    tokens = samples_after(config.train, config.train.train_iters) * config.data.seq_length
    assert tokens == pytest.approx(1e12, rel=0.01)
    plan = Plan.create(config, 512, 8)
    assert list(report(plan, H100))[-1].startswith("verdict: fits")  # and nothing that fits sends less
    peak = f"{plan.peak() / GIB:.1f} GiB of 80 at the peak"
    assert peak in (ROOT / "docs/pretraining.md").read_text()


def test_tiny_is_the_same_recipe_on_eight_ranks(data):
    _, full = launched(data)
    torchrun, tiny = launched(data, SCALE="tiny")
    assert torchrun == ["--standalone", "--nproc-per-node", "8"]
    assert tiny.model == ModelConfig.from_hf("glm5.2-tiny") and tiny.checkpoint.load is None
    tiny.check(8)

    def changed(section: str) -> set[str]:
        ours, theirs = (dataclasses.asdict(getattr(config, section)) for config in (full, tiny))
        return {key for key in ours if ours[key] != theirs[key]}

    degrees = {"pipeline_model_parallel_size", "expert_model_parallel_size", "expert_node_size"}
    assert changed("parallel") == degrees
    assert changed("data") == {"data_path", "seq_length", "split"}
    assert changed("optimizer") <= {"lr", "lr_warmup_iters", "lr_wsd_decay_iters"}
    grid = check_layout(tiny.parallel, tiny.model, 8, 128, tiny.micro_batches(4))
    assert grid.pp == 2 and grid.ep == 4 and grid.node == grid.inter == 2


def test_it_goes_on_from_its_own_or_another_checkpoint(data):
    base, save = str(data / "base"), str(data / "save")
    assert launched(data, CHECKPOINT=base)[1].checkpoint.load == base
    checkpoint(data / "save", 40)
    assert launched(data, CHECKPOINT=base)[1].checkpoint.load == launched(data)[1].checkpoint.load == save


def test_a_blend_and_stages_can_be_given(data):
    _, config = launched(data, "--num-layers-per-virtual-pipeline-stage", "2", DATA_PATH="0.7 a 0.3 b")
    assert config.data.data_path == ("0.7", "a", "0.3", "b")
    assert config.parallel.pipeline_model_parallel_layout is None
    config.check(512)


def test_missing_files_are_named_with_the_way_to_make_them(data):
    done = bash(data, f"{NAME}.sh", CHECKPOINT="", DATA_PATH="0.7 a 0.3 c_text_document")
    assert done.returncode == 2 and done.stderr.count("--data-path") == 1
    assert "--data-path c_text_document: c_text_document.bin and .idx are not both there" in done.stderr
    assert "hf download --repo-type dataset HuggingFaceFW/fineweb-edu" in done.stderr
    assert "preprocess_data.py --input 'data/fineweb-edu' --output-prefix c " in done.stderr


def test_it_has_its_job():
    lines = (ROOT / "examples/slurm" / f"{NAME}.sbatch").read_text().splitlines()
    assert {"#SBATCH --nodes=64", "#SBATCH --gpus-per-node=8", "#SBATCH --requeue"} <= set(lines)
    assert lines[-1] == f'run_recipe examples/{NAME}.sh "$@"'
