"""Commands that run one service in the foreground: `edge`, `ingest`, `live`, `tiles`. `up` runs them all."""

from __future__ import annotations

import typer

from geo_assets.cli.answers import check_home, logged_settings


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(rich_help_panel="Services")(edge)
    app.command(rich_help_panel="Services")(ingest)
    app.command(rich_help_panel="Services")(live)
    app.command(name="tiles", rich_help_panel="Services")(tiles)


def edge(port: int = typer.Option(None, help="Port to listen on (env GEO_ASSETS_EDGE_PORT).")) -> None:
    """Serve the edge: takes signed events and answers 202 once the log has them."""
    from geo_assets.services import edge as service

    current = logged_settings(edge_port=port)
    check_home(current)
    service.run(current)


def ingest(
    once: bool = typer.Option(False, "--once", help="Work off what is in the log now, then end."),
) -> None:
    """Run ingest: validates and stores what the edge accepted and says which tiles it touches."""
    from geo_assets.services import ingest as service

    current = logged_settings()
    check_home(current)
    service.run(current, once=once)


def live() -> None:
    """Run a worker of the fast lane: builds the tiles that edits touch within milliseconds, without a Dagster run.

    Several may run; they share the partitions of `[tiles]`. Without any, the sensor's runs build everything.
    """
    from geo_assets.services.lane import service

    current = logged_settings()
    check_home(current)
    service.run(current)


def tiles(port: int = typer.Option(None, help="Port to listen on (env GEO_ASSETS_TILES_PORT).")) -> None:
    """Serve tiles, TileJSON, live updates (SSE) and the map page."""
    from geo_assets.services import tileserver as service

    current = logged_settings(tiles_port=port)
    check_home(current)
    service.run(current)
