"""A backfill of the synthetic city in one Dagster run, z14 to z18: start, build, commit, announce and catalogue.

On both stacks, side by side, where the real services run (`scripts/services start`).

    python -m benchmarks.backfill [--quick] [--json FILE]

Against it, in the same run: the same again (nothing to do: every tile skipped), and the naive way of one tile after the
other with a catalog event each. Memory is the summed PSS of the run's process tree.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks import synthetic
from benchmarks.both_stacks import Place, opened, place, stacks_here
from benchmarks.report import Report, parser
from geo_assets.services.build_worker import boxes_of
from geo_assets.services.importer import import_reading
from geo_assets.services.reading import open_file
from geo_assets.settings import Settings
from geo_assets.stack import Stack

ROOT = Path(__file__).parents[1]
NAIVE_TILES = 60
DIGEST_TILES = 2_000


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--worker", nargs=2, metavar=("HOME", "BATCH"), help="internal: execute one run")
    given = options.parse_args()
    if given.worker:
        execute(Path(given.worker[0]), given.worker[1])
        return
    report = Report("backfill", given.quick)
    buildings, tiles = (10_000, 500) if given.quick else (100_000, 5_000)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "city.geojsonl"
        synthetic.write(file, buildings)
        for name in stacks_here(report):
            with place(name, Path(folder) / name) as where, opened(where) as stack:
                where.dagster()
                measure(where, stack, file, tiles, report)
    report.finish(given.json)


def measure(where: Place, stack: Stack, file: Path, tiles: int, report: Report) -> None:
    """One stack: import, the query for digests, the backfill, the naive way, the backfill again."""
    name = where.name
    started = time.perf_counter()
    done = import_reading(stack, open_file(file, None), next(iter(stack.sources.values())))
    report.row(f"{name}: import of {done.read:,} features", time.perf_counter() - started, "s")
    assert done.manifest is not None
    keys = spread(stack.ledger.manifest_keys(done.manifest.id), tiles)
    boxes = boxes_of(keys[:DIGEST_TILES], stack.layers)
    started = time.perf_counter()
    stack.features.digests(boxes)
    report.row(f"{name}: digests of {len(boxes):,} tiles, one query", time.perf_counter() - started, "s")
    first = run(where, stack, keys)
    report.row(f"{name}: backfill of {len(keys):,} tiles z14-z18, whole process", first["wall"], "s")
    naive = one_by_one(stack, keys[:: max(1, len(keys) // NAIVE_TILES)][:NAIVE_TILES])
    rate = len(keys) / first["wall"]
    report.row(f"{name}: end to end, start of the process included", rate, "tiles/s", "one by one", rate / naive)
    inner = len(keys) / first["seconds"]
    report.row(f"{name}: within the run", inner, "tiles/s", "one by one", inner / naive)
    report.row(f"{name}: one by one, an event each", naive, "tiles/s")
    report.row(f"{name}: peak PSS of the run's process tree", first["pss"] / 1e6, "MB")
    again = run(where, stack, keys)
    assert again["outcomes"] == {"skipped": len(keys)}, again
    report.row(f"{name}: second backfill, all skipped, within the run", len(keys) / again["seconds"], "tiles/s")
    report.row(f"{name}: second backfill: skip rate", again["outcomes"]["skipped"] / len(keys), "")


def spread(keys: list[str], count: int) -> list[str]:
    """`count` of the tiles, the lower zooms whole and the deepest cut, so that heavy tiles are among them."""
    by_zoom = sorted(keys, key=lambda key: (int(key.partition(":")[0]), key))
    return by_zoom[:count] if len(by_zoom) > count else by_zoom


def run(where: Place, stack: Stack, keys: list[str]) -> dict[str, Any]:
    """Mark the tiles, lease them as one batch, and execute its run in a process of its own."""
    from dagster import DagsterInstance

    from geo_assets import catalog

    home = stack.settings.home
    with DagsterInstance.get() as instance:
        catalog.register_partitions(instance, keys)
    stack.ledger.mark(keys, kind="backfill")
    (batch,) = stack.ledger.open_batches([keys], kind="backfill", ttl_s=600)
    answer = home / "answer.json"
    environment = {
        **os.environ,
        **where.environment,
        "GEO_ASSETS_LOG_LEVEL": "warning",
    }
    command = [sys.executable, "-m", "benchmarks.backfill", "--worker", str(home), batch.id]
    started = time.perf_counter()
    process = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    peak = Peak(process.pid)
    code = process.wait()
    wall = time.perf_counter() - started
    peak.stop()
    if code:
        raise SystemExit(f"the run ended with exit code {code}")
    result = json.loads(answer.read_text())
    return {**result, "wall": wall, "pss": peak.value}


class Peak(threading.Thread):
    """Highest summed PSS of a process tree, sampled four times a second."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.value = 0
        self._pid = pid
        self._ended = threading.Event()
        self.start()

    def run(self) -> None:
        while not self._ended.wait(0.25):
            total = 0
            try:
                parent = psutil.Process(self._pid)
                for process in (parent, *parent.children(recursive=True)):
                    total += process.memory_full_info().pss
            except psutil.Error:
                continue
            self.value = max(self.value, total)

    def stop(self) -> None:
        self._ended.set()
        self.join()


def execute(home: Path, batch: str) -> None:
    """One run of the job, in this process."""
    from dagster import AssetKey, DagsterInstance

    from geo_assets.definitions import defs

    job = defs.resolve_job_def("build_tiles")
    with DagsterInstance.get() as instance:
        config = {"ops": {"tiles": {"config": {"batch": batch}}}}
        result = job.execute_in_process(instance=instance, run_config=config, tags={"geo_assets/kind": "backfill"})
        assert result.success
        records = instance.fetch_observations(AssetKey("tiles"), limit=1).records
        observation = records[0].asset_observation
        assert observation is not None
        numbers = {name: value.value for name, value in observation.metadata.items() if hasattr(value, "value")}
    outcomes = {n: numbers[n] for n in ("built", "unchanged", "skipped", "emptied", "failed") if numbers.get(n)}
    (home / "answer.json").write_text(json.dumps({"seconds": numbers["seconds"], "outcomes": outcomes}))


def one_by_one(stack: Stack, keys: list[str]) -> float:
    """Tiles a second when each is taken, built, committed and catalogued by itself."""
    from dagster import DagsterInstance

    from geo_assets import catalog
    from geo_assets.services.build import TileBuilder

    settings: Settings = stack.settings
    with (
        DagsterInstance.get() as instance,
        TileBuilder(stack, "naive", inline=True) as builder,
    ):
        started = time.perf_counter()
        for key in keys:
            for result in builder.build([key], force=True):
                event = catalog.tile_materialization(
                    key, outcome=result.outcome, revision=result.revision, content_hash=result.content_hash,
                    work_key=result.work_key, size=result.bytes, data_time_ms=0, tiles_url=settings.tiles_url,
                    image_digest="local",
                )  # fmt: skip
                instance.report_runless_asset_event(event)
        return len(keys) / (time.perf_counter() - started)


if __name__ == "__main__":
    main()
