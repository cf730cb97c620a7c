"""A collector of traces: a real HTTP server that takes OTLP and decodes its protobuf."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from geo_assets_tests.waiting import patient


@dataclass(frozen=True, slots=True)
class Told:
    """A span as the collector has it; ids in hex."""

    service: str
    name: str
    trace: str
    id: str
    parent: str
    links: tuple[tuple[str, str], ...]
    """Trace and span."""
    attributes: dict[str, Any] = field(hash=False)
    began_ns: int
    ended_ns: int


class Collector:
    """What came in. No request is answered while `free` is not set."""

    def __init__(self) -> None:
        self.spans: list[Told] = []
        self.requests = 0
        self.came = threading.Event()
        self.free = threading.Event()
        self.free.set()
        self.url = ""

    def take(self, body: bytes) -> None:
        self.requests += 1
        self.came.set()
        self.free.wait(patient(120))
        for of_process in ExportTraceServiceRequest.FromString(body).resource_spans:
            about = {one.key: one.value.string_value for one in of_process.resource.attributes}
            for scope in of_process.scope_spans:
                self.spans += [_told(about["service.name"], span) for span in scope.spans]

    def named(self, name: str) -> list[Told]:
        return [span for span in self.spans if span.name == name]


def chain(spans: Mapping[str, Told], last: Told) -> list[Told]:
    """A span and what it is part of, the oldest first.

    Args:
        spans: By id.
        last: The span.
    """
    found = [last]
    while (parent := spans.get(found[0].parent)) is not None:
        found.insert(0, parent)
    return found


def _told(service: str, span: Any) -> Told:
    attributes = {one.key: getattr(one.value, str(one.value.WhichOneof("value"))) for one in span.attributes}
    return Told(
        service, span.name, span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex(),
        tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links), attributes,
        span.start_time_unix_nano, span.end_time_unix_nano,
    )  # fmt: skip


@contextmanager
def collector() -> Iterator[Collector]:
    """One on a free port of this machine."""
    made = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            assert self.path == "/v1/traces"
            made.take(body)
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    made.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield made
    finally:
        made.free.set()
        server.shutdown()
        thread.join()
        server.server_close()
