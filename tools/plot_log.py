"""Draws the loss, gradient norm, tokens/s and memory of one or more runs from their --log-file to a PNG.

python tools/plot_log.py run/log.jsonl other/log.jsonl --save runs.png
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import operator
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

COLUMNS = 1000  # points of a line: of a longer run, each is the mean of its share

PANELS = (  # title, key of a record, scale
    ("lm loss", "lm_loss", 1.0),
    ("gradient norm", "grad_norm", 1.0),
    ("tokens/s of a GPU", "tokens_per_second_per_gpu", 1.0),
    ("peak memory of the fullest rank, GiB", "peak_memory_bytes", 2**-30),
)
FROM_ZERO = ("tokens_per_second_per_gpu", "peak_memory_bytes")

Points = list[tuple[float, float]]  # (iteration, value)


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a log in the order of their iterations, the last of each one.

    Raises: ValueError naming file and line, OSError.
    """
    records = {}
    lines = path.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            records[operator.index(record["iteration"])] = record
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines) and not line.endswith(b"\n"):
                break  # the run is writing it
            raise ValueError(f"{path} line {number} is no record of an iteration") from error
    if not records:
        raise ValueError(f"{path} has no record yet")
    return [records[iteration] for iteration in sorted(records)]


def points(records: Sequence[dict[str, Any]], key: str, scale: float = 1.0) -> Points:
    """Where `key` has a finite number: a run that diverges may log others."""
    numbers = ((r["iteration"], r[key]) for r in records if isinstance(r.get(key), int | float))
    return [(iteration, number * scale) for iteration, number in numbers if math.isfinite(number)]


def thinned(line: Points, columns: int = COLUMNS) -> Points:
    """At most `columns` points, each the mean of as many of `line`."""
    share = math.ceil(len(line) / columns) or 1
    groups = [line[i : i + share] for i in range(0, len(line), share)]
    return [tuple(sum(values) / len(group) for values in zip(*group, strict=True)) for group in groups]


def names_of(paths: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths, without ending, that tell them apart."""
    parts = [path.resolve().with_suffix("").parts for path in paths]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(set(parts)):
            return names
    return names


def draw(runs: dict[str, list[dict[str, Any]]], target: Path) -> None:
    """Four panels with a line a run, and one legend."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    style = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True}
    style |= {"grid.color": "0.9", "axes.axisbelow": True, "axes.titleweight": "bold", "axes.titlelocation": "left"}
    with pyplot.rc_context(style):
        figure, axes = pyplot.subplots(2, 2, figsize=(11, 6.5), sharex=True, layout="constrained")
        for axis, (title, key, scale) in zip(axes.flat, PANELS, strict=True):
            for number, records in enumerate(runs.values()):
                line = thinned(points(records, key, scale))
                axis.plot([x for x, _ in line], [y for _, y in line], color=f"C{number % 10}", linewidth=1.2, alpha=0.8)
                if key == "lm_loss" and (valid := points(records, "valid_lm_loss")):
                    title = "lm loss (dots: validation)"
                    dots = {"color": f"C{number % 10}", "markeredgecolor": "black", "markersize": 5, "zorder": 3}
                    axis.plot([x for x, _ in valid], [y for _, y in valid], "o", **dots)
            axis.set_title(title)
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
            axis.margins(x=0.01)
            if key in FROM_ZERO:
                axis.set_ylim(
                    0, 1.1 * axis.dataLim.ymax if math.isfinite(axis.dataLim.ymax) else None
                )  # inf: no run has it
                axis.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        for axis in axes[1]:
            axis.set_xlabel("iteration")
        handles = [axes[0, 1].lines[number] for number in range(len(runs))]
        figure.legend(handles, runs, loc="outside upper left", ncols=4, frameon=False)
        figure.savefig(target, dpi=130)
        pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: parser.exit(2, f"error: {message}\n")  # one line, as the trainer does
    parser.add_argument("logs", nargs="+", type=Path, metavar="LOG.jsonl", help="what --log-file has written")
    parser.add_argument("--save", type=Path, default=Path("log.png"), metavar="PNG", help="default: log.png")
    flags = parser.parse_args()
    try:
        if importlib.util.find_spec("matplotlib") is None:
            raise ValueError("drawing needs the package matplotlib: pip install -e '.[logging]'")
        if flags.save.suffix != ".png":
            raise ValueError(f"--save {flags.save} must end in .png")
        runs = dict(zip(names_of(flags.logs), map(read, flags.logs), strict=True))
        if len(runs) < len(flags.logs):
            raise ValueError(f"the same log is named twice in {' '.join(map(str, flags.logs))}")
        flags.save.parent.mkdir(parents=True, exist_ok=True)
        draw(runs, flags.save)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1 if isinstance(error, OSError) else 2)
    print(f"{flags.save}: {len(runs)} run{'s' * (len(runs) > 1)}")


if __name__ == "__main__":
    main()
