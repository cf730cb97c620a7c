"""The change stream: one reader of `[tile-updated]` for all clients, resume points, filters, and what slow ones get.

A resume point is `token:o0.o1.…`: the next offset of every partition, under a token of the stream's epoch and the
topic's identity. It is safe to resume from any point that was sent: what comes again is recognised by its revision.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import random
import re
import threading
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import anyio
import anyio.to_thread
import msgspec
import structlog

from geo_assets.events.topics import TILE_UPDATED
from geo_assets.services.edit_stages import Stamps, now_us, stamps_in_header
from geo_assets.tiles.tile import MAX_LATITUDE, MAX_ZOOM, Box, Tile, TileError
from resources.event_log.protocol import LogError, LogUnavailable, OffsetOutOfRange
from resources.ledger.protocol import LedgerError

if TYPE_CHECKING:
    from geo_assets.services.tileserver.metrics import Metrics
    from resources.event_log.protocol import EventLog, Follower, Record
    from resources.ledger.protocol import Ledger

EPOCH_NAME: Final = "sse-epoch"
"""The ledger's named value. A restore from a backup sets a new one: revisions went back, so clients must reload."""

POLL_S: Final = 0.1
"""Longest wait for an announcement in one piece while somebody listens: what an end of the server waits for."""
IDLE_POLL_S: Final = 0.25
"""How often the log is looked at while nobody does."""
EPOCH_CHECK_S: Final = 5.0
READ_RECORDS: Final = 500
"""Records of one delivery: about 3 ms of the event loop."""
REMEMBERED_TILES: Final = 100_000
"""Tiles whose last told revision is remembered. A forgotten one may be told twice; clients ignore it."""
RETRY_MS: Final = 2_000
"""What browsers wait before they connect again."""


_RESUME = re.compile(r"([0-9a-f]{12}):([0-9]{1,19}(?:\.[0-9]{1,19}){0,1023})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Filter:
    """Which tiles a client wants to hear of.

    Args:
        min_zoom: First zoom.
        max_zoom: Last zoom.
        bbox: West, south, east, north in degrees; west above east crosses the date line; None is the world.
    """

    min_zoom: int = 0
    max_zoom: int = MAX_ZOOM
    bbox: Box | None = None
    _spans: tuple[tuple[float, float], ...] = field(init=False, repr=False, default=((0.0, 1.0),))
    _rows: tuple[float, float] = field(init=False, repr=False, default=(0.0, 1.0))

    def __post_init__(self) -> None:
        if self.bbox is None:
            return
        west, south, east, north = self.bbox
        left, right = (west + 180) / 360, (east + 180) / 360
        # By the degrees as given: as fractions, two that differ by a hair can be one.
        object.__setattr__(self, "_spans", ((left, right),) if west <= east else ((left, 1.0), (0.0, right)))
        object.__setattr__(self, "_rows", (_row_fraction(north), _row_fraction(south)))

    def __call__(self, z: int, x: int, y: int) -> bool:
        """Whether the tile is wanted: its zoom is within the range and it meets the box (edges included)."""
        if not self.min_zoom <= z <= self.max_zoom:
            return False
        if self.bbox is None:
            return True
        side = 1 << z
        top, bottom = self._rows
        if y > bottom * side or y + 1 < top * side:
            return False
        return any(x <= right * side and x + 1 >= left * side for left, right in self._spans)


def _row_fraction(latitude: float) -> float:
    """How far down the Web Mercator square a latitude in degrees lies: 0 is the top, 1 the bottom."""
    radians = math.radians(max(-MAX_LATITUDE, min(MAX_LATITUDE, latitude)))
    return min(1.0, max(0.0, (1 - math.asinh(math.tan(radians)) / math.pi) / 2))


@dataclass(frozen=True, slots=True)
class Change:
    """An announcement as it is told: its place in the log, its tile, and the event as bytes."""

    partition: int
    offset: int
    z: int
    x: int
    y: int
    revision: int
    event: bytes


@dataclass(frozen=True, slots=True)
class Delivery:
    """Changes read together, and the resume point behind them."""

    changes: tuple[Change, ...]
    resume: str


def come_again_ms() -> int:
    """What a client waits whose stream this server ends, milliseconds: drawn, so that not all of them come at once."""
    return random.randint(RETRY_MS // 2, 2 * RETRY_MS)


class TooManyClients(Exception):
    """Every place for a stream is taken."""


class NotReady(Exception):
    """The log or the ledger could not be read yet."""


class Client:
    """One open stream: a bounded queue of deliveries. Used in the event loop alone."""

    def __init__(self, wanted: Filter, limit: int) -> None:
        self.wanted = wanted
        self.resume: str | None = None
        """Everything before this point was sent."""
        self.dropped = False
        self.ended = False
        self.reset: str | None = None
        self._limit = limit
        self._waiting = 0
        self._queue: deque[Delivery] = deque()
        self._wake = asyncio.Event()

    def offer(self, delivery: Delivery) -> bool:
        """Queue a delivery; False when the client is too slow for it and is dropped.

        What was queued goes then: the resume point brings it again.
        """
        if self.dropped or self.ended:
            return True
        self._waiting += len(delivery.changes)
        if self._waiting > self._limit:
            self.dropped = True
            self._queue.clear()
            self._wake.set()
            return False
        self._queue.append(delivery)
        self._wake.set()
        return True

    def start_over(self, cause: str) -> None:
        """Tell the client to reload: what it knows is no longer comparable."""
        self.reset = cause
        self._queue.clear()
        self._waiting = 0
        self._wake.set()

    def end(self) -> None:
        """End the stream soon."""
        self.ended = True
        self._wake.set()

    async def wait(self) -> None:
        """Until there is something to do."""
        await self._wake.wait()
        self._wake.clear()

    def take(self) -> Iterator[Delivery]:
        """What is queued, oldest first."""
        while self._queue:
            delivery = self._queue.popleft()
            self._waiting -= len(delivery.changes)
            yield delivery


class _Reader:
    """Follows `[tile-updated]` from its end on. For the hub's thread."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._follower: Follower | None = None

    @property
    def positions(self) -> dict[int, int]:
        """Partition -> offset of the next record that is taken."""
        return dict(self._opened.next_offsets)

    @property
    def _opened(self) -> Follower:
        if self._follower is None:
            raise LogUnavailable(f"{TILE_UPDATED} is not followed yet")
        return self._follower

    def go_to_the_end(self) -> None:
        """Begin anew, with what comes from now on."""
        ends = {partition: extent.end for partition, extent in self._log.extents(TILE_UPDATED).items()}
        follower = self._log.follow(TILE_UPDATED, ends)
        self.close()
        self._follower = follower

    def follow_new_partitions(self) -> None:
        """A partition that is new since the last look is followed from its oldest record on."""
        for partition, extent in self._log.extents(TILE_UPDATED).items():
            if partition not in self._opened.next_offsets:
                self._opened.seek(partition, extent.begin)

    def take(self, timeout_s: float) -> list[Record]:
        """The next records, in about the order in which they were appended; waits at most so long for a first one.

        Raises:
            OffsetOutOfRange: Some of them are not in the log any more, or the log has less than was read of it.
        """
        taken = self._opened.take(READ_RECORDS, timeout_s)
        records = [taken.record(place) for place in range(len(taken))]
        records.sort(key=lambda record: record.timestamp_ms)
        # The sort is stable, but a clock that was set back may show within a partition; its order is what counts.
        return records if _in_order(records) else sorted(records, key=lambda r: (r.partition, r.offset))

    def close(self) -> None:
        """End."""
        if self._follower is not None:
            self._follower.close()
            self._follower = None


class ChangeHub:
    """Reads `[tile-updated]` in one thread and hands it to every client.

    Args:
        log: The event log.
        ledger: Keeps the epoch.
        metrics: The app's figures.
        max_clients: Streams at once.
        queue_changes: Changes that may wait for one client.
        replay_records: Records a resume may read again; beyond, reloading is cheaper for both sides.
        replays_at_once: Threads that resumes may take.
    """

    def __init__(
        self,
        log: EventLog,
        ledger: Ledger,
        metrics: Metrics,
        *,
        max_clients: int = 5_000,
        queue_changes: int = 2_000,
        replay_records: int = 20_000,
        replays_at_once: int = 4,
    ) -> None:
        self._log, self._ledger, self._metrics = log, ledger, metrics
        self._max_clients, self._queue_changes, self._replay_records = max_clients, queue_changes, replay_records
        self._clients: set[Client] = set()
        self._positions: dict[int, int] = {}
        self._token: str | None = None
        self._failing = False
        self._told: OrderedDict[tuple[int, int, int], int] = OrderedDict()
        self._replays = anyio.CapacityLimiter(replays_at_once)
        self._stop = threading.Event()
        self._listeners = threading.Event()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    # -- life --------------------------------------------------------------------------------------------------------
    async def start(self) -> None:
        """Start the reader; it finds its place before this returns, if log and ledger answer."""
        self._loop = asyncio.get_running_loop()
        placed = asyncio.Event()
        self._thread = threading.Thread(target=self._read_for_ever, args=(placed,), name="tile-changes", daemon=True)
        self._thread.start()
        await placed.wait()

    def end_streams(self) -> None:
        """End every stream, so that the server can close; clients come back with their resume points."""
        for client in self._clients:
            client.end()

    async def stop(self) -> None:
        """End the streams and the reader."""
        self.end_streams()
        self._stop.set()
        self._listeners.set()
        if self._thread is not None:
            await anyio.to_thread.run_sync(self._thread.join)

    @property
    def ready(self) -> bool:
        """Whether log and ledger can be read, so that changes are told."""
        return self._token is not None and not self._failing

    @property
    def resume_point(self) -> str | None:
        """The point behind everything that was told so far; None before the log could be read."""
        return None if self._token is None else _point(self._token, self._positions)

    @property
    def clients(self) -> int:
        """Open streams."""
        return len(self._clients)

    # -- clients -----------------------------------------------------------------------------------------------------
    def client(self, wanted: Filter) -> Client:
        """A stream to be followed; it takes its place when `follow` starts.

        Raises:
            TooManyClients: There is none.
            NotReady: The log could not be read yet.
        """
        if self._token is None:
            raise NotReady
        if len(self._clients) >= self._max_clients:
            raise TooManyClients
        return Client(wanted, self._queue_changes)

    async def follow(self, client: Client, resume: str | None) -> AsyncIterator[bytes]:
        """The stream's bytes: what was missed since `resume`, then what comes.

        Args:
            client: From `client`.
            resume: A resume point that was sent before; None starts now.
        """
        self._clients.add(client)
        self._metrics.clients.set(len(self._clients))
        self._listeners.set()
        try:
            # Nothing awaits between this and the reader's next delivery: what is at or above these positions comes
            # through the queue, what is below is read from the log.
            now, positions = self.resume_point, dict(self._positions)
            start: dict[int, int] = {}
            yield b"retry: %d\n\n" % RETRY_MS
            if resume:
                missed, cause = await self._missed(resume, positions, client)
                if cause is not None:
                    self._metrics.resets.labels(cause).inc()
                    yield _reset(cause, now)
                else:
                    start = _parse(resume)[1]
                    for event in missed:
                        yield event
            yield b"id: %s\n\n" % (now or "").encode()
            client.resume = now
            while not client.ended:
                await client.wait()
                if client.reset is not None:
                    cause, client.reset, start = client.reset, None, {}
                    self._metrics.resets.labels(cause).inc()
                    client.resume = self.resume_point
                    yield _reset(cause, client.resume)
                for delivery in client.take():
                    wanted = [
                        c
                        for c in delivery.changes
                        if client.wanted(c.z, c.x, c.y) and c.offset >= start.get(c.partition, 0)
                    ]
                    if wanted:
                        self._metrics.events.inc(len(wanted))
                        yield b"".join(change.event for change in wanted)
                    client.resume = delivery.resume
                if client.dropped:
                    yield _event("dropped", {"reason": "slow", "resume": client.resume}, client.resume)
                    return
            # Those of a server that ends come back one after the other, each from where it was.
            yield b"retry: %d\nid: %s\n\n" % (come_again_ms(), (client.resume or "").encode())
        finally:
            self._clients.discard(client)
            self._metrics.clients.set(len(self._clients))
            if not self._clients:
                self._listeners.clear()

    async def _missed(self, resume: str, until: Mapping[int, int], client: Client) -> tuple[list[bytes], str | None]:
        """Events since a resume point, or why there is no saying what they are."""
        try:
            token, offsets = _parse(resume)
        except ValueError:
            return [], "malformed"
        if token != self._token:
            return [], "epoch"
        if len(offsets) > len(until):
            return [], "epoch"
        if any(offset > until[p] for p, offset in offsets.items()):
            # Another server of the same log may be a little further than this one: the log itself says what its end is.
            try:
                extents = await anyio.to_thread.run_sync(self._log.extents, TILE_UPDATED, limiter=self._replays)
            except LogError as error:
                structlog.get_logger().warning("missed changes not readable", error=str(error))
                return [], "unreadable"
            if any(offset > extents[p].end for p, offset in offsets.items()):
                return [], "beyond-end"
        ranges = {p: (offsets.get(p, 0), end) for p, end in until.items() if offsets.get(p, 0) < end}
        if sum(end - begin for begin, end in ranges.values()) > self._replay_records:
            return [], "too-far"
        if not ranges:
            return [], None
        try:
            return await anyio.to_thread.run_sync(self._replay, ranges, client.wanted, limiter=self._replays), None
        except OffsetOutOfRange:
            return [], "retention"
        except LogError as error:
            structlog.get_logger().warning("missed changes not readable", error=str(error))
            return [], "unreadable"

    def _replay(self, ranges: Mapping[int, tuple[int, int]], wanted: Filter) -> list[bytes]:
        """The newest change of every wanted tile in these offsets.

        They carry no id: until all of them are sent, the point to resume from is the one the client has. One below what
        was told of its tile already is an old announcement that came late: the newer one was before these offsets, is
        among them, or comes live.
        """
        newest: dict[tuple[int, int, int], _Announced] = {}
        for partition, (offset, end) in ranges.items():
            while offset < end:
                records = self._log.read(TILE_UPDATED, partition, offset, max_records=min(2_000, end - offset))
                if not records:
                    break
                for record in records:
                    if record.offset >= end:
                        break
                    told = _announced(record)
                    if told is None or not wanted(told.z, told.x, told.y):
                        continue
                    before = newest.get((told.z, told.x, told.y))
                    if before is None or before.revision < told.revision or told.repeats(before.revision):
                        newest[told.z, told.x, told.y] = told
                self._metrics.replayed.inc(len(records))
                offset = records[-1].offset + 1
        return [
            _tile_event(told, None)
            for tile, told in newest.items()
            # A look at what the event loop's thread writes: at worst a late one is passed on, which clients ignore.
            if told.revision >= self._told.get(tile, 0)
        ]

    # -- the reader --------------------------------------------------------------------------------------------------
    def _read_for_ever(self, placed: asyncio.Event) -> None:
        reader = _Reader(self._log)
        token: str | None = None
        checked = pause = 0.0
        loop = self._loop
        assert loop is not None
        first = True
        while not self._stop.is_set():
            try:
                if token is None or time.monotonic() - checked >= EPOCH_CHECK_S:
                    fresh = self._read_token()
                    checked = time.monotonic()
                    if fresh != token:
                        reader.go_to_the_end()
                        token = fresh
                        self._hand_over(self._restart, "epoch", token, reader.positions)
                    else:
                        reader.follow_new_partitions()
                try:
                    # Before the first client is answered: it is told from here on.
                    records = reader.take(POLL_S if self._listeners.is_set() and not first else 0.0)
                except OffsetOutOfRange:
                    # Retention overtook the reader, or the log went back: nobody can say what was missed.
                    reader.go_to_the_end()
                    self._hand_over(self._restart, "retention", token, reader.positions)
                    records = []
                if records:
                    self._hand_over(self._deliver, records, reader.positions)
                pause = 0.0
                self._failing = False
            except (LogError, LedgerError) as error:
                self._metrics.log_faults.inc()
                self._failing = True
                if pause == 0.0:
                    structlog.get_logger().warning("change stream waits for log or ledger", error=str(error))
                pause = min(1.0, pause * 2 or 0.05)
            except RuntimeError:
                break  # the event loop has closed
            if first:
                first = False
                try:
                    loop.call_soon_threadsafe(placed.set)
                except RuntimeError:
                    break
            if pause:
                self._stop.wait(pause)
            elif not self._listeners.is_set():
                self._listeners.wait(IDLE_POLL_S)
        reader.close()

    def _read_token(self) -> str:
        epoch = self._ledger.get_value(EPOCH_NAME)
        if epoch is None:
            self._ledger.set_value(EPOCH_NAME, uuid.uuid4().hex, expect=None)
            epoch = self._ledger.get_value(EPOCH_NAME)
        return hashlib.sha256(f"{epoch}|{self._log.topic_id(TILE_UPDATED)}".encode()).hexdigest()[:12]

    def _hand_over(self, step: Any, *args: Any) -> None:
        """Run a step in the event loop and wait for it: the reader never runs ahead of the clients' queues."""
        done = threading.Event()

        def run() -> None:
            try:
                step(*args)
            finally:
                done.set()

        assert self._loop is not None
        self._loop.call_soon_threadsafe(run)
        while not done.wait(0.2):
            if self._stop.is_set():
                return

    # In the event loop from here on.
    def _restart(self, cause: str, token: str, positions: dict[int, int]) -> None:
        first = self._token is None
        self._token, self._positions = token, positions
        self._told.clear()
        if first:
            return
        structlog.get_logger().warning("change stream starts over", cause=cause, clients=len(self._clients))
        for client in self._clients:
            client.start_over(cause)

    def _deliver(self, records: Sequence[Record], positions: dict[int, int]) -> None:
        token = self._token
        assert token is not None
        now = time.time()
        changes: list[Change] = []
        stamps: list[Stamps] = []
        for record in records:
            self._positions[record.partition] = record.offset + 1
            self._metrics.lag.observe(max(0.0, now - record.timestamp_ms / 1000))
            told = _announced(record)
            if told is None:
                self._metrics.unreadable.inc()
                structlog.get_logger().warning(
                    "announcement not readable", partition=record.partition, offset=record.offset
                )
                continue
            tile = (told.z, told.x, told.y)
            known = self._told.get(tile, 0)
            if told.revision <= known and not told.repeats(known):
                self._metrics.suppressed.inc()
                continue
            self._told[tile] = told.revision
            self._told.move_to_end(tile)
            event = _tile_event(told, _point(token, self._positions)) if self._clients else b""
            changes.append(Change(record.partition, record.offset, *tile, told.revision, event))
            passed = stamps_in_header(bytes(told.stages))
            stamps.append(passed if passed.announced else passed.at("announced", record.timestamp_ms * 1_000))
        while len(self._told) > REMEMBERED_TILES:
            self._told.popitem(last=False)
        self._positions = positions
        delivery = Delivery(tuple(changes), _point(token, positions))
        for client in self._clients:
            if not client.offer(delivery):
                self._metrics.drops.inc()
        if self._clients:
            sent_us = now_us()
            self._metrics.stages.observe([one.at("sent", sent_us) for one in stamps], "sent")


_NOT_STAMPED: Final = msgspec.Raw(b"")


class _Announced(msgspec.Struct, frozen=True):
    """What the stream needs of an announcement's value."""

    z: int
    x: int
    y: int
    revision: int
    hash: str | None = None
    again: bool = False
    stages: msgspec.Raw = _NOT_STAMPED
    """Read apart: what is wrong in them is no fault of the announcement."""

    def repeats(self, known: int) -> bool:
        """Whether clients that know this revision must load the tile again: a cache has shown them the one before."""
        return self.again and self.revision == known


_announcement = msgspec.json.Decoder(_Announced)


def _announced(record: Record) -> _Announced | None:
    """The announcement of a record; None when it is none."""
    try:
        told = _announcement.decode(record.value or b"")
        Tile(told.z, told.x, told.y)
    except (msgspec.DecodeError, TileError):
        return None
    return told if told.revision > 0 else None


def _tile_event(told: _Announced, resume: str | None) -> bytes:
    """The event of a change. It has no name, so that `EventSource.onmessage` hears it."""
    change: dict[str, Any] = {"z": told.z, "x": told.x, "y": told.y, "hash": told.hash, "revision": told.revision}
    if told.again:
        change["again"] = True
    data = b"data: " + msgspec.json.encode(change)
    return data + (b"\n\n" if resume is None else b"\nid: " + resume.encode() + b"\n\n")


def _event(name: str, data: Mapping[str, Any], resume: str | None) -> bytes:
    head = f"event: {name}\n" + (f"id: {resume}\n" if resume else "")
    return f"{head}data: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


def _reset(cause: str, resume: str | None) -> bytes:
    return _event("reset", {"reason": cause, "resume": resume}, resume)


def _point(token: str, positions: Mapping[int, int]) -> str:
    count = max(positions, default=-1) + 1
    return f"{token}:{'.'.join(str(positions.get(partition, 0)) for partition in range(count)) or '0'}"


def _parse(point: str) -> tuple[str, dict[int, int]]:
    """Token and offsets of a resume point; ValueError when it is none."""
    match = _RESUME.fullmatch(point)
    if match is None:
        raise ValueError("not a resume point")
    return match[1], {partition: int(offset) for partition, offset in enumerate(match[2].split("."))}


def _in_order(records: Sequence[Record]) -> bool:
    last: dict[int, int] = {}
    for record in records:
        if record.offset <= last.get(record.partition, -1):
            return False
        last[record.partition] = record.offset
    return True
