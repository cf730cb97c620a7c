"""A real uvicorn in a thread of the test, on a free port."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.types import ASGIApp

from geo_assets.services.http_server import listen, make_server
from geo_assets_tests.waiting import patient


@contextmanager
def running(
    app: ASGIApp, *, on_stop: Callable[[], None] | None = None, forwarded_allow_ips: str = "127.0.0.1"
) -> Iterator[str]:
    """Serve the app and give its base URL; at the end it is shut down and its thread joined."""
    listener = listen("127.0.0.1", 0, service="test", setting="-")
    server = make_server(app, on_stop=on_stop, grace_s=2, forwarded_allow_ips=forwarded_allow_ips)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    deadline = time.monotonic() + 10
    while not server.started:
        if not thread.is_alive() or time.monotonic() > deadline:
            raise RuntimeError("the test server did not start")
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(patient(30))
