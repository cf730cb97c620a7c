"""The edge: takes signed events over HTTP and answers 202 once the event log has them.

What is checked here is who sent a body and whether its envelope can be read; no geometry is parsed. Loads without
dagster and without a geometry library. Reading bodies is in edge_body.py, appending in edge_log.py, the description of
the endpoints in edge_api.py.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import structlog
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from geo_assets import configuration, ports
from geo_assets.events import topics
from geo_assets.events.models import (
    SEQUENCE_TYPES,
    EnvelopeError,
    FenceEvent,
    PositionEvent,
    TileEvent,
    read_envelope,
    read_events,
)
from geo_assets.events.signature import SignatureError, Signed, Verifier
from geo_assets.events.sources import Source, Sources, UnknownSource
from geo_assets.services import http_server, tracing
from geo_assets.services.edge_api import edge_document
from geo_assets.services.edge_body import MemoryBudget, Spool, digest, gunzip, receive
from geo_assets.services.edge_log import Appender, Submission
from geo_assets.services.edge_metrics import EdgeMetrics
from geo_assets.services.edit_stages import Stamps, now_us
from geo_assets.services.event_records import event_record, headers_of, part_of
from geo_assets.services.problems import ProblemError, exception_handlers, problem_response, unavailable
from resources.event_log.protocol import EventLog, LogError, NewRecord, RecordTooLarge
from resources.guard.protocol import Guard
from resources.tile_store.protocol import TileStore, TileStoreError

if TYPE_CHECKING:
    from geo_assets.settings import Settings

MAX_OPEN = 1_000
"""Requests at work at once; one more is answered 503. At 500 a second and 20 ms each there are ten."""

MEMORY_BYTES = 64_000_000
"""Bytes of all bodies held in memory together; with the budget spent, bodies are spooled to disk."""

TINY_BYTES = 16_000
"""A body up to here is read in the log's own thread, just before its records are appended: half a millisecond at most,
and a change of threads costs as much as reading 1 kB."""

LARGE_BYTES = 256_000
"""A body from here on waits for one of the places for large ones, so that small ones never wait behind it."""

LARGE_PLACES = 2
"""Large bodies taken apart at once: reading 10 MB of JSON takes ten times as much memory for a moment."""

IDLE_S = 30.0
"""Seconds without a byte after which a sender is given up."""

LOG_WAIT_S = 30.0
"""Seconds after which a request no longer waits for the log; the sender repeats it under the same id."""

_MAX_CRS = 2_000
"""Characters of X-Source-CRS: the longest WKT of a CRS in EPSG's register has about 1,800."""

logger = structlog.get_logger()

_JSON = ("application/json", "application/geo+json")
_encode = msgspec.json.Encoder().encode

_SPAN = "geo_assets.span"
"""Where a request's scope holds its span."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """One endpoint: which topic it feeds and which content types it reads."""

    name: str
    topic: str
    content_types: frozenset[str]


_KINDS = (
    _Kind("features", topics.RAW, frozenset((*_JSON, *SEQUENCE_TYPES))),
    _Kind("tiles", topics.TILES, frozenset(_JSON[:1])),
    _Kind("positions", topics.POSITIONS, frozenset(_JSON[:1])),
    _Kind("fences", topics.FENCES, frozenset(_JSON)),
)


@dataclass(frozen=True, slots=True)
class _Facts:
    """What a verified request said beside its body."""

    kind: _Kind
    source: Source
    signed: Signed
    content_type: str
    crs: str | None
    callback: str | None
    received_us: int
    """When it was read and verified, microseconds since the epoch, UTC, never falling."""
    span: tracing.Span | None = None
    """Where it is traced."""

    @property
    def received_ms(self) -> int:
        """The same in milliseconds: the event time of what has none."""
        return self.received_us // 1_000


class _Edge:
    """The endpoints and what they share."""

    def __init__(self, log: EventLog, guard: Guard, tiles: TileStore, sources: Sources, settings: Settings) -> None:
        self.log, self.tiles, self.sources, self.settings = log, tiles, sources, settings
        self.metrics = EdgeMetrics(waiting=lambda: self.appender.waiting, open_requests=lambda: self.open)
        self.appender = Appender(
            log,
            guard,
            # Twice the retention (settings): a repetition is still known when the record it repeats is gone.
            guard_ttl_s=2 * settings.retention_s,
            on_append=self.metrics.appended,
            on_guard_fault=self.metrics.guard_faults.inc,
        )
        self.budget = MemoryBudget(MEMORY_BYTES)
        self.spool_folder = settings.home / "spool"
        self.open = 0
        self.small = ThreadPoolExecutor(4, thread_name_prefix="edge")
        self.large = ThreadPoolExecutor(LARGE_PLACES, thread_name_prefix="edge-large")
        self.large_places = asyncio.Semaphore(LARGE_PLACES)
        # Headers and key count against the log's limit too.
        limits = {name: spec.max_record_bytes for name, spec in log.topics().items()}
        self.inline_limit = {name: limit - min(16_384, limit // 8) for name, limit in limits.items()}
        self.last_received_us = 0

    # -- lifetime ------------------------------------------------------------------------------------------------
    @asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        """Append while the app runs; at its end what waits is still appended."""
        self.appender.start()
        try:
            yield
        finally:
            await self.appender.stop()
            self.small.shutdown()
            self.large.shutdown()

    # -- endpoints -----------------------------------------------------------------------------------------------
    def endpoint(self, kind: _Kind) -> Callable[[Request], Awaitable[Response]]:
        """The handler of `POST /v1/<kind>`."""

        async def handle(request: Request) -> Response:
            began = time.perf_counter()
            if self.open >= MAX_OPEN:
                self.metrics.answered(kind.name, 503, 0.0)
                return problem_response(unavailable(f"More than {MAX_OPEN} requests are at work.", 1))
            self.open += 1
            status = 500
            try:
                response = await self.accept(kind, request)
                status = response.status_code
            except ProblemError as problem:
                status = problem.status
                response = problem_response(problem)
            except ClientDisconnect:
                # Nobody is left to answer; the record of a body that ended early is never made.
                status, response = 499, Response(status_code=400)
            finally:
                self.open -= 1
                self.metrics.answered(kind.name, status, time.perf_counter() - began)
                if (span := request.scope.get(_SPAN)) is not None:
                    span.set_attribute("http.response.status_code", status)
                    span.end()
            return response

        return handle

    async def accept(self, kind: _Kind, request: Request) -> Response:
        """Everything between a request and its 202."""
        arrived_ns = tracing.now_ns()
        headers = _headers(request)
        source = self.source(headers)
        try:
            verifier = Verifier(headers, source.secrets, time.time(), self.settings.clock_tolerance_s)
        except SignatureError as fault:
            raise _unsigned(fault) from None
        content_type = _content_type(headers, kind)
        gzipped = _gzipped(headers)
        crs, callback = _crs(headers), _callback(headers, source)
        limit = self.body_limit(kind, source)
        spool = self.spool()
        try:
            await receive(
                request.stream(),
                spool,
                on_chunk=verifier.update,
                limit=limit,
                declared=headers.get("content-length"),
                executor=self.large,
                idle_s=IDLE_S,
            )
            self.metrics.bytes_in.labels(kind.name).inc(spool.size)
            try:
                signed = verifier.finish()
            except SignatureError as fault:
                raise _unsigned(fault) from None
            span = None if tracing.ACTIVE is None else _span(kind, source, headers, arrived_ns)
            request.scope[_SPAN] = span
            facts = _Facts(kind, source, signed, content_type, crs, callback, self.stamp(), span)
            if spool.size <= LARGE_BYTES and not gzipped:
                return await self.submit(facts, spool, self.small)
            async with self.large_places:
                if gzipped:
                    sent, spool = spool, self.spool()
                    try:
                        await self.run(self.large, gunzip, sent, spool, limit)
                    finally:
                        sent.close()
                return await self.submit(facts, spool, self.large)
        finally:
            spool.close()

    async def submit(self, facts: _Facts, spool: Spool, executor: Executor) -> Response:
        """Make the records, append them, answer."""
        make = partial(self.prepare, facts, spool)
        if spool.size > TINY_BYTES or spool.on_disk:
            made = await self.run(executor, make)
            make = lambda: made  # noqa: E731
        try:
            async with asyncio.timeout(LOG_WAIT_S):
                outcome, event_id = await self.appender.submit(make, spool.size)
        except RecordTooLarge as error:
            raise ProblemError(413, "too-large", f"One event is larger than the log takes: {error}.") from error
        except LogError as error:
            raise unavailable("The event log cannot take records now; send it again under the same id.", 2) from error
        except TimeoutError:
            detail = f"The event log did not answer within {LOG_WAIT_S:g} s; send it again under the same id."
            raise unavailable(detail, 5) from None
        self.metrics.outcomes.labels(facts.kind.name, outcome).inc()
        if facts.span is not None:
            facts.span.set_attribute("geo_assets.event_id", event_id)
            facts.span.set_attribute("geo_assets.outcome", outcome)
        if outcome == "conflict":
            detail = "This webhook-id came before with another body. A changed body is a new message with a new id."
            raise ProblemError(409, "webhook-id", detail, field="webhook-id", value=facts.signed.webhook_id)
        logger.debug("accepted", event_id=event_id, kind=facts.kind.name, source=facts.source.name, outcome=outcome)
        answer: dict[str, Any] = {"status": outcome, "event_id": event_id}
        if outcome == "queued":
            answer["received_ms"] = facts.received_ms
            self.metrics.acknowledged(facts.kind.name, facts.received_us)
        return Response(_encode(answer), status_code=202, media_type="application/json")

    # -- records (in a worker thread) ----------------------------------------------------------------------------
    def prepare(self, facts: _Facts, spool: Spool) -> Submission:
        """The records of a body.

        Raises:
            ProblemError: 400 for the envelope, 403 for a layer or source that is not the sender's, 503 when the inbox
                takes nothing.
        """
        sha256 = digest(spool)
        try:
            if facts.kind.name == "features":
                records, event_id = self.raw_records(facts, spool, sha256)
            else:
                event_id = facts.signed.webhook_id or sha256
                events = read_events(spool.bytes(), facts.kind.name)
                for event in events:
                    _own(facts.source, event.source)
                records = [
                    self.event_record(facts, event, event.event_id or part_of(event_id, index, len(events)))
                    for index, event in enumerate(events)
                ]
                if len(events) == 1:
                    event_id = events[0].event_id or event_id
        except EnvelopeError as fault:
            raise _bad_envelope(fault, facts.kind) from None
        webhook_id = facts.signed.webhook_id
        return Submission(
            records,
            guard_key=None if webhook_id is None else f"webhook:{facts.source.name}:{webhook_id}",
            fingerprint=f"{facts.kind.name}:{sha256}",
            event_id=event_id,
        )

    def raw_records(self, facts: _Facts, spool: Spool, sha256: str) -> tuple[list[NewRecord], str]:
        """The one record of a body of features: the body itself, or a pointer to it in the inbox."""
        body = spool.bytes()
        envelope = read_envelope(body, "features", facts.content_type)
        source = facts.source
        _own(source, envelope.source)
        if envelope.layer is not None and not source.may_write(envelope.layer):
            detail = f"The source {source.name} may not write the layer {envelope.layer[:80]}."
            allowed = ", ".join(sorted(source.layers or ()))
            raise ProblemError(403, "layer", detail, field="layer", value=envelope.layer, limit=allowed)
        event_id = envelope.event_id or facts.signed.webhook_id or sha256
        headers = headers_of(facts.kind.name, source.name, event_id, facts.received_ms)
        headers[topics.HEADER_STAGES] = Stamps(received=facts.received_us).to_json()
        headers |= _trace(facts.span)
        headers[topics.HEADER_SHA256] = sha256
        headers[topics.HEADER_CONTENT_TYPE] = facts.content_type
        if facts.crs is not None:
            headers[topics.HEADER_CRS] = facts.crs
        if facts.callback is not None:
            headers[topics.HEADER_CALLBACK] = facts.callback
        if spool.on_disk or spool.size > self.inline_limit[topics.RAW]:
            name = ports.inbox_object(sha256)
            try:
                self.tiles.put(name, body)
            except TileStoreError as error:
                raise unavailable("The inbox cannot take the body now; send it again under the same id.", 5) from error
            headers[topics.HEADER_POINTER] = name
            body = b""
        key = f"{source.name}:{envelope.feature_id if envelope.feature_id is not None else event_id}"
        return [NewRecord(topics.RAW, key, body, headers, facts.received_ms)], event_id

    def event_record(self, facts: _Facts, event: TileEvent | PositionEvent | FenceEvent, event_id: str) -> NewRecord:
        """The record of one tile, position or fence event."""
        if isinstance(event, TileEvent) and event.bbox_agrees() is False:
            self.metrics.bbox_disagrees.inc()
        made = event_record(
            event,
            source=facts.source.name,
            event_id=event_id,
            received_ms=facts.received_ms,
            crs=facts.crs,
            callback=facts.callback,
        )
        if made.topic != topics.TILES:
            return made
        # It goes to the builders as it is: received is hinted.
        stamps = Stamps(received=facts.received_us, hinted=facts.received_us)
        return replace(made, headers={**made.headers, topics.HEADER_STAGES: stamps.to_json(), **_trace(facts.span)})

    # -- small things --------------------------------------------------------------------------------------------
    def source(self, headers: Mapping[str, str]) -> Source:
        """Who speaks: what X-Source names, or the only source there is."""
        name = headers.get("x-source")
        try:
            return self.sources.resolve(name)
        except UnknownSource:
            if name:
                # Whether a source exists is told to nobody without its secret.
                raise _unsigned("no signature matches the body") from None
            detail = "X-Source is missing: it names the source that signs, and there is not exactly one."
            raise ProblemError(400, "source", detail, field="X-Source") from None

    def body_limit(self, kind: _Kind, source: Source) -> int:
        """Bytes a body may have; a list of small events is read whole and so may have fewer."""
        limit = self.settings.body_limit_bytes
        if kind.name != "features":
            limit = min(limit, self.settings.stream_above_bytes)
        return limit if source.max_body_bytes is None else min(limit, source.max_body_bytes)

    def spool(self) -> Spool:
        """A new, empty spool."""
        return Spool(self.spool_folder, self.settings.stream_above_bytes, self.budget)

    def stamp(self) -> int:
        """Now in microseconds since the epoch, never less than before: the clock may be set back."""
        self.last_received_us = max(self.last_received_us, now_us())
        return self.last_received_us

    async def run(self, executor: Executor, function: Callable[..., Any], *args: Any) -> Any:
        """Run it off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(executor, function, *args)

    async def healthz(self, _: Request) -> Response:
        """Alive."""
        return Response(b'{"status":"ok"}', media_type="application/json")

    async def readyz(self, _: Request) -> Response:
        """Ready: the log answers and knows every topic that is fed."""
        try:
            async with asyncio.timeout(5):
                known = await self.run(self.small, self.log.topics)
        except (LogError, TimeoutError):
            return problem_response(unavailable("The event log does not answer.", 5))
        missing = sorted({kind.topic for kind in _KINDS} - set(known))
        if missing:
            return problem_response(unavailable(f"The event log has no topic {missing[0]}.", 5))
        return Response(b'{"status":"ready"}', media_type="application/json")

    async def show_metrics(self, _: Request) -> Response:
        """Prometheus text format."""
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def create_app(log: EventLog, guard: Guard, tiles: TileStore, sources: Sources, settings: Settings) -> Starlette:
    """The edge as an ASGI application; its lifespan must run.

    Args:
        log: Where events go; its topics must be declared.
        guard: Remembers webhook ids.
        tiles: The tile store; bodies larger than a record go to its inbox.
        sources: Who may write.
        settings: Limits and folders.
    """
    edge = _Edge(log, guard, tiles, sources, settings)
    openapi = _encode(edge_document(settings.public_edge_url))

    async def show_openapi(_: Request) -> Response:
        return Response(openapi, media_type="application/json")

    routes = [
        *(Route(f"/v1/{kind.name}", edge.endpoint(kind), methods=["POST"]) for kind in _KINDS),
        Route("/openapi.json", show_openapi),
        Route("/healthz", edge.healthz),
        Route("/readyz", edge.readyz),
        Route("/metrics", edge.show_metrics),
    ]
    return Starlette(routes=routes, exception_handlers=exception_handlers(), lifespan=edge.lifespan)


def run(settings: Settings) -> None:
    """Serve the edge until SIGTERM or SIGINT.

    Raises:
        ListenError: The port cannot be listened on.
        ConfigurationError: The sources cannot be read.
        LogError: The event log cannot be opened.
    """
    # The log's thread gives the interpreter up at every statement and asks for it back from a busy event loop: with
    # Python's 5 ms between switches p99 was two to twenty times as long, at the same CPU.
    sys.setswitchinterval(0.001)
    sources = configuration.load_sources(settings)
    log, guard, tiles = ports.open_log(settings), ports.open_guard(settings), ports.open_tile_store(settings)
    try:
        app = create_app(log, guard, tiles, sources, settings)
        tracing.start(settings, "edge")
        http_server.serve(
            app,
            host=settings.host,
            port=settings.edge_port,
            service="edge",
            setting="GEO_ASSETS_EDGE_PORT",
            forwarded_allow_ips=settings.forwarded_allow_ips,
            grace_s=settings.drain_s,
            delay_s=settings.shutdown_delay_s,
        )
    finally:
        for port in (tiles, guard, log):
            port.close()
        tracing.stop()


def _span(kind: _Kind, source: Source, headers: Mapping[str, str], arrived_ns: int) -> tracing.Span | None:
    """The span of a signed request, of the trace that it says it belongs to. Positions are people's, and have none."""
    if tracing.ACTIVE is None or kind.name == "positions":
        return None
    return tracing.ACTIVE.begin(
        f"POST /v1/{kind.name}",
        "server",
        parent=headers.get("traceparent", ""),
        start_ns=arrived_ns,
        attributes={"geo_assets.source": source.name, "http.request.method": "POST"},
    )


def _trace(span: tracing.Span | None) -> dict[str, str]:
    """The header that hands a trace on: one that is not recorded too, so that nobody begins another."""
    if span is None or tracing.ACTIVE is None:
        return {}
    return {topics.HEADER_TRACEPARENT: tracing.ACTIVE.header(span)}


def _headers(request: Request) -> dict[str, str]:
    """Headers by lower-case name; one that stands twice is joined by a comma (RFC 9110, section 5.3)."""
    headers: dict[str, str] = {}
    for raw_name, raw_value in request.headers.raw:
        name, value = raw_name.decode("latin-1"), raw_value.decode("latin-1")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers


def _content_type(headers: Mapping[str, str], kind: _Kind) -> str:
    """The media type without parameters.

    Raises:
        ProblemError: 415: none, one that is not read here, or a charset other than UTF-8.
    """
    given = headers.get("content-type", "")
    media_type, _, parameters = given.partition(";")
    media_type = media_type.strip().lower()
    allowed = sorted(kind.content_types)
    charset = next(
        (
            p.partition("=")[2].strip(' "').lower()
            for p in parameters.split(";")
            if p.strip().lower().startswith("charset=")
        ),
        "utf-8",
    )
    if media_type not in kind.content_types or charset not in ("utf-8", "utf8", "us-ascii"):
        detail = f"Content-Type {given[:80] or '(none)'} is not read here; send {allowed[0]} in UTF-8."
        raise ProblemError(
            415,
            "content-type",
            detail,
            field="Content-Type",
            value=given,
            limit=", ".join(allowed),
            headers={"Accept": ", ".join(allowed)},
        )
    return media_type


def _gzipped(headers: Mapping[str, str]) -> bool:
    """Whether the body is compressed with gzip. Raises ProblemError 415 for any other coding."""
    given = headers.get("content-encoding", "identity").strip().lower()
    if given in ("", "identity"):
        return False
    if given in ("gzip", "x-gzip"):  # RFC 9110, section 8.4.1.3 has the two mean the same.
        return True
    detail = f"Content-Encoding {given[:80]} is not read here; send gzip, or none."
    raise ProblemError(
        415,
        "encoding",
        detail,
        field="Content-Encoding",
        value=given,
        limit="gzip",
        headers={"Accept-Encoding": "gzip"},
    )


def _crs(headers: Mapping[str, str]) -> str | None:
    """What X-Source-CRS declares, if anything; whether there is such a CRS is ingest's to know."""
    given = headers.get("x-source-crs", "").strip()
    if len(given) > _MAX_CRS or not given.isprintable():
        detail = f"X-Source-CRS is not one line of at most {_MAX_CRS} characters."
        raise ProblemError(400, "envelope", detail, field="X-Source-CRS", value=given, limit=_MAX_CRS)
    return given or None


def _callback(headers: Mapping[str, str], source: Source) -> str | None:
    """The status callback that was asked for, which the source's definition must allow."""
    given = headers.get("x-callback-url", "").strip()
    if not given:
        return None
    if given not in source.callback_urls:
        detail = f"X-Callback-URL is not among the URLs that the source {source.name} may have told."
        raise ProblemError(400, "callback", detail, field="X-Callback-URL", value=given)
    return given


def _own(source: Source, said: str | None) -> None:
    """Refuse a body that says it is another source's than the one that signed it."""
    if said is not None and said != source.name:
        detail = f"The body says it is of the source {said[:80]}; it was signed by {source.name}."
        raise ProblemError(403, "source", detail, field="source", value=said, limit=source.name)


def _unsigned(fault: SignatureError | str) -> ProblemError:
    return ProblemError(
        401, "signature", f"The signature is not accepted: {fault}.", headers={"WWW-Authenticate": "Signature"}
    )


def _bad_envelope(fault: EnvelopeError, kind: _Kind) -> ProblemError:
    # A position's values are personal data and are repeated nowhere, an answer included: answers are logged by proxies.
    value = None if kind.name == "positions" else fault.value
    return ProblemError(
        400, "envelope", f"{fault.field}: {fault.problem}", field=fault.field, value=value, limit=fault.limit
    )


def main(arguments: Sequence[str] = ()) -> None:
    """`python -m geo_assets.services.edge`: serve with settings from the environment."""
    from geo_assets import logs
    from geo_assets.settings import Settings

    settings = Settings()
    logs.configure(settings.log_level, settings.log_format)
    try:
        run(settings)
    except (http_server.ListenError, configuration.ConfigurationError, LogError) as error:
        raise SystemExit(f"edge: {error}") from None


if __name__ == "__main__":
    main()
