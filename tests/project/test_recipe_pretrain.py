"""The recipes of pre-training, a stage each, with the stand-ins of the other recipes' tests."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from megatron_glm.config import ModelConfig, PretrainDataConfig, RunConfig
from megatron_glm.config.flags import build_parser, resolve
from megatron_glm.parallel.pipeline.layout import check_layout
from megatron_glm.planner.machine import H100
from megatron_glm.planner.memory import peak_memory
from megatron_glm.planner.plan import GIB, Plan
from megatron_glm.planner.report import report
from megatron_glm.training.batch_size import samples_after
from tests.helpers.rehearsed import check_rehearsed
from tests.project.test_recipes import ROOT, bash, box, checkpoint  # noqa: F401  (box is a fixture)

NAME = "pretrain_glm5.2"
STAGES = {  # nodes, sequence, packs of a step, steps, sizes of CP and PP, how the indexer trains, learning rates
    NAME: (64, 4096, 4096, 61700, 1, 8, "off", (2e-4, 2e-5)),
    f"{NAME}_warmup": (32, 131072, 16, 1000, 16, 4, "warmup", (5e-3, 2e-4)),
    f"{NAME}_sparse": (64, 131072, 480, 318, 16, 8, "sparse", (1e-5, 0.0)),
}
BEFORE = dict(zip([*STAGES][1:], STAGES, strict=False))


@pytest.fixture
def data(box) -> Path:  # noqa: F811
    """The stand-ins' folder with Megatron files of three names, one of them where SCALE=tiny has its own."""
    (box / "tiny").mkdir()
    for prefix in ("a", "b", "tiny/library_text_document"):
        for ending in ("bin", "idx"):
            (box / f"{prefix}.{ending}").touch()
    return box


def launched(folder: Path, *flags: str, name: str = NAME, **environment: str) -> tuple[list[str], RunConfig]:
    """torchrun's own arguments and the configuration of the ranks that it would have started."""
    base = "" if name == NAME else str(folder / "base")
    given = {"CHECKPOINT": base, "DATA_PATH": "a", "TINY_FOLDER": str(folder / "tiny")}
    done = bash(folder, f"{name}.sh", *flags, **given | environment)
    assert done.returncode == 0, done.stderr
    arguments = (folder / "torchrun.args").read_text().splitlines()
    program = arguments.index(str(ROOT / "pretrain_glm.py"))
    flags = build_parser(data=PretrainDataConfig).parse_args(arguments[program + 1 :])
    return arguments[:program], resolve(flags, PretrainDataConfig)


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_has_the_published_settings_and_fits(data, name):
    nodes, length, packs, steps, cp, pp, indexer, rates = STAGES[name]
    torchrun, config = launched(data, name=name)
    assert torchrun[:2] == ["--nnodes", str(nodes)] and torchrun[-2:] == ["--nproc-per-node", "8"]
    assert config.model == ModelConfig.from_hf("glm5.2")
    assert config.checkpoint.load == (None if name == NAME else str(data / "base"))
    assert config.checkpoint.finetune == (name != NAME)  # a stage begins at iteration 0
    assert (config.indexer.indexer_training, config.attends_densely) == (indexer, indexer != "sparse")
    assert (config.data.seq_length, config.train.global_batch_size, config.train.train_iters) == (length, packs, steps)
    assert (config.parallel.context_parallel_size, config.parallel.pipeline_model_parallel_size) == (cp, pp)
    assert (config.optimizer.lr, config.optimizer.min_lr) == rates
    plan = Plan.create(config, 8 * nodes, 8)
    lines = list(report(plan, H100))
    assert lines[-1].startswith("verdict: fits")  # and nothing that fits sends less
    row = f"| `{name}.sh` | {nodes} | {length} | {peak_memory(plan) / GIB:.1f} |"
    assert row in (ROOT / "docs/pretraining.md").read_text()
    few = dataclasses.replace(config.train, global_batch_size=16 * packs // config.micro_batches(512 // (cp * pp)))
    check_rehearsed(f"{name}.sh", Plan.create(dataclasses.replace(config, train=few), 8 * nodes, 8))


def test_the_stages_train_on_as_many_tokens_as_the_reports(data):
    def tokens(name: str) -> float:
        config = launched(data, name=name)[1]
        return samples_after(config.train, config.train.train_iters) * config.data.seq_length

    assert [tokens(name) for name in STAGES] == pytest.approx([1e12, 2.1e9, 20e9], rel=0.01)


@pytest.mark.parametrize("name", BEFORE)
def test_a_stage_begins_with_the_weights_of_the_one_before_and_then_goes_on_from_its_own(data, name):
    before = str(data / "tiny" / BEFORE[name])
    done = bash(data, f"{name}.sh", DATA_PATH="a", TINY_FOLDER=str(data / "tiny"), SCALE="tiny")
    assert (
        done.returncode == 2
        and f"{before} holds no checkpoint. Run the stage before, examples/{BEFORE[name]}.sh" in (done.stderr)
    )
    checkpoint(Path(before), 12)
    torchrun, tiny = launched(data, name=name, SCALE="tiny")
    assert torchrun == ["--standalone", "--nproc-per-node", "8"]
    assert (tiny.checkpoint.load, tiny.checkpoint.finetune) == (before, True)
    assert tiny.model == ModelConfig.from_hf("glm5.2-tiny") and tiny.selects == name.endswith("sparse")
    tiny.check(8)
    grid = check_layout(tiny.parallel, tiny.model, 8, 128, tiny.micro_batches(2))
    assert grid.pp == grid.cp == 2 and grid.ep == 4
    checkpoint(data / "save", 40)
    again = launched(data, name=name)[1].checkpoint
    assert (again.load, again.finetune) == (str(data / "save"), False)


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


@pytest.mark.parametrize("name", STAGES)
def test_it_has_its_job(name):
    lines = (ROOT / "examples/slurm" / f"{name}.sbatch").read_text().splitlines()
    assert {f"#SBATCH --nodes={STAGES[name][0]}", "#SBATCH --gpus-per-node=8", "#SBATCH --requeue"} <= set(lines)
    assert lines[-1] == f'run_recipe examples/{name}.sh "$@"'
