"""Prints what a run needs, and whether it fits, from the flags of finetune_glm.py: no GPU, weights, data or torchrun.

python tools/plan.py --nnodes 64 --nproc-per-node 8 --gpu-memory-gb 80 --hf-config glm5.2 …
python tools/plan.py search --gpus 256 --gpu-type h100 --hf-config glm5.2 …     the layouts that fit, the fastest first
python tools/plan.py published     GLM-5.2's published layouts beside the best found: the table of docs/recipes.md
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a checkout that is not installed, too

from megatron_glm import signals  # noqa: E402

if __name__ == "__main__":
    signals.install(signal.SIGINT)  # Ctrl-C: one line and exit code 130

from megatron_glm.config import DataConfig, PretrainDataConfig, sort_flags  # noqa: E402
from megatron_glm.config.flags import RunParser, build_parser  # noqa: E402

SEARCH = """\
The layouts of a run on --gpus GPUs that fit, the fastest first, with memory, predicted tokens/s a GPU and what the
others spend more on. Takes the flags of the training script; what is given stays as it is, all else of the layout is
chosen: TP, CP, PP and its cut, EP, micro-batch, recomputation, resharding, --grad-sync, --adam-moments-dtype.
"""
PROGRAMS = {"finetune_glm.py": DataConfig, "pretrain_glm.py": PretrainDataConfig}


def search_parser(program: str = "finetune_glm.py") -> RunParser:
    """The flags of a training script, and the search's own."""
    parser = build_parser(SEARCH, PROGRAMS[program])
    parser.prog, parser.usage = f"{parser.prog} search", "%(prog)s --gpus N --hf-config DIR|PRESET [flags]"
    group = parser.add_argument_group("search")
    group.add_argument("--gpus", type=int, metavar="N", help="GPUs in all")
    group.add_argument("--program", choices=PROGRAMS, help="the script that will run (default: finetune_glm.py)")
    group.add_argument("--results", type=int, metavar="N", help="layouts that are shown (default: 10)")
    group.add_argument("--json", action="store_true", help="print a list of objects instead of a table")
    return parser


def main() -> None:
    if sys.argv[1:2] == ["search"]:
        words = sys.argv[2:]
        chosen = [value for flag in sort_flags.split(words)[1] if flag.name == "--program" for value in flag.values]
        program = chosen[-1] if chosen and chosen[-1] in PROGRAMS else "finetune_glm.py"  # else the parser says it
        flags = search_parser(program).parse_args(words)
        from megatron_glm.planner.found import print_found  # imports torch

        return print_found(flags, words, PROGRAMS[program])
    if sys.argv[1:] == ["published"]:
        from megatron_glm.planner.published import table

        for line in table():
            print(line, flush=True)
        return
    flags = build_parser(__doc__).parse_args()
    from megatron_glm.planner.report import print_plan  # imports torch

    print_plan(flags)


if __name__ == "__main__":
    main()
