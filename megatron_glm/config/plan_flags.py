"""The flags of a plan: which machines a run is planned for. They need --dry-run, or tools/plan.py."""

from __future__ import annotations

import argparse

GPU_TYPES = ("h100", "h200")
PLAN_SIZES = ("nnodes", "nproc_per_node", "gpu_memory_gb", "nvlink_gb_per_second", "nic_gb_per_second")
REHEARSAL_FLAGS = ("rehearse_rank", "rehearse_json", "rehearse_routing")
PLAN_FLAGS = ("dry_run", *PLAN_SIZES, "gpu_type", "calibration", "picture", *REHEARSAL_FLAGS)


def add_plan_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "plan", "what the run needs and whether it fits, by the planner or by running one of its ranks"
    )
    group.add_argument("--dry-run", action="store_true", help="print the plan and exit; needs no GPU, weights or data")
    group.add_argument("--nnodes", type=int, metavar="N", help="nodes of the planned run (default: 1)")
    group.add_argument(
        "--nproc-per-node", type=int, metavar="N", help="GPUs of a node (default: 8, or all ranks of WORLD_SIZE)"
    )
    group.add_argument("--gpu-type", choices=GPU_TYPES, help="whose memory and rates are planned with (default: h100)")
    group.add_argument(
        "--gpu-memory-gb", type=float, metavar="X", help="memory of a GPU in GiB (default: h100 80, h200 139)"
    )
    group.add_argument(
        "--nvlink-gb-per-second", type=float, metavar="X", help="what a GPU sends inside its node (default: 350)"
    )
    group.add_argument(
        "--nic-gb-per-second", type=float, metavar="X", help="what a GPU sends between nodes (default: 45)"
    )
    group.add_argument(
        "--calibration", metavar="FILE", help="plan with the times that benchmark.py step measured on such a GPU"
    )
    group.add_argument(
        "--picture", metavar="FILE", help="draw the pipeline and the memory of its ranks, as .png or .svg"
    )
    group.add_argument(
        "--rehearse-rank", type=int, metavar="R", help="run two steps of this rank alone, the others are its mirrors"
    )
    group.add_argument("--rehearse-json", metavar="FILE", help="write what it found there, and a picture beside it")
    group.add_argument(
        "--rehearse-routing",
        choices=("balanced", "natural"),
        help="of its tokens; balanced, to all experts alike, is what the plan takes for granted (default: balanced)",
    )
