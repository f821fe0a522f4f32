"""Draws the loss, gradient norm, learning rate, tokens/s and memory of runs from their --log-file to a PNG.

python tools/plot_log.py run/log.jsonl other/log.jsonl --save runs.png
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import operator
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a checkout that is not installed, too

from megatron_glm import signals  # noqa: E402

if __name__ == "__main__":
    signals.install(signal.SIGINT)  # Ctrl-C: one line and exit code 130

COLUMNS = 1000  # points of a line: of a longer run, each is the mean of its share

PANELS = (  # title, key of a record, scale
    ("lm loss", "lm_loss", 1.0),
    ("indexer loss", "indexer_loss", 1.0),
    ("indexer recall", "indexer_recall", 1.0),
    ("MTP losses (dashed: later steps)", "mtp_losses", 1.0),
    ("MTP acceptance (dashed: later steps)", "mtp_acceptance", 1.0),
    ("gradient norm", "grad_norm", 1.0),
    ("learning rate", "learning_rate", 1.0),
    ("tokens/s of a GPU", "tokens_per_second_per_gpu", 1.0),
    ("peak memory of the fullest rank, GiB", "peak_memory_bytes", 2**-30),
)
NAMES = [key for _, key, _ in PANELS]
FROM_ZERO = ("learning_rate", "tokens_per_second_per_gpu", "peak_memory_bytes")
WHERE_GIVEN = ("indexer_loss", "indexer_recall", "mtp_losses", "mtp_acceptance")
DASHES = ("-", "--", "-.", ":")  # of the places in a list
SMOOTHED = ("lm_loss", *WHERE_GIVEN, "grad_norm", "tokens_per_second_per_gpu")

Points = list[tuple[float, float]]  # (iteration, value)


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a log in the order of their iterations, the last of each one.

    Raises: ValueError naming file and line, OSError.
    """
    if path.is_dir():
        raise ValueError(f"{path} is a folder: name the file that --log-file wrote")
    records = {}
    lines = path.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            if isinstance(record, dict) and record.get("kind") == "config":
                continue
            records[operator.index(record["iteration"])] = record
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines) and not line.endswith(b"\n"):
                break  # the run is writing it
            raise ValueError(f"{path} line {number} is no record of an iteration") from error
    if not records:
        raise ValueError(f"{path} has no record yet")
    return [records[iteration] for iteration in sorted(records)]


def points(records: Sequence[dict[str, Any]], key: str, scale: float = 1.0) -> Points:
    """Where `key` has finite numbers, or several by name: a run that diverges may log others."""
    values = ((r["iteration"], value) for r in records for value in _values(r.get(key)))
    numbers = ((iteration, value) for iteration, value in values if isinstance(value, int | float))
    return [(iteration, number * scale) for iteration, number in numbers if math.isfinite(number)]


def lines(records: Sequence[dict[str, Any]], key: str, scale: float = 1.0) -> list[Points]:
    """The points of `key`, or of each place in its values where they are lists."""
    lists = [r for r in records if isinstance(r.get(key), list)]
    if not lists:
        return [points(records, key, scale)]
    places = range(max(len(r[key]) for r in lists))
    return [
        points([{"iteration": r["iteration"], key: r[key][place]} for r in lists if place < len(r[key])], key, scale)
        for place in places
    ]


def _values(value: Any) -> list:
    return list(value.values()) if isinstance(value, dict) else [value]


def thinned(line: Points, columns: int = COLUMNS) -> Points:
    """At most `columns` points, each the mean of as many of `line`."""
    share = math.ceil(len(line) / columns) or 1
    groups = [line[i : i + share] for i in range(0, len(line), share)]
    return [tuple(sum(values) / len(group) for values in zip(*group, strict=True)) for group in groups]


def smoothed(line: Points, width: int) -> Points:
    """Each value as the mean of the last `width` ones, fewer at the beginning."""
    means, total = [], 0.0
    for place, (iteration, value) in enumerate(line):
        total += value - (line[place - width][1] if place >= width else 0.0)
        means.append((iteration, total / min(place + 1, width)))
    return means


def names_of(paths: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths, without ending, that tell them apart."""
    parts = [path.resolve().with_suffix("").parts for path in paths]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(set(parts)):
            return names
    return names


def draw(
    runs: dict[str, list[dict[str, Any]]], target: Path, smooth: int = 1, only: Sequence[str] = tuple(NAMES)
) -> None:
    """Panels of the keys `only` with a line a run, and in the place behind them the legend.

    With `smooth` above 1 the lines are means of so many values, over the values themselves in a pale colour.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    style = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True}
    style |= {"grid.color": "0.9", "axes.axisbelow": True, "axes.titleweight": "bold", "axes.titlelocation": "left"}
    with pyplot.rc_context(style):
        given = {key for records in runs.values() for record in records for key in record}
        panels = [p for p in PANELS if p[1] in only and (p[1] not in WHERE_GIVEN or p[1] in given)]
        rows = 1 if len(panels) < 3 else 2
        columns = len(panels) // rows + 1  # one place is left for the names of the runs
        figure, places = pyplot.subplots(
            rows, columns, figsize=(5 * columns, 3.25 * rows), sharex=True, squeeze=False, layout="constrained"
        )
        axes = places.flatten()
        for axis, (title, key, scale) in zip(axes, panels, strict=False):
            for number, records in enumerate(runs.values()):
                for place, line in enumerate(lines(records, key, scale)):
                    dash = DASHES[min(place, len(DASHES) - 1)]
                    draw_line(axis, line, f"C{number % 10}", smooth if key in SMOOTHED else 1, dash)
                if key == "lm_loss" and (valid := points(records, "valid_lm_loss")):
                    title = "lm loss (dots: validation)"
                    dots = {"color": f"C{number % 10}", "markeredgecolor": "black", "markersize": 5, "zorder": 3}
                    axis.plot([x for x, _ in valid], [y for _, y in valid], "o", **dots)
            axis.set_title(title + (f", mean of {smooth}" if smooth > 1 and key in SMOOTHED else ""))
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
            axis.margins(x=0.01)
            axis.set_xlabel("iteration")
            axis.tick_params(labelbottom=True)
            if key in FROM_ZERO:
                top = axis.dataLim.ymax  # infinite: no run has it
                axis.set_ylim(0, 1.1 * top if math.isfinite(top) and top > 0 else None)
            if key in FROM_ZERO and key != "learning_rate":
                axis.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        handles = [pyplot.Line2D([], [], color=f"C{number % 10}") for number in range(len(runs))]
        axes[-1].axis("off")
        axes[-1].legend(handles, runs, loc="upper left", frameon=False)
        figure.savefig(target, dpi=130)
        pyplot.close(figure)


def draw_line(axis: Any, line: Points, color: str, smooth: int, dash: str) -> None:
    layers = [(line, 0.8)] if smooth == 1 else [(line, 0.2), (smoothed(line, smooth), 1.0)]
    for layer, alpha in layers:
        thin = thinned(layer)
        axis.plot([x for x, _ in thin], [y for _, y in thin], dash, color=color, linewidth=1.2, alpha=alpha)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: parser.exit(2, f"error: {message}\n")  # one line, as the trainer does
    parser.add_argument("logs", nargs="+", type=Path, metavar="LOG.jsonl", help="what --log-file has written")
    parser.add_argument("--save", type=Path, default=Path("log.png"), metavar="PNG", help="default: log.png")
    parser.add_argument("--smooth", type=int, default=1, metavar="N", help="draw means of the last N iterations")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="KEY", help=", ".join(NAMES))
    return parser


def main() -> None:
    flags = build_parser().parse_args()
    try:
        if importlib.util.find_spec("matplotlib") is None:
            raise ValueError("drawing needs the package matplotlib: pip install -e '.[logging]'")
        if flags.save.suffix != ".png":
            raise ValueError(f"--save {flags.save} must end in .png")
        if flags.smooth < 1:
            raise ValueError(f"--smooth is {flags.smooth}; it must be at least 1")
        runs = dict(zip(names_of(flags.logs), map(read, flags.logs), strict=True))
        given = {key for records in runs.values() for record in records for key in record}
        if flags.only != NAMES and (absent := [key for key in flags.only if key not in given]):
            raise ValueError(f"--only {absent[0]}: no record has this key")
        if len(runs) < len(flags.logs):
            raise ValueError(f"the same log is named twice in {' '.join(map(str, flags.logs))}")
        flags.save.parent.mkdir(parents=True, exist_ok=True)
        draw(runs, flags.save, flags.smooth, flags.only)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1 if isinstance(error, OSError) else 2)
    print(f"{flags.save}: {len(runs)} run{'s' * (len(runs) > 1)}")


if __name__ == "__main__":
    main()
