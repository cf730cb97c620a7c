"""The other side of a shadow diff: encodes tiles in an interpreter of its own, with its own libraries and layers.

Run as `python -m geo_assets.services.shadow_worker`. It says hello with its versions, then answers each batch of
features with the bytes of its tiles. Messages are MessagePack behind their length (8 bytes, big endian) on standard
input and output; it opens no store and no ledger.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib import metadata
from typing import IO, Any

import msgspec

MOST_BYTES = 2_000_000_000
"""Of one message: a batch of 128 tiles has some tens of MB."""


def write_message(stream: IO[bytes], message: Any) -> None:
    """Write one message and flush."""
    data = msgspec.msgpack.encode(message)
    stream.write(len(data).to_bytes(8, "big"))
    stream.write(data)
    stream.flush()


def read_message(stream: IO[bytes]) -> Any:
    """The next message, or None at the end.

    Raises:
        ValueError: It breaks off, or is no message.
    """
    head = stream.read(8)
    if not head:
        return None
    size = int.from_bytes(head, "big")
    if len(head) < 8 or size > MOST_BYTES:
        raise ValueError("what came is no message of a shadow worker")
    data = stream.read(size)
    if len(data) != size:
        raise ValueError(f"the message breaks off after {len(data)} of {size} bytes")
    return msgspec.msgpack.decode(data)


def hello(layers_value: dict[str, Any]) -> dict[str, Any]:
    """What this interpreter builds with: recipe and versions."""
    import platform

    import numpy as np
    import pyproj
    import shapely

    from geo_assets import configuration
    from geo_assets.services.recipe import current_recipe
    from geo_assets.tiles.encode import ENCODER_VERSION

    layers = configuration.parse_layers(layers_value, "layers")
    return {
        "recipe": current_recipe(layers),
        "libraries": {
            "geo_assets": metadata.version("geo-assets") if _installed("geo-assets") else "source",
            "encoder": ENCODER_VERSION,
            "geos": ".".join(map(str, shapely.geos_version)),
            "proj": pyproj.proj_version_str,
            "shapely": shapely.__version__,
            "pyproj": pyproj.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
    }


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def encode(batch: dict[str, Any], layers_value: dict[str, Any]) -> list[dict[str, Any]]:
    """Tiles of a batch of features: bytes, features, what was left out, and faults of the rules."""
    import numpy as np

    from geo_assets import configuration
    from geo_assets.tiles.encode import TileFeatures, encode_tiles
    from geo_assets.tiles.rules import rules_before_publishing
    from geo_assets.tiles.tile import Tile

    layers = configuration.parse_layers(layers_value, "layers")
    tiles = [Tile(*place) for place in batch["tiles"]]
    features = TileFeatures(
        source=batch["source"],
        feature_id=batch["feature_id"],
        layer=batch["layer"],
        geometry=batch["geometry"],
        properties=batch["properties"],
        tiles=tiles,
        pair_tile=np.frombuffer(batch["pair_tile"], np.int64),
        pair_row=np.frombuffer(batch["pair_row"], np.int64),
    )
    return [
        {
            "data": one.data,
            "features": one.features,
            "left_out": [f"{left.source} {left.feature_id}: {left.reason}" for left in one.left_out],
            "faults": [str(fault) for fault in rules_before_publishing(tile, one, layers)],
        }
        for tile, one in zip(tiles, encode_tiles(features, layers), strict=True)
    ]


def _messages(stream: IO[bytes]) -> Iterator[Any]:
    while (message := read_message(stream)) is not None:
        yield message


def main() -> None:
    """Answer until standard input ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # What a library prints must not end up between the messages.
    layers: dict[str, Any] = {}
    for message in _messages(sys.stdin.buffer):
        try:
            if "layers" in message:
                layers = message["layers"]
                answer: dict[str, Any] = hello(layers)
            else:
                answer = {"tiles": encode(message, layers)}
        except Exception as fault:
            answer = {"error": f"{type(fault).__name__}: {fault}"}
        write_message(answers, answer)


if __name__ == "__main__":
    main()
