"""`geo-assets canary`: whether this image draws the map as it is drawn, asked before it is promoted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from geo_assets.cli.answers import CliError, open_home, out

if TYPE_CHECKING:
    from geo_assets.services.canary import Difference

ROWS = 40


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(rich_help_panel="Look")(canary)


def canary(
    against: Path = typer.Option(
        None, exists=True, dir_okay=False, help="Lock file of another release; default: this one's own."
    ),
    published: int = typer.Option(
        0, min=0, help="Also build so many published tiles again and compare them; needs ledger and feature store."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print what differs as JSON for programs."),
    write: Path = typer.Option(None, dir_okay=False, help="Write this release's lock to a file, and compare nothing."),
) -> None:
    """Reproject and build a fixed sample with this image's libraries, and compare with what the release gives.

    Exit code 0: all the same; 1: something differs, or it could not be said. Nothing of the map changes. Example:

        geo-assets canary --published 200
    """
    from geo_assets.services import canary as service

    found = service.answers()
    if write:
        write.write_text(found.to_json(), encoding="utf-8")
        out.print(f"{len(found.answers)} answers written to {write}", markup=False)
        return
    try:
        expected = service.Answers.from_json((against or service.lock_file()).read_text(encoding="utf-8"))
    except service.LockError as fault:
        raise CliError(f"{against or service.lock_file()}: {fault}") from None
    differing = service.compare(expected, found)
    looked = 0
    if published:
        from geo_assets.services.shadow import ShadowError

        with open_home() as stack:
            try:
                looked, others = service.published(stack, published)
            except ShadowError as fault:
                raise CliError(str(fault)) from None
        differing += others
    if as_json:
        report = {
            "expected": dict(expected.libraries),
            "found": dict(found.libraries),
            "compared": len(found.answers) + looked,
            "differing": [{"what": one.what, "expected": one.expected, "found": one.found} for one in differing],
        }
        out.print(json.dumps(report, ensure_ascii=False), soft_wrap=True, markup=False)
    else:
        for name, version in found.libraries.items():
            before = expected.libraries.get(name)
            if before != version:
                out.print(f"{name} {version}, not {before or 'known'}", markup=False)
        _tell(differing, len(found.answers), looked)
    if differing:
        raise typer.Exit(1)


def _tell(differing: list[Difference], answers: int, looked: int) -> None:
    from rich.table import Table

    more = f" and {looked:,} published tiles" if looked else ""
    if not differing:
        out.print(f"all {answers} answers{more} are the same")
        return
    out.print(f"{len(differing):,} of {answers} answers{more} differ")
    table = Table(box=None, padding=(0, 2), pad_edge=False)
    for column in ("what", "expected", "found"):
        table.add_column(column, overflow="fold")
    for one in differing[:ROWS]:
        table.add_row(one.what, one.expected or "nothing", one.found or "nothing")
    out.print(table, markup=False)
    if len(differing) > ROWS:
        out.print(f"… and {len(differing) - ROWS:,} more (--json tells all)")
