"""Dagster's event storage on SQLite, with the one thing it lacks: many events in one transaction a database.

Named in dagster.yaml. Nothing here knows about tiles; what is written is exactly what Dagster's own storage writes.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import sqlalchemy as db
from dagster import (
    DagsterEventType,
    FloatMetadataValue,
    IntMetadataValue,
    TextMetadataValue,
    TimestampMetadataValue,
    UrlMetadataValue,
)
from dagster._core.events import (
    ASSET_EVENTS,
    BATCH_WRITABLE_EVENTS,
    AssetObservationData,
    StepMaterializationData,
)
from dagster._core.events.log import EventLogEntry
from dagster._core.storage.event_log import SqliteEventLogStorage
from dagster._core.storage.event_log.schema import SqlEventLogStorageTable
from dagster._core.storage.sqlite import SQLITE_BUSY_TIMEOUT_SECONDS
from dagster._serdes import ConfigurableClassData, serialize_value
from sqlalchemy.engine import Connection, Engine

EVENTS_FOLDER = "events"
"""Under `base_dir`. Dagster takes every `*.db` beside its event index for a run's, so runs.db must not lie there."""


INCREMENTAL = 2
"""SQLite's `auto_vacuum` by which a file can give free pages back to the disk, a few at a time."""


_PLAIN_METADATA: dict[type, tuple[str, str]] = {
    TextMetadataValue: ("TextMetadataEntryData", "text"),
    UrlMetadataValue: ("UrlMetadataEntryData", "url"),
    IntMetadataValue: ("IntMetadataEntryData", "value"),
    FloatMetadataValue: ("FloatMetadataEntryData", "value"),
    TimestampMetadataValue: ("TimestampMetadataValue", "value"),
}
"""Metadata of one plain value: its class, and the name and field under which Dagster writes it."""


_WRITABLE = {kind.value for kind in BATCH_WRITABLE_EVENTS}
_OF_ASSETS = {kind.value for kind in ASSET_EVENTS}


class NotWritableInBatchError(ValueError):
    """An event of a kind that Dagster never sends in batches."""


class BatchingSqliteEventLogStorage(SqliteEventLogStorage):
    """`SqliteEventLogStorage` whose `store_event_batch` costs two transactions a run, not two an event.

    A run's own database is written first and the index, which every asset query reads, last: when the process dies
    in between, the catalog knows nothing of the batch, and whoever owes it stores it again.
    """

    @classmethod
    def from_config_value(  # type: ignore[override]
        cls, inst_data: ConfigurableClassData | None, config_value: Mapping[str, Any]
    ) -> BatchingSqliteEventLogStorage:
        """The storage of a dagster.yaml: `base_dir` may be the folder of the other two storages."""
        return cls(base_dir=os.path.join(config_value["base_dir"], EVENTS_FOLDER), inst_data=inst_data)

    def _initdb(self, engine: Engine, for_index_shard: bool = False) -> None:
        # Before the first table is made, or never: afterwards only writing the whole file anew would change it.
        path = engine.url.database
        if path and not (os.path.exists(path) and os.path.getsize(path)):
            with contextlib.closing(sqlite3.connect(path, timeout=SQLITE_BUSY_TIMEOUT_SECONDS)) as connection:
                connection.execute(f"PRAGMA auto_vacuum = {INCREMENTAL}")
                connection.execute("VACUUM")
        super()._initdb(engine, for_index_shard)

    @contextmanager
    def _connect(self, shard: str) -> Iterator[Connection]:
        # Retention deletes the databases of old runs, also of those that this process has looked at before.
        if shard in self._initialized_dbs and not os.path.exists(self.path_for_shard(shard)):
            self._initialized_dbs.discard(shard)
        with super()._connect(shard) as connection:
            yield connection

    def store_event_batch(self, events: Sequence[EventLogEntry]) -> None:
        """Store events of assets in one transaction for each run's database and one for the index.

        Args:
            events: Materializations, observations, their plans and planned checks, of any number of runs.

        Raises:
            NotWritableInBatchError: An event of another kind; nothing was stored.
        """
        of_assets, singles = split_batch(events)
        by_run: dict[str, list[EventLogEntry]] = defaultdict(list)
        for event in of_assets:
            by_run[event.run_id].append(event)
        stored: list[tuple[EventLogEntry, dict[str, Any]]] = []
        for run_id, of_run in by_run.items():
            rows = [
                event_row(event, text, self._event_insert_timestamp(event))
                for event, text in zip(of_run, serialized(of_run), strict=True)
            ]
            with self.run_connection(run_id) as conn:
                conn.execute(SqlEventLogStorageTable.insert(), rows)
            stored.extend(zip(of_run, rows, strict=True))
        if stored:
            with self.index_connection() as conn:
                self._store_in_index(conn, stored)
        for event in singles:
            self.store_event(event)

    def _store_in_index(self, conn: Connection, stored: Sequence[tuple[EventLogEntry, dict[str, Any]]]) -> None:
        conn.execute(SqlEventLogStorageTable.insert(), [row for _, row in stored])
        # The first insert took the write lock, so the ids of this transaction are consecutive (rowid = max + 1).
        last_id = conn.execute(db.select(db.func.max(SqlEventLogStorageTable.c.id))).scalar_one()
        ids = range(last_id - len(stored) + 1, last_id + 1)
        tagged = [(event, event_id) for (event, _), event_id in zip(stored, ids, strict=True) if has_tags(event)]
        self._store_asset_event_tags(conn, [event for event, _ in tagged], [event_id for _, event_id in tagged])
        for event, event_id in newest_of_each(stored, ids):
            self._store_asset_event(conn, event, event_id)


def split_batch(events: Sequence[EventLogEntry]) -> tuple[list[EventLogEntry], list[EventLogEntry]]:
    """Events of assets, which go to the catalog together, and the others, which are stored one by one.

    Raises:
        NotWritableInBatchError: An event of a kind that Dagster never batches.
    """
    # By name: Dagster's properties look each kind up anew, and a batch asks a thousand times.
    names = {event.get_dagster_event().event_type_value for event in events} - _WRITABLE
    if names:
        raise NotWritableInBatchError(f"event types {sorted(names)} cannot be written in a batch")
    of_assets: list[EventLogEntry] = []
    singles: list[EventLogEntry] = []
    for event in events:
        dagster_event = event.get_dagster_event()
        kind = dagster_event.event_type_value
        if kind == DagsterEventType.ASSET_FAILED_TO_MATERIALIZE.value:
            continue  # As Dagster's Postgres storage: no table of the open edition holds them.
        materialized = isinstance(dagster_event.event_specific_data, StepMaterializationData)
        if kind in _OF_ASSETS and (materialized or dagster_event.asset_key is not None):
            of_assets.append(event)
        else:
            singles.append(event)
    return of_assets, singles


def event_row(event: EventLogEntry, text: str, timestamp: Any) -> dict[str, Any]:
    """The row of an asset's event in the event log; `timestamp` is what the storage makes of its time."""
    dagster_event = event.get_dagster_event()
    data = dagster_event.event_specific_data
    # Dagster's properties say the same, and take a tenth of a millisecond to find it.
    of_what = data.materialization if isinstance(data, StepMaterializationData) else dagster_event
    assert of_what.asset_key is not None
    return {
        "run_id": event.run_id,
        "event": text,
        "dagster_event_type": dagster_event.event_type_value,
        "timestamp": timestamp,
        "step_key": dagster_event.step_key,
        "asset_key": of_what.asset_key.to_string(),
        "partition": of_what.partition or None,
    }


def has_tags(event: EventLogEntry) -> bool:
    """Whether there may be tags of the event to store."""
    data = event.get_dagster_event().event_specific_data
    if isinstance(data, StepMaterializationData):
        return bool(data.materialization.tags)
    return not isinstance(data, AssetObservationData) or bool(data.asset_observation.tags)


def newest_of_each(
    stored: Iterable[tuple[EventLogEntry, Mapping[str, Any]]], ids: Sequence[int]
) -> list[tuple[EventLogEntry, int]]:
    """The events that an asset's row shows: of each asset and kind the last one, by asset and then as they came."""
    newest: dict[tuple[str, str], tuple[EventLogEntry, int]] = {}
    for (event, row), event_id in zip(stored, ids, strict=True):
        newest[row["asset_key"], row["dagster_event_type"]] = (event, event_id)
    return [newest[of] for of in sorted(newest, key=lambda of: (of[0], newest[of][1]))]


def serialized(events: Sequence[EventLogEntry]) -> list[str]:
    """The events as Dagster's serializer writes them, character for character.

    A batch's materializations differ in partition, time and a dozen plain values, and Dagster's general serializer
    takes 0.3 ms for each: as much as all the rest. So the first one is serialized by Dagster and the others are
    written after its pattern. The first and the last are compared with what Dagster writes; where they differ, as
    they may with another release of it, Dagster serializes all of them.
    """
    patterns: dict[Any, dict[str, Any]] = {}
    texts: list[str] = []
    after_pattern: list[int] = []
    for index, event in enumerate(events):
        like = _likeness(event)
        if like is None:
            texts.append(serialize_value(event))
            continue
        if like not in patterns:
            patterns[like] = json.loads(serialize_value(event))
        texts.append(_after_pattern(patterns[like], event))
        after_pattern.append(index)
    if any(texts[index] != serialize_value(events[index]) for index in {*after_pattern[:1], *after_pattern[-1:]}):
        return [serialize_value(event) for event in events]
    return texts


def _likeness(event: EventLogEntry) -> Any:
    """What two entries must share to be written after one pattern; None for one that fits no pattern."""
    dagster_event = event.get_dagster_event()
    data = dagster_event.event_specific_data
    if not isinstance(data, StepMaterializationData) or dagster_event.logging_tags:
        return None
    entry = data.materialization
    if entry.tags or not all(type(value) in _PLAIN_METADATA for value in entry.metadata.values()):
        return None
    return (
        event.run_id,
        event.level,
        event.job_name,
        event.user_message,
        dagster_event.event_type_value,
        dagster_event.step_key,
        dagster_event.message,
        entry.asset_key,
        entry.description,
    )


def _after_pattern(pattern: dict[str, Any], event: EventLogEntry) -> str:
    data = event.get_dagster_event().event_specific_data
    assert isinstance(data, StepMaterializationData)
    entry = data.materialization
    fields = pattern["dagster_event"]["event_specific_data"]["materialization"]
    entries = []
    for label, value in entry.metadata.items():
        name, field = _PLAIN_METADATA[type(value)]
        data = {"__class__": name, field: value.value}
        entries.append({"__class__": "EventMetadataEntry", "description": None, "entry_data": data, "label": label})
    fields["metadata_entries"] = entries
    fields["partition"] = entry.partition
    pattern["timestamp"] = event.timestamp
    return json.dumps(pattern)
