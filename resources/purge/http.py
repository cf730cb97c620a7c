"""Purge over HTTP: a PURGE request for each URL to each cache, as Varnish, nginx' purge module and Squid take them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx
import structlog

from resources.purge.protocol import PurgeMisconfigured

SETTING = "GEO_ASSETS_PURGE_URLS"

TIMEOUT_S = 1.0
"""To connect, and to be answered. A cache forgets in well under a millisecond; builds wait for it."""

BUDGET_S = 3.0
"""Most that one call takes: what is not purged by then is reported as failed, and is tried again by a sweep."""

REST_S = 5.0
"""How long a cache that could not be reached is left alone: one that is down must not make every commit slow."""

AT_ONCE = 8
"""Requests under way to one cache. On loopback more of them bring nothing: the client's own CPU is the limit."""


@dataclass(slots=True)
class _Cache:
    """One cache and how it does."""

    url: httpx.URL
    place: str
    rests_until: float = 0.0
    fault: str = ""
    """Why it rests."""


class HttpPurge:
    """PURGE requests to every cache (`Purge`). Safe for threads; connections are kept.

    A URL is purged when each cache has answered 2xx, or 404 or 410 because it does not have it. Redirects are answers
    like others: a cache that redirects a PURGE has forgotten nothing.

    Args:
        caches: `http://cache:6081`, one each. The request's path and Host are those of the URL that is purged.
        timeout_s: To connect, and to be answered.
        budget_s: Most that a call takes.
        rest_s: How long a cache that could not be reached is left alone.
        at_once: Requests under way to one cache.
        clock: Seconds that only go forward.

    Raises:
        PurgeMisconfigured: There is no cache, or one is no plain http or https URL.
    """

    def __init__(
        self,
        caches: Sequence[str],
        *,
        timeout_s: float = TIMEOUT_S,
        budget_s: float = BUDGET_S,
        rest_s: float = REST_S,
        at_once: int = AT_ONCE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not caches:
            raise PurgeMisconfigured(f"{SETTING} names no cache")
        self._caches = [_Cache(*_cache_url(cache)) for cache in dict.fromkeys(caches)]
        self._budget_s, self._rest_s, self._clock = budget_s, rest_s, clock
        self._at_once = at_once
        self._threads = ThreadPoolExecutor(at_once * len(self._caches), thread_name_prefix="purge")
        self._client = httpx.Client(
            timeout=timeout_s,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=at_once * len(self._caches)),
            follow_redirects=False,
            # Settings of a proxy are for the world outside; caches stand beside us.
            trust_env=False,
            headers={"User-Agent": "geo-assets", "Accept-Encoding": "identity"},
        )

    def purge(self, urls: Sequence[str]) -> list[str]:
        """Make every cache forget these URLs; those that one of them did not confirm, in the order given.

        Raises:
            ValueError: One is not the exact URL of a document; no cache was asked anything.
        """
        targets = {url: _target(url) for url in urls}
        if not targets:
            return []
        until = self._clock() + self._budget_s
        failed: set[str] = set()
        faults: dict[str, tuple[int, str]] = {}
        shares = [
            (cache, list(targets.items())[start :: self._at_once], until)
            for cache in self._caches
            for start in range(min(self._at_once, len(targets)))
        ]
        # One tile at one cache needs no thread.
        run = map if len(shares) == 1 else self._threads.map
        results = run(lambda share: self._work(*share), shares)
        for (cache, _, _), result in zip(shares, results, strict=True):
            for url, fault in result:
                failed.add(url)
                faults[cache.place] = (faults.get(cache.place, (0, ""))[0] + 1, fault)
        for place, (number, fault) in faults.items():
            structlog.get_logger().warning("purge failed", cache=place, urls=number, of=len(targets), error=fault)
        return [url for url in targets if url in failed]

    def close(self) -> None:
        """Close the connections."""
        self._threads.shutdown()
        self._client.close()

    def _work(
        self, cache: _Cache, targets: Sequence[tuple[str, tuple[str, bytes]]], until: float
    ) -> list[tuple[str, str]]:
        """In a thread: purge one after the other; the URLs that failed, each with why."""
        failed: list[tuple[str, str]] = []
        for url, (host, path) in targets:
            now = self._clock()
            if now < cache.rests_until:
                failed.append((url, cache.fault))
                continue
            if now >= until:
                failed.append((url, f"not done within {self._budget_s} s"))
                continue
            fault = self._purge_one(cache, host, path)
            if fault is not None:
                failed.append((url, fault))
        return failed

    def _purge_one(self, cache: _Cache, host: str, path: bytes) -> str | None:
        """None when the cache has forgotten it, else why not."""
        try:
            answer = self._client.request("PURGE", cache.url.copy_with(raw_path=path), headers={"Host": host})
        except httpx.TransportError as error:
            cache.fault = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            cache.rests_until = self._clock() + self._rest_s
            return cache.fault
        if answer.is_success or answer.status_code in (404, 410):
            return None
        return f"it answered {answer.status_code} {answer.reason_phrase}"[:200]


def _cache_url(text: str) -> tuple[httpx.URL, str]:
    """A cache's URL, and how it is named in messages: without user and password."""
    try:
        url = httpx.URL(text)
        place = f"{url.host}:{url.port or {'http': 80, 'https': 443}[url.scheme]}"
        if not url.host or url.raw_path not in (b"/", b""):
            raise ValueError
    except (httpx.InvalidURL, KeyError, ValueError):
        shown = text.rpartition("@")[2][:100]
        raise PurgeMisconfigured(
            f"{SETTING}: {shown!r} is not scheme, host and port of a cache, http://cache:6081"
        ) from None
    return url, place


def _target(url: str) -> tuple[str, bytes]:
    """Host and path of a URL that is to be purged.

    Raises:
        ValueError: It names more, or less, than one document: what a cache would take for a pattern or for everything.
    """
    parts = urlsplit(url)
    exact = (
        parts.scheme in ("http", "https")
        and parts.hostname
        and len(parts.path) > 1
        and not parts.path.endswith("/")
        and not parts.fragment
        and url.isascii()
        and not set(url) & set("*^$|()[]{}<>\\\"' \t\r\n")
    )
    if not exact:
        raise ValueError(f"{url[:200]!r} is not the exact URL of a document; nothing was purged")
    path = parts.path + (f"?{parts.query}" if parts.query else "")
    return parts.netloc.rpartition("@")[2], path.encode()
