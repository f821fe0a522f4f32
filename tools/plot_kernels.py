"""Draws the rates of the attention kernels, and of the libraries in the same run, to a PNG.

python tools/plot_kernels.py docs/kernels.json --save kernels.png

The file is what `benchmark.py kernels --json FILE` writes.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a checkout that is not installed, too

from megatron_glm import signals  # noqa: E402

if __name__ == "__main__":
    signals.install(signal.SIGINT)  # Ctrl-C: one line and exit code 130

from megatron_glm.planner import picture  # noqa: E402

Bar = tuple[str, float, bool]  # name, TFLOP/s, whether it is a kernel of this project


def read(path: Path) -> dict[str, Any]:
    """Raises ValueError naming the file and what it lacks, OSError."""
    try:
        found = json.loads(path.read_text())
        rated = [row for row in found["results"] if row["tflops"]]
        named = all(row["op"] and row["case"] and row["backend"] for row in rated)
        if not (named and found["device"] and found["matmul_tflops"] > 0):
            raise ValueError
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path} is no result of benchmark.py kernels --json") from None
    if not rated:
        raise ValueError(f"{path} has no rates: --op of that run were all measured in time alone")
    return found | {"results": rated}


def bars(found: dict[str, Any]) -> dict[str, list[Bar]]:
    """By operation, each case's kernels and behind them the libraries that they were measured with."""
    charts: dict[str, list[Bar]] = {}
    for row in found["results"]:
        chart = charts.setdefault(row["op"].replace("_", " "), [])
        chart.append((f"{row['backend']}, {row['case']}", row["tflops"], True))
        chart += [(f"{name}, {row['case']}", rate, False) for name, rate in row["peer_tflops"].items()]
    return charts


def draw(found: dict[str, Any], target: Path) -> None:
    """Horizontal bars, ours in blue and libraries in grey, and a line at the rate of a matrix product."""
    charts = bars(found)
    made, axes = picture.figure(len(charts))
    for axis, (op, rows) in zip(axes, charts.items(), strict=True):
        names, rates, ours = zip(*rows, strict=True)
        axis.barh(range(len(rows)), rates, color=["tab:blue" if mine else "silver" for mine in ours])
        axis.set(yticks=range(len(rows)), yticklabels=names, title=op, xlabel="TFLOP/s")
        axis.axvline(found["matmul_tflops"], color="black", linestyle="dashed", linewidth=1)
        axis.invert_yaxis()
    made.suptitle(f"{found['device']}; dashed: a bf16 matrix product of 8192 x 8192 x 8192 in the same run")
    picture.save(made, target)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, metavar="FILE", help="what benchmark.py kernels --json has written")
    parser.add_argument("--save", type=Path, default=Path("kernels.png"), help="the picture (default: kernels.png)")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    try:
        if find_spec("matplotlib") is None:
            raise ValueError("the picture needs matplotlib: pip install matplotlib")
        if not arguments.save.resolve().parent.is_dir():
            raise ValueError(f"--save {arguments.save}: the folder {arguments.save.parent} does not exist")
        draw(read(arguments.results), arguments.save)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"wrote {arguments.save}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
