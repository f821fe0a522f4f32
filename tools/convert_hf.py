"""Converts a Hugging Face folder into a sharded checkpoint (`--from-hf --save`) and back (`--load --to-hf`).

Alone or under torchrun, where each process takes a share of the files; `--inspect` says what a folder holds.
"""

from __future__ import annotations

import argparse
import re
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a checkout that is not installed, too

from megatron_glm import signals  # noqa: E402

if __name__ == "__main__":
    signals.install(signal.SIGINT)  # Ctrl-C: one line and exit code 130

from megatron_glm.config.flags import Parser  # noqa: E402
from megatron_glm.config.iterations import is_complete, iteration_folder, start  # noqa: E402
from megatron_glm.launch import (  # noqa: E402
    is_shown_elsewhere,
    one_line_warnings,
    ranks_from_slurm,
    run_program,
    world_size,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from megatron_glm.checkpoint import convert as conversion
    from megatron_glm.checkpoint.output import OutputFile, Run

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def size(text: str) -> int:
    """Bytes of "5GB", "512MiB" or "1000000"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?B)?", text.strip().upper())
    if not match or not float(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write it like 5GB or 512MiB")
    return max(1, int(float(match[1]) * UNITS[match[2] or ""]))


def parse_arguments() -> argparse.Namespace:
    parser = Parser(description=__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--from-hf", type=Path, metavar="DIR", help="Hugging Face folder to read")
    source.add_argument("--load", type=Path, metavar="DIR", help="checkpoint folder (its latest) or one iter_… folder")
    source.add_argument("--inspect", type=Path, metavar="DIR", help="print what either kind of folder holds")
    target = parser.add_mutually_exclusive_group()
    target.add_argument("--save", type=Path, metavar="DIR", help="checkpoint folder to write iter_0000000 into")
    target.add_argument("--to-hf", type=Path, metavar="DIR", help="Hugging Face folder to write")
    parser.add_argument("--max-shard-size", type=size, metavar="SIZE", help="of a safetensors file (default: 5GB)")
    parser.add_argument("--fp8-block-quantize", action="store_true", help="export what the FP8 releases hold in FP8 so")
    parser.add_argument("--resume", action="store_true", help="keep the files that an interrupted run has finished")
    parser.add_argument("--verify", action="store_true", help="read back and compare bit for bit before it is named")
    parser.add_argument("--dry-run", action="store_true", help="list what would be written, from headers alone")
    arguments = parser.parse_args()
    if (arguments.from_hf is None) != (arguments.save is None) or (arguments.load is None) != (arguments.to_hf is None):
        parser.error("--from-hf goes with --save, --load with --to-hf, --inspect with neither")
    if arguments.max_shard_size is not None and arguments.to_hf is None:
        parser.error("--max-shard-size goes with --to-hf: it bounds the safetensors files")
    if arguments.fp8_block_quantize and arguments.to_hf is None:
        parser.error("--fp8-block-quantize goes with --to-hf: checkpoints are held in the config's dtype")
    if arguments.inspect is not None and (arguments.resume or arguments.dry_run):
        parser.error("--inspect writes nothing: no --resume and no --dry-run with it")
    if arguments.dry_run and (arguments.resume or arguments.verify):
        parser.error("--dry-run writes nothing: no --resume and no --verify with it")
    return arguments


def open_source(arguments: argparse.Namespace) -> conversion.Import | conversion.Export:
    """The conversion, checked from headers and metadata."""
    from megatron_glm.checkpoint import convert, hf

    if arguments.from_hf is not None:
        return convert.Import(hf.HFCheckpoint(arguments.from_hf, arguments.dry_run), arguments.save)
    folder = arguments.load if is_complete(arguments.load) else iteration_folder(*start(arguments.load))
    return convert.Export(folder, arguments.max_shard_size or UNITS["GB"] * 5, arguments.fp8_block_quantize)


def run(arguments: argparse.Namespace, group: ProcessGroup | None) -> None:
    """Does what the arguments say; rank 0 shows it."""
    from megatron_glm.checkpoint import report, sharded
    from megatron_glm.checkpoint.output import Run

    if arguments.inspect is not None:
        report.inspect(arguments.inspect, arguments.verify, print)
        return
    opened = []
    sharded.together(group, lambda: opened.append(open_source(arguments)))
    [job] = opened
    target = arguments.to_hf or job.target
    if arguments.dry_run:
        for line in report.dry_run(job.files(Run()), target):
            print(line)
        return
    write = job.write if arguments.to_hf is None else partial(job.write, target)
    show_writing(job.files(Run()), target, write, arguments, group)


def show_writing(
    files: list[OutputFile],
    target: Path,
    write: Callable[[Run], None],
    arguments: argparse.Namespace,
    group: ProcessGroup | None,
) -> None:
    """Calls `write`, with --resume and --verify as given; rank 0 shows how far it is."""
    from tqdm import tqdm

    from megatron_glm.checkpoint.output import Run

    share = Run(group=group).share(files)
    total = sum(file.nbytes for file in share)
    first = group is None or group.rank() == 0
    bar = tqdm(total=total, unit="B", unit_scale=True, desc="converting", file=sys.stderr, disable=not first)
    with bar as progress:
        write(Run(arguments.resume, arguments.verify, group, progress.update))
    if first:
        print(f"wrote {target}" + (", read back and found equal" if arguments.verify else ""))


def meet(arguments: argparse.Namespace) -> ProcessGroup | None:
    """All processes of torchrun or srun, once they are there; None for a process on its own.

    Raises: ValueError if two of them have other flags or other code, or if the launcher's variables are incomplete.
    """
    ranks_from_slurm()
    if world_size() == 1:
        return None
    import torch.distributed as dist

    from megatron_glm.parallel import rendezvous
    from megatron_glm.training.agreement import code_digest, require_same

    store, rank, ranks = rendezvous.meet(timedelta(minutes=10))
    limit = timedelta(days=30)  # a dead process is noticed at once, all the same
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=limit)
    facts = {f"--{name.replace('_', '-')}": str(value) for name, value in vars(arguments).items()}
    require_same(dist.group.WORLD, facts | {"the digest of the code": code_digest()})
    return dist.group.WORLD


def main() -> int:
    arguments = parse_arguments()
    return convert(arguments, run, alone=arguments.inspect is not None or arguments.dry_run)


def convert(
    arguments: argparse.Namespace, run: Callable[[argparse.Namespace, ProcessGroup | None], None], alone: bool
) -> int:
    """Calls `run` in all processes, or in one that only reads, and returns the exit code."""
    import torch.distributed as dist  # a second or more, after the flags are read

    one_line_warnings()
    try:
        group = None if alone else meet(arguments)
    except (ValueError, OSError) as error:
        if not is_shown_elsewhere(error):
            print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    try:
        run(arguments, group)
    except (ValueError, OSError) as error:
        if group is None or group.rank() == 0:
            print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        if group is not None:
            dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    run_program(main)
