"""The code location loads as the server loads it, and reads well in the catalog."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from dagster import AssetKey, DagsterInstance, Definitions
from dagster._core.workspace.context import WorkspaceProcessContext
from dagster._core.workspace.load_target import WorkspaceFileTarget

from geo_assets import catalog
from geo_assets.definitions import defs
from geo_assets_tests.dagster_world import ROOT, world


def test_definitions_are_loadable() -> None:
    Definitions.validate_loadable(defs)


def test_the_workspace_loads_as_the_server_loads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with (
        world(tmp_path, monkeypatch) as here,
        WorkspaceProcessContext(here.instance, WorkspaceFileTarget(paths=[str(ROOT / "workspace.yaml")])) as process,
    ):
        context = process.create_request_context()
        (entry,) = context.get_code_location_entries().values()
        assert entry.load_error is None
        assert entry.code_location is not None
        (repository,) = entry.code_location.get_repositories().values()
        assert {sensor.name for sensor in repository.get_sensors()} == {
            "tile_updates", "geofence_positions", "check_alerts", "dead_letter_counts"
        }  # fmt: skip
        assert {sensor.default_status.value for sensor in repository.get_sensors()} == {"RUNNING"}
        assert {node.asset_key for node in repository.get_asset_node_snaps()} == {
            catalog.TILES, catalog.FEATURES, catalog.TILESET, catalog.TRIGGERS, catalog.DEAD_LETTERS
        }  # fmt: skip


def test_the_workspace_is_not_shadowed_by_a_block_in_pyproject() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert not any(line.startswith(("[tool.dagster", "[tool.dg")) for line in text.splitlines())


def test_every_asset_has_what_makes_the_catalog_readable() -> None:
    graph = defs.resolve_asset_graph()
    groups = {
        "map": (catalog.TILES, catalog.FEATURES, catalog.TILESET, catalog.DEAD_LETTERS),
        "geofence": (catalog.TRIGGERS,),
    }
    for group, key in ((group, key) for group, keys in groups.items() for key in keys):
        node = graph.get(key)
        assert node.description
        assert node.owners
        assert node.group_name == group
        assert node.tags
    assert graph.get(catalog.TILES).parent_keys == {catalog.FEATURES}
    assert {key.name for key in graph.asset_check_keys} >= {
        "topology", "crs", "coverage", "integrity", "dead_letter_rate"
    }  # fmt: skip


def test_the_sensors_runs_do_not_run_the_checks() -> None:
    job = defs.resolve_job_def("build_tiles")
    assert set(job.graph.node_dict) == {"tiles"}


def test_services_of_the_house_load_without_dagster() -> None:
    script = (
        "import sys; sys.modules['dagster'] = None\n"
        "import geo_assets.services.build, geo_assets.services.announce, geo_assets.stack\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)


def test_the_instance_refuses_no_dagster_yaml_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with world(tmp_path, monkeypatch) as here:
        assert isinstance(here.instance, DagsterInstance)
        assert here.instance.run_coordinator.dequeue_interval_seconds == 1
        assert here.instance.get_concurrency_config().run_queue_config.max_concurrent_runs == 9
        assert here.instance.get_settings("sensors")["use_threads"]
        assert AssetKey("tiles") == catalog.TILES
