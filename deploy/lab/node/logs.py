"""Output of containers over the port on which the API server asks a kubelet for it (`kubectl logs`)."""

from __future__ import annotations

import http.server
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

_FOLLOW_S = 0.2

Find = Callable[[str, str, str, bool], Path | None]
"""The file of a container by namespace, pod, container and whether the start before the last is meant."""


def tail(content: bytes, lines: int | None) -> bytes:
    """The last so many lines; all of them where it is None."""
    if lines is None:
        return content
    return b"".join(content.splitlines(keepends=True)[-lines:]) if lines else b""


def serve_logs(port: int, keys: Path, find: Find) -> None:
    """Answer on loopback in threads of their own."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked = urlsplit(self.path)
            parts, query = asked.path.strip("/").split("/"), parse_qs(asked.query)
            if parts[0] != "containerLogs" or len(parts) != 4:
                self.send_error(404, "the lab's node serves logs only")
                return
            path = find(parts[1], parts[2], parts[3], query.get("previous") == ["true"])
            self.send_response(200)
            self.send_header("Content-Type", "text/plain")
            self.send_header("Connection", "close")
            self.end_headers()
            self.close_connection = True
            if path is None:
                return
            lines = int(query["tailLines"][0]) if "tailLines" in query else None
            try:
                with open(path, "rb") as log:
                    self.wfile.write(tail(log.read(), lines))
                    while query.get("follow") == ["true"] and path.exists():
                        if find(parts[1], parts[2], parts[3], False) != path:
                            break
                        self.wfile.write(log.read())
                        self.wfile.flush()
                        time.sleep(_FOLLOW_S)
            except OSError:
                # Whoever followed went away.
                return

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing: the API server logs what it asks."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(keys / "apiserver.crt", keys / "apiserver.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True, name="logs").start()
