"""A real uvicorn in a thread of the test, on a free port."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.types import ASGIApp

from geo_assets.services.http_server import listen, make_server
from geo_assets_tests.waiting import patient, until


@contextmanager
def running(
    app: ASGIApp,
    *,
    on_stop: Callable[[], None] | None = None,
    forwarded_allow_ips: str = "127.0.0.1",
    grace_s: int = 2,
) -> Iterator[str]:
    """Serve the app and give its base URL; at the end it is shut down and its thread joined."""
    listener = listen("127.0.0.1", 0, service="test", setting="-")
    server = make_server(app, on_stop=on_stop, grace_s=grace_s, forwarded_allow_ips=forwarded_allow_ips)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    until(lambda: server.started or not thread.is_alive(), why="the test server starts", every=0.01)
    if not server.started:
        raise RuntimeError("the test server did not start")
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(patient(60))
