"""Retention of Dagster's catalog with this platform's settings. Needs dagster, which is imported when it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dagster import DagsterInstance

    from geo_assets.settings import Settings


def enforce_catalog(
    instance: DagsterInstance, settings: Settings, *, dry: bool = False, budget_s: float = float("inf")
) -> dict[str, int]:
    """Delete from Dagster's storages what is past its time by the settings; how much of each.

    Args:
        instance: Dagster's instance.
        settings: How long what is kept.
        dry: Only count.
        budget_s: Seconds after which it ends where it is.
    """
    from geo_assets.catalog_retention import Keep, enforce

    keep = Keep(settings.keep_steps_s, settings.keep_history_s, settings.keep_runs_s, settings.keep_history_s)
    return enforce(instance, keep, dry=dry, budget_s=budget_s)


def compact_catalog(instance: DagsterInstance) -> int:
    """Write Dagster's SQLite files anew, whatever their size: nobody writes meanwhile. How many bytes it gave back."""
    from geo_assets.catalog_retention_sqlite import compact, is_sharded

    return compact(instance) if is_sharded(instance) else 0
