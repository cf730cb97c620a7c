"""`geo-assets migrate`: bring the tables of feature store and ledger up to the version of this program."""

from __future__ import annotations

import typer
from rich.table import Table

from geo_assets import dagster_home
from geo_assets.cli.answers import CliError, check_stack, logged_settings, out


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(rich_help_panel="Run")(migrate)


def migrate(
    check: bool = typer.Option(False, "--check", help="Change nothing; exit with 1 where something is behind."),
) -> None:
    """Bring the tables of feature store and ledger up to date: in Postgres, or in the files of the home folder.

    In Postgres, Dagster's schema is made where there is none; the tables in it are Dagster's own.

    Each step is a transaction, and two migrations at once wait for each other. Tables of a later version than this
    program knows are left as they are if they are compatible with it, and refused else (docs/operations.md).
    """
    from geo_assets.services.migrating import migrate_all, pending, versions

    current = logged_settings()
    check_stack(current)
    if check:
        table = Table("component", "where", "from", "to")
        for each in versions(current):
            table.add_row(each.component, each.where, str(each.found or "none yet"), str(each.known))
        out.print(table)
        lacking = {name: steps for name, steps in pending(current).items() if steps}
        if lacking:
            raise CliError(f"behind: {', '.join(sorted(lacking))}; run `geo-assets migrate`")
        return
    table = Table("component", "from", "to")
    for component, before, after in migrate_all(current):
        table.add_row(component, str(before), str(after))
    if current.stack == "production":
        dagster_home.make_schema(current)
    out.print(table)
