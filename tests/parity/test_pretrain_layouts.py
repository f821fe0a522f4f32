"""pretrain_glm.py on text: it learns, and a killed run goes on in another layout with the same samples."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from tests.helpers import distributed
from tests.helpers.finetune import json_log
from tests.helpers.pretrain import write_corpus

STEPS, SAVED, KILLED = 40, 15, 18
FLAGS = {
    "data_path": "corpus",
    "split": "1",
    "global_batch_size": 8,
    "micro_batch_size": 2,
    "rampup_batch_size": [4, 4, 40],
    "train_iters": STEPS,
    "save_interval": SAVED,
    "lr_warmup_iters": 5,
    "seq_length": 64,
    "log_samples": True,
    "mock_data": None,
}
LAYOUT = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_model_parallel_size": 2}


def pretraining(folder: Path, kill_after: int | None, **flags) -> None:
    from megatron_glm.training import loop
    from tests.helpers.pretrain import pretrain

    os.chdir(folder)
    os.environ["WORLD_SIZE"] = str(dist.get_world_size())
    train_step, done = loop.train_step, []

    def step(*args):
        done.append(1)
        if len(done) == kill_after:
            os.kill(os.getpid(), signal.SIGKILL)
        return train_step(*args)

    loop.train_step = step
    pretrain(**FLAGS, **flags)


def killed(folder: Path) -> None:
    pretraining(folder, KILLED, save="broken", log_file="broken.jsonl")


def resumed(folder: Path) -> None:
    pretraining(folder, None, preset=None, load="broken", save="broken", log_file="broken.jsonl", **LAYOUT)


def whole(folder: Path) -> None:
    pretraining(folder, None, save="whole", log_file="whole.jsonl")


@pytest.mark.timeout(600)
def test_a_killed_run_goes_on_in_another_layout_with_the_same_samples(tmp_path):
    tokens = write_corpus(str(tmp_path / "corpus"))
    counts = np.bincount(tokens) / len(tokens)
    entropy = -(counts[counts > 0] * np.log(counts[counts > 0])).sum()
    distributed.run(1, whole, tmp_path, timeout=280)
    with pytest.raises(RuntimeError, match="exit code -9"):
        distributed.run(1, killed, tmp_path, timeout=280)
    distributed.run(2, resumed, tmp_path, timeout=280)
    one, other = (json_log(tmp_path / f"{name}.jsonl") for name in ("whole", "broken"))
    assert [record["iteration"] for record in other] == list(range(1, STEPS + 1))
    for left, right in zip(one, other, strict=True):
        same = ("samples", "consumed_samples", "learning_rate", "loss_tokens")
        assert {key: left[key] for key in same} == {key: right[key] for key in same}
        assert right["lm_loss"] == pytest.approx(left["lm_loss"], rel=0.05)
    names = [name for record in one for name in record["samples"]]
    assert len(set(names)) == len(names) == one[-1]["consumed_samples"] == 280
    assert one[0]["lm_loss"] > 4.0
    assert max(record["lm_loss"] for log in (one, other) for record in log[-5:]) < entropy - 0.1, entropy
