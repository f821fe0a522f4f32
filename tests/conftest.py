"""Settings that hold for every test: one thread a process (spawned ranks inherit it), and no network."""

import os
import signal
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest  # noqa: E402
import torch  # noqa: E402

from tests.helpers.finetune import keep_default_group  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):  # a folder above may be called so, too
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def plain_signals() -> Iterator[None]:
    """Every test begins and ends with Python's own handlers.

    A tool that runs inside a test installs its own, and a second Ctrl-C of a later test would then end the whole run.
    A shell starts background jobs with SIGINT ignored, and Python leaves it so.
    """
    _reset_signals()
    yield
    _reset_signals()


@pytest.fixture(autouse=True)
def default_group() -> Iterator[None]:
    """What ends a program inside a test leaves the default process group to later tests: theirs are made once."""
    with keep_default_group():
        yield


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
