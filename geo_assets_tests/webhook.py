"""A real receiver of webhooks on loopback for tests: writes down what it gets and answers as it is told."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Webhook:
    """Answers `status`, after `slow_s`, with `headers`."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        """Path, headers by lower-case name, body: of every request."""
        self.status = 200
        self.headers: dict[str, str] = {}
        self.slow_s = 0.0
        self.drips = False
        """Whether it sends a byte now and then, and never an answer."""
        webhook = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                webhook.requests.append((self.path, {k.lower(): v for k, v in self.headers.items()}, body))
                if webhook.drips:
                    self.wfile.write(b"HTTP/1.1 ")
                    for digit in "200 OK and so on and on" * 20:
                        self.wfile.write(digit.encode())
                        time.sleep(0.1)
                    return
                time.sleep(webhook.slow_s)
                self.send_response(webhook.status)
                for name, value in webhook.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.place = f"127.0.0.1:{self._server.server_port}"
        self.url = f"http://{self.place}/hooks/T0/SECRET"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    @property
    def bodies(self) -> list[Any]:
        """The bodies, parsed."""
        return [json.loads(body) for _, _, body in self.requests]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextmanager
def webhook() -> Iterator[Webhook]:
    """A receiver for the length of a block."""
    made = Webhook()
    try:
        yield made
    finally:
        made.close()
