"""Prints what a run needs, and whether it fits, from the flags of finetune_glm.py: no GPU, weights, data or torchrun.

python tools/plan.py --nnodes 64 --nproc-per-node 8 --gpu-memory-gb 80 --hf-config glm5.2 …
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a checkout that is not installed, too

from megatron_glm import signals  # noqa: E402

if __name__ == "__main__":
    signals.install(signal.SIGINT)  # Ctrl-C: one line and exit code 130

from megatron_glm.config.flags import build_parser  # noqa: E402


def main() -> None:
    flags = build_parser(__doc__).parse_args()
    from megatron_glm.planner.report import print_plan  # imports torch

    print_plan(flags)


if __name__ == "__main__":
    main()
