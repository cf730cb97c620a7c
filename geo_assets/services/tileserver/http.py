"""HTTP's small print: conditional requests, encodings, and the headers that every answer of the tile server carries."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Final

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import Response

from geo_assets.services.purging import EMPTY_CACHE_S, SHARED_CACHE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from geo_assets.services.tileserver.metrics import Metrics

REVALIDATE: Final = "no-cache"
"""Keep it, and ask before each use: a tile changes whenever somebody edits. MapLibre starts no timer on it."""
SHARED: Final = f"max-age=0, must-revalidate, s-maxage={SHARED_CACHE_S}"
"""The same for browsers; caches that are purged when the tile changes keep it. They do not keep `no-cache`."""
SHARED_EMPTY: Final = f"max-age=0, must-revalidate, s-maxage={EMPTY_CACHE_S}"
IMMUTABLE: Final = "public, max-age=31536000, immutable"

_COMMON: Final = {
    "Access-Control-Allow-Origin": "*",
    "Access-Control-Expose-Headers": "ETag, X-Tile-Revision, Retry-After",
    "Cross-Origin-Resource-Policy": "cross-origin",
    "Timing-Allow-Origin": "*",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "strict-origin-when-cross-origin",
}
"""The same for every origin, so that a cache keeps one entry and a purge reaches it."""
_PRIVATE: Final = {
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "strict-origin-when-cross-origin",
}
"""Of what only the server's own page may read."""

PREFLIGHT: Final = {
    "Access-Control-Allow-Methods": "GET, HEAD, OPTIONS",
    "Access-Control-Allow-Headers": "If-None-Match, Last-Event-ID, Cache-Control, Range",
    "Access-Control-Max-Age": "86400",
    "Allow": "GET, HEAD, OPTIONS",
}

PRIVATE_METHODS: Final = "GET, HEAD, POST, OPTIONS"

_ENTITY_TAG = re.compile(r'(?:W/)?"([\x21\x23-\x7e\x80-\xff]*)"')


def etag_matches(header: str | None, etag: str) -> bool:
    """Whether an If-None-Match header names the entity tag; weak comparison (RFC 9110, sections 8.8.3.2 and 13.1.2)."""
    if header is None:
        return False
    if header.strip() == "*":
        return True
    opaque = etag.removeprefix("W/").strip('"')
    return any(match[1] == opaque for match in _ENTITY_TAG.finditer(header))


def accepts_gzip(header: str | None) -> bool:
    """Whether an Accept-Encoding header allows gzip (RFC 9110, section 12.5.3). No header: the plain form is safe."""
    allowed: dict[str, float] = {}
    for part in (header or "").split(","):
        coding, _, parameters = part.partition(";")
        weight = 1.0
        name, _, value = parameters.partition("=")
        if name.strip().lower() == "q":
            try:
                weight = float(value.strip())
            except ValueError:
                weight = 0.0
        allowed[coding.strip().lower()] = weight
    return allowed.get("gzip", allowed.get("x-gzip", allowed.get("*", 0.0))) > 0


def conditional(request: Request, body: bytes, media_type: str, etag: str, *, zipped: bytes | None = None,
                headers: Mapping[str, str] | None = None) -> Response:  # fmt: skip
    """A body under an entity tag: 304 when the client has it, compressed when it may be."""
    fixed = {"Cache-Control": REVALIDATE, **(headers or {}), "ETag": etag, "Vary": "Accept-Encoding"}
    if etag_matches(request.headers.get("if-none-match"), etag):
        return Response(status_code=304, headers=fixed)
    if zipped is not None and accepts_gzip(request.headers.get("accept-encoding")):
        return Response(zipped, media_type=media_type, headers={**fixed, "Content-Encoding": "gzip"})
    return Response(body, media_type=media_type, headers=fixed)


class Envelope:
    """Around the whole app: headers of every answer, preflights, and the count of requests.

    Args:
        app: What is inside.
        metrics: Where requests are counted.
        kind: Path to the kind it is counted as: a handful of words, whatever paths are asked for.
        known: Whether a path is one of ours, so that OPTIONS is answered.
        private: Paths that no page of another origin may read.
    """

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        kind: Callable[[str], str],
        known: Callable[[str], bool],
        private: Collection[str] = (),
    ) -> None:
        self._app, self._metrics, self._kind, self._known, self._private = app, metrics, kind, known, private

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        kind = self._kind(scope["path"])
        started = time.perf_counter()

        async def finished(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in (_PRIVATE if scope["path"] in self._private else _COMMON).items():
                    headers.setdefault(name, value)
                self._metrics.requests.labels(kind, str(message["status"])).inc()
            await send(message)

        if scope["method"] == "OPTIONS" and self._known(scope["path"]):
            headers = {"Allow": PRIVATE_METHODS} if scope["path"] in self._private else PREFLIGHT
            await Response(status_code=204, headers=headers)(scope, receive, finished)
            return
        await self._app(scope, receive, finished)
        if kind not in ("events", "live"):
            self._metrics.seconds.labels(kind).observe(time.perf_counter() - started)
