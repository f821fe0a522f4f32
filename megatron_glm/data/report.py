"""What became of the rows of a data set: counts that worker processes merge and a cache stores as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class RowReport:
    """Counts of rows by kind, the columns that were not used, warnings, and the rows that --skip-bad-rows left out."""

    kinds: dict[str, int] = field(default_factory=dict)  # kind -> rows
    unused: dict[str, int] = field(default_factory=dict)  # column, or key of a message -> rows that have it
    warnings: dict[str, str] = field(default_factory=dict)  # warning -> the first place that it is about
    skipped: int = 0
    first_skipped: str = ""  # where the first skipped row is, and what is wrong with it
    files_left_out: list[str] = field(default_factory=list)  # of folders: files of no format that is read

    def count(self, kind: str) -> None:
        self.kinds[kind] = self.kinds.get(kind, 0) + 1

    def not_used(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.unused[key] = self.unused.get(key, 0) + 1

    def warn(self, warning: str, place: str) -> None:
        self.warnings.setdefault(warning, place)

    def skip(self, place: str, error: ValueError | str) -> None:
        self.skipped += 1
        self.first_skipped = self.first_skipped or f"{place}: {error}"

    def merge(self, later: RowReport) -> None:
        """Adds the report of rows that come behind these in the data."""
        for mine, other in ((self.kinds, later.kinds), (self.unused, later.unused)):
            for key, rows in other.items():
                mine[key] = mine.get(key, 0) + rows
        for warning, place in later.warnings.items():
            self.warn(warning, place)
        self.skipped += later.skipped
        self.first_skipped = self.first_skipped or later.first_skipped
        self.files_left_out += later.files_left_out

    def summary(self) -> str:
        """As `kinds: 20 messages, 5 text; columns not used: id, source`, and a line for each warning."""
        kinds = ", ".join(f"{rows} {kind}" for kind, rows in self.kinds.items()) or "none"
        lines = [f"kinds: {kinds}" + (f"; columns not used: {', '.join(sorted(self.unused))}" * bool(self.unused))]
        if self.files_left_out:
            lines.append(self.files_not_read())
        lines += [f"warning: {place}: {warning}" for warning, place in self.warnings.items()]
        return "\n".join(lines)

    def files_not_read(self) -> str:
        return f"files not read: {some(self.files_left_out)}"


def some(names: list[str]) -> str:
    """The first five names, and how many more there are."""
    return ", ".join(names[:5]) + f" and {len(names) - 5} more" * (len(names) > 5)
