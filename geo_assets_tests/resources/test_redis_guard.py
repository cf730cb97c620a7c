from __future__ import annotations

import functools
import secrets
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from geo_assets_tests.own_redis import PASSWORD, OwnRedis, free_port, own_redis
from geo_assets_tests.resources.contract_guard import GuardContract, GuardHarness
from geo_assets_tests.waiting import patient
from resources.guard.protocol import Guard, GuardUnavailable
from resources.guard.redis import TIMEOUT_S, RedisGuard


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnRedis]:
    with own_redis(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def own(tmp_path: Path) -> Iterator[OwnRedis]:
    with own_redis(tmp_path / "redis") as server:
        yield server


@pytest.fixture
def prefix() -> str:
    return f"t_{secrets.token_hex(5)}:"


class _Time:
    """A clock whose seconds pass at once: the server's keys get as much nearer to their end."""

    def __init__(self, server: OwnRedis, prefix: str) -> None:
        self._client, self._prefix, self._ahead = server.client(), prefix, 0.0

    def __call__(self) -> float:
        return time.time() + self._ahead

    def advance(self, seconds: float) -> None:
        self._ahead += seconds
        for key in self._client.scan_iter(match=f"{self._prefix}*", count=1_000):
            left = self._client.pttl(key)
            if left > 0:
                self._client.pexpire(key, left - int(seconds * 1000))


class TestRedisGuard(GuardContract):
    @pytest.fixture
    def harness(self, server: OwnRedis, prefix: str) -> GuardHarness:
        clock = _Time(server, prefix)
        return GuardHarness(
            open=lambda: RedisGuard(server.url, prefix, clock=clock),
            open_elsewhere=functools.partial(RedisGuard, server.url, prefix),
            advance=clock.advance,
            tick_s=10.0,
        )


@pytest.fixture
def guard(server: OwnRedis, prefix: str) -> Iterator[RedisGuard]:
    guard = RedisGuard(server.url, prefix)
    yield guard
    guard.close()


def test_many_keys_are_set_and_read_in_one_go(guard: Guard) -> None:
    assert guard.set_if_absent("b", "first", 60) is None
    assert guard.set_many_if_absent({"a": "1", "b": "2", "c": ""}, 60) == {"b": "first"}
    assert guard.get_many(["a", "b", "c", "d"]) == {"a": "1", "b": "first", "c": ""}
    assert guard.set_many_if_absent({}, 60) == guard.get_many([]) == {}


def test_redis_itself_ends_keys_and_leases(guard: Guard) -> None:
    guard.set_if_absent("k", "v", 0.05)
    lease = guard.acquire("l", "a", 0.05)
    assert lease is not None
    time.sleep(0.07)
    assert guard.get("k") is None
    assert guard.renew(lease, 60) is None
    assert guard.acquire("l", "b", 60) is not None


def test_every_key_has_an_end_but_the_counter_of_tokens(server: OwnRedis, guard: Guard, prefix: str) -> None:
    guard.set_if_absent("one", "", 100)
    guard.set_many_if_absent({"two": "", "three": ""}, 100)
    assert guard.acquire("l", "a", 100) is not None
    with server.client() as client:
        ends = {key.removeprefix(prefix): client.pttl(key) for key in client.scan_iter(match=f"{prefix}*")}
    assert ends.pop("token") == -1
    assert len(ends) == 4
    assert all(90_000 < end <= 100_000 for end in ends.values())


def test_two_prefixes_on_one_server_are_two_guards(server: OwnRedis, guard: Guard, prefix: str) -> None:
    other = RedisGuard(server.url, f"other-{prefix}")
    guard.set_if_absent("k", "mine", 60)
    assert guard.acquire("l", "a", 60) is not None
    assert other.get("k") is None
    assert other.acquire("l", "b", 60) is not None
    other.close()


def test_killed_and_started_again_it_has_its_keys_and_leases_and_clients_go_on(own: OwnRedis) -> None:
    guard = RedisGuard(own.url)
    guard.set_if_absent("k", "v", 600)
    lease = guard.acquire("l", "a", 600)
    assert lease is not None
    own.kill()
    began = time.monotonic()
    with pytest.raises(GuardUnavailable, match=r"GEO_ASSETS_REDIS_URL"):
        guard.get("k")
    # Refused at once; the rest is room for a busy machine.
    assert time.monotonic() - began < patient(6 * TIMEOUT_S)
    own.start()
    assert guard.get("k") == "v"
    assert guard.acquire("l", "b", 600) is None
    assert guard.renew(lease, 600) is not None
    guard.release(lease)
    later = guard.acquire("l", "b", 600)
    assert later is not None
    assert later.token > lease.token
    guard.close()


@pytest.mark.parametrize("loss", ["flushed", "its last writes lost"])
def test_tokens_grow_although_redis_lost_its_counter(own: OwnRedis, loss: str) -> None:
    guard = RedisGuard(own.url)
    tokens: list[int] = []
    for n in range(3):
        lease = guard.acquire("l", f"owner-{n}", 600)
        assert lease is not None
        tokens.append(lease.token)
        with own.client() as client:
            if loss == "flushed":
                client.flushall()
            else:
                client.set("geo_assets:token", tokens[0])
                client.delete("geo_assets:lease:l")
    assert tokens == sorted(set(tokens))
    guard.close()


def test_tokens_grow_while_the_server_s_clock_stands_far_back(own: OwnRedis) -> None:
    guard = RedisGuard(own.url)
    far_ahead = int(time.time() * 1_000_000) + 10**12
    with own.client() as client:
        client.set("geo_assets:token", far_ahead)
    first, second = guard.acquire("a", "a", 60), guard.acquire("b", "a", 60)
    assert first is not None
    assert second is not None
    assert (first.token, second.token) == (far_ahead + 1, far_ahead + 2)
    guard.close()


def test_flushed_it_forgot_and_that_is_no_fault(own: OwnRedis) -> None:
    guard = RedisGuard(own.url)
    guard.set_if_absent("k", "v", 600)
    lease = guard.acquire("l", "a", 600)
    assert lease is not None
    with own.client() as client:
        client.flushall()
        client.script_flush()
    assert guard.get("k") is None
    assert guard.set_if_absent("k", "w", 600) is None
    assert guard.renew(lease, 600) is None
    guard.release(lease)
    assert guard.acquire("l", "b", 600) is not None
    guard.close()


def test_opening_never_needs_the_server_and_one_that_is_not_there_is_one_line(prefix: str) -> None:
    port = free_port()
    guard = RedisGuard(f"redis://:{PASSWORD}@127.0.0.1:{port}/0", prefix)
    calls = [
        lambda: guard.get("k"),
        lambda: guard.get_many(["k"]),
        lambda: guard.set_if_absent("k", "v", 1),
        lambda: guard.set_many_if_absent({"k": "v"}, 1),
        lambda: guard.delete("k"),
        lambda: guard.acquire("l", "a", 1),
    ]
    began = time.monotonic()
    for call in calls:
        with pytest.raises(GuardUnavailable) as raised:
            call()
        assert_one_line(raised.value, f"127.0.0.1:{port}")
    assert time.monotonic() - began < patient(10)
    assert guard.expire() == 0
    guard.close()


def test_a_server_that_does_not_answer_costs_half_a_second_and_no_more(own: OwnRedis) -> None:
    guard = RedisGuard(own.url)
    assert guard.get("k") is None
    own.pause()
    began = time.monotonic()
    with pytest.raises(GuardUnavailable, match="did not answer within") as raised:
        guard.get("k")
    # One wait, and not six of them; the rest is room for a busy machine.
    assert time.monotonic() - began < patient(6 * TIMEOUT_S)
    assert_one_line(raised.value, f":{own.port}")
    own.resume()
    assert guard.get("k") is None
    guard.close()


@pytest.mark.parametrize(
    ("url", "cause"),
    [
        ("redis://:wrong-one@127.0.0.1:{port}/0", "refuses the user or password"),
        ("redis://nobody:wrong-one@127.0.0.1:{port}/0", "refuses the user or password"),
        ("redis://127.0.0.1:{port}/0", "refuses the user or password"),
        ("redis://:" + PASSWORD + "@127.0.0.1:{port}/99", "out of range"),
    ],
)
def test_a_wrong_password_user_or_database_is_one_line(server: OwnRedis, url: str, cause: str) -> None:
    guard = RedisGuard(url.format(port=server.port))
    with pytest.raises(GuardUnavailable, match=cause) as raised:
        guard.get("k")
    assert_one_line(raised.value, f"127.0.0.1:{server.port}")
    assert "wrong-one" not in str(raised.value)
    guard.close()


@pytest.mark.parametrize(
    "url",
    [
        f"localhost:6379/{PASSWORD}",
        f"redis://:{PASSWORD}/more@localhost:6379",
        f"http://:{PASSWORD}@localhost",
        f"redis://localhost?password={PASSWORD}&db=x",
        "",
    ],
)
def test_what_is_no_url_of_a_redis_is_one_line_and_shows_nothing_of_it(url: str) -> None:
    with pytest.raises(GuardUnavailable, match="GEO_ASSETS_REDIS_URL is no URL of a Redis server") as raised:
        RedisGuard(url)
    assert PASSWORD not in str(raised.value)
    assert raised.value.__cause__ is None
    assert raised.value.__suppress_context__


def test_a_host_that_does_not_exist_is_one_line() -> None:
    guard = RedisGuard(f"redis://:{PASSWORD}@no-such-host.invalid:6379/0")
    with pytest.raises(GuardUnavailable) as raised:
        guard.get("k")
    assert_one_line(raised.value, "no-such-host.invalid:6379")
    guard.close()


def test_a_replica_is_read_and_not_written(own: OwnRedis, prefix: str) -> None:
    with own.client() as client:
        client.replicaof("127.0.0.1", str(free_port()))
    guard = RedisGuard(own.url, prefix)
    assert guard.get("k") is None
    for call in (lambda: guard.set_if_absent("k", "v", 60), lambda: guard.acquire("l", "a", 60)):
        with pytest.raises(GuardUnavailable, match="read-only") as raised:
            call()
        assert_one_line(raised.value, f":{own.port}")
    guard.close()


def test_a_server_out_of_memory_is_one_line_and_still_reads(own: OwnRedis) -> None:
    guard = RedisGuard(own.url)
    guard.set_if_absent("k", "v", 600)
    with own.client() as client:
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", "1")
    for call in (
        lambda: guard.set_if_absent("new", "v", 60),
        lambda: guard.set_many_if_absent({"new": "v"}, 60),
        lambda: guard.acquire("l", "a", 60),
    ):
        with pytest.raises(GuardUnavailable, match="out of memory under maxmemory-policy noeviction") as raised:
            call()
        assert_one_line(raised.value, f":{own.port}")
    assert guard.get("k") == "v"
    guard.close()


def test_a_server_that_loads_its_data_is_one_line(tmp_path: Path) -> None:
    with own_redis(tmp_path / "redis", "--enable-debug-command", "yes") as own:
        with own.client() as client:
            for n in range(100):
                client.set(f"filler-{n}", "x" * 1_000)
            # Microseconds that each key takes to load, and how often it sees to its clients meanwhile.
            client.config_set("key-load-delay", 20_000)
            client.config_set("rdbcompression", "no")
            client.config_set("loading-process-events-interval-bytes", 1_024)
        loader = own.client()
        loading = threading.Thread(target=loader.execute_command, args=("DEBUG", "RELOAD"))
        loading.start()
        guard = RedisGuard(own.url)
        with pytest.raises(GuardUnavailable, match="loading its data") as raised:
            while loading.is_alive():
                guard.get("k")
        assert_one_line(raised.value, f":{own.port}")
        loading.join()
        assert guard.get("k") is None
        guard.close()


@pytest.mark.parametrize("wrong", ["of another type", "not text"])
def test_what_something_else_wrote_under_its_names_never_raises_another_error(
    server: OwnRedis, guard: Guard, prefix: str, wrong: str
) -> None:
    with redis.Redis.from_url(server.url) as client:
        for name in ("key:k", "lease:l"):
            if wrong == "not text":
                client.set(prefix + name, b"\xff\xfe\x00")
            else:
                client.rpush(prefix + name, "x")
        client.set(f"{prefix}token", "many")
    for call in (
        lambda: guard.get("k"),
        lambda: guard.set_if_absent("k", "v", 60),
        lambda: guard.acquire("l", "a", 60),
        lambda: guard.acquire("other", "a", 60),
    ):
        try:
            call()
        except GuardUnavailable as error:
            assert_one_line(error, f":{server.port}")
    assert guard.get_many(["k2"]) == {}


def test_a_closed_guard_is_unavailable(server: OwnRedis) -> None:
    guard = RedisGuard(server.url)
    guard.close()
    with pytest.raises(GuardUnavailable, match="closed"):
        guard.get("k")


def assert_one_line(error: GuardUnavailable, place: str) -> None:
    text = str(error)
    assert "\n" not in text
    assert len(text) < 400
    assert "GEO_ASSETS_REDIS_URL" in text
    assert place in text
    assert PASSWORD not in text
