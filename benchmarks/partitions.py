"""A catalog of 90,000 partitions: the sensor's tick, `geo-assets status`, and what the UI's pages ask for.

    python -m benchmarks.partitions [--quick] [--json FILE]

The pages of the asset catalog are opened in Debian's Chromium, and every GraphQL query that they send is timed in it,
from request to the end of the answer. Without Chromium only tick and status are measured. BENCH_SCREENSHOTS names a
folder for a picture of each page.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dagster import AssetCheckEvaluation, DagsterInstance

from benchmarks.both_stacks import opened, place, stacks_here
from benchmarks.report import Report, parser
from geo_assets import catalog, dagster_home
from geo_assets.events import topics
from geo_assets.stack import Stack
from geo_assets.tiles.tile import Tile
from resources.event_log.protocol import NewRecord
from resources.ledger.protocol import Commit
from sensors.tile_updates import tick

PARTITIONS = 90_000
WIDTH = 300
AT_ONCE = 5_000
HINTS = 1_000
CHECKS = ("topology", "crs", "coverage", "integrity", "freshness", "half_done")
SETTLE_S = 12.0
"""How long a page is watched after it was opened."""

PAGES = {
    # Dagster counts the partitions when the first page asks for them, and remembers.
    "first page ever": "/assets",
    "catalog": "/assets",
    "asset list": "/assets?display-as=list",
    "overview": "/assets/tiles?view=overview",
    "partitions": "/assets/tiles?view=partitions",
    "one partition": "/assets/tiles?view=partitions&partition={key}",
    "events": "/assets/tiles?view=events",
    "checks": "/assets/tiles?view=checks",
    "lineage": "/asset-groups",
    "runs": "/runs",
}


def main() -> None:
    command = parser(__doc__ or "")
    command.add_argument("--stack", choices=("embedded", "production"), help="only this one")
    options = command.parse_args()
    report = Report("partitions", options.quick)
    count = 9_000 if options.quick else PARTITIONS
    for name in [options.stack] if options.stack else stacks_here(report):
        measure(name, count, report)
    report.finish(options.json)


def measure(name: str, count: int, report: Report) -> None:
    """One stack."""
    keys = [Tile(16, 37_000 + index % WIDTH, 18_900 + index // WIDTH).key for index in range(count)]
    with (
        tempfile.TemporaryDirectory() as folder,
        place(name, Path(folder) / "home", dagster_port=_free_port()) as where,
    ):
        where.dagster()
        with opened(where) as stack, DagsterInstance.get() as instance:
            _publish(stack, keys)
            _show(instance, keys)
            tick(stack, instance)
            stack.log.append([NewRecord(topics.TILES, key, None) for key in keys[:HINTS]])
            started = time.perf_counter()
            done = tick(stack, instance)
            report.row(f"{name}: tick over {HINTS:,} hints", time.perf_counter() - started, "s")
            for request in done.requests:
                stack.ledger.end_batch(str(request.run_config["ops"]["tiles"]["config"]["batch"]))
            started = time.perf_counter()
            tick(stack, instance)
            report.row(f"{name}: the next tick", time.perf_counter() - started, "s")
        environment = {**os.environ, **where.environment}
        started = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "geo_assets.cli", "status"], env=environment, check=True, stdout=subprocess.DEVNULL
        )
        report.row(f"{name}: geo-assets status, whole command", time.perf_counter() - started, "s")
        if shutil.which("chromium") is None:
            report.note("pages not measured: no chromium here")
            return
        with _dagster(where.settings, environment) as url:
            for page, slowest in _pages(url, keys[-1]).items():
                for query, seconds in slowest:
                    report.row(f"{name}: {page}: {query}", seconds, "s")


def _publish(stack: Stack, keys: list[str]) -> None:
    """Every tile at its first revision; their objects are nobody's business here."""
    ledger = stack.ledger
    for start in range(0, len(keys), AT_ONCE):
        piece = keys[start : start + AT_ONCE]
        mark = ledger.mark(piece)
        held = ledger.commit([Commit(key, 0, mark, "0" * 16, "a" * 64, 1_000, 1, "built") for key in piece])
        ledger.pay([row.id for rows in held.values() for row in rows])


def _show(instance: DagsterInstance, keys: list[str]) -> None:
    """The catalog as it is after all were built, with a history of checks."""
    catalog.register_partitions(instance, keys)
    catalog.report_materializations(
        instance,
        (
            catalog.tile_materialization(
                key,
                outcome="built",
                revision=1,
                content_hash="a" * 64,
                work_key="0" * 16,
                size=1_000,
                data_time_ms=1_700_000_000_000,
                tiles_url="http://127.0.0.1:8788",
                image_digest="local",
                details={"ms": 1.5, "features": 20, "vertices": 300},
            )
            for key in keys
        ),
    )
    # As the runs of a backfill do.
    catalog.count_partitions(instance)
    for _ in range(5):
        for check in CHECKS:
            instance.report_runless_asset_event(
                AssetCheckEvaluation(catalog.TILES, check, passed=True, metadata={"looked_at": 5_000})
            )


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextlib.contextmanager
def _dagster(settings: Any, environment: dict[str, str]) -> Iterator[str]:
    """UI, daemon and code server, as `geo-assets up` runs them."""
    environment = {**environment, **dagster_home.environment(settings, settings.home / "dagster")}
    with open(settings.home / "dagster.log", "wb") as said:
        process = subprocess.Popen(
            dagster_home.command(settings), env=environment, stdout=said, stderr=said, start_new_session=True
        )
        try:
            _wait_for(settings.dagster_url, process)
            yield settings.dagster_url
        finally:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 180
    body = json.dumps({"query": "{repositoriesOrError{... on RepositoryConnection{nodes{name}}}}"}).encode()
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError):
            request = urllib.request.Request(f"{url}/graphql", body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=10) as answer:
                if json.loads(answer.read())["data"]["repositoriesOrError"].get("nodes"):
                    return
        time.sleep(0.5)
    raise RuntimeError("Dagster's UI does not answer")


def _pages(url: str, key: str) -> dict[str, list[tuple[str, float]]]:
    """Of each page the three slowest GraphQL queries, in seconds as the browser saw them."""
    from playwright.sync_api import Request, sync_playwright

    found: dict[str, list[tuple[str, float]]] = {}
    screenshots = os.environ.get("BENCH_SCREENSHOTS")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"),
            args=["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"],
        )
        for name, path in PAGES.items():
            context = browser.new_context(viewport={"width": 1400, "height": 900})
            page = context.new_page()
            began: dict[Request, float] = {}
            seen: dict[str, float] = {}

            def start(request: Request, began: dict[Request, float] = began) -> None:
                if request.url.endswith("/graphql") or "/graphql?" in request.url:
                    began[request] = time.monotonic()

            def end(request: Request, began: dict[Request, float] = began, seen: dict[str, float] = seen) -> None:
                if request in began:
                    query = _operation(request)
                    seen[query] = max(seen.get(query, 0.0), time.monotonic() - began.pop(request))

            page.on("request", start)
            page.on("requestfinished", end)
            page.on("requestfailed", end)
            page.goto(f"{url}{path.format(key=key)}", timeout=60_000)
            deadline = time.monotonic() + 90
            page.wait_for_timeout(SETTLE_S * 1_000)
            while began and time.monotonic() < deadline:
                page.wait_for_timeout(500)
            for request, since in list(began.items()):
                query = f"{_operation(request)} (not answered)"
                seen[query] = time.monotonic() - since
            if screenshots:
                page.screenshot(path=str(Path(screenshots) / f"{name.replace(' ', '-')}.png"))
            found[name] = sorted(seen.items(), key=lambda one: -one[1])[:3]
            context.close()
        browser.close()
    return found


def _operation(request: Any) -> str:
    try:
        return str(json.loads(request.post_data or "{}").get("operationName") or "query")
    except ValueError:
        return "query"


if __name__ == "__main__":
    main()
