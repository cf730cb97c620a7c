"""One `geo-assets up` for one production stack: a Postgres session's advisory lock on Dagster's schema.

A starting `up` ends the runs that its killed predecessor left, so two on one storage would end each other's. The lock
belongs to a session and not to a row: it is free as soon as its holder is gone, however it went. It needs a session of
its own: behind pgbouncer in transaction mode GEO_ASSETS_DAGSTER_POSTGRES_URL has to name the server itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg.conninfo import make_conninfo

from geo_assets import dagster_home
from geo_assets.configuration import ConfigurationError
from resources.postgres import conninfo, explained, where

if TYPE_CHECKING:
    from geo_assets.settings import Settings

LOOK_S = 2.0
"""How often the session is looked at. A server that restarts is gone for longer than that, and back within seconds."""

PATIENCE_S = 1.0
"""How long one that starts waits for the lock: the server needs a moment to see that a killed holder is gone."""

# The server notices within half a minute that the machine of a holder is gone; by itself it takes two hours.
_KEEPALIVES = "SET tcp_keepalives_idle = 15; SET tcp_keepalives_interval = 5; SET tcp_keepalives_count = 3"


class AlreadyRunningElsewhere(ConfigurationError):
    """Another `up`, of whatever home or machine, works on this stack."""


class SoleUp:
    """The lock, held from `take` to `release`; a server that was restarted is asked for it again in the background.

    Args:
        settings: The production stack's.
        say: Called with what a person has to know, from the background as well.
        look_s: Seconds between two looks at the session.
    """

    def __init__(self, settings: Settings, say: Callable[[str], None], look_s: float = LOOK_S) -> None:
        self._say, self._look_s = say, look_s
        self._schema = dagster_home.schema(settings)
        url = settings.dagster_postgres_url or settings.postgres_url
        if url is None:
            raise ConfigurationError("Dagster's storage has no Postgres: set GEO_ASSETS_DAGSTER_POSTGRES_URL")
        self._url = url.get_secret_value()
        self._setting = (
            "GEO_ASSETS_DAGSTER_POSTGRES_URL" if settings.dagster_postgres_url else "GEO_ASSETS_POSTGRES_URL"
        )
        digest = hashlib.sha256(f"geo_assets up {self._schema}".encode()).digest()
        self._key = int.from_bytes(digest[:8], "big", signed=True)
        self._session: psycopg.Connection[tuple[Any, ...]] | None = None
        self._ended = threading.Event()
        self._watcher: threading.Thread | None = None

    @property
    def held(self) -> bool:
        """Whether the lock was ours at the last look."""
        return self._session is not None

    def take(self) -> None:
        """Take the lock, and look after it from now on.

        Raises:
            AlreadyRunningElsewhere: Another process has it.
            ConfigurationError: Postgres cannot be reached; the setting is named.
        """
        deadline = time.monotonic() + PATIENCE_S
        while not self._try():
            if time.monotonic() < deadline:
                time.sleep(0.2)
                continue
            raise AlreadyRunningElsewhere(
                f"another `geo-assets up` runs on schema {self._schema} of Postgres at {where(self._url)}: stop it, or "
                "set GEO_ASSETS_POSTGRES_SCHEMA (and topic, key and tile prefixes) for a stack of your own"
            )
        self._watcher = threading.Thread(target=self._watch, name="sole-up", daemon=True)
        self._watcher.start()

    def release(self) -> None:
        """Give the lock back; nothing to do where it was not taken."""
        self._ended.set()
        if self._watcher is not None:
            self._watcher.join(timeout=10)
        self._drop()

    def _try(self) -> bool:
        """Open a session and try to take the lock in it; whether it is ours."""
        with explained(ConfigurationError, self._setting, self._url):
            session = psycopg.connect(
                make_conninfo(conninfo(self._url), application_name=f"geo_assets {self._schema} up"), autocommit=True
            )
            try:
                session.execute(_KEEPALIVES)
                found = session.execute("SELECT pg_try_advisory_lock(%s)", (self._key,)).fetchone()
            except BaseException:
                session.close()
                raise
        if not found or not found[0]:
            session.close()
            return False
        self._session = session
        return True

    def _watch(self) -> None:
        said = ""
        while not self._ended.wait(self._look_s):
            try:
                if self._session is not None:
                    self._session.execute("SELECT 1")
                    continue
                if self._try():
                    text = "Postgres is back, and this stack is held again"
                else:
                    text = (
                        f"ANOTHER `geo-assets up` HAS TAKEN schema {self._schema} while Postgres was away: it "
                        "marks the runs of this one failed. Stop one of them"
                    )
            except (psycopg.Error, ConfigurationError) as fault:
                self._drop()
                text = str(fault) if isinstance(fault, ConfigurationError) else "Postgres ended the session of `up`"
            if text != said:
                self._say(text)
            said = "" if self.held else text

    def _drop(self) -> None:
        if self._session is not None:
            with contextlib.suppress(psycopg.Error):
                self._session.close()
        self._session = None
