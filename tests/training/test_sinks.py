"""Where records go: the JSON file over kills and restarts, TensorBoard, Weights & Biases, profiles, and the picture."""

from __future__ import annotations

import gzip
import importlib.util
import json
import math
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_glm.config import LoggingConfig
from megatron_glm.launch import one_line_errors
from megatron_glm.training.sinks import JsonLines, numbers, require_packages
from tests.helpers.finetune import json_log
from tests.helpers.pretrain import pretrain

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return pretrain


def iterations(path: Path) -> list[int]:
    return [record["iteration"] for record in json_log(path)]


def written(path: Path, start: int, *records: int) -> None:
    sink = JsonLines(path, start)
    for iteration in records:
        sink.write({"iteration": iteration, "lm_loss": 1.0})
    sink.close()


def test_what_came_after_the_checkpoint_is_cut_from_the_log(tmp_path):
    path = tmp_path / "new" / "log.jsonl"
    written(path, 0, 1, 2, 3, 4)
    with path.open("a") as file:
        file.write('{"iteration": 5, "lm_l')  # a kill in the middle of a line
    written(path, 4, 5)
    with path.open("a") as file:
        file.write('{"ite')
    written(path, 5)
    with path.open("a") as file:
        file.write('{"kind": "con')
    written(path, 5)
    assert iterations(path) == [1, 2, 3, 4, 5]
    written(path, 2, 3)
    assert iterations(path) == [1, 2, 3]
    written(path, 0, 1)
    assert iterations(path) == [1]


def test_each_start_leaves_its_configuration_before_its_iterations(run):
    """A start from the same checkpoint again replaces what the killed run has left, its configuration included."""
    run(train_iters=3, save="out", save_interval=1, log_file="log.jsonl")
    for iterations in (4, 5):
        run(preset=None, load="out", ckpt_step=2, train_iters=iterations, lr_decay_iters=3, log_file="log.jsonl")
    lines = [json.loads(line) for line in Path("log.jsonl").read_text().splitlines()]
    assert [line.get("iteration", line.get("kind")) for line in lines] == ["config", 1, 2, "config", 3, 4, 5]
    first, second = (line for line in lines if "kind" in line)
    assert (first["from_iteration"], second["from_iteration"]) == (0, 2) and first["run_id"] == second["run_id"]
    assert second["config"]["train"]["train_iters"] == 5 and second["config"]["model"]["hidden_size"] == 32


@pytest.mark.parametrize("line", ["text", '{"loss": 1}', "[1]", "3"])
def test_a_file_of_another_kind_is_not_overwritten(tmp_path, line):
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"iteration": 1}}\n{line}\n')
    with pytest.raises(ValueError, match="rows.jsonl exists, but its line 2 is no record of an iteration"):
        JsonLines(path, 5)
    assert path.read_text().endswith(f"{line}\n")


@pytest.mark.parametrize("content", [b"text", b'{"vocab_size": 3}', b'{"iteration": "x"}\n', b"\xff\n"])
def test_a_file_of_another_kind_is_kept_whole(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="config.json exists, but its line 1 is no record of an iteration"):
        JsonLines(path, 5)
    assert path.read_bytes() == content


def test_only_numbers_reach_curves():
    record = {"iteration": 3, "lm_loss": None, "skipped": "nan", "samples": ["a"], "lr": 0.5, "load": {"layer_01": 2.0}}
    assert dict(numbers(record)) == {"lr": 0.5, "load/layer_01": 2.0}


@pytest.mark.parametrize("flag, package", [("tensorboard_dir", "tensorboard"), ("wandb_project", "wandb")])
def test_a_missing_package_is_one_error_that_names_the_extra(run, monkeypatch, capsys, flag, package):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find(name))
    with pytest.raises(SystemExit) as stop, one_line_errors():
        run(train_iters=1, **{flag: "here"})
    message = capsys.readouterr().err
    name = "--" + flag.replace("_", "-")
    assert stop.value.code == 2 and message.count("\n") == 1
    assert message == f"error: {name} here needs the package {package}: pip install -e '.[logging]'\n"
    require_packages(LoggingConfig())


def test_every_number_of_a_record_has_a_name():
    """Lists by step and validation sets by name, too; a list of samples has none."""
    record = {"iteration": 3, "lm_loss": None, "mtp_losses": [4.0, 5.0], "samples": ["a:0", "b:1"]}
    record |= {"valid_mtp_losses": {"code": [6.0]}, "valid_rewards": {"math": {"margins": 0.5}}, "skipped": "why"}
    assert dict(numbers(record)) == {
        "mtp_losses/1": 4.0,
        "mtp_losses/2": 5.0,
        "valid_mtp_losses/code/1": 6.0,
        "valid_rewards/math/margins": 0.5,
    }


def test_tensorboard_goes_on_after_a_restart(run):
    """The killed run came to iteration 4, its checkpoint is of 2: curves have each iteration once."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run(train_iters=4, save="out", save_interval=2, tensorboard_dir="tb", eval_interval=2)
    run(preset=None, load="out/iter_0000002", train_iters=5, tensorboard_dir="tb", eval_interval=2, lr_decay_iters=4)
    events = accumulator.EventAccumulator("tb")
    events.Reload()
    assert [event.step for event in events.Scalars("lm_loss")] == [1, 2, 3, 4, 5]
    assert [event.step for event in events.Scalars("valid_lm_loss")] == [2, 4, 5]
    wanted = {"grad_norms/attention", "router_load/layer_01", "expert_bias_max/layer_02", "peak_memory_bytes"}
    assert wanted | {"learning_rate", "grad_norm", "tokens_per_second_per_gpu"} <= set(events.Tags()["scalars"])


def test_statistics_come_with_the_log_lines_only(run):
    run(train_iters=3, log_interval=2, log_file="log.jsonl")
    found = ["grad_norms" in record for record in json_log("log.jsonl")]
    assert found == [False, True, True]  # the last one has a line, too


def test_without_a_sink_no_statistics_are_made(run, monkeypatch):
    from megatron_glm.training import step

    monkeypatch.setattr(step, "statistics", None)
    run(train_iters=1)


def test_weights_and_biases_keeps_the_run_over_restarts(run, monkeypatch):
    """Offline, with a stand-in for the package: what it is told, and the checkpoint's id of the run."""
    calls = []

    class Run:
        def log(self, values, step):
            calls.append((step, values))

        def finish(self):
            calls.append("finish")

    class Package:
        Error = RuntimeError

        @staticmethod
        def login():
            calls.append("login")

        @staticmethod
        def init(**arguments):
            calls.append(arguments)
            return Run()

    monkeypatch.setitem(sys.modules, "wandb", Package)
    monkeypatch.setattr("megatron_glm.training.sinks.require_packages", lambda logging: None)
    monkeypatch.setattr("megatron_glm.training.initialize.require_packages", lambda logging: None)
    flags = {"wandb_project": "glm", "wandb_entity": "team", "wandb_exp_name": "tiny", "wandb_save_dir": "wb"}
    run(train_iters=2, save="out", save_interval=1, **flags)
    run(preset=None, load="out", train_iters=3, **flags)
    first, second = (call for call in calls if isinstance(call, dict))
    assert first["id"] == second["id"] and first["resume"] == "allow"
    assert (first["project"], first["name"], first["dir"]) == ("glm", "tiny", "wb") and Path("wb").is_dir()
    assert first["config"]["train"]["train_iters"] == 2
    assert [call[0] for call in calls if isinstance(call, tuple)] == [1, 2, 3] and calls.count("finish") == 2
    assert all(
        isinstance(value, int | float) for call in calls if isinstance(call, tuple) for value in call[1].values()
    )


def test_weights_and_biases_offline(run, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run(train_iters=1, wandb_project="glm", wandb_save_dir="wb")
    assert list(Path("wb").rglob("*.wandb"))


def test_a_profile_is_a_chrome_trace_of_the_chosen_iterations(run):
    run(train_iters=3, profile=True, profile_step_start=1, profile_step_end=2)
    run(train_iters=2, profile=True, profile_step_start=1, profile_step_end=9, profile_dir="late")  # to the run's end
    for folder in ("profile", "late"):
        [trace] = Path(folder).iterdir()
        assert trace.name == "rank00000_from_iteration2.json.gz"
        names = {event.get("name", "") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
        assert "aten::mm" in names


def test_a_profile_that_cannot_be_written_ends_the_run_before_it_begins(run):
    Path("file").write_text("")
    with pytest.raises(OSError, match="file"):
        run(train_iters=3, profile=True, profile_step_start=2, profile_step_end=3, profile_dir="file", log_file="l")
    assert not Path("l").exists()


def plot(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, ROOT / "tools/plot_log.py", *words], capture_output=True, text=True)


def test_smoothed_values_are_means_of_the_last_ones():
    namespace = runpy.run_path(str(ROOT / "tools/plot_log.py"))
    line = [(1, 4.0), (2, 2.0), (3, 6.0), (5, 1.0)]
    assert namespace["smoothed"](line, 2) == [(1, 4.0), (2, 3.0), (3, 4.0), (5, 3.5)]
    assert namespace["smoothed"](line, 1) == line


def test_lists_are_a_line_for_each_place():
    lines = runpy.run_path(str(ROOT / "tools/plot_log.py"))["lines"]
    records = [{"iteration": 1, "a": [1.0, 2.0]}, {"iteration": 2}, {"iteration": 3, "a": [4.0, math.nan, 6.0]}]
    assert lines(records, "a", 2.0) == [[(1, 2.0), (3, 8.0)], [(1, 4.0)], [(3, 12.0)]]
    assert lines([{"iteration": 1, "a": 3.0}], "a") == [[(1, 3.0)]] and lines(records, "b") == [[]]


def test_plot_draws_runs_of_different_lengths(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    for name, count in (("a", 3000), ("b", 3)):
        Path(name).mkdir()
        records = [{"iteration": i, "lm_loss": 1 / i, "grad_norm": 1.0} for i in range(1, count + 1)]
        records[0] |= {"learning_rate": 0.1}
        records[1] |= {"valid_lm_loss": 0.5, "tokens_per_second_per_gpu": 10.0, "peak_memory_bytes": 2**30}
        records[2] |= {"lm_loss": None, "mtp_losses": [1.0, 2.0], "mtp_acceptance": [0.5, 0.4]}
        records.insert(0, {"kind": "config", "from_iteration": 0})
        Path(name, "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records) + '{"iterat')
    done = plot("a/log.jsonl", "b/log.jsonl", "--save", "pictures/runs.png", "--smooth", "5")
    assert (done.returncode, done.stdout) == (0, "pictures/runs.png: 2 runs\n"), done.stderr
    assert Path("pictures/runs.png").read_bytes().startswith(b"\x89PNG")
    Path("odd.jsonl").write_text('{"iteration": 1, "lm_loss": NaN}\n{"iteration": 2, "peak_memory_bytes": Infinity}\n')
    done = plot("odd.jsonl")
    assert (done.returncode, done.stdout) == (0, "log.png: 1 run\n"), done.stderr
    done = plot("a/log.jsonl", "--only", "lm_loss", "grad_norm", "--save", "two.png")
    assert (done.returncode, done.stdout) == (0, "two.png: 1 run\n"), done.stderr
    assert (
        plot("odd.jsonl", "--only", "indexer_recall").stderr == "error: --only indexer_recall: no record has this key\n"
    )
    Path("bad.jsonl").write_bytes(b'{"iteration": 1}\n{"iteration": "2"}\n\xff\n')
    assert plot("bad.jsonl").stderr == "error: bad.jsonl line 2 is no record of an iteration\n"
    Path("bad.jsonl").write_text("{}\n")
    done = plot("bad.jsonl")
    assert (done.returncode, done.stderr) == (2, "error: bad.jsonl line 1 is no record of an iteration\n")
    assert plot("a").stderr == "error: a is a folder: name the file that --log-file wrote\n"
    assert plot("odd.jsonl", "--smooth", "0").stderr == "error: --smooth is 0; it must be at least 1\n"
    done = plot("none.jsonl")
    assert done.returncode == 1 and done.stderr.startswith("error: ") and "none.jsonl" in done.stderr
