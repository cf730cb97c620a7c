"""What the audits of stored tiles read: a tile's bytes as the ledger names them."""

import gzip
import zlib
from collections.abc import Iterator

from geo_assets.checks.audit import sample
from geo_assets.ports import tile_object
from geo_assets.stack import Stack
from geo_assets.tiles.tile import Tile
from geo_assets.tiles.workkey import tile_hash

DECODED_TILES = 500
"""Tiles whose shapes an audit decodes: 10 to 20 ms each, so that it ends within seconds however large the map is."""


def decoded_sample(stack: Stack, name: str) -> Iterator[tuple[Tile, bytes]]:
    """Tiles with their uncompressed bytes, for the audit of this name; at most `DECODED_TILES` of them.

    One whose object is gone, damaged or another than the ledger names is left out: the check `integrity` finds it.
    """
    for state in sample(stack.ledger, name, DECODED_TILES):
        if state.object_name is None:
            continue
        stored = stack.tiles.get(tile_object(state.object_name))
        if stored is None:
            continue
        try:
            data = gzip.decompress(stored)
        except (OSError, EOFError, zlib.error):
            continue
        if tile_hash(data) == state.content_hash:
            yield Tile.from_key(state.key), data
