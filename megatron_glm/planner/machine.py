"""What the GPUs and links of a planned run do in a second, and where each number was measured.

All of docs/performance.md is one NVIDIA H200, or two of one host; an H100 is the same chip with slower memory.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_glm.config.plan_flags import GPU_TYPES

GIB = 2**30
CALIBRATED = ("device", "precision", "forward", "backward")  # what a calibration file holds


@dataclass(frozen=True)
class Machine:
    """Rates of one GPU and its links.

    memory: bytes of a GPU; products: operations a second, where `MEASURED` (pipeline/costs.py) says how much longer
    each kind of operation takes; copies: bytes read and written a second by passes over memory; nvlink, nic: bytes a
    second that a GPU sends inside its node and between nodes; forward, backward: computing takes so many times as long.
    """

    name: str
    memory: float
    products: float
    copies: float
    nvlink: float = 350e9
    nic: float = 45e9
    forward: float = 1.0
    backward: float = 1.0


# products: with it and `MEASURED`, the table of training steps is met within 3 % from 4,096 to 32,768 tokens, with each
# recomputation. It is what the card sustains; a large product alone runs at 784 to 800 TFLOP/s.
# copies: AdamW, clipping and norm pass over 208 GB in 50 ms (157 GB in 39 ms with bf16 moments).
H200 = Machine("h200", 139 * GIB, products=715e12, copies=4.1e12)
# Not measured: memory of 3.35 instead of 4.8 TB/s slows copies, and the 10 of 142 ms of a step that only move bytes.
H100 = replace(H200, name="h100", memory=80 * GIB, products=695e12, copies=2.9e12)
DEFAULT_TYPE = "h100"
MACHINES = {machine.name: machine for machine in (H100, H200)}
assert tuple(MACHINES) == GPU_TYPES

# Times of an operation of cuDNN's dense causal attention, forward and backward, as in `MEASURED`: 0.95 and 4.18 ms at
# 4,096 tokens, 3.57 and 15.0 ms at 8,192, 64 heads of 256.
DENSE_ATTENTION = (1.2, 5.2)
# FSDP2's transfers: 105 of 160 ms were waited for where everything is resharded (two data-parallel ranks).
FSDP_HIDDEN = 0.35
# Of one layer's pass with experts elsewhere, beside the bytes: a wait for counts, rows that move twice, products that
# run beside the shared expert's. 64 experts on two ranks: 8 ms a micro-batch in 3 layers, forward and backward.
EXPERTS_WAIT = 1.0e-3
# Time of grouped products by rows of an expert, over that at 1,024 rows: forward and both gradients.
EXPERT_ROWS = ((1024, 1.0), (256, 1.31), (128, 1.89))
# Rows of a rank's micro-batch from which on steps were measured. Of fewer, all products are taken to lose as much as
# the grouped ones do: 1.1 times the time at 2,048, 1.31 at 1,024.
MEASURED_ROWS = 4096
# Time of a kind's forward and backward with --fp8 blockwise and --fp8-wgrad auto, over bf16's: from the products and
# casts of one layer measured alone (docs/performance.md), what stays in bf16 included.
FP8_TIME = {"products": (0.72, 0.79), "experts": (0.70, 0.87)}
# Time of grouped products that leave so many multiprocessors free, over that with all of them: in bf16, and DeepGEMM's.
FEWER_SMS = {0: (1.0, 1.0), 8: (1.03, 1.08), 24: (1.06, 1.16)}
# Bytes that AdamW, clipping and the norm move for a parameter: weight and moments, read and written; gradient, read
# twice; bf16 copy.
OPTIMIZER_BYTES = {"fp32": 34, "bf16": 26}


def rows_factor(rows: float) -> float:
    """How much longer the grouped products take with so few rows an expert; linear in 1 / rows."""
    points = [(1 / n, factor) for n, factor in EXPERT_ROWS]
    if (x := 1 / rows) <= points[0][0]:
        return 1.0
    (x0, y0), (x1, y1) = points[:2] if x <= points[1][0] else points[1:]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def machine_of(flags: argparse.Namespace) -> Machine:
    """The GPUs that these flags name. Raises ValueError for a rate that is none and a calibration that cannot be."""
    given = vars(flags)
    machine = MACHINES[given.get("gpu_type", DEFAULT_TYPE)]
    units = {
        "gpu_memory_gb": ("memory", GIB),
        "nvlink_gb_per_second": ("nvlink", 1e9),
        "nic_gb_per_second": ("nic", 1e9),
    }
    machine = replace(machine, **{units[name][0]: given[name] * units[name][1] for name in units if name in given})
    if "calibration" in given:
        fp8 = given.get("fp8") == "blockwise" or "fp8_format" in given
        precision = "fp8" if fp8 else "bf16" if given.get("bf16") else "fp32"
        machine = _calibrated(machine, Path(given["calibration"]), precision)
    return machine


def _calibrated(machine: Machine, path: Path, precision: str) -> Machine:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"--calibration {path}: {error}") from None
    if not isinstance(found, dict) or (missing := [key for key in CALIBRATED if key not in found]):
        what = missing[0] if isinstance(found, dict) else "an object"
        raise ValueError(f"--calibration {path} lacks {what}: benchmark.py step --calibration writes it")
    if found["precision"] != precision:
        raise ValueError(f"--calibration {path} was measured in {found['precision']}, the run is in {precision}")
    for key in ("forward", "backward"):
        if not isinstance(found[key], (int, float)) or not 0 < found[key] < math.inf:
            raise ValueError(f"--calibration {path}: {key} is {found[key]!r}; it must be a finite number above 0")
    return replace(machine, name=str(found["device"]), forward=found["forward"], backward=found["backward"])
