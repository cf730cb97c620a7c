from __future__ import annotations

import json
import math
import pickle
from dataclasses import replace

import pytest

from geo_assets.tiles.layers import Layer, LayerError, LayerSet


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": ""}, "layer name ''"),
        ({"name": "a" * 65}, "layer name"),
        ({"name": "straße"}, "layer name"),
        ({"name": "a b"}, "layer name"),
        ({"name": "roads\n"}, "layer name"),
        ({"min_zoom": -1}, "min_zoom -1"),
        ({"min_zoom": 9, "max_zoom": 8}, "min_zoom 9 and max_zoom 8"),
        ({"max_zoom": 23}, "max_zoom 23"),
        ({"min_pixels": -0.1}, "min_pixels -0.1"),
        ({"min_pixels": math.nan}, "min_pixels nan"),
        ({"simplify": 257.0}, "simplify 257.0"),
    ],
)
def test_a_layer_outside_its_limits_is_refused_by_field_and_value(changes: dict[str, object], message: str) -> None:
    with pytest.raises(LayerError, match=message):
        replace(Layer("roads"), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": ()}, "at least one layer"),
        ({"layers": (Layer("a"), Layer("a"))}, "layer a is defined twice"),
        ({"buffer": -1}, "buffer -1"),
        ({"buffer": 3000}, r"buffer 3000 is outside 0\.\.2048"),
        ({"extent": 100, "buffer": 0}, "extent 100"),
        ({"max_zoom": 23}, "max_zoom 23"),
    ],
)
def test_a_map_outside_its_limits_is_refused_by_field_and_value(changes: dict[str, object], message: str) -> None:
    with pytest.raises(LayerError, match=message):
        replace(LayerSet((Layer("roads"),)), **changes)  # type: ignore[arg-type]


def test_layers_are_found_by_name_and_keep_their_order() -> None:
    layers = LayerSet((Layer("water"), Layer("roads")), buffer=64, extent=4096)
    assert layers.names == ("water", "roads")
    assert "roads" in layers
    assert "rail" not in layers
    assert layers["roads"].name == "roads"
    with pytest.raises(KeyError):
        layers["rail"]
    assert layers.buffer_fraction == 1 / 64
    assert layers.reach_fraction == 1 / 64 + 0.5 / 256


def test_a_map_crosses_processes() -> None:
    layers = LayerSet((Layer("water"), Layer("roads", attributes=("name",))))
    again = pickle.loads(pickle.dumps(layers))
    assert again == layers
    assert again["roads"].attributes == ("name",)


def test_the_recipe_holds_what_changes_bytes_and_no_description() -> None:
    layers = LayerSet((Layer("roads", description="all of them"),), attribution="someone")
    parameters = layers.recipe_parameters()
    assert json.loads(json.dumps(parameters)) == json.loads(json.dumps(parameters))
    assert "description" not in parameters["layers"][0]
    assert parameters == replace(layers, attribution="x").recipe_parameters()
    for changed in (replace(layers, buffer=32), replace(layers, extent=512), replace(layers, max_zoom=17)):
        assert changed.recipe_parameters() != parameters
