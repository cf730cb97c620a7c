"""How an HTTP service starts and ends: socket, uvicorn, logs and signals. Shared by edge and tile server."""

from __future__ import annotations

import contextlib
import errno
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator

import structlog
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from geo_assets.services.draining import PROCESS
from geo_assets.services.problems import problem_response, unavailable

GRACE_S = 10
"""Longest a request may go on after SIGTERM: a body of 100 MB over a slow line is sent again by its sender."""


class ListenError(Exception):
    """The address cannot be listened on: one line that names it, the reason and the setting to change."""


class Leaving:
    """The app of a service that will end: what it answers while whoever sends it traffic finds that out.

    It goes on as before, but `/readyz` says no, and each answer closes its connection: a balancer that keeps
    connections open must not send the next request to a socket that is about to close.
    """

    def __init__(self, app: ASGIApp, ends: threading.Event) -> None:
        self._app, self._ends = app, ends

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http" or not self._ends.is_set():
            await self._app(scope, receive, send)
            return

        async def closing(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            await send(message)

        if scope["path"] == "/readyz":
            response = problem_response(unavailable("This process is about to end; ask another one.", 5))
            await response(scope, receive, closing)
            return
        await self._app(scope, receive, closing)


class _Server(uvicorn.Server):
    """Tells `on_stop` as soon as an end is asked for, before connections are waited for."""

    on_stop: Callable[[], None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """None: they are draining's, and `should_exit` is set when nothing new is to be taken."""
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self.on_stop is not None:
            self.on_stop()
        await super().shutdown(sockets)


def listen(host: str, port: int, *, service: str, setting: str) -> socket.socket:
    """A listening socket; port 0 takes a free one (read it back with `getsockname()[1]`).

    Args:
        host: Address or name, IPv4 or IPv6.
        port: 0 to 65535.
        service: The service's name, for the message.
        setting: The environment variable that moves the port, for the message.

    Raises:
        ListenError: The port is taken, below 1024 without the right to it, or the address is not this machine's.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except socket.gaierror as error:
        raise ListenError(f"{service}: {host!r} is no address of this machine ({error.strerror})") from error
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        reason = {
            errno.EADDRINUSE: "is in use by another process",
            errno.EACCES: "needs rights this process does not have",
            errno.EADDRNOTAVAIL: "is no address of this machine",
        }.get(error.errno or 0, f"cannot be listened on ({error.strerror})")
        raise ListenError(f"{service}: {host}:{port} {reason}; set {setting} to another port") from error
    return listener


def make_server(
    app: ASGIApp,
    *,
    forwarded_allow_ips: str = "127.0.0.1",
    on_stop: Callable[[], None] | None = None,
    grace_s: int = GRACE_S,
    max_connections: int | None = None,
) -> uvicorn.Server:
    """A uvicorn server of the app on uvloop and httptools; run it with `server.run(sockets=[listen(...)])`.

    Args:
        app: The application; its lifespan runs around the serving.
        forwarded_allow_ips: Proxies whose X-Forwarded-* headers are believed.
        on_stop: Called in the event loop when an end is asked for: end what would stream for ever.
        grace_s: Seconds that open requests have then.
        max_connections: Connections above which uvicorn itself answers 503; None leaves it to the app.
    """
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http="httptools",
        ws="none",
        lifespan="on",
        access_log=False,
        log_config=None,
        server_header=False,
        forwarded_allow_ips=forwarded_allow_ips,
        timeout_graceful_shutdown=grace_s,
        limit_concurrency=max_connections,
    )
    server = _Server(config)
    server.on_stop = on_stop
    return server


def serve(
    app: ASGIApp,
    *,
    host: str,
    port: int,
    service: str,
    setting: str,
    forwarded_allow_ips: str = "127.0.0.1",
    on_stop: Callable[[], None] | None = None,
    grace_s: float = GRACE_S,
    delay_s: float = 0.0,
) -> None:
    """Serve the app until SIGTERM or SIGINT, end its requests, and return.

    From the signal on `/readyz` is false. Everything is served for `delay_s` more, then nothing new is taken; what is
    under way has `grace_s`.

    Args:
        app: The application.
        host: Address to listen on.
        port: Port; 0 takes a free one, and the log says which.
        service: The service's name in the log.
        setting: The environment variable that moves the port.
        forwarded_allow_ips: Proxies whose X-Forwarded-* headers are believed.
        on_stop: Called in the event loop when nothing new is taken any more.
        grace_s: Seconds that open requests have then.
        delay_s: Seconds between SIGTERM and that: as long as a balancer takes to see that this one is not ready.

    Raises:
        ListenError: The address cannot be listened on.
    """
    listener = listen(host, port, service=service, setting=setting)
    # uvicorn's own start and stop lines say less than ours; its errors stay.
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    server = make_server(
        Leaving(app, PROCESS.stop),
        forwarded_allow_ips=forwarded_allow_ips,
        on_stop=on_stop,
        grace_s=max(1, round(grace_s)),
    )

    def begin(number: int) -> None:
        if number != signal.SIGTERM or not delay_s:
            server.should_exit = True
            return
        timer = threading.Timer(delay_s, lambda: setattr(server, "should_exit", True))
        timer.daemon = True
        timer.start()

    PROCESS.on_signals(grace_s, delay_s=delay_s, begin=begin)
    shown = f"[{host}]" if ":" in host else host
    structlog.get_logger().info("listening", service=service, url=f"http://{shown}:{listener.getsockname()[1]}")
    try:
        server.run(sockets=[listener])
    finally:
        listener.close()
    structlog.get_logger().info("stopped", service=service)
