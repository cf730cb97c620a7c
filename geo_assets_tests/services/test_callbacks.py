from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from geo_assets.events.signature import Verifier
from geo_assets_tests.waiting import until
from geo_assets_tests.world import World, feature

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


class Sender:
    """A sender's own server, which is told outcomes."""

    def __init__(self, answers: list[int]) -> None:
        self.told: list[tuple[dict[str, str], bytes]] = []
        sender = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                sender.told.append(({k.lower(): v for k, v in self.headers.items()}, body))
                self.send_response(answers.pop(0) if answers else 204)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                return

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/outcome"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def sender() -> Iterator[Sender]:
    sender = Sender([503])
    yield sender
    sender.server.shutdown()
    sender.server.server_close()


@pytest.fixture
def world(tmp_path: Path, sender: Sender) -> Iterator[World]:
    home = tmp_path / "home"
    home.mkdir()
    (home / "sources.yaml").write_text(
        f"sources:\n  city:\n    secrets: [{SECRET}]\n    default_crs: EPSG:4326\n    callback_urls: ['{sender.url}']\n"
    )
    world = World(home)
    yield world
    world.close()


def test_a_sender_is_told_the_outcome_signed_and_again_when_its_server_was_away(world: World, sender: Sender) -> None:
    world.edit(feature(1, 1), event_id="e-1", callback=sender.url)

    until(lambda: len(sender.told) == 2, why="the sender was told, after a 503")
    headers, body = sender.told[-1]
    assert json.loads(body) == {
        "event_id": "e-1", "status": "done", "outcomes": {"applied": 1}, "refused": [], "refused_count": 0,
    }  # fmt: skip
    verifier = Verifier(headers, [SECRET], float(headers["webhook-timestamp"]), 300)
    verifier.update(body)
    assert verifier.finish().webhook_id == "e-1"


def test_a_refused_event_tells_reason_field_and_dead_letter(world: World, sender: Sender) -> None:
    bad = feature(2, 1)
    bad["geometry"]["coordinates"][0][1] = [500.0, 95.0]
    world.edit({"type": "FeatureCollection", "features": [feature(1, 1), bad]}, event_id="e-2", callback=sender.url)

    until(lambda: len(sender.told) == 2, why="the sender was told")
    told = json.loads(sender.told[-1][1])
    (letter,) = world.letters()
    assert told["status"] == "partly_refused"
    assert told["refused"][0]["reason"] == "out_of_range"
    assert told["refused"][0]["dead_letter"] == letter.id


def test_an_address_that_the_source_does_not_allow_is_not_called(world: World, sender: Sender) -> None:
    world.edit(feature(1, 1), event_id="e-3", callback=sender.url.replace("/outcome", "/elsewhere"))
    world.close()
    assert sender.told == []
