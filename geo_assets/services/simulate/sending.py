"""Where positions go: to the edge as signed bodies, or straight to `[positions]`. Neither is ever waited for.

What waits is bounded; when that is full, what is due next is shed and counted.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from geo_assets.events import topics
from geo_assets.events.signature import sign
from geo_assets.services.simulate.tally import SimulationError, Tally
from resources.event_log.protocol import InvalidRecord, LogError, Publisher, RecordTooLarge

if TYPE_CHECKING:
    import httpx

    from geo_assets.events.sources import Source
    from geo_assets.simulation.fleet import Sent
    from resources.event_log.protocol import EventLog

MAX_WAITING = 200_000
"""Positions that may wait: 60 MB, and more seconds than any pause of a broker that is worth measuring."""

BODY_POSITIONS = 1_000
"""Most positions of one body, 150 kB: the edge reads it in a few milliseconds."""

LANES = 2
"""Connections to the edge: one body is on its way while another is read. A device's positions all go through one of
them: none overtakes the one before."""

_PAUSE_S = 0.5


class Sender(Protocol):
    """Takes positions as they are due."""

    @property
    def waiting(self) -> int:
        """Positions taken that are neither acknowledged nor refused."""
        ...

    def send(self, sent: Sent, ids: Sequence[str]) -> None:
        """Take positions; never waits. Raises SimulationError where no later one can succeed either."""
        ...

    def close(self, timeout_s: float) -> None:
        """Give what waits so long to get through, then end."""
        ...


def texts_of(sent: Sent, ids: Sequence[str], *, with_event_time: bool) -> list[str]:
    """The JSON text of each position.

    Args:
        sent: The positions.
        ids: Of the devices, by number; they hold no character that JSON escapes.
        with_event_time: As records of `[positions]` have it (`records.position_value`).
    """
    form = '{"device_id":"%s","lon":%.7f,"lat":%.7f,"time_ms":%d,"accuracy_m":%.1f,"speed_mps":%.2f,"heading_deg":%.0f'
    times = sent.time_ms.tolist()
    columns = [
        [ids[device] for device in sent.device.tolist()],
        sent.lon.tolist(),
        sent.lat.tolist(),
        times,
        sent.accuracy_m.tolist(),
        sent.speed_mps.tolist(),
        sent.heading_deg.tolist(),
    ]
    if with_event_time:
        form += ',"event_time_ms":%d}'
        columns.append(times)
    else:
        form += "}"
    return [form % row for row in zip(*columns, strict=True)]


class _Piece(NamedTuple):
    due_s: float
    texts: list[str]


class _Lane:
    """One connection with one request at a time."""

    def __init__(self) -> None:
        self.pieces: deque[_Piece] = deque()
        self.changed = threading.Condition()
        self.waiting = 0

    def put(self, piece: _Piece) -> None:
        with self.changed:
            self.pieces.append(piece)
            self.waiting += len(piece.texts)
            self.changed.notify()

    def take(self) -> _Piece:
        """What waits, up to a body; nothing where nothing came within a moment."""
        with self.changed:
            if not self.pieces:
                self.changed.wait(0.1)
            texts: list[str] = []
            due_s = self.pieces[0].due_s if self.pieces else 0.0
            while self.pieces and len(texts) < BODY_POSITIONS:
                piece = self.pieces.popleft()
                room = BODY_POSITIONS - len(texts)
                texts += piece.texts[:room]
                if len(piece.texts) > room:
                    self.pieces.appendleft(_Piece(piece.due_s, piece.texts[room:]))
            return _Piece(due_s, texts)

    def done(self, count: int) -> None:
        with self.changed:
            self.waiting -= count


class EdgeSender:
    """Signed bodies to `/v1/positions`.

    A body that the edge cannot take now (503, or it is away) is sent again under its id; one that it refuses is
    counted, and its reason shown.

    Args:
        url: Of the edge.
        source: Who signs.
        tally: Where it is counted.
    """

    def __init__(self, url: str, source: Source, tally: Tally) -> None:
        self._url, self._source, self._tally = url.rstrip("/"), source, tally
        self._stop = threading.Event()
        self._fatal: str | None = None
        self._lanes = [_Lane() for _ in range(LANES)]
        self._threads = [
            threading.Thread(target=self._run, args=(lane,), name=f"simulate-{number}", daemon=True)
            for number, lane in enumerate(self._lanes)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def waiting(self) -> int:
        """Positions that the edge has not answered for."""
        return sum(lane.waiting for lane in self._lanes)

    def send(self, sent: Sent, ids: Sequence[str]) -> None:
        """Hand positions to their lanes."""
        if self._fatal is not None:
            raise SimulationError(self._fatal)
        if self.waiting + len(sent) > MAX_WAITING:
            self._tally.add("shed", len(sent))
            return
        now = time.monotonic()
        for number, lane in enumerate(self._lanes):
            rows = np.flatnonzero(sent.device % LANES == number)
            if len(rows):
                lane.put(_Piece(now, texts_of(sent.rows(rows), ids, with_event_time=False)))

    def close(self, timeout_s: float) -> None:
        """Wait for the answers."""
        deadline = time.monotonic() + timeout_s
        while self.waiting and self._fatal is None and time.monotonic() < deadline:
            time.sleep(0.02)
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=5.0)

    def _run(self, lane: _Lane) -> None:
        import httpx

        with httpx.Client(timeout=35.0, trust_env=False) as client:
            while not self._stop.is_set():
                piece = lane.take()
                if piece.texts:
                    self._deliver(client, piece)
                    lane.done(len(piece.texts))

    def _deliver(self, client: httpx.Client, piece: _Piece) -> None:
        import httpx

        body = f"[{','.join(piece.texts)}]".encode()
        webhook_id = f"simulate-{uuid.uuid4().hex}"
        tally = self._tally
        while not self._stop.is_set():
            headers = {"content-type": "application/json", "x-source": self._source.name}
            headers |= sign(self._source.secrets[0], webhook_id, int(time.time()), body)
            try:
                answer = client.post(f"{self._url}/v1/positions", content=body, headers=headers)
            except httpx.TransportError as fault:
                tally.answered("unreachable")
                tally.problem = f"edge {self._url} cannot be reached: {fault}"
                self._stop.wait(_PAUSE_S)
                continue
            tally.answered(answer.status_code)
            if answer.status_code == 202:
                tally.acknowledged(len(piece.texts), (time.monotonic() - piece.due_s) * 1_000)
                return
            tally.problem = problem_of(answer)
            if answer.status_code in (401, 403):
                self._fatal = f"the edge refuses the source {self._source.name}: {tally.problem}"
                return
            if answer.status_code < 500 and answer.status_code not in (408, 429):
                tally.add("refused", len(piece.texts))
                return
            self._stop.wait(_PAUSE_S)


def problem_of(answer: httpx.Response) -> str:
    """One line of a problem document."""
    try:
        said = answer.json()
        return f"{answer.status_code} {said.get('title', '')}: {said.get('detail', '')}"[:300]
    except ValueError:
        return f"{answer.status_code} {answer.text[:200]}"


class LogSender:
    """Records of `[positions]`, through the log's publisher: for loads that no edge is to stand in front of.

    Args:
        log: The event log.
        tally: Where it is counted.
    """

    def __init__(self, log: EventLog, tally: Tally) -> None:
        self._log, self._tally = log, tally
        self._publisher: Publisher | None = log.publisher(topics.POSITIONS)
        self._due: deque[tuple[Sequence[str], Sequence[bytes]]] = deque()
        self._failed: list[tuple[Sequence[str], Sequence[bytes]]] = []
        self._not_before_s = 0.0

    @property
    def waiting(self) -> int:
        """Records that are not acknowledged."""
        under_way = self._publisher.under_way if self._publisher is not None else 0
        return under_way + sum(len(keys) for keys, _ in (*self._due, *self._failed))

    def send(self, sent: Sent, ids: Sequence[str]) -> None:
        """Send records, after those that failed."""
        if self.waiting + len(sent) > MAX_WAITING:
            self._tally.add("shed", len(sent))
        elif len(sent):
            devices: list[int] = sent.device.tolist()
            keys = [ids[device] for device in devices]
            values = [text.encode() for text in texts_of(sent, ids, with_event_time=True)]
            self._due.append((keys, values))
        self._serve()

    def close(self, timeout_s: float) -> None:
        """Wait for the acknowledgements."""
        deadline = time.monotonic() + timeout_s
        while self.waiting and time.monotonic() < deadline:
            self._serve(0.02)
            if self._publisher is None:
                time.sleep(0.02)
        if self._publisher is not None:
            # What it fails now is not sent again: it counts as waiting to the end.
            self._publisher.close()

    def _serve(self, timeout_s: float = 0.0) -> None:
        try:
            if self._publisher is None:
                if time.monotonic() < self._not_before_s:
                    return
                self._publisher = self._log.publisher(topics.POSITIONS)
            self._publisher.serve(timeout_s)
            if self._publisher.broken is not None:
                self._broke(self._publisher.broken)
                return
            while self._due:
                self._one(self._publisher, *self._due[0])
                self._due.popleft()
        except LogError as fault:
            self._broke(fault)

    def _broke(self, fault: LogError) -> None:
        """Begin again with another publisher, a moment later."""
        self._tally.problem = f"the event log does not take positions: {fault}"
        self._tally.answered("log unavailable")
        self._not_before_s = time.monotonic() + _PAUSE_S
        broken, self._publisher = self._publisher, None
        if broken is not None:
            broken.close()  # It tells of all it had under way, in the order in which that was sent.
        self._due.extendleft(reversed(self._failed))
        self._failed.clear()

    def _one(self, publisher: Publisher, keys: Sequence[str], values: Sequence[bytes]) -> None:
        began = time.monotonic()

        def done(failed: Mapping[int, LogError], _: Sequence[int]) -> None:
            taken = len(keys) - len(failed)
            if taken:
                self._tally.acknowledged(taken, (time.monotonic() - began) * 1_000)
            refused = [place for place, fault in failed.items() if isinstance(fault, RecordTooLarge | InvalidRecord)]
            self._tally.add("refused", len(refused))
            again = sorted(failed.keys() - set(refused))
            if again:
                self._failed.append(([keys[place] for place in again], [values[place] for place in again]))

        publisher.send(keys, values, done)
