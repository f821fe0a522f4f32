"""finetune_glm.py on a tiny model, called as from the command line, and what it left behind."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_glm.launch import one_line_errors
from megatron_glm.training import run as training_run
from tests.helpers.distributed import close_groups

SHAPE = {
    "num-layers": 3,
    "hidden-size": 32,
    "vocab-size": 64,
    "ffn-hidden-size": 48,
    "moe-ffn-hidden-size": 16,
    "num-attention-heads": 2,
    "q-lora-rank": 16,
    "kv-lora-rank": 16,
    "qk-head-dim": 8,
    "qk-pos-emb-head-dim": 8,
    "v-head-dim": 8,
    "dsa-indexer-head-dim": 16,
    "dsa-indexer-topk": 4,
}
ROWS, SEQ = 11, 24


def write_rows(folder: Path) -> None:
    """train.jsonl and valid.jsonl, of 11 rows each."""
    random = np.random.default_rng(0)
    for name in ("train", "valid"):
        rows = [{"input_ids": random.integers(0, 64, n).tolist()} for n in random.integers(5, SEQ, ROWS).tolist()]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def finetune(preset: str | None = "glm5.2-tiny", **given) -> None:
    """What finetune_glm.py does in this folder, with these flags on top of the tiny ones."""
    import finetune_glm

    flags = {"hf-config": preset, "data-path": "train.jsonl", "seq-length": SEQ, "global-batch-size": 2}
    flags |= {"packing": "none", "lr": 0.01, "weight-decay": 0.1, "moe-router-bias-update-rate": 0.01}
    flags |= (SHAPE if preset else {}) | {name.replace("_", "-"): value for name, value in given.items()}
    run_script(finetune_glm, flags)


def run_script(script: ModuleType, flags: dict[str, Any]) -> None:
    """main() of a script with these flags (True: no value, a list: several, None or False: not given)."""
    words = [f"{script.__name__}.py"]
    for name, value in flags.items():
        if value:
            values = [] if value is True else value if isinstance(value, list) else [value]
            words += [f"--{name}", *map(str, values)]
    initialize, made = training_run.initialize, []

    def noted(config):
        made.append(initialize(config))
        return made[0]

    with patch.object(sys, "argv", words), patch.object(training_run, "initialize", noted):
        try:
            script.main()
        finally:
            for groups in made:
                close_groups(groups)


def keep_default_group() -> AbstractContextManager:
    """What ends the program otherwise ends the process group that other tests go on with."""
    destroy = dist.destroy_process_group
    return patch.object(dist, "destroy_process_group", lambda group=None: group and destroy(group))


def tensors(folder: str | Path, iteration: int) -> dict[str, torch.Tensor]:
    """Everything that a checkpoint holds."""
    from megatron_glm.checkpoint import sharded

    reader = sharded.Reader(sharded.iteration_folder(Path(folder), iteration))
    return {name: reader.tensor(name, (0,) * len(s), s, dtype) for name, (s, dtype) in reader.shapes.items()}


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    """The same names and the same bits."""
    assert left.keys() == right.keys()
    different = [name for name in left if not torch.equal(left[name], right[name])]
    assert not different, different


def json_log(file: str | Path) -> list[dict]:
    """The iterations in a JSON log; what is left out says how they were run."""
    lines = [json.loads(line) for line in Path(file).read_text().splitlines()]
    return [line for line in lines if line.get("kind") != "config"]


def records(file: str | Path) -> list[dict]:
    """The JSON log without what a clock or the memory says."""
    measured = ("seconds", "tokens_per_second_per_gpu", "tflops_per_gpu", "peak_memory_bytes")
    lines = json_log(file)
    assert all(line[key] > 0 for line in lines for key in measured if key in line or "skipped" not in line)
    measured = (*measured, "share_of_peak")  # of FP8 on a GPU
    return [{key: value for key, value in line.items() if key not in measured} for line in lines]


def saved(folder: str) -> list[int]:
    """Iterations of the checkpoints in a folder."""
    return sorted(int(path.name[5:]) for path in Path(folder).glob("iter_*"))


def exit_code(run: Callable[..., None], **flags) -> int:
    """Of a run that leaves early, with the errors that a user sees."""
    with keep_default_group(), pytest.raises(SystemExit) as stop, one_line_errors():
        run(**flags)
    return stop.value.code
