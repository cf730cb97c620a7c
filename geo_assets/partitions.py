"""Which tiles are partitions of their own in the asset catalog, and to which partition every other tile belongs.

Pure: keys in, keys out. Only the catalog groups tiles so; ledger, events and clients know single tiles.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from geo_assets.tiles.tile import MAX_ZOOM, Tile

ALL = "all"

CATALOG_VALUE = "partition_zooms"
"""The ledger's named value: the partition zooms that the catalog has; absent before they were ever changed."""


class PartitionZoomsError(ValueError):
    """Text that names no partition zooms."""


class UnknownPartition(LookupError):
    """A key that is no partition under these zooms."""


@dataclass(frozen=True, slots=True)
class PartitionZooms:
    """The zooms at which a tile is a partition of its own, ascending; 0 is always one.

    A tile between two of them belongs to its ancestor at the nearest lower one.
    """

    zooms: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> PartitionZooms:
        """Partition zooms as a setting writes them: `all`, or zooms with commas between them.

        Raises:
            PartitionZoomsError: It names something else.
        """
        if text.strip().lower() == ALL:
            return cls(tuple(range(MAX_ZOOM + 1)))
        try:
            zooms = {int(part) for part in text.split(",")}
        except ValueError:
            raise PartitionZoomsError(f"partition zooms are `all` or like `0,6,10,14`, got {text[:60]!r}") from None
        wrong = sorted(zoom for zoom in zooms if not 0 <= zoom <= MAX_ZOOM)
        if wrong:
            raise PartitionZoomsError(f"partition zooms lie between 0 and {MAX_ZOOM}, got {wrong[0]}")
        return cls(tuple(sorted(zooms | {0})))

    def __str__(self) -> str:
        """As `parse` takes it; the same text for the same zooms."""
        return ALL if self.every else ",".join(map(str, self.zooms))

    def differ_from(self, recorded: str | None) -> bool:
        """Whether the catalog has others, by what `CATALOG_VALUE` says."""
        return (recorded or ALL) != str(self)

    @property
    def every(self) -> bool:
        """Whether every tile is a partition of its own."""
        return len(self.zooms) == MAX_ZOOM + 1

    def partition_of(self, key: str) -> str:
        """The partition to which a tile belongs.

        Args:
            key: Key of the tile, `zoom:quadkey`.

        Returns:
            Key of its ancestor at the nearest partition zoom at or below its own, or of itself.
        """
        if self.every:
            return key
        zoom, _, quadkey = key.partition(":")
        own = self.zooms[bisect_right(self.zooms, int(zoom)) - 1]
        return f"{own}:{quadkey[:own]}"

    def group(self, keys: Iterable[str]) -> dict[str, list[str]]:
        """Tiles by their partition, both in the order in which they come."""
        found: dict[str, list[str]] = {}
        for key in keys:
            found.setdefault(self.partition_of(key), []).append(key)
        return found

    def is_partition(self, key: str) -> bool:
        """Whether a key's zoom is a partition zoom."""
        zoom = key.partition(":")[0]
        return zoom.isdecimal() and int(zoom) in self.zooms

    def span(self, partition: str) -> tuple[range, str]:
        """What a partition holds: zooms, and the quadkey with which its tiles' begin.

        Raises:
            UnknownPartition: It is no tile, or its zoom is no partition zoom.
        """
        try:
            tile = Tile.from_key(partition)
        except ValueError as fault:
            raise UnknownPartition(str(fault)) from None
        if tile.z not in self.zooms:
            raise UnknownPartition(
                f"{partition} is no partition: GEO_ASSETS_PARTITION_ZOOMS is {self}, it belongs to "
                f"{self.partition_of(partition)}. Run geo-assets migrate-partitions where the setting was changed."
            )
        after = bisect_right(self.zooms, tile.z)
        end = self.zooms[after] if after < len(self.zooms) else MAX_ZOOM + 1
        return range(tile.z, end), partition.partition(":")[2]
