"""`geo-assets status`: what is on the map, what is waiting, what is wrong."""

from __future__ import annotations

import json

import typer

from geo_assets.cli.answers import open_home, out


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(rich_help_panel="Look")(status)


def status(
    as_json: bool = typer.Option(False, "--json", help="Print JSON for programs."),
) -> None:
    """Show features, tiles, what is dirty, lags, manifests and dead letters."""
    from geo_assets.services.status import snapshot

    with open_home() as stack:
        report = snapshot(stack)
    if as_json:
        out.print_json(json.dumps(report))
        return
    from rich.table import Table

    def table(title: str, rows: dict[str, object]) -> Table:
        shown = Table(
            title=title, show_header=False, title_justify="left", title_style="bold", box=None, padding=(0, 2)
        )
        for name, value in rows.items():
            shown.add_row(name, f"{value:,}" if isinstance(value, int) else str(value))
        return shown

    features, tiles = report["features"], report["tiles"]
    out.print(
        table(
            "Features", {**features["by_layer"], "newest edit": features["watermark"], "hints owed": features["outbox"]}
        )
    )
    out.print(
        table(
            "Tiles",
            {
                "published": tiles["published"],
                "bytes": tiles["bytes"],
                "dirty, live": tiles["dirty_live"],
                "dirty, backfill": tiles["dirty_backfill"],
                "given up": tiles["given_up"],
                "oldest dirty": tiles["oldest_dirty"],
                "announcements owed": tiles["owed"].get("announce", 0),
                "catalog entries owed": tiles["owed"].get("catalog", 0),
            },
        )
    )
    out.print(table("Lag (records)", report["lag"]))
    for topic, loss in report["lost"].items():
        out.print(
            f"[bold red]Lost[/bold red] {loss['records']:,} records of {topic} were deleted before they were read, "
            f"last {loss['at']} in partition {loss['partition']}: position {loss['position']}, oldest {loss['oldest']}",
            soft_wrap=True,
        )
    out.print(table("Dead letters", report["dead_letters"] or {"none": ""}))
    for manifest in report["manifests"][:5]:
        done = manifest["done"]
        note = f", {manifest['failed']} failed" if manifest["failed"] else ""
        problem = f": {manifest['problem']}" if manifest["problem"] else ""
        kind, state, tiles = manifest["kind"], manifest["state"], manifest["tiles"]
        out.print(f"[bold]{kind}[/bold] {manifest['title']}: {state} {done:,}/{tiles:,}{note}{problem}", soft_wrap=True)
