from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from geo_assets.events import topics
from geo_assets.events.models import FenceEvent
from geo_assets.services.dead_letters import list_dead_letters
from geo_assets.services.event_records import event_record
from geo_assets.services.fences import FenceBook
from geo_assets.settings import Settings
from geo_assets.stack import Stack
from resources.event_log.protocol import NewRecord

SQUARE = {"type": "Polygon", "coordinates": [[[24, 60], [25, 60], [25, 61], [24, 61], [24, 60]]]}


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    with Stack(Settings(home=tmp_path, log_partitions=3)) as opened:
        yield opened


def said(identifier: Any = "depot", **members: Any) -> dict[str, Any]:
    return {"type": "Feature", "id": identifier, "version": 1, "geometry": SQUARE, **members}


def post(stack: Stack, event: dict[str, Any], source: str = "demo") -> str | None:
    """What the edge makes of a fence; the record's key."""
    made = event_record(FenceEvent.model_validate(event), source=source, event_id="e", received_ms=1_000)
    stack.log.append([made])
    return made.key


def standing(stack: Stack) -> dict[str, int]:
    """Fences by id, each with its version."""
    book = FenceBook(stack)
    return {fence.id: fence.revision for fence in book.index(book.fold().name).fence_set.fences}


# Whose a fence is


def test_a_fence_is_known_by_its_source_and_its_id_with_its_type(stack: Stack) -> None:
    keys = [
        post(stack, said(identifier, version=version), source)
        for version, (source, identifier) in enumerate(
            [("demo", 1), ("demo", "1"), ("other", 1), ("demo", "other:1"), ("demo", 1.0), ("demo", "åäö 🙂")], start=1
        )
    ]
    assert keys == ["demo:1", 'demo:"1"', "other:1", 'demo:"other:1"', "demo:1", 'demo:"åäö 🙂"']
    assert standing(stack) == {
        "demo:1": 5, 'demo:"1"': 2, "other:1": 3, 'demo:"other:1"': 4, 'demo:"åäö 🙂"': 6,
    }  # fmt: skip
    assert not list_dead_letters(stack.log)


def test_the_deletion_of_one_source_leaves_the_other_s_fence(stack: Stack) -> None:
    post(stack, said(version=1), "demo")
    post(stack, said(version=9), "other")
    post(stack, said(version=10, action="delete"), "demo")
    assert standing(stack) == {'other:"depot"': 9}


def test_a_stranger_s_fence_says_its_source_in_its_body_or_its_key(stack: Stack) -> None:
    secrets = {name: {"secrets": [name * 10]} for name in ("demo", "other")}
    (stack.settings.home / "sources.yaml").write_text(json.dumps({"sources": secrets}))

    def write(key: str | None, event: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        stack.log.append([NewRecord(topics.FENCES, key, json.dumps(event).encode(), headers or {})])

    write(None, said("a", source="other"))
    write('other:"b"', said("b"))
    write('"c:d"', said("c:d"))
    write("demo:other", said("e"))
    write(None, said("f", source="a:b"))
    write(None, said("g", source="other"), {"source": "demo"})
    assert standing(stack) == {'other:"a"': 1, 'other:"b"': 1}
    letters = [one.letter for one in list_dead_letters(stack.log)]
    assert {(letter.reason, letter.field) for letter in letters} == {("schema", "source")}
    assert len(letters) == 4


def test_where_there_is_one_source_a_stranger_s_fence_is_its(stack: Stack) -> None:
    stack.log.append([NewRecord(topics.FENCES, None, json.dumps(said()).encode(), {})])
    assert standing(stack) == {'demo:"depot"': 1}
