"""A home with every embedded port, and a Dagster instance as `geo-assets up` makes it."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from urllib.parse import quote

import pytest
import shapely
from dagster import DagsterInstance, DagsterRun, DagsterRunStatus

from geo_assets.events import topics
from geo_assets.jobs import BATCH_TAG
from geo_assets.services.dead_letters import list_dead_letters
from geo_assets.settings import Settings
from geo_assets.stack import Stack
from geo_assets.tiles import workkey
from geo_assets.tiles.tile import Tile
from resources.event_log.protocol import NewRecord
from resources.feature_store.protocol import Edit, Feature

ROOT = Path(__file__).parents[1]

LAYERS = "layers:\n  - {name: buildings, min_zoom: 0, min_pixels: 0}\nmax_zoom: 18\n"


@dataclass
class World:
    """The ports, the instance, and what tests do with them."""

    stack: Stack
    instance: DagsterInstance
    edits: int = 0
    runs: list[DagsterRun] = field(default_factory=list)

    @property
    def ledger(self):
        return self.stack.ledger

    def put_square(self, name: str, tile: Tile, share: float = 0.4, *, version: int | None = None) -> None:
        """A square building in the middle of a tile, `share` of its side wide."""
        west, south, east, north = tile.bounds
        dx, dy = (east - west) * (1 - share) / 2, (north - south) * (1 - share) / 2
        self.put(name, shapely.box(west + dx, south + dy, east - dx, north - dy), version=version)

    def put(self, name: str, shape: shapely.Geometry, *, version: int | None = None, min_zoom: int = 0) -> None:
        self.edits += 1
        feature_id, version = json.dumps(name), self.edits if version is None else version
        wkb = shapely.to_wkb(shape, flavor="iso", byte_order=1)
        properties = json.dumps({"name": name})
        content = workkey.content_hash("buildings", wkb, properties)
        feature = Feature(
            source="demo",
            feature_id=feature_id,
            layer="buildings",
            version=version,
            geometry=wkb,
            bbox=shape.bounds,
            properties=properties,
            content_hash=content,
            digest=workkey.feature_digest("demo", "buildings", feature_id, content),
            min_zoom=min_zoom,
            max_zoom=18,
            vertex_count=int(shapely.get_num_coordinates(shape)),
            event_time_ms=1_700_000_000_000 + self.edits,
        )
        edit = Edit(
            f"{self.edits:064x}", f"e{self.edits}", "upsert", "demo", feature_id, version, feature.event_time_ms,
            content, feature,
        )  # fmt: skip
        (applied,) = self.stack.features.apply([edit], lambda _: [], now_ms=feature.event_time_ms)
        assert applied.outcome == "applied"

    def hint(self, *keys: str | None, value: bytes | None = None) -> None:
        """Records on `[tiles]`."""
        self.stack.log.append([NewRecord(topics.TILES, key, value) for key in keys])

    def run_of(self, batch_id: str, status: DagsterRunStatus) -> DagsterRun:
        """A run record that names the batch."""
        return self.run_with({BATCH_TAG: batch_id}, status)

    def run_with(self, tags: dict[str, str], status: DagsterRunStatus) -> DagsterRun:
        """A run record with these tags."""
        run = self.instance.create_run_for_job(_nothing_job(), tags=tags, status=status)
        self.runs.append(run)
        return run

    def batch_of(self, request) -> str:
        return request.run_config["ops"]["tiles"]["config"]["batch"]

    def dead_letters(self):
        return [one.letter for one in list_dead_letters(self.stack.log)]

    def execute(self, request):
        """Run a request of the sensor in this process, as the run launcher would."""
        from geo_assets.definitions import defs

        job = defs.resolve_job_def("build_tiles")
        return job.execute_in_process(
            run_config=request.run_config, instance=self.instance, tags=request.tags, raise_on_error=False
        )


def _nothing_job():
    from dagster import job, op

    @op
    def nothing() -> None: ...

    @job
    def build_tiles() -> None:
        nothing()

    return build_tiles


@lru_cache(maxsize=1)
def _empty_storage() -> Path:
    """Dagster's databases, made once: its migrations take two seconds, a copy takes none."""
    folder = Path(tempfile.mkdtemp(prefix="geo-assets-tests-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    shutil.copy(ROOT / "dagster.yaml", folder)
    with (
        pytest.MonkeyPatch.context() as environment,
        DagsterInstance.from_config(_pointed_at(folder, environment)) as instance,
    ):
        instance.get_runs(limit=1)
        instance.event_log_storage.get_asset_records([])
        instance.schedule_storage.all_instigator_state()
    return folder


def _pointed_at(folder: Path, environment: pytest.MonkeyPatch) -> str:
    environment.setenv("DAGSTER_HOME", str(folder))
    environment.setenv("GEO_ASSETS_DAGSTER_STORAGE", str(folder))
    return str(folder)


@contextmanager
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **settings: object) -> Iterator[World]:
    """A new world below `tmp_path`; settings reach this process and its children through the environment."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "layers.yaml").write_text(LAYERS)
    values = {"home": home, "log_partitions": 1, "build_workers": 1, **settings}
    for name, value in values.items():
        monkeypatch.setenv(f"GEO_ASSETS_{name.upper()}", str(value))
    shutil.copytree(_empty_storage(), home / "dagster")
    instance_home = _pointed_at(home / "dagster", monkeypatch)
    with Stack(Settings()) as stack, DagsterInstance.from_config(instance_home) as instance:
        yield World(stack.ensure(), instance)


def tiles_around(tile: Tile, count: int) -> Sequence[Tile]:
    """That many tiles of its row, eastward."""
    return [Tile(tile.z, tile.x + step, tile.y) for step in range(count)]


@contextmanager
def postgres_instance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DagsterInstance]:
    """A Dagster instance as production has it: events in Postgres, in a schema of its own."""
    import psycopg
    from psycopg import sql

    from geo_assets_tests.postgres_rooms import postgres_room

    with postgres_room() as room:
        with psycopg.connect(room.url, autocommit=True) as db:
            db.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(room.schema)))
        search_path = quote(f"-csearch_path={room.schema}", safe="")
        monkeypatch.setenv("GEO_ASSETS_DAGSTER_POSTGRES_URL", f"{room.url}&options={search_path}")
        for name, value in {
            "GEO_ASSETS_DAGSTER_STORAGE": str(tmp_path / "storage"),
            "GEO_ASSETS_LOGS_BUCKET": "logs",
            "GEO_ASSETS_LOGS_PREFIX": "compute-logs",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:1",
        }.items():
            monkeypatch.setenv(name, value)
        folder = tmp_path / "dagster-home"
        folder.mkdir()
        text = (ROOT / "deploy" / "dagster.yaml").read_text()
        # What runs print is not asked for: without S3 the run would wait for it.
        start, end = text.index("\ncompute_logs:"), text.index("\n# The queue")
        module = "dagster._core.storage.noop_compute_log_manager"
        logs = f"\ncompute_logs:\n  module: {module}\n  class: NoOpComputeLogManager\n"
        (folder / "dagster.yaml").write_text(text[:start] + logs + text[end:])
        with DagsterInstance.from_config(str(folder)) as instance:
            yield instance
