"""`geo-assets maintenance`: delete what is past its time now, instead of at night."""

from __future__ import annotations

import typer

from geo_assets.cli.answers import CliError, open_home, out


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(rich_help_panel="Mend")(maintenance)


def maintenance(
    dry_run: bool = typer.Option(False, "--dry-run", help="Say what is past its time in the catalog; delete nothing."),
    budget: float = typer.Option(None, "--budget", min=1, help="Seconds after which it ends where it is."),
    compact: bool = typer.Option(
        False, "--compact", help="Write Dagster's files anew, whatever their size. Stop `geo-assets up` first."
    ),
) -> None:
    """Delete what is past its time from catalog, log, stores and ledger, as the job `maintenance` does every night.

    It may run beside everything else: each transaction is short. The newest materialization of a partition, the newest
    result of a check and whatever a run that is alive logged are never deleted.
    """
    from geo_assets import dagster_home
    from geo_assets.services.housekeeping import enforce_retention
    from geo_assets.services.retention import compact_catalog, enforce_catalog

    with open_home() as stack, dagster_home.instance(stack.settings) as instance:
        removed = enforce_catalog(
            instance, stack.settings, dry=dry_run, budget_s=float("inf") if budget is None else budget
        )
        if not dry_run:
            removed |= enforce_retention(stack)
        if compact:
            if dry_run:
                raise CliError("--compact and --dry-run exclude each other")
            removed["bytes given back"] = removed.get("bytes given back", 0) + compact_catalog(instance)
    from rich.table import Table

    table = Table("past its time" if dry_run else "deleted", "", box=None, padding=(0, 2))
    for name, count in removed.items():
        if count:
            table.add_row(name, f"{count:,}")
    out.print(table if table.rows else "nothing is past its time")
