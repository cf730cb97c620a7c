"""How two versions of a tile differ: features added, removed and changed, by layer and id.

Pure and plain Python: bytes of two tiles in, what differs out. Byte-identical layers are not looked into.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from geo_assets.tiles.decode import DecodedFeature, DecodedLayer, decode
from geo_assets.tiles.tileset import layer_messages

Kind = Literal["added", "removed", "changed"]

ID_PROPERTY = "_id"
"""Under which an id that is no uint64 reaches the map; where a feature has an attribute of that name, more `_`."""


@dataclass(frozen=True, slots=True)
class FeatureChange:
    """One feature that differs.

    Args:
        layer: Its layer.
        id: Its id as the map has it: a number, or a text.
        kind: `added`, `removed` or `changed`.
        what: Of a changed one: `geometry`, and names of attributes.
        before: As it was drawn; more than one where it is drawn as several geometry types.
        after: As it is.
    """

    layer: str
    id: int | str
    kind: Kind
    what: tuple[str, ...]
    before: tuple[DecodedFeature, ...]
    after: tuple[DecodedFeature, ...]


@dataclass(frozen=True, slots=True)
class TileDifference:
    """What differs between two versions of a tile.

    Args:
        changes: Features, by layer and id.
        notes: What else does: another extent, or the same features in other bytes.
        before: The first version, uncompressed.
        after: The second.
    """

    changes: tuple[FeatureChange, ...]
    notes: tuple[str, ...]
    before: bytes
    after: bytes

    def counts(self) -> dict[str, dict[str, int]]:
        """Layer -> kind -> features."""
        found: dict[str, dict[str, int]] = {}
        for change in self.changes:
            kinds = found.setdefault(change.layer, {"added": 0, "removed": 0, "changed": 0})
            kinds[change.kind] += 1
        return found


def difference(before: bytes, after: bytes) -> TileDifference:
    """Compare two versions of a tile.

    Args:
        before: Uncompressed MVT; b"" is a tile without layers.
        after: The same.

    Raises:
        DecodeError: One is no tile.
    """
    same = set(layer_messages(before)) & set(layer_messages(after))
    one = {layer.name: layer for layer in _decoded(before, same)}
    other = {layer.name: layer for layer in _decoded(after, same)}
    changes: list[FeatureChange] = []
    notes: list[str] = []
    for name in sorted({*one, *other}):
        first, second = one.get(name), other.get(name)
        if first is not None and second is not None and first.extent != second.extent:
            notes.append(f"layer {name}: extent {first.extent} became {second.extent}")
        found = _changes(name, first.features if first else (), second.features if second else ())
        changes += found
        if not found and first != second and first is not None and second is not None:
            notes.append(f"layer {name}: the same features in another order")
    if before != after and not changes and not notes:
        notes.append("the same features in other bytes")
    return TileDifference(tuple(changes), tuple(notes), before, after)


def _decoded(data: bytes, left_out: set[bytes]) -> list[DecodedLayer]:
    """Layers but those whose bytes are among `left_out`: decoding is what a comparison costs."""
    return decode(b"".join(message for message in layer_messages(data) if message not in left_out))


def _changes(layer: str, before: Sequence[DecodedFeature], after: Sequence[DecodedFeature]) -> list[FeatureChange]:
    one, other = _by_id(before), _by_id(after)
    found: list[FeatureChange] = []
    for number in sorted({*one, *other}, key=lambda value: (isinstance(value, str), value)):
        first, second = one.get(number, ()), other.get(number, ())
        if first == second or sorted(map(repr, first)) == sorted(map(repr, second)):
            continue
        if first and second:
            found.append(FeatureChange(layer, number, "changed", _what(first, second), first, second))
        else:
            found.append(FeatureChange(layer, number, "removed" if first else "added", (), first, second))
    return found


def _by_id(features: Sequence[DecodedFeature]) -> dict[int | str, tuple[DecodedFeature, ...]]:
    found: dict[int | str, tuple[DecodedFeature, ...]] = {}
    for position, feature in enumerate(features):
        number = feature_id(feature)
        if number is None:
            number = f"number {position + 1} in the layer, without an id"
        found[number] = (*found.get(number, ()), feature)
    return found


def feature_id(feature: DecodedFeature) -> int | str | None:
    """A feature's id as the map has it; None where it has none."""
    if feature.id is not None:
        return feature.id
    names = [name for name in feature.properties if name.endswith(ID_PROPERTY) and not name.strip("_id")]
    return str(feature.properties[max(names, key=len)]) if names else None


def _what(before: Sequence[DecodedFeature], after: Sequence[DecodedFeature]) -> tuple[str, ...]:
    what: list[str] = []
    if [(one.geometry_type, one.paths) for one in before] != [(one.geometry_type, one.paths) for one in after]:
        what.append("geometry")
    # Typed: 1, 1.0 and true are three values.
    one, other = (
        {(name, type(value).__name__, repr(value)) for feature in side for name, value in feature.properties.items()}
        for side in (before, after)
    )
    return (*what, *sorted({name for name, _, _ in one ^ other}))
