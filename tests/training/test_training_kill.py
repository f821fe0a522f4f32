"""A run that is killed twenty times, at random points around and inside its saves, ends as one that never was."""

from __future__ import annotations

import os
import random
import signal
import sys
import traceback
from pathlib import Path

from megatron_glm.checkpoint import sharded
from tests.helpers import distributed
from tests.helpers.finetune import assert_same, finetune, records, tensors, write_rows

KILLS = 20
EVENTS_OF_A_SAVE = 60  # about as many as there are: files opened, synced, renamed and removed


def die_at(event: int, delay: float) -> None:
    """Ends this process `delay` seconds after its event-th use of a file or folder of the checkpoints, from any thread.

    At once by SIGKILL, or later by the timer's signal, which nothing handles either.
    """
    seen, sync = [], os.fsync

    def count() -> None:
        seen.append(1)
        if len(seen) == event:
            if not delay:
                os.kill(os.getpid(), signal.SIGKILL)
            signal.setitimer(signal.ITIMER_REAL, delay)

    def synced(descriptor: int) -> None:
        count()
        sync(descriptor)

    def used(name: str, args: tuple) -> None:
        if name in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir") and "out" in str(args[0]):
            count()

    os.fsync = synced
    sys.addaudithook(used)


def killed(number: int, event: int, delay: float, **flags) -> None:
    """Forks a run of the program that dies there, and waits for its end."""
    child = os.fork()
    if child == 0:
        try:
            with open(f"output{number}", "w") as output:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
            die_at(event, delay)
            finetune(**flags)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), Path(f"output{number}").read_text()
    assert os.WTERMSIG(status) == (signal.SIGALRM if delay else signal.SIGKILL)


def killed_twenty_times() -> None:
    """Each start finds the last complete checkpoint, which is whole, and goes on from it."""
    dice, out = random.Random(0), Path("out")
    flags = {"save": "out", "save_interval": 1, "keep_last": 2, "lr_decay_style": "constant"}
    before, from_the_start = 0, {"preset": "glm5.2-tiny"}
    for number in range(KILLS):
        start = {"preset": None, "load": "out"} if before else from_the_start
        event, delay = dice.randrange(1, 2 * EVENTS_OF_A_SAVE), dice.choice((0, 0.001 + 0.1 * dice.random()))
        log = f"log{number}.jsonl"
        killed(number, event, delay, **start, **flags, train_iters=1000, async_save=number % 2 == 1, log_file=log)
        if Path(log).exists() and (done := records(log)):
            assert done[0]["iteration"] == before + 1
        last = sharded.latest(out) or 0
        assert last >= before
        before = last
        if last:
            assert all(tensor.isfinite().all() for tensor in tensors(out, last).values())
    assert before > 3  # some saves had been completed
    finetune(preset=None, load="out", **flags, train_iters=before + 1)
    assert not list(out.glob("*.tmp")) and len(list(out.glob("iter_*"))) == 2
    finetune(**flags | {"save": "whole", "save_interval": None}, train_iters=before + 1)
    assert_same(tensors("out", before + 1), tensors("whole", before + 1))


def in_fresh_process(folder: Path) -> None:
    """Without threads, which a fork would not take along."""
    os.chdir(folder)
    try:
        import megatron_glm.training.loop  # noqa: F401  (torch and all else, once for all forks)

        killed_twenty_times()
    except BaseException:
        Path("error").write_text(traceback.format_exc())


def test_a_run_killed_twenty_times_ends_as_one_that_never_was(tmp_path: Path):
    write_rows(tmp_path)
    process = distributed._server().Process(target=in_fresh_process, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert not (tmp_path / "error").exists(), (tmp_path / "error").read_text()
