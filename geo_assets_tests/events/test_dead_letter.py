"""Dead letters."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geo_assets.events.dead_letter import HIDDEN, REASONS, STAGES, DeadLetter, DeadLetterError, Origin, Refused


def letter(**changes: Any) -> DeadLetter:
    values: dict[str, Any] = {
        "reason": "schema",
        "stage": "validate",
        "explanation": "no JSON",
        "source": "demo",
        "at_ms": 5,
        "origin": Origin("raw", 1, 17),
        "payload": b"{\xff",
        "headers": {"kind": "features", "event-id": "e"},
    }
    return DeadLetter.make(**{**values, **changes})


def test_the_same_death_twice_is_one_dead_letter():
    assert letter().id == letter(at_ms=6, attempts=2).id
    assert len({letter().id, letter(index=1).id, letter(reason="timeout").id, letter(payload=b"x").id}) == 4


def test_a_refusal_brings_its_field_value_limit_and_explanation():
    refusal = Refused("out_of_range", "geometry", "95", "±90", "a latitude is outside ±90")
    made = DeadLetter.refused(refusal, stage="validate", source="demo", at_ms=1)
    assert (made.reason, made.field, made.value, made.limit) == ("out_of_range", "geometry", "95", "±90")
    assert str(refusal) == "out_of_range: geometry=95: limit: ±90: a latitude is outside ±90"


def test_a_refusal_crosses_a_process_boundary_whole():
    refusal = pickle.loads(pickle.dumps(Refused("schema", "id", "true", "text", "no id")))
    assert (refusal.reason, refusal.field, refusal.value, refusal.limit, refusal.explanation) == (
        "schema", "id", "true", "text", "no id",
    )  # fmt: skip


texts = st.text(st.characters(codec="utf-8"), max_size=20)
letters = st.builds(
    DeadLetter.make,
    reason=st.sampled_from(REASONS),
    stage=st.sampled_from(STAGES),
    explanation=texts,
    source=texts,
    at_ms=st.integers(0, 2**53),
    field=st.none() | texts,
    value=st.none() | texts,
    limit=st.none() | texts,
    event_id=st.none() | texts,
    feature_id=st.none() | texts,
    layer=st.none() | texts,
    origin=st.none() | st.builds(Origin, texts, st.integers(0, 99), st.integers(0, 2**62)),
    index=st.none() | st.integers(0, 10**6),
    attempts=st.integers(1, 99),
    event_key=st.none() | texts,
    payload=st.binary(max_size=60),
    pointer=st.none() | texts,
    headers=st.dictionaries(texts, texts, max_size=4),
)


@settings(max_examples=100, deadline=None)
@given(letters)
def test_a_dead_letter_survives_the_log(made: DeadLetter):
    assert DeadLetter.from_json(made.to_json()) == made


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b"[]", "no JSON object"),
        (b"{}", "id"),
        ({"at_ms": "5"}, "at_ms"),
        ({"at_ms": True}, "at_ms"),
        ({"reason": "bad luck"}, "reason 'bad luck'"),
        ({"stage": "x"}, "stage"),
        ({"origin": {"topic": "raw"}}, "origin"),
        ({"payload": "%%"}, "payload"),
        ({"headers": []}, "headers"),
    ],
)
def test_bytes_that_are_no_dead_letter_name_the_field(data: Any, said: str):
    if isinstance(data, dict):
        data = json.dumps({**json.loads(letter().to_json()), **data}).encode()
    with pytest.raises(DeadLetterError, match=said):
        DeadLetter.from_json(data)


def test_fields_of_later_versions_are_passed_over():
    later = json.dumps({**json.loads(letter().to_json()), "colour": "red"}).encode()
    assert DeadLetter.from_json(later) == letter()


def test_rule_12_a_listing_shows_no_place_of_a_device():
    made = letter(
        headers={"kind": "positions", "event-id": "e"},
        payload=b'{"device_id":"d","lon":24.93841,"lat":600.16991}',
        value="600.16991",
        field="lat",
        limit="<= 90",
        explanation="lat 600.16991 is outside ±90",
        feature_id="d",
    )
    shown = json.dumps(made.summary())
    assert "600.1" not in shown
    assert "24.93" not in shown
    assert made.summary()["value"] == HIDDEN
    assert made.summary()["field"] == "lat"
    assert "600.1" in json.dumps(letter(value="600.1").summary())
    assert "payload" not in made.summary()
