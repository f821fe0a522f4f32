"""pretrain_glm.py on a tiny model and made-up data, called as from the command line."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from megatron_glm.data.indexed import IndexedWriter
from tests.helpers.finetune import SHAPE, run_script

FLAGS = {"mock-data": True, "seq-length": 32, "global-batch-size": 2, "lr": 0.01, "eval-iters": 1}


def pretrain(preset: str | None = "glm5.2-tiny", **given) -> None:
    """What pretrain_glm.py does in this folder, with these flags on top of the tiny ones; a list is several words."""
    import pretrain_glm

    flags = FLAGS | {"hf-config": preset} | (SHAPE if preset else {})
    flags |= {name.replace("_", "-"): value for name, value in given.items()}
    run_script(pretrain_glm, flags)


def write_corpus(prefix: str, documents: int = 60) -> np.ndarray:
    """Files of Python sources as characters below 64, cut into documents of 40 lines; returns all tokens."""
    lines = Path(argparse.__file__).read_text().upper().splitlines(keepends=True)
    with IndexedWriter(prefix, np.uint16) as writer:
        for i in range(documents):
            ids = np.frombuffer("".join(lines[40 * i : 40 * i + 40]).encode(), np.uint8).astype(np.uint16) % 64
            writer.add_document(ids)
    return np.fromfile(f"{prefix}.bin", np.uint16)
