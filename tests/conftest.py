"""Settings that hold for every test: one thread a process (spawned ranks inherit it), and no network."""

import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest  # noqa: E402
import torch  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


# A shell starts background jobs with SIGINT ignored, and Python leaves it so. The tests of Ctrl-C need it.
signal.signal(signal.SIGINT, signal.default_int_handler)
