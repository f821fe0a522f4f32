"""Signals before and during training: exit codes, one line, no traceback, and what other ranks do."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BEGIN = "import sys, time, ctypes; from megatron_glm import signals; signals.install(); "
READY = "print('ready', flush=True); "
LINE = {signal.SIGINT: "interrupted\n"}
LINE |= {n: f"{n.name}: nothing is lost, start again\n" for n in (signal.SIGTERM, signal.SIGUSR1)}


def start(code: str, *words: str, cwd: Path | None = None, **environment: str) -> subprocess.Popen:
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    command = [sys.executable, "-c", code, *words] if code else [sys.executable, *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
    return subprocess.Popen(command, cwd=cwd, env=environment, text=True, **pipes)


def sent(program: subprocess.Popen, *numbers: int, until: str = "ready") -> tuple[int, str]:
    """Exit code and errors of a program that gets these signals, a moment apart, once it has printed `until`."""
    with program:
        for line in program.stdout:
            if until in line:
                break
        for number in numbers:
            program.send_signal(number)
            time.sleep(0.2)
        _, errors = program.communicate(timeout=60)
    return program.returncode, errors


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)])
def test_before_training_a_signal_ends_the_program_at_once(number, code):
    assert sent(start(BEGIN + READY + "time.sleep(60)"), number) == (code, LINE[number])


def test_a_main_thread_that_waits_in_c_does_not_keep_the_program_alive():
    lock = "signals.GRACE = 0.1; mutex = ctypes.create_string_buffer(64); libc = ctypes.CDLL(None); "
    lock += "libc.pthread_mutex_lock(mutex); "
    waits = BEGIN + lock + READY + "libc.pthread_mutex_lock(mutex)"
    assert sent(start(waits), signal.SIGTERM) == (75, LINE[signal.SIGTERM])


def test_a_second_interrupt_stops_at_once():
    waits = "training = signals.noted(True); training.__enter__(); " + READY + "time.sleep(60)"
    with start(BEGIN + waits) as program:
        assert program.stdout.readline() == "ready\n"
        program.send_signal(signal.SIGINT)
        assert program.stderr.readline() == "interrupted: saving after this step; again stops at once\n"
        program.send_signal(signal.SIGINT)
        assert program.communicate(timeout=60)[1] == "interrupted again: stopped\n"
    assert program.returncode == 130


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 130)])
def test_training_without_save_has_nothing_to_wait_for(number, code):
    training = "training = signals.noted(False); training.__enter__(); "
    assert sent(start(BEGIN + training + READY + "time.sleep(60)"), number)[0] == code


def test_a_forked_child_has_its_own_signals():
    code = BEGIN + "\nimport os, signal\nchild = os.fork()\nif child == 0:\n    print('ready', flush=True)\n"
    code += "    time.sleep(60)\ntime.sleep(0.5)\nos.kill(child, signal.SIGTERM)\n"
    code += "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) + 100)"
    assert sent(start(code)) == (100 - signal.SIGTERM, "")


STORE = """
import atexit, os, shutil
from pathlib import Path
first = os.environ["RANK"] == "0"
class Store:
    folder = Path(sys.argv[1])
    def clone(self): return self
    def path(self, key): return self.folder / key.replace("/", "-")
    def set(self, key, value): self.path(key).write_text(value)
    def get(self, key): return self.path(key).read_bytes()
    def check(self, keys):
        if not self.folder.exists(): raise RuntimeError("the first rank has left")
        return all(self.path(key).exists() for key in keys)
if first: atexit.register(shutil.rmtree, Store.folder)
signals.POLL = 0.1 if first else 0.25
signals.share(Store())
print("ready", flush=True)
"""


@pytest.mark.parametrize("reached, number, code", [(2, signal.SIGTERM, 75), (0, signal.SIGINT, 130)])
def test_a_signal_that_reaches_one_rank_before_training_ends_all(tmp_path, reached, number, code):
    ranks = [start(BEGIN + STORE + "time.sleep(60)", str(tmp_path), RANK=str(rank)) for rank in range(3)]
    for rank in set(range(3)) - {reached}:
        assert ranks[rank].stdout.readline() == "ready\n"
    errors = {reached: sent(ranks[reached], number)[1]}
    errors |= {rank: ranks[rank].communicate(timeout=60)[1] for rank in range(3) if rank != reached}
    assert [rank.returncode for rank in ranks] == [code] * 3
    assert errors == {0: LINE[number], 1: "", 2: ""}


def test_a_rank_that_is_in_the_loop_first_leaves_with_the_one_that_is_not(tmp_path):
    """Once all are there, what another has received is agreed on in the loop."""
    training = "training = signals.noted(True, 2); training.__enter__(); " + READY
    ranks = [start(BEGIN + STORE + training + "time.sleep(60)", str(tmp_path), RANK="0")]
    agreeing = training + "signals.all_train(); time.sleep(1); sys.exit(3)"
    ranks.append(start(BEGIN + STORE + agreeing, str(tmp_path), RANK="1"))
    for rank in ranks:
        assert [rank.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    assert sent(start(BEGIN + STORE + "time.sleep(60)", str(tmp_path), RANK="2"), signal.SIGTERM) == (75, "")
    assert ranks[0].communicate(timeout=60)[1] == LINE[signal.SIGTERM]
    assert [rank.wait(60) for rank in ranks] == [75, 3]


@pytest.mark.parametrize("number, code", [(signal.SIGUSR1, 75), (signal.SIGINT, 130)])
def test_the_script_leaves_while_its_data_loads(tmp_path, number, code):
    """The data is a pipe that nobody writes to. After that line the process only waits for it."""
    os.mkfifo(tmp_path / "rows.jsonl")
    flags = ["--hf-config", "glm5.2-tiny", "--data-path", str(tmp_path / "rows.jsonl"), "--seq-length", "64"]
    program = start("", str(ROOT / "finetune_glm.py"), *flags, "--train-iters", "1", "--save", str(tmp_path / "out"))
    assert sent(program, number, until="rows.jsonl") == (code, LINE[number])
    assert not (tmp_path / "out").exists()


BLOCK = """
import importlib.abc, sys, time
class Slow(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in ("numpy", "torch", "matplotlib", "transformers"):
            print("ready", file=sys.__stdout__, flush=True)
            time.sleep(60)
sys.meta_path.insert(0, Slow())
"""
PROGRAMS = {
    "finetune_glm.py": "--hf-config glm5.2-tiny --data-path rows --seq-length 64 --train-iters 1",
    "pretrain_glm.py": "--hf-config glm5.2-tiny --mock-data --seq-length 64 --train-iters 1",
    "tools/convert_hf.py": "--from-hf . --save out",
    "tools/preprocess_data.py": "--input rows --output-prefix out --tokenizer-model tokens",
    "tools/plan.py": "--hf-config glm5.2-tiny --data-path rows --seq-length 64 --train-iters 1",
    "tools/benchmark.py": "kernels",
    "tools/generate.py": "--load-hf hf --prompt-file rows",
    "tools/score.py": "--load-hf hf --data-path rows",
    "tools/export_adapter.py": "--load out --to-peft peft",
    "tools/compare_automodel.py": "--automodel .",
    "tools/plot_log.py": "log.jsonl",
    "tools/plot_kernels.py": str(ROOT / "docs/kernels.json"),
    "tools/doctor.py": "",
    "tools/rehearse_start.py": "--ranks 256 --rank 0",
    "tools/rehearse_save.py": "--ranks 256",
    "examples/quickstart_data.py": "--save out",
    "examples/compare_with_transformers.py": "--hf . --data-path rows --loss 1",
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_an_interrupt_while_a_program_starts_is_one_line(program, tmp_path):
    """Here it comes while the first slow package is imported."""
    (tmp_path / "sitecustomize.py").write_text(BLOCK)
    (tmp_path / "log.jsonl").write_text('{"iteration": 1}\n')
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text((ROOT / "megatron_glm/presets/glm5.2-tiny.json").read_text())
    words = [str(ROOT / program), *PROGRAMS[program].split()]
    begun = start("", *words, cwd=tmp_path, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert sent(begun, signal.SIGINT) == (130, "interrupted\n")


def test_every_program_is_among_those():
    scripts = [path for folder in (".", "tools", "examples") for path in (ROOT / folder).glob("*.py")]
    programs = {str(path.relative_to(ROOT)) for path in scripts if '__name__ == "__main__"' in path.read_text()}
    assert programs - {"setup.py"} == PROGRAMS.keys()


def test_ranks_that_still_ask_the_store_leave_with_their_own_code(tmp_path):
    """Python's end would stop their threads inside torch's code, which aborts a process that is not the last."""
    program = """
import sys, time
from datetime import timedelta
from pathlib import Path
from megatron_glm import launch, signals
def main():
    from megatron_glm.parallel.rendezvous import meet
    meeting = meet(timedelta(minutes=1))
    signals.POLL = 0.0001
    signals.share(meeting.store)
    while meeting.rank == 0 and not Path(sys.argv[1]).exists():
        time.sleep(0.05)
    time.sleep(0.1)
    return 3 + meeting.rank
signals.install()
launch.run_program(main)
"""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    first, second = (start(program, str(tmp_path / "go"), RANK=str(rank), **place) for rank in range(2))
    assert (second.communicate(timeout=60)[1], second.returncode) == ("", 4)
    (tmp_path / "go").touch()
    assert (first.communicate(timeout=60)[1], first.returncode) == ("", 3)
