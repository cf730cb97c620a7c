"""The part of tracing that needs OpenTelemetry: its spans, and a sender that neither waits nor fails for anybody."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import structlog
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased, Sampler, TraceIdRatioBased
from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, SpanKind, TraceFlags

from geo_assets.services.tracing import SPANS, Kind, Span, parent_in

log = structlog.get_logger()

MOST_WAITING = 8_192
"""Spans that wait to be sent, a kilobyte or two each: of a hundred edits. What is more is dropped, and counted."""
BATCH = 512
EVERY_S = 1.0
"""A batch is sent when it is full, or after as long."""
TIMEOUT_S = 10.0
"""Longest that one batch is tried for; OTEL_EXPORTER_OTLP_TIMEOUT says otherwise."""
LONGEST_VALUE = 256
"""Characters of an attribute: an event id has at most as many."""

_KINDS = {
    "server": SpanKind.SERVER,
    "consumer": SpanKind.CONSUMER,
    "producer": SpanKind.PRODUCER,
    "internal": SpanKind.INTERNAL,
}


class Sender(SpanProcessor):
    """Sends spans in a thread of its own. OpenTelemetry's own processor neither counts what it drops nor ends in time.

    Args:
        exporter: Sends a batch.
        most: Spans that may wait.
        every_s: How long they gather.
    """

    def __init__(self, exporter: SpanExporter, *, most: int = MOST_WAITING, every_s: float = EVERY_S) -> None:
        self._exporter, self._most, self._every_s = exporter, most, every_s
        self._waiting: deque[ReadableSpan] = deque()
        self._awake, self._ended = threading.Event(), False
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    def on_end(self, span: ReadableSpan) -> None:
        """Take a span that ended; one too many is dropped."""
        context = span.get_span_context()
        if context is None or not context.trace_flags.sampled:
            return
        if self._ended or len(self._waiting) >= self._most:
            SPANS.labels("dropped").inc()
            return
        self._waiting.append(span)
        if len(self._waiting) >= BATCH:
            self._awake.set()

    def close(self, timeout_s: float) -> None:
        """Send what waits, for so long at most."""
        self._ended = True
        self._awake.set()
        self._thread.join(timeout_s)
        self._exporter.shutdown()
        if left := len(self._waiting):
            self._waiting.clear()
            SPANS.labels("dropped").inc(left)

    def _run(self) -> None:
        while not self._ended:
            self._awake.wait(self._every_s)
            self._awake.clear()
            while self._waiting:
                self._send([self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))])

    def _send(self, batch: list[ReadableSpan]) -> None:
        try:
            sent = self._exporter.export(batch) is SpanExportResult.SUCCESS
        except Exception:
            sent = False
        SPANS.labels("sent" if sent else "dropped").inc(len(batch))
        if sent == self._failing:
            self._failing = not sent
            if sent:
                log.info("the collector takes spans again")
            else:
                log.warning("the collector takes no spans: they are dropped until it does", spans=len(batch))


class OtlpTracer:
    """Makes spans and has them sent by OTLP over HTTP.

    Args:
        service: What this process is called in traces, unless OTEL_SERVICE_NAME says otherwise.
        endpoint: The collector's address, below which `/v1/traces` is; None: as OTEL_* says.
        ratio: Share of the traces begun here that are recorded. Where a caller began it, its word counts.
        exporter: Sends batches; default: over HTTP.
    """

    def __init__(
        self, service: str, endpoint: str | None, ratio: float, *, exporter: SpanExporter | None = None
    ) -> None:
        # A collector that is away is told of once, by the sender; the exporter would warn of every attempt.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        if exporter is None:
            given = any(os.environ.get(f"OTEL_EXPORTER_OTLP_{each}TIMEOUT") for each in ("", "TRACES_"))
            exporter = OTLPSpanExporter(
                None if endpoint is None else f"{endpoint.rstrip('/')}/v1/traces",
                timeout=None if given else TIMEOUT_S,
            )
        self._sender = Sender(exporter)
        about = {"service.namespace": "geo_assets", "process.pid": os.getpid()}
        if not os.environ.get("OTEL_SERVICE_NAME"):
            about["service.name"] = f"geo-assets-{service}"
        self._resource = Resource.create(about)
        self._tracer = self._made(ParentBased(TraceIdRatioBased(ratio)))
        self._always = self._made(ALWAYS_ON)

    def _made(self, sampler: Sampler) -> trace.Tracer:
        limits = SpanLimits(max_span_attribute_length=LONGEST_VALUE)
        provider = TracerProvider(sampler, self._resource, shutdown_on_exit=False, span_limits=limits)
        provider.add_span_processor(self._sender)
        return provider.get_tracer("geo_assets")

    def begin(
        self,
        name: str,
        kind: Kind,
        *,
        parent: str = "",
        links: Iterable[str] = (),
        start_ns: int | None = None,
        sampled: bool = False,
        attributes: Mapping[str, Any] | None = None,
    ) -> Span:
        """See `tracing.Tracer`."""
        # Not the thread's own context: a span of other software in this process is no parent of ours.
        context = Context()
        if (within := _context(parent)) is not None:
            context = trace.set_span_in_context(NonRecordingSpan(within), context)
        tracer = self._always if sampled else self._tracer
        return tracer.start_span(
            name,
            context,
            _KINDS[kind],
            attributes,
            [Link(each) for one in links if (each := _context(one)) is not None],
            start_ns,
        )

    def link(self, span: Span, to: str) -> None:
        """See `tracing.Tracer`."""
        if isinstance(span, trace.Span) and (context := _context(to)) is not None:
            span.add_link(context)

    def header(self, span: Span) -> str:
        """See `tracing.Tracer`."""
        assert isinstance(span, trace.Span)
        context = span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"

    def stop(self, timeout_s: float) -> None:
        """See `tracing.Tracer`."""
        self._sender.close(timeout_s)


def _context(text: str) -> SpanContext | None:
    said = parent_in(text)
    if said is None:
        return None
    flags = TraceFlags(TraceFlags.SAMPLED if said.sampled else TraceFlags.DEFAULT)
    return SpanContext(said.trace_id, said.span_id, is_remote=True, trace_flags=flags)
