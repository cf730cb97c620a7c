"""Postgres with TLS and tokens in the place of a password, as RDS has them: a server of its own that takes no other."""

from __future__ import annotations

import secrets
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from dagster._core.storage.dagster_run import DagsterRun

from geo_assets import references
from geo_assets.catalog_storage_postgres import KeptPostgresRunStorage
from geo_assets_tests.needs import missing
from resources import postgres
from resources.ledger.postgres import PostgresLedger
from resources.ledger.postgres_schema import COMPONENT, MIGRATIONS
from resources.ledger.protocol import LedgerUnavailable
from resources.migrations import migrate
from resources.postgres_dump import dump
from scripts.local_services.faults import MissingProgram
from scripts.local_services.postgres import Postgres
from scripts.local_services.service import CHECKOUT, HOST

pytestmark = pytest.mark.service("postgres")


class TlsPostgres(Postgres):
    """It takes connections over TLS alone, with a certificate that signed itself."""

    def prepare(self, state: dict[str, Any]) -> None:
        super().prepare(state)
        data = self._data()
        made = subprocess.run(
            [
                *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"),
                *("-addext", f"subjectAltName=IP:{HOST},DNS:localhost"),
                *("-keyout", str(data / "server.key"), "-out", str(data / "server.crt")),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        assert made.returncode == 0, made.stderr
        for name in ("server.key", "server.crt"):
            (data / name).chmod(0o600)
            self._own(data / name)
        shutil.copy(data / "server.crt", self.folder / "ca.pem")
        (data / "pg_hba.conf").write_text("hostssl all all 127.0.0.1/32 scram-sha-256\n")

    def command(self, state: dict[str, Any]) -> list[str]:
        return [*super().command(state), "-c", "ssl=on", "-c", "max_connections=40", "-c", "shared_buffers=16MB"]


class Room:
    """The server, whose role's password is each time the token that is good now."""

    def __init__(self, server: TlsPostgres) -> None:
        state = server.state()
        assert state is not None
        self.port = int(state["ports"]["postgres"])
        self.ca = server.folder / "ca.pem"
        self.admin = server.settings(state)["TEST_POSTGRES_ADMIN_URL"]
        self.token = ""
        self.asked: list[tuple[str, int, str]] = []
        self.turn()

    def turn(self) -> None:
        """Another token is good from now on, and no older one."""
        self.token = secrets.token_hex(30)
        with psycopg.connect(self.admin, autocommit=True) as db:
            db.execute(f"ALTER ROLE geo_assets PASSWORD '{self.token}'")  # pyright: ignore[reportArgumentType]

    def end_sessions(self) -> None:
        """Every session of the role ends, as in a failover."""
        with psycopg.connect(self.admin, autocommit=True) as db:
            db.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'geo_assets'")

    def provider(self, host: str, port: int, user: str) -> str:
        self.asked.append((host, port, user))
        return self.token

    def url(self, ca: Path | None = None) -> str:
        environ = {"GEO_ASSETS_POSTGRES_AUTH": "aws-iam", "GEO_ASSETS_POSTGRES_SSL_CA": str(ca or self.ca)}
        return references.of_postgres(f"postgresql://geo_assets@localhost:{self.port}/geo_assets", environ)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsPostgres]:
    server = TlsPostgres(tmp_path_factory.mktemp("own") / "postgres", CHECKOUT / ".services" / "downloads")
    try:
        server.start({})
    except MissingProgram as fault:
        missing(str(fault))
    yield server
    server.remove()


@pytest.fixture
def room(server: TlsPostgres, monkeypatch: pytest.MonkeyPatch) -> Room:
    room = Room(server)
    monkeypatch.setattr(postgres, "token_provider", room.provider)
    return room


def test_each_new_connection_of_a_pool_has_a_token_of_its_own_over_tls(room: Room, tmp_path: Path) -> None:
    url = room.url()
    migrate(url, "geo_assets", COMPONENT, MIGRATIONS)
    ledger = PostgresLedger(url, schema="geo_assets", pool=2)
    assert ledger.counts().tiles == 0

    room.turn()
    room.end_sessions()
    before = len(room.asked)
    assert ledger.counts().tiles == 0
    assert len(room.asked) > before
    assert set(room.asked) == {("localhost", room.port, "geo_assets")}
    ledger.close()

    pool = postgres.open_pool(url, "geo_assets", 1)
    with pool.connection() as db:
        row = db.execute("SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()").fetchone()
    pool.close()
    assert row == (True,)

    dump(url, "geo_assets", tmp_path / "dump")
    assert (tmp_path / "dump").stat().st_size > 0


def test_dagster_s_storage_has_a_token_for_each_new_connection(room: Room) -> None:
    storage = KeptPostgresRunStorage.from_config_value(None, {"postgres_url": room.url()})
    storage.add_run(DagsterRun(job_name="a", run_id="11111111-1111-1111-1111-111111111111"))

    room.turn()
    room.end_sessions()
    before = len(room.asked)
    assert storage.get_runs_count() == 1
    assert len(room.asked) > before
    storage.dispose()


def test_a_token_that_is_no_longer_good_is_refused_and_never_shown(room: Room) -> None:
    stale = room.token
    room.turn()
    room.token = stale
    with (
        pytest.raises(LedgerUnavailable, match="password authentication failed") as raised,
        postgres.explained(LedgerUnavailable, "GEO_ASSETS_POSTGRES_URL", room.url()),
    ):
        psycopg.connect(postgres.conninfo(room.url())).close()
    assert stale not in str(raised.value)


def test_a_provider_that_fails_is_one_error_that_names_the_setting(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    from resources.aws.tokens import TokenError

    def none(*_: object) -> str:
        raise TokenError("no AWS credentials: nowhere")

    monkeypatch.setattr(postgres, "token_provider", none)
    with pytest.raises(LedgerUnavailable, match="no AWS credentials: nowhere") as raised:
        PostgresLedger(room.url(), schema="geo_assets", pool=1)
    assert "GEO_ASSETS_POSTGRES_AUTH=aws-iam" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_server_that_another_authority_signed_is_refused(room: Room, tmp_path: Path) -> None:
    other = tmp_path / "other.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=other"),
            *("-keyout", str(tmp_path / "key"), "-out", str(other)),
        ],
        capture_output=True,
        check=True,
    )
    with pytest.raises(LedgerUnavailable, match="certificate verify failed"):
        PostgresLedger(room.url(other), schema="geo_assets", pool=1)
    with pytest.raises(LedgerUnavailable, match="does not exist"):
        PostgresLedger(room.url(tmp_path / "none.pem"), schema="geo_assets", pool=1)


def test_rds_tokens_are_signed_for_one_host_port_and_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from resources.aws import tokens

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-to-be-shown")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    for cached in (tokens._credentials, tokens._rds):  # pyright: ignore[reportPrivateUsage]
        cached.cache_clear()
    found = tokens.rds_token("maps.abc.eu-west-1.rds.amazonaws.com", 5432, "geo_assets", "eu-west-1")
    for cached in (tokens._credentials, tokens._rds):  # pyright: ignore[reportPrivateUsage]
        cached.cache_clear()
    assert found.startswith("maps.abc.eu-west-1.rds.amazonaws.com:5432/?Action=connect&DBUser=geo_assets&")
    assert "not-to-be-shown" not in found
