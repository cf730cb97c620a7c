"""A member of a group on the embedded event log: which partitions it holds, how it keeps them, how it waits.

Members write leases into the log's file. Whoever notices that a member came, left or died works out who should hold
what (`shared_out`) and writes it down as targets; a holder lets go at its next poll, and only then the next takes it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import threading
import time
import uuid
import weakref
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from resources.event_log.protocol import Holding, LogError, LogUnavailable, Record, UnknownTopic

if TYPE_CHECKING:
    from resources.event_log.sqlite import SqliteEventLog

Share = tuple[int, int]
"""A partition to hold: the topic's row id and the partition's number."""

_POLL_BYTES = 16_000_000
# A look whether another process wrote (PRAGMA data_version: no disk) and the sleep before it cost some 0.2 ms of CPU
# together. Where other processes' appends cannot be heard, they come the rarer the longer nothing came: 4 ms apart in
# traffic, 40 ms after ten idle seconds (0.6 %).
_LOOK_MIN_S = 0.004
_LOOK_MAX_S = 0.04
_LOOK_SHARE = 1 / 250
# Where the bells are heard: who joins or leaves the group rings none.
_LOOK_HEARING_S = 0.05

_BROKER = "the file"
"""Who leads all partitions."""


def shared_out(shares: Mapping[Share, str | None], members: Mapping[str, frozenset[int]]) -> dict[Share, str | None]:
    """Who should hold which partition: even to one, and moving as few as it takes.

    Args:
        shares: Every partition, with the member that is to hold it until now.
        members: The living members in the order in which they joined, with the topics that each reads.

    Returns:
        Every partition with its member; None where no member reads the topic.
    """
    result: dict[Share, str | None] = {}
    held: dict[str, list[Share]] = {member: [] for member in members}
    for share in sorted(shares):
        member = shares[share]
        keeps = member is not None and share[0] in members.get(member, ())
        result[share] = member if keeps else None
        if member is not None and keeps:
            held[member].append(share)
    for share, member in result.items():
        readers = [m for m, topics in members.items() if share[0] in topics]
        if member is None and readers:
            least = min(readers, key=lambda m: len(held[m]))
            result[share] = least
            held[least].append(share)
    while True:
        moves = [
            (len(held[giver]) - len(held[taker]), giver, taker, share)
            for giver in members
            for taker in members
            if len(held[giver]) - len(held[taker]) > 1
            for share in held[giver]
            if share[0] in members[taker]
        ]
        if not moves:
            return result
        # The last one moves: a member that stays longest keeps the lowest numbers.
        _, giver, taker, share = max(moves, key=lambda move: (move[0], move[3]))
        held[giver].remove(share)
        held[taker].append(share)
        result[share] = taker


class SqliteConsumer:
    """A group's member on the embedded log (`Consumer`). Made by `SqliteEventLog.consumer`, which joins it at once.

    A thread of its own keeps the lease alive while records are worked on, up to `max_poll_interval_s` after the last
    poll. A member that was killed is noticed at the next heartbeat of another one on the same machine, not only after
    its session.
    """

    def __init__(
        self,
        log: SqliteEventLog,
        group: str,
        topics: Sequence[str],
        *,
        from_end: bool,
        session_timeout_s: float,
        max_poll_interval_s: float,
    ) -> None:
        self._log, self._file = log, log.file
        self.group, self.topics = group, tuple(dict.fromkeys(topics))
        self.member = str(uuid.uuid4())
        self._session_ms = int(session_timeout_s * 1000)
        self._max_poll_interval_s = max_poll_interval_s
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._generation = -1
        self._positions: dict[tuple[str, int], int] = {}
        self._paused: set[tuple[str, int]] = set()
        self._turn = 0
        self._data_version = -1
        self._last_poll = self._last_found = time.monotonic()
        self._closed = threading.Event()
        self._connection = self._file.own_connection()
        self._ear = log.ear(self.topics)
        self._join(start_at_end=from_end)
        threading.Thread(
            target=_keep_alive,
            args=(weakref.ref(self), self._closed, session_timeout_s / 4),
            name=f"heartbeat {group}",
            daemon=True,
        ).start()

    def poll(self, max_records: int = 500, timeout_s: float = 1.0) -> list[Record]:
        """Up to `max_records` next records of the partitions held (see `Consumer.poll`)."""
        deadline = time.monotonic() + timeout_s
        first = True
        while True:
            appends = self._log.appends
            with self._lock:
                if self._closed.is_set():
                    if first:
                        raise LogError(f"consumer of group {self.group!r} is closed")
                    return []
                if self._pid != os.getpid():
                    raise LogError(
                        f"a consumer of group {self.group!r} cannot be used in a forked process: open another"
                    )
                self._last_poll = time.monotonic()
                if self._wrote_somebody() or first:
                    self._take_part()
                    records = self._next_records(max_records)
                    if records:
                        self._last_found = self._last_poll
                        return records
            first = False
            left = deadline - time.monotonic()
            if left <= 0:
                return []
            if self._closed.is_set():
                continue
            look = _LOOK_HEARING_S
            if self._ear is None:
                idle = time.monotonic() - self._last_found
                look = min(max(idle * _LOOK_SHARE, _LOOK_MIN_S), _LOOK_MAX_S)
            self._log.wait(self._ear, min(look, left), appends)

    def commit(self, next_offsets: Mapping[tuple[str, int], int]) -> None:
        """Durably set next offsets of partitions held; those of others are ignored (see `Consumer.commit`)."""
        if not next_offsets:
            return
        # Durable with the next append at the latest: what a power failure takes back is polled once more.
        with self._file.transaction("NORMAL") as connection:
            topics = self._log.topics_in(connection)
            held = self._held_in(connection)
            for (name, number), offset in next_offsets.items():
                if name not in topics:
                    raise UnknownTopic(f"topic {name!r} was never declared")
                if (topics[name].id, number) in held:
                    self._log.set_committed(connection, self.group, topics[name].id, number, offset)

    def seek_to_committed(self) -> None:
        """The next poll gives again what was polled and not committed."""
        with self._lock:
            starts = self._file.attempt(lambda c: self._starts(c, self._positions), self._connection)
            self._positions.update(starts)

    def assignment(self) -> frozenset[tuple[str, int]]:
        """The (topic, partition) pairs held now, by the log's own word."""
        if self._closed.is_set():
            return frozenset()

        def held(connection: sqlite3.Connection) -> frozenset[tuple[str, int]]:
            names = {topic.id: name for name, topic in self._log.topics_in(connection).items()}
            return frozenset((names[i], number) for i, number in self._held_in(connection) if i in names)

        return self._file.attempt(held)

    def pause(self, partitions: Collection[tuple[str, int]]) -> None:
        """Give nothing of these until they are resumed (see `Consumer.pause`)."""
        with self._lock:
            self._paused |= self._positions.keys() & set(partitions)

    def resume(self, partitions: Collection[tuple[str, int]]) -> None:
        """Go on with them where they stopped."""
        with self._lock:
            self._paused -= set(partitions)

    def holdings(self) -> dict[tuple[str, int], Holding]:
        """The pairs held as of the last poll, and how each stands (see `Consumer.holdings`)."""
        with self._lock:
            if self._closed.is_set() or not self._positions:
                return {}
            ends = self._file.attempt(self._ends, self._connection)
            return {
                pair: Holding(_BROKER, max(0, ends[pair] - position) if pair in ends else None, pair in self._paused)
                for pair, position in self._positions.items()
            }

    def close(self) -> None:
        """Leave the group at once: the partitions are free for the other members."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._log.wake(self.topics)
        if self._pid != os.getpid():
            return
        with self._lock:
            # When the log cannot be written now, the lease runs out by itself.
            with contextlib.suppress(LogError), self._file.transaction("NORMAL") as connection:
                self._remove(connection, [self.member])
            self._connection.close()

    def beat(self) -> None:
        """Renew the lease, unless the last poll is too long ago, and strike out members that died."""
        if time.monotonic() - self._last_poll > self._max_poll_interval_s:
            return
        with self._file.transaction("NORMAL") as connection:
            now_ms = time.time_ns() // 1_000_000
            connection.execute(
                "UPDATE members SET expires_ms = ? WHERE group_name = ? AND member = ?",
                (now_ms + self._session_ms, self.group, self.member),
            )
            dead = self._dead_in(connection, now_ms)
            if dead:
                self._remove(connection, dead)

    # Membership

    def _join(self, *, start_at_end: bool) -> None:
        with self._file.transaction("FULL" if start_at_end else "NORMAL") as connection:
            topics = self._log.topics_in(connection)
            for name in self.topics:
                if name not in topics:
                    raise UnknownTopic(f"topic {name!r} was never declared; declared: {sorted(topics)}")
                if start_at_end and not self._ever_committed(connection, topics[name].id):
                    # Written down at once: what comes from now on is the group's, whichever member reads it.
                    connection.execute(
                        """INSERT INTO committed SELECT ?, topic_id, number, end_offset
                           FROM partitions WHERE topic_id = ?""",
                        (self.group, topics[name].id),
                    )
            self._share_out(connection)

    def _take_part(self) -> None:
        """Follow the group: nothing to do while its generation is the one that this member knows."""
        row = self._file.attempt(
            lambda c: c.execute("SELECT generation FROM groups WHERE name = ?", (self.group,)).fetchone(),
            self._connection,
        )
        if row is None or row[0] != self._generation:
            with self._file.transaction("NORMAL") as connection:
                self._share_out(connection)

    def _share_out(self, connection: sqlite3.Connection) -> None:
        """Be a member, write down who should hold what, let go of what others should hold, take what is free."""
        now_ms = time.time_ns() // 1_000_000
        self._remove(connection, self._dead_in(connection, now_ms))
        topics = self._log.topics_in(connection)
        missing = [name for name in self.topics if name not in topics]
        if missing:
            raise UnknownTopic(f"topics {missing} of group {self.group!r} are gone; declared: {sorted(topics)}")
        connection.execute(
            """INSERT INTO members SELECT ?, ?, ?, ?, ?, ?, 1 + coalesce(max(joined), 0)
               FROM members WHERE group_name = ?
               ON CONFLICT (group_name, member) DO UPDATE SET expires_ms = excluded.expires_ms""",
            (self.group, self.member, json.dumps(self.topics), this_process(), self._session_ms,
             now_ms + self._session_ms, self.group),
        )  # fmt: skip
        members = {
            member: frozenset(topics[name].id for name in json.loads(names) if name in topics)
            for member, names in connection.execute(
                "SELECT member, topics FROM members WHERE group_name = ? ORDER BY joined, member", (self.group,)
            ).fetchall()
        }
        before: dict[Share, tuple[str | None, str | None]] = {
            (topic_id, number): (owner, target)
            for topic_id, number, owner, target in connection.execute(
                "SELECT topic_id, number, owner, target FROM shares WHERE group_name = ?", (self.group,)
            ).fetchall()
        }
        read = frozenset().union(*members.values())
        wanted = {
            (topic.id, number): before.get((topic.id, number), (None, None))[1]
            for topic in topics.values()
            if topic.id in read
            for number in range(len(topic.partition_ids))
        }
        after: dict[Share, tuple[str | None, str | None]] = {}
        for share, target in shared_out(wanted, members).items():
            owner = before.get(share, (None, None))[0]
            if owner == self.member and target != self.member:
                owner = None
            if target == self.member and owner is None:
                owner = self.member
            after[share] = (owner, target)
        changed = [(self.group, *share, *after[share]) for share in after if before.get(share) != after[share]]
        gone = [(self.group, *share) for share in before if share not in after]
        connection.executemany("INSERT OR REPLACE INTO shares VALUES (?, ?, ?, ?, ?)", changed)
        connection.executemany("DELETE FROM shares WHERE group_name = ? AND topic_id = ? AND number = ?", gone)
        if changed or gone:
            self._next_generation(connection)
        row = connection.execute("SELECT generation FROM groups WHERE name = ?", (self.group,)).fetchone()
        if row is None:
            self._next_generation(connection)
        self._generation = 1 if row is None else row[0]
        names = {topic.id: name for name, topic in topics.items()}
        held = {(names[share[0]], share[1]) for share, (owner, _) in after.items() if owner == self.member}
        # A partition that was lost and came back starts at what is committed: somebody else may have gone further.
        kept = {
            pair: position
            for pair, position in self._positions.items()
            if pair in held and before.get((topics[pair[0]].id, pair[1]), (None, None))[0] == self.member
        }
        self._positions = kept | self._starts(connection, held - kept.keys())
        self._paused &= kept.keys()

    def _next_generation(self, connection: sqlite3.Connection) -> None:
        connection.execute(
            "INSERT INTO groups VALUES (?, 1) ON CONFLICT (name) DO UPDATE SET generation = generation + 1",
            (self.group,),
        )

    def _remove(self, connection: sqlite3.Connection, members: Sequence[str]) -> None:
        for member in members:
            connection.execute("DELETE FROM members WHERE group_name = ? AND member = ?", (self.group, member))
            connection.execute(
                "UPDATE shares SET owner = NULL WHERE group_name = ? AND owner = ?", (self.group, member)
            )
        if members:
            self._next_generation(connection)

    def _dead_in(self, connection: sqlite3.Connection, now_ms: int) -> list[str]:
        """Members whose process is gone or lease ran out (or lies ahead by more than a session: the clock was set)."""
        rows = connection.execute(
            "SELECT member, process, session_ms, expires_ms FROM members WHERE group_name = ? AND member != ?",
            (self.group, self.member),
        ).fetchall()
        return [
            member
            for member, process, session_ms, expires_ms in rows
            if not now_ms < expires_ms <= now_ms + session_ms + 1_000 or is_gone(process)
        ]

    def _held_in(self, connection: sqlite3.Connection) -> set[Share]:
        return set(
            connection.execute(
                "SELECT topic_id, number FROM shares WHERE group_name = ? AND owner = ?", (self.group, self.member)
            ).fetchall()
        )

    # Reading

    def _wrote_somebody(self) -> bool:
        """Whether any other connection committed since the last look."""
        version = self._file.attempt(lambda c: c.execute("PRAGMA data_version").fetchone()[0], self._connection)
        changed, self._data_version = version != self._data_version, version
        return changed

    def _next_records(self, max_records: int) -> list[Record]:
        """From each partition held in turn, so that a long one does not keep the others waiting."""
        pairs = sorted(self._positions.keys() - self._paused)
        if not pairs or max_records < 1:
            return []
        self._turn = (self._turn + 1) % len(pairs)
        ends = self._file.attempt(self._ends, self._connection)
        found: list[Record] = []
        left_bytes = _POLL_BYTES
        for topic, number in pairs[self._turn :] + pairs[: self._turn]:
            position = self._positions[topic, number]
            if ends.get((topic, number)) == position:
                continue
            records = self._file.attempt(
                lambda c, t=topic, n=number, p=position, b=left_bytes: self._log.read_with(
                    c, self._log.topics_in(c)[t], n, p, max_records - len(found), b
                ),
                self._connection,
            )
            left_bytes -= sum(len(record.value or b"") for record in records)
            found.extend(records)
            if len(found) >= max_records or left_bytes <= 0:
                break
        # Only now: an error in a later partition must not lose what an earlier one gave.
        for record in found:
            self._positions[record.topic, record.partition] = record.offset + 1
        return found

    def _ends(self, connection: sqlite3.Connection) -> dict[tuple[str, int], int]:
        topics = self._log.topics_in(connection)
        return {
            (name, number): end
            for name in self.topics
            if name in topics
            for number, end in connection.execute(
                "SELECT number, end_offset FROM partitions WHERE topic_id = ?", (topics[name].id,)
            )
        }

    def _starts(
        self, connection: sqlite3.Connection, pairs: set[tuple[str, int]] | Mapping[tuple[str, int], int]
    ) -> dict[tuple[str, int], int]:
        """Where to begin: at what the group committed, else at the oldest record."""
        topics = self._log.topics_in(connection)
        starts: dict[tuple[str, int], int] = {}
        for name, number in pairs:
            if name not in topics:
                continue
            row = connection.execute(
                """SELECT coalesce(c.next_offset, p.begin_offset) FROM partitions p
                   LEFT JOIN committed c ON c.group_name = ? AND c.topic_id = p.topic_id AND c.number = p.number
                   WHERE p.topic_id = ? AND p.number = ?""",
                (self.group, topics[name].id, number),
            ).fetchone()
            if row is not None:
                starts[name, number] = int(row[0])
        return starts

    def _ever_committed(self, connection: sqlite3.Connection, topic_id: int) -> bool:
        query = "SELECT 1 FROM committed WHERE group_name = ? AND topic_id = ? LIMIT 1"
        return connection.execute(query, (self.group, topic_id)).fetchone() is not None


def _keep_alive(consumer: weakref.ref[SqliteConsumer], closed: threading.Event, interval_s: float) -> None:
    while not closed.wait(interval_s):
        alive = consumer()
        if alive is None:
            return
        # A beat that fails now is made up for by the next; after a session of failing ones the lease is lost.
        with contextlib.suppress(LogUnavailable, LogError):
            alive.beat()
        del alive


def this_process() -> str:
    """What identifies this process on this machine until it is started anew: boot, pid namespace, pid, start time."""
    return _identity_of(os.getpid())


def is_gone(process: str) -> bool:
    """Whether a process has ended, as far as it can be judged from here: of another namespace or boot, it cannot."""
    try:
        namespace, pid, _ = process.rsplit(" ", 2)
        if not namespace or namespace != _namespace():
            return False
        return _identity_of(int(pid)) != process
    except ValueError:
        return False


def _identity_of(pid: int) -> str:
    return f"{_namespace()} {pid} {_started(pid)}"


def _namespace() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # No /proc: the lease alone decides.
        return ""


def _started(pid: int) -> str:
    """Start time in clock ticks since boot (proc(5), field 22 of stat); empty when there is no such living process."""
    try:
        # The name in parentheses may hold spaces and parentheses itself.
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return ""
    return "" if fields[0] in ("Z", "X") else fields[19]
