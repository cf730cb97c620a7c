"""From a posted edit to the change stream, through edge, ingest, sensor and a Dagster run: the guaranteed path.

    python -m benchmarks.live [--quick] [--json FILE]

Starts `geo-assets up` on free ports in a temporary home, posts edits one at a time, and takes the time until the change
stream has named the last changed tile of each. It is compared with rebuilding every tile by hand on each edit.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx

from benchmarks.report import Report, parser
from geo_assets.configuration import load_sources
from geo_assets.events.signature import sign
from geo_assets.services.build import TileBuilder
from geo_assets.settings import Settings
from geo_assets.stack import Stack

LAYERS = "max_zoom: 16\nlayers: [{name: buildings, min_zoom: 14, min_pixels: 0}]\n"


def main() -> None:
    options = parser(__doc__ or "").parse_args()
    report = Report("live", options.quick)
    edits = 1 if options.quick else 10
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        (home / "layers.yaml").write_text(LAYERS)
        ports = free_ports(3)
        environment = {
            **os.environ,
            "GEO_ASSETS_HOME": str(home),
            "GEO_ASSETS_EDGE_PORT": str(ports[0]),
            "GEO_ASSETS_TILES_PORT": str(ports[1]),
            "GEO_ASSETS_DAGSTER_PORT": str(ports[2]),
            "GEO_ASSETS_INGEST_PORT": "0",
        }
        command = [sys.executable, "-m", "geo_assets.cli", "up"]
        platform = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            started = time.perf_counter()
            assert platform.stdout is not None
            for line in platform.stdout:
                if "geo_assets is up" in line:
                    break
            else:
                raise SystemExit("geo-assets up ended")
            report.row("start until everything answers", time.perf_counter() - started, "s")
            threading.Thread(target=lambda: [None for _ in platform.stdout or ()], daemon=True).start()
            accepted, announced = measure(home, ports, edits)
        finally:
            platform.send_signal(signal.SIGINT)
            platform.wait(60)
        naive = rebuild_everything(home)
        median = statistics.median(announced)
        report.row("edit posted to 202, median", statistics.median(accepted) * 1000, "ms")
        report.row("edit posted to last tile on the change stream, median", median, "s")
        report.row("edit posted to last tile on the change stream, slowest", max(announced), "s")
        report.row("rebuilding every tile by hand (no queue, no catalog)", naive, "s")
    report.note("The sensor's daemon looks every 5 s and a run takes seconds to start: that is most of it.")
    report.finish(options.json)


def measure(home: Path, ports: list[int], edits: int) -> tuple[list[float], list[float]]:
    """Seconds to 202 and to the last announced tile, for edits one after the other."""
    edge, tiles = (f"http://127.0.0.1:{port}" for port in ports[:2])
    source = next(iter(load_sources(Settings(home=home)).values()))
    seen: list[tuple[float, str]] = []
    ready = threading.Event()

    def listen() -> None:
        with httpx.Client(timeout=None, trust_env=False) as client, client.stream("GET", f"{tiles}/events") as answer:
            ready.set()
            try:
                for line in answer.iter_lines():
                    if line.startswith("data:") and '"hash"' in line:
                        seen.append((time.perf_counter(), line))
            except httpx.TransportError:
                return

    threading.Thread(target=listen, daemon=True).start()
    ready.wait(10)
    accepted: list[float] = []
    announced: list[float] = []
    with httpx.Client(trust_env=False, timeout=30) as client:
        for version in range(1, edits + 1):
            seen.clear()
            body = json.dumps(building(version)).encode()
            headers = {
                "content-type": "application/geo+json",
                **sign(source.secrets[0], f"live-{version}", int(time.time()), body),
            }
            started = time.perf_counter()
            assert client.post(f"{edge}/v1/features", content=body, headers=headers).status_code == 202
            accepted.append(time.perf_counter() - started)
            deadline = started + 60
            # Three zooms, at least a tile each; a quiet second after the last one ends the edit.
            while time.perf_counter() < deadline:
                if len(seen) >= 3 and time.perf_counter() - seen[-1][0] > 1.0:
                    break
                time.sleep(0.02)
            announced.append(seen[-1][0] - started if seen else float("nan"))
    return accepted, announced


def building(version: int) -> dict[str, object]:
    lon, lat, size = 24.9441, 60.1690, 0.0004 + version * 1e-5
    ring = [[lon, lat], [lon + size, lat], [lon + size, lat + size], [lon, lat + size], [lon, lat]]
    return {
        "type": "Feature", "id": 1, "version": version, "layer": "buildings",
        "geometry": {"type": "Polygon", "coordinates": [ring]}, "properties": {"version": version},
    }  # fmt: skip


def rebuild_everything(home: Path) -> float:
    """Seconds to encode every tile there is, in one process."""
    with Stack(Settings(home=home)) as stack, TileBuilder(stack, "naive", inline=True) as builder:
        keys = [state.key for state in stack.ledger.scan()]
        started = time.perf_counter()
        for key in keys:
            list(builder.build([key], force=True))
        return time.perf_counter() - started


def free_ports(count: int) -> list[int]:
    """Ports that are free now."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


if __name__ == "__main__":
    main()
