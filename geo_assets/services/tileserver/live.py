"""The live stream of the map page: where devices are, what they triggered, and that fences changed.

One thread reads `[positions]` and `[triggers]` while somebody listens, and not at all otherwise: devices are then
forgotten. What a client is told is put together in that thread, never in the event loop; a client that is slow is told
the newest of each device when it is ready again, so that nothing queues up for it.
"""

from __future__ import annotations

import asyncio
import ipaddress
import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import anyio.to_thread
import msgspec
import structlog

from geo_assets.events.topics import POSITIONS, TRIGGERS
from geo_assets.flow.epochs import Epochs, epoch_of_mark
from geo_assets.geofence.frames import FrameError, Trigger, decode, key, to_json
from geo_assets.services.tileserver.stream import RETRY_MS, TooManyClients, come_again_ms
from geo_assets.tiles.tile import Box
from resources.event_log.protocol import LogError, OffsetOutOfRange
from resources.ledger.protocol import LedgerError
from resources.tile_store.protocol import TileStoreError

if TYPE_CHECKING:
    from geo_assets.services.tileserver.fences import FenceMap, ShownSet
    from geo_assets.services.tileserver.metrics import Metrics
    from resources.event_log.protocol import EventLog, Record

TICK_S: Final = 0.3
"""Between two rounds: three times a second a device moves on; a browser glides between."""
FENCES_S: Final = 0.6
"""Between two looks at which set of fences stands: an open page has a new fence within two seconds."""
PAUSE_S: Final = 1.0
"""After a log or ledger that did not answer."""

POSITIONS_A_ROUND: Final = 6_000
TRIGGERS_A_ROUND: Final = 2_000
"""Most records of a round: some 20 ms of one core. What is beyond is skipped, the oldest first, and counted: a map
shows where devices are now, and the log keeps the rest."""
LOOK_BACK: Final = 4_000
"""Records before the end, over all partitions, with which the first listener begins: devices are there at once."""

MOST_DEVICES: Final = 20_000
"""Remembered; the one not heard for the longest goes first."""
MOST_SHOWN: Final = 5_000
"""Devices that one client is told of."""
MOST_TOLD: Final = 200
"""Triggers that wait for one client; beyond, the oldest are only counted."""
RECENT: Final = 60
"""Triggers with which a client begins."""
REMEMBERED_KEYS: Final = 50_000
"""Triggers known as told; what comes again is told once."""
SILENT_S: Final = 600.0
"""A device not heard for so long is forgotten."""
LONGEST_ID: Final = 256
SKEW_MS: Final = 60_000
"""A fix from further in the future does not keep later ones from being shown."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a client asks for.

    Args:
        box: Devices outside it are not told; west above east crosses the date line; None is the world.
        devices: Whether it wants devices.
        triggers: Whether it wants triggers.
    """

    box: Box | None = None
    devices: bool = False
    triggers: bool = False

    def __call__(self, lon: float, lat: float) -> bool:
        """Whether a place is in the box."""
        if self.box is None:
            return True
        west, south, east, north = self.box
        if not south <= lat <= north:
            return False
        return west <= lon <= east if west <= east else lon >= west or lon <= east


class _Fix(msgspec.Struct, gc=False):
    """A record of `[positions]`, as far as a map shows it."""

    event_time_ms: int | None = None
    device_id: str | None = None
    lon: float = math.nan
    lat: float = math.nan
    time_ms: int | None = None
    time_s: float | None = None

    def when(self, stamp_ms: int) -> int:
        """Milliseconds since the epoch; the log's stamp where only routing can read how its time is written."""
        if self.event_time_ms is not None:
            return self.event_time_ms
        if self.time_ms is not None:
            return self.time_ms
        return int(self.time_s * 1000) if self.time_s is not None else stamp_ms


class _Seen(NamedTuple):
    """The newest of a device."""

    lon: float
    lat: float
    time_ms: int
    stamp_ms: int
    heard: float


_fix = msgspec.json.Decoder(_Fix).decode
_encode = msgspec.json.Encoder().encode


class TooManyOfOne(Exception):
    """One address has its share of the places."""


@dataclass(eq=False, slots=True)
class LiveClient:
    """One listener. Its news belong to the reading thread; what is ready to be sent is handed to the event loop."""

    wanted: Wanted
    whose: str = ""
    """Who counts as one: see `whose`."""
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    ended: bool = False
    free: bool = True
    """Whether what was handed over last is on its way: only then more is made."""
    ready: bytes = b""
    moved: dict[str, _Seen] = field(default_factory=dict[str, _Seen])
    shown: set[str] = field(default_factory=set[str])
    left_out: int = 0
    told: deque[dict[str, Any]] = field(default_factory=lambda: deque[dict[str, Any]](maxlen=MOST_TOLD))
    missed: int = 0
    fences: ShownSet | None = None
    begun: bool = False

    def notice(self, devices: Iterable[tuple[str, _Seen]]) -> None:
        """Note the devices that are in its box, and those that left it."""
        wanted, shown, moved = self.wanted, self.shown, self.moved
        for device, seen in devices:
            if wanted(seen.lon, seen.lat):
                if device not in shown:
                    if len(shown) >= MOST_SHOWN:
                        self.left_out += 1
                        continue
                    shown.add(device)
            elif device in shown:
                shown.discard(device)
            else:
                continue
            moved[device] = seen

    def hear(self, triggers: Iterable[dict[str, Any]], missed: int = 0) -> None:
        """Note triggers; where too many wait, the oldest are only counted."""
        self.missed += missed
        for trigger in triggers:
            if len(self.told) == MOST_TOLD:
                self.missed += 1
            self.told.append(trigger)

    def message(self) -> bytes:
        """Its news as events, and nothing noted any more; empty for none."""
        parts: list[bytes] = []
        if self.fences is not None:
            parts.append(_event("fences", {"revision": self.fences.revision, "total": len(self.fences.fences)}))
            self.fences = None
        if self.moved:
            rows = [(device, s.lon, s.lat, s.time_ms, s.stamp_ms) for device, s in self.moved.items()]
            parts.append(_event("devices", {"devices": rows, "left_out": self.left_out}))
            self.moved, self.left_out = {}, 0
        if self.told or self.missed:
            parts.append(_event("triggers", {"triggers": list(self.told), "missed": self.missed}))
            self.told.clear()
            self.missed = 0
        return b"".join(parts)


def _event(name: str, data: Mapping[str, Any]) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), _encode(data))


def whose(address: str) -> str:
    """Which addresses count as one: an IPv4 address, or the 64 bits of an IPv6 one that a provider hands out at least.

    Args:
        address: Of a client; a trusted proxy's word on it, where there is one.
    """
    try:
        read = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(read, ipaddress.IPv4Address):
        return str(read)
    return str(read.ipv4_mapped or ipaddress.IPv6Network((int(read) >> 64 << 64, 64)))


class LiveHub:
    """Reads for every listener in one thread, and only while there is one.

    Args:
        log: The event log.
        fences: The standing fences.
        metrics: The app's figures.
        shows_devices: Whether positions and triggers are read at all.
        max_clients: Listeners at once.
        max_of_one: Listeners at once of one address.
    """

    def __init__(
        self,
        log: EventLog,
        fences: FenceMap,
        metrics: Metrics,
        *,
        shows_devices: bool,
        max_clients: int = 100,
        max_of_one: int = 25,
    ) -> None:
        self._log, self._fences, self._metrics = log, fences, metrics
        self.shows_devices = shows_devices
        self._max_clients, self._max_of_one = max_clients, max_of_one
        self._places: set[LiveClient] = set()
        self._lock = threading.Lock()
        self._clients: set[LiveClient] = set()
        self._listeners = threading.Event()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        # In the reading thread alone.
        self._offsets: dict[str, dict[int, int]] = {}
        self._devices: OrderedDict[str, _Seen] = OrderedDict()
        self._recent: deque[dict[str, Any]] = deque(maxlen=RECENT)
        self._epochs = Epochs()
        self._keys: OrderedDict[bytes, None] = OrderedDict()
        self._set: ShownSet | None = None

    # -- life --------------------------------------------------------------------------------------------------------
    async def start(self) -> None:
        """Start the thread, which waits for a first listener."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="live", daemon=True)
        self._thread.start()

    def end_streams(self) -> None:
        """End every stream, so that the server can close."""
        for client in self._clients:
            client.ended = True
            client.wake.set()

    async def stop(self) -> None:
        """End the streams and the thread."""
        self.end_streams()
        self._stop.set()
        self._listeners.set()
        if self._thread is not None:
            await anyio.to_thread.run_sync(self._thread.join)

    # -- in the event loop -------------------------------------------------------------------------------------------
    def client(self, wanted: Wanted, address: str = "") -> LiveClient:
        """A listener to be followed; it has its place from here on until it is told to `leave`.

        Args:
            wanted: What it asks for.
            address: Its address.

        Raises:
            TooManyClients: Every place is taken.
            TooManyOfOne: This address has its share.
        """
        one = whose(address)
        if sum(client.whose == one for client in self._places) >= self._max_of_one:
            raise TooManyOfOne
        if len(self._places) >= self._max_clients:
            raise TooManyClients
        client = LiveClient(wanted, one)
        self._places.add(client)
        return client

    def leave(self, client: LiveClient) -> None:
        """Give a listener's place to others."""
        self._places.discard(client)

    async def follow(self, client: LiveClient) -> AsyncIterator[bytes]:
        """The stream's bytes."""
        with self._lock:
            self._clients.add(client)
        self._metrics.live_clients.set(len(self._clients))
        self._listeners.set()
        try:
            yield b"retry: %d\n\n" % RETRY_MS
            while True:
                await client.wake.wait()
                client.wake.clear()
                if client.ended:
                    yield b"retry: %d\n\n" % come_again_ms()
                    return
                if client.ready:
                    message, client.ready = client.ready, b""
                    yield message
                    # Asked for more: the transport took it.
                    client.free = True
        finally:
            with self._lock:
                self._clients.discard(client)
                if not self._clients:
                    self._listeners.clear()
            self._metrics.live_clients.set(len(self._clients))

    def _hand_over(self, client: LiveClient, message: bytes) -> None:
        client.ready = message
        client.wake.set()

    # -- in the thread -----------------------------------------------------------------------------------------------
    def _run(self) -> None:
        failing = False
        looked = 0.0
        while True:
            if not self._listeners.is_set():
                # Nobody looks: nothing is read, and where devices were is forgotten.
                self._offsets.clear()
                self._devices.clear()
                self._recent.clear()
                self._set = None
                looked = 0.0
                self._listeners.wait()
            if self._stop.is_set():
                return
            began = time.monotonic()
            try:
                if began - looked >= FENCES_S:
                    looked = began
                    self._look_at_fences()
                self._round()
                failing = False
            except (LogError, LedgerError, TileStoreError) as error:
                self._metrics.log_faults.inc()
                if not failing:
                    structlog.get_logger().warning("live stream waits", error=str(error))
                failing = True
            except RuntimeError:
                return  # the event loop has closed
            except Exception as error:
                # A record that nobody foresaw costs a round, not the stream.
                if not failing:
                    structlog.get_logger().error("live stream fails", error=type(error).__name__)
                failing = True
            rest = PAUSE_S if failing else TICK_S - (time.monotonic() - began)
            self._stop.wait(max(0.05, rest))

    def _listening(self) -> list[LiveClient]:
        with self._lock:
            return list(self._clients)

    def _look_at_fences(self) -> None:
        current = self._fences.current()
        if self._set is not None and current.name == self._set.name:
            return
        self._set = current
        for client in self._listening():
            if client.begun:
                client.fences = current

    def _round(self) -> None:
        clients = self._listening()
        moved: dict[str, _Seen] = {}
        triggers: list[dict[str, Any]] = []
        missed = 0
        if self.shows_devices and any(client.wanted.devices for client in clients):
            moved = self._positions()
        if self.shows_devices and any(client.wanted.triggers for client in clients):
            triggers, missed = self._triggers()
        loop = self._loop
        assert loop is not None
        for client in clients:
            if not client.begun:
                client.begun = True
                client.fences = self._set
                if client.wanted.devices:
                    client.notice(self._devices.items())
                if client.wanted.triggers:
                    client.hear(self._recent)
            else:
                if client.wanted.devices:
                    client.notice(moved.items())
                if client.wanted.triggers:
                    client.hear(triggers, missed)
            if not client.free:
                self._metrics.live_coalesced.inc()
                continue
            message = client.message()
            if message:
                client.free = False
                loop.call_soon_threadsafe(self._hand_over, client, message)

    def _positions(self) -> dict[str, _Seen]:
        """The newest of each device that was heard, noted."""
        now, now_ms = time.monotonic(), time.time() * 1000
        devices = self._devices
        moved: dict[str, _Seen] = {}
        records, skipped = self._next(POSITIONS, POSITIONS_A_ROUND)
        self._metrics.live_skipped.labels("positions").inc(skipped)
        for record in records:
            try:
                fix = _fix(record.value or b"")
            except (msgspec.MsgspecError, UnicodeDecodeError):
                continue  # Routing makes the dead letter.
            device = fix.device_id
            if not device or len(device) > LONGEST_ID or not (-180 <= fix.lon <= 180 and -90 <= fix.lat <= 90):
                continue
            known, when = devices.get(device), fix.when(record.timestamp_ms)
            if known is not None and when < known.time_ms <= now_ms + SKEW_MS:
                continue
            moved[device] = devices[device] = _Seen(
                fix.lon, fix.lat, when, record.timestamp_ms, now
            )  # fmt: skip
            devices.move_to_end(device)
        while devices and (len(devices) > MOST_DEVICES or now - next(iter(devices.values())).heard > SILENT_S):
            devices.popitem(last=False)
        return moved

    def _triggers(self) -> tuple[list[dict[str, Any]], int]:
        """Triggers that count, as docs/triggers.md has it, and how many records were passed over unread."""
        found: list[dict[str, Any]] = []
        records, skipped = self._next(TRIGGERS, TRIGGERS_A_ROUND)
        self._metrics.live_skipped.labels("triggers").inc(skipped)
        for record in records:
            value = record.value or b""
            epoch = epoch_of_mark(value)
            if epoch is not None:
                self._epochs.valid(record.partition, epoch)
                continue
            try:
                trigger = decode(value)
            except FrameError:
                continue
            if not self._epochs.valid(record.partition, trigger.epoch):
                continue
            known = key(trigger)
            if known in self._keys:
                continue
            self._keys[known] = None
            if len(self._keys) > REMEMBERED_KEYS:
                self._keys.popitem(last=False)
            found.append(self._shown(trigger))
        found.sort(key=lambda trigger: trigger["event_time_ms"])
        self._recent.extend(found)
        return found, skipped

    def _shown(self, trigger: Trigger) -> dict[str, Any]:
        shown = to_json(trigger)
        fence = None if self._set is None else self._set.by_key.get(trigger.fence_id)
        if fence is not None:
            shown["fence_name"], shown["fence_at"] = fence.name, fence.middle
        return shown

    def _next(self, topic: str, most: int) -> tuple[list[Record], int]:
        """Records from where the last round ended, or a little before the end; how many were passed over."""
        extents = self._log.extents(topic)
        share = max(100, most // max(1, len(extents)))
        offsets = self._offsets.get(topic)
        if offsets is None:
            back = min(share, LOOK_BACK // max(1, len(extents)))
            offsets = self._offsets[topic] = {p: max(e.begin, e.end - back) for p, e in extents.items()}
        records: list[Record] = []
        skipped = 0
        for partition, extent in extents.items():
            offset = offsets.setdefault(partition, extent.begin)
            if not extent.begin <= offset <= extent.end:
                offset = extent.begin if offset < extent.begin else extent.end
            if extent.end - offset > share:
                skipped += extent.end - share - offset
                offset = extent.end - share
            if offset < extent.end:
                try:
                    found = self._log.read(topic, partition, offset, max_records=share)
                except OffsetOutOfRange as gone:
                    found, offset = [], gone.begin
                except LogError:
                    if not records:
                        raise
                    break  # What was read is shown; the others are read in the next round.
                records += found
                offset = found[-1].offset + 1 if found else offset
            offsets[partition] = offset
        return records, skipped
