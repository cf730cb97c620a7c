"""Links that people follow: to a place on the map, to a check and to a run in Dagster's UI. Loads without dagster."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote

if TYPE_CHECKING:
    from geo_assets.tiles.tile import Tile


def map_url(tiles_url: str, tile: Tile) -> str:
    """Link to the map page, centred on the tile at its zoom: `#zoom/lat/lon` as MapLibre's hash."""
    box = tile.bounds
    latitude, longitude = (box.south + box.north) / 2, (box.west + box.east) / 2
    return f"{tiles_url}/#{tile.z}/{latitude:.5f}/{longitude:.5f}"


def check_url(dagster_url: str, asset: str, check: str) -> str:
    """Link to a check and its newest result in Dagster's UI.

    Args:
        dagster_url: Without a slash at the end.
        asset: Key of its asset, parts separated by slashes.
        check: Name of the check.
    """
    return f"{dagster_url}/assets/{quote(asset)}?view=checks&checkDetail={quote(check, safe='')}"


def run_url(dagster_url: str, run_id: str) -> str:
    """Link to a run in Dagster's UI; `dagster_url` has no slash at the end."""
    return f"{dagster_url}/runs/{quote(run_id, safe='')}"


LOCATION = "geo_assets"
"""Name of the code location in workspace.yaml."""


def job_url(dagster_url: str, job: str) -> str:
    """Link to a job's launchpad in Dagster's UI; `dagster_url` has no slash at the end."""
    return f"{dagster_url}/locations/{LOCATION}/jobs/{quote(job, safe='')}/playground"
