"""Readers of users' files: what `geo-assets import` takes, format by format. Nothing is stored here."""

from geo_assets.services.reading.files import open_file
from geo_assets.services.reading.mapping import LayerMapping, MappingError, load_mapping
from geo_assets.services.reading.reading import Reading, ReadingError, Unfit

__all__ = ["LayerMapping", "MappingError", "Reading", "ReadingError", "Unfit", "load_mapping", "open_file"]
