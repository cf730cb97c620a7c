"""`geo-assets migrate-partitions`: bring Dagster's catalog to the partition zooms of the settings."""

from __future__ import annotations

import typer

from geo_assets.cli.answers import CliError, open_home, out


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("migrate-partitions", rich_help_panel="Run")(migrate_partitions)


def migrate_partitions(
    wait: float = typer.Option(300.0, "--wait", min=0, help="Seconds to wait for runs that work on partitions."),
) -> None:
    """Bring the asset catalog to GEO_ASSETS_PARTITION_ZOOMS, after that setting was changed.

    New partitions are registered, each with an entry for what its tiles are now. Old ones are retired once no run works
    on partitions: a key that is deleted under a run would fail it. Tiles, events and the map do not change. Running it
    again does no harm; `geo-assets up` does it by itself when it starts.
    """
    from geo_assets.catalog_partitions import RunsInTheWay, migrate
    from geo_assets.dagster_instance import instance_of

    with open_home() as stack, instance_of(stack.settings) as instance:
        try:
            done = migrate(stack, instance, wait_s=wait, say=lambda text: out.print(text))
        except RunsInTheWay as fault:
            raise CliError(str(fault)) from None
        out.print(
            f"partition zooms are {stack.settings.partitions}: {done.registered:,} partitions registered, "
            f"{done.reported:,} entries stored, {done.retired:,} partitions retired"
        )
