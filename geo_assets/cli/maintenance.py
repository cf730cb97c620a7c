"""`geo-assets maintenance` and `geo-assets mend`: delete what is past its time, and end what nobody ended."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import typer

from geo_assets.cli.answers import CliError, escape, open_home, out
from geo_assets.configuration import ConfigurationError


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(rich_help_panel="Mend")(maintenance)
    app.command(rich_help_panel="Mend")(mend)


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
    from geo_assets.catalog_retention import Keep, enforce
    from geo_assets.catalog_retention_sqlite import compact as compact_files
    from geo_assets.catalog_retention_sqlite import is_sharded
    from geo_assets.dagster_instance import instance_of
    from geo_assets.services.housekeeping import enforce_retention

    if compact and dry_run:
        raise CliError("--compact and --dry-run exclude each other")
    with open_home() as stack, instance_of(stack.settings) as instance:
        keep = Keep.of(stack.settings)
        removed = enforce(instance, keep, dry=dry_run, budget_s=float("inf") if budget is None else budget)
        if not dry_run:
            removed |= enforce_retention(stack)
        if compact and is_sharded(instance):
            removed["bytes given back"] = removed.get("bytes given back", 0) + compact_files(instance)
    from rich.table import Table

    table = Table("past its time" if dry_run else "deleted", "", box=None, padding=(0, 2))
    for name, count in removed.items():
        if count:
            table.add_row(name, f"{count:,}")
    out.print(table if table.rows else "nothing is past its time")


def mend(
    dry_run: bool = typer.Option(False, "--dry-run", help="Say what is half done; change nothing."),
    grace: float = typer.Option(
        900.0, "--grace", min=0, max=31_536_000, help="Seconds for which something must have been left alone."
    ),
) -> None:
    """End what somebody began and nobody ended: dead leases, unpaid outbox rows, orphaned objects, stuck manifests.

    It is what the check `half_done` finds, and what the job `mend` does. Again does no harm.
    """
    from rich.table import Table

    from geo_assets.services import half_done
    from geo_assets.services.status import moment

    with open_home() as stack:
        found = half_done.find(stack, grace_ms=int(grace * 1000))
        if not found:
            out.print("nothing was left behind")
            return
        table = Table("what", "which", "since", "problem", box=None, padding=(0, 2))
        for one in found[:50]:
            table.add_row(one.kind, escape(one.subject), moment(one.since_ms) or "", escape(one.problem))
        out.print(table)
        if len(found) > 50:
            out.print(f"and {len(found) - 50:,} more")
        if dry_run:
            return
        grace_ms = int(grace * 1000)
        left = None
        with ExitStack() as until:
            pay: Callable[[], int] | None = None
            if any(one.subject == "catalog" for one in found if one.kind == "outbox"):
                from geo_assets import catalog
                from geo_assets.dagster_instance import instance_of

                try:
                    instance = until.enter_context(instance_of(stack.settings))
                except ConfigurationError as fault:
                    left = fault
                else:
                    pay = partial(
                        catalog.pay_owed, stack.ledger, instance, stack.settings, limit=5_000, min_age_ms=grace_ms
                    )
            done = half_done.mend(stack, found, pay_catalog=pay, grace_ms=grace_ms)
        out.print("mended: " + ", ".join(f"{count:,} {kind}" for kind, count in sorted(done.items())))
        if left is not None:
            raise CliError(f"what Dagster's catalog is to be told is left: {left}")
