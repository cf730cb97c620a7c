"""`geo-assets backfill`: rebuild the tiles of a region."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from geo_assets.cli.answers import CliError, err, open_home, out

if TYPE_CHECKING:
    from geo_assets.stack import Stack


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(rich_help_panel="Change")(backfill)


def backfill(
    region: Path = typer.Option(None, help="GeoJSON file with the region's polygons (EPSG:4326)."),
    bbox: str = typer.Option(None, help="west,south,east,north in degrees; west above east crosses the date line."),
    cells: list[str] = typer.Option(None, "--h3", help="H3 cell; several times for several."),
    zooms: str = typer.Option(..., help="Zooms, such as 0-18, 14 or 10,12-14."),
    force: bool = typer.Option(False, help="Encode also what is up to date; put objects again that are gone."),
    cap: int = typer.Option(None, min=1, help="Tiles it may touch (env GEO_ASSETS_MANIFEST_CAP, default 20,000)."),
    yes: bool = typer.Option(False, "--yes", "-y", help="Do not ask."),
    wait: bool = typer.Option(False, help="Stay until it is done, with a progress bar."),
    dry_run: bool = typer.Option(False, help="Plan and show the width only."),
) -> None:
    """Plan a region's tiles, show how many, and have Dagster build those that changed.

    The plan becomes a manifest; the sensor `tile_updates` turns it into runs, live edits first. Example:

        geo-assets backfill --bbox 24.93,60.16,24.96,60.18 --zooms 0-18 --wait
    """
    from geo_assets.services.regions import (
        RegionError,
        box_region,
        file_region,
        h3_region,
        parse_zooms,
        plan_region,
        start_backfill,
    )

    given = [name for name, value in (("--region", region), ("--bbox", bbox), ("--h3", cells)) if value]
    if len(given) != 1:
        raise CliError("name the region by exactly one of --region, --bbox and --h3")
    with open_home() as stack:
        try:
            shape, title = file_region(region) if region else box_region(bbox) if bbox else h3_region(cells)
            plan = plan_region(stack, shape, title, parse_zooms(zooms), cap=cap)
        except RegionError as fault:
            raise CliError(str(fault)) from None
        out.print(
            f"{plan.title}: {len(plan.keys):,} tiles ("
            + ", ".join(f"z{zoom} {count:,}" for zoom, count in plan.width)
            + ")"
        )
        if dry_run:
            return
        if len(plan.keys) > stack.settings.confirm_above and not yes:
            if not sys.stdin.isatty():
                raise CliError(f"{len(plan.keys):,} tiles are above {stack.settings.confirm_above:,}: say --yes")
            typer.confirm(f"Mark {len(plan.keys):,} tiles?", abort=True)
        manifest = start_backfill(stack, plan, force=force)
        out.print(f"manifest {manifest.id} marked; geo-assets status shows how far it is")
        if wait:
            follow(stack, manifest.id)


def follow(stack: Stack, manifest_id: str, *, poll_s: float = 0.5) -> None:
    """A progress bar until every tile of the manifest is answered or given up.

    Raises:
        CliError: Tiles were given up, or it was cancelled.
    """
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err) as bar:
        task = bar.add_task("backfill", total=stack.ledger.manifest(manifest_id).tiles)
        while True:
            progress = stack.ledger.progress(manifest_id)
            bar.update(task, completed=progress.done + progress.failed)
            if progress.done + progress.failed >= progress.tiles:
                break
            if stack.ledger.manifest(manifest_id).state == "cancelled":
                raise CliError(f"manifest {manifest_id} was cancelled")
            time.sleep(poll_s)
    if progress.failed:
        raise CliError(f"{progress.failed:,} of {progress.tiles:,} tiles failed; geo-assets dead-letters list says why")
    out.print(f"{progress.done:,} tiles are up to date")
