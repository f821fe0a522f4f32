"""Converts a Hugging Face folder into a sharded checkpoint (`--from-hf --save`) and back (`--load --to-hf`)."""

from __future__ import annotations

import argparse
import re
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a checkout that is not installed, too

from tqdm import tqdm  # noqa: E402

from megatron_glm.checkpoint import convert, hf, sharded  # noqa: E402

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def size(text: str) -> int:
    """Bytes of "5GB", "512MiB" or "1000000"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?B)?", text.strip().upper())
    if not match or not float(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write it like 5GB or 512MiB")
    return max(1, int(float(match[1]) * UNITS[match[2] or ""]))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--from-hf", type=Path, metavar="DIR", help="Hugging Face folder to read")
    source.add_argument("--load", type=Path, metavar="DIR", help="checkpoint folder (its latest) or one iter_… folder")
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--save", type=Path, metavar="DIR", help="checkpoint folder to write iter_0000000 into")
    target.add_argument("--to-hf", type=Path, metavar="DIR", help="Hugging Face folder to write")
    parser.add_argument("--max-shard-size", type=size, metavar="SIZE", help="of a safetensors file (default: 5GB)")
    arguments = parser.parse_args()
    if (arguments.from_hf is None) != (arguments.save is None):
        parser.error("--from-hf goes with --save, --load with --to-hf")
    if arguments.max_shard_size is not None and arguments.to_hf is None:
        parser.error("--max-shard-size goes with --to-hf: it bounds the safetensors files")
    return arguments


def bar(total: int) -> tqdm:
    return tqdm(total=total, unit="B", unit_scale=True, desc="converting", file=sys.stderr)


def run(arguments: argparse.Namespace) -> Path:
    """Converts; returns the folder written."""
    if arguments.from_hf is not None:
        checkpoint = hf.HFCheckpoint(arguments.from_hf)
        with bar(hf.total_bytes(checkpoint.shapes)) as progress:
            convert.hf_to_sharded(checkpoint, arguments.save, progress.update)
        return sharded.iteration_folder(arguments.save, 0)
    folder = arguments.load
    if (iteration := sharded.latest(folder)) is not None:
        folder = sharded.iteration_folder(folder, iteration)
    export = convert.Export(folder)
    with bar(hf.total_bytes(export.shapes)) as progress:
        export.write(arguments.to_hf, arguments.max_shard_size or UNITS["GB"] * 5, progress.update)
    return arguments.to_hf


def main() -> int:
    arguments = parse_arguments()
    warnings.showwarning = lambda message, *_, **__: print(f"warning: {message}", file=sys.stderr)
    try:
        print(f"wrote {run(arguments)}")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
