"""The strict JSON reader and the canonical writer."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geo_assets.events.json_text import JsonError, canonical, loads, shorten

text = st.text(st.characters(codec="utf-8"), max_size=8)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | text
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3), max_leaves=8
)


@settings(max_examples=150, deadline=None)
@given(values)
def test_canonical_text_reads_back_as_the_same_value_of_the_same_types(value: Any):
    text = canonical(value)
    again = loads(text.encode())
    assert json.dumps(again, sort_keys=True) == json.dumps(value, sort_keys=True)
    assert canonical(again) == text


def test_numbers_keep_their_type_and_value():
    text = b'{"b":1,"a":1.0,"c":true,"d":18446744073709551615,"e":-9223372036854775808,"f":0.1,"g":1e22}'
    made = '{"a":1.0,"b":1,"c":true,"d":18446744073709551615,"e":-9223372036854775808,"f":0.1,"g":1e+22}'
    assert canonical(loads(text)) == made


def test_a_byte_order_mark_is_passed_over():
    assert loads(b"\xef\xbb\xbf[1]") == [1]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "no JSON"),
        (b"[1,]", "no JSON"),
        (b"{'a':1}", "no JSON"),
        (b"[NaN]", "NaN is not a JSON number"),
        (b"[Infinity]", "Infinity is not a JSON number"),
        (b"[-Infinity]", "-Infinity is not a JSON number"),
        (b'{"a":1,"b":{"c":1,"c":2}}', "member 'c' stands twice"),
        (b'{"a":1,"\\u0061":2}', "member 'a' stands twice"),
        (b'["\\ud800"]', "half of a surrogate pair"),
        (b'{"\\uDFFF":1}', "half of a surrogate pair"),
        (b'["\xff"]', "not UTF-8"),
        (b'["\xed\xa0\x80"]', "not UTF-8"),
        ("[1]".encode("utf-16"), "not UTF-8"),
        ("[1]".encode("utf-32-be"), "not UTF-8"),
        (b"[" * 1_000_000, "nested too deeply"),
        (b'{"a":' * 1_000_000, "nested too deeply"),
        (b"1" * 1_000_000, "too many digits"),
        (b'["a\nb"]', "no JSON"),
        (b"[1] [2]", "no JSON"),
        (b"\x00", "not UTF-8"),
    ],
    ids=lambda v: repr(v[:24]),
)
def test_hostile_text_is_one_clear_error(text: bytes, said: str):
    with pytest.raises(JsonError, match=said) as caught:
        loads(text)
    assert len(str(caught.value)) < 200


def test_a_surrogate_pair_is_one_character():
    assert loads(b'["\\ud83d\\ude00"]') == ["\U0001f600"]


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=60))
def test_no_bytes_crash_the_reader(text: bytes):
    try:
        loads(text)
    except JsonError:
        return


def test_a_number_beyond_a_double_cannot_be_written():
    with pytest.raises(JsonError, match="beyond the range of a double"):
        canonical(loads(b'{"a":1e999}'))


def test_what_is_shown_of_a_value_is_short_and_printable():
    assert shorten("a\nb\x00") == "a\ufffdb\ufffd"
    assert len(shorten("x" * 1000)) == 80
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    assert shorten(deep) == "a list"
    while deep:  # Taken apart by hand: freeing it whole is a deep recursion too.
        deep = deep[0]
