"""Fences that are drawn on the page: checked by a process that has the geometry library, then written as the edge does.

Where the map has a layer of fences, they are features of it, and reach `[fences]` from the store as every other one
does; else they go there at once. The page holds no secret: who may save is decided by the setting, the origin
(`private`) and whatever stands in front.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import sys
import time
import uuid
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

import anyio.to_thread
import msgspec
from starlette.requests import ClientDisconnect

from geo_assets.events import topics
from geo_assets.events.models import EnvelopeError, FenceEvent, feature_id_text, read_events
from geo_assets.events.records import feature_key
from geo_assets.services.event_records import event_record, headers_of
from geo_assets.services.problems import ProblemError, unavailable
from geo_assets.services.tileserver.models import SavedFence
from resources.event_log.protocol import NewRecord, RecordTooLarge

if TYPE_CHECKING:
    from starlette.requests import Request

    from geo_assets.events.sources import Source
    from geo_assets.services.tileserver.fences import FenceMap
    from geo_assets.services.tileserver.metrics import Metrics
    from geo_assets.tiles.layers import LayerSet
    from resources.event_log.protocol import EventLog

BODY_BYTES: Final = 256_000
"""Some 6,000 corners: more than anybody draws. Larger fences are posted to the edge."""
CHECK_S: Final = 10.0
"""Longest that a fence may take to be checked; what takes longer is hostile."""
START_S: Final = 30.0
"""Longest that the checking process may take to start."""
IDLE_S: Final = 120.0
"""The process ends after so long without a fence: it holds 100 MB of libraries."""
WAITING: Final = 8
"""Fences that may wait for it at once; people draw one at a time."""

_MEMBERS: Final = ("name", "radius_m", "width_m", "dwell_s", "hysteresis_m", "priority", "schedule")

CONTENT_TYPES: Final = ("application/json", "application/geo+json")
"""A form or a script of another site can send neither without asking first, and is told no."""


def can_draw() -> bool:
    """Whether the geometry library is installed; a slim image of the tile server has none."""
    return find_spec("shapely") is not None and find_spec("pyproj") is not None


class Drawing:
    """Checks and writes fences.

    Args:
        log: `[fences]` must be declared in it.
        fences: The standing ones.
        source: Whose fences those are that are drawn.
        layer: The layer of fences that this source may write; None where there is none.
        metrics: The app's figures.
    """

    def __init__(self, log: EventLog, fences: FenceMap, source: str, layer: str | None, metrics: Metrics) -> None:
        self._log, self._fences, self._source, self._layer, self._metrics = log, fences, source, layer, metrics
        self._checker = _Checker()
        self._waiting = 0
        self._stamp = 0

    async def save(self, request: Request) -> SavedFence:
        """Check the fence of a request, or the deletion of one, and write it.

        Raises:
            ProblemError: What is wrong with it; nothing was written.
            LogError, LedgerError, TileStoreError: Not now.
        """
        try:
            saved = await self._save(request)
        except ProblemError:
            self._metrics.fences_saved.labels("refused").inc()
            raise
        self._metrics.fences_saved.labels("saved").inc()
        return saved

    async def _save(self, request: Request) -> SavedFence:
        body = await _body(request)
        event = await anyio.to_thread.run_sync(_event, body, self._source)
        key = feature_key(self._source, feature_id_text(event.id) or "")
        standing = (await anyio.to_thread.run_sync(self._fences.current)).by_key.get(key)
        # Never less than before: the clock may be set back, and the time is the version of what says none.
        self._stamp = received_ms = max(self._stamp + 1, time.time_ns() // 1_000_000)
        version = received_ms if event.version is None else event.version
        if standing is not None and standing.revision >= version:
            raise ProblemError(
                409, "version", "The fence that stands has a higher version, of its own upstream; change it there.",
                field="version", value=version, limit=f"> {standing.revision}",
            )  # fmt: skip
        if event.action == "delete":
            if standing is None:
                raise ProblemError(404, "fence", "There is no such fence any more.", field="id", value=key)
        else:
            await self._check(body)
        event_id = f"drawn-{uuid.uuid4()}"
        record = event_record(event, source=self._source, event_id=event_id, received_ms=received_ms)
        records = [record]
        if self._layer is not None:
            feature = _feature_record(event, self._source, self._layer, event_id, version, received_ms)
            # A deletion goes both ways: the fence may never have been a feature. Under one version it counts once.
            records = [record, feature] if event.action == "delete" else [feature]
        try:
            await anyio.to_thread.run_sync(self._log.append, records)
        except RecordTooLarge as error:
            raise ProblemError(413, "too-large", f"The fence is larger than the log takes: {error}.") from None
        return SavedFence(event_id=event_id, key=key, received_ms=received_ms)

    async def _check(self, body: bytes) -> None:
        if self._waiting >= WAITING:
            raise unavailable("Too many fences are being checked.", 2)
        self._waiting += 1
        try:
            fault = await self._checker.check(body, self._source)
        finally:
            self._waiting -= 1
        if fault:
            raise ProblemError(
                422, fault["reason"], fault["detail"], field=fault["field"], value=fault["value"], limit=fault["limit"]
            )

    async def close(self) -> None:
        """End the checking process."""
        await self._checker.close()


def layer_of(layers: LayerSet, source: Source | None) -> str | None:
    """The layer that drawn fences are features of: the first one that holds fences and that their source may write."""
    if source is None:
        return None
    return next((layer.name for layer in layers.layers if layer.fences and source.may_write(layer.name)), None)


def _feature_record(
    event: FenceEvent, source: str, layer: str, event_id: str, version: int, received_ms: int
) -> NewRecord:
    """The record of `[raw]` by which a fence becomes a feature: what is said of it stands in the properties."""
    said = {name: getattr(event, name) for name in _MEMBERS if getattr(event, name) is not None}
    feature: dict[str, Any] = {"type": "Feature", "id": event.id, "version": version, "layer": layer}
    if event.action == "delete":
        feature |= {"action": "delete"}
    else:
        feature |= {"geometry": event.geometry, "properties": {**(event.properties or {}), **said}}
    value = msgspec.json.encode(feature)
    headers = headers_of("features", source, event_id, received_ms) | {
        topics.HEADER_SHA256: hashlib.sha256(value).hexdigest(),
        topics.HEADER_CONTENT_TYPE: "application/geo+json",
        topics.HEADER_CRS: "EPSG:4326",
    }
    return NewRecord(topics.RAW, feature_key(source, feature_id_text(event.id) or ""), value, headers, received_ms)


async def _body(request: Request) -> bytes:
    media_type, _, parameters = request.headers.get("content-type", "").partition(";")
    charset = parameters.strip().lower().removeprefix("charset=").strip('"') or "utf-8"
    if media_type.strip().lower() not in CONTENT_TYPES or charset != "utf-8":
        raise ProblemError(
            415, "content-type", "A fence is JSON in UTF-8.", field="Content-Type", value=media_type,
            limit=", ".join(CONTENT_TYPES),
        )  # fmt: skip
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise ProblemError(415, "encoding", "A fence is sent as it is.", field="Content-Encoding", limit="identity")
    body = bytearray()
    try:
        async with asyncio.timeout(CHECK_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > BODY_BYTES:
                    raise ProblemError(
                        413, "too-large", "A fence that is drawn is smaller; post larger ones to the edge.",
                        field="Content-Length", value=len(body), limit=BODY_BYTES,
                    )  # fmt: skip
    except TimeoutError:
        raise ProblemError(408, None, "The body stopped coming.") from None
    except ClientDisconnect:
        raise ProblemError(400, None, "The body ended early.") from None
    return bytes(body)


def _event(body: bytes, source: str) -> FenceEvent:
    try:
        events = read_events(body, "fences")
    except EnvelopeError as fault:
        raise ProblemError(
            400, "envelope", f"{fault.field}: {fault.problem}", field=fault.field, value=fault.value, limit=fault.limit
        ) from None
    if len(events) != 1:
        raise ProblemError(400, "envelope", "One fence at a time.", field="$", value=len(events), limit=1)
    event = events[0]
    assert isinstance(event, FenceEvent)
    if event.source is not None and event.source != source:
        raise ProblemError(
            403, "source", f"Fences that are drawn are of the source {source}.",
            field="source", value=event.source, limit=source,
        )  # fmt: skip
    return event


class _Checker:
    """The process that checks fences: started when first needed, ended when it hangs or is not needed any more."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._one = asyncio.Lock()
        self._idle: asyncio.TimerHandle | None = None

    async def check(self, body: bytes, source: str) -> dict[str, Any]:
        """What is wrong with a fence; empty for nothing.

        Raises:
            ProblemError: It took too long, or the process does not start.
        """
        async with self._one:
            if self._idle is not None:
                self._idle.cancel()
            asked = json.dumps({"body": base64.b64encode(body).decode(), "source": source}).encode()
            fresh = self._process is None or self._process.returncode is not None
            try:
                process = self._process = await self._started() if fresh else self._process
                assert process is not None
                assert process.stdin is not None
                assert process.stdout is not None
                async with asyncio.timeout(START_S if fresh else CHECK_S):
                    process.stdin.write(asked + b"\n")
                    await process.stdin.drain()
                    answer = await process.stdout.readline()
                    if not answer:
                        raise ConnectionResetError
            except TimeoutError:
                await self._end()
                raise ProblemError(
                    422, "timeout", "The fence takes too long to be checked.", field="geometry", limit=f"{CHECK_S:g} s"
                ) from None
            except OSError:
                await self._end()
                raise unavailable("The fence could not be checked; try again.", 2) from None
            except BaseException:
                # Whoever asked is gone: the answer under way must not be the next one's.
                await self._end()
                raise
            self._idle = asyncio.get_running_loop().call_later(IDLE_S, self._rest)
            return msgspec.json.decode(answer)

    async def _started(self) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", "geo_assets.services.fence_check", stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE, limit=2**20,
        )  # fmt: skip

    def _rest(self) -> None:
        if self._process is not None and self._process.stdin is not None and not self._one.locked():
            self._process.stdin.close()  # At the end of its input it ends by itself.
            self._process = None

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await asyncio.shield(process.wait())

    async def close(self) -> None:
        """End the process."""
        if self._idle is not None:
            self._idle.cancel()
        await self._end()
