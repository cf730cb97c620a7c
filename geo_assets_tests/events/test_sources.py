"""Sources."""

from __future__ import annotations

from typing import Any

import pytest

from geo_assets.events.signature import new_secret
from geo_assets.events.sources import Source, SourceError, Sources, UnknownSource

SECRET = new_secret()


def test_sources_come_from_plain_values():
    sources = Sources.from_mapping(
        {
            "sources": {
                "demo": {
                    "secrets": SECRET,
                    "layers": ["buildings", "roads"],
                    "default_layer": "buildings",
                    "default_crs": 3067,
                    "repair": "make_valid",
                    "expected_box": [19, 59, 32, 71],
                    "callback_urls": ["https://example.org/outcome"],
                    "max_vertices": None,
                },
                "open": None,
            }
        }
    )
    demo = sources["demo"]
    assert (demo.secrets, demo.default_crs, demo.max_vertices) == ((SECRET,), "EPSG:3067", None)
    assert demo.expected_box == (19.0, 59.0, 32.0, 71.0)
    assert demo.may_write("roads")
    assert not demo.may_write("water")
    assert sources["open"].may_write("anything")
    assert list(sources) == ["demo", "open"]


def test_a_request_names_its_source_where_there_are_several():
    one, two = Source("one"), Source("two")
    assert Sources([one]).resolve(None) is one
    assert Sources([one, two]).resolve("two") is two
    for sources, name in (([one, two], None), ([one, two], ""), ([one], "two"), ([], None)):
        with pytest.raises(UnknownSource):
            Sources(sources).resolve(name)


def test_secrets_do_not_show_when_a_source_is_printed():
    assert SECRET not in repr(Source("one", secrets=(SECRET,)))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"colour": 1}, "unknown field 'colour'"),
        ({"secrets": ["short"]}, r"secrets\[0\]"),
        ({"secrets": [5]}, "secrets is not a list of texts"),
        ({"layers": 5}, "layers is not a list"),
        ({"layers": ["a"], "default_layer": "b"}, "default_layer 'b'"),
        ({"repair": "guess"}, "repair 'guess'"),
        ({"allow_ballpark": "no"}, "allow_ballpark"),
        ({"max_vertices": 0}, "max_vertices 0 is below 1"),
        ({"max_vertices": True}, "max_vertices"),
        ({"expected_box": [1, 2, 3]}, "expected_box"),
        ({"expected_box": [3, 2, 1, 4]}, "expected_box"),
        ({"expected_box": "1,2,3,4"}, "expected_box"),
        ({"callback_urls": "ftp://example.org"}, "callback_urls"),
        ({"callback_urls": "https://me:pw@example.org"}, "callback_urls"),
        ({"default_crs": 1.5}, "default_crs"),
    ],
)
def test_a_wrong_value_is_named(values: dict[str, Any], said: str):
    with pytest.raises(SourceError, match=said):
        Sources.from_mapping({"demo": values})


@pytest.mark.parametrize("name", ["", "a:b", "ä", "x" * 65, "-a", "a b"])
def test_a_source_name_can_begin_a_key(name: str):
    with pytest.raises(SourceError, match="source name"):
        Source(name)


@pytest.mark.parametrize("mapping", [{"sources": []}, {"sources": {"a": 5}}, {5: {}}])
def test_another_form_is_refused(mapping: Any):
    with pytest.raises(SourceError):
        Sources.from_mapping(mapping)


def test_a_name_stands_once():
    with pytest.raises(SourceError, match="twice"):
        Sources([Source("a"), Source("a")])
