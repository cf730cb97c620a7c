"""What every benchmark shares: its command line, its table on the terminal and its rows as JSON.

No measuring here: a benchmark times what it measures and says what the figure is compared with.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from geo_assets_tests.stacks import forget_settings


@dataclass(frozen=True, slots=True)
class Row:
    """One figure; `ratio` is how many times better it is than what `against` names."""

    name: str
    value: float
    unit: str
    against: str | None = None
    ratio: float | None = None


class Report:
    """The rows of one benchmark, in the order in which they were measured.

    Args:
        name: Name of the benchmark, as in `python -m benchmarks.NAME`.
        quick: Whether this is the short run; it is said in the title, so that nobody quotes it as the long one.
    """

    def __init__(self, name: str, quick: bool = False) -> None:
        self.name = name
        self.quick = quick
        self.rows: list[Row] = []
        self.notes: list[str] = []

    def row(self, name: str, value: float, unit: str, against: str | None = None, ratio: float | None = None) -> None:
        """Add one figure."""
        self.rows.append(
            Row(name, round(float(value), 6), unit, against, None if ratio is None else round(float(ratio), 4))
        )

    def note(self, text: str) -> None:
        """Add a line below the table: what was skipped, or what a figure does not say."""
        self.notes.append(text)

    def finish(self, json_path: Path | str | None = None) -> None:
        """Print the table; with a file, also write the rows as a JSON list `{name, value, unit, against, ratio}`."""
        cores = os.cpu_count() or 1
        title = f"{self.name}{' (quick)' if self.quick else ''} · Python {platform.python_version()}, {cores} cores"
        table = Table(title=title, title_justify="left")
        for heading, justify in (
            ("what", "left"),
            ("value", "right"),
            ("unit", "left"),
            ("against", "left"),
            ("ratio", "right"),
        ):
            table.add_column(heading, justify=justify)  # pyright: ignore[reportArgumentType]
        for row in self.rows:
            ratio = "" if row.ratio is None else f"{row.ratio:.2f}×"
            table.add_row(row.name, _figure(row.value), row.unit, row.against or "", ratio)
        console = Console()
        console.print(table)
        for note in self.notes:
            console.print(note, highlight=False, markup=False, soft_wrap=True)
        if json_path is not None:
            Path(json_path).write_text(
                json.dumps([asdict(row) for row in self.rows], indent=1) + "\n", encoding="utf-8"
            )


CHILDREN = {"--worker", "--serve-naive"}
"""Flags of processes that a benchmark starts: they keep the settings that it gave them."""


def parser(description: str) -> argparse.ArgumentParser:
    """The command line every benchmark shares: `--quick` and `--json FILE`. A benchmark may add its own options.

    The settings of the shell are forgotten: a benchmark measures stacks of its own and leaves yours alone.
    """
    if not CHILDREN & set(sys.argv):
        forget_settings()
    result = argparse.ArgumentParser(description=description)
    result.add_argument("--quick", action="store_true", help="a smaller load; ends within 30 s")
    result.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to this file")
    return result


def _figure(value: float) -> str:
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"
