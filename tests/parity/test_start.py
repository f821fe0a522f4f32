"""The start of a run: its ranks meet, strangers and doubles are refused, and ranks with other settings end it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch.distributed as dist

from megatron_glm.launch import is_shown_elsewhere
from tests.helpers import distributed
from tests.helpers.finetune import finetune, keep_default_group, write_rows


class Processes:
    """Ranks that meet at one port, each a process with an environment of its own."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            self.port = free.getsockname()[1]
        self.started: list[tuple] = []

    def start(self, rank: int, size: int = 2, seconds: float = 60.0, **environment: str) -> int:
        given = {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "localhost", "MASTER_PORT": str(self.port)}
        receiver, sender = distributed._server().Pipe(duplex=False)
        process = distributed._server().Process(target=meet, args=(given | environment, seconds, sender))
        process.start()
        self.started.append((process, receiver))
        return len(self.started) - 1

    def result(self, number: int) -> tuple[str, str]:
        """("met" or the kind of error, its message and what was printed) of a started process."""
        assert self.started[number][1].poll(90), f"process {number} does not end"
        return self.started[number][1].recv()

    def listening(self) -> None:
        for _ in range(600):
            with contextlib.suppress(OSError):
                return socket.create_connection(("localhost", self.port)).close()
            time.sleep(0.05)
        raise TimeoutError("rank 0 does not listen")


def meet(environment: dict[str, str], seconds: float, sender) -> None:
    from megatron_glm.parallel import rendezvous

    os.environ.update(environment)
    rendezvous.SAY_EVERY = 0.2
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            meeting = rendezvous.meet(timedelta(seconds=seconds))
            for rank in range(meeting.world_size):  # the keys are those of this run
                meeting.store.set(f"{meeting.rank}", environment.get("SLURM_STEP_ID", ""))
                assert meeting.store.get(f"{rank}").decode() == environment.get("SLURM_STEP_ID", "")
            meeting.store.add("done", 1)
            while meeting.rank == 0 and meeting.store.add("done", 0) < meeting.world_size:
                time.sleep(0.02)
            outcome = "met"
        except (ValueError, OSError) as error:
            outcome = type(error).__name__
            print(error, file=said)
    sender.send((outcome, said.getvalue()))


@pytest.fixture
def processes():
    made = Processes()
    yield made
    for process, _ in made.started:
        process.kill()
        process.join()


def step(number: int, rank: int) -> dict[str, str]:
    return {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": str(number), "SLURM_NTASKS": "2", "SLURM_PROCID": str(rank)}


def test_ranks_of_two_runs_at_one_port_do_not_join(processes):
    first = processes.start(0, **step(0, 0))
    processes.listening()
    other = [processes.start(rank, **step(1, rank)) for rank in (0, 1)]
    kind, text = processes.result(other[0])
    assert kind == "ValueError" and f"port {processes.port} of localhost is in use, by another run" in text
    assert "set MASTER_PORT" in text
    kind, text = processes.result(other[1])
    assert kind == "ValueError" and "is of SLURM step 7.1" in text and "is SLURM step 7.0" in text
    second = processes.start(1, **step(0, 1))
    assert [processes.result(number)[0] for number in (first, second)] == ["met", "met"]


def test_a_run_of_torchrun_does_not_take_ranks_of_another(processes):
    first = processes.start(0, TORCHELASTIC_RUN_ID="a")
    other = processes.start(1, TORCHELASTIC_RUN_ID="b")
    kind, text = processes.result(other)
    assert kind == "ValueError" and "--rdzv-id b" in text and "--rdzv-id a" in text
    second = processes.start(1, TORCHELASTIC_RUN_ID="a")
    assert [processes.result(number)[0] for number in (first, second)] == ["met", "met"]


def test_a_rank_that_is_here_twice_ends_the_start(processes):
    started = [processes.start(rank, 3) for rank in (0, 1, 1)]
    for kind, text in map(processes.result, started):
        assert kind == "ValueError" and "rank 1 is here twice: process" in text


def test_another_number_of_ranks_ends_the_start(processes):
    started = [processes.start(0, 2), processes.start(1, 3)]
    for kind, text in map(processes.result, started):
        assert kind == "ValueError" and "WORLD_SIZE is 2 on rank 0" in text and "and 3 on rank 1" in text


def test_a_start_that_waits_says_for_whom(processes):
    started = [processes.start(rank, 5, seconds=4) for rank in (0, 2)]
    (kind, first), (other, second) = map(processes.result, started)
    assert (kind, other) == ("TimeoutError", "OSError")
    assert f"for 3 of 5 ranks at localhost:{processes.port}: 1, 3-4\n" in first
    assert f"for the ranks that rank 0 at localhost:{processes.port} waits for\n" in second
    assert "--distributed-timeout-minutes is over" in first.splitlines()[-1] and "1, 3-4" in second.splitlines()[-1]


def test_a_rank_without_a_first_one_says_where_it_waits(processes):
    kind, text = processes.result(processes.start(1, seconds=1.0))
    assert kind == "TimeoutError"
    assert f"rank 0 at localhost:{processes.port} (MASTER_ADDR, MASTER_PORT), which does not answer" in text


def test_an_address_that_is_no_host_is_refused_at_once(processes):
    kind, said = processes.result(processes.start(0, MASTER_ADDR="no-such-host.invalid"))
    assert kind == "ValueError" and said.startswith("MASTER_ADDR no-such-host.invalid is no known host")


def compared() -> list[tuple[str, bool]]:
    """Messages of facts that differ, and whether this rank leaves printing to another."""
    from megatron_glm.training.agreement import require_same

    rank, found = dist.get_rank(), []
    same = {"--lr": "1e-05", "torch": "2.13.0"}
    cases = [same, same | {"--lr": f"{rank}"}, same | {f"extra{rank}": "1"} if rank == 2 else same]
    for facts in cases:
        try:
            require_same(dist.group.WORLD, facts)
            found.append(("", False))
        except ValueError as error:
            found.append((str(error), is_shown_elsewhere(error)))
    return found


def test_what_differs_is_named_with_values_and_ranks():
    ranks = distributed.run(3, compared)
    host = socket.gethostname()
    for rank, (same, flags, missing) in enumerate(ranks):
        assert same == ("", False)
        differ = f"the ranks of this run differ: --lr is 0 on rank 0 ({host}) and 1 on rank 1 ({host}) (and on 2)"
        assert flags == (differ, rank == 2)
        assert missing[0].endswith(f"extra2 is not there on rank 0 ({host}) and 1 on rank 2 ({host})")


def outcome(folder: Path, cases: list[dict]) -> list[tuple[int, str]]:
    """Exit code and errors of finetune_glm.py on this rank, which has flags of its own."""
    from megatron_glm.launch import one_line_errors

    os.chdir(folder)
    os.environ["WORLD_SIZE"] = str(dist.get_world_size())
    found = []
    for case in cases:
        flags = {name: value[dist.get_rank()] if isinstance(value, tuple) else value for name, value in case.items()}
        errors = io.StringIO()
        try:
            with contextlib.redirect_stderr(errors), keep_default_group(), one_line_errors():
                finetune(train_iters=2, save="out", **flags)
            found.append((0, errors.getvalue()))
        except SystemExit as stop:
            found.append((stop.code, errors.getvalue()))
        dist.barrier()
    return found


def test_ranks_with_other_flags_or_data_save_nothing(tmp_path):
    write_rows(tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    rows[3]["input_ids"][0] ^= 1
    (tmp_path / "other.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cases = [
        {"lr": (0.01, 0.02)},
        {"seed": (1, 2), "num-layers": (3, 4)},
        {"log-file": ("a.jsonl", None)},
        {"data-path": ("train.jsonl", "other.jsonl")},
    ]
    words = [
        ["--lr is 0.01 on rank 0", "0.02 on rank 1"],
        ["--seed is 1 on rank 0", "2 on rank 1", "--num-layers is 3", "and 4 on rank 1"],
        ["--log-file (given or not) is True", "and False"],
        ["--data-path is ('train.jsonl',)", "('other.jsonl',)"],
    ]
    for rank in distributed.run(2, outcome, tmp_path, cases, timeout=200):
        for (code, errors), expected in zip(rank, words, strict=True):
            assert code == 2 and errors.count("\n") == 1, errors
            assert all(word in errors for word in expected), errors
    assert not (tmp_path / "out").exists()


def other_data() -> list[str]:
    """What two ranks find whose data differ in the number of packs, or in a token."""
    from megatron_glm.training.agreement import require_same_data

    def data(packs: int, token: int) -> SimpleNamespace:
        pack = [(np.array([3, token]), np.array([True, True]))]
        return SimpleNamespace(dataset=SimpleNamespace(packs_per_epoch=packs, pack=lambda index: pack))

    rank, found = dist.get_rank(), []
    for training, validation in ((data(5, 7), None), (data(5 - rank, 7), None), (data(5, 7), data(2, 7 + rank))):
        try:
            require_same_data(dist.group.WORLD, training=training, validation=validation)
            found.append("")
        except ValueError as error:
            found.append(str(error))
    return found


def test_ranks_with_other_rows_under_the_same_name_are_refused():
    for same, packs, token in distributed.run(2, other_data):
        assert same == ""
        assert "the number of packs of the training data is 5 on rank 0" in packs and "and 4 on rank 1" in packs
        assert "the fingerprint of the validation data is" in token and "training" not in token
