"""`geo-assets status`: what is on the map, what is waiting, what is wrong."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import typer

from geo_assets.cli.answers import duration, escape, open_home, out


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(rich_help_panel="Look")(status)


def status(
    as_json: bool = typer.Option(False, "--json", help="Print JSON for programs."),
) -> None:
    """Show features, tiles, what is dirty, how current sources and tilesets are, lags, manifests and dead letters."""
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
    _currency(report)
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
        line = f"{manifest['title']}: {state} {done:,}/{tiles:,}{note}{problem}"
        out.print(f"[bold]{kind}[/bold] {escape(line)}", soft_wrap=True)


def _currency(report: dict[str, Any]) -> None:
    """How current the sources are, and the tilesets of which a version is in force."""
    sources: list[Sequence[str]] = []
    for one in report["sources"]:
        never = "not known" if one["watermark"] else "never sent"
        silent = never if one["silent_s"] is None else duration(one["silent_s"])
        expected = f"every {duration(one['expected_every_s'])}" if one["expected_every_s"] else ""
        mark = "[bold red]silent[/bold red]" if one["silent"] else ""
        sources.append((one["name"], one["received"] or "", silent, expected, one["watermark"] or "", mark))
    if sources:
        _columns("Sources", ("source", "last edit stored", "silent for", "expected", "watermark", ""), sources)
    tilesets = [
        (
            one["name"],
            one["version"],
            one["published"] or "",
            one["watermark"] or "not known",
            "not known" if one["behind_s"] is None else duration(one["behind_s"]) if one["behind_s"] else "nothing",
            "not known" if one["commits_since"] is None else f"{one['commits_since']:,}",
        )
        for one in report["tilesets"]
    ]
    if tilesets:
        headings = ("tileset", "version in force", "published", "watermark", "behind the sources", "tiles built since")
        _columns("Tilesets", headings, tilesets)


def _columns(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.table import Table

    shown = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2))
    for heading in headings:
        shown.add_column(heading, overflow="fold")
    for row in rows:
        shown.add_row(*row)
    out.print(shown)
