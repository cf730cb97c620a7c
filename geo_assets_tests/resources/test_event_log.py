from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geo_assets_tests.resources.contract_event_log import EventLogContract, LogHarness, drain, read_all
from geo_assets_tests.resources.log_processes import (
    after,
    append_in_another_process,
    append_on_a_full_disk,
    open_and_append,
    open_in_a_folder_without_permission,
)
from geo_assets_tests.waiting import patient, until
from resources.event_log.bells import Bells
from resources.event_log.murmur2 import murmur2, partition_of
from resources.event_log.protocol import EventLog, LogError, LogUnavailable, NewRecord, StaleEpoch, TopicSpec
from resources.event_log.sqlite import SqliteEventLog
from resources.event_log.sqlite_consumer import SqliteConsumer, is_gone, shared_out, this_process

spawn = multiprocessing.get_context("spawn")


def delete_topic(log: EventLog, topic: str) -> None:
    assert isinstance(log, SqliteEventLog)
    log.delete_topic(topic)


def expire(log: EventLog, topic: str) -> None:
    log.enforce_retention(int(time.time() * 1000) + log.topics()[topic].retention_ms + 60_000)


def sqlite_harness(folder: Path) -> LogHarness:
    opener = functools.partial(SqliteEventLog, folder / "event-log.db", session_timeout_s=1.0)
    hasty = functools.partial(opener, max_poll_interval_s=1.0)
    return LogHarness(open=opener, delete_topic=delete_topic, session_s=1.0, expire=expire, open_hasty=hasty)


class TestSqliteEventLog(EventLogContract):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> LogHarness:
        return sqlite_harness(tmp_path)


@pytest.fixture
def log(tmp_path: Path) -> Any:
    log = SqliteEventLog(tmp_path / "log.db")
    log.ensure_topics([TopicSpec("t")])
    yield log
    log.close()


# From the unit test of Kafka's Java client (org.apache.kafka.common.utils.UtilsTest) and other clients' tests of it.
@pytest.mark.parametrize(
    ("data", "signed"),
    [
        (b"21", -973932308),
        (b"foobar", -790332482),
        (b"a-little-bit-long-string", -985981536),
        (b"a-little-bit-longer-string", -1486304829),
        (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
        (b"abc", 479470107),
        (b"", 275646681),
    ],
)
def test_murmur2_is_kafka_s(data: bytes, signed: int) -> None:
    assert murmur2(data) == signed & 0xFFFFFFFF


def test_a_long_key_lands_where_it_would_if_it_were_remembered() -> None:
    for length in (127, 128, 129, 1_000):
        key = "ü" * length
        assert partition_of(key, 12) == (murmur2(key.encode()) & 0x7FFFFFFF) % 12


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(
        st.tuples(st.integers(0, 2), st.integers(0, 5)), st.sampled_from([None, "a", "b", "c", "dead"]), max_size=18
    ),
    st.dictionaries(st.sampled_from("abcd"), st.frozensets(st.integers(0, 2), min_size=1), max_size=4),
)
def test_partitions_are_shared_evenly_among_readers_and_sharing_again_moves_none(
    shares: dict[tuple[int, int], str | None], members: dict[str, frozenset[int]]
) -> None:
    result = shared_out(shares, members)
    assert result.keys() == shares.keys()
    for (topic, _), member in result.items():
        readers = [m for m, topics in members.items() if topic in topics]
        assert (member in readers) if readers else member is None
    counts = {m: sum(1 for held in result.values() if held == m) for m in members}
    for (topic, _), member in result.items():
        for reader in (m for m, topics in members.items() if topic in topics):
            assert member is not None
            assert counts[member] - counts[reader] <= 1
    assert shared_out(result, members) == result


def test_a_member_that_joins_takes_only_its_share() -> None:
    alone = shared_out({(1, n): None for n in range(8)}, {"a": frozenset({1})})
    both = shared_out(alone, {"a": frozenset({1}), "b": frozenset({1})})
    assert sum(1 for share in alone if alone[share] != both[share]) == 4


def test_the_log_loads_without_a_heavy_library() -> None:
    code = (
        "import sys, resources.event_log.sqlite\n"
        "heavy = {'numpy', 'dagster', 'pydantic', 'shapely', 'pyarrow', 'confluent_kafka'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_commits_are_synced_and_the_file_gives_space_back(log: SqliteEventLog) -> None:
    connection = log.file.connection()
    assert connection.execute("PRAGMA synchronous").fetchone()[0] == 2
    assert connection.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
    assert connection.execute("PRAGMA auto_vacuum").fetchone()[0] == 2


def test_disk_space_is_used_again_after_retention(log: SqliteEventLog) -> None:
    batch = [NewRecord("t", f"k{n}", b"x" * 20_000) for n in range(100)]
    for _ in range(3):
        for _ in range(4):
            log.append(batch)
        log.enforce_retention(int(time.time() * 1000) + 8 * 24 * 3600 * 1000)
    pages = log.file.connection().execute("PRAGMA page_count").fetchone()[0]
    assert pages * 4096 < 4_000_000
    assert read_all(log, "t") == []


def test_retention_goes_by_when_the_log_took_a_record_not_by_what_the_record_says(log: SqliteEventLog) -> None:
    log.append([NewRecord("t", "k", b"", timestamp_ms=0), NewRecord("t", "k", b"", timestamp_ms=1 << 50)])
    assert log.enforce_retention() == {}
    assert log.enforce_retention(int(time.time() * 1000) + 8 * 24 * 3600 * 1000) == {"t": 2}


def test_threads_that_append_at_once_share_commits(log: SqliteEventLog) -> None:
    before = log.appends

    def work() -> None:
        for _ in range(50):
            log.append([NewRecord("t", "k", b"x" * 100)])

    threads = [threading.Thread(target=work) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(extent.end for extent in log.extents("t").values()) == 800
    assert log.appends - before < 600


@pytest.mark.skipif(sys.platform != "linux", reason="bells are heard on Linux alone")
def test_another_process_hears_an_append_to_its_topics_and_no_other(log: SqliteEventLog, tmp_path: Path) -> None:
    log.ensure_topics([TopicSpec("other")])
    elsewhere = functools.partial(SqliteEventLog, tmp_path / "log.db")
    ear, neighbour = log.ear(["t"]), log.ear(["other"])
    assert ear is not None
    assert neighbour is not None
    assert not ear.wait(0)

    writer = spawn.Process(target=append_in_another_process, args=(elsewhere, "t", "a", 1))
    writer.start()
    assert ear.wait(patient(60))
    writer.join()
    assert not neighbour.wait(0)

    log.append([NewRecord("t", "k", b"")])
    log.append([NewRecord("t", "k", b"")])
    assert ear.wait(0), "what rang while nobody waited is heard at the next wait"
    assert not ear.wait(0)


def test_where_no_bell_is_heard_records_of_other_processes_are_found_all_the_same(
    log: SqliteEventLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Bells, "ear", lambda *_: None)
    consumer, follower = log.consumer("g", ["t"]), log.follow("t", dict.fromkeys(range(4), 0))
    assert consumer.poll(timeout_s=0.1) == []
    elsewhere = functools.partial(SqliteEventLog, tmp_path / "log.db")
    writer = spawn.Process(target=append_in_another_process, args=(elsewhere, "t", "a", 1))
    writer.start()
    assert len(consumer.poll(timeout_s=patient(60))) == 1
    assert len(follower.take(10, patient(60))) == 1
    writer.join()
    consumer.close()


def test_a_bell_that_cannot_be_rung_costs_no_append(tmp_path: Path) -> None:
    (tmp_path / ".log.db.bells").write_text("in the way of the folder")
    log = SqliteEventLog(tmp_path / "log.db")
    log.ensure_topics([TopicSpec("t")])
    assert log.ear(["t"]) is None
    consumer = log.consumer("g", ["t"])
    log.append([NewRecord("t", "k", b"here")])
    assert [record.value for record in consumer.poll(timeout_s=patient(30))] == [b"here"]
    consumer.close()
    log.close()


def test_an_interrupted_caller_leaves_the_others_their_commit(
    log: SqliteEventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, go = threading.Event(), threading.Event()
    commit = log._commit

    def interrupted_once(group: Any) -> None:
        if not inside.is_set():
            inside.set()
            go.wait(patient(30))
            raise KeyboardInterrupt
        commit(group)

    monkeypatch.setattr(log, "_commit", interrupted_once)
    outcomes: list[str] = []

    def work() -> None:
        try:
            log.append([NewRecord("t", "k", b"")])
            outcomes.append("stored")
        except KeyboardInterrupt:
            outcomes.append("interrupted")

    threads = [threading.Thread(target=work) for _ in range(4)]
    threads[0].start()
    assert inside.wait(patient(30))
    for thread in threads[1:]:
        thread.start()
    time.sleep(0.1)
    go.set()
    for thread in threads:
        thread.join(patient(30))
    assert sorted(outcomes) == ["interrupted", "stored", "stored", "stored"]
    assert len(read_all(log, "t")) == 3


def test_a_waiting_poll_costs_next_to_no_cpu(log: SqliteEventLog) -> None:
    consumer = log.consumer("g", ["t"])
    consumer.poll(timeout_s=0)
    began = time.process_time()
    consumer.poll(timeout_s=2)
    # Of two seconds; whoever looks again and again takes all of them.
    assert time.process_time() - began < 1.0
    consumer.close()


def test_a_killed_member_is_noticed_long_before_its_session_ends(tmp_path: Path) -> None:
    log = SqliteEventLog(tmp_path / "log.db", session_timeout_s=60)
    log.ensure_topics([TopicSpec("t")])
    root = Path(__file__).parents[2]
    code = (
        "import os, sys\nfrom resources.event_log.sqlite import SqliteEventLog\n"
        "c = SqliteEventLog(sys.argv[1], session_timeout_s=60).consumer('g', ['t'])\nc.poll(timeout_s=0)\n"
        "assert len(c.assignment()) == 4\nos.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "log.db")], cwd=root, check=False, timeout=patient(60))
    consumer = log.consumer("g", ["t"])
    consumer.poll(timeout_s=0)
    assert len(consumer.assignment()) == 4
    consumer.close()
    log.close()


def test_a_process_is_judged_gone_only_when_it_can_be_seen_to_be() -> None:
    me = this_process()
    assert not is_gone(me)
    namespace, _, started = me.rsplit(" ", 2)
    if namespace:
        assert is_gone(f"{namespace} {os.getpid()} {int(started) + 1}")
    assert not is_gone(f"another-boot pid:[1] 1 {started}")
    assert not is_gone("")


def test_a_stuck_member_loses_its_partitions_after_the_longest_poll_interval(tmp_path: Path) -> None:
    log = SqliteEventLog(tmp_path / "log.db", session_timeout_s=0.4, max_poll_interval_s=0.5)
    log.ensure_topics([TopicSpec("t")])
    log.append([NewRecord("t", "k", b"")])
    stuck, other = log.consumer("g", ["t"]), log.consumer("g", ["t"])
    records = drain(stuck, 1, seconds=1) or drain(other, 1, seconds=1)
    until(lambda: (other.poll(timeout_s=0.1), len(other.assignment()) == 4)[-1], why="it loses its partitions")
    stuck.commit(after(records))
    assert log.committed("g", "t") == {}
    # It comes back when it polls again.
    until(
        lambda: (stuck.poll(timeout_s=0.05), other.poll(timeout_s=0.05), stuck.assignment())[-1],
        why="it has partitions again",
    )
    stuck.close()
    other.close()
    log.close()


def test_a_consumer_that_is_dropped_without_closing_stops_its_heartbeat(log: SqliteEventLog) -> None:
    before = threading.active_count()
    consumer: SqliteConsumer | None = log.consumer("g", ["t"])
    assert threading.active_count() == before + 1
    assert consumer is not None
    closed = consumer._closed
    del consumer
    closed.set()
    until(lambda: threading.active_count() <= before, why="its heartbeat has ended")


def test_a_locked_file_is_unavailable_and_works_again_later(tmp_path: Path) -> None:
    log = SqliteEventLog(tmp_path / "log.db", lock_timeout_s=0.2)
    log.ensure_topics([TopicSpec("t")])
    other = sqlite3.connect(tmp_path / "log.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(LogUnavailable, match="locked"):
        log.append([NewRecord("t", "k", b"")])
    other.execute("ROLLBACK")
    log.append([NewRecord("t", "k", b"")])
    other.close()
    assert len(read_all(log, "t")) == 1
    log.close()


def test_a_full_disk_is_unavailable_and_what_was_acknowledged_is_there_when_there_is_room(
    log: SqliteEventLog, tmp_path: Path
) -> None:
    results = spawn.Queue()
    opener = functools.partial(SqliteEventLog, tmp_path / "log.db")
    process = spawn.Process(target=append_on_a_full_disk, args=(opener, results))
    process.start()
    stored, failed = results.get(timeout=patient(60))
    process.join(patient(30))
    assert failed > 0
    records = read_all(log, "t")
    assert (len(records), records[-1].value) == (stored + 1, b"after")
    assert [r.offset for r in records] == list(range(stored + 1))


def test_a_folder_that_cannot_be_written_gives_one_clear_line(tmp_path: Path) -> None:
    folder = tmp_path / "home"
    folder.mkdir()
    folder.chmod(0o555)
    results = spawn.Queue()
    process = spawn.Process(target=open_in_a_folder_without_permission, args=(str(folder), results))
    process.start()
    messages = [results.get(timeout=patient(60)) for _ in range(2)]
    process.join(patient(30))
    folder.chmod(0o755)
    if "cannot" in messages:
        pytest.skip("this process cannot give up root's powers")
    assert all(str(folder) in message and "\n" not in message for message in messages), messages


def test_a_file_that_is_no_database_is_named_as_such(tmp_path: Path) -> None:
    (tmp_path / "log.db").write_bytes(b"not a database, but long enough to look at" * 100)
    with pytest.raises(LogError, match=r"log\.db is damaged or no database"):
        SqliteEventLog(tmp_path / "log.db")


def test_a_file_of_a_newer_schema_is_refused(tmp_path: Path) -> None:
    SqliteEventLog(tmp_path / "log.db").close()
    connection = sqlite3.connect(tmp_path / "log.db")
    connection.execute("INSERT INTO schema_version VALUES (99)")
    connection.commit()
    connection.close()
    with pytest.raises(LogError, match="version 99"):
        SqliteEventLog(tmp_path / "log.db")


def test_a_file_of_the_schema_without_epochs_is_brought_up_to_date_with_all_that_is_in_it(tmp_path: Path) -> None:
    with contextlib.closing(SqliteEventLog(tmp_path / "log.db")) as log:
        log.ensure_topics([TopicSpec("t", partitions=1)])
        log.append([NewRecord("t", "k", b"1")])
    with contextlib.closing(sqlite3.connect(tmp_path / "log.db")) as connection:
        connection.execute("ALTER TABLE partitions DROP COLUMN epoch")
        connection.execute("UPDATE schema_version SET version = 1")
        connection.commit()
    with contextlib.closing(SqliteEventLog(tmp_path / "log.db")) as log:
        log.append([NewRecord("t", "k", b"2")], epoch=2)
        with pytest.raises(StaleEpoch):
            log.append([NewRecord("t", "k", b"3")], epoch=1)
        assert [r.value for r in log.read("t", 0, 0)] == [b"1", b"2"]


def test_a_log_whose_file_was_removed_acknowledges_nothing(tmp_path: Path) -> None:
    log = SqliteEventLog(tmp_path / "home" / "log.db")
    log.ensure_topics([TopicSpec("t")])
    shutil.rmtree(tmp_path / "home")
    with pytest.raises(LogUnavailable, match="removed"):
        log.append([NewRecord("t", "k", b"")])
    log.close()


def test_a_closed_log_says_so(log: SqliteEventLog) -> None:
    log.close()
    with pytest.raises(LogUnavailable, match="closed"):
        log.append([NewRecord("t", "k", b"")])
    with pytest.raises(LogUnavailable, match="closed"):
        log.read("t", 0, 0)


def test_a_forked_child_opens_connections_of_its_own(log: SqliteEventLog) -> None:
    log.append([NewRecord("t", "k", b"parent")])
    consumer = log.consumer("g", ["t"])
    child = os.fork()
    if child == 0:
        code = 1
        try:
            log.append([NewRecord("t", "k", b"child")])
            try:
                consumer.poll(timeout_s=0)
            except LogError:
                code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    log.append([NewRecord("t", "k", b"parent again")])
    assert [r.value for r in drain(consumer, 3)] == [b"parent", b"child", b"parent again"]
    assert log.file.connection().execute("PRAGMA integrity_check").fetchone()[0] == "ok"
    consumer.close()


def test_processes_that_start_at_once_on_an_empty_home_all_open_it(tmp_path: Path) -> None:
    path = tmp_path / "home" / "log.db"
    processes = [spawn.Process(target=open_and_append, args=(str(path),)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(patient(60))
        assert process.exitcode == 0
    log = SqliteEventLog(path)
    assert len(read_all(log, "t")) == 4
    assert log.file.connection().execute("PRAGMA auto_vacuum").fetchone()[0] == 2
    log.close()


def test_the_resource_hands_out_a_plain_client(tmp_path: Path) -> None:
    from resources.event_log.resource import EventLogResource

    client = EventLogResource(path=str(tmp_path / "log.db")).client()
    assert isinstance(client, SqliteEventLog)
    client.close()
