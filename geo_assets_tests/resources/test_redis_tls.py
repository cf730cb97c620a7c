"""The guard over TLS, as ElastiCache has it: `rediss://`, a user with a password, and an authority by its file."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from geo_assets_tests.own_redis import PASSWORD, OwnRedis, free_port, own_redis
from resources.guard.protocol import GuardUnavailable
from resources.guard.redis import RedisGuard


def certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that signed itself, and its key."""
    made, key = folder / f"{name}.pem", folder / f"{name}.key"
    done = subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name}"),
            *("-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(made)),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return made, key


class Server:
    """A server with a TLS port, and its certificate."""

    def __init__(self, redis: OwnRedis, port: int, ca: Path, other: Path) -> None:
        self.redis, self.ca, self.other = redis, ca, other
        self.url = f"rediss://:{PASSWORD}@127.0.0.1:{port}/0"
        self.of_user = f"rediss://maps:{PASSWORD}@127.0.0.1:{port}/0"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("tls")
    ca, key = certificate(folder, "server")
    other, _ = certificate(folder, "other")
    port = free_port()
    tls = ("--tls-port", str(port), "--tls-cert-file", str(ca), "--tls-key-file", str(key), "--tls-auth-clients", "no")
    with own_redis(folder / "data", *tls) as redis:
        with redis.client() as client:
            client.execute_command("ACL", "SETUSER", "maps", "on", f">{PASSWORD}", "~geo_assets:*", "+@all")
        yield Server(redis, port, ca, other)


def test_a_guard_speaks_tls_with_the_authority_s_file(server: Server) -> None:
    for url in (server.url, server.of_user):
        guard = RedisGuard(url, ssl_ca=server.ca)
        guard.delete("k")
        assert guard.set_if_absent("k", "v", 60) is None
        assert guard.get_many(["k"]) == {"k": "v"}
        assert guard.acquire("l", url[:14], 0.01) is not None
        guard.close()


@pytest.mark.parametrize("which", ["another authority", "the system's"])
def test_a_server_that_another_authority_signed_is_refused_in_a_line_that_names_the_setting(
    server: Server, which: str
) -> None:
    guard = RedisGuard(server.url, ssl_ca=server.other if which == "another authority" else None)
    with pytest.raises(GuardUnavailable, match="certificate is not to be trusted") as raised:
        guard.get("k")
    guard.close()
    text = str(raised.value)
    assert "GEO_ASSETS_REDIS_SSL_CA" in text
    assert "\n" not in text
    assert PASSWORD not in text


def test_a_server_without_tls_is_one_line(server: Server) -> None:
    guard = RedisGuard(f"rediss://:{PASSWORD}@127.0.0.1:{server.redis.port}/0", ssl_ca=server.ca)
    with pytest.raises(GuardUnavailable) as raised:
        guard.get("k")
    guard.close()
    assert "GEO_ASSETS_REDIS_URL" in str(raised.value)
    assert PASSWORD not in str(raised.value)


def test_a_wrong_user_over_tls_is_told_as_one(server: Server) -> None:
    guard = RedisGuard(server.url.replace(PASSWORD, "wrong-one"), ssl_ca=server.ca)
    with pytest.raises(GuardUnavailable, match="refuses the user or password"):
        guard.get("k")
    guard.close()


def test_an_authority_without_tls_or_without_its_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(GuardUnavailable, match="must begin with rediss://"):
        RedisGuard("redis://localhost:6379/0", ssl_ca=tmp_path / "ca.pem")
    with pytest.raises(GuardUnavailable, match=r"GEO_ASSETS_REDIS_SSL_CA=.*is no file that can be read"):
        RedisGuard("rediss://localhost:6379/0", ssl_ca=tmp_path / "ca.pem")
