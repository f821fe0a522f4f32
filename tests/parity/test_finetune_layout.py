"""finetune_glm.py on eight ranks (TP2, PP2 with two virtual stages, CP2, EP4) follows one process."""

import json
import os
import sys
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from tests.helpers import distributed
from tests.helpers.finetune import json_log

FLAGS = "--seq-length 64 --global-batch-size 4 --num-layers 4 --vocab-size 256 --hidden-size 32 --log-file".split()
LAYOUT = (
    "--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2 --expert-model-parallel-size 4 "
    "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"
).split()
# In the second run nothing is left to choose, so that rounding cannot flip a selection and move the curve.
RUNS = {
    "selecting": ("--train-iters 3 --lr 1e-3 --dsa-indexer-topk 16".split(), 1e-4),
    "not selecting": ("--train-iters 20 --lr 1e-3 --adam-eps 1e-3 --moe-router-topk 8".split(), 1e-5),
}


def finetune(folder: str, layout: list[str]) -> None:
    import finetune_glm

    os.environ["WORLD_SIZE"] = "8" if layout else "1"
    for name, (run, _) in RUNS.items():
        log = f"{folder}/{name} {'eight' if layout else 'one'}.jsonl"
        words = ["finetune_glm.py", "--hf-config", "glm5.2-tiny", "--data-path", f"{folder}/rows.jsonl"]
        with patch.object(sys, "argv", [*words, *FLAGS, log, *run, *layout]):
            finetune_glm.main()


@pytest.mark.timeout(600)
def test_eight_ranks_follow_one_process(tmp_path: Path):
    random = np.random.default_rng(0)
    rows = [{"input_ids": random.integers(0, 256, n).tolist()} for n in random.integers(8, 60, 40).tolist()]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    distributed.run(1, finetune, str(tmp_path), [])
    distributed.run(8, finetune, str(tmp_path), LAYOUT, timeout=500)
    for name, (run, tolerance) in RUNS.items():
        one, eight = (json_log(tmp_path / f"{name} {ranks}.jsonl") for ranks in ("one", "eight"))
        assert len(one) == len(eight) == int(run[1])
        assert one[-1]["lm_loss"] < one[0]["lm_loss"]
        for left, right in zip(one, eight, strict=True):
            assert right["lm_loss"] == pytest.approx(left["lm_loss"], abs=tolerance), (name, left["iteration"])
            assert right["loss_tokens"] == left["loss_tokens"]
