"""Flags: generated from the config, checked against each other, refused in one line with exit code 2."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_glm.config import PretrainDataConfig, flag_name
from megatron_glm.config.flags import MEGATRON_NAMES, SECTIONS, Parser, build_parser, parse

ROOT = Path(__file__).resolve().parents[2]
TINY = ["--hf-config", "glm5.2-tiny", "--data-path", "rows.jsonl", "--train-iters", "10", "--seq-length", "64"]


def refusal(capsys, *flags: str) -> str:
    """What the run answers to TINY and these flags; it must stop with code 2 and one line."""
    with pytest.raises(SystemExit) as stop:
        parse([*TINY, *flags])
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1
    return message


def test_values_reach_their_section():
    config = parse(
        [
            *TINY,
            "--bf16",
            "--lr",
            "3e-4",
            "--data-path",
            "a",
            "b",
            "--reshard-after-forward",
            "false",
            "--packing",
            "none",
        ]
    )
    assert config.train.bf16 and config.train.train_iters == 10
    assert config.optimizer.lr == 3e-4
    assert config.data.data_path == ("a", "b") and config.data.packing == "none"
    assert not config.parallel.reshard_after_forward and config.parallel.reshard_experts_after_forward
    assert config.hf_folder is None


def test_help_shows_every_field_and_group(capsys):
    with pytest.raises(SystemExit) as stop:
        parse(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for name, section in SECTIONS.items():
        assert f"\n{name}:\n" in text
        for field in dataclasses.fields(section):
            assert flag_name(field.name) in text
            assert field.metadata["help"]
    assert "(default: 1e-05)" in text and "--reshard-after-forward {true,false}" in text
    assert len([a for a in build_parser()._actions if a.option_strings == ["--num-layers"]]) == 1


# Runs every script with --help and with a wrong flag, and one with wrong stages: torch is not imported by then.
WITHOUT_TORCH = """
import contextlib, io, os, runpy, sys
for script in sys.argv[1:]:
    for flag in ("--help", "--qqq"):
        sys.argv = [*script.split(), flag]
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as errors:
            try:
                runpy.run_path(sys.argv[0], run_name="__main__")
            except SystemExit as stop:
                assert (stop.code or 0) == (0 if flag == "--help" else 2), (sys.argv, stop.code, errors.getvalue())
        assert "torch" not in sys.modules, sys.argv
os.environ["WORLD_SIZE"] = "2"
sys.argv = ["finetune_glm.py", *"--hf-config glm5.2-tiny --data-path x --train-iters 1".split()]
sys.argv += "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ett|ttL".split()
with contextlib.redirect_stderr(io.StringIO()) as errors, contextlib.suppress(SystemExit):
    runpy.run_path(sys.argv[0], run_name="__main__")
assert "--pipeline-model-parallel-layout" in errors.getvalue() and "torch" not in sys.modules, errors.getvalue()
del os.environ["WORLD_SIZE"]  # a rank of many would end with the code of the script
"""


def test_torch_is_imported_after_the_flags_are_read():
    """Importing it takes 1 to 3 seconds, which --help and a wrong flag need not wait for."""
    scripts = ["finetune_glm.py", "pretrain_glm.py", "tools/benchmark.py", "tools/benchmark.py step"]
    scripts += [f"tools/{name}.py" for name in ("convert_hf", "plan", "plot_log", "preprocess_data")]
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *scripts], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_plan_flags_are_listed_and_go_with_a_dry_run(capsys):
    assert "--dry-run" in build_parser().format_help()
    assert refusal(capsys, "--nnodes", "4") == "error: --nnodes needs --dry-run or --rehearse-rank\n"


def test_unknown_flag_names_the_nearest(capsys):
    assert refusal(capsys, "--micro-batchsize", "2") == (
        "error: unknown flag --micro-batchsize; did you mean --micro-batch-size?\n"
    )
    assert "unknown flag --qqq\n" in refusal(capsys, "--qqq=3")
    assert "unknown flag --train-iter;" in refusal(capsys, "--train-iter", "3")  # no abbreviations


def test_an_unknown_flag_is_named_before_a_missing_one(capsys):
    parser = Parser()
    parser.add_argument("--from-hf", required=True)
    with pytest.raises(SystemExit):
        parser.parse_args(["--form-hf", "DIR"])
    assert capsys.readouterr().err == "error: unknown flag --form-hf; did you mean --from-hf?\n"


def test_model_fields_are_overridden_under_megatrons_names():
    config = parse([*TINY, "--num-layers", "3", "--moe-router-topk", "4", "--norm-topk-prob", "false"])
    assert config.model.num_hidden_layers == 3 and len(config.model.indexer_types) == 3
    assert config.model.num_experts_per_tok == 4 and not config.model.norm_topk_prob
    assert "--num-hidden-layers" not in build_parser().format_help()
    assert set(MEGATRON_NAMES) <= {field.name for field in dataclasses.fields(config.model)}


def test_shape_comes_from_the_checkpoint_unless_hf_config_says_otherwise(tmp_path, capsys):
    hf = tmp_path / "iter_0000007" / "hf"
    hf.mkdir(parents=True)
    shape = parse([*TINY, "--num-layers", "4"]).model
    (hf / "config.json").write_text(json.dumps(shape.to_hf()))
    (hf.parent / "tensors.index").touch()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    flags = ["--load", str(tmp_path), *TINY[2:]]
    config = parse(flags)
    assert config.model.num_hidden_layers == 4 and config.hf_folder == str(hf)
    assert parse([*flags, "--hf-config", "glm5.2-tiny"]).model.num_hidden_layers == 6
    (tmp_path / "latest_checkpointed_iteration.txt").unlink()
    with pytest.raises(SystemExit):
        parse(flags)
    assert f"--load {tmp_path}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--train-iters", "0"], ["--train-iters is 0", "at least 1"]),
        (["--train-epochs", "2"], ["--train-iters (10)", "--train-epochs (2)"]),
        (["--micro-batch-size", "3"], ["--global-batch-size (8)", "--micro-batch-size x data-parallel ranks (3)"]),
        (["--seq-length", "5000"], ["--seq-length (5000)", "(4096)"]),
        (["--lr", "1e-5", "--min-lr", "1e-4"], ["--min-lr (0.0001)", "--lr (1e-05)"]),
        (["--lr-warmup-iters", "11"], ["--lr-warmup-iters (11)", "--train-iters (10)"]),
        (["--lr", "nan"], ["--lr is nan", "finite"]),
        (["--clip-grad", "inf"], ["--clip-grad is inf", "finite"]),
        (["--seed", str(2**63)], ["--seed is 9223372036854775808", "below 2^63"]),
        (["--adam-beta2", "1"], ["--adam-beta2 is 1.0"]),
        (["--adam-eps", "0"], ["--adam-eps is 0.0"]),
        (["--save", ""], ["the value of --save is empty"]),
        (["--ignore-keys", "id", " "], ["the value of id is empty"]),
        (["--hf-config="], ["the value of --hf-config is empty"]),
        (["--save-interval", "5"], ["--save-interval 5 needs --save"]),
        (["--on-nan-limit", "3"], ["--on-nan-limit 3 needs --on-nan skip"]),
        (["--finetune"], ["--finetune needs --load"]),
        (["--ckpt-step", "0"], ["--ckpt-step 0 needs --load"]),
        (["--manual-gc-interval", "3"], ["--manual-gc-interval 3 needs --manual-gc"]),
        (["--weight-decay", "-0.1"], ["--weight-decay is -0.1", "must not be negative"]),
        (["--packing", "best"], ["--packing", "'best'", "best-fit"]),
        (["--reshard-after-forward", "yes"], ["--reshard-after-forward", "'yes'"]),
        (["--sequence-parallel"], ["--tensor-model-parallel-size 1 does not take --sequence-parallel"]),
        (["--context-parallel-size", "2"], ["ranks (1)", "--context-parallel-size (2)"]),
        (["--expert-node-size", "2"], ["alltoall", "--expert-node-size 2"]),
    ],
)
def test_contradictions_name_flags_and_both_numbers(capsys, flags, words):
    message = refusal(capsys, *flags)
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    "ranks, flags, words",
    [
        (2, ["--tensor-model-parallel-size", "2"], ["--tensor-model-parallel-size 2 needs --sequence-parallel"]),
        (3, ["--expert-model-parallel-size", "3", "--global-batch-size", "9"], ["experts (8)", "parallel-size (3)"]),
        (4, ["--context-parallel-size", "4", "--seq-length", "60"], ["--seq-length (60)", "(8)"]),
        (3, [], ["--global-batch-size (8)", "(3)"]),
        (8, ["--pipeline-model-parallel-size", "8"], ["--pipeline-model-parallel-size 8", "6 layers"]),
    ],
)
def test_layouts_that_do_not_fit_are_refused_before_any_group_exists(capsys, monkeypatch, ranks, flags, words):
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    message = refusal(capsys, *flags)
    for word in words:
        assert word in message


def test_only_the_first_rank_speaks_and_the_others_leave_later(capsys, monkeypatch):
    waits = []
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr("time.sleep", waits.append)
    with pytest.raises(SystemExit) as stop:
        parse(["--qqq"])
    assert stop.value.code == 2 and capsys.readouterr().err == "" and waits[0] >= 10


def test_a_folder_without_a_readable_checkpoint_is_refused(capsys, tmp_path):
    assert "holds no checkpoint" in refusal(capsys, "--load", str(tmp_path))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("soon")
    assert "holds 'soon', it should hold an iteration number" in refusal(capsys, "--load", str(tmp_path))
    (tmp_path / "latest_checkpointed_iteration.txt").write_bytes(b"\xff")
    assert "it should hold an iteration number" in refusal(capsys, "--load", str(tmp_path))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    (tmp_path / "iter_0000004").mkdir()
    assert "names iter_0000007, which is missing; complete iterations there: none" in refusal(
        capsys, "--load", str(tmp_path)
    )


def test_pretraining_has_its_own_data_flags(capsys):
    flags = [*TINY[:2], *TINY[4:], "--train-data-path", "0.7", "a", "0.3", "b", "--valid-data-path", "c"]
    config = parse(flags, data=PretrainDataConfig)
    assert config.data.train_data_path == ("0.7", "a", "0.3", "b") and config.data.split == "969,30,1"
    for wrong in (["--packing", "none"], ["--data-path", "a"], ["--mock-data"]):
        with pytest.raises(SystemExit):
            parse([*flags, *wrong], data=PretrainDataConfig)
    with pytest.raises(SystemExit):
        parse([*TINY, "--valid-data-path", "c"], data=PretrainDataConfig)
    errors = capsys.readouterr().err.splitlines()
    assert errors[0] == "error: --packing none: a flag of finetune_glm.py"
    assert "--data-path and --train-data-path" in errors[1] and "--train-data-path and --mock-data" in errors[2]
    assert "--valid-data-path goes with --train-data-path" in errors[3]
    assert "--mock-data: a flag of pretrain_glm.py" in refusal(capsys, "--mock-data")
