"""Traces of edits, by option: one from the edge to the announcement of its tiles, for an OpenTelemetry collector.

A trace travels as event ids do, in a header of records of `[raw]` and `[tiles]` and in the details of a commit: as
`traceparent` (W3C Trace Context). Where nobody asked for traces `ACTIVE` is None, nothing of OpenTelemetry is imported,
and a place that would begin a span looks at one attribute. Spans name tile, source, event id and outcome: never a
payload, an error's text, or where anything is.

Nothing hangs on a trace: what cannot be read counts as absent, what cannot be sent is counted and dropped.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import structlog
from prometheus_client import Counter

from geo_assets.events import topics
from resources.event_log.protocol import NewRecord

if TYPE_CHECKING:
    from geo_assets.settings import Settings

log = structlog.get_logger()

VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
"""OpenTelemetry's own: with one of them traces are on, as with the setting."""

MOST_LINKS = 8
"""Events, beside the first, that a tile's build is linked to: a burst on one tile is hundreds."""

FLUSH_S = 2.0
"""Longest that a process which ends waits for its last spans."""

DETAIL = "traceparent"
"""Member of a commit's details that hands its trace on to its announcement."""

Kind = Literal["server", "consumer", "producer", "internal"]


class Span(Protocol):
    """What is used of a span of OpenTelemetry."""

    def set_attribute(self, key: str, value: Any) -> None: ...  # noqa: D102
    def end(self, end_time: int | None = None) -> None: ...  # noqa: D102
    def is_recording(self) -> bool: ...  # noqa: D102


class Tracer(Protocol):
    """What makes spans (services/span_sending.py)."""

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
        """A span that began, now or at `start_ns` (nanoseconds since the epoch, UTC).

        Args:
            name: What is done.
            kind: As OpenTelemetry means it.
            parent: Its `traceparent`; what is none begins a trace.
            links: `traceparent` of others that it belongs to.
            start_ns: When it began.
            sampled: Record it whatever the ratio says: others that are recorded are linked to it.
            attributes: By name.
        """
        ...

    def link(self, span: Span, to: str) -> None:
        """Link a span to one more."""
        ...

    def header(self, span: Span) -> str:
        """Its `traceparent`."""
        ...

    def stop(self, timeout_s: float) -> None:
        """Send what waits, for so long at most, and send nothing more."""
        ...


ACTIVE: Tracer | None = None
"""None: nobody asked for traces."""

SPANS = Counter(
    "geo_assets_spans",
    "Spans of traces: sent to the collector, or dropped as it did not take them.",
    ["outcome"],
    registry=None,
)
for _outcome in ("sent", "dropped"):
    SPANS.labels(_outcome)


# -- on and off ----------------------------------------------------------------------------------------------------


def wanted(settings: Settings) -> bool:
    """Whether somebody asked for traces."""
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    return settings.otlp_endpoint is not None or any(os.environ.get(name, "").strip() for name in VARIABLES)


def start(settings: Settings, service: str) -> bool:
    """Begin to trace in this process where somebody asked for it. What is missing for it is logged: no work waits.

    Args:
        settings: Where the collector is.
        service: What this process is called in traces.

    Returns:
        Whether it began with this.
    """
    global ACTIVE
    if ACTIVE is not None or not wanted(settings):
        return False
    try:
        from geo_assets.services.span_sending import OtlpTracer

        ACTIVE = OtlpTracer(service, settings.otlp_endpoint, settings.trace_ratio)
    except Exception as fault:  # A collector's address that some library refuses must not end a service.
        log.warning("no traces: pip install 'geo-assets[tracing]', or mend OTEL_*", error=type(fault).__name__)
        return False
    log.info("traces are on", service=service, ratio=settings.trace_ratio)
    return True


def stop(timeout_s: float = FLUSH_S) -> None:
    """Send what waits, for so long at most, and trace nothing more in this process."""
    global ACTIVE
    tracer, ACTIVE = ACTIVE, None
    if tracer is not None:
        tracer.stop(timeout_s)


# -- how a trace travels -------------------------------------------------------------------------------------------

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


class Parent(NamedTuple):
    """What a `traceparent` says."""

    trace_id: int
    span_id: int
    sampled: bool


def parent_in(text: str | None) -> Parent | None:
    """Read a `traceparent`; None where it is none, whoever wrote it."""
    if not text or len(text) > 200 or (found := _TRACEPARENT.fullmatch(text)) is None:
        return None
    version, trace, span, flags, more = found.groups()
    # Of a version to come what is known now stands first; this one ends behind its flags.
    if version == "ff" or (version == "00" and more):
        return None
    trace_id, span_id = int(trace, 16), int(span, 16)
    return Parent(trace_id, span_id, bool(int(flags, 16) & 1)) if trace_id and span_id else None


def header_of(span: Span | None) -> str:
    """The `traceparent` of a span that is recorded; empty where it is not."""
    return "" if span is None or ACTIVE is None or not span.is_recording() else ACTIVE.header(span)


def traces_in(headers: Mapping[str, str]) -> list[str]:
    """The traces that are recorded of the edits behind a hint: of the last one first."""
    found = [headers.get(topics.HEADER_TRACEPARENT, "")]
    if more := headers.get(topics.HEADER_TRACE_LINKS):
        found += more[: 60 * MOST_LINKS].split(",")
    return [one for one in found if (parent := parent_in(one)) is not None and parent.sampled]


def headers_with(traces: Collection[str]) -> dict[str, str]:
    """Headers of a hint that hand these traces on: the first as its own, of the others as many as a tile may have."""
    if not traces:
        return {}
    first, *others = dict.fromkeys(traces)
    made = {topics.HEADER_TRACEPARENT: first}
    if others:
        made[topics.HEADER_TRACE_LINKS] = ",".join(others[: MOST_LINKS - 1])
    return made


def trace_in(details: str) -> str:
    """The `traceparent` in a commit's details (JSON); empty where there is none."""
    if f'"{DETAIL}"' not in details:
        return ""
    try:
        found = json.loads(details).get(DETAIL)
    except (ValueError, AttributeError):
        return ""
    return found if isinstance(found, str) else ""


# -- spans of several records --------------------------------------------------------------------------------------


class Sending:
    """The spans of records that are sent on together: one for each span that had them sent, until the `with` ends.

    Args:
        name: What is done.
        parents: `traceparent` of each record; empty: it has no trace.
        keys: The tile of each.
    """

    def __init__(self, name: str, parents: Sequence[str], keys: Sequence[str]) -> None:
        tiles: dict[str, list[str]] = {}
        for parent, key in zip(parents, keys, strict=True):
            if parent:
                tiles.setdefault(parent, []).append(key)
        self._parents = parents
        self._spans: dict[str, Span] = {}
        for parent, of_it in tiles.items():
            said = parent_in(parent)
            if ACTIVE is None or said is None or not said.sampled:
                continue
            about = {"geo_assets.tile": of_it[0]} if len(of_it) == 1 else {"geo_assets.tiles": len(of_it)}
            self._spans[parent] = ACTIVE.begin(name, "producer", parent=parent, attributes=about)

    def __enter__(self) -> Sending:
        return self

    def __exit__(self, fault: type[BaseException] | None, *_: object) -> None:
        for span in self._spans.values():
            span.set_attribute("geo_assets.outcome", "sent" if fault is None else "owed")
            span.end()

    def relayed(self, records: Sequence[NewRecord]) -> list[NewRecord]:
        """The records, each with the trace that goes on from its span."""
        if not self._spans:
            return list(records)
        made: list[NewRecord] = []
        for record, parent in zip(records, self._parents, strict=True):
            span = self._spans.get(parent)
            if span is not None:
                record = replace(record, headers={**record.headers, topics.HEADER_TRACEPARENT: header_of(span)})
            made.append(record)
        return made


@dataclass(slots=True)
class _Built:
    """A traced tile in hand."""

    span: Span
    commit: Span | None = None


@dataclass(slots=True)
class TileTraces:
    """The spans of the tiles that one builder has in hand. A tile that no traced event asked for has none.

    Its build belongs to the trace of the event that it heard of first, and is linked to the others.
    """

    builder: str
    """Who builds: `lane` or `run`."""
    most: int = 20_000
    """Tiles whose events are remembered until somebody takes them; of more, nobody hears."""
    _waiting: dict[str, dict[str, None]] = field(default_factory=dict[str, dict[str, None]])
    _building: dict[str, _Built] = field(default_factory=dict[str, _Built])

    def hinted(self, key: str, headers: Mapping[str, str]) -> None:
        """A hint for a tile came."""
        if topics.HEADER_TRACEPARENT not in headers:
            return
        waiting = self._waiting.get(key)
        if waiting is None:
            if len(self._waiting) >= self.most:
                return
            waiting = self._waiting[key] = {}
        for one in traces_in(headers):
            if len(waiting) <= MOST_LINKS:
                waiting[one] = None

    def taken(self, keys: Iterable[str], start_ns: int) -> None:
        """A builder has these tiles, since `start_ns` (nanoseconds since the epoch, UTC)."""
        if not self._waiting or (tracer := ACTIVE) is None:
            return
        for key in keys:
            traces = self._waiting.pop(key, None)
            if not traces:
                continue
            known = self._building.get(key)
            if known is not None:
                # Another builder was quicker, and it is built once more.
                for one in traces:
                    tracer.link(known.span, one)
                continue
            first, *others = traces
            attributes = {"geo_assets.tile": key, "geo_assets.builder": self.builder}
            self._building[key] = _Built(
                tracer.begin(
                    "build tile", "consumer", parent=first, links=others[:MOST_LINKS], start_ns=start_ns,
                    attributes=attributes,
                )
            )  # fmt: skip

    def forgotten(self, keys: Iterable[str]) -> None:
        """Somebody else built these meanwhile."""
        for key in keys:
            self._waiting.pop(key, None)
            self._end(key, "superseded")

    def details(self, key: str, details: dict[str, Any]) -> dict[str, Any]:
        """Its bytes are there and are to be committed: the commit's details, which hand its trace on."""
        built = self._building.get(key)
        if built is None or ACTIVE is None:
            return details
        built.commit = ACTIVE.begin(
            "commit tile", "internal", parent=header_of(built.span), attributes={"geo_assets.tile": key}
        )
        return {**details, DETAIL: header_of(built.commit)}

    def committed(self, keys: Iterable[str], held: Collection[str]) -> None:
        """The ledger answered: those of `held` have a new revision."""
        if not self._building:
            return
        for key in keys:
            built = self._building.get(key)
            if built is not None and built.commit is not None:
                built.commit.set_attribute("geo_assets.outcome", "committed" if key in held else "superseded")
                built.commit.end()
                built.commit = None

    def ended(self, key: str, outcome: str) -> None:
        """A tile came to its end."""
        if self._building:
            self._end(key, outcome)

    def clear(self) -> None:
        """After an outage: what was in hand stays dirty, and is built another time."""
        self._waiting.clear()
        for key in list(self._building):
            self._end(key, "given up")

    def _end(self, key: str, outcome: str) -> None:
        built = self._building.pop(key, None)
        if built is None:
            return
        for span in (built.commit, built.span):
            if span is not None:
                span.set_attribute("geo_assets.outcome", outcome)
                span.end()


def tile_traces(builder: str) -> TileTraces | None:
    """The spans of a builder's tiles; None where nobody asked for traces."""
    return None if ACTIVE is None else TileTraces(builder)


def now_ns() -> int:
    """Now, nanoseconds since the epoch, UTC: what spans begin and end at."""
    return time.time_ns()
