"""A real HTTP server on loopback that answers as a Kubernetes API does, refuses, stumbles or hangs, as a test says."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, Any] | tuple[int, Any, dict[str, str]]


@dataclass
class Asked:
    """One request."""

    method: str
    path: str
    body: Any


@dataclass
class StandIn:
    """What a test tells the server, and what the server was asked."""

    host: str
    answer: Callable[[Asked], Answer | None] = lambda _asked: (500, "not told")
    """None: the connection is dropped without a word."""
    asked: list[Asked] = field(default_factory=list)
    hanging: threading.Event = field(default_factory=threading.Event)

    def answers(self, *answers: Answer | None) -> None:
        """One after the other; the last one again and again."""
        left = list(answers)
        self.answer = lambda _asked: left.pop(0) if len(left) > 1 else left[0]


def fault(code: int, reason: str, message: str, name: str = "") -> tuple[int, Any]:
    """A `Status` object as the API answers a fault with."""
    details = {"details": {"name": name, "group": "batch", "kind": "jobs"}} if name else {}
    return code, {
        "kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "message": message, "code": code,
        **details,
    }  # fmt: skip


@contextmanager
def stand_in() -> Iterator[StandIn]:
    """A server on a free port."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _handle(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            text = self.rfile.read(length)
            one = Asked(self.command, self.path, json.loads(text) if text else None)
            told.asked.append(one)
            answer = told.answer(one)
            if answer is None:
                self.close_connection = True
                return
            content = answer[1] if isinstance(answer[1], str) else json.dumps(answer[1])
            self.send_response(answer[0])
            self.send_header("Content-Type", "text/html" if isinstance(answer[1], str) else "application/json")
            self.send_header("Content-Length", str(len(content.encode())))
            for name, value in (answer[2] if len(answer) > 2 else {}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content.encode())

        do_GET = do_POST = do_DELETE = _handle  # noqa: N815

        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    told = StandIn(f"http://127.0.0.1:{server.server_address[1]}")
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield told
    finally:
        told.hanging.set()
        server.shutdown()
        server.server_close()
