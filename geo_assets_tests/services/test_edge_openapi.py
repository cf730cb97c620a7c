"""schemathesis against the edge's own document: for any request, no answer that it does not describe, and no 500."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from requests import PreparedRequest
from requests.auth import AuthBase

from geo_assets import ports
from geo_assets.events.signature import sign
from geo_assets.events.sources import Source, Sources
from geo_assets.services.edge import create_app
from geo_assets.services.edge_api import edge_document
from geo_assets.settings import Settings
from geo_assets_tests.services.running import running
from geo_assets_tests.waiting import patient

SECRET = "whsec_" + "c2NoZW1hdGhlc2lzIHNpZ25zIHRoaXMgdG9v"
KINDS = ("features", "tiles", "positions", "fences")

_numbers = itertools.count()


class Signing(AuthBase):
    """Signs what goes over the wire, in place of the signature headers that were made up."""

    def __call__(self, request: PreparedRequest) -> PreparedRequest:
        body = request.body or b""
        content = body.encode() if isinstance(body, str) else body
        for name in ("x-source", "content-encoding", "x-callback-url", "x-source-crs"):
            request.headers.pop(name, None)
        request.headers.update(sign(SECRET, f"s-{next(_numbers)}", int(time.time()), content))
        return request


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    home: Path = tmp_path_factory.mktemp("edge")
    chosen = Settings(home=home)
    log, guard, tiles = ports.open_log(chosen), ports.open_guard(chosen), ports.open_tile_store(chosen)
    sources = Sources([Source("survey", secrets=(SECRET,))])
    with running(create_app(log, guard, tiles, sources, chosen)) as base:
        yield base
    for port in (log, guard, tiles):
        port.close()


def _schema(url: str) -> Any:
    schema = schemathesis.openapi.from_dict(edge_document(url))
    schema.config.update(base_url=url)
    return schema


@pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])
@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize("kind", KINDS)
def test_any_request_is_answered_as_the_document_says(url: str, kind: str, mode: Any, signed: bool) -> None:
    operation = _schema(url)[f"/v1/{kind}"]["POST"]
    seen: set[int] = set()

    @settings(max_examples=12 if signed else 3, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def run(data: st.DataObject) -> None:
        case = data.draw(operation.as_strategy(generation_mode=mode))
        response = case.call(auth=Signing() if signed else None)
        seen.add(response.status_code)
        case.validate_response(
            response,
            checks=[
                schemathesis.checks.not_a_server_error,
                schemathesis.specs.openapi.checks.status_code_conformance,
                schemathesis.specs.openapi.checks.content_type_conformance,
                schemathesis.specs.openapi.checks.response_schema_conformance,
            ],
        )

    run()
    # What JSON Schema cannot say (a position has one of three times, a fence a geometry) is a 400 there.
    if signed and mode == schemathesis.GenerationMode.POSITIVE and kind in ("features", "tiles"):
        assert 202 in seen
    if not signed:
        assert 202 not in seen


def test_the_document_is_openapi_3_1_and_its_examples_are_accepted(url: str) -> None:
    document = httpx.get(f"{url}/openapi.json", timeout=patient(30)).json()
    assert document["openapi"].startswith("3.1")
    assert set(document["paths"]) == {f"/v1/{k}" for k in KINDS} | {"/healthz", "/readyz", "/metrics", "/openapi.json"}
    for name, schema in document["components"]["schemas"].items():
        jsonschema_rs.meta.validate(schema | {"$schema": "https://json-schema.org/draft/2020-12/schema"})
        for example in schema.get("examples", ()):
            kind = {
                "FeatureEvent": "features",
                "TileEvent": "tiles",
                "PositionEvent": "positions",
                "FenceEvent": "fences",
            }[name]
            content = httpx.Request("POST", url, json=example).content
            headers = {"content-type": "application/json"} | sign(SECRET, f"example-{name}", int(time.time()), content)
            assert (
                httpx.post(f"{url}/v1/{kind}", content=content, headers=headers, timeout=patient(30)).status_code == 202
            )
