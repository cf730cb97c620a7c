"""What the event log's suite runs in processes of their own. Imports no test library, so that they start at once."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from geo_assets_tests.resources.hardship import fill_the_disk, free_the_disk, obey_permissions
from resources.event_log.protocol import EventLog, LogUnavailable, NewRecord, Record, TopicSpec
from resources.event_log.sqlite import SqliteEventLog


def after(records: list[Record]) -> dict[tuple[str, int], int]:
    return {(r.topic, r.partition): r.offset + 1 for r in records}


def append_in_another_process(open_log: Callable[[], EventLog], topic: str, name: str, count: int) -> None:
    log = open_log()
    for n in range(count):
        log.append([NewRecord(topic, f"{name}-{n % 3}", json.dumps([name, n]).encode())])
    log.close()


def append_batches_until_killed(open_log: Callable[[], EventLog], topic: str, name: str, acknowledged: str) -> None:
    log = open_log()
    with open(acknowledged, "ab", buffering=0) as file:
        for batch in itertools.count():
            records = [
                NewRecord(topic, f"{name}-{n}", json.dumps([name, batch, n]).encode() + b" " * 300) for n in range(7)
            ]
            log.append(records)
            file.write(f"{name} {batch}\n".encode())


def hold_partitions_until_killed(open_log: Callable[[], EventLog], group: str, topic: str, ready: Any) -> None:
    consumer = open_log().consumer(group, [topic])
    while True:
        if consumer.poll(timeout_s=0.1):
            ready.set()


def consume_in_another_process(
    open_log: Callable[[], EventLog], group: str, topic: str, done: Any, results: Any
) -> None:
    log = open_log()
    consumer = log.consumer(group, [topic])
    found: list[str] = []
    while not done.is_set():
        records = consumer.poll(max_records=5, timeout_s=0.1)
        found += [r.value.decode() for r in records if r.value is not None]
        consumer.commit(after(records))
    consumer.close()
    results.put(found)
    log.close()


def append_on_a_full_disk(open_log: Callable[[], SqliteEventLog], results: Any) -> None:
    log = open_log()
    stored = failed = 0
    fill_the_disk(300_000)
    for _ in range(60):
        try:
            log.append([NewRecord("t", "k", b"x" * 20_000)])
            stored += 1
        except LogUnavailable:
            failed += 1
    free_the_disk()
    log.append([NewRecord("t", "k", b"after")])
    results.put((stored, failed))
    log.close()


def open_in_a_folder_without_permission(folder: str, results: Any) -> None:
    if not obey_permissions():
        results.put("cannot")
        return
    for path in (Path(folder) / "log.db", Path(folder) / "below" / "log.db"):
        try:
            SqliteEventLog(path)
            results.put("opened")
        except LogUnavailable as error:
            results.put(str(error))


def open_and_append(path: str) -> None:
    log = SqliteEventLog(path)
    log.ensure_topics([TopicSpec("t")])
    log.append([NewRecord("t", "k", b"")])
    log.close()
