"""Routing geofence triggers from the command line: what the Dagster job does, in the foreground."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

import typer

from geo_assets.cli.answers import err, open_home, out


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(rich_help_panel="Services")(route)
    app.command(rich_help_panel="Mend")(breaker)


class Where(StrEnum):
    """Where an operator wants the breaker."""

    OPEN = "open"
    CLOSE = "close"
    AUTO = "auto"
    STATUS = "status"


def breaker(
    where: Where | None = typer.Argument(
        None,
        help="open: nothing is routed. close: slow acknowledgements do not open it. auto: it goes by itself. "
        "status, or nothing: how it stands.",
    ),
) -> None:
    """Hold the breaker of geofence routing, or say how it stands. The run obeys within a second; so do later ones."""
    import json
    import time

    from geo_assets.services import holding, routing_result

    with open_home() as stack:
        if where is not None and where != Where.STATUS:
            holding.hold(stack.ledger, {"open": "open", "close": "closed", "auto": None}[where])  # pyright: ignore[reportArgumentType]
        held = holding.held(stack.ledger)
        last = json.loads(stack.ledger.get_value(routing_result.VALUE) or "{}")
    out.print(f"the breaker is held {held}" if held else "the breaker goes by itself")
    if last:
        ended = f"ended as {last['ended']}" if last.get("ended") else "goes on"
        # A run writes its result now and then: what was said a moment ago is not in it yet.
        age_s = max(0, time.time_ns() // 1_000_000 - last.get("at_ms", 0)) // 1000
        told = f"{last.get('breaker', 'closed')}, as of {age_s} s ago"
        out.print(f"run of epoch {last['epoch']} ({ended}): {told}", markup=False)


def route(
    until_idle: bool = typer.Option(
        False, "--until-idle", help="End when no position came for a while (env GEO_ASSETS_GEOFENCE_IDLE_S)."
    ),
    metrics_port: int | None = typer.Option(
        None, min=0, max=65535, help="Serve metrics there; 0: on a free port (env GEO_ASSETS_GEOFENCE_METRICS_PORT)."
    ),
    spool: Path | None = typer.Option(
        None, exists=True, file_okay=False, help="Send what a router of outside callers left in this folder."
    ),
) -> None:
    """Route geofence triggers: positions in, ENTER, DWELL and EXIT out. One routes; a second one stands by for it."""
    from dataclasses import replace

    from geo_assets.services import routing
    from geo_assets.services.draining import PROCESS

    with open_home() as stack:
        PROCESS.on_signals(stack.settings.drain_s)
        options = replace(routing.options_of(stack.settings), run_s=None)
        if not until_idle:
            options = replace(options, idle_s=None)
        if metrics_port is not None:
            options = replace(options, metrics_port=metrics_port)
        if spool is not None:
            options = replace(options, router=replace(options.router, spool_folder=spool))
        result = routing.route(stack, options, stop=PROCESS.stop)
    (out if result.ended in ("idle", "stopped") else err).print(f"{result.ended}: {result.summary}")
    if result.ended == "replaced":
        raise typer.Exit(3)
