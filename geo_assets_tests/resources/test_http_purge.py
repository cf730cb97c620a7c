from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from geo_assets_tests.own_redis import free_port
from geo_assets_tests.waiting import patient
from resources.purge.http import HttpPurge
from resources.purge.protocol import Purge, PurgeMisconfigured

SITE = "https://maps.example"


class Cache:
    """A real HTTP server that writes down what it is asked, and answers as it is told."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, str]] = []
        """Method, path and Host of every request."""
        self.status = 200
        self.slow_s = 0.0
        self.connections = 0
        cache = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                cache.connections += 1
                super().setup()

            def do_PURGE(self) -> None:
                cache.asked.append((self.command, self.path, self.headers["Host"]))
                time.sleep(cache.slow_s)
                self.send_response(cache.status)
                self.send_header("Content-Length", "0")
                if 300 <= cache.status < 400:
                    self.send_header("Location", "/elsewhere")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            request_queue_size = 128

        self._server = Server(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def cache() -> Iterator[Cache]:
    cache = Cache()
    yield cache
    cache.close()


@pytest.fixture
def other() -> Iterator[Cache]:
    cache = Cache()
    yield cache
    cache.close()


def urls(number: int) -> list[str]:
    return [f"{SITE}/tiles/14/{n}/0.mvt" for n in range(number)]


def test_each_cache_is_asked_for_exactly_the_path_and_host_of_each_url(cache: Cache, other: Cache) -> None:
    purge = HttpPurge([cache.url, other.url + "/"])
    assert isinstance(purge, Purge)
    asked = [f"{SITE}/tiles/14/1/2.mvt", "http://localhost:8788/geo/tiles/0/0/0.mvt", f"{SITE}/a%20b?c=%2F&d"]
    assert purge.purge([*asked, asked[0]]) == []
    wanted = {
        ("PURGE", "/tiles/14/1/2.mvt", "maps.example"),
        ("PURGE", "/geo/tiles/0/0/0.mvt", "localhost:8788"),
        ("PURGE", "/a%20b?c=%2F&d", "maps.example"),
    }
    assert set(cache.asked) == set(other.asked) == wanted
    assert len(cache.asked) == len(other.asked) == 3
    purge.close()


@pytest.mark.parametrize(
    ("status", "purged"),
    [(200, True), (204, True), (404, True), (410, True), (301, False), (403, False), (405, False), (500, False)],
)
def test_only_a_cache_that_says_so_has_forgotten(cache: Cache, status: int, purged: bool) -> None:
    purge = HttpPurge([cache.url])
    cache.status = status
    assert purge.purge(urls(3)) == ([] if purged else urls(3))
    assert len(cache.asked) == 3
    cache.status = 200
    assert purge.purge(urls(3)) == []
    purge.close()


def test_a_url_that_one_of_the_caches_did_not_forget_has_failed(cache: Cache, other: Cache) -> None:
    purge = HttpPurge([cache.url, other.url])
    other.status = 503
    assert purge.purge(urls(2)) == urls(2)
    assert len(cache.asked) == 2
    purge.close()


def test_rule_13_nothing_asked_is_nothing_purged(cache: Cache) -> None:
    purge = HttpPurge([cache.url])
    assert purge.purge([]) == []
    assert cache.asked == []
    purge.close()


@pytest.mark.parametrize(
    "url",
    [
        "",
        "*",
        SITE,
        f"{SITE}/",
        f"{SITE}/tiles/",
        f"{SITE}/tiles/14/*",
        f"{SITE}/tiles/14/1/[0-9]+.mvt",
        f"{SITE}/tiles/14/1/2.mvt#",
        f"{SITE}/tiles/14/1/2.mvt\r\nX-Purge-All: 1",
        "/tiles/14/1/2.mvt",
        "file:///tiles/14/1/2.mvt",
    ],
)
def test_rule_13_what_may_mean_more_than_one_document_is_refused_before_anything_is_asked(
    cache: Cache, url: str
) -> None:
    if url.endswith("#"):
        url += "all"
    purge = HttpPurge([cache.url])
    with pytest.raises(ValueError, match="is not the exact URL of a document; nothing was purged"):
        purge.purge([*urls(2), url])
    assert cache.asked == []
    purge.close()


def test_connections_are_kept_and_few(cache: Cache) -> None:
    purge = HttpPurge([cache.url], at_once=4)
    for _ in range(3):
        assert purge.purge(urls(100)) == []
    assert len(cache.asked) == 300
    assert cache.connections <= 5
    purge.close()


def test_a_cache_that_is_not_there_costs_nothing_and_is_left_alone_for_a_while(cache: Cache) -> None:
    now = 0.0
    port = free_port()
    purge = HttpPurge([f"http://127.0.0.1:{port}", cache.url], clock=lambda: now)
    began = time.monotonic()
    for _ in range(20):
        assert purge.purge(urls(10)) == urls(10)
    assert time.monotonic() - began < patient(10)
    assert len(cache.asked) == 200
    purge.close()


def test_a_cache_that_does_not_answer_costs_its_timeout_once_then_nothing_until_it_has_rested(cache: Cache) -> None:
    now = 0.0
    purge = HttpPurge([cache.url], timeout_s=1.0, rest_s=5, clock=lambda: now)
    cache.slow_s = 3
    began = time.monotonic()
    assert purge.purge(urls(100)) == urls(100)
    # Once, and not for every one of them.
    assert time.monotonic() - began < patient(8)
    cache.slow_s = 0
    asked = len(cache.asked)
    assert asked <= 8
    assert purge.purge(urls(100)) == urls(100)
    assert len(cache.asked) == asked
    now = 5.1
    assert purge.purge(urls(100)) == []
    purge.close()


def test_a_slow_cache_costs_no_more_than_the_budget(cache: Cache) -> None:
    purge = HttpPurge([cache.url], budget_s=1.0, at_once=2)
    cache.slow_s = 0.1
    began = time.monotonic()
    failed = purge.purge(urls(100))
    # All of them take it five seconds.
    assert time.monotonic() - began < patient(4)
    assert 70 < len(failed) < 100
    assert failed == [url for url in urls(100) if url in failed]
    purge.close()


def test_threads_may_share_it(cache: Cache) -> None:
    purge = HttpPurge([cache.url])
    answers: list[list[str]] = []
    threads = [threading.Thread(target=lambda: answers.append(purge.purge(urls(20)))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [[]] * 6
    assert len(cache.asked) == 120
    purge.close()


@pytest.mark.parametrize(
    "caches", [[], [""], ["cache:6081"], ["ftp://cache"], ["http://"], ["http://user:hidden@cache:6081/path"]]
)
def test_caches_that_are_none_are_one_line_that_names_the_setting(caches: list[str]) -> None:
    with pytest.raises(PurgeMisconfigured, match="GEO_ASSETS_PURGE_URLS") as raised:
        HttpPurge(caches)
    assert "hidden" not in str(raised.value)
