"""Conversion needs the memory of a few chunks, whatever the size of the model.

The limits of chunks and files are scaled down with the model; anonymous memory is measured in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_glm.checkpoint import safetensors_io
from tests.helpers import hf_folder

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
CHUNK, FILE = 4 * MIB, 8 * MIB

PROGRAM = f'''
import os, re, sys, threading, time
from pathlib import Path
from megatron_glm.checkpoint import convert, hf, chunks, sharded
from megatron_glm.checkpoint.output import Run

chunks.CHUNK_BYTES, sharded.FILE_BYTES = {CHUNK}, {FILE}
os.fsync = lambda descriptor: None

def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

def peak(convert_once):
    """Bytes above those before the call, sampled by a thread."""
    before, highest, running = anonymous(), [0], [True]

    def sample():
        while running:
            highest[0] = max(highest[0], anonymous())
            time.sleep(0.001)

    sampler = threading.Thread(target=sample)
    sampler.start()
    convert_once()
    running.clear()
    sampler.join()
    return highest[0] - before

def convert_in():
    convert.Import(hf.HFCheckpoint(folder / "hf"), folder / "ckpt").write(Run())

def convert_out():
    convert.Export(folder / "ckpt" / "iter_0000000", 32 << 20).write(folder / "back", Run())

folder = Path(sys.argv[1])
print(peak(convert_in), peak(convert_out))
'''


def peaks(folder: Path) -> list[int]:
    """Bytes of anonymous memory that the conversion in and out took at its peak."""
    command = [sys.executable, "-c", PROGRAM, str(folder)]
    # malloc keeps freed blocks of these scaled-down chunks, but not of the real ones: make it return them, too
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(MIB)}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return [int(number) for number in done.stdout.split()]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="RssAnon is in Linux's /proc")
def test_peak_memory_does_not_grow_with_the_model(tmp_path: Path):
    sizes, taken = [], []
    for name, layers in (("small", 2), ("large", 6)):
        tensors = hf_folder.make_folder(
            tmp_path / name / "hf",
            num_hidden_layers=layers,
            indexer_types=["full"] * layers,
            mlp_layer_types=["sparse"] * layers,
            hidden_size=512,
            moe_intermediate_size=512,
            vocab_size=8_000,
            num_nextn_predict_layers=0,
        )
        sizes.append(sum(tensor.nbytes for tensor in tensors.values()))
        del tensors
        taken.append(peaks(tmp_path / name))
    assert sizes[0] > 3 * FILE and sizes[1] > 2 * sizes[0], sizes
    for small, large in zip(*taken, strict=True):
        assert large <= safetensors_io.BUFFER_BYTES + 3 * CHUNK, (taken, sizes)
        # what malloc keeps and when it is sampled differ by some MB; the models differ by ten times this
        assert large - small <= (sizes[1] - sizes[0]) / 10, (taken, sizes)
