from __future__ import annotations

import httpx
import pytest
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from geo_assets.services.http_server import ListenError, listen
from geo_assets.services.openapi import Answer, Operation, Parameter, document
from geo_assets.services.problems import MEDIA_TYPE, ProblemError, exception_handlers, unavailable
from geo_assets_tests.services.running import running
from geo_assets_tests.waiting import patient


def test_a_free_port_is_taken_and_read_back() -> None:
    with listen("127.0.0.1", 0, service="edge", setting="PORT") as listener:
        assert listener.getsockname()[1] > 0


def test_a_port_in_use_is_one_line_that_names_it_and_the_setting() -> None:
    with listen("127.0.0.1", 0, service="edge", setting="PORT") as listener:
        port = listener.getsockname()[1]
        with pytest.raises(
            ListenError, match=rf"^edge: 127\.0\.0\.1:{port} is in use .*; set GEO_PORT to another port$"
        ):
            listen("127.0.0.1", port, service="edge", setting="GEO_PORT")


@pytest.mark.parametrize("host", ["203.0.113.1", "no-such-host.invalid"])
def test_an_address_of_another_machine_is_told(host: str) -> None:
    with pytest.raises(ListenError, match="is no address of this machine"):
        listen(host, 0, service="edge", setting="PORT")


def _app() -> Starlette:
    async def good(_: Request) -> Response:
        return PlainTextResponse("good")

    async def refused(_: Request) -> Response:
        raise ProblemError(400, "envelope", "wrong", field="bbox[2]", value="x" * 1_000, limit="<= 90")

    async def away(_: Request) -> Response:
        raise unavailable("later", 7)

    async def broken(_: Request) -> Response:
        raise RuntimeError("a secret of the implementation")

    routes = [Route("/good", good), Route("/refused", refused), Route("/away", away), Route("/broken", broken)]
    return Starlette(routes=routes, exception_handlers=exception_handlers())


def test_every_error_leaves_as_a_problem_document() -> None:
    with running(_app()) as url:
        answers = {
            path: httpx.get(f"{url}/{path}", timeout=patient(30))
            for path in ("good", "refused", "away", "broken", "nothing", "%0d%0aX-Evil:1")
        }
    assert answers["good"].text == "good"
    assert {path: a.status_code for path, a in answers.items() if path != "good"} == {
        "refused": 400, "away": 503, "broken": 500, "nothing": 404, "%0d%0aX-Evil:1": 404,
    }  # fmt: skip
    for path, answer in answers.items():
        if path != "good":
            assert answer.headers["content-type"] == MEDIA_TYPE
            assert answer.headers["cache-control"] == "no-store"
            assert answer.json()["status"] == answer.status_code
    refused = answers["refused"].json()
    assert (refused["field"], refused["limit"]) == ("bbox[2]", "<= 90")
    assert len(refused["value"]) < 300
    assert answers["away"].headers["retry-after"] == "7"
    assert "secret" not in answers["broken"].text


def test_on_stop_is_called_before_open_requests_are_waited_for() -> None:
    stopped: list[bool] = []
    with running(_app(), on_stop=lambda: stopped.append(True)) as url:
        assert httpx.get(f"{url}/good", timeout=patient(30)).status_code == 200
        assert stopped == []
    assert stopped == [True]


class Inner(BaseModel):
    size: int


class Outer(BaseModel):
    inner: Inner


def test_a_document_holds_operations_and_the_schemas_they_use() -> None:
    operation = Operation(
        "post",
        "/things/{name}",
        "post_thing",
        "Make a thing",
        {202: Answer("Made.", {"application/json": Outer}, {"Location": "Where."}), 404: Answer("Nowhere.")},
        parameters=[Parameter("name", "path", "Its name.")],
        request={"application/json": Outer},
    )
    made = document("things", "1", [operation], servers=["https://things.example"])
    assert made["openapi"] == "3.1.0"
    assert set(made["components"]["schemas"]) == {"Inner", "Outer"}
    post = made["paths"]["/things/{name}"]["post"]
    assert post["parameters"][0]["required"] is True
    assert post["requestBody"]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/Outer"}
    assert set(post["responses"]) == {"202", "404"}
