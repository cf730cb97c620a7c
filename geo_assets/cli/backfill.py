"""`geo-assets backfill` and `backfills`: rebuild the tiles of a region, and look after those that are going on."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from geo_assets.cli.answers import CliError, duration, err, escape, open_home, out

if TYPE_CHECKING:
    from geo_assets.services.backfills import Estimate, RegionPlan
    from geo_assets.stack import Stack

STILL_S = 30.0
"""After so long without a tile, whoever waits is told what may be wrong: a sensor's tick and a run's start take ten."""


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(rich_help_panel="Change")(backfill)
    many = typer.Typer(no_args_is_help=True, help="Backfills that are going on or were: list, follow, cancel.")
    many.command("list")(list_backfills)
    many.command("follow")(follow_backfill)
    many.command("cancel")(cancel_backfill)
    app.add_typer(many, name="backfills", rich_help_panel="Change")


def backfill(
    region: Path = typer.Option(None, help="GeoJSON file with the region's polygons (EPSG:4326)."),
    bbox: str = typer.Option(None, help="west,south,east,north in degrees; west above east crosses the date line."),
    cells: list[str] = typer.Option(None, "--h3", help="H3 cell; several times for several."),
    feature: str = typer.Option(
        None, help="A polygon of the feature store: SOURCE:ID, or LAYER/ATTRIBUTE=VALUE for the one that has it."
    ),
    zooms: str = typer.Option(None, help="Zooms, such as 0-18, 14 or 10,12-14; default: all that the layers show."),
    force: bool = typer.Option(False, help="Encode also what is up to date; put objects again that are gone."),
    cap: int = typer.Option(None, min=1, help="Tiles it may touch (env GEO_ASSETS_MANIFEST_CAP, default 20,000)."),
    yes: bool = typer.Option(False, "--yes", "-y", help="Do not ask."),
    wait: bool = typer.Option(False, help="Stay until it is done, with a progress bar."),
    dry_run: bool = typer.Option(False, help="Plan and estimate only."),
) -> None:
    """Plan a region's tiles, show how many and what they cost, and have Dagster build those that changed.

    The plan becomes a manifest; the sensor `tile_updates` turns it into runs: live edits first, low zooms last. It goes
    on whatever becomes of this command: `geo-assets backfills` lists, follows and cancels. Example:

        geo-assets backfill --bbox 24.93,60.16,24.96,60.18 --zooms 0-18 --wait
    """
    from geo_assets.services.backfills import estimate, plan_region, start_backfill
    from geo_assets.services.regions import (
        RegionError,
        box_region,
        feature_region,
        file_region,
        h3_region,
        parse_zooms,
    )

    named = (("--region", region), ("--bbox", bbox), ("--h3", cells), ("--feature", feature))
    if len([name for name, value in named if value]) != 1:
        raise CliError("name the region by exactly one of --region, --bbox, --h3 and --feature")
    with open_home() as stack:
        try:
            levels = parse_zooms(zooms or f"0-{stack.layers.max_zoom}")
            if region:
                shape, title = file_region(region)
            elif bbox:
                shape, title = box_region(bbox)
            elif cells:
                shape, title = h3_region(cells)
            else:
                shape, title = feature_region(stack.features, feature)
            plan = plan_region(stack, shape, title, levels, cap=cap)
        except RegionError as fault:
            raise CliError(str(fault)) from None
        show_plan(plan, estimate(stack, plan, force=force))
        if dry_run:
            return
        if len(plan.keys) > stack.settings.confirm_above and not yes:
            if not sys.stdin.isatty():
                raise CliError(f"{len(plan.keys):,} tiles are above {stack.settings.confirm_above:,}: say --yes")
            typer.confirm(f"Mark {len(plan.keys):,} tiles?", abort=True)
        manifest = start_backfill(stack, plan, force=force)
        out.print(f"manifest {manifest.id} marked; geo-assets backfills follow {manifest.id} shows how far it is")
        if wait:
            follow(stack, manifest.id)


def show_plan(plan: RegionPlan, costs: Estimate) -> None:
    """The width by zoom, what is up to date, and what the rest costs."""
    from rich.table import Table

    out.print(
        f"[bold]{escape(plan.title)}: {costs.tiles:,} {'tile' if costs.tiles == 1 else 'tiles'}[/bold]", soft_wrap=True
    )
    table = Table(box=None)
    for column in ("zoom", "tiles", "up to date", "vertices to encode"):
        table.add_column(column, justify="right")
    about = "" if costs.exact else "~"
    for one in costs.zooms:
        table.add_row(f"z{one.zoom}", f"{one.tiles:,}", f"{about}{one.up_to_date:,}", f"{about}{one.vertices:,}")
    out.print(table)
    looked = "all tiles looked at" if costs.exact else f"estimated from {costs.sampled:,} tiles"
    speed = "at the speed of the last runs" if costs.measured else "at an assumed speed: none was measured yet"
    out.print(
        f"about {duration(costs.seconds)} for {about}{costs.vertices:,} vertices, "
        f"{about}{costs.up_to_date:,} tiles up to date ({looked}; {speed})"
    )


def list_backfills(
    as_json: bool = typer.Option(False, "--json", help="Print JSON for programs."),
    limit: int = typer.Option(20, min=1, max=1_000, help="Newest so many."),
) -> None:
    """The newest manifests: backfills, imports, wide edits and repairs."""
    from rich.table import Table

    with open_home() as stack:
        rows = [(one, stack.ledger.progress(one.id)) for one in stack.ledger.manifests(limit)]
    if as_json:
        out.print_json(
            json.dumps(
                [
                    {
                        "id": one.id, "title": one.title, "kind": one.kind, "state": one.state, "tiles": one.tiles,
                        "done": so_far.done, "failed": so_far.failed, "created_ms": one.created_ms,
                        "problem": one.problem,
                    }
                    for one, so_far in rows
                ]
            )
        )  # fmt: skip
        return
    if not rows:
        out.print("no manifest yet: geo-assets backfill makes one")
        return
    table = Table(box=None)
    # An id that is cut cannot be given to the other commands.
    for column in ("manifest", "kind", "state"):
        table.add_column(column, no_wrap=True, overflow="ignore")
    for column in ("done", "tiles", "failed"):
        table.add_column(column, justify="right")
    table.add_column("title")
    for one, so_far in rows:
        title = escape(one.problem or one.title)
        table.add_row(one.id, one.kind, one.state, f"{so_far.done:,}", f"{one.tiles:,}", f"{so_far.failed:,}", title)
    out.print(table)


def follow_backfill(manifest: str = typer.Argument(help="Id of the manifest.")) -> None:
    """A progress bar until a backfill is done; its exit code says whether it kept its coverage floor."""
    from resources.ledger.protocol import UnknownManifest

    with open_home() as stack:
        try:
            follow(stack, manifest)
        except UnknownManifest:
            raise CliError(f"there is no manifest {manifest!r}: geo-assets backfills list names them") from None


def cancel_backfill(manifest: str = typer.Argument(help="Id of the manifest.")) -> None:
    """Take back the marks of a backfill and no other: what is built stays, a run that is going ends its batch."""
    from resources.ledger.protocol import UnknownManifest

    with open_home() as stack:
        try:
            given = stack.ledger.manifest(manifest)
            if given.state in ("done", "cancelled", "refused"):
                raise CliError(f"manifest {manifest} is {given.state} already: nothing to cancel")
            count = stack.ledger.cancel_manifest(manifest)
        except UnknownManifest:
            raise CliError(f"there is no manifest {manifest!r}: geo-assets backfills list names them") from None
    out.print(f"manifest {manifest} cancelled: {count:,} tiles are no longer wanted by it")
    if given.kind != "backfill":
        out.print(
            f"what the {given.kind} changed stays stored, and the map does not show it where tiles were still waiting: "
            "geo-assets backfill builds them"
        )


def follow(stack: Stack, manifest_id: str, *, poll_s: float = 0.5) -> None:
    """A progress bar until every tile of the manifest is answered or given up.

    Raises:
        CliError: It is below its coverage floor, was cancelled, or nothing can come of it.
    """
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from geo_assets.services.backfills import Cancelled, verdict, watch

    given = stack.ledger.manifest(manifest_id)
    if given.state in ("refused", "writing"):
        raise CliError(f"manifest {manifest_id} is {given.state}: {given.problem or 'its tiles are not marked yet'}")
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    try:
        with Progress(*columns, console=err) as bar:
            task = bar.add_task("backfill", total=given.tiles)
            moved, last = time.monotonic(), -1
            for progress in watch(stack, manifest_id, poll_s=poll_s):
                ended = progress.done + progress.failed
                bar.update(task, completed=ended)
                if ended != last:
                    moved, last = time.monotonic(), ended
                elif time.monotonic() - moved > STILL_S:
                    moved = float("inf")
                    bar.console.print("nothing was built for a while: is `geo-assets up` (Dagster's daemon) running?")
    except Cancelled as cancelled:
        raise CliError(str(cancelled)) from None
    end = verdict(stack, manifest_id)
    if not end.passed:
        raise CliError(f"{end.summary}; geo-assets dead-letters list says why")
    out.print(end.summary if not end.progress.failed else f"{end.summary}; geo-assets dead-letters list says why")
