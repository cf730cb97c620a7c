"""The edge under a steady load: 500 signed bodies of 1 kB a second, from the moment each was due to its 202.

The load is open-loop: a request that is due is sent whether or not earlier ones were answered, and its time counts from
when it was due. Compared in the same run with the obvious edge: one commit a request, on the same disk.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import hmac
import json
import os
import resource
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.report import Report, parser
from geo_assets.events.signature import secret_key, sign

RATE = 500
BODY_BYTES = 1_000
SECRET = "whsec_" + "YmVuY2htYXJrIG9mIHRoZSBlZGdlIHNlY3JldA=="
SATURATION_CONNECTIONS = 64


@dataclass(slots=True)
class Outcome:
    """What a load saw: milliseconds from due to answered, and whatever was no 202."""

    milliseconds: list[float] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    late: float = 0.0
    """Most milliseconds by which the generator itself was behind: above a few, it was the bottleneck."""

    def percentile(self, share: float) -> float:
        """Milliseconds within which this share was answered."""
        ordered = sorted(self.milliseconds)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def requests(count: int, run: str) -> list[bytes]:
    """Whole HTTP requests, signed now: the tolerance is five minutes, a run takes one."""
    now = int(time.time())
    made = []
    for number in range(count):
        feature: dict[str, Any] = {
            "type": "Feature",
            "id": number,
            "version": 1,
            "layer": "buildings",
            "geometry": {
                "type": "Polygon",
                "coordinates": [[[24.9, 60.1], [24.91, 60.1], [24.91, 60.11], [24.9, 60.1]]],
            },
            "properties": {"text": ""},
        }
        feature["properties"]["text"] = "x" * (BODY_BYTES - len(json.dumps(feature)))
        body = json.dumps(feature).encode()
        headers = sign(SECRET, f"{run}-{number}", now, body) | {
            "host": "edge",
            "content-type": "application/geo+json",
            "content-length": str(len(body)),
        }
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        made.append(f"POST /v1/features HTTP/1.1\r\n{head}\r\n".encode() + body)
    return made


class Connection(asyncio.Protocol):
    """One keep-alive connection with one request at a time."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[bytes] | None = None
        self.transport: asyncio.Transport | None = None
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # pyright: ignore[reportAttributeAccessIssue]

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, found, body = self._data.partition(b"\r\n\r\n")
        if not found:
            return
        length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        if len(body) >= length and self.answer is not None and not self.answer.done():
            self._data = b""
            self.answer.set_result(head[9:12])

    def connection_lost(self, exc: Exception | None) -> None:
        if self.answer is not None and not self.answer.done():
            self.answer.set_exception(exc or ConnectionResetError("closed"))
        self.transport = None

    async def ask(self, request: bytes) -> bytes:
        """Send one request; the status of its answer."""
        assert self.transport is not None
        self.answer = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return await self.answer


class Pool:
    """Connections that are free; one more is opened when none is."""

    def __init__(self, port: int) -> None:
        self.port, self.free = port, list[Connection]()

    async def ask(self, request: bytes) -> bytes:
        """Send one request over a free connection; the status of its answer."""
        while self.free:
            connection = self.free.pop()
            if connection.transport is not None:
                break
        else:
            loop = asyncio.get_running_loop()
            _, connection = await loop.create_connection(Connection, "127.0.0.1", self.port)
        status = await connection.ask(request)
        self.free.append(connection)
        return status

    def close(self) -> None:
        """Close the connections."""
        for connection in self.free:
            if connection.transport is not None:
                connection.transport.close()


async def paced(port: int, load: list[bytes], rate: float) -> Outcome:
    """Send each request when it is due, whatever became of the earlier ones."""
    pool, outcome = Pool(port), Outcome()
    loop = asyncio.get_running_loop()

    async def one(request: bytes, due: float) -> None:
        try:
            status = await asyncio.wait_for(pool.ask(request), 30)
        except (OSError, TimeoutError) as error:
            outcome.faults[type(error).__name__] += 1
            return
        if status == b"202":
            outcome.milliseconds.append((time.perf_counter() - due) * 1000)
        else:
            outcome.faults[status.decode()] += 1

    began = time.perf_counter() + 0.05
    tasks: set[asyncio.Task[None]] = set()
    for number, request in enumerate(load):
        due = began + number / rate
        delay = due - time.perf_counter()
        if delay > 0:
            await asyncio.sleep(delay)
        outcome.late = max(outcome.late, (time.perf_counter() - due) * 1000)
        task = loop.create_task(one(request, due))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)
    outcome.seconds = time.perf_counter() - began
    pool.close()
    return outcome


async def saturated(port: int, load: list[bytes]) -> Outcome:
    """As fast as it goes over a fixed number of connections."""
    pool, outcome = Pool(port), Outcome()
    waiting = iter(load)
    began = time.perf_counter()

    async def sender() -> None:
        for request in waiting:
            sent = time.perf_counter()
            status = await pool.ask(request)
            if status == b"202":
                outcome.milliseconds.append((time.perf_counter() - sent) * 1000)
            else:
                outcome.faults[status.decode()] += 1

    await asyncio.gather(*(sender() for _ in range(SATURATION_CONNECTIONS)))
    outcome.seconds = time.perf_counter() - began
    pool.close()
    return outcome


class Server:
    """A server process on a free port with a home of its own."""

    def __init__(self, home: Path, *command: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        home.mkdir()
        (home / "sources.yaml").write_text(f"sources:\n  city:\n    secrets: [{SECRET}]\n")
        environment = os.environ | {"GEO_ASSETS_HOME": str(home), "GEO_ASSETS_EDGE_PORT": str(self.port)}
        began = time.perf_counter()
        self.process = subprocess.Popen(
            [sys.executable, "-m", *command], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                break
            except OSError:
                if self.process.poll() is not None or time.perf_counter() - began > 30:
                    raise SystemExit(f"{' '.join(command)} did not start") from None
                time.sleep(0.02)
        self.start_s = time.perf_counter() - began

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(30)

    def cpu_s(self) -> float:
        """Seconds of CPU the process took so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def naive_app(path: Path) -> Any:
    """The obvious edge: the same checks, and one commit a request."""
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("CREATE TABLE records (id INTEGER PRIMARY KEY, webhook TEXT UNIQUE, hash TEXT, value BLOB)")
    lock, key = threading.Lock(), secret_key(SECRET)

    def store(webhook_id: str, body: bytes) -> None:
        json.loads(body)
        with lock:
            connection.execute(
                "INSERT INTO records (webhook, hash, value) VALUES (?, ?, ?)",
                (webhook_id, hashlib.sha256(body).hexdigest(), body),
            )

    async def features(request: Request) -> JSONResponse:
        body = await request.body()
        webhook_id = request.headers["webhook-id"]
        signed = f"{webhook_id}.{request.headers['webhook-timestamp']}.".encode() + body
        hmac.compare_digest(hmac.digest(key, signed, "sha256"), b"")
        await run_in_threadpool(store, webhook_id, body)
        return JSONResponse({"status": "queued"}, 202)

    return Starlette(routes=[Route("/v1/features", features, methods=["POST"])])


def main() -> None:
    arguments: argparse.ArgumentParser = parser(__doc__ or "")
    arguments.add_argument("--serve-naive", action="store_true", help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.serve_naive:
        import uvicorn

        home, port = Path(os.environ["GEO_ASSETS_HOME"]), int(os.environ["GEO_ASSETS_EDGE_PORT"])
        uvicorn.run(naive_app(home / "naive.db"), port=port, log_level="critical", access_log=False)
        return
    seconds = 8 if options.quick else 60
    burst = 1_500 if options.quick else 10_000
    report = Report("edge", options.quick)
    outcomes: dict[str, tuple[Outcome, Outcome]] = {}
    commands = {"naive": ("benchmarks.edge", "--serve-naive"), "edge": ("geo_assets.services.edge",)}
    with tempfile.TemporaryDirectory() as folder:
        for name, command in commands.items():
            with Server(Path(folder) / name, *command) as server:
                uvloop.run(paced(server.port, requests(200, "warm"), RATE))
                cpu = server.cpu_s()
                # The peer only needs long enough for a p99 of its own.
                steady = uvloop.run(
                    paced(server.port, requests(RATE * (seconds if name == "edge" else 5), "steady"), RATE)
                )
                cpu = (server.cpu_s() - cpu) / steady.seconds
                full = uvloop.run(saturated(server.port, requests(burst, "full")))
                outcomes[name] = steady, full
                if name == "edge":
                    report.row("start to first connection", server.start_s, "s")
                    report.row("cpu at 500 req/s", 100 * cpu, "% of a core")
    ours, theirs = outcomes["edge"], outcomes["naive"]
    against = "one commit a request"
    for share, label in ((0.5, "p50"), (0.95, "p95"), (0.99, "p99"), (1.0, "max")):
        mine, other = ours[0].percentile(share), theirs[0].percentile(share)
        report.row(f"{label} to 202 at {RATE} req/s", mine, "ms", f"{against}: {other:.3g} ms", other / mine)
    errors = sum(ours[0].faults.values()) + sum(ours[1].faults.values())
    report.row("requests", len(ours[0].milliseconds), "answered 202")
    report.row("errors", errors, "requests")
    rates = [len(full.milliseconds) / full.seconds for _, full in (ours, theirs)]
    report.row(
        f"most, {SATURATION_CONNECTIONS} connections",
        rates[0],
        "req/s",
        f"{against}: {rates[1]:,.0f}",
        rates[0] / rates[1],
    )
    report.note(f"Generator late by at most {ours[0].late:.1f} ms; it runs on the same machine.")
    if errors:
        report.note(f"Faults: {dict(ours[0].faults + ours[1].faults)}")
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    report.row("peak memory of a server", peak, "MB")
    report.finish(options.json)


if __name__ == "__main__":
    main()
