"""Routing geofence triggers from the command line: what the Dagster job does, in the foreground."""

from __future__ import annotations

import typer

from geo_assets.cli.answers import err, open_home, out


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(rich_help_panel="Services")(route)


def route(
    until_idle: bool = typer.Option(
        False, "--until-idle", help="End when no position came for a while (env GEO_ASSETS_GEOFENCE_IDLE_S)."
    ),
) -> None:
    """Route geofence triggers: positions in, ENTER, DWELL and EXIT out. One routes; a second one stands by for it."""
    import signal
    import threading
    from dataclasses import replace

    from geo_assets.services import routing

    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with open_home() as stack:
        options = replace(routing.options_of(stack.settings), run_s=None)
        if not until_idle:
            options = replace(options, idle_s=None)
        result = routing.route(stack, options, stop=stop)
    (out if result.ended in ("idle", "stopped") else err).print(f"{result.ended}: {result.summary}")
    if result.ended == "replaced":
        raise typer.Exit(3)
