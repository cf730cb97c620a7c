"""One Postgres database used by many threads and processes at once: connections, retries, what an error means.

The production adapters share it. What their tables hold and promise stays with them; their versions are in migrations.

Behind pgbouncer: in session mode it needs `ignore_startup_parameters = options`, in transaction mode also
`max_prepared_statements` above 0 (1.21 or newer); in both the role needs the search path, which would come with the
options: `ALTER ROLE … SET search_path = <schema>, public`. Besides that path nothing here is a state of the session.
"""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import psycopg
from psycopg import errors
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg_pool import ConnectionPool, PoolClosed, PoolTimeout, TooManyRequests

T = TypeVar("T")

CONNECT_TIMEOUT_S = 5
"""Of one attempt for one host: a server in the same data centre answers within milliseconds, or not at all."""

CHECKOUT_TIMEOUT_S = 5.0
"""How long a caller waits for a connection: a killed server is back within it when its log is short."""

_ASK_AGAIN_S = 0.25
"""A caller without a connection asks this often for a new one, so that a server that is back is found at once."""

RDS_IAM = "aws-rds-iam"
"""Stands in a URL for the password where each new connection logs in with a token of this process's AWS role."""

AUTH = "GEO_ASSETS_POSTGRES_AUTH"

ATTEMPTS = 8
"""A deadlock has two sides and one of them goes on: eight in a row do not happen by bad luck."""

_CONNECTION = {
    "application_name": "geo_assets",
    "connect_timeout": CONNECT_TIMEOUT_S,
    # After a failover the old primary, or a replica behind the same name, is not written to and never read from.
    "target_session_attrs": "read-write",
    # A host that vanished without a word is noticed after 30 s instead of two hours.
    "keepalives": 1,
    "keepalives_idle": 15,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}

# A client that was frozen in a transaction must not hold the others up for ever; a bulk one takes seconds.
_OPTIONS = "-c lock_timeout=30s -c idle_in_transaction_session_timeout=300s"

# What passes when somebody else acts: the server restarts, a disk is emptied, a lock is let go. The rest is our fault.
_TRANSIENT = (
    psycopg.OperationalError,
    psycopg.InterfaceError,
    PoolTimeout,
    PoolClosed,
    TooManyRequests,
    errors.ReadOnlySqlTransaction,
)
_ATTEMPT = re.compile(r'connection (to server (at|on) "[^"]*"( \([^)]*\))?, port \d+ )?failed: ')
_UNREADABLE = "a Postgres URL that cannot be read"
_POSTGIS = re.compile(r"PostGIS is missing|extension \"?postgis\"?", re.IGNORECASE)
_MISSING = (errors.UndefinedTable, errors.UndefinedColumn, errors.UndefinedFunction, errors.InvalidSchemaName)


class TokenMissing(psycopg.OperationalError):
    """There is no token to log in with: no credentials, or no region."""


class Pool(ConnectionPool[psycopg.Connection[tuple[Any, ...]]]):
    """A ConnectionPool that asks again at once, where psycopg's would back off for as long as the server was away."""

    def getconn(self, timeout: float | None = None) -> psycopg.Connection[tuple[Any, ...]]:
        """A connection that has just been found alive; give it back with `putconn`."""
        deadline = time.monotonic() + (self.timeout if timeout is None else timeout)
        while True:
            left = deadline - time.monotonic()
            try:
                return super().getconn(max(0.001, min(left, _ASK_AGAIN_S)))
            except PoolTimeout:
                if left <= _ASK_AGAIN_S:
                    raise


def conninfo(url: str, schema: str | None = None) -> str:
    """The URL with this project's connection parameters; what the URL itself says goes first.

    Args:
        url: `postgresql://user:password@host:port/database?...`.
        schema: First in the search path, before `public`, where an extension's functions are.

    Raises:
        psycopg.ProgrammingError: It is no such URL.
    """
    given = conninfo_to_dict(url)
    wanted = {name: value for name, value in _CONNECTION.items() if name not in given} | _password(given)
    if schema is not None:
        # The server's list of sessions then shows whose they are, where several maps share it.
        if "application_name" not in given:
            wanted["application_name"] = f"geo_assets {schema}"
        # The last one of a name counts: what the URL says goes before our limits, and our path before the URL's.
        wanted["options"] = f"{_OPTIONS} {given.get('options') or ''} -c search_path={schema},public"
    return make_conninfo(url, **wanted)


def signed(url: str) -> str:
    """The URL with a token of now in the place of `aws-rds-iam`; any other as it is.

    Raises:
        TokenMissing: There is none.
    """
    password = _password(conninfo_to_dict(url))
    return make_conninfo(url, **password) if password else url


def token_for(given: Mapping[str, Any]) -> str:
    """A password for one new connection, of libpq's parameters. Raises TokenMissing."""
    from resources.aws.tokens import TokenError

    host, port, user = (str(given.get(name) or "") for name in ("host", "port", "user"))
    try:
        if not host or not user or "," in host:
            raise TokenError("the URL must name one host and a user for it")
        return token_provider(host, int(port or 5432), user)
    except TokenError as fault:
        raise TokenMissing(f"no token to log in with ({AUTH}=aws-iam): {fault}") from None


def _password(given: Mapping[str, Any]) -> dict[str, str]:
    return {"password": token_for(given)} if given.get("password") == RDS_IAM else {}


def _rds_token(host: str, port: int, user: str) -> str:
    from resources.aws.tokens import rds_token

    region, profile = os.environ.get("GEO_ASSETS_AWS_REGION"), os.environ.get("GEO_ASSETS_S3_PROFILE")
    return rds_token(host, port, user, region or None, profile or None)


token_provider: Callable[[str, int, str], str] = _rds_token
"""Makes a password of host, port and user for one new connection, wherever a URL's password is `aws-rds-iam`."""


def open_pool(url: str, schema: str, size: int, *, autocommit: bool = False) -> Pool:
    """Connections to one schema of a database, kept and shared by threads; not to be used after a fork.

    A first connection is made at once and in the foreground, so that a wrong password is told as one.

    Args:
        url: `postgresql://user:password@host:port/database`.
        schema: First in the search path, before `public`.
        size: Most connections at a time. They are opened as they are needed and closed after ten idle minutes.
        autocommit: Each statement is a transaction unless it stands in `connection.transaction()`; saves two round
            trips for a single one. Without, the end of `with pool.connection()` commits.

    Raises:
        psycopg.Error: There is no such server, database or user; see `explained`.
    """
    psycopg.connect(conninfo(url, schema)).close()
    pool = Pool(
        # Asked for each new connection: a token is good for minutes, and a pool for months.
        lambda: conninfo(url, schema),
        kwargs={"autocommit": autocommit},
        min_size=0,
        max_size=size,
        timeout=CHECKOUT_TIMEOUT_S,
        # One attempt for each time that somebody asks; `Pool.getconn` asks again.
        reconnect_timeout=0,
        check=ConnectionPool.check_connection,
        num_workers=1,
        name=f"geo_assets {schema}",
        open=False,
    )
    pool.open()
    return pool


def where(url: str) -> str:
    """Host, port, database and user of a URL, for a message; never the password."""
    try:
        given = conninfo_to_dict(url)
    except (psycopg.Error, ValueError):
        return _UNREADABLE
    host = str(given.get("host") or given.get("hostaddr") or "localhost")
    port, user = str(given.get("port") or 5432), str(given.get("user") or "")
    database = str(given.get("dbname") or user)
    # A password with an unescaped `/` or `@` reaches into the parts around it.
    parts_are_odd = "@" in host or any(set(part) & set("@:/?# ") for part in (user, database))
    if parts_are_odd or not all(one.isdigit() for one in port.split(",") if one):
        return _UNREADABLE
    return f"{host}:{port}/{database}" + (f" as {user}" if user else "")


def postgis_lacking(connection: psycopg.Connection[Any]) -> str | None:
    """What a database lacks of PostGIS and what mends it; None where the extension is there."""
    row = connection.execute(
        """SELECT EXISTS (SELECT FROM pg_extension WHERE extname = 'postgis'),
                  EXISTS (SELECT FROM pg_available_extensions WHERE name = 'postgis')"""
    ).fetchone()
    made, available = row or (False, False)
    if made:
        return None
    if available:
        return (
            "PostGIS is missing in this database: geo-assets migrate makes it where its user may, "
            "else run CREATE EXTENSION postgis as a superuser"
        )
    package = f"postgresql-{connection.info.server_version // 10_000}-postgis-3"
    return (
        f"PostGIS is not installed on this server: install its package ({package} on Debian), "
        "then run CREATE EXTENSION postgis as a superuser"
    )


@contextmanager
def explained(unavailable: type[Exception], setting: str, url: str) -> Iterator[None]:
    """Turn what psycopg raises for a server that is away, full or locked into the port's error, in one line.

    Args:
        unavailable: The port's error for what may pass.
        setting: The setting that names the server, for the message.
        url: The server; its host, port, database and user are in the message, its password never.
    """
    try:
        yield
    except _TRANSIENT as error:
        if (place := where(url)) == _UNREADABLE:
            # What psycopg quotes of it may be a part of the password.
            raise unavailable(_no_url(setting)) from None
        raise unavailable(f"Postgres at {place} ({setting}): {_reason(error, url)}") from None
    except _MISSING as error:
        raise unavailable(
            f"Postgres at {where(url)} ({setting}): {_one_line(error)}: run `geo-assets migrate`"
        ) from error
    except (errors.FeatureNotSupported, errors.InsufficientPrivilege) as error:
        said = _one_line(error)
        if _POSTGIS.search(said):
            mends = "install its package on the server and run CREATE EXTENSION postgis as a superuser"
            cause = said if said.startswith("PostGIS is missing") else f"PostGIS is missing ({said}): {mends}"
            raise unavailable(f"Postgres at {where(url)} ({setting}): {cause}") from error
        if isinstance(error, errors.FeatureNotSupported):
            raise
        raise unavailable(f"Postgres at {where(url)} ({setting}): {said}: grant it to the user") from error
    except psycopg.ProgrammingError as error:
        if error.sqlstate is not None:
            raise
        # Of a URL that cannot be parsed; psycopg's own message shows it whole.
        raise unavailable(_no_url(setting)) from None
    except psycopg.DatabaseError as error:
        # Of no class of its own and without a state: libpq lost the connection in the middle of an answer.
        if type(error) is not psycopg.DatabaseError or error.sqlstate is not None:
            raise
        raise unavailable(f"Postgres at {where(url)} ({setting}): {_one_line(error)}") from None


def _no_url(setting: str) -> str:
    return f"{setting} is no postgresql:// URL: expected is postgresql://user:password@host:5432/database"


@contextmanager
def repeatable(connection: psycopg.Connection[Any]) -> Iterator[None]:
    """A transaction whose commit does not wait for the server's disk, on a connection in autocommit.

    For what is done again when a crash of the server takes it back: everybody sees it at once, and the next commit that
    does wait makes all before it durable.
    """
    connection.execute("BEGIN; SET LOCAL synchronous_commit TO off")
    try:
        yield
    except BaseException:
        with suppress(psycopg.Error):
            connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


def with_retries(work: Callable[[], T]) -> T:
    """Do a whole transaction, and again when the server chose it to end a deadlock or a serialization conflict.

    Args:
        work: Opens its transaction itself, and bears being done again.
    """
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return work()
        except (errors.SerializationFailure, errors.DeadlockDetected):
            if attempt == ATTEMPTS:
                raise
            time.sleep(random.uniform(0, 0.005 * 2**attempt))
    raise AssertionError("unreachable")


def _reason(error: Exception, url: str) -> str:
    if isinstance(error, PoolTimeout):
        # The pool does not say why it had none; asking once more does.
        try:
            psycopg.connect(conninfo(url)).close()
        except psycopg.Error as found:
            return _one_line(found)
        return f"every connection of this process was in use for {CHECKOUT_TIMEOUT_S:g} s"
    return _one_line(error)


def _one_line(error: Exception) -> str:
    primary = error.diag.message_primary if isinstance(error, psycopg.Error) else None
    text = " ".join((primary or str(error) or type(error).__name__).split())
    # libpq names the server in front of each attempt; the message around this one does so already.
    return _ATTEMPT.sub("", text).replace("FATAL: ", "").strip()[:300]
