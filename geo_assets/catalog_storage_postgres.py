"""Dagster's storages on Postgres with connections that are kept, and events in cheaper batches.

Named in deploy/dagster.yaml. Nothing here knows about tiles; what is written is exactly what Dagster's storages write.
Dagster's open a connection for every statement, which costs more than the statement: its daemon makes dozens a second.
And they serialize a batch's events one by one with a general serializer, which costs more than storing them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from dagster._core.events.log import EventLogEntry
from dagster._core.storage.event_log.schema import SqlEventLogStorageTable
from dagster._serdes import ConfigurableClassData
from dagster_postgres.auth import PgTokenProvider
from dagster_postgres.event_log import PostgresEventLogStorage
from dagster_postgres.run_storage import PostgresRunStorage
from dagster_postgres.schedule_storage import PostgresScheduleStorage
from dagster_postgres.utils import (
    create_pg_engine,
    get_token_provider_from_config,
    pg_url_from_config,
    set_pg_statement_timeout,
)
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy import Engine, event
from sqlalchemy.exc import DisconnectionError

from geo_assets import references
from geo_assets.catalog_storage import event_row, has_tags, newest_of_each, serialized, split_batch
from resources.postgres import RDS_IAM, token_for

KEPT = 1
"""Connections that an instance keeps: a run writes from one thread, and the server has but a hundred for everybody."""

MOST = 20
"""Connections beyond those, closed when they are given back: the daemon's threads at their busiest."""

RECYCLE_S = 300
"""Age at which a kept connection is replaced: below the idle limits of common proxies and load balancers."""


class RdsTokens(PgTokenProvider):
    """A token of this process's AWS role for each new connection, where the URL's password is `aws-rds-iam`.

    Signing one takes under a millisecond: none is kept, so that none has run out when it is used.
    """

    def __init__(self, url: str) -> None:
        super().__init__()
        self._given = conninfo_to_dict(url)

    def get_token(self) -> str:
        """A fresh one. Raises TokenMissing."""
        return token_for(self._given)

    def _fetch_token(self) -> tuple[str, float]:
        return token_for(self._given), 0.0


def is_signed(url: str) -> bool:
    """Whether a URL's password stands for tokens."""
    return conninfo_to_dict(url).get("password") == RDS_IAM


class KeptConnections:
    """Beside one of Dagster's storages on Postgres: the same storage, over connections that are kept."""

    postgres_url: str
    _token_provider: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._engine = self._keeping(RECYCLE_S, MOST)

    def _keeping(self, recycle_s: int, most: int) -> Engine:
        engine = create_pg_engine(
            self.postgres_url,
            self._token_provider,
            isolation_level="AUTOCOMMIT",
            pool_size=KEPT,
            max_overflow=most,
            pool_recycle=recycle_s,
            # A server that was restarted costs one more round trip, not an error.
            pool_pre_ping=True,
        )
        event.listen(engine, "connect", _note_process)
        event.listen(engine, "checkout", _refuse_after_fork)
        return engine

    def optimize_for_webserver(self, statement_timeout: int, pool_recycle: int, max_overflow: int) -> None:
        """As Dagster's, which keeps a connection as well, but after a restart of the server shows the UI an error."""
        self._engine.dispose()
        self._engine = self._keeping(pool_recycle, max_overflow)
        event.listen(self._engine, "connect", lambda made, _: set_pg_statement_timeout(made, statement_timeout))

    @classmethod
    def from_config_value(cls, inst_data: ConfigurableClassData | None, config_value: Mapping[str, Any]) -> Any:
        """The storage of a dagster.yaml, with the configuration of Dagster's own.

        The URL may be a reference to a secret; GEO_ASSETS_POSTGRES_SSL_CA and GEO_ASSETS_POSTGRES_AUTH apply to it.
        """
        url = references.of_postgres(pg_url_from_config(config_value))
        return cls(
            inst_data=inst_data,
            postgres_url=url,
            should_autocreate_tables=config_value.get("should_autocreate_tables", True),
            token_provider=RdsTokens(url) if is_signed(url) else get_token_provider_from_config(config_value),
        )

    def dispose(self) -> None:
        """Close what was kept."""
        super().dispose()  # type: ignore[misc]
        self._engine.dispose()


class KeptPostgresRunStorage(KeptConnections, PostgresRunStorage):  # pyright: ignore[reportIncompatibleMethodOverride]
    """`PostgresRunStorage` over connections that are kept."""


class KeptPostgresScheduleStorage(KeptConnections, PostgresScheduleStorage):  # pyright: ignore[reportIncompatibleMethodOverride]
    """`PostgresScheduleStorage` over connections that are kept."""


class BatchingPostgresEventLogStorage(KeptConnections, PostgresEventLogStorage):  # pyright: ignore[reportIncompatibleMethodOverride]
    """`PostgresEventLogStorage` whose `store_event_batch` is one transaction, over connections that are kept."""

    def store_event_batch(self, events: Sequence[EventLogEntry]) -> None:
        """Store events of assets in one transaction: all of them are in the catalog, or none.

        Args:
            events: Materializations, observations, their plans and planned checks, of any number of runs.

        Raises:
            NotWritableInBatchError: An event of another kind; nothing was stored.
        """
        of_assets, singles = split_batch(events)
        if of_assets:
            rows = [
                event_row(one, text, self._event_insert_timestamp(one))
                for one, text in zip(of_assets, serialized(of_assets), strict=True)
            ]
            insert = SqlEventLogStorageTable.insert().returning(
                SqlEventLogStorageTable.c.id, sort_by_parameter_order=True
            )
            with self.index_transaction() as conn:
                ids = [int(row[0]) for row in conn.execute(insert, rows)]
                tagged = [(one, event_id) for one, event_id in zip(of_assets, ids, strict=True) if has_tags(one)]
                self._store_asset_event_tags(conn, [one for one, _ in tagged], [event_id for _, event_id in tagged])
                # The asset's row last: it is locked until the transaction ends, and every other batch needs it.
                for one, event_id in newest_of_each(zip(of_assets, rows, strict=True), ids):
                    self._store_asset_event(conn, one, event_id)
        for one in singles:
            self.store_event(one)


def _note_process(_: Any, record: Any) -> None:
    record.info["pid"] = os.getpid()


def _refuse_after_fork(_: Any, record: Any, fairy: Any) -> None:
    # A connection belongs to the process that opened it: a forked child opens its own, and leaves the parent's alone.
    if record.info["pid"] != os.getpid():
        record.dbapi_connection = fairy.dbapi_connection = None
        raise DisconnectionError("the connection belongs to the process that was forked")
