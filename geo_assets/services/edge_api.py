"""The edge's endpoints as OpenAPI 3.1 describes them; the models are those that read the bodies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from geo_assets import __version__
from geo_assets.events.models import (
    MAX_BATCH,
    SEQUENCE_TYPES,
    Accepted,
    FeatureCollectionEvent,
    FeatureEvent,
    FenceEvent,
    PositionEvent,
    Problem,
    TileEvent,
)
from geo_assets.services.openapi import Answer, Operation, Parameter, Schema, document, ref
from geo_assets.services.problems import MEDIA_TYPE

_PROBLEM: dict[str, Schema] = {MEDIA_TYPE: Problem}
_DESCRIPTION = """Takes signed events and answers 202 once the event log has them.

Sign the exact bytes you send (after compression, if any) as [Standard Webhooks](https://www.standardwebhooks.com) has
it: `webhook-id`, `webhook-timestamp` (at most five minutes from now) and `webhook-signature: v1,<base64>`. The same id
with the same body may be sent again until it is answered; `X-Hub-Signature-256` and `X-Signature` are accepted from
senders that have only those. Errors are problem documents (RFC 9457)."""

_SECURITY = {
    "webhookSignature": {
        "type": "apiKey",
        "in": "header",
        "name": "webhook-signature",
        "description": "`v1,` and base64 of HMAC-SHA256 over `id.timestamp.body`; several, separated by a space, while "
        "a secret is rotated. With `webhook-id` and `webhook-timestamp`.",
    },
    "hubSignature": {
        "type": "apiKey",
        "in": "header",
        "name": "X-Hub-Signature-256",
        "description": "`sha256=` and hex of HMAC-SHA256 over the body.",
    },
    "plainSignature": {
        "type": "apiKey",
        "in": "header",
        "name": "X-Signature",
        "description": "`sha256=` and hex of HMAC-SHA256 over the body.",
    },
}

_ANSWERS: dict[int, Answer] = {
    202: Answer("In the log, or known from before (`duplicate`).", {"application/json": Accepted}),
    400: Answer("The envelope is at fault; `field` says where.", _PROBLEM),
    401: Answer("The signature is missing, malformed, too old or another's. Nothing was kept.", _PROBLEM),
    403: Answer("The layer, or the source the body names, is not the sender's.", _PROBLEM),
    408: Answer("The body stopped coming.", _PROBLEM),
    409: Answer("This `webhook-id` came before with another body.", _PROBLEM),
    413: Answer("Over the limit of bytes, decompressed.", _PROBLEM),
    415: Answer("A content type or encoding that is not read here.", _PROBLEM, {"Accept": "Content types that are."}),
    503: Answer("The log cannot take it now. Send it again under the same id.", _PROBLEM, {"Retry-After": "Seconds."}),
}


def _header(name: str, description: str, **schema: Any) -> Parameter:
    return Parameter(name, "header", description, {"type": "string", **schema})


_COMMON = (
    _header("webhook-id", "Unique to the message, the same on every try.", minLength=1, maxLength=256),
    _header("webhook-timestamp", "Seconds since the epoch.", pattern="^[0-9]{1,12}$"),
    _header("X-Source", "The source that signs; may be left out where there is only one."),
    _header("X-Callback-URL", "Is told the outcome; one of the URLs in the source's definition.", format="uri"),
    _header("Content-Encoding", "`gzip`, or none.", enum=["gzip", "identity"]),
)
_CRS = _header("X-Source-CRS", "CRS of coordinates that declare none themselves, such as `EPSG:3067`.")


def _one_or_many(model: type[TileEvent] | type[PositionEvent] | type[FenceEvent]) -> Schema:
    return {"oneOf": [ref(model), {"type": "array", "items": ref(model), "minItems": 1, "maxItems": MAX_BATCH}]}


def _post(kind: str, summary: str, description: str, request: Mapping[str, Schema], *extra: Parameter) -> Operation:
    return Operation(
        "post",
        f"/v1/{kind}",
        f"post_{kind}",
        summary,
        _ANSWERS,
        description=description,
        tag="events",
        parameters=(*_COMMON, *extra),
        request=request,
        security=tuple(_SECURITY),
    )


def edge_document(public_url: str | None) -> dict[str, Any]:
    """The OpenAPI document.

    Args:
        public_url: Where senders find the edge; None leaves it to where the document came from.
    """
    features: Schema = {"oneOf": [ref(FeatureEvent), ref(FeatureCollectionEvent)]}
    sequence: Schema = {"type": "string", "description": "One Feature a line (RFC 8142 or newline-delimited)."}
    text: Schema = {"type": "object"}
    unavailable = Answer("Not now.", _PROBLEM, {"Retry-After": "Seconds."})
    return document(
        "geo_assets edge",
        __version__,
        [
            _post(
                "features",
                "Create, update or delete features",
                "A Feature, or a FeatureCollection each of whose features is an event of its own. Geometries are read "
                "after the answer: what is wrong with one becomes a dead letter.",
                {"application/geo+json": features, "application/json": features}
                | dict.fromkeys(sorted(SEQUENCE_TYPES), sequence),
                _CRS,
            ),
            _post(
                "tiles",
                "Look at tiles again",
                "A hint; with `force` the tile is rebuilt even where nothing changed.",
                {"application/json": _one_or_many(TileEvent)},
            ),
            _post("positions", "Say where devices are", "", {"application/json": _one_or_many(PositionEvent)}),
            _post(
                "fences",
                "Create, update or delete geofences",
                "",
                {"application/geo+json": _one_or_many(FenceEvent), "application/json": _one_or_many(FenceEvent)},
                _CRS,
            ),
            Operation(
                "get",
                "/healthz",
                "get_healthz",
                "Alive",
                {200: Answer("It is.", {"application/json": text})},
                tag="service",
            ),
            Operation(
                "get",
                "/readyz",
                "get_readyz",
                "Ready to take events",
                {200: Answer("It is.", {"application/json": text}), 503: unavailable},
                tag="service",
            ),
            Operation(
                "get",
                "/metrics",
                "get_metrics",
                "Prometheus metrics",
                {200: Answer("Text format.", {"text/plain": {"type": "string"}})},
                tag="service",
            ),
            Operation(
                "get",
                "/openapi.json",
                "get_openapi",
                "This document",
                {200: Answer("OpenAPI 3.1.", {"application/json": text})},
                tag="service",
            ),
        ],
        description=_DESCRIPTION,
        models=[FeatureEvent, FeatureCollectionEvent, TileEvent, PositionEvent, FenceEvent],
        servers=[public_url] if public_url else (),
        security_schemes=_SECURITY,
    )
