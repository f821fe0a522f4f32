"""Adapters out of a checkpoint: as a PEFT folder (`--load --to-peft`), or merged into their model (`--merge --to-hf`).

And a PEFT folder into a checkpoint from which training goes on (`--from-peft --save`). Alone or under torchrun.
"""

from __future__ import annotations

import argparse
import signal
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a checkout that is not installed, too

from megatron_glm import signals  # noqa: E402

if __name__ == "__main__":
    signals.install(signal.SIGINT)  # Ctrl-C: one line and exit code 130

from convert_hf import convert, show_writing, size  # noqa: E402

from megatron_glm.config.flags import Parser  # noqa: E402
from megatron_glm.config.iterations import is_complete, iteration_folder, start  # noqa: E402
from megatron_glm.launch import run_program  # noqa: E402

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from megatron_glm.checkpoint.merged import MergedExport, MergedFolder
    from megatron_glm.checkpoint.peft import PeftExport
    from megatron_glm.checkpoint.peft_import import PeftImport


def parse_arguments() -> argparse.Namespace:
    parser = Parser(description=__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--load", type=Path, metavar="DIR", help="checkpoint folder (its latest) or one iter_… folder")
    source.add_argument("--from-peft", type=Path, metavar="DIR", help="PEFT folder to read")
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--to-peft", type=Path, metavar="DIR", help="PEFT folder to write")
    target.add_argument("--to-hf", type=Path, metavar="DIR", help="Hugging Face folder to write, with --merge")
    target.add_argument("--save", type=Path, metavar="DIR", help="checkpoint folder to write iter_0000000 into")
    parser.add_argument("--merge", action="store_true", help="add the adapters to the weights of their model")
    parser.add_argument("--base", type=Path, metavar="DIR", help="the model, if it is not where it was")
    parser.add_argument("--max-shard-size", type=size, metavar="SIZE", help="of a safetensors file (default: 5GB)")
    parser.add_argument("--resume", action="store_true", help="keep the files that an interrupted run has finished")
    parser.add_argument("--verify", action="store_true", help="read back and compare bit for bit before it is named")
    arguments = parser.parse_args()
    if (arguments.from_peft is None) != (arguments.save is None):
        parser.error("--from-peft goes with --save, --load with --to-peft, or with --merge and --to-hf")
    if arguments.merge != (arguments.to_hf is not None):
        parser.error("--merge goes with --to-hf: a PEFT folder holds the adapters alone")
    if arguments.max_shard_size is not None and not arguments.merge:
        parser.error("--max-shard-size goes with --merge: adapters are one file")
    return arguments


def open_source(arguments: argparse.Namespace) -> PeftImport | PeftExport | MergedExport | MergedFolder:
    """The conversion, checked from headers and metadata."""
    from megatron_glm.checkpoint import adapters, merged, peft, peft_import

    if arguments.from_peft is not None:
        return peft_import.PeftImport(arguments.from_peft, arguments.save, arguments.base)
    folder = arguments.load if is_complete(arguments.load) else iteration_folder(*start(arguments.load))
    checkpoint = adapters.AdapterCheckpoint(folder)
    if arguments.merge:
        return merged.open_merge(checkpoint, checkpoint.base.find(arguments.base), arguments.max_shard_size)
    base = checkpoint.base.folder if arguments.base is None else checkpoint.base.find(arguments.base)
    return peft.PeftExport(checkpoint, None if is_complete(base) else base)


def run(arguments: argparse.Namespace, group: ProcessGroup | None) -> None:
    """Does what the arguments say; rank 0 shows it."""
    from megatron_glm.checkpoint import sharded
    from megatron_glm.checkpoint.output import Run
    from megatron_glm.checkpoint.peft import PeftExport
    from megatron_glm.checkpoint.peft_import import PeftImport

    opened = []
    sharded.together(group, lambda: opened.append(open_source(arguments)))
    [job] = opened
    if isinstance(job, PeftImport):
        target, write = job.target, job.write
    else:
        target = arguments.to_peft or arguments.to_hf
        write = partial(job.write, target)
    show_writing(job.files(Run()), target, write, arguments, group)
    if isinstance(job, PeftExport) and (group is None or group.rank() == 0):
        for line in job.warnings():
            print(f"note: {line}", file=sys.stderr)


def main() -> int:
    return convert(parse_arguments(), run, alone=False)


if __name__ == "__main__":
    run_program(main)
